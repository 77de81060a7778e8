"""A training step of the MLP on two replicas: distribax, hand-written JAX, TensorFlow and torch."""

from __future__ import annotations

from benchmarks.cases.comparison import Comparison
from distribax.cli.bench.figures import Report
from distribax.cli.bench.harness import BenchSettings, Side

REPLICAS = 2
# The in-process collectives of JAX on CPU need more threads than this machine may have cores.
POOL = {"NPROC": "8"}

HAND = "JAX by hand (shard_map)"
OURS = "distribax, dx.Variable"
PYTREES = "distribax, pytrees"
TENSORFLOW = ("TensorFlow, Keras model", "TensorFlow, Keras optimizer", "TensorFlow, fused Adam op")
DDP = ("torch DDP, 1 thread", "torch DDP, default threads")

MIN_TENSORFLOW = 2.5
MIN_DDP = 1.2


def sides(batch_size: int) -> list[Side]:
    common = ("--batch-size", str(batch_size), "--replicas", str(REPLICAS))
    variables = (*common, "--model", "variables")
    return [
        Side(HAND, "mlp_shard_map", common, environment=POOL),
        Side(OURS, "mlp_distribax", common, environment=POOL),
        Side(PYTREES, "mlp_distribax_pytrees", common, environment=POOL),
        Side(TENSORFLOW[0], "mlp_tensorflow", common, peer="tensorflow"),
        Side(TENSORFLOW[1], "mlp_tensorflow", variables, peer="tensorflow"),
        Side(
            TENSORFLOW[2], "mlp_tensorflow", (*variables, "--optimizer", "raw"), peer="tensorflow"
        ),
        Side(DDP[0], "mlp_torch", (*common, "--threads", "1"), peer="torch"),
        Side(DDP[1], "mlp_torch", common, peer="torch"),
    ]


def run(settings: BenchSettings) -> Report:
    comparison = Comparison(
        f"{REPLICAS} replicas; ratios of time, by hand = 1",
        hand=HAND,
        ours=(OURS, PYTREES),
        base=HAND,
        peers={TENSORFLOW: MIN_TENSORFLOW, DDP: MIN_DDP},
    )
    return comparison.measure("mlp_step", sides, 15, settings)
