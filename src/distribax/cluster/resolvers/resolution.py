"""Which resolver describes the cluster when the user has not said it, and why."""

from __future__ import annotations

import os
from dataclasses import dataclass

from distribax.cluster.resolvers import environment, tf_config
from distribax.cluster.resolvers.env_variables import integer_variable
from distribax.cluster.resolvers.environment import EnvironmentClusterResolver
from distribax.cluster.resolvers.resolver import ClusterResolver
from distribax.cluster.resolvers.simple import SimpleClusterResolver
from distribax.cluster.resolvers.slurm.slurm import SlurmClusterResolver
from distribax.cluster.resolvers.tf_config import TFConfigClusterResolver
from distribax.cluster.spec.cluster_spec import ClusterSpec

_SLURM_VARIABLES = ("SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS")


@dataclass(frozen=True)
class Resolution:
    """The resolver that describes the cluster, and a sentence that says why it is this one."""

    resolver: ClusterResolver
    reason: str


def resolve(resolver: ClusterResolver | None = None) -> Resolution:
    """Chooses the resolver: the given one, or else what the environment variables are made for.

    The order is: the given one, TF_CONFIG, the variables of JAX and torchrun, Slurm, and, when
    there is nothing of them, a single process.

    >>> resolve(EnvironmentClusterResolver("host0:2222", 2, 0)).reason
    'an EnvironmentClusterResolver was given'
    """
    if resolver is not None:
        if not isinstance(resolver, ClusterResolver):
            raise TypeError(
                f"cluster_resolver={resolver!r} is a {type(resolver).__name__}. Expected a "
                "ClusterResolver, such as SimpleClusterResolver(cluster_spec, ...)."
            )
        name = type(resolver).__name__
        article = "an" if name[0] in "AEIOU" else "a"
        return Resolution(resolver, f"{article} {name} was given")
    found = [source for source in (_tf_config(), _environment(), _slurm()) if source is not None]
    if not found:
        return Resolution(
            SimpleClusterResolver(ClusterSpec({})),
            "a single process: neither TF_CONFIG nor the variables of JAX or torchrun are set, "
            "and Slurm has not started several tasks",
        )
    (resolver_type, names), *others = found
    reason = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} set"
    if others:
        rest = " and ".join(", ".join(other) for _, other in others)
        reason += f"; this comes before {rest}, which are set too"
    return Resolution(resolver_type(), reason)


_Source = tuple[type[ClusterResolver], list[str]]


def _tf_config() -> _Source | None:
    if tf_config.VARIABLE not in os.environ:
        return None
    return TFConfigClusterResolver, [tf_config.VARIABLE]


def _environment() -> _Source | None:
    names = environment.variables_set()
    return (EnvironmentClusterResolver, names) if names else None


def _slurm() -> _Source | None:
    # An interactive shell, or a batch script outside srun, is one task, whatever was allocated.
    if any(name not in os.environ for name in _SLURM_VARIABLES):
        return None
    if (integer_variable("SLURM_STEP_NUM_TASKS") or 0) < 2:
        return None
    return SlurmClusterResolver, list(_SLURM_VARIABLES)
