"""Checks that the operations of a push fit the parameters that they name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from distribax.parameter_server.protocol.operations import (
    Apply,
    Array,
    Assign,
    AssignAdd,
    Gradient,
    Op,
    Scatter,
    SparseGradient,
)
from distribax.parameter_server.server.optimizer_update import Update
from distribax.parameter_server.server.stored_parameter import ParameterForm


def check_operation(
    operation: Op, form_of: Callable[[str], ParameterForm], update_of: Callable[[str], Update]
) -> None:
    """Raises a ValueError if an operation does not fit what it names."""
    match operation:
        case Assign(uid, value) | AssignAdd(uid, value):
            check_value(form_of(uid), value)
        case Scatter(uid, _, indices, updates):
            _check_scatter(form_of(uid), indices, updates)
        case Apply(optimizer, gradients):
            update = update_of(optimizer)
            if len(gradients) != len(update.targets):
                raise ValueError(
                    f"Optimizer {optimizer!r} has {len(update.targets)} targets on this server, "
                    f"but {len(gradients)} gradients were pushed. Push one for each, or None."
                )
            for number, gradient in enumerate(gradients):
                _check_gradient(update, number, gradient)


def check_value(form: ParameterForm, value: Array) -> None:
    """Raises a ValueError if an array cannot be the parameter's value."""
    if value.shape != form.shape or not np.can_cast(value.dtype, form.dtype, "same_kind"):
        raise ValueError(
            f"A value for parameter {form.name!r} has shape {value.shape} and dtype {value.dtype}, "
            f"expected {form.shape} and {form.dtype}."
        )


def check_indices(form: ParameterForm, indices: Array) -> None:
    """Raises a ValueError if these are not indices of the parameter's rows."""
    if not form.shape:
        raise ValueError(f"Parameter {form.name!r} is a scalar: it has no rows.")
    if indices.dtype.kind not in "iu":
        raise ValueError(
            f"Indices of rows of parameter {form.name!r} are integers, not {indices.dtype}."
        )
    if indices.size and not (indices.min() >= 0 and indices.max() < form.shape[0]):
        raise ValueError(
            f"Indices of rows of parameter {form.name!r} reach from {indices.min()} to "
            f"{indices.max()}; expected 0 to {form.shape[0] - 1}."
        )


def _check_rows(form: ParameterForm, indices: Array, rows: Array) -> None:
    check_indices(form, indices)
    expected = (indices.size, *form.shape[1:])
    castable = np.can_cast(rows.dtype, form.dtype, "same_kind")
    if indices.ndim != 1 or rows.shape != expected or not castable:
        raise ValueError(
            f"Rows of parameter {form.name!r} have shape {rows.shape} and dtype {rows.dtype} for "
            f"indices of shape {indices.shape}; expected {expected} and {form.dtype} for indices "
            "of one dimension."
        )


def _check_scatter(form: ParameterForm, indices: Array, updates: Array) -> None:
    if indices.ndim != 2:
        _check_rows(form, indices, updates)
        return
    depth = indices.shape[-1]
    expected = (len(indices), *form.shape[depth:])
    fits = updates.shape == expected and np.can_cast(updates.dtype, form.dtype, "same_kind")
    inside = (indices >= 0) & (indices < form.shape[:depth]) if depth <= len(form.shape) else None
    if not fits or inside is None or not inside.all():
        raise ValueError(
            f"Elements of parameter {form.name!r} of shape {form.shape} and dtype {form.dtype} "
            f"were pushed with indices of shape {indices.shape}, and values of shape "
            f"{updates.shape} and dtype {updates.dtype}, which do not all fit."
        )


def _check_gradient(update: Update, number: int, gradient: Gradient) -> None:
    form = update.targets[number]
    if isinstance(gradient, SparseGradient):
        _check_rows(form, gradient.indices, gradient.rows)
        update.check_rows(number)
    elif gradient is not None and gradient.shape != form.shape:
        raise ValueError(
            f"The gradient of parameter {form.name!r} has shape {gradient.shape}, expected "
            f"{form.shape}."
        )
