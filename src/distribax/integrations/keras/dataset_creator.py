"""`DatasetCreator`: data that each worker makes for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras

from distribax.data.distributed.input_options import InputContext, InputOptions


class DatasetCreator(keras.utils.PyDataset):
    """Data for `fit`, `evaluate` and `predict` that is made by a function where it is needed.

    With `ParameterServerStrategy` every worker calls the function and draws batches from its own
    data set; `steps_per_epoch` (or `steps`) says how many batches all workers take together. Let
    the data set repeat, as workers take as many batches as they can. With other strategies the
    function is called once, in the process that calls `fit`.

    Args:
        dataset_fn: A function of a `dx.InputContext` that returns a data set of batches.
        input_options: Accepted because TensorFlow has it; without effect.

    Raises:
        TypeError: If `dataset_fn` is not callable.

    Example:
        >>> import distribax as dx, numpy as np
        >>> from distribax.integrations.keras import DatasetCreator
        >>> def dataset_fn(context):
        ...     rows = dx.data.Dataset.from_tensor_slices((np.ones((8, 2)), np.ones(8)))
        ...     return rows.shard(context.num_input_pipelines, context.input_pipeline_id).batch(4)
        >>> DatasetCreator(dataset_fn)[0][0].shape
        (4, 2)
    """

    def __init__(
        self,
        dataset_fn: Callable[[InputContext], Iterable[Any]],
        input_options: InputOptions | None = None,
    ) -> None:
        super().__init__()
        if not callable(dataset_fn):
            raise TypeError(
                f"DatasetCreator: dataset_fn={dataset_fn!r} is not callable. Pass a function that "
                "takes a dx.InputContext and returns a data set."
            )
        self.dataset_fn = dataset_fn
        self.input_options = input_options
        # Whether workers have the data, so that here an example of a batch is enough.
        self.is_elsewhere = False
        self._example: Any = None
        self._iterator: Iterator[Any] | None = None

    @property
    def num_batches(self) -> None:
        """None: `steps_per_epoch` says how many there are."""
        return None

    def __getitem__(self, index: int) -> Any:
        """Returns the next batch, whatever the index; after the last one the first one."""
        if self.is_elsewhere:
            if self._example is None:
                self._example = next(iter(self.dataset_fn(InputContext())))
            return self._example
        if self._iterator is None:
            self._iterator = iter(self.dataset_fn(InputContext()))
        batch = next(self._iterator, None)
        if batch is None:
            self._iterator = iter(self.dataset_fn(InputContext()))
            batch = next(self._iterator)
        return batch


_STEPS = {"fit": "steps_per_epoch", "evaluate": "steps", "predict": "steps"}


def check_steps(method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a method of `keras.Model`, fit for a `DatasetCreator`.

    Args:
        method: The method's name.
        arguments: Its arguments, by name.

    Raises:
        ValueError: The number of steps is missing: the data has no end that Keras could find.
    """
    needed = [("x", _STEPS.get(method, "")), ("validation_data", "validation_steps")]
    for argument, steps in needed:
        if isinstance(arguments.get(argument), DatasetCreator) and arguments.get(steps) is None:
            raise ValueError(
                f"{method}: {steps} is missing. A DatasetCreator does not say how many batches "
                f"there are; pass how many all workers take together, for example {steps}=100."
            )
    if method == "fit" and isinstance(arguments.get("x"), DatasetCreator):
        # Keras would warn that it cannot: the function decides on the order.
        return {**arguments, "shuffle": False}
    return dict(arguments)
