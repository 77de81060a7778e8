"""Keras models, losses, metrics and optimizers under strategies.

You need not call anything: it is loaded by the first `strategy.scope()` of a program that has
imported Keras.
"""

from distribax.integrations.keras import adapter as adapter
from distribax.integrations.keras.backup import BackupAndRestore as BackupAndRestore
from distribax.integrations.keras.dataset_creator import DatasetCreator as DatasetCreator
from distribax.integrations.keras.normalization import (
    SyncBatchNormalization as SyncBatchNormalization,
)
