"""Strategies: how an algorithm is spread over devices and machines."""

from distribax.strategies.central_storage import CentralStorageStrategy as CentralStorageStrategy
from distribax.strategies.default import DefaultStrategy as DefaultStrategy
from distribax.strategies.extended import StrategyExtended as StrategyExtended
from distribax.strategies.mirrored import MirroredStrategy as MirroredStrategy
from distribax.strategies.one_device import OneDeviceStrategy as OneDeviceStrategy
from distribax.strategies.strategy import Strategy as Strategy
from distribax.strategies.strategy import (
    experimental_make_numpy_dataset as experimental_make_numpy_dataset,
)
