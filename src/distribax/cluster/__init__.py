"""The cluster: its description, the resolvers that find it, and the servers that form it."""

from __future__ import annotations

from distribax.cluster.ray.server import Server as Server
from distribax.cluster.ray.server import ServerConfig as ServerConfig
from distribax.cluster.resolvers.detection import resolve as resolve
from distribax.cluster.resolvers.environment import (
    EnvironmentClusterResolver as EnvironmentClusterResolver,
)
from distribax.cluster.resolvers.gce import GCEClusterResolver as GCEClusterResolver
from distribax.cluster.resolvers.kubernetes import ExecutableLocation as ExecutableLocation
from distribax.cluster.resolvers.kubernetes import (
    KubernetesClusterResolver as KubernetesClusterResolver,
)
from distribax.cluster.resolvers.resolver import ClusterResolver as ClusterResolver
from distribax.cluster.resolvers.simple import SimpleClusterResolver as SimpleClusterResolver
from distribax.cluster.resolvers.slurm.slurm import SlurmClusterResolver as SlurmClusterResolver
from distribax.cluster.resolvers.tf_config import TFConfigClusterResolver as TFConfigClusterResolver
from distribax.cluster.resolvers.tpu import TPUClusterResolver as TPUClusterResolver
from distribax.cluster.resolvers.union import UnionResolver as UnionResolver
from distribax.cluster.spec.cluster_def import ClusterDef as ClusterDef
from distribax.cluster.spec.cluster_def import JobDef as JobDef
from distribax.cluster.spec.cluster_def import ServerDef as ServerDef
from distribax.cluster.spec.cluster_spec import ClusterSpec as ClusterSpec
from distribax.cluster.spec.roles import list_training_tasks as list_training_tasks
