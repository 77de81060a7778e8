"""Connects Keras with strategies: replaces the few methods that must know about them.

It is loaded by the first `strategy.scope()` of a program that has imported Keras.
"""

from __future__ import annotations

import keras

from distribax.execution import adapters
from distribax.integrations import replica_state
from distribax.integrations.keras import (
    checkpoints,
    chief,
    losses,
    models,
    normalization,
    optimizers,
    seeds,
    training,
    variables,
)
from distribax.integrations.keras.private_names import find_private_names
from distribax.integrations.keras.step_kinds import StepKind
from distribax.training import variable_kinds
from distribax.training.checkpoints.tracked import register_tracker
from distribax.values import make_opaque

# Replicas keep their writes to variables of Keras apart until they end.
adapt = replica_state.with_state


def _connect() -> None:
    private = find_private_names()
    keras.Variable._value = variables.ValueDescriptor()
    keras.Variable.__getstate__ = variables.get_plain_state
    model = keras.Model
    private.trainer.__init__ = models.note_scope(private.trainer.__init__)
    model._get_jax_state = training.keep_state(model._get_jax_state)
    for kind in StepKind:
        maker = f"make_{kind.value}_function"
        setattr(model, maker, training.make_function(kind)(getattr(model, maker)))
    epochs = private.epoch_iterator
    epochs._get_iterator = training.take_from_host(epochs._get_iterator)
    for name in _LOOPS:
        setattr(model, name, training.run_in_scope(getattr(model, name)))
    for name in _WRITERS:
        setattr(model, name, chief.write_once(getattr(model, name)))
    chief.silence_callbacks()
    base = keras.optimizers.Optimizer
    base.build = optimizers.build_for_ours(base.build)
    for optimizer in (base, keras.optimizers.LossScaleOptimizer):
        optimizer.apply = optimizers.update_together(optimizer.apply)
        optimizer.stateless_apply = optimizers.apply_together(optimizer.stateless_apply)
        optimizer.scale_loss = optimizers.weigh_loss(optimizer.scale_loss)
    loss = private.losses
    loss.scale_loss_for_distribution = losses.scale(loss.scale_loss_for_distribution)
    loss.unscale_loss_for_distribution = losses.unscale(loss.unscale_loss_for_distribution)
    loss.reduce_values = losses.reduce_in_replica(loss.reduce_values)
    loss.apply_mask = losses.mask_together(loss.apply_mask)
    generator = keras.random.SeedGenerator
    generator.next = seeds.draw_own(generator.next)
    batch = keras.layers.BatchNormalization
    batch.__new__ = staticmethod(normalization.refuse_synchronized(batch.__new__))
    register_tracker(keras.Variable, checkpoints.track_variable)
    for base in (keras.Layer, keras.optimizers.Optimizer, keras.Metric):
        register_tracker(base, checkpoints.track_variables)
    adapters.add_commit(replica_state.commit)
    adapters.add_watch(variables.watch_promotions)
    variable_kinds.register(
        keras.Variable, variable_kinds.VariableKind(variables.adopt, variables.promote)
    )
    make_opaque(keras.Variable)


_LOOPS = (
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
)
_WRITERS = ("save", "save_weights", "export")

_connect()
