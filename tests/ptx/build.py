"""Compiles the CUDA module for the interpreter: its host side against fake_cudart, its kernels to PTX."""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pybind11

__all__ = ["ARCHS", "Built", "build", "find_nvcc"]

ROOT = Path(__file__).resolve().parents[2]
ARCHS = (80, 90)

_TARGETS = [f"-gencode=arch=compute_{arch},code=compute_{arch}" for arch in ARCHS]


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
    """The module of a source tree; kept under its build/ and reused while nothing in csrc changes."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError("no nvcc in CUDA_HOME, PATH or the nvidia-cuda-nvcc wheel")
    folder = root / "build" / "ptx" / _key(root, nvcc)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            _compile(root, nvcc, work)
            work.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was first
                raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    ptx = {arch: sorted(folder.glob(f"*.compute_{arch}.ptx")) for arch in ARCHS}
    return Built(folder / _module_name(), ptx)


def _module_name() -> str:
    return "_cuda" + sysconfig.get_config_var("EXT_SUFFIX")


def _wheel_flags(root: Path) -> list[str]:
    """NVCC_EXACT of setup.py: the PTX of other flags would vouch for nothing that is shipped."""
    for node in ast.parse((root / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NVCC_EXACT":
            return ast.literal_eval(node.value)
    raise RuntimeError("setup.py has no NVCC_EXACT")


def _key(root: Path, nvcc: str) -> str:
    version = subprocess.run([nvcc, "--version"], check=True, capture_output=True).stdout
    digest = hashlib.sha256(version + repr((_wheel_flags(root), sys.version, pybind11.__version__)).encode())
    here = Path(__file__).parent
    sources = [p for p in sorted((root / "csrc").rglob("*")) if p.is_file() and p.parent.name != "cpu"]
    for path in [*sources, here / "build.py", here / "fake_cudart.cpp"]:
        digest.update(str(path.relative_to(root if path.is_relative_to(root) else here)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:20]


def _compile(root: Path, nvcc: str, folder: Path) -> None:
    cuda = root / "csrc" / "cuda"
    archs = '-DSTATESTREAM_CUDA_ARCHS="PTX"'
    includes = [f"-I{sysconfig.get_path('include')}", f"-I{pybind11.get_include()}"]
    host = [nvcc, "-std=c++17", "-O0", "-Xcompiler", "-fPIC,-fvisibility=hidden", *includes, archs, "-c"]
    commands = [
        # One folder a file: nvcc's temporaries of the same name would meet.
        [nvcc, *_wheel_flags(root), *_TARGETS, "--keep", "--keep-dir", str(folder), "-c", str(source)]
        for source in sorted(cuda.glob("*.cu"))
    ]
    commands += [[*host, str(source)] for source in sorted(cuda.glob("*.cpp"))]
    commands.append([*host, "-Xcompiler", "-fvisibility=default", str(Path(__file__).parent / "fake_cudart.cpp")])
    objects = [str(folder / f"{Path(c[-1]).stem}.o") for c in commands]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda c, o: _run([*c, "-o", o], folder), commands, objects))
    _run([nvcc, "-shared", "--cudart", "none", *objects, "-o", str(folder / _module_name())], folder)
    for path in folder.iterdir():
        if path.suffix != ".ptx" and path.name != _module_name():
            path.unlink()


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
