"""Claim: a streamed step takes as long as its slower transfer, in a device memory of three chunks.

python -m benchmarks.offload_step [--gigabytes 1 3 12]

Where there is a GPU it is measured: peak allocated and reserved memory of `step()`, and its time, with the state on
the GPU ("before"), in one pass, and streamed. Without one, the real plan, layout and stream run against a clock with
given bandwidths (tests/simulated_device/bandwidth.py): Python's own time is not in those figures.
"""

from __future__ import annotations

import argparse

import torch
from statestream import CPUOffloadOptimizer, FusedAdam

from benchmarks.runner import Report, interleaved
from tests.simulated_device.bandwidth import LINK, MEMORY, TRAFFIC, adam_units, time_step

GB = 10**9
STATE_BYTES = 8  # BF16 moments and an FP32 master
FRACTIONS = (8, 16, 32, 64)  # chunks that the budget is made for


def layer_elements(state_bytes: int, layers: int = 24) -> list[int]:
    """A model with so much state: an embedding of a sixth, and layers of a matrix and a bias."""
    elements = state_bytes // STATE_BYTES
    embedding = elements // 6
    layer = (elements - embedding) // layers
    return [embedding, *(n for _ in range(layers) for n in (layer - 13, 13))]


def simulate(gigabytes: list[int]) -> Report:
    report = Report(
        "offload_step",
        "One step of state in host memory, simulated",
        ["state GB", "way", "chunks", "state on device, peak MB", "ms", "to the slower transfer"],
    )
    report.notes = [
        f"Not measured on a GPU: a link of {LINK / GB:.0f} GB/s each way, {MEMORY / 1e12:.0f} TB/s of device memory "
        f"and {TRAFFIC} bytes of kernel traffic a byte of state are assumed.",
        "BF16 moments and FP32 masters, 8 bytes an element. `resident` is a step with all state on the device.",
    ]
    for size in gigabytes:
        units = adam_units(layer_elements(size * GB))
        total = sum(u.nbytes for u in units)
        one_pass = time_step(units, None)
        slowest = max(one_pass.loads, one_pass.stores)
        report.add(size, "resident", 1, total / 1e6, one_pass.updates * 1e3, f"{one_pass.updates / slowest:.2f}")
        report.add(
            size, "one pass", 1, one_pass.peak_bytes / 1e6, one_pass.total * 1e3, f"{one_pass.total / slowest:.2f}"
        )
        for chunks in FRACTIONS:
            timing = time_step(units, 3 * -(-total // chunks), most_chunks=chunks)
            ratio = f"{timing.total / slowest:.2f}"
            report.add(size, "streamed", timing.chunks, timing.peak_bytes / 1e6, timing.total * 1e3, ratio)
    return report


def measure(gigabytes: list[int], rounds: int) -> Report:
    report = Report(
        "offload_step",
        f"One step of state in host memory, {torch.cuda.get_device_name()}",
        ["state GB", "way", "step_chunk_bytes", "peak allocated MB", "peak reserved MB", "ms"],
    )
    report.notes = ["Peaks are those of `step()` beyond parameters and gradients. BF16 moments and FP32 masters."]
    for size in gigabytes:
        for way, budget in (
            ("resident", None),
            ("one pass", None),
            *(("streamed", size * GB // f) for f in (2, 4, 8, 16)),
        ):
            params = [torch.nn.Parameter(torch.randn(n, device="cuda").bfloat16()) for n in layer_elements(size * GB)]
            for p in params:
                p.grad = torch.randn_like(p)
            torch.cuda.synchronize()
            base = torch.cuda.memory_allocated()
            optimizer = FusedAdam(params, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16", master_weights=True)
            if way != "resident":
                optimizer = CPUOffloadOptimizer(optimizer, budget)
            optimizer.step()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            reserved = torch.cuda.memory_reserved()
            torch.cuda.reset_peak_memory_stats()

            def step(optimizer=optimizer):
                optimizer.step()
                torch.cuda.synchronize()

            timing = interleaved({way: step}, rounds)[way]
            allocated = torch.cuda.max_memory_allocated() - base
            more_reserved = torch.cuda.max_memory_reserved() - reserved
            report.add(size, way, budget or "-", allocated / 1e6, more_reserved / 1e6, timing.median_ms)
            del optimizer, params, step
            torch.cuda.empty_cache()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=int, nargs="+", default=[1, 3, 12], help="bytes of state, in 10^9")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    if torch.cuda.is_available():
        report = measure(options.gigabytes, options.rounds)
    else:
        report = simulate(options.gigabytes)
    print(report.write())


if __name__ == "__main__":
    main()
