"""Builds the CPU module with a sanitizer in a copy of the tree, and runs tests on it."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.judge import ROOT, copy_tree
from tests.faults.source import Edit

__all__ = ["SANITIZERS", "Sanitizer", "build", "missing", "reports", "run"]

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Sanitizer:
    flags: tuple[str, ...]
    library: str
    """Its runtime, which must be in the process before Python is."""
    variable: str
    options: tuple[str, ...]
    fault: Edit
    """A mistake that only this sanitizer notices: no result changes."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Tests that say nothing under it, and why."""


SANITIZERS = {
    "address": Sanitizer(
        flags=("-fsanitize=address", "-fno-omit-frame-pointer", "-g1"),
        library="libasan.so",
        variable="ASAN_OPTIONS",
        # Leaks: Python and torch keep much to the end. Null: tests ask for more memory than there is.
        options=("detect_leaks=0", "allocator_may_return_null=1", "strict_init_order=1"),
        fault=Edit(
            "csrc/cpu/adam.cpp",
            "const float step = *(const float *)rows[i].step;",
            "volatile float beyond = ((const float *)rows[i].step)[1]; (void)beyond;"
            "const float step = *(const float *)rows[i].step;",
        ),
        left_out=dict.fromkeys(
            (
                "tests/memory/test_resident_peaks.py",
                "tests/state_dict/test_export.py::test_control_one_planted_temporary_breaks_the_bound",
                "tests/state_dict/test_export.py::test_a_load_needs_no_more_than_its_staging",
                "tests/state_dict/test_small_states.py::test_a_load_takes_no_more_than_its_staging",
                "tests/offload/test_memory.py::test_host_memory_follows_the_formula",
            ),
            "measures resident memory, of which its allocator keeps what was freed",
        ),
    ),
    "undefined": Sanitizer(
        flags=(
            "-fsanitize=undefined,float-cast-overflow",
            # All that follows an error would be of no meaning.
            "-fno-sanitize-recover=all",
            "-fno-omit-frame-pointer",
            "-g1",
        ),
        library="libubsan.so",
        variable="UBSAN_OPTIONS",
        options=("print_stacktrace=1",),
        fault=Edit("csrc/cpu/adam.cpp", "first_chunk[i] = chunks;", "first_chunk[i] = chunks; rows[i].numel << 63;"),
    ),
    "thread": Sanitizer(
        flags=("-fsanitize=thread", "-fno-omit-frame-pointer", "-g1"),
        library="libtsan.so",
        variable="TSAN_OPTIONS",
        # Python and torch are not built with it: what they read and write, and torch's own threads, are not judged.
        options=("ignore_noninstrumented_modules=1", "die_after_fork=0", "report_thread_leaks=0"),
        fault=Edit(
            "csrc/cpu/adam.cpp",
            "const auto update = [&](int64_t i, int64_t begin, int64_t end) {",
            "volatile int64_t updates = 0;"
            "const auto update = [&](int64_t i, int64_t begin, int64_t end) { updates = updates + 1;",
        ),
        left_out=dict.fromkeys(
            (
                "tests/native/test_native_threads.py::test_other_python_threads_run_during_a_call[2]",
                "tests/native/test_native_threads.py::test_a_child_forked_during_another_threads_call_can_step",
            ),
            "gives one tensor many rows of a call, which is a race, to keep it long",
        ),
    ),
}


def _library(name: str) -> str | None:
    """Where the compiler has it; it echoes the name where it has none."""
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    if not shutil.which(compiler[0]):
        return None
    done = subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    found = Path(done.stdout.strip())
    return str(found.resolve()) if found.is_absolute() else None


def missing(name: str) -> str | None:
    """What this machine lacks for a sanitizer; None where it has all."""
    if platform.system() != "Linux":
        return "the runtime is preloaded as Linux does it"
    if not _library(SANITIZERS[name].library):
        return f"the C++ compiler has no {SANITIZERS[name].library}"
    return None


def build(name: str, tree: Path, faults: Sequence[Edit] = ()) -> None:
    """Copies the tree to `tree`, which must not be there, with the CPU module built for this sanitizer.
    RuntimeError with the compiler's words."""
    copy_tree(tree)
    for folder in ("docs", "benchmarks"):
        shutil.copytree(ROOT / folder, tree / folder)
    for module in (tree / "python" / "statestream").glob("_*.so"):
        module.unlink()
    for fault in faults:
        fault.apply(tree)
    flags = " ".join(SANITIZERS[name].flags)
    environment = {**os.environ, "STATESTREAM_CUDA": "0", "CFLAGS": flags, "CXXFLAGS": flags, "LDFLAGS": flags}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} with {flags}\n{done.stdout}{done.stderr}")


def run(name: str, tree: Path, tests: Sequence[str]) -> int:
    """pytest on a tree that was built for this sanitizer; its exit status, negative where a signal ended it."""
    sanitizer = SANITIZERS[name]
    settings = [*sanitizer.options, f"log_path={tree / 'report'}"]
    # Without the C++ runtime beside it the sanitizer would not find the function that throws.
    preload = ":".join(filter(None, (_library(sanitizer.library), _library("libstdc++.so.6"))))
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree / "python"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "LD_PRELOAD": preload,
        sanitizer.variable: ":".join(settings),
    }
    left_out = [f"--deselect={test}" for test in sanitizer.left_out]
    options = ("-q", "-n0", "-p", "no:cacheprovider", "--timeout=3000")
    command = [sys.executable, "-m", "pytest", *options, *left_out, *tests]
    return subprocess.run(command, cwd=tree, env=environment).returncode


def reports(tree: Path) -> list[Path]:
    """Files of what the sanitizer said, one a process, children of tests included."""
    return sorted(tree.glob("report.*"))
