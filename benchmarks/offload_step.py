"""Claim: a streamed step takes as long as its slower transfer, in a device memory of three chunks.

python -m benchmarks.offload_step [--gigabytes 1 3 12]

Where there is a GPU it is measured: peak allocated and reserved memory of `step()`, and its time, with the state on
the GPU ("before"), in one pass, and streamed. Without one, the real plan, layout and stream run against a clock with
given bandwidths (benchmarks/simulated/bandwidth.py): Python's own time is not in those figures.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from statestream import CPUOffloadOptimizer, FusedAdam

from benchmarks.runner import Report, interleaved
from benchmarks.simulated.bandwidth import LINK, MEMORY, TRAFFIC, adam_units, time_step

GB, MIB = 10**9, 1 << 20
STATE_BYTES = 8  # BF16 moments and an FP32 master
FRACTIONS = (8, 16, 32, 64)  # chunks that the budget is made for


def layer_elements(state_bytes: int, layers: int = 24) -> list[int]:
    """A model with so much state: an embedding of a sixth, and layers of a matrix and a bias."""
    elements = state_bytes // STATE_BYTES
    embedding = elements // 6
    layer = (elements - embedding) // layers
    return [embedding, *(n for _ in range(layers) for n in (layer - 13, 13))]


def reserved(blocks: list[int]) -> int:
    """Bytes that torch's CUDA allocator takes from the device for these blocks, by its rules: segments of 2 MiB for
    blocks of up to 1 MiB, of 20 MiB up to 10 MiB, and each larger block its own, in steps of 2 MiB."""
    total, rooms = 0, {True: [], False: []}
    for nbytes in blocks:
        nbytes = -(-nbytes // 512) * 512
        small = nbytes <= MIB
        fitting = [room for room in rooms[small] if room >= nbytes]
        if fitting:
            room = min(fitting)
            rooms[small].remove(room)
        else:
            room = 2 * MIB if small else 20 * MIB if nbytes < 10 * MIB else -(-nbytes // (2 * MIB)) * 2 * MIB
            total += room
        if room - nbytes >= (512 if small else MIB + 1):
            rooms[small].append(room - nbytes)
    return total


def simulate(gigabytes: list[int]) -> Report:
    report = Report(
        "offload_step",
        "One step of state in host memory, simulated",
        ["state GB", "way", "chunks", "peak allocated MB", "peak reserved MB", "ms", "to the slower transfer"],
    )
    report.notes = [
        f"Not measured on a GPU: a link of {LINK / GB:.0f} GB/s each way, {MEMORY / 1e12:.0f} TB/s of device memory "
        f"and {TRAFFIC} bytes of kernel traffic a byte of state are assumed; reserved bytes follow the rules of "
        "torch's allocator.",
        "State alone. BF16 moments and FP32 masters, 8 bytes an element. `resident` is a step with all state on the "
        "device.",
    ]
    for size in gigabytes:
        elements = layer_elements(size * GB)
        units = adam_units(elements)
        total = sum(u.nbytes for u in units)
        one_pass = time_step(units, None)
        slowest = max(one_pass.loads, one_pass.stores)

        def add(way: str, chunks: int, blocks: list[int], seconds: float, size: int = size, slowest: float = slowest):
            allocated, rows = sum(blocks) / 1e6, reserved(blocks) / 1e6
            report.add(size, way, chunks, allocated, rows, seconds * 1e3, f"{seconds / slowest:.2f}")

        add("resident", 1, [n * b for n in elements for b in (2, 2, 4)], one_pass.updates)
        add("one pass", 1, [one_pass.peak_bytes], one_pass.total)
        for chunks in FRACTIONS:
            timing = time_step(units, 3 * -(-total // chunks), most_chunks=chunks)
            add("streamed", timing.chunks, [timing.peak_bytes], timing.total)
    return report


def timeline(axes: Any, gigabytes: int = 3, chunks: int = 16) -> None:
    """When each chunk is loaded, updated and stored, streamed and in one pass."""
    units = adam_units(layer_elements(gigabytes * GB))
    total = sum(u.nbytes for u in units)
    rows = {"load": 2, "compute": 1, "store": 0}
    ways = {
        "one pass": (0, time_step(units, None)),
        f"{chunks} chunks": (4, time_step(units, 3 * -(-total // chunks), most_chunks=chunks)),
    }
    labels = {}
    for name, (base, timing) in ways.items():
        for queue, begin, end in timing.spans:
            width = max((end - begin) * 1e3, 0.4 if queue == "compute" else 0)  # else too thin to be seen
            where = {"left": begin * 1e3, "color": f"C{rows[queue]}", "edgecolor": "white", "linewidth": 0.3}
            axes.barh(base + rows[queue], width, **where)
        for queue, row in rows.items():
            labels[base + row] = f"{name}: {'update' if queue == 'compute' else queue}"
        axes.axvline(timing.total * 1e3, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(list(labels), list(labels.values()))
    axes.set_xlabel(f"ms, {gigabytes} GB of state over {LINK / GB:.0f} GB/s each way, simulated")


def measure(gigabytes: list[float], rounds: int) -> Report:
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
            *(("streamed", int(size * GB) // f) for f in (2, 4, 8, 16)),
        ):
            params = [
                torch.nn.Parameter(torch.randn(n, device="cuda").bfloat16()) for n in layer_elements(int(size * GB))
            ]
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
    parser.add_argument("--megabytes", type=int, help="instead, where only the code is tried on a GPU")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    if torch.cuda.is_available():
        sizes = [options.megabytes / 1000] if options.megabytes else options.gigabytes
        report, plot = measure(sizes, options.rounds), None
    else:
        report, plot = simulate(options.gigabytes), timeline
    print(report.write(plot))


if __name__ == "__main__":
    main()
