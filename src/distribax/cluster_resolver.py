"""Cluster resolvers: `dx.cluster_resolver`, like `tf.distribute.cluster_resolver`."""

from __future__ import annotations

from distribax.cluster import ClusterResolver as ClusterResolver
from distribax.cluster import EnvironmentClusterResolver as EnvironmentClusterResolver
from distribax.cluster import ExecutableLocation as ExecutableLocation
from distribax.cluster import ExecutableLocation as KubernetesExecutableLocation
from distribax.cluster import GCEClusterResolver as GCEClusterResolver
from distribax.cluster import KubernetesClusterResolver as KubernetesClusterResolver
from distribax.cluster import SimpleClusterResolver as SimpleClusterResolver
from distribax.cluster import SlurmClusterResolver as SlurmClusterResolver
from distribax.cluster import TFConfigClusterResolver as TFConfigClusterResolver
from distribax.cluster import TPUClusterResolver as TPUClusterResolver
from distribax.cluster import UnionResolver as UnionResolver

__all__ = [
    "ClusterResolver",
    "EnvironmentClusterResolver",
    "ExecutableLocation",
    "GCEClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "UnionResolver",
]
