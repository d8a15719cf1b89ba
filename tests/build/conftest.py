"""The package built from a copy of this checkout, once, by a Python that has nothing but the build's tools."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
BUILD_TOOLS = ("setuptools", "pybind11")


@dataclass
class Built:
    path: Path
    said: str
    """All that the build printed."""


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory) -> Path:
    """A Python that imports setuptools and pybind11, and in whose folders no nvcc wheel lies."""
    home = tmp_path_factory.mktemp("bare")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip())
    for tool in BUILD_TOOLS:
        files = importlib.metadata.files(tool) or []
        for top in {file.parts[0] for file in files if not file.parts[0].startswith((".", "__"))}:
            source = Path(importlib.metadata.distribution(tool).locate_file(top))
            if source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    return python


@pytest.fixture(scope="session")
def no_nvcc() -> dict[str, str]:
    """The environment without CUDA_HOME and without the folders of PATH that hold an nvcc."""
    folders = os.environ["PATH"].split(os.pathsep)
    path = os.pathsep.join(folder for folder in folders if not Path(folder, "nvcc").exists())
    if not any(shutil.which(compiler, path=path) for compiler in ("c++", "g++", "clang++", "cc", "gcc")):
        pytest.skip("the C++ compiler lies in one folder with nvcc")
    dropped = ("CUDA_HOME", "PYTHONPATH", "STATESTREAM_CUDA", "STATESTREAM_CUDA_ARCHS")
    return {**{key: value for key, value in os.environ.items() if key not in dropped}, "PATH": path}


@pytest.fixture(scope="session")
def checkout(tmp_path_factory) -> Path:
    """A copy of this checkout with nothing built in it."""
    copy = tmp_path_factory.mktemp("checkout") / "statestream"
    built = shutil.ignore_patterns(".*", "build", "dist", "*.so", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=lambda folder, names: built(folder, names) if _top(folder) else _inner(names))
    return copy


@pytest.fixture(scope="session")
def sdist(checkout, bare_python, no_nvcc, tmp_path_factory) -> Path:
    """STATESTREAM_CUDA=1 without an nvcc: packing the source asks for no compiler."""
    folder = tmp_path_factory.mktemp("sdist")
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    run_python(bare_python, code, cwd=checkout, env={**no_nvcc, "STATESTREAM_CUDA": "1"})
    (archive,) = folder.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="session")
def wheel(sdist, bare_python, no_nvcc, tmp_path_factory) -> Built:
    """The wheel that the sdist becomes where there is no nvcc: a minute, so it is kept until a source changes."""
    source = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(source, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    tools = [(tool, importlib.metadata.version(tool)) for tool in BUILD_TOOLS]
    digest = hashlib.sha256(repr([sys.version, tools, no_nvcc["PATH"]]).encode())
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        digest.update(str(path.relative_to(source)).encode() + path.read_bytes())
    kept = Path(tempfile.gettempdir()) / f"statestream-wheel-{digest.hexdigest()[:20]}"
    with FileLock(f"{kept}.lock"):
        if not kept.exists():
            made = source / "made"
            code = f"from setuptools import build_meta; build_meta.build_wheel({str(made)!r})"
            (unpacked,) = source.iterdir()
            made.mkdir()
            done = run_python(bare_python, code, cwd=unpacked, env=no_nvcc)
            (made / "log").write_text(done.stdout + done.stderr)
            shutil.move(made, kept)
    (path,) = kept.glob("*.whl")
    return Built(path, (kept / "log").read_text())


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder that the wheel is installed to."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(folder)]
    subprocess.run([*pip, str(wheel.path)], check=True, timeout=120)
    return folder


def run_python(python: Path, code: str, *, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([python, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def _top(folder: str) -> bool:
    return Path(folder) == ROOT


def _inner(names: list[str]) -> set[str]:
    return {name for name in names if name == "__pycache__" or name.endswith((".so", ".egg-info"))}
