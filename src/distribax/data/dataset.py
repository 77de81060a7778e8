"""Data sets: lazy pipelines with the names and the meaning of tf.data."""

from __future__ import annotations

import builtins
import copy
import functools
import glob
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from distribax.data import arguments as check
from distribax.data import elements as nests
from distribax.data.dataset_options import AUTOTUNE, SHARD_HINT, Options
from distribax.data.element_spec import Spec
from distribax.data.plan import order, sources, transforms
from distribax.data.plan.output_signature import parse_signature
from distribax.data.plan.padding import parse_padded_shapes
from distribax.data.plan.plan_node import UNKNOWN_CARDINALITY
from distribax.data.planned_dataset import PlannedDataset

_T = TypeVar("_T")
# tf.data takes the number of cores; a fixed number gives the same order on every machine.
_DEFAULT_CYCLE_LENGTH = 4


class Dataset(PlannedDataset):
    """A lazy pipeline of elements: nests of NumPy arrays, scalars and bytes.

    >>> dataset = Dataset.range(5).map(lambda x: x * x).batch(2)
    >>> [batch.tolist() for batch in dataset]
    [[0, 1], [4, 9], [16]]

    Every step returns a new data set; nothing is read before iteration. A data set can be iterated
    many times, and its iterators can be saved in the middle (see `DatasetIterator`).

    Args:
        plan: The logical plan. Users make data sets with `from_tensor_slices` and its siblings.
    """

    # Sources.

    @staticmethod
    def from_tensor_slices(tensors: object) -> Dataset:
        """Makes a data set of the rows of arrays in memory.

        The arrays are copied, once, so that they may change afterwards. Arrays that are read-only
        (`array.flags.writeable = False`) or mapped from a file (`np.memmap`) are not.

        Args:
            tensors: An array, or a tuple or dict of arrays with the same number of rows.

        Returns:
            The data set.

        Raises:
            ValueError: A component has no rows, or the numbers of rows differ.

        >>> list(Dataset.from_tensor_slices(([1, 2], ["a", "b"])))
        [(np.int32(1), b'a'), (np.int32(2), b'b')]
        """
        return Dataset(sources.Slices(nests.to_element(tensors)))

    @staticmethod
    def from_tensors(tensors: object) -> Dataset:
        """Makes a data set of one element.

        Args:
            tensors: The element: an array, a number or text, or a tuple or dict of them.

        Returns:
            The data set.
        """
        return Dataset(sources.Tensors(nests.to_element(tensors)))

    @staticmethod
    def from_generator(
        generator: Callable[..., Iterable[Any]],
        output_types: object = None,
        output_shapes: object = None,
        args: tuple[Any, ...] | None = None,
        output_signature: Spec | None = None,
    ) -> Dataset:
        """Makes a data set of what a function yields; it is called again for each iteration.

        To resume an iterator, the generator is started again and read up to the saved place.

        Args:
            generator: Returns something to iterate over, usually because it has a `yield`.
            output_types: The data types of the elements, in their structure.
            output_shapes: Their shapes; needs `output_types`.
            args: The arguments of `generator`.
            output_signature: A nest of `TensorSpec`s, instead of types and shapes. Without any of
                them the first element tells.

        Returns:
            The data set.

        Raises:
            TypeError: `generator` is not callable, or another argument has the wrong type.
            ValueError: Types or shapes are given twice, or shapes without types.
        """
        check.function(generator, "generator")
        if args is not None and not isinstance(args, (tuple, list)):
            raise TypeError(f"args={args!r} is not a tuple of arguments for the generator.")
        signature, types = parse_signature(output_signature, output_types, output_shapes)
        make = functools.partial(generator, *(args or ()))
        return Dataset(sources.Generator(make, signature, types))

    @staticmethod
    def range(*args: int, output_type: check.DTypeLike = np.int64) -> Dataset:
        """Makes a data set of a range of integers.

        Args:
            *args: As for Python's `range`: the stop; start and stop; or start, stop and step.
            output_type: The data type of the elements.

        Returns:
            The data set.

        Raises:
            TypeError: An argument is not a whole number, or there are too many or none.
            ValueError: The step is 0.
        """
        bounds = [check.whole_number(value, "range") for value in args]
        if not 1 <= len(bounds) <= 3:
            raise TypeError(f"range takes 1 to 3 whole numbers, but {len(bounds)} were given.")
        if len(bounds) == 3 and bounds[2] == 0:
            raise ValueError("range was given a step of 0. Expected a positive or negative step.")
        return Dataset(
            sources.Range(builtins.range(*bounds), check.dtype(output_type, "output_type"))
        )

    @staticmethod
    def list_files(
        file_pattern: check.Path | Iterable[check.Path],
        shuffle: bool | None = None,
        seed: int | None = None,
    ) -> Dataset:
        """Makes a data set of the names of files that match a glob pattern, or several.

        Args:
            file_pattern: The pattern or patterns.
            shuffle: Whether to shuffle the names; None means yes.
            seed: The seed of the shuffle.

        Returns:
            A data set of names, as bytes.

        Raises:
            ValueError: No file matches.
        """
        patterns = check.paths(file_pattern, "file_pattern")
        in_order = shuffle is not None and not check.flag(shuffle, "shuffle")
        names = sorted({name for pattern in patterns for name in glob.glob(pattern)})
        if not names:
            raise ValueError(f"file_pattern={file_pattern!r} matches no file.")
        dataset = Dataset(sources.FileNames(nests.to_element(names)))
        return dataset if in_order else dataset.shuffle(len(names), seed=seed)

    @staticmethod
    def zip(*args: object, datasets: object = None) -> Dataset:
        """Makes a data set of elements of several data sets, side by side; the shortest ends it.

        Args:
            *args: The data sets, or a tuple or dict of them.
            datasets: A tuple or dict of data sets, instead of `args`.

        Returns:
            A data set whose elements have the structure of the arguments.

        Raises:
            TypeError: An argument is not a data set, or both ways were used.
            ValueError: There is no data set.

        >>> list(Dataset.zip(Dataset.range(2), Dataset.range(5, 9)))
        [(np.int64(0), np.int64(5)), (np.int64(1), np.int64(6))]
        """
        if args and datasets is not None:
            raise TypeError("zip was given data sets both as arguments and as datasets=. Keep one.")
        nest = datasets if datasets is not None else (args[0] if len(args) == 1 else args)
        return Dataset(order.zip_plans(tuple(nest) if isinstance(nest, list) else nest))

    # Steps that change elements.

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """Puts every element through a function.

        Args:
            map_func: The function. A tuple is passed as several arguments.
            num_parallel_calls: How many threads run it ahead of use, which helps functions that
                release Python's lock (NumPy, decoders, files); None for no threads.
            deterministic: Accepted; the order of the elements is always kept.

        Returns:
            The data set of what the function returns.
        """
        check.function(map_func, "map_func")
        threads = check.num_threads(num_parallel_calls, "num_parallel_calls")
        return Dataset(transforms.Map(self._plan, map_func, threads))

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """Keeps the elements for which a function returns True.

        Args:
            predicate: The function. A tuple is passed as several arguments.

        Returns:
            The data set of the elements that are kept.
        """
        return Dataset(transforms.Filter(self._plan, check.function(predicate, "predicate")))

    def flat_map(self, map_func: Callable[..., Dataset]) -> Dataset:
        """Makes a data set of every element and gives their elements, one after the other.

        Args:
            map_func: Returns the data set of an element.

        Returns:
            The data set of their elements.
        """
        function = check.function(map_func, "map_func")
        return Dataset(order.Interleave(self._plan, function, step="flat_map"))

    def interleave(
        self,
        map_func: Callable[..., Dataset],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """Makes a data set of every element and gives their elements in turns.

        Args:
            map_func: Returns the data set of an element.
            cycle_length: How many of them are open at a time; None for 4.
            block_length: How many elements come from each in turn; None for 1.
            num_parallel_calls: How many of them are read ahead of use, in threads.
            deterministic: Accepted; the order of the elements is always the same.

        Returns:
            The data set of their elements.
        """
        cycle = _DEFAULT_CYCLE_LENGTH if cycle_length in (None, AUTOTUNE) else cycle_length
        node = order.Interleave(
            self._plan,
            check.function(map_func, "map_func"),
            check.positive(cycle, "cycle_length"),
            check.positive(1 if block_length is None else block_length, "block_length"),
            check.num_threads(num_parallel_calls, "num_parallel_calls"),
        )
        return Dataset(node)

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """Stacks consecutive elements into batches.

        Args:
            batch_size: How many elements make a batch.
            drop_remainder: Whether a smaller last batch is left out.
            num_parallel_calls: Accepted; batches are made in the thread that reads them.
            deterministic: Accepted; the order of the elements is always kept.

        Returns:
            The data set of batches.
        """
        size = check.positive(batch_size, "batch_size")
        return Dataset(
            transforms.Batch(self._plan, size, check.flag(drop_remainder, "drop_remainder"))
        )

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: object = None,
        padding_values: object = None,
        drop_remainder: bool = False,
    ) -> Dataset:
        """Stacks elements of different shapes, padded to one shape.

        Args:
            batch_size: How many elements make a batch.
            padded_shapes: The shape of each component, in the structure of the elements; None, for
                all or for one dimension, takes the largest size in the batch.
            padding_values: What to pad with, one value or one for each component; None for zeros
                and empty text.
            drop_remainder: Whether a smaller last batch is left out.

        Returns:
            The data set of batches.

        >>> ragged = Dataset.range(1, 4).map(lambda n: np.full(n, n))
        >>> [batch.tolist() for batch in ragged.padded_batch(3)]
        [[[1, 0, 0], [2, 2, 0], [3, 3, 3]]]
        """
        size = check.positive(batch_size, "batch_size")
        shapes = None if padded_shapes is None else parse_padded_shapes(padded_shapes)
        node = transforms.PaddedBatch(
            self._plan, size, check.flag(drop_remainder, "drop_remainder"), shapes, padding_values
        )
        return Dataset(node)

    def unbatch(self) -> Dataset:
        """Returns the data set of the rows of batches, one by one."""
        return Dataset(transforms.Unbatch(self._plan))

    def enumerate(self, start: int = 0) -> Dataset:
        """Pairs every element with its number.

        Args:
            start: The number of the first element.

        Returns:
            The data set of pairs.
        """
        return Dataset(transforms.Enumerate(self._plan, check.whole_number(start, "start")))

    # Steps that choose and order elements.

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Keeps every `num_shards`-th element, from number `index` on.

        Args:
            num_shards: How many shards there are. `shard(SHARD_HINT, SHARD_HINT)` leaves both
                numbers to AutoShardPolicy.HINT.
            index: Which of them to keep.

        Returns:
            The shard.

        Raises:
            ValueError: `num_shards` is less than 1, or there is no shard `index`.
        """
        count = check.whole_number(num_shards, "num_shards")
        number = check.whole_number(index, "index")
        if count != SHARD_HINT:
            check.positive(count, "num_shards")
            if not 0 <= number < count:
                raise ValueError(f"index={number} is outside 0 to {count - 1} (num_shards - 1).")
        return Dataset(order.Shard(self._plan, count, number))

    def repeat(self, count: int | None = None) -> Dataset:
        """Repeats the data set.

        Args:
            count: How many times it is iterated in all; None or -1 for endlessly.

        Returns:
            The repeated data set.
        """
        number = None if count is None else check.whole_number(count, "count")
        forever = number is None or number < 0
        return Dataset(order.Repeat(self._plan, None if forever else number))

    def shuffle(
        self,
        buffer_size: int,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = True,
    ) -> Dataset:
        """Gives elements in a random order, drawn from a buffer.

        Args:
            buffer_size: How many elements the buffer holds. One as large as the data set (or
                UNKNOWN_CARDINALITY) shuffles it perfectly.
            seed: Makes the order the same in every process.
            reshuffle_each_iteration: Whether every iteration and repetition has another order.

        Returns:
            The shuffled data set.

        Raises:
            ValueError: `buffer_size` is less than 1.
        """
        size: int | None = check.whole_number(buffer_size, "buffer_size")
        if size == UNKNOWN_CARDINALITY:
            size = None
        elif size is not None and size < 1:
            raise ValueError(
                f"buffer_size={size} is too small. Expected at least 1, or UNKNOWN_CARDINALITY for "
                "a buffer of all elements."
            )
        number = None if seed is None else check.whole_number(seed, "seed")
        again = reshuffle_each_iteration
        again = again is None or check.flag(again, "reshuffle_each_iteration")
        return Dataset(order.Shuffle(self._plan, size, number, again))

    def take(self, count: int) -> Dataset:
        """Keeps the first elements.

        Args:
            count: How many; -1 for all.

        Returns:
            The shorter data set.
        """
        number = check.whole_number(count, "count")
        return self if number < 0 else Dataset(order.Take(self._plan, number))

    def skip(self, count: int) -> Dataset:
        """Leaves out the first elements.

        Args:
            count: How many; -1 for all.

        Returns:
            The shorter data set.
        """
        number = check.whole_number(count, "count")
        if number < 0:
            return Dataset(order.Take(self._plan, 0))
        return Dataset(order.Skip(self._plan, number))

    def concatenate(self, dataset: Dataset) -> Dataset:
        """Gives the elements of another data set after those of this one.

        Args:
            dataset: The other one, with elements of the same structure.

        Returns:
            The longer data set.

        Raises:
            TypeError: `dataset` is not a `Dataset`.
        """
        if not isinstance(dataset, Dataset):
            raise TypeError(
                f"dataset={dataset!r} of type {type(dataset).__name__} is not a Dataset. Make one "
                "of it first, for example with Dataset.from_tensor_slices."
            )
        return Dataset(order.Concatenate((self._plan, dataset.plan)))

    # Steps about how and when.

    def prefetch(self, buffer_size: int | None) -> Dataset:
        """Makes elements ahead of use in a background thread.

        Args:
            buffer_size: How many elements; 0 for none, None or AUTOTUNE to let the library choose.

        Returns:
            The data set, read ahead.
        """
        size = check.buffer_size(buffer_size, "buffer_size")
        return Dataset(transforms.Prefetch(self._plan, size))

    def cache(self, filename: str = "") -> Dataset:
        """Keeps the elements of the first complete iteration, for later ones to read.

        Args:
            filename: A file to keep them in; "" keeps them in memory. Later processes read the file
                too: delete it when the pipeline before it changes, and use only files that you
                trust (it holds pickles).

        Returns:
            The cached data set.
        """
        return Dataset(transforms.Cache(self._plan, check.path(filename, "filename")))

    def with_options(self, options: Options) -> Dataset:
        """Attaches options; if an option was set before, the later setting counts.

        Args:
            options: The options.

        Returns:
            The data set with them.

        Raises:
            TypeError: `options` is not `dx.data.Options`.
        """
        if not isinstance(options, Options):
            raise TypeError(
                f"options={options!r} of type {type(options).__name__} is not dx.data.Options."
            )
        return Dataset(transforms.WithOptions(self._plan, copy.deepcopy(options)))

    def apply(self, transformation_func: Callable[[Dataset], _T]) -> _T:
        """Returns what a function makes of this data set.

        Args:
            transformation_func: The function.

        Returns:
            Its result, usually another data set.
        """
        return check.function(transformation_func, "transformation_func")(self)
