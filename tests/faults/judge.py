"""Builds a tree with a fault in it and runs the tests that should notice."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from .source import Edit

__all__ = ["ROOT", "Verdict", "copy_tree", "judge", "named", "run"]

ROOT = Path(__file__).resolve().parents[2]
_CPU_SECONDS = 150
"""Of each process that builds or tests: what a fault may take that makes a loop endless. Processor time,
or a busy machine would be taken for a fault."""
_SECONDS = 3600


@dataclass(frozen=True)
class Verdict:
    outcome: str
    """"caught", "survived", or "invalid": it does not compile."""
    by: str
    """The test that noticed, and how where that was not by failing; the compiler's words."""
    seconds: float
    rung: str = ""
    """Of a fault in Python: which of python_judge.RUNGS noticed it, or was the last asked."""


@dataclass(frozen=True)
class Judge:
    tests: tuple[str, ...]
    build: tuple[str, ...] = ()
    """What compiles, so that a fault which does not is not taken for one that was noticed."""
    of_the_cpu: bool = False
    """Sees nothing of csrc/cuda."""


_PYTHON = sys.executable
_CPU_MODULE = (_PYTHON, "setup.py", "-q", "build_ext", "--inplace")
PTX = Judge(
    tuple(f"tests/ptx/test_{what}.py" for what in ("kernels", "launcher", "generic")),
    (_PYTHON, "-m", "tests.ptx.build"),
)
NUMBERS = Judge(
    tuple(
        f"tests/native/test_{what}.py"
        for what in ("written_contract", "storage_rounding", "remainders", "scaled_scalars", "stochastic_rounding")
    ),
    of_the_cpu=True,
)
EMULATION = Judge(
    ("tests/emulation/test_emulation.py",), (_PYTHON, "-c", "from tests.emulation.emulator import build; build()")
)
SASS = Judge(("tests/sass/test_sass.py",))
"""Asked last, for what costs time and changes no result."""
JUDGES = (NUMBERS, PTX, EMULATION, SASS)
"""In the order in which they are asked, the quick first."""

DEVICE_HEADERS = {"csrc/cuda/adam_kernel.cuh", "csrc/cuda/vectors.cuh"}
"""What every kernel of FEW_KERNELS' launcher is compiled from."""
GENERIC_SOURCES = {f"csrc/cuda/{name}" for name in ("elements.cuh", "generic_kernel.cuh", "generic_convert.cuh")}
GENERIC_SOURCES.add("csrc/cuda/generic.cu")
"""Of the generic kernels alone: the other kernels are compiled as they were."""
_LAUNCHER = "csrc/cuda/adam.cu"
_KEPT = """
template <class Weight, class Grad, class Moment1, class Moment2>
constexpr bool kept = false;
template <class Weight>
constexpr bool kept<Weight, BFloat16, BFloat16, BFloat16> = true;
template <>
constexpr bool kept<PlainWeight<Float32>, Float32, Float32, Float32> = true;
template <>
constexpr bool kept<PlainWeight<Float32>, BFloat16, BFloat16, Float32> = true;

template <class Weight, class Grad, class Moment1, class Moment2>
constexpr AdamKernel *kernel_if_kept() {
  if constexpr (kept<Weight, Grad, Moment1, Moment2>) return adam_kernel<Weight, Grad, Moment1, Moment2>;
  return nullptr;
}

using AdamFunction = AdamKernel *;"""
FEW_KERNELS = (
    Edit(_LAUNCHER, "using AdamFunction = AdamKernel *;", _KEPT),
    Edit(
        _LAUNCHER,
        "adam_function = adam_kernel<Weight, Grad, Moment1, Moment2>;",
        "adam_function = kernel_if_kept<Weight, Grad, Moment1, Moment2>();",
    ),
)
"""Makes the launcher compile the kernels that tests/ptx runs by default (HOT) and no others."""
_OF_ALL_KERNELS = "tests/ptx/test_launcher.py::test_every_combination_has_a_kernel_of_its_own"


def copy_tree(to: Path, root: Path = ROOT) -> None:
    """What building and testing needs, with the CPU module and the PTX objects that are built already."""
    ignore = shutil.ignore_patterns("__pycache__", ".*", "_cuda*.so")
    for name in ("benchmarks", "csrc", "docs", "python", "tests"):
        shutil.copytree(root / name, to / name, ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "README.md", "MANIFEST.in", "LICENSE"):
        shutil.copy(root / name, to / name)
    if (root / "build" / "ptx").exists():
        shutil.copytree(root / "build" / "ptx", to / "build" / "ptx", ignore=shutil.ignore_patterns("tmp*"))


def judge(tree: Path, paths: set[str]) -> Verdict:
    """The first test that notices; `paths` are the files of the tree that were changed."""
    begun = time.monotonic()
    outcome, by = _judge(tree, paths)
    return Verdict(outcome, by, time.monotonic() - begun)


def _judge(tree: Path, paths: set[str]) -> tuple[str, str]:
    # A fault in a header that the CPU shares is in both sides of a comparison with the CPU.
    shared = any(not path.startswith("csrc/cuda/") for path in paths)
    if shared:
        status, words = run(_CPU_MODULE, tree)
        if status:
            return "invalid", words
    for one in JUDGES:
        if one.of_the_cpu and not shared:
            continue
        few = one is PTX and paths <= DEVICE_HEADERS
        launcher = (tree / _LAUNCHER).read_text()
        for edit in FEW_KERNELS if few else ():
            edit.apply(tree)
        status, words = run(one.build, tree) if one.build else (0, "")
        if status and one is PTX:
            return "invalid", words
        if not status:  # the emulation is built with -Werror, which a fault need not pass
            less = [f"--deselect={_OF_ALL_KERNELS}"] if few else []
            # The quickest to notice first.
            asked = sorted(one.tests, key=lambda test: paths <= GENERIC_SOURCES and "generic" not in test)
            options = ("-x", "-v", "-n0", "-p", "no:cacheprovider", "--timeout=0")
            command = (_PYTHON, "-m", "pytest", *options, *less, *asked)
            status, words = run(command, tree)
            if status in (4, 5):
                raise RuntimeError(f"no tests ran: {words[-2000:]}")
            if status:
                return "caught", named(words, status)
        (tree / _LAUNCHER).write_text(launcher)
    return "survived", ""


def run(command: tuple[str, ...], tree: Path, cpu_seconds: int = _CPU_SECONDS) -> tuple[int, str]:
    """The exit status, negative for one that a signal ended, and the output."""
    (tree / "tmp").mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree / "python"),
        "STATESTREAM_CUDA": "0",
        "STATESTREAM_PTX_ARCHS": "80",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(tree / "tmp"),  # the emulation keeps its programs there
    }
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds)),
    )
    try:
        words, _ = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        words, _ = process.communicate()
    return process.returncode, words


def named(words: str, status: int) -> str:
    """The test that failed, or during which the process died."""
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", words, re.M)
    if failed:
        return failed[0]
    begun = re.findall(r"^(tests/.+?::.+?) *(?:PASSED.*|Fatal Python error.*)?$", words, re.M)
    how = "does not end" if status in (-signal.SIGKILL, -signal.SIGXCPU) else f"ends the process with {status}"
    return f"{begun[-1] if begun else 'collection'} ({how})"
