"""Importing statestream: cheap, quiet, and clear where its compiled part is missing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import statestream
from helpers.missing_packages import CLI_EXTRA, advice, python_without


def run(code, cwd, *, path=None, env=None, check=True):
    environment = {**os.environ, **(env or {})}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )
    assert not check or done.returncode == 0, done.stderr
    return done


@pytest.fixture(params=["absent", pytest.param("damaged", marks=pytest.mark.long)])
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


COST = """
import sys, threading, time, warnings
import torch
warnings.simplefilter("error")
before, began = set(sys.modules), time.process_time()
from statestream import FusedAdam
alone, added = time.process_time() - began, set(sys.modules) - before
from statestream import CPUOffloadOptimizer
both = time.process_time() - began
heavy = {"typer", "rich", "matplotlib", "numpy", "triton", "torch.distributed.checkpoint", "torch._dynamo"}
added |= set(sys.modules) - before
assert not added & heavy, added & heavy
assert not torch.cuda.is_initialized()
assert threading.active_count() == 1
print(1e3 * alone, 1e3 * both)
"""


def test_import_adds_little_to_torchs_own(tmp_path):
    """Processor time, where the package's bytecode is there; the least of a few, for a busy machine adds to it."""
    env = {"PYTHONDONTWRITEBYTECODE": ""}
    taken = []
    for _ in range(5):
        done = run(COST, tmp_path, env=env)
        assert done.stderr == ""
        taken.append([float(ms) for ms in done.stdout.split()])
        alone, both = map(min, zip(*taken, strict=True))
        if alone < 50 and both < 100:
            return
    pytest.fail(f"FusedAdam {alone:.0f} ms, limit 50; with CPUOffloadOptimizer {both:.0f} ms, limit 100")


TORCH_ALONE = """
import sys, tempfile, warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import statestream
from statestream import CPUOffloadOptimizer, FusedAdam, Timeline, log_memory, plan
from statestream.convert import convert_checkpoint, convert_file, convert_state_dict, fp32_weights

warnings.filterwarnings("ignore", "torch.distributed is disabled")
folder = Path(tempfile.mkdtemp(dir="."))
for wrap in (lambda inner: inner, lambda inner: CPUOffloadOptimizer(inner, 1 << 20)):
    model = torch.nn.Linear(16, 16).to(torch.bfloat16)
    optimizer = wrap(FusedAdam(model.parameters(), master_weights=True, exp_avg_dtype="bf16"))
    log_memory(optimizer, dict)
    for _ in range(2):
        model(torch.ones(4, 16, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    torch.save(optimizer.state_dict(), folder / "file")
    saved = get_optimizer_state_dict(model, optimizer)
    dcp.save(saved, checkpoint_id=folder / "checkpoint", no_dist=True)
    dcp.load(saved, checkpoint_id=folder / "checkpoint", no_dist=True)
    set_optimizer_state_dict(model, optimizer, saved)
    report, planned = optimizer.memory_report(), plan(model, optimizer, gpu_memory="80GiB")
    assert report.scalars() and planned.as_dict()
    assert "master_param" in str(report) and "masters" in str(planned)
convert_file(folder / "file", folder / "new", "torch", drop=["master_param"])
convert_checkpoint(folder / "checkpoint", folder / "other", "torch", drop=["master_param"])
convert_state_dict(optimizer.state_dict(), "torch", drop=["master_param"])
fp32_weights(optimizer.state_dict())
with Timeline(optimizer) as timeline:
    model(torch.ones(4, 16, dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()
assert timeline.spans
"""

PICTURES = """
for pictured in (planned, timeline):
    try:
        pictured.save_png("picture.png")
    except ImportError as error:
        print(error)
assert not Path("picture.png").exists()
"""


def test_training_saving_and_plans_need_torch_alone(tmp_path):
    """NumPy is no part of torch either."""
    done = python_without([*CLI_EXTRA, "numpy"], ["-c", TORCH_ALONE + PICTURES], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [advice("matplotlib")] * 2


def test_training_saving_and_plans_load_no_package_of_the_extra(tmp_path):
    run(f"{TORCH_ALONE}\nfound = {set(CLI_EXTRA)} & set(sys.modules)\nassert not found, found", tmp_path)


def test_convert_and_planner_load_nothing_of_each_other(tmp_path):
    code = "import sys, statestream.{} as _\nassert not [m for m in sys.modules if m.startswith('statestream.{}')]"
    run(code.format("convert.command", "planner"), tmp_path)
    run(code.format("planner.command", "convert"), tmp_path)


AUDIT = """
import os, sys
import torch
seen = []

def audit(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        wrote = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        if wrote or isinstance(mode, str) and set(mode) & set("wax+"):
            seen.append((event, *map(str, arguments)))
    elif event.split(".")[0] in ("socket", "subprocess", "shutil", "tempfile", "urllib", "ftplib", "smtplib"):
        seen.append((event, *map(str, arguments)))
    elif event in ("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.mkdir", "os.rename",
                   "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.putenv"):
        seen.append((event, *map(str, arguments)))

sys.addaudithook(audit)
import statestream
for name in statestream.__all__:
    getattr(statestream, name)
print(seen)
seen.clear()
open(os.devnull, "a").close()
os.environ["X"] = "y"
import socket
try:
    socket.create_connection(("localhost", 1))
except OSError:
    pass
print([event for event, *_ in seen])
"""


def test_import_opens_nothing_for_writing_and_asks_no_network(tmp_path):
    done = run(AUDIT, tmp_path, env={"PYTHONDONTWRITEBYTECODE": "1"})
    of_import, of_control = done.stdout.splitlines()
    assert of_import == "[]"
    assert "'open', 'os.putenv', 'socket.getaddrinfo'" in of_control


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
