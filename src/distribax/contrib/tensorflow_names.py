"""TensorFlow's names and what they are here: for the migration guide, and for names not there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Name:
    """A name of TensorFlow's.

    Attributes:
        tensorflow: The name, without `tf.`.
        here: What to write instead; it begins with `dx.` if it is a name of this library.
        differs: How it differs; empty if it does not.
    """

    tensorflow: str
    here: str
    differs: str = ""


_SAME: Final = (
    "distribute.Strategy",
    "distribute.StrategyExtended",
    "distribute.OneDeviceStrategy",
    "distribute.ReplicaContext",
    "distribute.ValueContext",
    "distribute.DistributedValues",
    "distribute.InputContext",
    "distribute.InputReplicationMode",
    "distribute.ReduceOp",
    "distribute.CrossDeviceOps",
    "distribute.HierarchicalCopyAllReduce",
    "distribute.get_strategy",
    "distribute.has_strategy",
    "distribute.get_replica_context",
    "distribute.in_cross_replica_context",
    "distribute.experimental_set_strategy",
    "distribute.get_loss_reduction",
    "distribute.experimental.CommunicationImplementation",
    "distribute.experimental.TerminationConfig",
    "distribute.experimental.PreemptionCheckpointHandler",
    "distribute.experimental.CollectiveHints",
    "distribute.experimental.MultiWorkerMirroredStrategy",
    "distribute.experimental.CentralStorageStrategy",
    "distribute.cluster_resolver.ClusterResolver",
    "distribute.cluster_resolver.GCEClusterResolver",
    "distribute.cluster_resolver.KubernetesClusterResolver",
    "distribute.cluster_resolver.SimpleClusterResolver",
    "distribute.cluster_resolver.SlurmClusterResolver",
    "distribute.cluster_resolver.TFConfigClusterResolver",
    "distribute.cluster_resolver.UnionResolver",
    "distribute.coordinator.RemoteValue",
    "distribute.coordinator.PerWorkerValue",
    "distribute.experimental.coordinator.PerWorkerValues",
    "distribute.experimental.partitioners.Partitioner",
    "distribute.experimental.partitioners.FixedShardsPartitioner",
    "distribute.experimental.partitioners.MinSizePartitioner",
    "distribute.experimental.partitioners.MaxSizePartitioner",
    "VariableSynchronization",
    "VariableAggregation",
    "IndexedSlices",
    "TensorShape",
    "group",
    "train.ClusterSpec",
    "train.ClusterDef",
    "train.ServerDef",
    "data.Options",
    "data.experimental.AutoShardPolicy",
)
"""Names that mean the same, below `dx` instead of `tf` or `tf.distribute`."""


def _find_here(tensorflow: str) -> str:
    return f"dx.{tensorflow.removeprefix('distribute.')}"


TABLE: Final = (
    *(Name(name, _find_here(name)) for name in _SAME),
    Name(
        "distribute.MirroredStrategy",
        "dx.MirroredStrategy",
        "Without GPUs, named GPUs are virtual CPU devices, with a warning.",
    ),
    Name(
        "distribute.MultiWorkerMirroredStrategy",
        "dx.MultiWorkerMirroredStrategy",
        "When a worker is lost the others end with status 43, to be started again.",
    ),
    Name(
        "distribute.TPUStrategy",
        "dx.TPUStrategy",
        "A `MirroredStrategy` over TPU devices; JAX finds them without a resolver.",
    ),
    Name(
        "distribute.experimental.ParameterServerStrategy",
        "dx.ParameterServerStrategy",
        "Needs the extra `ray`; servers survive their own death.",
    ),
    Name(
        "distribute.coordinator.ClusterCoordinator",
        "dx.coordinator.ClusterCoordinator",
        "Functions are pickled; variables in them travel by name.",
    ),
    Name(
        "distribute.NcclAllReduce",
        "dx.NcclAllReduce",
        "The platform's all-reduce, also named `dx.AllReduce`.",
    ),
    Name(
        "distribute.ReductionToOneDevice",
        "dx.ReductionToOneDevice",
        "Inside a `dx.function` the values are sent within the program.",
    ),
    Name(
        "distribute.experimental.CommunicationOptions",
        "dx.CommunicationOptions",
        "Gloo or in-process collectives on CPUs, NCCL on GPUs.",
    ),
    Name("distribute.InputOptions", "dx.InputOptions", "Prefetching to devices is the default."),
    Name("distribute.RunOptions", "dx.RunOptions", "Accepted; it changes nothing."),
    Name("distribute.Server", "dx.Server", "A node of a Ray cluster."),
    Name(
        "Variable",
        "dx.Variable",
        "JAX takes it wherever it takes an array, but does not read it inside `jax.jit`.",
    ),
    Name(
        "function",
        "dx.function",
        "Python numbers are inputs, bools and strings are part of the signature.",
    ),
    Name(
        "GradientTape",
        "dx.value_and_grad",
        "A function of the variables, because JAX differentiates functions.",
    ),
    Name("nn.compute_average_loss", "dx.compute_average_loss"),
    Name("nn.scale_regularization_loss", "dx.scale_regularization_loss"),
    Name("nn.embedding_lookup", "dx.embedding_lookup"),
    Name("data.Dataset", "dx.data.Dataset", "Elements are NumPy arrays until they reach devices."),
    Name("data.TFRecordDataset", "dx.data.TFRecordDataset"),
    Name("data.TextLineDataset", "dx.data.TextLineDataset"),
    Name("train.Checkpoint", "dx.Checkpoint", "Orbax's format, readable under any strategy."),
    Name("train.CheckpointManager", "dx.CheckpointManager"),
    Name("train.latest_checkpoint", "dx.train.latest_checkpoint"),
    Name("train.checkpoints_iterator", "dx.train.checkpoints_iterator"),
    Name("train.list_variables", "dx.train.list_variables"),
    Name("train.load_variable", "dx.train.load_variable"),
    Name("train.ExponentialMovingAverage", "dx.train.ExponentialMovingAverage"),
    Name("estimator.Estimator", "dx.estimator.Estimator", "Losses are functions of the variables."),
    Name("estimator.EstimatorSpec", "dx.estimator.EstimatorSpec"),
    Name("estimator.RunConfig", "dx.estimator.RunConfig"),
    Name("estimator.ModeKeys", "dx.estimator.ModeKeys"),
    Name("estimator.TrainSpec", "dx.estimator.TrainSpec"),
    Name("estimator.EvalSpec", "dx.estimator.EvalSpec"),
    Name("estimator.train_and_evaluate", "dx.estimator.train_and_evaluate"),
    Name("train.get_global_step", "dx.estimator.get_global_step"),
    Name("keras.utils.SidecarEvaluator", "dx.SidecarEvaluator", "Takes the function to call."),
    Name("keras.optimizers", "dx.Optimizer", "Takes any optax transformation."),
    Name("keras.metrics", "dx.metrics"),
    Name("config.set_soft_device_placement", "dx.set_soft_device_placement"),
    Name(
        "config.set_logical_device_configuration",
        "dx.set_virtual_cpu_devices",
        "For CPU devices; naming them makes them, too.",
    ),
    Name("device", "jax.default_device", "A strategy decides where steps run."),
    Name("Tensor", "jax.Array"),
    Name("constant", "jnp.asarray"),
    Name("convert_to_tensor", "jnp.asarray"),
    Name("identity", "jnp.array"),
    Name("cast", "jnp.astype"),
    Name("print", "jax.debug.print", "In compiled code."),
    Name("cond", "jax.lax.cond"),
    Name("while_loop", "jax.lax.while_loop"),
    Name("map_fn", "jax.lax.map"),
    Name("vectorized_map", "jax.vmap"),
    Name("random", "jax.random", "Random numbers come from keys, which are arguments."),
    Name("random.Generator", "dx.random.Generator", "Other numbers; `normal`, `uniform`, `key`."),
    Name("nn", "jax.nn"),
    Name("math", "jax.numpy"),
    Name("linalg", "jax.numpy.linalg"),
    Name("one_hot", "jax.nn.one_hot"),
    Name("TensorSpec", "dx.data.TensorSpec"),
    Name("TensorArray", "jnp.stack", "Or a `jax.lax.scan`, which stacks its results."),
    Name("control_dependencies", "the order of the code", "Effects happen in program order."),
    Name("py_function", "jax.pure_callback"),
    Name("profiler", "jax.profiler"),
    Name("saved_model", "jax.export", "Or a checkpoint; Keras models save themselves."),
    Name(
        "summary",
        "dx.logging.TensorBoard",
        "`dx.summary` is something else: it shows what is where.",
    ),
    Name("errors.OutOfRangeError", "dx.OutOfRangeError"),
    Name("io", "dx.data", "For TFRecord files; other files are Python's."),
    Name("compat", "dx.contrib.distribute", "The tower API; other old names have no equivalent."),
)
"""All names, those of `_SAME` first."""

_EXPLAINED: Final = {
    "distribute": "`tf.distribute.X` is `dx.X`",
    "distribute_lib": "it was never public; what it defines is in `dx` itself",
    "keras": "import keras (version 3) itself",
}


def explain_missing(module: str, name: str) -> str:
    """Returns the message for a name that a public module does not have, with the way out.

    Args:
        module: The module.
        name: The name.

    Returns:
        The text of an AttributeError.
    """
    message = f"module {module!r} has no attribute {name!r}"
    if name in _EXPLAINED:
        return f"{message}: {_EXPLAINED[name]}."
    reduced = name.removeprefix("reduce_")
    if reduced != name:
        return f"{message}: write jnp.{reduced} for tf.{name}."
    for row in TABLE:
        root, _, rest = row.tensorflow.removeprefix("distribute.").partition(".")
        if root == name:
            exact = row.tensorflow if not rest else f"{row.tensorflow}, for example,"
            more = f" {row.differs}" if row.differs else ""
            return f"{message}: tf.{exact} is {row.here} here.{more}"
    return f"{message}. docs/guide/migrating.md lists TensorFlow's names and what they are here."
