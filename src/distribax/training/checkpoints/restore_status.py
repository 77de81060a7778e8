"""What a restore has done, and what is still to be done when more variables are created."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from typing_extensions import override


class RestoreStatus:
    """Tells what `Checkpoint.restore` has matched; TensorFlow's checks, under their names.

    Args:
        match: Returns the names that only the file has by now, and those that only the objects
            have.
        forget: Gives up the values that nothing has been created for.
        num_matched: How many values were restored at once.
        path: The checkpoint.
    """

    def __init__(
        self,
        match: Callable[[], tuple[list[str], list[str]]],
        forget: Callable[[], None],
        num_matched: int,
        path: str,
    ) -> None:
        self._match = match
        self._forget = forget
        self._num_matched = num_matched
        self._path = path

    def assert_consumed(self) -> Self:
        """Checks that everything in the checkpoint and in the program belongs together.

        Returns:
            The status itself.

        Raises:
            AssertionError: Something is only in the checkpoint, or only in the program.
        """
        only_saved, only_here = self._match()
        if only_saved or only_here:
            raise AssertionError(
                f"restore: the checkpoint {self._path!r} does not fit. Only in the checkpoint: "
                f"{_list_some(only_saved)}; only in the program: {_list_some(only_here)}."
            )
        return self

    def assert_existing_objects_matched(self) -> Self:
        """Checks that everything that exists in the program was in the checkpoint.

        Returns:
            The status itself.

        Raises:
            AssertionError: Something was not.
        """
        _, only_here = self._match()
        if only_here:
            raise AssertionError(
                f"restore: the checkpoint {self._path!r} has no values for {_list_some(only_here)}."
            )
        return self

    def assert_nontrivial_match(self) -> Self:
        """Checks that the checkpoint and the program have anything in common.

        Returns:
            The status itself.

        Raises:
            AssertionError: They have nothing in common.
        """
        only_saved, only_here = self._match()
        if not self._num_matched and only_saved:
            raise AssertionError(
                f"restore: nothing in the program is in the checkpoint {self._path!r}. In the "
                f"checkpoint: {_list_some(only_saved)}; in the program: {_list_some(only_here)}."
            )
        return self

    def expect_partial(self) -> Self:
        """Says that the checkpoint may have more than the program needs.

        Returns:
            The status itself.
        """
        self._forget()
        return self

    def initialize_or_restore(self, session: object = None) -> None:
        """Does nothing: values are restored at once.

        Args:
            session: Accepted as in TensorFlow 1.
        """

    def run_restore_ops(self, session: object = None) -> None:
        """Does nothing: values are restored at once.

        Args:
            session: Accepted as in TensorFlow 1.
        """


class NothingRestored(RestoreStatus):
    """The status of `restore(None)`, as on the first run of a program."""

    def __init__(self) -> None:
        super().__init__(lambda: ([], []), lambda: None, 0, "None")

    @override
    def assert_consumed(self) -> Self:
        """Raises, because nothing was restored.

        Raises:
            AssertionError: Always.
        """
        raise AssertionError("restore: no checkpoint was given (None), so nothing was restored.")

    assert_existing_objects_matched = assert_consumed
    assert_nontrivial_match = assert_consumed


def _list_some(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{names[:8]}{more}"
