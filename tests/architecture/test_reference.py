"""Everything that users can call says what it takes, gives and raises."""

from __future__ import annotations

from types import FunctionType

import pytest

from tests.architecture.reference import find_gaps, public_objects


@pytest.mark.parametrize("name", sorted(public_objects()))
def test_public_names_are_documented(name: str) -> None:
    assert list(find_gaps(name, public_objects()[name])) == []


class Documented:
    """Is complete.

    Args:
        size: How large.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def grow(self, by: int) -> int:
        """Returns the size after growing.

        Args:
            by: How much to grow.

        Returns:
            The new size.

        Raises:
            ValueError: `by` is negative.
        """
        if by < 0:
            raise ValueError(by)
        return self.size + by


def no_args(size: int) -> None:
    """Does something."""


def other_args(size: int) -> None:
    """Does something.

    Args:
        length: How long.
    """


def no_returns(size: int) -> int:
    """Does something.

    Args:
        size: How large.
    """
    return size


def no_raises() -> None:
    """Does something."""
    raise ValueError


def test_a_documented_class_has_no_gap() -> None:
    assert list(find_gaps("Documented", Documented)) == []


@pytest.mark.parametrize(
    ("function", "gap"),
    [
        (no_args, "takes size but has no 'Args:'"),
        (other_args, "'Args:' does not mention size"),
        (no_returns, "returns int but has no 'Returns:'"),
        (no_raises, "raises, but has no 'Raises:'"),
        (lambda: None, "no docstring"),
    ],
)
def test_gaps_are_noticed(function: FunctionType, gap: str) -> None:
    assert list(find_gaps("f", function)) == [f"f: {gap}"]
