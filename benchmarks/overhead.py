"""Claim: a step over many small parameters costs little beyond the arithmetic.

1,000 parameters of 64 elements, plain tensors and DTensors (on a mesh of one rank), with gradients that are new tensors
each step and with the same ones. Measured twice: in a loop of steps, as the caches stay, and in turn with the other
optimizers, which leave as little in them as a backward pass would. Where the time goes is shown by a profile of the
step's parts. python -m benchmarks.overhead
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from statestream import FusedAdam
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.runner import Report, interleaved

ELEMENTS = 64


Placed = Callable[[torch.Tensor], torch.Tensor]


@contextmanager
def one_rank() -> Iterator[Placed]:
    """What makes a tensor a DTensor."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        yield lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)])
    finally:
        dist.destroy_process_group()


def stepper(
    make: Callable[[list], torch.optim.Optimizer], count: int, fresh: bool, placed: Placed = lambda tensor: tensor
) -> Callable[[], None]:
    params = [torch.nn.Parameter(placed(torch.randn(ELEMENTS))) for _ in range(count)]
    gradients = [[placed(torch.randn(ELEMENTS)) for _ in params] for _ in range(1 + fresh)]
    optimizer = make(params)
    turn = [0]

    def give_gradients() -> None:
        turn[0] ^= fresh
        for param, grad in zip(params, gradients[turn[0]], strict=True):
            param.grad = grad

    give_gradients()

    def step() -> None:
        optimizer.step()

    step.prepare = give_gradients
    return step


def profile_of(step: Callable[[], None], times: int = 20) -> list[str]:
    """Where a step goes, by own time: table lines."""
    profile = cProfile.Profile()
    step()
    for _ in range(times):
        step.prepare()
        profile.runcall(step)
    stats = pstats.Stats(profile)
    return [
        f"| {function} ({file.rsplit('/', 1)[-1]}) | {calls // times} | {own / times * 1e3:.3f} |"
        for (file, _, function), (_, calls, own, _, _) in sorted(stats.stats.items(), key=lambda s: -s[1][2])[:6]
    ]


MAKERS: dict[str, Callable[[list], torch.optim.Optimizer]] = {
    "statestream": lambda p: FusedAdam(p),
    "torch fused": lambda p: torch.optim.AdamW(p, fused=True),
    "torch foreach": lambda p: torch.optim.AdamW(p, foreach=True),
}


def measure_tensors(report: Report, tensors: str, placed: Placed, count: int, rounds: int) -> None:
    for fresh in (True, False):
        steps = {name: stepper(make, count, fresh, placed) for name, make in MAKERS.items()}
        loops = {name: interleaved({name: step}, rounds)[name].median_ms for name, step in steps.items()}
        turns = interleaved(steps, rounds)
        for name, loop in loops.items():
            ratio = f"{loop / loops['statestream']:.1f} x"
            report.add(tensors, "new each step" if fresh else "unchanged", name, loop, turns[name].median_ms, ratio)


def measure(count: int, rounds: int) -> Report:
    report = Report(
        "overhead",
        f"step() on {count:,} parameters of {ELEMENTS} elements",
        ["tensors", "gradients", "optimizer", "ms in a loop", "ms in turn", "loop to statestream's"],
    )
    measure_tensors(report, "plain", lambda tensor: tensor, count, rounds)
    with one_rank() as placed:
        measure_tensors(report, "DTensors", placed, count, rounds)
    report.notes += [
        "Where a step with new gradients goes, by own time under cProfile:",
        "",
        "| function | calls | ms |",
        "| --- | --- | --- |",
        *profile_of(stepper(MAKERS["statestream"], count, True)),
    ]
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    print(measure(options.parameters, options.rounds).write())


if __name__ == "__main__":
    main()
