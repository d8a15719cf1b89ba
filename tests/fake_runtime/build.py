"""Builds the runtime, and statestream._cuda on it, with the host's compiler: half a minute, kept in the temporary
folder until a source changes."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock

__all__ = ["Built", "build", "why_not"]

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).parent / "source"
EMULATION = ROOT / "tests" / "emulation"
CUDA_SOURCES = ROOT / "csrc" / "cuda"

COMMON = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Werror"]
RUNTIME = [*COMMON, "-O0"]
EMULATED = [
    *(*COMMON, "-O2", "-ffp-contract=off", "-fno-strict-aliasing", "-Wno-unknown-pragmas", "-Wno-unused-variable"),
    *(f"-I{SOURCE / 'emulated'}", f"-I{EMULATION}", '-DSTATESTREAM_CUDA_ARCHS="the host"'),
]
MAJOR = "13"
"""Of the CUDA whose calls the runtime knows."""


@dataclass(frozen=True)
class Built:
    runtime: Path
    """To be preloaded."""
    module: Path
    """statestream._cuda."""


@cache
def why_not() -> str | None:
    """Why there can be no such runtime here; None where there can."""
    if torch.version.cuda is None:
        return "torch is built without CUDA"
    if torch.version.cuda.split(".")[0] != MAJOR:
        return f"torch is built for CUDA {torch.version.cuda}; the runtime has the calls of CUDA {MAJOR}"
    if _compiler() is None:
        return "there is no g++"
    if _cuda_headers() is None:
        return f"there are no headers of CUDA {MAJOR}: neither in torch's dependencies nor beside an nvcc"
    return None


@cache
def build() -> Built:
    """RuntimeError with the compiler's words where it refuses."""
    runtime = [(p, [*RUNTIME, f"-I{_cuda_headers()}"]) for p in sorted(SOURCE.glob("*.cpp"))]
    python = [f"-I{Path(torch.__file__).parent / 'include'}", f"-I{sysconfig.get_paths()['include']}"]
    module = [(p, [*EMULATED, "-x", "c++"]) for p in sorted(CUDA_SOURCES.glob("*.cu"))]
    module += [(EMULATION / "warps.cpp", EMULATED), (CUDA_SOURCES / "module.cpp", [*EMULATED, *python, "-O0"])]
    folder = Path(tempfile.gettempdir()) / f"statestream-fake-runtime-{_digest(runtime + module)}"
    # dlopen finds a library that is there by its soname: so torch gets this one where it asks for the driver.
    built = Built(folder / "libcuda.so.1", folder / f"_cuda{sysconfig.get_config_var('EXT_SUFFIX')}")
    with FileLock(f"{folder}.lock"):
        if not (built.runtime.exists() and built.module.exists()):
            _make(built, runtime, module)
    return built


def _make(built: Built, runtime: list[tuple[Path, list[str]]], module: list[tuple[Path, list[str]]]) -> None:
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
        work = [(p, flags, Path(scratch) / f"{p.name}.o") for p, flags in runtime + module]
        list(pool.map(lambda w: _call([*w[1], "-c", str(w[0]), "-o", str(w[2])]), sorted(work, key=_slow_first)))
        objects = [str(o) for _, _, o in work]
        built.module.parent.mkdir(exist_ok=True)
        soname = ["-Wl,-soname,libcuda.so.1", "-ldl"]
        for target, parts, more in (
            (built.runtime, objects[: len(runtime)], soname),
            (built.module, objects[len(runtime) :], []),
        ):
            _call(["-shared", "-pthread", *parts, *more, "-o", f"{scratch}/{target.name}"])
            shutil.move(f"{scratch}/{target.name}", target)


def _slow_first(work: tuple[Path, list[str], Path]) -> bool:
    return work[0].name not in ("module.cpp", "adam.cu")


def _digest(work: list[tuple[Path, list[str]]]) -> str:
    digest = hashlib.sha256(repr([work, _compiler(), torch.__version__, sysconfig.get_config_var("SOABI")]).encode())
    folders = [SOURCE, SOURCE / "emulated", EMULATION, CUDA_SOURCES, ROOT / "csrc"]
    headers = [p for folder in folders for p in sorted(folder.iterdir()) if p.suffix in (".h", ".cuh")]
    for path in [*(p for p, _ in work), *headers]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:20]


@cache
def _cuda_headers() -> Path | None:
    """The folder of cuda_runtime_api.h and what it includes. Torch brings nvidia's wheel of the runtime, which alone is
    not whole, and triton, whose folder is."""
    site = Path(torch.__file__).parents[1]
    candidates = [site / "nvidia" / f"cu{MAJOR}" / "include", site / "triton/backends/nvidia/include"]
    if nvcc := shutil.which("nvcc"):
        done = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True)
        # nvcc on PATH may be a script that calls another: only nvcc knows where its toolkit is.
        if top := re.search(r"^#\$ TOP=\"?([^\"\n]+)", done.stdout + done.stderr, re.M):
            candidates.append(Path(top[1].strip()) / "include")
    return next((folder for folder in candidates if _is_whole(folder)), None)


def _is_whole(folder: Path) -> bool:
    header = folder / "cuda_runtime_api.h"
    if not header.exists() or not (folder / "crt" / "host_defines.h").exists():
        return False
    return re.search(rf"define\s+CUDART_VERSION\s+{MAJOR}\d{{3}}\b", header.read_text(errors="replace")) is not None


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def _call(arguments: list[str]) -> None:
    command = [_compiler() or "g++", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
