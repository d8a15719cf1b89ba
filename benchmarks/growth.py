"""Claim: a step's time grows with its elements, its tensors and its chunks, and with nothing faster than they do.

python -m benchmarks.growth [--most-elements N]

Each is varied by itself: the elements of one tensor, the tensors of 64 elements, and the chunks that the same state in
host memory is streamed in (on the CPU, where a chunk costs its bookkeeping and copies). Tensors are stepped in a loop,
where a thousand stay in the caches and ten thousand do not, and again with other data in the caches before each step,
as a backward pass leaves them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
from statestream import CPUOffloadOptimizer, FusedAdam

from benchmarks.runner import Report, interleaved

SMALL = 64
STATE = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
BYTES_A_STATE = 4
CHUNKS = (1, 10, 100, 1000)
SWEEP_BYTES = 128 << 20
"""More than caches hold."""
RING = 3
"""Chunks that are on the device at once: one is loaded, one stepped, one stored."""


def parameters(count: int, elements: int) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.zeros(elements, dtype=torch.bfloat16)) for _ in range(count)]
    for p in params:
        p.grad = torch.full_like(p, 1e-3)
    return params


def milliseconds(step: Callable[[], object], rounds: int, before: Callable[[], object] = lambda: None) -> float:
    def run() -> None:
        step()

    run.prepare = before
    return interleaved({"step": run}, rounds)["step"].median_ms


def measure(most_elements: int, most_tensors: int, streamed_elements: int, rounds: int) -> Report:
    report = Report(
        "growth",
        "How a step's time grows",
        ["varied", "from", "to", "ms at the least", "ms at the most", "exponent at the upper end"],
    )
    report.notes = [
        "The exponent is the slope, on logarithmic axes, over the last two points: 1 is linear, below 1 is better.",
        f"All-BF16. Tensors have {SMALL} elements each; {streamed_elements:,} elements are streamed.",
    ]
    others = torch.zeros(SWEEP_BYTES, dtype=torch.uint8)

    def swept() -> None:
        others.add_(1)

    report.series = {
        "elements": [(n, elements_ms(n, rounds)) for n in powers(1 << 20, most_elements, 4)],
        "tensors in a loop": [(n, tensors_ms(n, rounds)) for n in powers(1, most_tensors, 10)],
        "tensors, caches swept": [(n, tensors_ms(n, rounds, swept)) for n in powers(1, most_tensors, 10)],
        "chunks": [(n, chunks_ms(n, streamed_elements, rounds)) for n in CHUNKS],
    }
    for name, points in report.series.items():
        (n0, t0), (n1, t1) = points[-2:]
        slope = math.log(t1 / t0) / math.log(n1 / n0)
        report.add(name, points[0][0], n1, points[0][1], t1, f"{slope:.2f}")
    return report


def powers(least: int, most: int, factor: int) -> list[int]:
    found = [least]
    while found[-1] < most:
        found.append(min(found[-1] * factor, most))
    return found


def elements_ms(elements: int, rounds: int) -> float:
    return milliseconds(FusedAdam(parameters(1, elements), **STATE).step, rounds)


def tensors_ms(count: int, rounds: int, before: Callable[[], object] = lambda: None) -> float:
    return milliseconds(FusedAdam(parameters(count, SMALL), **STATE).step, rounds, before)


def chunks_ms(chunks: int, elements: int, rounds: int) -> float:
    budget = None if chunks == 1 else RING * BYTES_A_STATE * -(-elements // chunks)
    return milliseconds(CPUOffloadOptimizer(FusedAdam(parameters(1, elements), **STATE), budget).step, rounds)


def plot_of(series: dict[str, list[tuple[int, float]]]) -> Callable[..., None]:
    def plot(*panels) -> None:
        for axes, (name, points) in zip(panels, series.items(), strict=True):
            counts, times = zip(*points, strict=True)
            axes.loglog(counts, times, "o-", label="measured")
            axes.loglog(counts, [times[-1] * n / counts[-1] for n in counts], "--", color="gray", label="linear")
            axes.set_xlabel(name)
            axes.set_ylabel("ms a step")
            axes.grid(alpha=0.3)
            axes.legend()

    return plot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most-elements", type=int, default=512 << 20)
    parser.add_argument("--most-tensors", type=int, default=10_000)
    parser.add_argument("--streamed-elements", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    report = measure(options.most_elements, options.most_tensors, options.streamed_elements, options.rounds)
    print(report.write(plot_of(report.series), panels=len(report.series)))


if __name__ == "__main__":
    main()
