"""Claim: a step over many small parameters costs little beyond the arithmetic.

1,000 parameters of 64 elements, with gradients that are new tensors each step and with the same ones; where
the time goes is shown by a profile of the step's parts. python -m benchmarks.overhead
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
from collections.abc import Callable

import torch
from statestream import FusedAdam

from benchmarks.runner import Report, interleaved

ELEMENTS = 64


def stepper(make: Callable[[list], torch.optim.Optimizer], count: int, fresh: bool) -> Callable[[], None]:
    params = [torch.nn.Parameter(torch.randn(ELEMENTS)) for _ in range(count)]
    gradients = [[torch.randn(ELEMENTS) for _ in params] for _ in range(2)]
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
    for _ in range(times):
        step.prepare()
        profile.runcall(step)
    stats = pstats.Stats(profile)
    return [
        f"| {function} ({file.rsplit('/', 1)[-1]}) | {calls // times} | {own / times * 1e3:.3f} |"
        for (file, _, function), (_, calls, own, _, _) in sorted(stats.stats.items(), key=lambda s: -s[1][2])[:6]
    ]


def measure(count: int, rounds: int) -> Report:
    report = Report(
        "overhead",
        f"step() on {count:,} parameters of {ELEMENTS} elements",
        ["gradients", "optimizer", "median ms", "to statestream"],
    )
    makers = {
        "statestream": lambda p: FusedAdam(p),
        "torch fused": lambda p: torch.optim.AdamW(p, fused=True),
        "torch foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    }
    for fresh in (True, False):
        steps = {name: stepper(make, count, fresh) for name, make in makers.items()}
        timings = interleaved(steps, rounds)
        ours = timings["statestream"].median_ms
        for name, timing in timings.items():
            label = "new each step" if fresh else "unchanged"
            report.add(label, name, timing.median_ms, f"{timing.median_ms / ours:.1f} x")
    report.notes += [
        "Where a step with new gradients goes, by own time under cProfile:",
        "",
        "| function | calls | ms |",
        "| --- | --- | --- |",
        *profile_of(stepper(makers["statestream"], count, True)),
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
