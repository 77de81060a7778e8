"""Data sets: lazy pipelines with the names and the meaning of tf.data."""

from __future__ import annotations

import builtins
import functools
import glob
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self, cast

import numpy as np
from typing_extensions import override

from distribax.data import arguments as check
from distribax.data import elements
from distribax.data.element_spec import Spec
from distribax.data.formats.saved import SavedFormat, read_catalogue
from distribax.data.methods import batch_methods, element_methods, order_methods, run_methods
from distribax.data.plan import choose, order, sources
from distribax.data.plan.output_signature import parse_signature
from distribax.data.plan.plan_node import HasPlan, Node
from distribax.data.planned_dataset import PlannedDataset


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
    def from_tensor_slices(tensors: object, name: str | None = None) -> Dataset:
        """Makes a data set of the rows of arrays in memory.

        The arrays are copied, once, so that they may change afterwards. Arrays that are read-only
        (`array.flags.writeable = False`) or mapped from a file (`np.memmap`) are not.

        Args:
            tensors: An array, or a tuple or dict of arrays with the same number of rows.
            name: Accepted, without effect.

        Returns:
            The data set.

        Raises:
            ValueError: A component has no rows, or the numbers of rows differ.

        >>> list(Dataset.from_tensor_slices(([1, 2], ["a", "b"])))
        [(np.int32(1), b'a'), (np.int32(2), b'b')]
        """
        return Dataset(sources.Slices(elements.to_element(tensors)))

    @staticmethod
    def from_tensors(tensors: object, name: str | None = None) -> Dataset:
        """Makes a data set of one element; if it is a batch, it can be distributed as one.

        Args:
            tensors: The element: an array, a number or text, or a tuple or dict of them.
            name: Accepted, without effect.

        Returns:
            The data set.
        """
        return Dataset(sources.Tensors(elements.to_element(tensors)))

    @staticmethod
    def from_generator(
        generator: Callable[..., Iterable[Any]],
        output_types: object = None,
        output_shapes: object = None,
        args: tuple[Any, ...] | None = None,
        output_signature: Spec | None = None,
        name: str | None = None,
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
            name: Accepted, without effect.

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
        return Dataset(sources.GeneratorSource(make, signature, types))

    @staticmethod
    def range(
        *args: int, output_type: check.DTypeLike = np.int64, name: str | None = None
    ) -> Dataset:
        """Makes a data set of a range of integers.

        Args:
            *args: As for Python's `range`: the stop; start and stop; or start, stop and step.
            output_type: The data type of the elements.
            name: Accepted, without effect.

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
        name: str | None = None,
    ) -> Dataset:
        """Makes a data set of the names of files that match a glob pattern, or several.

        Args:
            file_pattern: The pattern or patterns.
            shuffle: Whether to shuffle the names; None means yes.
            seed: The seed of the shuffle.
            name: Accepted, without effect.

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
        dataset = Dataset(sources.FileNames(elements.to_element(names)))
        return dataset if in_order else dataset.shuffle(len(names), seed=seed)

    @staticmethod
    def zip(*args: object, datasets: object = None, name: str | None = None) -> Dataset:
        """Makes a data set of elements of several data sets, side by side; the shortest ends it.

        Args:
            *args: The data sets, or a tuple or dict of them.
            datasets: A tuple or dict of data sets, instead of `args`.
            name: Accepted, without effect.

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

    @staticmethod
    def counter(
        start: int = 0,
        step: int = 1,
        dtype: check.DTypeLike = np.int64,
        name: str | None = None,
    ) -> Dataset:
        """Makes an endless data set of `start`, `start + step`, and so on.

        Args:
            start: The first number.
            step: The difference from one to the next.
            dtype: The data type of the elements.
            name: Accepted, without effect.

        Returns:
            The data set.
        """
        first, by = check.whole_number(start, "start"), check.whole_number(step, "step")
        return Dataset(sources.Counter(first, by, check.dtype(dtype, "dtype")))

    @staticmethod
    def random(
        seed: int | None = None,
        rerandomize_each_iteration: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Makes an endless data set of random whole numbers from 0 to 2**32 - 1, as int64.

        Args:
            seed: Makes the numbers the same in every process; they are not TensorFlow's.
            rerandomize_each_iteration: Whether every iteration has other numbers; None for no.
            name: Accepted, without effect.

        Returns:
            The data set.
        """
        return Dataset(_make_random_numbers(seed, rerandomize_each_iteration))

    @staticmethod
    def choose_from_datasets(
        datasets: Sequence[Dataset],
        choice_dataset: Dataset,
        stop_on_empty_dataset: bool = True,
    ) -> Dataset:
        """Takes each element from the data set that the next element of another one names.

        Args:
            datasets: The data sets to take from, with elements of the same structure.
            choice_dataset: Their numbers, in the order in which they are asked.
            stop_on_empty_dataset: Whether to end where a chosen one has no more elements; otherwise
                the choice is passed over.

        Returns:
            The data set of the elements.

        Raises:
            TypeError: An argument is not a data set.
            ValueError: There is no data set.

        >>> numbers, choice = Dataset.range(3), Dataset.range(2).repeat(2)
        >>> [int(x) for x in Dataset.choose_from_datasets([numbers, Dataset.range(7, 9)], choice)]
        [0, 7, 1, 8]
        """
        stop = check.flag(stop_on_empty_dataset, "stop_on_empty_dataset")
        parts = choose.parse_parts(datasets)
        if not isinstance(choice_dataset, HasPlan):
            raise TypeError(f"choice_dataset={choice_dataset!r} is not a Dataset.")
        return Dataset(choose.Choose(parts, choice_dataset.plan, stop))

    @staticmethod
    def sample_from_datasets(
        datasets: Sequence[Dataset],
        weights: Sequence[float] | np.ndarray[Any, Any] | Dataset | None = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,
        rerandomize_each_iteration: bool | None = None,
    ) -> Dataset:
        """Takes each element from one of several data sets, chosen at random.

        Args:
            datasets: The data sets to take from, with elements of the same structure.
            weights: How often each is chosen, in proportion; a data set of such weights for weights
                that change with each element; None for all alike.
            seed: Makes the choice the same in every process; it is not TensorFlow's.
            stop_on_empty_dataset: Whether to end where a chosen one has no more elements.
            rerandomize_each_iteration: Whether every iteration chooses anew; None for no.

        Returns:
            The data set of the elements.

        Raises:
            TypeError: An argument is not a data set.
            ValueError: There is no data set, or the weights do not fit.
        """
        stop = check.flag(stop_on_empty_dataset, "stop_on_empty_dataset")
        parts = choose.parse_parts(datasets)
        numbers = _make_random_numbers(seed, rerandomize_each_iteration)
        if isinstance(weights, HasPlan):
            choice = choose.draw(numbers, weights.plan, len(parts))
        else:
            # One that is never drawn would never be seen to have ended.
            parts, shares = choose.drop_unweighted(parts, weights)
            choice = choose.draw(numbers, shares, len(parts))
        return Dataset(choose.Choose(parts, choice, stop))

    @staticmethod
    def load(
        path: check.Path,
        element_spec: Spec | None = None,
        compression: str | None = None,
        reader_func: Callable[[Dataset], Dataset] | None = None,
    ) -> Dataset:
        """Makes a data set of what `save` has written.

        Args:
            path: The directory.
            element_spec: Accepted; what was saved says it.
            compression: Accepted; what was saved says it.
            reader_func: Makes a data set of the data set of saved files; None reads them in turns.

        Returns:
            The data set.

        Raises:
            FileNotFoundError: Nothing was saved there.
        """
        catalogue = read_catalogue(check.path(path, "path"))
        saved = SavedFormat(catalogue.spec, catalogue.compression)

        def read(names: tuple[str, ...]) -> Dataset:
            counts, batched = catalogue.counts, catalogue.is_batched
            return Dataset(sources.FileReader(names, saved, max(1, len(names)), counts, batched))

        if reader_func is None:
            return read(catalogue.filenames)
        files = [read((name,)) for name in catalogue.filenames]
        return check.function(reader_func, "reader_func")(Dataset(sources.Items(tuple(files))))

    @override
    def derive(self, plan: Node) -> Self:
        # The steps of a reader are plain data sets.
        return cast(Self, Dataset(plan))

    # Steps that change elements.

    map = element_methods.map
    filter = element_methods.filter
    flat_map = element_methods.flat_map
    interleave = element_methods.interleave
    enumerate = element_methods.enumerate
    scan = element_methods.scan
    ignore_errors = element_methods.ignore_errors

    # Steps that put elements together.

    batch = batch_methods.batch
    padded_batch = batch_methods.padded_batch
    ragged_batch = batch_methods.ragged_batch
    unbatch = batch_methods.unbatch
    rebatch = batch_methods.rebatch
    window = batch_methods.window
    group_by_window = batch_methods.group_by_window
    bucket_by_sequence_length = batch_methods.bucket_by_sequence_length

    # Steps that choose and order elements.

    shard = order_methods.shard
    repeat = order_methods.repeat
    shuffle = order_methods.shuffle
    take = order_methods.take
    skip = order_methods.skip
    take_while = order_methods.take_while
    concatenate = order_methods.concatenate
    unique = order_methods.unique
    rejection_resample = order_methods.rejection_resample

    # Steps about how and when.

    prefetch = run_methods.prefetch
    cache = run_methods.cache
    snapshot = run_methods.snapshot
    save = run_methods.save
    with_options = run_methods.with_options
    apply = run_methods.apply
    assert_cardinality = run_methods.assert_cardinality
    reduce = run_methods.reduce
    get_single_element = run_methods.get_single_element


def _make_random_numbers(seed: int | None, again: bool | None) -> sources.RandomNumbers:
    number = None if seed is None else check.whole_number(seed, "seed")
    each = again is not None and check.flag(again, "rerandomize_each_iteration")
    return sources.RandomNumbers(number, each)
