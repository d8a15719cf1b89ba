"""python -m tests.sanitizers: the CPU module under AddressSanitizer, UBSan or ThreadSanitizer, and the tests on it.

Fails where a test fails or a sanitizer reports anything, in a process that a test started too.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from pathlib import Path

from .runner import SANITIZERS, build, missing, reports, run

ROOMS = tuple(f"tests/{room}" for room in ("native", "step", "state_dict", "dcp", "offload", "convert", "memory"))
"""Those that call native code."""
WITH_THREADS = (
    *(f"tests/native/test_{what}.py" for what in ("native_threads", "threads_and_cuts", "stochastic_rounding")),
    "tests/step/test_threads_and_processes.py",
    *(f"tests/offload/test_{what}.py" for what in ("shared_step", "worker", "balance", "share")),
)
"""Those that call it from several threads, or let it start some."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sanitizers", description=__doc__)
    parser.add_argument("sanitizer", choices=SANITIZERS)
    parser.add_argument("tests", nargs="*", help="what pytest is given, after --; all that call native code without")
    parser.add_argument(
        "--tree", type=Path, help="a folder to build in and to keep; built in already, it is used as it is"
    )
    arguments = parser.parse_intermixed_args()
    lacks = missing(arguments.sanitizer)
    if lacks:
        parser.error(lacks)
    with contextlib.ExitStack() as scratch:
        tree = arguments.tree or Path(scratch.enter_context(tempfile.TemporaryDirectory())) / "tree"
        began = time.monotonic()
        if not tree.exists():
            build(arguments.sanitizer, tree)
        built = time.monotonic()
        for old in reports(tree):
            old.unlink()
        status = run(
            arguments.sanitizer, tree, arguments.tests or (WITH_THREADS if arguments.sanitizer == "thread" else ROOMS)
        )
        found = [path.read_text(errors="replace") for path in reports(tree)]
        print(*found, sep="\n")
        print(
            f"{arguments.sanitizer}: built in {built - began:.0f} s, tested in {time.monotonic() - built:.0f} s, "
            f"{len(found)} processes with reports, pytest ended with {status}"
        )
    return 1 if status or found else 0


if __name__ == "__main__":
    raise SystemExit(main())
