"""Numbers in environment variables: read, or refused with a reason."""

from __future__ import annotations

import pytest

from distribax.cluster.environment_variables import read_seconds


def test_a_time_limit_has_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTRIBAX_SOME_SECONDS", raising=False)
    assert read_seconds("DISTRIBAX_SOME_SECONDS", 2.5) == 2.5
    monkeypatch.setenv("DISTRIBAX_SOME_SECONDS", "0.5")
    assert read_seconds("DISTRIBAX_SOME_SECONDS", 2.5) == 0.5


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "nan", "inf"])
def test_what_is_no_time_limit(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DISTRIBAX_SOME_SECONDS", text)
    with pytest.raises(ValueError, match=r"DISTRIBAX_SOME_SECONDS='.*': expected a number of sec"):
        read_seconds("DISTRIBAX_SOME_SECONDS", 2.5)
