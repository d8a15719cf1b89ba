"""Builds the runtime and runs a program on it.

    python -m tests.fake_runtime                       builds
    python -m tests.fake_runtime program.py ...        runs a file
    python -m tests.fake_runtime -m pytest ...         runs a module

STATESTREAM_FAKE_CUDA_SEED and _STYLE (eager, late, random, bursts) say how late work is; by default it is eager.
"""

from __future__ import annotations

import os
import runpy
import sys

from tests.fake_runtime import build, runtime


def main() -> None:
    if reason := build.why_not():
        sys.exit(reason)
    if not runtime.is_here():
        built = build.build()
        if len(sys.argv) == 1:
            print(built.runtime)
            return
        arguments = [sys.executable, "-m", "tests.fake_runtime", *sys.argv[1:]]
        os.execve(sys.executable, arguments, runtime.environment(built.runtime, built.module))
    runtime.install()
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
