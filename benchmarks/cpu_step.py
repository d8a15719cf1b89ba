"""Claim: a CPU step runs near the limit of the machine's memory, and ahead of other optimizers.

`touch` moves the same bytes with trivial arithmetic (touch.cpp, built here); the ratio to it is how far
the kernel is from what memory allows. python -m benchmarks.cpu_step [--elements N]
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from statestream import FusedAdam

from benchmarks.peers import imported, tried
from benchmarks.runner import Report, interleaved

BF16, FP32 = torch.bfloat16, torch.float32
CACHED = 1 << 20
"""Elements that fit a core's caches, or nearly."""


@dataclass(frozen=True)
class Mode:
    name: str
    param: torch.dtype
    moments: torch.dtype
    master: bool = False
    values: str = "ordinary"
    """Or "zeros": nine gradients of ten, and the moments under them, are zero; or "denormals": of gradients and
    moments every other one is."""


MODES = [
    Mode("FP32", FP32, FP32),
    Mode("FP32, BF16 moments", FP32, BF16),
    Mode("BF16", BF16, BF16),
    Mode("BF16, FP32 master, BF16 moments", BF16, BF16, master=True),
    Mode("BF16, mostly zeros", BF16, BF16, values="zeros"),
    Mode("BF16, half denormals", BF16, BF16, values="denormals"),
]


def build_touch() -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp(prefix="touch-"))
    library = folder / "touch.so"
    source = Path(__file__).with_name("touch.cpp")
    subprocess.run(
        ["g++", "-O3", "-march=native", "-shared", "-fPIC", "-pthread", str(source), "-o", str(library)], check=True
    )
    return ctypes.CDLL(str(library))


def touch_of(library: ctypes.CDLL, read: list[torch.Tensor], written: list[torch.Tensor]) -> Callable[[], object]:
    """A call that moves the bytes of a step over these tensors."""

    def addresses(tensors):
        return (ctypes.c_uint64 * len(tensors))(*(t.data_ptr() for t in tensors))

    def sizes(tensors):
        return (ctypes.c_int64 * len(tensors))(*(t.numel() * t.element_size() for t in tensors))

    arguments = (addresses(read), len(read), sizes(read), addresses(written), len(written), sizes(written))
    pieces = max(read[0].numel() // 4096, 1)
    kept = (read, written)  # the call holds addresses only
    return lambda kept=kept: library.touch(*arguments, ctypes.c_int64(pieces), torch.get_num_threads())


def parameter(mode: Mode, elements: int) -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.randn(elements, dtype=mode.param))
    p.grad = torch.randn(elements, dtype=mode.param)
    if mode.values == "zeros":
        p.grad *= torch.arange(elements) % 10 == 0
    elif mode.values == "denormals":
        p.grad[::2] = 1e-39
    return p


def statestream(mode: Mode, elements: int) -> FusedAdam:
    p = parameter(mode, elements)
    return FusedAdam([p], exp_avg_dtype=mode.moments, exp_avg_sq_dtype=mode.moments, master_weights=mode.master)


def torch_adamw(mode: Mode, elements: int, **how: bool) -> Callable[[], object] | None:
    """torch keeps the moments in the parameter's dtype, and no masters."""
    if mode.moments is not mode.param or mode.master:
        return None
    return torch.optim.AdamW([parameter(mode, elements)], weight_decay=0.0, **how).step


def deepspeed(mode: Mode, elements: int) -> Callable[[], object] | None:
    """DeepSpeed's host optimizer keeps FP32 moments unless told otherwise, and its own FP32 weights."""
    made = imported("deepspeed.ops.adam", "DeepSpeedCPUAdam")
    if made is None or mode.master or mode.moments is not mode.param:
        return None
    return made([parameter(mode, elements)], weight_decay=0.0, fp32_optimizer_states=mode.moments is FP32).step


def torchao(mode: Mode, elements: int) -> Callable[[], object] | None:
    """Eight-bit moments in blocks of 256: less memory than any mode here."""
    made = imported("torchao.optim", "AdamW8bit")
    if made is None or mode.param is not BF16 or mode.master:
        return None
    return made([parameter(mode, elements)], weight_decay=0.0).step


PEERS: dict[str, Callable[[Mode, int], Callable[[], object] | None]] = {
    "torch fused": partial(torch_adamw, fused=True),
    "torch foreach": partial(torch_adamw, foreach=True),
    "DeepSpeedCPUAdam": deepspeed,
    "torchao AdamW8bit": torchao,
}


def contestants(mode: Mode, elements: int, library: ctypes.CDLL) -> tuple[dict[str, Callable[[], object]], list[str]]:
    """Everyone who takes the mode, after a step that makes the state; and what the others said."""
    adam = statestream(mode, elements)
    adam.step()
    (param,) = adam.param_groups[0]["params"]
    state = adam.state[param]
    written = [param.data, state["exp_avg"], state["exp_avg_sq"], *([state["master_param"]] if mode.master else [])]
    copies = [t.clone() for t in written]
    runs = {"statestream": adam.step, "touch": touch_of(library, [param.grad.clone()], copies)}
    refused = []
    for name, make in PEERS.items():
        run, error = tried(partial(make, mode, elements))
        if error:
            refused.append(f"{name} refuses {mode.name}: {error}")
        elif run is not None:
            runs[name] = run
    return runs, refused


def measure(elements: int, rounds: int, loop_ms: float) -> Report:
    library = build_touch()
    columns = ["mode", "elements", "threads", "statestream ms", "touch ms", "to touch", *(f"{n} ms" for n in PEERS)]
    report = Report("cpu_step", "CPU step against the memory's own speed", columns)
    all_threads = torch.get_num_threads()
    notes = [
        "A peer's column is empty where it is not installed or has no such mode. All take turns: one step with the "
        "large tensor, and with the small one, which may stay in the caches, a loop of steps."
    ]
    try:
        for n in (elements, min(CACHED, elements)):
            for threads in dict.fromkeys((all_threads, 1)):
                torch.set_num_threads(threads)
                for mode in MODES:
                    runs, refused = contestants(mode, n, library)
                    turn_ms = 0.0 if n > 4 * CACHED else loop_ms
                    times = {name: t.median_ms for name, t in interleaved(runs, rounds, turn_ms=turn_ms).items()}
                    ours, touch = times["statestream"], times["touch"]
                    report.add(
                        mode.name, n, threads, ours, touch, f"{ours / touch:.2f}", *(times.get(p, "") for p in PEERS)
                    )
                    notes += [line for line in refused if line not in notes]
    finally:
        torch.set_num_threads(all_threads)
    report.notes += notes
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=128 << 20, help="elements of the large tensor (default 128M)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--loop-ms", type=float, default=40.0, help="of steps of the small tensor a turn (default 40)")
    options = parser.parse_args()
    print(measure(options.elements, options.rounds, options.loop_ms).write())


if __name__ == "__main__":
    main()
