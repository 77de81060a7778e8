"""The names that TensorFlow keeps in `tf.train`; `dx.X` is their home."""

from distribax.cluster import ClusterDef as ClusterDef
from distribax.cluster import ClusterSpec as ClusterSpec
from distribax.cluster import JobDef as JobDef
from distribax.cluster import Server as Server
from distribax.cluster import ServerDef as ServerDef
from distribax.training.checkpoints.checkpoint import Checkpoint as Checkpoint
from distribax.training.checkpoints.checkpoint_manager import CheckpointManager as CheckpointManager
from distribax.training.checkpoints.directory import checkpoints_iterator as checkpoints_iterator
from distribax.training.checkpoints.directory import latest_checkpoint as latest_checkpoint
from distribax.training.checkpoints.directory import list_variables as list_variables
from distribax.training.checkpoints.directory import load_variable as load_variable
from distribax.training.moving_averages import ExponentialMovingAverage as ExponentialMovingAverage
