"""The forms of parameters and optimizers check themselves."""

from __future__ import annotations

from typing import Any

import pytest

from distribax.parameter_server import OptimizerSpec, ParameterSpec

GOOD = {"uid": "u", "name": "n", "shape": (2, 3), "dtype": "bfloat16", "server": 0}


def test_a_spec_knows_its_size() -> None:
    assert ParameterSpec(**GOOD).nbytes == 12  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"uid": ""}, "uid of parameter 'n' is empty"),
        ({"shape": (2, -1)}, r"shape of parameter 'n' is \(2, -1\)"),
        ({"dtype": "int31"}, "dtype 'int31' is not"),
        ({"dtype": "object"}, "dtype 'object' cannot be stored"),
        ({"dtype": "U"}, "dtype 'U' cannot be stored"),
        ({"server": -1}, "server of parameter 'n' is -1"),
    ],
)
def test_wrong_parameters_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParameterSpec(**(GOOD | wrong))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"targets": ()}, "targets of optimizer 'o' is empty"),
        ({"rounds": 0}, "rounds of optimizer 'o' is 0"),
        ({"round_timeout": 0.0}, "round_timeout of optimizer 'o' is 0.0"),
    ],
)
def test_wrong_optimizers_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerSpec(**({"uid": "o", "transformation": b"", "targets": ("u",)} | wrong))
