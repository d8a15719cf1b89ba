"""python -m benchmarks: runs what this machine can, writes benchmarks/results/ and README's table of figures.

Each runs in a process of its own, one after another. Times want an idle machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import torch

from benchmarks.readme import README, with_table

EVERYWHERE = (
    "cpu_step",
    "host_step",
    "overhead",
    "export_time",
    "export_peak",
    "offload_step",
    "growth",
    "moment_formats",
)
ON_A_GPU = ("gpu_step",)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    known = EVERYWHERE + ON_A_GPU
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; all that can run without")
    parser.add_argument("--table-only", action="store_true", help="README's table, out of the results that are there")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(known))
    if unknown:
        parser.error(f"{unknown[0]!r} is no benchmark; choose from {', '.join(known)}")
    names = options.names or EVERYWHERE + (ON_A_GPU if torch.cuda.is_available() else ())
    failed = []
    for name in () if options.table_only else names:
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"]).returncode:
            failed.append(name)
    README.write_text(with_table(README.read_text()))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
