"""Claim: a step on the host, with its state there, takes no longer than other host optimizers, and less memory.

python -m benchmarks.host_step [--elements N] [--rounds N]

CPUOffloadOptimizer with cpu_fraction=1 against torch.optim.AdamW(fused=True) and DeepSpeedCPUAdam, all on the same
work. With BF16 weights that is: BF16 gradients come in, BF16 weights go out, FP32 masters are in between. The others
step FP32 weights with FP32 gradients, so their part is what trainers do with them: gradients are made FP32, the masters
stepped, the weights written.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from statestream import CPUOffloadOptimizer, FusedAdam
from torch.nn import Parameter

from benchmarks.peers import imported, tried
from benchmarks.runner import Report, interleaved

BF16, FP32 = torch.bfloat16, torch.float32
OURS = "statestream"


@dataclass(frozen=True)
class Mode:
    """What is stored of each parameter. The others' moments are FP32 in every mode."""

    name: str
    weights: torch.dtype
    moments: torch.dtype


MODES = (
    Mode("FP32", FP32, FP32),
    Mode("BF16, FP32 master and moments", BF16, FP32),
    Mode("BF16, FP32 master, BF16 moments", BF16, BF16),
)


def parameter(mode: Mode, elements: int) -> Parameter:
    param = Parameter(torch.randn(elements, dtype=mode.weights))
    param.grad = torch.randn(elements, dtype=mode.weights)
    return param


def statestream(param: Parameter, mode: Mode) -> Callable[[], object]:
    inner = FusedAdam(
        [param], weight_decay=0.01, master_weights=True, exp_avg_dtype=mode.moments, exp_avg_sq_dtype=mode.moments
    )
    return CPUOffloadOptimizer(inner, cpu_fraction=1, cpu_threads=torch.get_num_threads()).step


def on_masters(
    make: Callable[[list[Parameter]], torch.optim.Optimizer], param: Parameter, mode: Mode
) -> Callable[[], object]:
    """The step of an optimizer of FP32 weights, and what has to be done around it where the model's are BF16."""
    if mode.weights is FP32:
        return make([param]).step
    master = Parameter(param.detach().float())
    master.grad = torch.empty_like(master)
    optimizer = make([master])

    @torch.no_grad()
    def step() -> None:
        master.grad.copy_(param.grad)
        optimizer.step()
        param.copy_(master)

    return step


def torch_fused(param: Parameter, mode: Mode) -> Callable[[], object]:
    return on_masters(lambda params: torch.optim.AdamW(params, weight_decay=0.01, fused=True), param, mode)


def deepspeed(param: Parameter, mode: Mode) -> Callable[[], object] | None:
    made = imported("deepspeed.ops.adam", "DeepSpeedCPUAdam")
    if made is None:
        return None
    return on_masters(lambda params: made(params, weight_decay=0.01, adamw_mode=True), param, mode)


PEERS: dict[str, Callable[[Parameter, Mode], Callable[[], object] | None]] = {
    "torch.optim.AdamW(fused=True)": torch_fused,
    "DeepSpeedCPUAdam": deepspeed,
}


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Contestant:
    step: Callable[[], object]
    bytes_a_parameter: float
    """Resident bytes that it took beside weights and gradients, its first step included."""


def contestants(mode: Mode, elements: int, missing: dict[str, str]) -> dict[str, Contestant]:
    """Everyone who is here, after a first step; in `missing` what became of the others."""
    found = {}
    for name, make in {OURS: statestream, **PEERS}.items():
        param = parameter(mode, elements)
        before = resident_bytes()
        run, error = tried(partial(make, param, mode))
        if run is None:
            missing[name] = f"{name} is not here: {error or 'it is not installed, or does not load'}."
        else:
            found[name] = Contestant(run, (resident_bytes() - before) / elements)
    return found


def measure(elements: int, rounds: int) -> Report:
    columns = ["mode", "elements", "threads", "optimizer", "ms", "to statestream", "bytes a parameter"]
    report = Report("host_step", "A step on the host, state and all", columns)
    missing: dict[str, str] = {}
    contestants(MODES[-1], 9, missing)  # what is loaded and started once is nobody's memory
    for mode in MODES:
        found = contestants(mode, elements, missing)
        times = interleaved({name: each.step for name, each in found.items()}, rounds)
        for name, each in found.items():
            ratio = times[name].median_ms / times[OURS].median_ms
            nbytes = f"{each.bytes_a_parameter:.1f}"
            threads = torch.get_num_threads()
            report.add(mode.name, elements, threads, name, times[name].median_ms, f"{ratio:.2f}", nbytes)
    report.notes += [
        "Medians of interleaved rounds, and their ratio. Bytes are resident memory beside weights and gradients, over "
        "elements. With BF16 weights the others keep FP32 masters and FP32 gradients beside FP32 moments.",
        *missing.values(),
    ]
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=64 << 20, help="elements of the parameter (default 64M)")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print(measure(options.elements, options.rounds).write())


if __name__ == "__main__":
    main()
