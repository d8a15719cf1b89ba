"""All that one run on a GPU can show, in about ten minutes: python -m benchmarks.gpu_day [--tiny]

The tests that need a GPU; each stored form's step beside torch's fused one and Transformer Engine's (gpu_step); a
streamed step (offload_step); and here the link's bandwidth, an export's time and peak, and a streamed step's timeline.
Results go to benchmarks/results/, or to the folder that STATESTREAM_RESULTS names. What fails is said at the end, and
the rest runs. `--tiny` is for machines on which only the code is tried: no figure of theirs means anything.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from statestream import CPUOffloadOptimizer, FusedAdam, Timeline

from benchmarks.gpu_step import machine
from benchmarks.runner import Report, results_folder

TESTS = ("tests/cuda", "tests/offload/test_on_gpu.py", "tests/offload/test_gpu_lifetime.py")
MB = 10**6


def elsewhere(*arguments: str) -> bool:
    """Whether a module ran well, in a process of its own."""
    print(f"== {' '.join(arguments)}", flush=True)
    return subprocess.run([*launcher(), "-m", *arguments]).returncode == 0


def launcher() -> list[str]:
    """Python, as this process was started: through another module where one runs it."""
    return [sys.executable, *(["-m", "tests.fake_runtime"] if "tests.fake_runtime" in sys.modules else [])]


def seconds(run: Callable[[], object], rounds: int) -> float:
    """The best of some, each from an idle device until it is idle again."""
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best


def link(report: Report, nbytes: int) -> None:
    """Pinned copies each way, and both ways at once."""
    device = [torch.zeros(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    host = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    up, down = torch.cuda.Stream(), torch.cuda.Stream()

    def copy(ways: str) -> None:
        for way, stream, to, source in (("up", up, device[0], host[0]), ("down", down, host[1], device[1])):
            if way in ways:
                with torch.cuda.stream(stream):
                    to.copy_(source, non_blocking=True)

    for ways in ("up", "down", "up and down"):
        copy(ways)
        speed = nbytes / seconds(partial(copy, ways), 5) / 1e9
        report.add(f"copies {ways}", f"{nbytes / MB:.0f} MB each", "GB/s each", speed)


def model(elements: int, layers: int = 16) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.randn(elements // layers, device="cuda").bfloat16()) for _ in range(layers)]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def fused(params: list[torch.nn.Parameter], **more: object) -> FusedAdam:
    return FusedAdam(params, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16", master_weights=True, **more)


def export(report: Report, elements: int) -> None:
    """Of BF16 moments and FP32 masters: on the device, and to the host through staging."""
    for way, to_host in (("on the device", False), ("to the host", True)):
        optimizer = fused(model(elements), state_dict_cpu_offload=to_host)
        optimizer.step()
        taken = f"{elements * 12 / MB:.0f} MB"
        for what in ("first export", "export"):  # the first one pins its memory
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            report.add(f"{what} {way}", taken, "ms", 1e3 * seconds(optimizer.state_dict, 1))
            report.add(f"{what} {way}", taken, "peak MB", (torch.cuda.max_memory_allocated() - before) / MB)
        del optimizer
        torch.cuda.empty_cache()


def streamed(report: Report, elements: int) -> None:
    """A streamed step's three queues, alone and with half of the state updated by the host."""
    for fraction in (0, 0.5):
        state = elements * 8
        optimizer = CPUOffloadOptimizer(fused(model(elements)), max(state // 8, 1 << 16), cpu_fraction=fraction)
        optimizer.step()
        report.add(
            f"streamed step, cpu_fraction={fraction}", f"{state / MB:.0f} MB", "ms", 1e3 * seconds(optimizer.step, 3)
        )
        with Timeline(optimizer) as timeline:
            optimizer.step()
        for what in dict.fromkeys(span.what for span in timeline.spans):
            spans = [span for span in timeline.spans if span.what == what]
            busy, moved = sum(span.end - span.begin for span in spans), sum(span.nbytes for span in spans)
            report.add(f"{what}, cpu_fraction={fraction}", f"{moved / MB:.0f} MB", "ms busy", busy * 1e3)
        timeline.save_png(results_folder() / f"gpu_day_{fraction}.png")
        del optimizer
        torch.cuda.empty_cache()


def error_of(part: Callable[[Report, int], None], report: Report, size: int) -> list[str]:
    """None or one: the other parts still have something to say."""
    try:
        part(report, size)
    except Exception as error:
        return [f"{part.__name__}: {type(error).__name__}: {error}"]
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="little of everything, and no tests")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_day: there is no CUDA GPU to measure")
    results_folder().mkdir(parents=True, exist_ok=True)
    print(machine(), flush=True)
    if options.tiny:
        processes = (
            "benchmarks.gpu_step --elements 4096 --rounds 1",
            "benchmarks.offload_step --megabytes 1 --rounds 1",
        )
        copied = elements = 1 << 16
    else:
        processes = (
            f"pytest -q -n0 -p no:cacheprovider {' '.join(TESTS)}",
            "benchmarks.gpu_step --elements 134217728 --rounds 15",
            "benchmarks.offload_step --gigabytes 3 --rounds 5",
        )
        copied, elements = 1 << 30, 1 << 28
    failed = [process for process in processes if not elsewhere(*process.split())]
    report = Report("gpu_day", "What one GPU does", ["what", "of", "unit", "value"], machine=machine())
    for part, size in ((link, copied), (export, elements), (streamed, elements)):
        failed += error_of(part, report, size)
    report.notes += [f"Failed: {what}." for what in failed]
    print(report.write())
    print("\n".join(failed) or "all of it ran", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
