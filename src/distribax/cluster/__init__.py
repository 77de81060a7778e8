"""The cluster: which machines there are, which of them this one is, and where that is written."""

from __future__ import annotations

from distribax.cluster.cluster_spec import ClusterSpec as ClusterSpec
from distribax.cluster.environment import EnvironmentClusterResolver as EnvironmentClusterResolver
from distribax.cluster.gce import GCEClusterResolver as GCEClusterResolver
from distribax.cluster.kubernetes import ExecutableLocation as ExecutableLocation
from distribax.cluster.kubernetes import KubernetesClusterResolver as KubernetesClusterResolver
from distribax.cluster.resolution import Resolution as Resolution
from distribax.cluster.resolution import resolve as resolve
from distribax.cluster.resolver import ClusterResolver as ClusterResolver
from distribax.cluster.roles import check_task as check_task
from distribax.cluster.roles import is_chief as is_chief
from distribax.cluster.roles import training_tasks as training_tasks
from distribax.cluster.roles import worker_count as worker_count
from distribax.cluster.roles import worker_index as worker_index
from distribax.cluster.server import Server as Server
from distribax.cluster.server import ServerConfig as ServerConfig
from distribax.cluster.simple import SimpleClusterResolver as SimpleClusterResolver
from distribax.cluster.slurm import SlurmClusterResolver as SlurmClusterResolver
from distribax.cluster.tf_config import TFConfigClusterResolver as TFConfigClusterResolver
from distribax.cluster.union import UnionResolver as UnionResolver
