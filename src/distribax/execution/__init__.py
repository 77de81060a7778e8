"""Running steps: compiled by `dx.function`, or eagerly with a thread for each replica."""

from distribax.execution.decorator import function as function
from distribax.execution.function import Function as Function
from distribax.execution.function import run_replicas as run_replicas
from distribax.execution.iterators import LiftedIterator as LiftedIterator
from distribax.execution.iterators import Optional as Optional
from distribax.execution.iterators import require_host as require_host
from distribax.execution.replicas.spmd import run_in_program as run_in_program
from distribax.execution.replicas.threads import run_in_threads as run_in_threads
