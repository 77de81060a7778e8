"""Metrics that each replica updates for itself and that are combined when they are read."""

from distribax.training.metrics.classification import Accuracy as Accuracy
from distribax.training.metrics.classification import BinaryAccuracy as BinaryAccuracy
from distribax.training.metrics.classification import CategoricalAccuracy as CategoricalAccuracy
from distribax.training.metrics.classification import (
    SparseCategoricalAccuracy as SparseCategoricalAccuracy,
)
from distribax.training.metrics.classification import (
    SparseTopKCategoricalAccuracy as SparseTopKCategoricalAccuracy,
)
from distribax.training.metrics.classification import (
    TopKCategoricalAccuracy as TopKCategoricalAccuracy,
)
from distribax.training.metrics.confusion import AUC as AUC
from distribax.training.metrics.confusion import Precision as Precision
from distribax.training.metrics.confusion import Recall as Recall
from distribax.training.metrics.metric import Mean as Mean
from distribax.training.metrics.metric import Metric as Metric
from distribax.training.metrics.metric import Sum as Sum
from distribax.training.metrics.regression import MeanAbsoluteError as MeanAbsoluteError
from distribax.training.metrics.regression import MeanSquaredError as MeanSquaredError
from distribax.training.metrics.regression import MeanTensor as MeanTensor
from distribax.training.metrics.regression import RootMeanSquaredError as RootMeanSquaredError
