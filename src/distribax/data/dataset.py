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
from distribax.data.execution import runner
from distribax.data.iterator import DatasetIterator, RunCounter
from distribax.data.plan import order, sources, transforms
from distribax.data.plan.output_signature import parse_signature
from distribax.data.plan.padding import parse_padded_shapes
from distribax.data.plan.plan_node import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Node
from distribax.execution import require_host

_T = TypeVar("_T")

# tf.data takes the number of cores; a fixed number gives the same order on every machine.
_DEFAULT_CYCLE_LENGTH = 4


class Dataset:
    """A lazy pipeline of elements: nests of NumPy arrays, scalars and bytes.

    >>> dataset = Dataset.range(5).map(lambda x: x * x).batch(2)
    >>> [batch.tolist() for batch in dataset]
    [[0, 1], [4, 9], [16]]

    Every step returns a new data set; nothing is read before iteration. A data set can be iterated
    many times, and its iterators can be saved in the middle (see `DatasetIterator`).
    """

    def __init__(self, plan: Node) -> None:
        self._plan = plan
        self._runs = RunCounter()

    @property
    def plan(self) -> Node:
        """The logical plan, for rewrites and inspection."""
        return self._plan

    # Sources.

    @staticmethod
    def from_tensor_slices(tensors: Any) -> Dataset:
        """Makes a data set of the rows of arrays in memory, which must not change afterwards.

        Rows are not copied, but for large ones that devices could not use as they are: then the
        array is copied once, up to 256 MB.

        >>> list(Dataset.from_tensor_slices(([1, 2], ["a", "b"])))
        [(np.int32(1), b'a'), (np.int32(2), b'b')]
        """
        arrays = nests.to_element(tensors)
        sizes: set[int] = set()
        if not nests.leaves(arrays):
            raise ValueError(f"tensors={tensors!r} has no component. Expected at least one array.")
        for leaf in nests.leaves(arrays):
            if np.ndim(leaf) == 0:
                raise ValueError(
                    f"tensors has a component without rows: {nests.describe(arrays)}. Every "
                    "component needs at least one dimension; for a single element use from_tensors."
                )
            sizes.add(len(leaf))
        if len(sizes) != 1:
            raise ValueError(
                f"tensors has components with different numbers of rows: {nests.describe(arrays)}. "
                "They must agree in their first dimension."
            )
        return Dataset(sources.Slices(arrays))

    @staticmethod
    def from_tensors(tensors: Any) -> Dataset:
        """Makes a data set of one element."""
        return Dataset(sources.Tensors(nests.to_element(tensors)))

    @staticmethod
    def from_generator(
        generator: Callable[..., Iterable[Any]],
        output_types: Any = None,
        output_shapes: Any = None,
        args: tuple[Any, ...] | None = None,
        output_signature: Any = None,
    ) -> Dataset:
        """Makes a data set of what a function yields; it is called anew for each iteration.

        `output_signature` is a nest of `TensorSpec`s; without it the first element tells. To resume
        an iterator, the generator is started again and read up to the saved place.
        """
        check.function(generator, "generator")
        if args is not None and not isinstance(args, (tuple, list)):
            raise TypeError(f"args={args!r} is not a tuple of arguments for the generator.")
        signature, types = parse_signature(output_signature, output_types, output_shapes)
        make = functools.partial(generator, *(args or ()))
        return Dataset(sources.Generator(make, signature, types))

    @staticmethod
    def range(*args: int, output_type: Any = np.int64) -> Dataset:
        """Makes a data set of a range of integers, with the arguments of Python's range."""
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
        file_pattern: Any, shuffle: bool | None = None, seed: int | None = None
    ) -> Dataset:
        """Makes a data set of the names of files that match a glob pattern, or several.

        The names are shuffled unless `shuffle` is False.
        """
        patterns = check.paths(file_pattern, "file_pattern")
        in_order = shuffle is not None and not check.flag(shuffle, "shuffle")
        names = sorted({name for pattern in patterns for name in glob.glob(pattern)})
        if not names:
            raise ValueError(f"file_pattern={file_pattern!r} matches no file.")
        dataset = Dataset(sources.FileNames(nests.to_element(names)))
        return dataset if in_order else dataset.shuffle(len(names), seed=seed)

    @staticmethod
    def zip(*args: Any, datasets: Any = None) -> Dataset:
        """Makes a data set of elements of several data sets, side by side; the shortest ends it.

        >>> list(Dataset.zip(Dataset.range(2), Dataset.range(5, 9)))
        [(np.int64(0), np.int64(5)), (np.int64(1), np.int64(6))]
        """
        if args and datasets is not None:
            raise TypeError("zip was given data sets both as arguments and as datasets=. Keep one.")
        nest = datasets if datasets is not None else (args[0] if len(args) == 1 else args)
        if isinstance(nest, list):
            nest = tuple(nest)
        parts = nests.leaves(nest)
        for part in parts:
            if not isinstance(part, Dataset):
                raise TypeError(
                    f"zip was given {part!r} of type {type(part).__name__}. Expected Datasets, or "
                    "a tuple or dict of them."
                )
        if not parts:
            raise ValueError("zip was given no data set. Expected at least one.")

        def build(values: list[Any]) -> Any:
            given = iter(values)
            return nests.map_leaves(lambda _: next(given), nest)

        return Dataset(order.Zip(tuple(part.plan for part in parts), build))

    # Steps that change elements.

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """Puts every element through a function; a tuple becomes its arguments.

        With `num_parallel_calls` that many threads run ahead, which helps functions that release
        Python's lock (NumPy, decoders, files). The order of the elements is always kept.
        """
        check.function(map_func, "map_func")
        threads = check.num_threads(num_parallel_calls, "num_parallel_calls")
        return Dataset(transforms.Map(self._plan, map_func, threads))

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """Keeps the elements for which `predicate` returns True."""
        return Dataset(transforms.Filter(self._plan, check.function(predicate, "predicate")))

    def flat_map(self, map_func: Callable[..., Dataset]) -> Dataset:
        """Makes a data set of every element and gives their elements, one after the other."""
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

        `cycle_length` of them are open at a time (4 if not given), and `block_length` elements come
        from each in turn. A number of `num_parallel_calls` reads that many of them ahead.
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
        """Stacks `batch_size` elements into one; the last batch may be smaller or left out."""
        size = check.positive(batch_size, "batch_size")
        return Dataset(
            transforms.Batch(self._plan, size, check.flag(drop_remainder, "drop_remainder"))
        )

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,
    ) -> Dataset:
        """Stacks elements of different shapes, padded to the largest or to `padded_shapes`.

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
        """Gives the rows of batches one by one."""
        return Dataset(transforms.Unbatch(self._plan))

    def enumerate(self, start: int = 0) -> Dataset:
        """Pairs every element with its number."""
        return Dataset(transforms.Enumerate(self._plan, check.whole_number(start, "start")))

    # Steps that choose and order elements.

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Keeps every `num_shards`-th element, from number `index` on.

        `shard(SHARD_HINT, SHARD_HINT)` leaves the numbers to AutoShardPolicy.HINT.
        """
        count = check.whole_number(num_shards, "num_shards")
        number = check.whole_number(index, "index")
        if count != SHARD_HINT:
            check.positive(count, "num_shards")
            if not 0 <= number < count:
                raise ValueError(f"index={number} is outside 0 to {count - 1} (num_shards - 1).")
        return Dataset(order.Shard(self._plan, count, number))

    def repeat(self, count: int | None = None) -> Dataset:
        """Repeats the data set `count` times; without a number, or with -1, for ever."""
        number = None if count is None else check.whole_number(count, "count")
        forever = number is None or number < 0
        return Dataset(order.Repeat(self._plan, None if forever else number))

    def shuffle(
        self,
        buffer_size: int,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = True,
    ) -> Dataset:
        """Gives elements in a random order, drawn from a buffer of `buffer_size` elements.

        A buffer as large as the data set (or UNKNOWN_CARDINALITY) shuffles it perfectly. With
        `seed` the orders are the same in every process; every iteration and repetition has another
        order, unless `reshuffle_each_iteration` is False.
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
        """Gives the first `count` elements; -1 gives all."""
        number = check.whole_number(count, "count")
        return self if number < 0 else Dataset(order.Take(self._plan, number))

    def skip(self, count: int) -> Dataset:
        """Leaves out the first `count` elements; -1 leaves out all."""
        number = check.whole_number(count, "count")
        if number < 0:
            return Dataset(order.Take(self._plan, 0))
        return Dataset(order.Skip(self._plan, number))

    def concatenate(self, dataset: Dataset) -> Dataset:
        """Gives the elements of another data set after those of this one."""
        if not isinstance(dataset, Dataset):
            raise TypeError(
                f"dataset={dataset!r} of type {type(dataset).__name__} is not a Dataset. Make one "
                "of it first, for example with Dataset.from_tensor_slices."
            )
        return Dataset(order.Concatenate((self._plan, dataset.plan)))

    # Steps about how and when.

    def prefetch(self, buffer_size: int | None) -> Dataset:
        """Makes elements ahead of use in a background thread, up to `buffer_size` of them."""
        size = check.buffer_size(buffer_size, "buffer_size")
        return Dataset(transforms.Prefetch(self._plan, size))

    def cache(self, filename: str = "") -> Dataset:
        """Keeps the elements of the first complete iteration, in memory or in a file.

        Later iterations read them from there. A file is used by later processes too; delete it when
        the pipeline before it changes, and read only files that you trust (it holds pickles).
        """
        return Dataset(transforms.Cache(self._plan, check.path(filename, "filename")))

    def with_options(self, options: Options) -> Dataset:
        """Attaches options; of two settings of one option the later counts."""
        if not isinstance(options, Options):
            raise TypeError(
                f"options={options!r} of type {type(options).__name__} is not dx.data.Options."
            )
        return Dataset(transforms.WithOptions(self._plan, copy.deepcopy(options)))

    def options(self) -> Options:
        """Returns the options that were attached along the pipeline."""
        return transforms.merged_options(self._plan)

    def apply(self, transformation_func: Callable[[Dataset], _T]) -> _T:
        """Returns what a function makes of this data set."""
        return check.function(transformation_func, "transformation_func")(self)

    # Looking at it.

    def cardinality(self) -> int:
        """Returns the number of elements, or INFINITE_CARDINALITY or UNKNOWN_CARDINALITY."""
        return self._plan.cardinality()

    def __len__(self) -> int:
        count = self.cardinality()
        if count == INFINITE_CARDINALITY:
            raise TypeError("the data set is infinite, it has no length.")
        if count == UNKNOWN_CARDINALITY:
            raise TypeError("the length of the data set is unknown before it was iterated.")
        return count

    def __bool__(self) -> bool:
        # Without this, `if dataset` would ask for a length that may be unknown.
        return True

    @functools.cached_property
    def element_spec(self) -> Any:
        """The nest of TensorSpecs of an element; for functions found by running them once."""
        return self._plan.spec(runner.first_element)

    @property
    def is_batched(self) -> bool | None:
        """Whether elements are batches; None if it takes the elements to know (a generator)."""
        return self._plan.is_batched(runner.first_element)

    @property
    def static_batch_size(self) -> int | None:
        """The size of a full batch, if the pipeline says it."""
        return self._plan.static_batch_size(runner.first_element)

    def make_iterator(self) -> DatasetIterator:
        """Starts an iteration; the iterator can be saved, restored and closed."""
        return DatasetIterator(self._plan, self._runs)

    def __iter__(self) -> DatasetIterator:
        require_host("a loop over a data set")
        return self.make_iterator()

    def as_numpy_iterator(self) -> DatasetIterator:
        """Starts an iteration; elements are NumPy values in any case."""
        return iter(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._plan.label or type(self._plan).__name__.lower()}>"
