"""Claim: a step on a GPU runs near the speed of its memory.

Bandwidth is told as a fraction of a device-to-device copy of the same run: the bytes that a step must move over
the time that it takes. torch's fused AdamW, Transformer Engine's and apex's FusedAdam run beside it, where they
are installed and take the mode. python -m benchmarks.gpu_step [--elements N]
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from statestream import FusedAdam
from torch import Tensor

from benchmarks.peers import imported, tried
from benchmarks.runner import Report, Timing

BF16, FP32, FP16, FP8 = torch.bfloat16, torch.float32, torch.float16, torch.uint8
SCALED = (FP16, FP8)
"""Moments and masters of these are payloads with a float32 scale for each 256 elements."""


@dataclass(frozen=True)
class Mode:
    """What the parameters, gradients, moments and masters are stored in."""

    name: str
    param: torch.dtype
    moments: torch.dtype
    master: str = "none"  # none, fp32, fp16, remainders
    stochastic: bool = False

    @property
    def bytes_per_element(self) -> float:
        """Read and written by one step; gradients are of the parameter's dtype."""
        param, moments = self.param.itemsize, 4 * self.moments.itemsize
        weight = {"none": 2 * param, "fp32": param + 8, "fp16": param + 4, "remainders": 2 * param + 4}[self.master]
        scales = 2 * (self.moments in SCALED) + (self.master == "fp16")
        return weight + param + moments + scales * 2 * 4 / 256

    @property
    def arguments(self) -> dict[str, Any]:
        """Of statestream's FusedAdam, and of Transformer Engine's."""
        return {
            "exp_avg_dtype": self.moments,
            "exp_avg_sq_dtype": self.moments,
            "master_weights": self.master != "none",
            "master_weight_dtype": FP16 if self.master == "fp16" else FP32,
            "store_param_remainders": self.master == "remainders",
        }


MODES = [
    Mode("FP32", FP32, FP32),
    Mode("FP32, BF16 moments", FP32, BF16),
    Mode("BF16", BF16, BF16),
    Mode("BF16, FP32 moments", BF16, FP32),
    Mode("BF16, FP32 master, BF16 moments", BF16, BF16, "fp32"),
    Mode("BF16, FP32 master and moments", BF16, FP32, "fp32"),
    Mode("BF16, remainders, BF16 moments", BF16, BF16, "remainders"),
    Mode("BF16, FP16 moments", BF16, FP16),
    Mode("BF16, FP8 moments", BF16, FP8),
    Mode("BF16, FP16 master, FP8 moments", BF16, FP8, "fp16"),
    Mode("BF16, remainders, FP8 moments", BF16, FP8, "remainders"),
    Mode("FP16, FP32 master, FP8 moments", FP16, FP8, "fp32"),
    Mode("BF16, random rounding", BF16, BF16, stochastic=True),
]


def parameters(mode: Mode, lengths: list[int]) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.randn(n, device="cuda", dtype=mode.param)) for n in lengths]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def statestream(mode: Mode, lengths: list[int], **more: bool) -> Callable[[], object]:
    return FusedAdam(
        parameters(mode, lengths),
        weight_decay=0.01,
        stochastic_rounding=mode.stochastic,
        **mode.arguments,
        **more,
    ).step


def torch_fused(mode: Mode, lengths: list[int]) -> Callable[[], object] | None:
    """torch makes the moments in the parameter's dtype, and no masters; its kernel also takes BF16 moments beside FP32
    parameters, where someone puts them there."""
    taken = mode.moments is mode.param or (mode.param, mode.moments) == (FP32, BF16)
    if not taken or mode.master != "none" or mode.stochastic:
        return None
    optimizer = torch.optim.AdamW(parameters(mode, lengths), weight_decay=0.01, fused=True)
    optimizer.step()
    for state in optimizer.state.values():
        state.update({name: state[name].to(mode.moments) for name in ("exp_avg", "exp_avg_sq")})
    return optimizer.step


def transformer_engine(mode: Mode, lengths: list[int]) -> Callable[[], object] | None:
    made = imported("transformer_engine.pytorch.optimizers", "FusedAdam")
    if made is None or mode.stochastic:
        return None
    return made(parameters(mode, lengths), weight_decay=0.01, **mode.arguments).step


def apex(mode: Mode, lengths: list[int]) -> Callable[[], object] | None:
    """apex keeps FP32 moments."""
    made = imported("apex.optimizers", "FusedAdam")
    if made is None or mode.moments is not FP32 or mode.master not in ("none", "fp32"):
        return None
    masters = mode.master == "fp32"
    return made(parameters(mode, lengths), weight_decay=0.01, capturable=masters, master_weights=masters).step


PEERS = {"torch fused": torch_fused, "Transformer Engine": transformer_engine, "apex": apex}


def contestants(mode: Mode, lengths: list[int]) -> tuple[dict[str, Callable[[], object]], list[str]]:
    """Everyone who takes the mode, after a step that makes the state; and what the others said."""
    runs, refused = {"statestream": statestream(mode, lengths)}, []
    runs["statestream"]()
    for name, make in PEERS.items():
        run, error = tried(partial(make, mode, lengths))
        if error:
            refused.append(f"{name} refuses {mode.name}: {error}")
        elif run is not None:
            runs[name] = run
    return runs, refused


def device_times(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds on the device, in turns, each from an idle device."""
    timings = {name: Timing(name) for name in runs}
    for number in range(rounds + 3):
        for name, run in runs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            run()
            end.record()
            end.synchronize()
            if number >= 3:
                timings[name].samples_ms.append(begin.elapsed_time(end))
    return {name: t.median_ms for name, t in timings.items()}


def wall_times(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds from the call until the device is done."""
    timings = {name: Timing(name) for name in runs}
    for number in range(rounds + 3):
        for name, run in runs.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            torch.cuda.synchronize()
            if number >= 3:
                timings[name].samples_ms.append((time.perf_counter() - begin) * 1e3)
    return {name: t.median_ms for name, t in timings.items()}


def copy_of(elements: int) -> tuple[Callable[[], Tensor], int]:
    """A device-to-device copy of as many FP32 elements, and the bytes that it moves."""
    source, target = (torch.empty(elements, device="cuda") for _ in range(2))
    return lambda: target.copy_(source), 8 * elements


def machine() -> str:
    """Card, driver, torch, date and commit."""
    driver = "unknown"
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(asked, capture_output=True, text=True).stdout.split("\n")[0].strip()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    ).stdout.strip()
    return (
        f"{torch.cuda.get_device_name()}, driver {driver}, torch {torch.__version__}, "
        f"{datetime.date.today().isoformat()}, commit {commit or 'unknown'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 28, help="elements of the large tensor (default 256M)")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_step: there is no CUDA GPU to measure")

    names = ["statestream", *PEERS]
    columns = [
        "mode",
        "tensors",
        "bytes/element",
        "copy GB/s",
        "statestream GB/s",
        "of a copy",
        *(f"{n} ms" for n in names),
    ]
    report = Report("gpu_step", "GPU step against a device-to-device copy", columns, machine=machine())
    for mode in MODES:
        copy, copied = copy_of(options.elements)
        runs, refused = contestants(mode, [options.elements])
        times = device_times({"copy": copy, **runs}, options.rounds)
        copy_speed = copied / times["copy"] / 1e6
        speed = mode.bytes_per_element * options.elements / times["statestream"] / 1e6
        report.add(
            mode.name,
            f"1 of {options.elements}",
            mode.bytes_per_element,
            copy_speed,
            speed,
            f"{speed / copy_speed:.2f}",
            *(times.get(name, "-") for name in names),
        )
        report.notes += refused
        del runs, copy
        torch.cuda.empty_cache()
    many = min(1000, max(options.elements // 1000, 1))
    for mode in MODES:
        runs, _ = contestants(mode, [1000] * many)
        times = wall_times(runs, options.rounds)
        blanks = ["-"] * 3
        report.add(
            mode.name, f"{many} of 1000", mode.bytes_per_element, *blanks, *(times.get(name, "-") for name in names)
        )
    report.notes.append("One large tensor: device time. Many small ones: until the device is done, host included.")
    missing = [name for name in PEERS if name != "torch fused" and not _installed(name)]
    if missing:
        report.notes.append(f"Not installed: {', '.join(missing)}.")
    print(report.write())


def _installed(name: str) -> bool:
    module = {"Transformer Engine": "transformer_engine.pytorch.optimizers", "apex": "apex.optimizers"}[name]
    return imported(module, "FusedAdam") is not None


if __name__ == "__main__":
    main()
