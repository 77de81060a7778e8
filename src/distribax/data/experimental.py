"""Names that tf.data.experimental also has."""

from distribax.data.csv_readers import CsvDataset as CsvDataset
from distribax.data.csv_readers import make_csv_dataset as make_csv_dataset
from distribax.data.dataset import Dataset as _Dataset
from distribax.data.dataset_functions import assert_cardinality as assert_cardinality
from distribax.data.dataset_functions import bucket_by_sequence_length as bucket_by_sequence_length
from distribax.data.dataset_functions import cardinality as cardinality
from distribax.data.dataset_functions import dense_to_ragged_batch as dense_to_ragged_batch
from distribax.data.dataset_functions import enumerate_dataset as enumerate_dataset
from distribax.data.dataset_functions import get_next_as_optional as get_next_as_optional
from distribax.data.dataset_functions import get_single_element as get_single_element
from distribax.data.dataset_functions import get_structure as get_structure
from distribax.data.dataset_functions import group_by_window as group_by_window
from distribax.data.dataset_functions import ignore_errors as ignore_errors
from distribax.data.dataset_functions import rejection_resample as rejection_resample
from distribax.data.dataset_functions import save as save
from distribax.data.dataset_functions import scan as scan
from distribax.data.dataset_functions import shuffle_and_repeat as shuffle_and_repeat
from distribax.data.dataset_functions import snapshot as snapshot
from distribax.data.dataset_functions import take_while as take_while
from distribax.data.dataset_functions import unbatch as unbatch
from distribax.data.dataset_functions import unique as unique
from distribax.data.dataset_options import AUTOTUNE as AUTOTUNE
from distribax.data.dataset_options import SHARD_HINT as SHARD_HINT
from distribax.data.dataset_options import AutoShardPolicy as AutoShardPolicy
from distribax.data.dataset_options import AutotuneAlgorithm as AutotuneAlgorithm
from distribax.data.dataset_options import AutotuneOptions as AutotuneOptions
from distribax.data.dataset_options import DistributeOptions as DistributeOptions
from distribax.data.dataset_options import ExternalStatePolicy as ExternalStatePolicy
from distribax.data.dataset_options import OptimizationOptions as OptimizationOptions
from distribax.data.dataset_options import ThreadingOptions as ThreadingOptions
from distribax.data.formats.tfrecord import TFRecordWriter as TFRecordWriter
from distribax.data.plan.plan_node import INFINITE_CARDINALITY as INFINITE_CARDINALITY
from distribax.data.plan.plan_node import UNKNOWN_CARDINALITY as UNKNOWN_CARDINALITY

Counter = _Dataset.counter
RandomDataset = _Dataset.random
choose_from_datasets = _Dataset.choose_from_datasets
load = _Dataset.load
sample_from_datasets = _Dataset.sample_from_datasets
