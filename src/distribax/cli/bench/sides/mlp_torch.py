"""The training step with torch's DistributedDataParallel: two processes, gloo, CPU.

The default optimizer, and the plain wrapper, are what most programs have; `--fused` is the fastest
that torch offers.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportArgumentType=false
# (the peer is installed in its own environment, not in the one that is checked)
from __future__ import annotations

from collections.abc import Callable

import mlp_problem
import multi_worker_crew
import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    parser = mlp_problem.parser()
    parser.add_argument(
        "--threads", type=int, default=0, help="of each process; 0: torch's default"
    )
    parser.add_argument(
        "--fused", action="store_true", help="fused Adam, and gradients that live in their buckets"
    )
    options, crew = multi_worker_crew.join(parser)
    if options.threads:
        torch.set_num_threads(options.threads)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{crew.addresses[0]}", rank=crew.rank, world_size=crew.size
    )
    run_steps = make_steps(options.batch_size, crew.rank, crew.size, fused=options.fused)

    def run(steps: int) -> dict[str, float]:
        return {"loss": run_steps(steps)}

    crew.serve(run)


def make_steps(
    batch_size: int, rank: int, replicas: int, *, fused: bool = False
) -> Callable[[int], float]:
    problem = mlp_problem.make(batch_size)
    layers: list[nn.Module] = []
    for kernel, bias in problem.weights:
        layer = nn.Linear(*kernel.shape)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(kernel.T.copy()))
            layer.bias.copy_(torch.from_numpy(bias))
        layers += [layer, nn.ReLU()]
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(*layers[:-1]), gradient_as_bucket_view=fused
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=mlp_problem.RATE, fused=fused or None)
    share = slice(rank * batch_size // replicas, (rank + 1) * batch_size // replicas)
    images = torch.from_numpy(problem.images[share])
    labels = torch.from_numpy(problem.labels[share]).long()

    def run_steps(steps: int) -> float:
        mean = torch.zeros(())
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            # Like every side, it has the loss over all replicas of each step.
            mean = loss.detach() / replicas
            reduction = dist.all_reduce(mean, async_op=True)
            optimizer.step()
            reduction.wait()
        return float(mean)

    return run_steps


if __name__ == "__main__":
    main()
