"""Claim: export and load on the CPU cost about what a copy of the same bytes costs.

python -m benchmarks.export_time [--elements N]
"""

from __future__ import annotations

import argparse

import torch
from statestream import FusedAdam, kernels
from statestream.tensors.local import flat

from benchmarks.runner import Report, interleaved


def measure(elements: int, rounds: int) -> Report:
    columns = ["moments", "operation", "median ms", "copy of the same bytes ms", "ratio"]
    report = Report("export_time", "Export and load against a copy of the same bytes", columns)
    for dtype in (torch.bfloat16, torch.float32):
        param = torch.nn.Parameter(torch.randn(elements))
        optimizer = FusedAdam([param], exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
        state = optimizer.state[param]["exp_avg"]
        values = torch.zeros(elements, dtype=torch.float32)
        # The yardstick reads and writes as many bytes as the conversion does.
        moved = elements * (state.element_size() + 4) // 2
        a, b = torch.ones(moved, dtype=torch.uint8), torch.ones(moved, dtype=torch.uint8)
        runs = {
            "export": lambda s=state, v=values: kernels.decode(flat(s), v),
            "load": lambda s=state, v=values: kernels.encode(v, flat(s)),
            "copy": lambda a=a, b=b: b.copy_(a),
        }
        times = {name: t.median_ms for name, t in interleaved(runs, rounds).items()}
        for name in ("export", "load"):
            report.add(str(dtype), name, times[name], times["copy"], f"{times[name] / times['copy']:.2f}")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=32 << 20)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print(measure(options.elements, options.rounds).write())


if __name__ == "__main__":
    main()
