"""Names that tf.data.experimental also has."""

from __future__ import annotations

from distribax.data.csv_readers import CsvDataset, make_csv_dataset
from distribax.data.dataset import Dataset
from distribax.data.dataset_options import (
    AUTOTUNE,
    SHARD_HINT,
    AutoShardPolicy,
    AutotuneAlgorithm,
    AutotuneOptions,
    DistributeOptions,
    ExternalStatePolicy,
    OptimizationOptions,
    ThreadingOptions,
)
from distribax.data.formats.tfrecord import TFRecordWriter
from distribax.data.plan.plan_node import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from distribax.data.step_functions import (
    assert_cardinality,
    bucket_by_sequence_length,
    cardinality,
    dense_to_ragged_batch,
    enumerate_dataset,
    get_next_as_optional,
    get_single_element,
    get_structure,
    group_by_window,
    ignore_errors,
    rejection_resample,
    save,
    scan,
    shuffle_and_repeat,
    snapshot,
    take_while,
    unbatch,
    unique,
)

Counter = Dataset.counter
RandomDataset = Dataset.random
choose_from_datasets = Dataset.choose_from_datasets
load = Dataset.load
sample_from_datasets = Dataset.sample_from_datasets

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "SHARD_HINT",
    "UNKNOWN_CARDINALITY",
    "AutoShardPolicy",
    "AutotuneAlgorithm",
    "AutotuneOptions",
    "Counter",
    "CsvDataset",
    "DistributeOptions",
    "ExternalStatePolicy",
    "OptimizationOptions",
    "RandomDataset",
    "TFRecordWriter",
    "ThreadingOptions",
    "assert_cardinality",
    "bucket_by_sequence_length",
    "cardinality",
    "choose_from_datasets",
    "dense_to_ragged_batch",
    "enumerate_dataset",
    "get_next_as_optional",
    "get_single_element",
    "get_structure",
    "group_by_window",
    "ignore_errors",
    "load",
    "make_csv_dataset",
    "rejection_resample",
    "sample_from_datasets",
    "save",
    "scan",
    "shuffle_and_repeat",
    "snapshot",
    "take_while",
    "unbatch",
    "unique",
]
