"""The training step with torch's DistributedDataParallel: two processes, gloo, CPU.

The process that the harness talks to is rank 0; it starts the others and passes requests on.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportArgumentType=false
# (the peer is installed in its own environment, not in the one that is checked)
from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.sides import mlp_problem
from benchmarks.sides.serve import serve


def main() -> None:
    parser = mlp_problem.parser()
    parser.add_argument(
        "--threads", type=int, default=0, help="of each process; 0: torch's default"
    )
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    others: list[subprocess.Popen[bytes]] = []
    if options.rank == 0:
        options.port = free_port()
        for rank in range(1, options.replicas):
            command = [sys.executable, "-m", "benchmarks.sides.mlp_torch", *sys.argv[1:]]
            command += ["--rank", str(rank), "--port", str(options.port)]
            others.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
            )
    if options.threads:
        torch.set_num_threads(options.threads)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{options.port}",
        rank=options.rank,
        world_size=options.replicas,
    )
    run_steps = make_steps(options.batch_size, options.rank, options.replicas)

    def run(steps: int) -> dict[str, float]:
        for other in others:
            assert other.stdin is not None
            other.stdin.write(f"{steps}\n".encode())
            other.stdin.flush()
        return {"loss": run_steps(steps)}

    if options.rank == 0:
        threads = torch.get_num_threads()
        serve(run, {"library": f"torch {torch.__version__}", "threads": threads})
        for other in others:
            assert other.stdin is not None
            other.stdin.close()  # the sign to end
            other.wait(30)
    else:
        for line in sys.stdin:
            run_steps(int(line))
    # Not destroy_process_group(): ranks end at different moments, and nothing is left to do.
    os._exit(0)


def make_steps(batch_size: int, rank: int, replicas: int) -> Callable[[int], float]:
    problem = mlp_problem.make(batch_size)
    layers: list[nn.Module] = []
    for kernel, bias in problem.weights:
        layer = nn.Linear(*kernel.shape)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(kernel.T.copy()))
            layer.bias.copy_(torch.from_numpy(bias))
        layers += [layer, nn.ReLU()]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers[:-1]))
    optimizer = torch.optim.Adam(model.parameters(), lr=mlp_problem.RATE)
    share = slice(rank * batch_size // replicas, (rank + 1) * batch_size // replicas)
    images = torch.from_numpy(problem.images[share])
    labels = torch.from_numpy(problem.labels[share]).long()

    def run_steps(steps: int) -> float:
        loss = torch.zeros(())
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        mean = loss.detach() / replicas
        dist.all_reduce(mean)
        return float(mean)

    return run_steps


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
