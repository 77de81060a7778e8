"""Puts one global batch on the replicas of a strategy, for steps that measure no input."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import distribax as dx


def place(strategy: dx.Strategy, values: np.ndarray) -> Any:
    """Give each replica its share of `values`, on its own device; the last may have less."""
    size = -(-len(values) // strategy.num_replicas_in_sync)
    shares = [values[start : start + size] for start in range(0, len(values), size)]
    devices = jax.devices()

    def share_of(context: dx.ValueContext) -> jax.Array:
        replica = context.replica_id_in_sync_group
        return jax.device_put(shares[replica], devices[replica])

    return strategy.experimental_distribute_values_from_function(share_of)
