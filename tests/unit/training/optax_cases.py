"""Every transformation that optax exports, with arguments that make it do something."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
import optax.contrib

NO_TRANSFORMATIONS = frozenset(
    {
        "inject_stateful_hyperparams",  # Deprecated names of others.
        "optimistic_adam",
        "matrix_inverse_pth_root",
        "schedule_free_eval_params",
        "sigmoid_binary_cross_entropy",
        "update_infinity_moment",
        "update_moment",
        "update_moment_per_elem_norm",
    }
)
"""Functions without an annotation of what they return, which is something else."""


@dataclass(frozen=True)
class Case:
    """How a transformation is made and what its updates need.

    Attributes:
        make: Makes it for a matrix, a vector and a scalar, in a list of this order.
        needs: Which extra arguments its updates take, of "value", "grad", "value_fn", "obj_fn".
        num_params: How many of the three it is for.
        has_loops: Whether it has loops or random numbers, which are slow operation by operation.
        refused: What the error says if `dx.Optimizer` cannot run it; empty if it can.
    """

    make: Callable[[], optax.GradientTransformation]
    needs: tuple[str, ...] = ()
    num_params: int = 3
    has_loops: bool = False
    refused: str = ""


def exported_names() -> Iterator[str]:
    """Yields the names of the functions that return a transformation, or do not say what."""
    for module, prefix in ((optax, ""), (optax.contrib, "contrib.")):
        for name, function in sorted(vars(module).items()):
            if name.startswith("_") or name in NO_TRANSFORMATIONS:
                continue
            if not inspect.isfunction(function):
                continue
            returned = inspect.signature(function).return_annotation
            if returned is inspect.Signature.empty or "GradientTransformation" in str(returned):
                yield f"{prefix}{name}"


def _find(name: str) -> Callable[..., optax.GradientTransformation]:
    module = optax.contrib if name.startswith("contrib.") else optax
    found: Callable[..., optax.GradientTransformation] = getattr(
        module, name.removeprefix("contrib.")
    )
    return found


def _labels(params: optax.Params) -> optax.Params:
    return jax.tree.map(lambda p: "matrix" if jnp.ndim(p) == 2 else "other", params)


def _muon_dimensions(params: optax.Params) -> optax.Params:
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), params)


def _make_dpsgd() -> optax.GradientTransformation:
    with warnings.catch_warnings():
        # It calls a part of optax by an old name of an argument.
        warnings.simplefilter("ignore", DeprecationWarning)
        return optax.contrib.dpsgd(0.1, 1.0, 0.1, 7)


def _is_odd(step: jax.Array, **_: object) -> jax.Array:
    return step % 2 == 1


_TWO = {"matrix": optax.adam(0.1), "other": optax.sgd(0.1, momentum=0.9)}

_LEARNING_RATE = (
    "adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars "
    "lion novograd optimistic_adam_v2 optimistic_gradient_descent radam "
    "rmsprop rprop scale_by_learning_rate scale_by_rprop sgd sign_sgd signum yogi "
    "contrib.acprop contrib.ademamix contrib.adopt contrib.cocob contrib.dadapt_adamw contrib.dog "
    "contrib.dowg contrib.madgrad contrib.prodigy contrib.scale_by_madgrad "
    "contrib.schedule_free_adamw contrib.schedule_free_sgd contrib.simplified_ademamix "
)
_NO_ARGUMENTS = (
    "centralize identity keep_params_nonnegative normalize_by_update_norm scale_by_adadelta "
    "scale_by_adam scale_by_adamax scale_by_adan scale_by_amsgrad scale_by_belief "
    "scale_by_lion scale_by_novograd "
    "scale_by_optimistic_gradient scale_by_param_block_norm scale_by_param_block_rms "
    "scale_by_radam scale_by_rms scale_by_rss scale_by_sign scale_by_stddev "
    "scale_by_trust_ratio scale_by_yogi set_to_zero zero_nans contrib.normalize "
    "contrib.scale_by_acprop contrib.scale_by_ademamix contrib.scale_by_adopt "
    "contrib.scale_by_cocob contrib.scale_by_simplified_ademamix "
)
_DESCENT = optax.scale(-0.1)

CASES: dict[str, Case] = {
    name: Case(lambda name=name: _find(name)(0.1))  # type: ignore[misc]
    for name in _LEARNING_RATE.split()
}
CASES |= {
    # Such a part of an optimizer has no learning rate, and some not even a sign.
    name: Case(lambda name=name: optax.chain(_find(name)(), _DESCENT))  # type: ignore[misc]
    for name in _NO_ARGUMENTS.split()
}
CASES |= {
    "MultiSteps": Case(lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation()),
    "adaptive_grad_clip": Case(lambda: optax.chain(optax.adaptive_grad_clip(0.1), _DESCENT)),
    "add_decayed_weights": Case(lambda: optax.chain(optax.add_decayed_weights(0.1), _DESCENT)),
    "add_noise": Case(lambda: optax.chain(optax.add_noise(0.1, 0.5, 7), _DESCENT), has_loops=True),
    "apply_every": Case(lambda: optax.chain(optax.sgd(0.1), optax.apply_every(2))),
    "apply_if_finite": Case(lambda: optax.apply_if_finite(optax.adam(0.1), 2)),
    "chain": Case(lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1))),
    "clip": Case(lambda: optax.chain(optax.clip(0.1), _DESCENT)),
    "clip_by_block_rms": Case(lambda: optax.chain(optax.clip_by_block_rms(0.1), _DESCENT)),
    "clip_by_global_norm": Case(lambda: optax.chain(optax.clip_by_global_norm(0.1), _DESCENT)),
    "conditionally_mask": Case(lambda: optax.conditionally_mask(optax.adam(0.1), _is_odd)),
    "conditionally_transform": Case(
        lambda: optax.chain(optax.conditionally_transform(optax.clip(0.1), _is_odd), _DESCENT)
    ),
    "ema": Case(lambda: optax.chain(optax.ema(0.9), _DESCENT)),
    "flatten": Case(lambda: optax.flatten(optax.adam(0.1))),
    "freeze": Case(lambda: optax.chain(optax.sgd(0.1), optax.freeze([True, False, False]))),
    "inject_hyperparams": Case(
        lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.01, 3))
    ),
    "lbfgs": Case(
        lambda: optax.lbfgs(memory_size=2, linesearch=optax.scale_by_backtracking_linesearch(4)),
        needs=("value", "grad", "value_fn"),
        has_loops=True,
    ),
    "lookahead": Case(
        lambda: optax.lookahead(optax.adam(0.1), 2, 0.5),
        refused="keeps two sets of parameters",
    ),
    "masked": Case(lambda: optax.masked(optax.adam(0.1), [True, False, True])),
    "measure_with_ema": Case(
        lambda: optax.chain(
            optax.monitor({"norm": optax.measure_with_ema(optax.tree.norm, 0.9)}), _DESCENT
        ),
        refused="has changed the structure of its state",
    ),
    "monitor": Case(
        lambda: optax.chain(optax.monitor({"norm": optax.tree.norm}), _DESCENT),
        refused="has changed the structure of its state",
    ),
    "multi_transform": Case(lambda: optax.multi_transform(_TWO, _labels)),
    "noisy_sgd": Case(lambda: optax.noisy_sgd(0.1, key=7), has_loops=True),
    "named_chain": Case(
        lambda: optax.named_chain(("clip", optax.clip(0.1)), ("adam", optax.adam(0.1)))
    ),
    "partition": Case(lambda: optax.partition(_TWO, ["matrix", "other", "other"])),
    "polyak_sgd": Case(lambda: optax.polyak_sgd(0.1), needs=("value",)),
    "scale": Case(lambda: _DESCENT),
    "scale_by_distance_over_gradients": Case(
        # Optax makes a scalar's update a vector.
        lambda: optax.chain(optax.scale_by_distance_over_gradients(), _DESCENT),
        num_params=1,
    ),
    "scale_by_backtracking_linesearch": Case(
        lambda: optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(4)),
        needs=("value", "grad", "value_fn"),
        has_loops=True,
    ),
    "scale_by_factored_rms": Case(
        lambda: optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=2), _DESCENT)
    ),
    "scale_by_lbfgs": Case(
        lambda: optax.chain(optax.scale_by_lbfgs(memory_size=2), _DESCENT), has_loops=True
    ),
    "scale_by_polyak": Case(
        lambda: optax.chain(optax.scale_by_polyak(), _DESCENT), needs=("value",)
    ),
    "scale_by_schedule": Case(
        lambda: optax.scale_by_schedule(optax.linear_schedule(-0.1, -0.01, 3))
    ),
    "scale_by_zoom_linesearch": Case(
        lambda: optax.chain(optax.sgd(0.1), optax.scale_by_zoom_linesearch(4)),
        needs=("value", "grad", "value_fn"),
        has_loops=True,
    ),
    "selective_transform": Case(
        lambda: optax.selective_transform(optax.adam(0.1), freeze_mask=[True, False, False])
    ),
    # Optax fails with scalars.
    "sm3": Case(lambda: optax.sm3(0.1), num_params=2),
    "scale_by_sm3": Case(lambda: optax.chain(optax.scale_by_sm3(), _DESCENT), num_params=2),
    "snapshot": Case(lambda: optax.chain(optax.snapshot("norm", optax.tree.norm), _DESCENT)),
    "stateless": Case(lambda: optax.stateless(lambda u, _: jax.tree.map(lambda x: -0.1 * x, u))),
    "stateless_with_tree_map": Case(
        lambda: optax.stateless_with_tree_map(lambda update, param: -0.1 * update - 0.01 * param)
    ),
    "trace": Case(lambda: optax.chain(optax.trace(0.9), _DESCENT)),
    "with_extra_args_support": Case(lambda: optax.with_extra_args_support(optax.adam(0.1))),
    "contrib.differentially_private_aggregate": Case(
        lambda: optax.contrib.differentially_private_aggregate(1.0, 0.1, key=7),
        num_params=1,
        has_loops=True,
        refused="an update of shape",
    ),
    "contrib.dpsgd": Case(
        _make_dpsgd,
        num_params=1,
        has_loops=True,
        refused="an update of shape",
    ),
    "contrib.galore": Case(lambda: optax.contrib.galore(0.1, rank=1)),
    "contrib.scale_by_galore": Case(
        lambda: optax.chain(optax.contrib.scale_by_galore(rank=1), _DESCENT)
    ),
    "contrib.hutchinson_estimator_diag_hessian": Case(
        lambda: optax.chain(optax.contrib.hutchinson_estimator_diag_hessian(), _DESCENT),
        needs=("obj_fn",),
        has_loops=True,
    ),
    "contrib.mechanize": Case(lambda: optax.contrib.mechanize(optax.sgd(0.1))),
    "contrib.momo": Case(optax.contrib.momo, needs=("value",)),
    "contrib.momo_adam": Case(optax.contrib.momo_adam, needs=("value",)),
    "contrib.reduce_on_plateau": Case(
        lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)),
        needs=("value",),
    ),
    "contrib.sam": Case(lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2)),
    "contrib.scale_by_muon": Case(
        lambda: optax.chain(
            optax.contrib.scale_by_muon(ns_steps=1, weight_dimension_numbers=_muon_dimensions),
            _DESCENT,
        ),
        num_params=1,
        has_loops=True,
    ),
    "contrib.muon": Case(lambda: optax.contrib.muon(0.1, ns_steps=1), has_loops=True),
    "contrib.schedule_free": Case(lambda: optax.contrib.schedule_free(optax.sgd(0.1), 0.1)),
    "contrib.sophia": Case(lambda: optax.contrib.sophia(0.1), needs=("obj_fn",), has_loops=True),
    "contrib.split_real_and_imaginary": Case(
        lambda: optax.contrib.split_real_and_imaginary(optax.adam(0.1))
    ),
}
