"""Compiles the CUDA module for the interpreter: its host side against fake_cudart, its kernels to PTX."""

from __future__ import annotations

import ast
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

import pybind11
from filelock import FileLock

__all__ = ["ARCHS", "Built", "build", "find_nvcc"]

ROOT = Path(__file__).resolve().parents[2]
ARCHS = tuple(int(a) for a in os.environ.get("STATESTREAM_PTX_ARCHS", "80 90").split())
"""compute_NN that the tests run; STATESTREAM_PTX_ARCHS takes their place."""


@dataclass(frozen=True)
class Built:
    module: Path
    """statestream._cuda, its launches going to fake_cudart's callback."""
    ptx: dict[int, list[Path]]
    """By architecture, the text of every .cu file that has kernels."""


def find_nvcc() -> str | None:
    """nvcc from CUDA_HOME, PATH or the nvidia-cuda-nvcc wheel."""
    places = [Path(os.environ["CUDA_HOME"]) / "bin"] if os.environ.get("CUDA_HOME") else []
    places += [Path(p) for p in os.environ.get("PATH", "").split(os.pathsep)]
    places += sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin"))
    return next((str(p / "nvcc") for p in places if os.access(p / "nvcc", os.X_OK)), None)


def build(root: Path = ROOT) -> Built:
    """The module of a source tree. Each object is kept under build/ptx and reused while nothing that goes
    into it changes."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError("no nvcc in CUDA_HOME, PATH or the nvidia-cuda-nvcc wheels")
    cuda, here = root / "csrc" / "cuda", Path(__file__).parent
    device = [
        nvcc,
        *_wheel_flags(root),
        *(f"-gencode=arch=compute_{a},code=compute_{a}" for a in ARCHS),
        "--keep",
        "-c",
    ]
    includes = [f"-I{sysconfig.get_path('include')}", f"-I{pybind11.get_include()}"]
    host = [nvcc, "-std=c++17", "-O0", "-Xcompiler=-fPIC,-fvisibility=hidden", *includes]
    host += ['-DSTATESTREAM_CUDA_ARCHS="PTX"', "-c"]
    runtime = [nvcc, "-std=c++17", "-O0", "-Xcompiler=-fPIC", "-c"]
    jobs = [(device, source) for source in sorted(cuda.glob("*.cu"))]
    jobs += [(host, source) for source in sorted(cuda.glob("*.cpp"))] + [(runtime, here / "fake_cudart.cpp")]
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda job: _made(root, [*job[0], str(job[1])], _inputs(job[1])), jobs))
    objects = [str(folder / "it.o") for folder in folders]
    # Symbolic: torch's own runtime, loaded before it and for all to see, must not answer in the fake one's place.
    link = [nvcc, "-shared", "--cudart", "none", "-Xlinker=-Bsymbolic", *objects]
    module = _made(root, link, []) / "it.o"
    # How nvcc names them depends on the number of architectures.
    texts = [path for folder in folders for path in sorted(folder.glob("*.ptx"))]
    return Built(module, {a: [p for p in texts if f"\n.target sm_{a}\n" in p.read_text()] for a in ARCHS})


def _made(root: Path, command: list[str], inputs: list[Path]) -> Path:
    """A folder with the output of a command, it.o, and the PTX that came with it."""
    # Without the root: a copied tree takes the objects that were copied with it.
    recipe = [part.replace(str(root), "") for part in command]
    digest = hashlib.sha256(repr((_version(command[0]), pybind11.__version__, recipe)).encode())
    for path in inputs:
        digest.update(path.read_bytes())
    store = root / "build" / "ptx"
    folder = store / digest.hexdigest()[:24]
    store.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            _make(command, folder)
    return folder


def _make(command: list[str], folder: Path) -> None:
    work = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        done = subprocess.run([*command, "-o", str(work / "it.o")], cwd=work, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        for path in work.iterdir():
            if path.suffix != ".ptx" and path.name != "it.o":
                path.unlink()
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _inputs(source: Path, seen: frozenset[Path] = frozenset()) -> list[Path]:
    """A source file and what it includes by name in quotes, those files' own included."""
    if source in seen or not source.exists():
        return []
    found = [source]
    for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', source.read_text(), re.M):
        found += _inputs((source.parent / name).resolve(), seen | set(found))
    return list(dict.fromkeys(found))


@cache
def _version(nvcc: str) -> str:
    return subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout


def _wheel_flags(root: Path) -> list[str]:
    """NVCC_EXACT of setup.py: the PTX of other flags would vouch for nothing that is shipped."""
    for node in ast.parse((root / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NVCC_EXACT":
            return ast.literal_eval(node.value)
    raise RuntimeError("setup.py has no NVCC_EXACT")


if __name__ == "__main__":
    print(build().module)
