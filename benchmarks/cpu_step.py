"""Claim: a CPU step runs near the limit of the machine's memory, and well ahead of torch's fused AdamW.

`touch` moves the same bytes with trivial arithmetic (touch.cpp, built here); the ratio to it is how far
the kernel is from what memory allows. python -m benchmarks.cpu_step [--elements N]
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
from pathlib import Path

import torch
from statestream import FusedAdam

from benchmarks.runner import Report, interleaved

BF16, FP32 = torch.bfloat16, torch.float32
MODES = {
    "FP32": {"param": FP32, "moments": FP32, "master": False},
    "FP32, BF16 moments": {"param": FP32, "moments": BF16, "master": False},
    "BF16": {"param": BF16, "moments": BF16, "master": False},
    "BF16, FP32 master, BF16 moments": {"param": BF16, "moments": BF16, "master": True},
}


def build_touch() -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp(prefix="touch-"))
    library = folder / "touch.so"
    source = Path(__file__).with_name("touch.cpp")
    subprocess.run(
        ["g++", "-O3", "-march=native", "-shared", "-fPIC", "-pthread", str(source), "-o", str(library)], check=True
    )
    return ctypes.CDLL(str(library))


def touch_of(library: ctypes.CDLL, read: list[torch.Tensor], written: list[torch.Tensor]):
    """A call that moves the bytes of a step over these tensors."""

    def addresses(tensors):
        return (ctypes.c_uint64 * len(tensors))(*(t.data_ptr() for t in tensors))

    def sizes(tensors):
        return (ctypes.c_int64 * len(tensors))(*(t.numel() * t.element_size() for t in tensors))

    arguments = (addresses(read), len(read), sizes(read), addresses(written), len(written), sizes(written))
    pieces = max(read[0].numel() // 4096, 1)
    kept = (read, written)  # the call holds addresses only
    return lambda kept=kept: library.touch(*arguments, ctypes.c_int64(pieces), torch.get_num_threads())


def contestants(elements: int, param: torch.dtype, moments: torch.dtype, master: bool, library: ctypes.CDLL) -> dict:
    def parameter() -> torch.nn.Parameter:
        p = torch.nn.Parameter(torch.randn(elements).to(param))
        p.grad = torch.randn(elements).to(param)
        return p

    ours = parameter()
    adam = FusedAdam([ours], exp_avg_dtype=moments, exp_avg_sq_dtype=moments, master_weights=master)
    adam.step()
    state = adam.state[ours]
    written = [ours.data, state["exp_avg"], state["exp_avg_sq"], *([state["master_param"]] if master else [])]
    copies = [t.clone() for t in written]
    runs = {"statestream": adam.step, "touch": touch_of(library, [ours.grad.clone()], copies)}
    if param is moments and not master:
        theirs = parameter()
        runs["torch fused"] = torch.optim.AdamW([theirs], fused=True, weight_decay=0.0).step
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=128 << 20, help="elements of the large tensor (default 128M)")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    library = build_touch()
    columns = [
        "mode",
        "elements",
        "threads",
        "statestream ms",
        "touch ms",
        "ratio to touch",
        "torch fused ms",
        "faster by",
    ]
    report = Report("cpu_step", "CPU step against the memory's own speed", columns)
    all_threads = torch.get_num_threads()
    for elements in (options.elements, 1 << 20):
        for threads in dict.fromkeys((all_threads, 1)):
            torch.set_num_threads(threads)
            for mode, formats in MODES.items():
                runs = contestants(elements, library=library, **formats)
                rounds = options.rounds if elements > 1 << 22 else 20 * options.rounds
                times = {name: t.median_ms for name, t in interleaved(runs, rounds).items()}
                ours, touch, fused = times["statestream"], times["touch"], times.get("torch fused")
                ahead = "-" if fused is None else f"{fused / ours:.2f} x"
                report.add(
                    mode, elements, threads, ours, touch, f"{ours / touch:.2f}", "-" if fused is None else fused, ahead
                )
    torch.set_num_threads(all_threads)
    report.notes.append("Torch's CPU fused AdamW refuses FP32 parameters with BF16 state, and has no masters.")
    print(report.write())


if __name__ == "__main__":
    main()
