"""Builds the emulated kernels with g++ and runs cases on them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from filelock import FileLock

__all__ = ["Outcome", "build", "compiler", "run"]

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent

COMMON = [
    *("-std=c++17", "-ffp-contract=off", "-fno-strict-aliasing", "-pthread", "-x", "c++"),
    *("-Wall", "-Werror", "-Wno-unknown-pragmas", f"-I{HERE}"),
]
SANITIZED = ["-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
REFERENCE = ["-O2"]


@dataclass(frozen=True)
class Outcome:
    """What a case came to."""

    case: str
    difference: str
    """"ok", or where the emulated kernels and the CPU's differ."""
    launches: int
    threads: int
    wide_loads: int
    """128-bit loads."""
    wide_stores: int


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


@cache
def build() -> Path:
    """The program that runs cases; kept in the temporary folder until a source changes."""
    csrc = ROOT / "csrc"
    sanitized = [*sorted((csrc / "cuda").glob("*.cu")), *sorted(HERE.glob("*.cpp"))]
    reference = [csrc / "cpu" / name for name in ("adam.cpp", "convert.cpp", "isa_portable.cpp", "threads.cpp")]
    headers = [p for p in sorted([*csrc.rglob("*"), *HERE.iterdir()]) if p.suffix in (".h", ".cuh")]
    digest = hashlib.sha256(repr([compiler(), COMMON, SANITIZED, REFERENCE]).encode())
    for source in [*sanitized, *reference, *headers]:
        digest.update(source.name.encode() + source.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"statestream-emulation-{digest.hexdigest()[:20]}"
    program = folder / "emulate"
    with FileLock(f"{folder}.lock"):
        if not program.exists():
            _make(program, [(p, SANITIZED) for p in sanitized] + [(p, REFERENCE) for p in reference])
    return program


def _make(program: Path, sources: list[tuple[Path, list[str]]]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        work = [(p, flags, Path(scratch) / f"{i}.o") for i, (p, flags) in enumerate(sources)]
        slow_first = sorted(work, key=lambda w: w[0].stem not in ("adam", "isa_portable"))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda w: _compile(*w), slow_first))
        _call([compiler(), "-fsanitize=address,undefined", *(str(o) for _, _, o in work), "-o", f"{scratch}/emulate"])
        program.parent.mkdir(exist_ok=True)
        shutil.move(f"{scratch}/emulate", program)


def _compile(source: Path, flags: list[str], target: Path) -> None:
    _call([compiler(), *COMMON, *flags, "-c", str(source), "-o", str(target)])


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def run(cases: list[str]) -> list[Outcome]:
    """Runs cases, one a line (emulate.cpp). RuntimeError with the sanitizer's report where one stops it."""
    build()
    share = -(-len(cases) // (os.cpu_count() or 1))
    with ThreadPoolExecutor() as pool:
        shares = pool.map(_run, (cases[i : i + share] for i in range(0, len(cases), share)))
        return [outcome for outcomes in shares for outcome in outcomes]


def _run(cases: list[str]) -> list[Outcome]:
    done = subprocess.run([str(build())], input="\n".join(cases) + "\n", capture_output=True, text=True)
    lines = done.stdout.splitlines()
    if len(lines) != len(cases):
        raise RuntimeError(f"stopped in: {cases[len(lines)]}\n{done.stderr[:6000]}")
    outcomes = []
    for case, line in zip(cases, lines, strict=True):
        _, difference, *counts = line.split("|")
        outcomes.append(Outcome(case, difference, *map(int, counts)))
    return outcomes
