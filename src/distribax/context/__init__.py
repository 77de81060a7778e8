"""Which strategy is current, and whether code runs for one replica or across all of them."""

from distribax.context.replica_context import ReplicaContext as ReplicaContext
from distribax.context.replica_context import Runner as Runner
from distribax.context.stack import Entry as Entry
from distribax.context.stack import current as current
from distribax.context.stack import enter as enter
from distribax.context.stack import enter_scope as enter_scope
from distribax.context.stack import experimental_set_strategy as experimental_set_strategy
from distribax.context.stack import get_loss_reduction as get_loss_reduction
from distribax.context.stack import get_replica_context as get_replica_context
from distribax.context.stack import get_strategy as get_strategy
from distribax.context.stack import has_strategy as has_strategy
from distribax.context.stack import in_cross_replica_context as in_cross_replica_context
from distribax.context.stack import register_default as register_default
from distribax.context.stack import require_cross_replica as require_cross_replica
from distribax.context.stack import require_replica as require_replica
