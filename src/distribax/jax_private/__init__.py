"""Every use of JAX names that are not stable; the rest of the code asks here."""

from distribax.jax_private.array_types import make_array_type as make_array_type
from distribax.jax_private.array_types import register_array_type as register_array_type
from distribax.jax_private.arrays import add_dim as add_dim
from distribax.jax_private.arrays import add_methods as add_methods
from distribax.jax_private.arrays import apply_to_key_data as apply_to_key_data
from distribax.jax_private.arrays import is_concrete_array as is_concrete_array
from distribax.jax_private.arrays import is_key as is_key
from distribax.jax_private.arrays import is_local as is_local
from distribax.jax_private.arrays import join_by_device as join_by_device
from distribax.jax_private.arrays import move_to_device as move_to_device
from distribax.jax_private.arrays import pick_copy as pick_copy
from distribax.jax_private.arrays import put_rows as put_rows
from distribax.jax_private.arrays import rewrap as rewrap
from distribax.jax_private.arrays import split_by_device as split_by_device
from distribax.jax_private.arrays import uncommit as uncommit
from distribax.jax_private.backend import count_cpu_pool_threads as count_cpu_pool_threads
from distribax.jax_private.backend import end_backends as end_backends
from distribax.jax_private.backend import get_default_device as get_default_device
from distribax.jax_private.backend import get_process_id as get_process_id
from distribax.jax_private.backend import get_requested_cpu_devices as get_requested_cpu_devices
from distribax.jax_private.backend import get_started_platforms as get_started_platforms
from distribax.jax_private.backend import has_64_bits as has_64_bits
from distribax.jax_private.backend import have_backends_started as have_backends_started
from distribax.jax_private.backend import is_connected as is_connected
from distribax.jax_private.closures import forget_closures as forget_closures
from distribax.jax_private.closures import is_for_jit as is_for_jit
from distribax.jax_private.closures import iterate_staging as iterate_staging
from distribax.jax_private.closures import note_closures as note_closures
from distribax.jax_private.multihost import agree_on as agree_on
from distribax.jax_private.multihost import broadcast_from_first as broadcast_from_first
from distribax.jax_private.multihost import exchange_text as exchange_text
from distribax.jax_private.multihost import forget_text as forget_text
from distribax.jax_private.multihost import gather_from_all as gather_from_all
from distribax.jax_private.multihost import gather_texts as gather_texts
from distribax.jax_private.multihost import (
    has_reached_preemption_point as has_reached_preemption_point,
)
from distribax.jax_private.multihost import localize as localize
from distribax.jax_private.multihost import sum_over_processes as sum_over_processes
from distribax.jax_private.tracing import Trace as Trace
from distribax.jax_private.tracing import Tracer as Tracer
from distribax.jax_private.tracing import all_gather_joined as all_gather_joined
from distribax.jax_private.tracing import all_gather_same as all_gather_same
from distribax.jax_private.tracing import get_innermost_trace as get_innermost_trace
from distribax.jax_private.tracing import get_outside_trace_state as get_outside_trace_state
from distribax.jax_private.tracing import get_trace as get_trace
from distribax.jax_private.tracing import get_trace_state as get_trace_state
from distribax.jax_private.tracing import has_mesh as has_mesh
from distribax.jax_private.tracing import is_tracer as is_tracer
from distribax.jax_private.tracing import is_tracing as is_tracing
from distribax.jax_private.tracing import leave_mesh as leave_mesh
from distribax.jax_private.tracing import run_outside_trace as run_outside_trace
from distribax.jax_private.tracing import shard_map as shard_map
from distribax.jax_private.tracing import to_varying as to_varying
from distribax.jax_private.tracing import tracks_varying as tracks_varying
from distribax.jax_private.tracing import varies as varies
