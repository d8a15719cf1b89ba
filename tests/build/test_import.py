"""Importing statestream: cheap, quiet, and clear where its compiled part is missing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import statestream


def run(code, cwd, *, path=None, env=None, check=True):
    environment = {**os.environ, **(env or {})}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )
    assert not check or done.returncode == 0, done.stderr
    return done


@pytest.fixture(params=["absent", "damaged"])
def package_without_native(request, tmp_path):
    """A folder to import a copy of the package from, whose compiled module is not there or no library."""
    source = Path(statestream.__file__).parent
    copy = tmp_path / "path" / "statestream"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.pyd"))
    if request.param == "damaged":
        (native,) = source.glob("_cpu*.so")
        (copy / native.name).write_text("not a library")
    return copy.parent


def test_missing_native_module_is_one_import_error_that_says_what_to_run(package_without_native, tmp_path):
    done = run("from statestream import FusedAdam", tmp_path, path=package_without_native, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("ImportError: statestream._cpu, the compiled part of statestream, cannot be imported (")
    assert "Build it with: pip install" in last


def test_missing_native_module_is_one_line_of_the_command(package_without_native, tmp_path):
    code = "import sys\nfrom statestream.cli import main\nmain(['demo'])"
    done = run(code, tmp_path, path=package_without_native, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("statestream: statestream._cpu, the compiled part")
    assert done.stderr.count("\n") == 1
    assert run("from statestream.cli import main; main(['--help'])", tmp_path, path=package_without_native)


def test_importing_the_package_alone_loads_no_torch(tmp_path):
    run("import sys, statestream\nassert 'torch' not in sys.modules\nassert 'FusedAdam' in dir(statestream)", tmp_path)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'statestream' has no attribute 'FusedAdan'"):
        _ = statestream.FusedAdan
    with pytest.raises(ImportError, match="cannot import name 'FusedAdan'"):
        from statestream import FusedAdan  # noqa: F401


def test_import_adds_little_to_torchs_own(tmp_path):
    code = """
import sys, threading, time, warnings
import torch
warnings.simplefilter("error")
before, began = set(sys.modules), time.process_time()
from statestream import FusedAdam
spent, added = time.process_time() - began, set(sys.modules) - before
heavy = {"typer", "rich", "matplotlib", "numpy", "triton", "torch.distributed.checkpoint", "torch._dynamo"}
assert not added & heavy, added & heavy
assert spent < 0.5, spent
assert not torch.cuda.is_initialized()
assert threading.active_count() == 1
"""
    done = run(code, tmp_path)
    assert (done.stdout, done.stderr) == ("", "")


def test_import_writes_no_files(tmp_path):
    for name in ("home", "temp", "cwd"):
        (tmp_path / name).mkdir()
    env = {
        "HOME": str(tmp_path / "home"),
        "TMPDIR": str(tmp_path / "temp"),
        "XDG_CACHE_HOME": str(tmp_path / "home" / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    run("from statestream import FusedAdam", tmp_path / "cwd", env=env)
    assert [str(path) for path in tmp_path.rglob("*") if path.is_file()] == []
