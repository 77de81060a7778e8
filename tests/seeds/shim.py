"""Stands for `tf` in the code of the documents: TensorFlow's names, distribax's objects."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

import distribax as dx
from distribax import data

tf: Any = SimpleNamespace(
    Variable=dx.Variable,
    function=dx.function,
    constant=jnp.asarray,
    identity=jnp.array,
    float32=jnp.float32,
    int32=jnp.int32,
    data=data,
    VariableSynchronization=dx.VariableSynchronization,
    VariableAggregation=dx.VariableAggregation,
    keras=SimpleNamespace(metrics=dx.metrics),
    distribute=dx,
)

_NARROW = {"int64": "int32", "float64": "float32"}
"""JAX's data types for TensorFlow's, as long as JAX is not told to use 64 bits."""


def ours(printed: str) -> str:
    """Returns what a document prints in the form that distribax prints it.

    >>> ours("<tf.Tensor: shape=(), dtype=float32, numpy=11.0>")
    'Array(11., dtype=float32)'
    >>> ours("tf.Tensor([0 1], shape=(2,), dtype=int64)")
    'Array([0, 1], dtype=int32)'
    """
    text = re.sub(
        r"<tf\.Tensor: shape=\([^)]*\), dtype=(\w+), "
        r"numpy=\s*(?:array\((.*?), dtype=\w+\)|([^>]*))>",
        lambda found: _array(found[2] or re.sub(r"\.0$", ".", found[3]), found[1]),
        printed,
        flags=re.DOTALL,
    )
    text = re.sub(
        r"tf\.Tensor\((\[[^]]*\]), shape=\([^)]*\), dtype=(\w+)\)",
        lambda found: _array(found[1].replace(" ", ", "), found[2]),
        text,
    )
    return text.replace("<tf.Variable", "<dx.Variable").replace("GPU", "CPU")


def _array(values: str, dtype: str) -> str:
    return f"Array({values}, dtype={_NARROW.get(dtype, dtype)})"


def contents(value: Any) -> list[Any]:
    """Returns the values of all replicas as Python numbers and lists."""
    assert isinstance(value, dx.DistributedValues)
    return [np.asarray(piece).tolist() for piece in value.values]
