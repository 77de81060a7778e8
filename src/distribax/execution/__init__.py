"""Running steps: compiled by `dx.function`, or eagerly with a thread for each replica.

The modules that other layers use are named here; the folders are for this layer alone.
"""

from distribax.execution.functions.decorator import function as function
from distribax.execution.functions.function import Function as Function
from distribax.execution.functions.function import run_replicas as run_replicas
from distribax.execution.programs import row_lookups as row_lookups
from distribax.execution.replicas.spmd import run_in_program as run_in_program
from distribax.execution.replicas.threads import run_in_threads as run_in_threads
from distribax.execution.state import adapters as adapters
from distribax.execution.state import named_objects as named_objects
from distribax.execution.state import overlay as overlay
from distribax.execution.state import reachable_variables as reachable_variables
from distribax.execution.state import remote_writes as remote_writes
from distribax.execution.traces import captured as captured
from distribax.execution.traces import frames as frames
from distribax.execution.traces import lookup_gradients as lookup_gradients
from distribax.execution.traces.iterators import LiftedIterator as LiftedIterator
from distribax.execution.traces.iterators import Optional as Optional
from distribax.execution.traces.iterators import require_host as require_host
