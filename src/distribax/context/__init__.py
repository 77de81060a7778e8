"""Which strategy is current, and whether code runs for one replica or across all of them."""

from distribax.context.contexts import Entry as Entry
from distribax.context.contexts import ReplicaContext as ReplicaContext
from distribax.context.contexts import Scope as Scope
from distribax.context.contexts import current as current
from distribax.context.contexts import enter as enter
from distribax.context.contexts import experimental_set_strategy as experimental_set_strategy
from distribax.context.contexts import get_loss_reduction as get_loss_reduction
from distribax.context.contexts import get_replica_context as get_replica_context
from distribax.context.contexts import get_strategy as get_strategy
from distribax.context.contexts import has_strategy as has_strategy
from distribax.context.contexts import in_cross_replica_context as in_cross_replica_context
from distribax.context.contexts import name_strategy as name_strategy
from distribax.context.contexts import register_default as register_default
from distribax.context.contexts import require_cross_replica as require_cross_replica
