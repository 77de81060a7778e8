"""The shim translates what the documents print as it says it does."""

from __future__ import annotations

import doctest

import pytest

from tests.seeds import shim


def test_examples_of_the_shim() -> None:
    assert doctest.testmod(shim) == (0, 2)


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (
            "<tf.Tensor: shape=(1,), dtype=float32, numpy=array([5.], dtype=float32)>",
            "Array([5.], dtype=float32)",
        ),
        ("<tf.Tensor: shape=(), dtype=int32, numpy=1>", "Array(1, dtype=int32)"),
        ("tf.Tensor([7.], shape=(1,), dtype=float32)", "Array([7.], dtype=float32)"),
        ("<tf.Variable 'v:0' shape=()>", "<dx.Variable 'v:0' shape=()>"),
        ("/job:localhost/device:GPU:1", "/job:localhost/device:CPU:1"),
    ],
)
def test_printed_values_are_translated(printed: str, expected: str) -> None:
    assert shim.ours(printed) == expected
