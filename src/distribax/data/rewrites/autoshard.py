"""Dividing a data set among workers by rewriting its plan."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from distribax.data.dataset import Dataset
from distribax.data.dataset_options import AutoShardPolicy
from distribax.data.plan.order import Repeat, Shard
from distribax.data.plan.pieces import WorkerPart, WorkerShare
from distribax.data.plan.plan_node import Node, walk
from distribax.data.plan.selection import AssertCardinality
from distribax.data.plan.transforms import Prefetch, WithOptions, replace_inputs
from distribax.data.rewrites.file_sharding import (
    NotFileBased,
    give_own_cache,
    reads_files,
    shard_files,
)
from distribax.data.runtime import runner

_logger = logging.getLogger(__name__)

# The seed of shuffles without one, where all workers must shuffle alike.
_COMMON_SEED = 0x5EED


@dataclass(frozen=True)
class ShardDecision:
    """What auto-sharding did, and why."""

    policy: AutoShardPolicy
    reason: str


def auto_shard(
    dataset: Dataset,
    num_workers: int,
    worker_id: int,
    policy: AutoShardPolicy | str | None = None,
    *,
    replicas_per_worker: int = 1,
    split: bool = False,
    seed: int | None = None,
) -> tuple[Dataset, ShardDecision]:
    """Returns the part of a batched data set that one worker iterates over, and what was done.

    The data set is batched by the global batch size, for W = `num_workers` times
    R = `replicas_per_worker` replicas. `policy` defaults to the one in the data set's options,
    and that to AUTO. With `split` the elements are of the class SplitBatch: the worker's batch and
    its R pieces, one for each replica.

    - DATA: a batch of n rows is cut into W * R pieces of ceil(n / (W * R)) rows in the order of
      the replicas of all workers, and worker w has the pieces w * R to w * R + R - 1. All workers
      run the same pipeline and take the same number of steps; together they have every batch once,
      in order. Shuffles without a seed get one (`seed`), for all workers must shuffle alike.
      A position saved by one worker is that of the global batch: it can be restored with any
      other number of workers and replicas.
    - FILE: worker w reads the files w, w + W, w + 2 W ... and sees its rows in order, in batches
      of a W-th of the global size (R pieces). Workers may take different numbers of steps.
      A take, skip or shard of records counts each worker's own; a number that is asserted for all
      of them is not checked.
    - OFF: every worker sees every row, in batches of a W-th of the global size.
    - HINT: as FILE, sharded where the pipeline says shard(SHARD_HINT, ...).
    - AUTO: HINT where there is a hint, else FILE, and DATA if the data set is not read from files
      or counts its records (take, skip, shard, enumerate, take_while, scan, unique).
    """
    if num_workers < 1 or not 0 <= worker_id < num_workers:
        raise ValueError(
            f"worker_id={worker_id} of num_workers={num_workers} does not exist. Expected a number "
            "from 0 to num_workers - 1."
        )
    if replicas_per_worker < 1:
        raise ValueError(f"replicas_per_worker={replicas_per_worker} must be at least 1.")
    if num_workers * replicas_per_worker > 1:
        _require_batched(dataset.plan)
    if policy is None:
        policy = dataset.options().experimental_distribute.auto_shard_policy
    wanted = AutoShardPolicy.parse(policy or AutoShardPolicy.AUTO, "auto_shard_policy")
    plan, decision = _shard(dataset.plan, num_workers, worker_id, wanted)
    by_data = decision.policy is AutoShardPolicy.DATA
    by_shard = decision.policy in (AutoShardPolicy.FILE, AutoShardPolicy.HINT) and any(
        isinstance(node, Shard) for node in walk(plan)
    )
    # Every n-th element is another one for each worker only if all of them shuffle alike.
    if not by_data and not (by_shard and num_workers > 1):
        seed = None
    elif seed is None:
        seed = _COMMON_SEED
    share = WorkerShare(num_workers, worker_id, replicas_per_worker)
    in_turn = num_workers > 1 and not by_data
    batch_size = plan.static_batch_size(runner.read_first_element)

    def cut(node: Node) -> WorkerPart:
        return WorkerPart(node, share, in_turn, split, batch_size, seed)

    return Dataset(_add_worker_part(plan, cut)), decision


def _require_batched(plan: Node) -> None:
    """Refuses a plan whose elements are known not to be batches."""
    if plan.is_batched(runner.read_first_element) is False:
        raise ValueError(
            "the data set is not batched, so there is no batch to divide among the replicas. "
            "Batch it by the global batch size first, for example "
            "dataset.batch(per_replica_batch_size * strategy.num_replicas_in_sync)."
        )


def _shard(
    plan: Node, num_workers: int, worker_id: int, wanted: AutoShardPolicy
) -> tuple[Node, ShardDecision]:
    hinted = any(isinstance(node, Shard) and node.is_hint for node in walk(plan))
    if wanted is AutoShardPolicy.HINT and not hinted:
        raise ValueError(
            "auto_shard_policy=HINT needs a place to shard: write "
            "dataset.shard(dx.data.experimental.SHARD_HINT, dx.data.experimental.SHARD_HINT) "
            "where the data set is to be divided, or choose another policy."
        )
    if hinted and wanted in (AutoShardPolicy.HINT, AutoShardPolicy.AUTO):
        decision = ShardDecision(AutoShardPolicy.HINT, "the pipeline has a shard hint")
        return _fill_hints(plan, num_workers, worker_id), decision
    if num_workers == 1:
        return plan, ShardDecision(AutoShardPolicy.OFF, "there is one worker")
    if wanted is AutoShardPolicy.OFF:
        return plan, ShardDecision(AutoShardPolicy.OFF, "asked for")
    if wanted is AutoShardPolicy.DATA:
        return plan, ShardDecision(AutoShardPolicy.DATA, "asked for")
    try:
        exact = wanted is AutoShardPolicy.AUTO
        sharded = shard_files(plan, num_workers, worker_id, runner.read_first_element, exact=exact)
    except NotFileBased as error:
        if wanted is AutoShardPolicy.FILE:
            raise ValueError(
                f"auto_shard_policy=FILE cannot divide this data set: {error}. Use "
                "AutoShardPolicy.DATA, which divides every batch, or OFF."
            ) from None
        # Without files this is what one expects, and the first worker speaks for all.
        is_surprise = worker_id == 0 and reads_files(plan)
        _logger.log(
            logging.WARNING if is_surprise else logging.INFO,
            "AutoShardPolicy.AUTO chose DATA: %s. Every worker runs the whole pipeline and keeps "
            "its part of each batch; set AutoShardPolicy.DATA to say that this is meant.",
            error,
        )
        return plan, ShardDecision(AutoShardPolicy.DATA, str(error))
    return sharded, ShardDecision(AutoShardPolicy.FILE, "the data set is read from files")


def _fill_hints(node: Node, num_workers: int, worker_id: int) -> Node:
    filled = replace_inputs(node, lambda child: _fill_hints(child, num_workers, worker_id))
    if isinstance(filled, Shard) and filled.is_hint:
        return Shard(filled.input, num_workers, worker_id)
    if filled is node or num_workers == 1:
        return filled
    if isinstance(filled, AssertCardinality):
        return filled.input  # The number is that of all workers' elements.
    return give_own_cache(filled, num_workers, worker_id)


def _add_worker_part(plan: Node, make: Callable[[Node], WorkerPart]) -> Node:
    """Returns the plan cut for one worker by the step that `make` puts on a node.

    The cut goes below steps that do not look at elements, so that a prefetch buffer holds the
    worker's part only and a fused batch fetches only its rows.
    """
    if isinstance(plan, (Prefetch, WithOptions, Repeat)):
        return plan.with_inputs((_add_worker_part(plan.input, make),))
    return make(plan)
