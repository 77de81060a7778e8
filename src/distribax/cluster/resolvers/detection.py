"""The choice of a resolver when the user has given none, and the reason for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from distribax.cluster.resolvers.environment import EnvironmentClusterResolver
from distribax.cluster.resolvers.resolver import ClusterResolver
from distribax.cluster.resolvers.simple import SimpleClusterResolver
from distribax.cluster.resolvers.slurm.slurm import SlurmClusterResolver
from distribax.cluster.resolvers.tf_config import TFConfigClusterResolver
from distribax.cluster.resolvers.tpu import TPUClusterResolver
from distribax.cluster.spec.cluster_spec import ClusterSpec

_DETECTABLE: Final[tuple[type[ClusterResolver], ...]] = (
    TFConfigClusterResolver,
    EnvironmentClusterResolver,
    TPUClusterResolver,
    SlurmClusterResolver,
)
"""The resolvers that can recognize their environment; the first that does is used."""


@dataclass(frozen=True)
class Resolution:
    """The resolver that describes the cluster, and a sentence that says why it was chosen."""

    resolver: ClusterResolver
    reason: str


def resolve(resolver: ClusterResolver | None = None) -> Resolution:
    """Returns the given resolver, or else the first that detects a cluster in this environment.

    The order is: TF_CONFIG, the variables of JAX and torchrun, those of GKE for TPUs, Slurm. If
    none of them is set, the cluster is a single process.

    Args:
        resolver: The resolver that the user has given.

    Returns:
        The resolver to use, and why.

    Raises:
        TypeError: `resolver` is not a ClusterResolver.
        ValueError: The environment variables are malformed.

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
    for i, candidate in enumerate(_DETECTABLE):
        if (detected := candidate.detect()) is not None:
            return Resolution(detected, _explain(candidate, _DETECTABLE[i + 1 :]))
    return Resolution(
        SimpleClusterResolver(ClusterSpec({})),
        "a single process: neither TF_CONFIG nor the variables of JAX or torchrun are set, "
        "and neither GKE nor Slurm has started several tasks",
    )


def _explain(chosen: type[ClusterResolver], later: tuple[type[ClusterResolver], ...]) -> str:
    names = chosen.find_variables()
    reason = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} set"
    others = [", ".join(other.find_variables()) for other in later if other.find_variables()]
    if others:
        reason += f"; this comes before {' and '.join(others)}, which are set too"
    return reason
