"""Input pipelines: data sets with tf.data's names, executed by Grain."""

from __future__ import annotations

from distribax.data import experimental as experimental
from distribax.data.adapt import as_dataset as as_dataset
from distribax.data.csv_readers import CsvDataset as CsvDataset
from distribax.data.csv_readers import make_csv_dataset as make_csv_dataset
from distribax.data.dataset import Dataset as Dataset
from distribax.data.dataset_options import AUTOTUNE as AUTOTUNE
from distribax.data.dataset_options import AutoShardPolicy as AutoShardPolicy
from distribax.data.dataset_options import Options as Options
from distribax.data.dataset_options import ThreadingOptions as ThreadingOptions
from distribax.data.element_spec import DatasetSpec as DatasetSpec
from distribax.data.element_spec import TensorSpec as TensorSpec
from distribax.data.formats.example import FixedLenFeature as FixedLenFeature
from distribax.data.formats.example import VarLenFeature as VarLenFeature
from distribax.data.formats.example import parse_example as parse_example
from distribax.data.formats.example import parse_single_example as parse_single_example
from distribax.data.formats.example import serialize_example as serialize_example
from distribax.data.formats.record_format import CorruptRecordError as CorruptRecordError
from distribax.data.formats.tfrecord import TFRecordWriter as TFRecordWriter
from distribax.data.iterator import DatasetIterator as DatasetIterator
from distribax.data.plan.plan_node import INFINITE_CARDINALITY as INFINITE_CARDINALITY
from distribax.data.plan.plan_node import UNKNOWN_CARDINALITY as UNKNOWN_CARDINALITY
from distribax.data.plan.plan_node import UnknownSpecError as UnknownSpecError
from distribax.data.readers import ArrayRecordDataset as ArrayRecordDataset
from distribax.data.readers import FixedLengthRecordDataset as FixedLengthRecordDataset
from distribax.data.readers import ParquetDataset as ParquetDataset
from distribax.data.readers import TextLineDataset as TextLineDataset
from distribax.data.readers import TFRecordDataset as TFRecordDataset
