"""Options of data sets."""

from __future__ import annotations

import pytest

import distribax as dx
from distribax.data import AutoShardPolicy, Dataset, Options, ThreadingOptions
from distribax.data.experimental import AutoShardPolicy as ExperimentalPolicy
from distribax.data.experimental import DistributeOptions
from tests.unit.data.reference import values_of


def test_options_travel_along_the_pipeline_and_the_later_counts() -> None:
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA
    options.deterministic = False
    dataset = Dataset.range(4).with_options(options).batch(2)
    assert dataset.options().experimental_distribute.auto_shard_policy is AutoShardPolicy.DATA
    later = Options(deterministic=True, dataset_name="mine")
    later.threading.private_threadpool_size = 3
    merged = dataset.with_options(later).map(abs).options()
    assert merged.experimental_distribute.auto_shard_policy is AutoShardPolicy.DATA
    assert merged.deterministic is True
    assert merged.dataset_name == "mine"
    assert merged.threading == ThreadingOptions(private_threadpool_size=3)
    assert merged != options
    both = Dataset.zip(dataset, Dataset.range(3).with_options(later)).options()
    assert both == merged
    assert values_of(dataset.with_options(later)) == [[0, 1], [2, 3]]
    streamed = Dataset.range(3).filter(lambda x: True).with_options(later).map(lambda x: x, 2)
    assert values_of(streamed.with_options(later)) == [0, 1, 2]


def test_options_are_copied_when_they_are_attached() -> None:
    options = Options()
    dataset = Dataset.range(4).with_options(options)
    options.deterministic = False
    assert dataset.options().deterministic is None
    returned = dataset.options()
    returned.experimental_distribute.num_devices = 4
    assert dataset.options().experimental_distribute.num_devices is None


def test_older_names_are_aliases() -> None:
    options = Options()
    options.experimental_threading.private_threadpool_size = 5
    options.experimental_deterministic = True
    assert options.threading.private_threadpool_size == 5
    assert options.deterministic is True
    assert ExperimentalPolicy is AutoShardPolicy
    assert "deterministic=True" in repr(options)


def test_policies_may_be_given_by_name() -> None:
    options = Options(experimental_distribute=DistributeOptions(auto_shard_policy="file"))
    assert options.experimental_distribute.auto_shard_policy is AutoShardPolicy.FILE
    options.experimental_distribute.auto_shard_policy = None
    assert options.experimental_distribute.auto_shard_policy is None


def test_unknown_and_wrong_options_are_refused() -> None:
    options = Options()
    with pytest.raises(AttributeError, match=r"no option 'foo'.*dataset_name, deterministic"):
        options.foo = 1
    with pytest.raises(AttributeError, match="no option 'foo'"):
        _ = options.foo
    with pytest.raises(AttributeError, match="auto_shard_policy, num_devices"):
        options.experimental_distribute.autoshard = 1  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"Options.deterministic=1"):
        options.deterministic = 1  # type: ignore[assignment]
    with pytest.raises(TypeError, match="num_devices=True"):
        options.experimental_distribute.num_devices = True
    with pytest.raises(ValueError, match=r"Options.worker_processes=-2 is negative"):
        options.worker_processes = -2
    with pytest.raises(TypeError, match=r"Options.threading=None"):
        options.threading = None  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"AutoShardPolicy.HINT"):
        options.experimental_distribute.auto_shard_policy = "NEVER"  # type: ignore[assignment]


def test_data_sets_are_divided_automatically_by_default() -> None:
    options = Options()
    assert options.experimental_distribute.auto_shard_policy is AutoShardPolicy.AUTO
    chosen = Options(experimental_distribute=DistributeOptions(auto_shard_policy="off"))
    # What is not set in later options does not count.
    assert chosen.merge(options).experimental_distribute.auto_shard_policy is AutoShardPolicy.OFF


def test_functions_of_data_sets_create_no_variables() -> None:
    numbers = Dataset.from_tensor_slices([1.0, 2.0])
    for dataset in (
        numbers.map(lambda x: dx.Variable(1.0) + x),
        numbers.filter(lambda x: bool(dx.Variable(1.0) < x)),
    ):
        with pytest.raises(ValueError, match=r"was created in a function of a data set.*outside"):
            list(dataset)


def test_the_older_form_of_the_policy() -> None:
    options = Options()
    assert options.experimental_distribute.auto_shard
    options.experimental_distribute.auto_shard = False  # type: ignore[misc]
    assert options.experimental_distribute.auto_shard_policy is AutoShardPolicy.OFF
    options.experimental_distribute.auto_shard = True  # type: ignore[misc]
    assert options.experimental_distribute.auto_shard_policy is AutoShardPolicy.AUTO
