"""Data sets of `experimental_make_numpy_dataset`, which may be distributed without batches."""

from __future__ import annotations

from distribax.data.dataset import Dataset
from distribax.data.runtime import runner


class NumpyRows(Dataset):
    """The rows of arrays in memory.

    Args:
        plan: The logical plan.
    """

    def batch_for(self, num_replicas: int) -> Dataset:
        """Returns batches of one row for each replica, unless the rows are batched already.

        One replica takes the rows as they are.

        Args:
            num_replicas: How many replicas there are.

        Returns:
            The data set to distribute.
        """
        is_rows = self.plan.is_batched(runner.read_first_element) is False
        return self.batch(num_replicas) if is_rows and num_replicas > 1 else self


def make_numpy_rows(numpy_input: object) -> NumpyRows:
    """Returns a data set of the rows of arrays.

    Args:
        numpy_input: Arrays with the same first dimension, also nested in containers.

    Returns:
        The data set.
    """
    return NumpyRows(Dataset.from_tensor_slices(numpy_input).plan)
