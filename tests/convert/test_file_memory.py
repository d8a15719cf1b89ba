"""Conversion of a file: memory of the process that does not grow with the state, and a target that is whole or not
there, whatever ends the conversion."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers.bits import same_bits
from helpers.command_line import command
from helpers.interrupts import sigint_raises
from statestream.convert import convert_file, convert_state_dict, scratch
from torch.distributed.checkpoint.state_dict import get_state_dict

__all__ = ["command"]

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read as Linux has it")

MIB = 1 << 20
BUDGET = 12 * MIB
"""Of memory that is no file's: a part of a tensor as it is made, and what Python takes for names and numbers."""


def adam_file(path: Path, megabytes: int, tensors: int, kept: str | None = None) -> Path:
    """A BF16 model, and AdamW's state of it in BF16, in a file of about so many MiB; with masters or remainders."""
    elements = megabytes * MIB // (6 + {None: 0, "float32": 4, "remainders": 2}[kept]) // tensors
    weights = {f"w{i}": torch.full((elements // 64, 64), 1.5 + i, dtype=torch.bfloat16) for i in range(tensors)}
    adamw = torch.optim.AdamW([(name, torch.nn.Parameter(value)) for name, value in weights.items()])
    saved = adamw.state_dict()
    saved["state"] = {i: state_of(weight, kept) for i, weight in enumerate(weights.values())}
    if kept is not None:
        for group in saved["param_groups"]:
            group["format_version"], group["bias_correction"], group["step"] = 1, True, 3
    torch.save({"model": weights, "optim": saved}, path)
    return path


def state_of(weight: torch.Tensor, kept: str | None) -> dict[str, torch.Tensor]:
    state = {"step": torch.tensor(3.0)}
    state |= {name: torch.full_like(weight, 0.25) for name in ("exp_avg", "exp_avg_sq")}
    if kept == "float32":
        state["master_param"] = weight.float() + 2**-10
    elif kept == "remainders":
        state["master_param"] = torch.full_like(weight, 77, dtype=torch.int16)
    return state


def anonymous_bytes() -> int:
    """Resident memory of this process that is no file's."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def anonymous_peak(source: Path, target: Path, to: str, masters: str | None) -> int:
    """Bytes that are no file's over those before, at the highest that progress sees: after each part that is made,
    while its temporaries are still the allocator's, and at each write."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory would serve the work unseen
    before, most = anonymous_bytes(), [0]
    convert_file(source, target, to, masters=masters, progress=lambda *_: most.append(anonymous_bytes()))
    return max(most) - before


WAYS = {
    "nothing made": (None, "statestream", None),
    "masters made": (None, "statestream", "float32"),
    "remainders joined": ("remainders", "statestream", "float32"),
    "remainders become weights": ("remainders", "torch", "weights"),
    "masters become weights": ("float32", "torch", "weights"),
}


@pytest.mark.parametrize(("kept", "to", "masters"), WAYS.values(), ids=WAYS)
def test_memory_that_is_no_files_stays_within_one_budget_for_a_state_of_any_size(tmp_path, kept, to, masters):
    source = adam_file(tmp_path / "a.pt", 4 * BUDGET // MIB, 2, kept)
    peak = anonymous_peak(source, tmp_path / "b.pt", to, masters)
    assert peak < BUDGET
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "b.pt"]


@pytest.mark.parametrize(("kept", "to", "masters"), WAYS.values(), ids=WAYS)
def test_a_file_has_the_values_of_a_dict_converted_in_memory(tmp_path, monkeypatch, kept, to, masters):
    monkeypatch.setattr(scratch, "PART_ELEMENTS", 1000)
    seen: list[tuple[int, int]] = []
    source = adam_file(tmp_path / "a.pt", 1, 3, kept)
    convert_file(source, tmp_path / "b.pt", to, masters=masters, progress=lambda *at: seen.append(at))
    found, before = (torch.load(tmp_path / name, weights_only=True) for name in ("b.pt", "a.pt"))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen) and seen[-1][0] == seen[-1][1]
    assert len({total for _, total in seen}) == 1
    weights = dict(enumerate(before["model"].values()))
    if masters == "weights":
        for i, weight in enumerate(found["model"].values()):
            low = before["optim"]["state"][i]["master_param"]
            bits = (weights[i].view(torch.int16).int() << 16) + low if kept == "remainders" else low.view(torch.int32)
            assert same_bits(weight, bits.view(torch.float32))
        expected = convert_state_dict(before["optim"], to, drop=["master_param"], weights=weights)
    else:
        expected = convert_state_dict(before["optim"], to, masters=masters, weights=weights)
    assert found["optim"]["param_groups"] == expected["param_groups"]
    assert found["optim"]["state"].keys() == expected["state"].keys()
    for key, state in expected["state"].items():
        assert state.keys() == found["optim"]["state"][key].keys()
        assert all(same_bits(value, found["optim"]["state"][key][name]) for name, value in state.items())


def test_values_made_in_parts_keep_strides_and_places(tmp_path, monkeypatch):
    """Weights of odd sizes, transposed, channels last, of no element and of no dimension, by parts of 7 elements."""
    monkeypatch.setattr(scratch, "PART_ELEMENTS", 7)
    values = torch.arange(5 * 3 * 4 * 7, dtype=torch.float32)
    weights = {
        "plain": values[:105].reshape(5, 21),
        "transposed": values[:105].reshape(5, 21).t(),
        "channels last": values.reshape(5, 3, 4, 7).to(memory_format=torch.channels_last),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(1.25),
    }
    weights = {name: value.to(torch.bfloat16) for name, value in weights.items()}
    saved = torch.optim.AdamW([(name, torch.nn.Parameter(value)) for name, value in weights.items()]).state_dict()
    saved["state"] = {i: state_of(weight, None) for i, weight in enumerate(weights.values())}
    torch.save({"model": weights, "optim": saved}, tmp_path / "a.pt")
    convert_file(tmp_path / "a.pt", tmp_path / "b.pt", "statestream", masters="float32")
    made = torch.load(tmp_path / "b.pt", weights_only=True)["optim"]["state"]
    for i, (name, weight) in enumerate(weights.items()):
        assert same_bits(made[i]["master_param"], weight.float()), name
        assert made[i]["master_param"].stride() == weight.stride(), name


# ---- whole, or not there ----


@pytest.fixture
def largest_file():
    """Sets the most bytes that a file of this process may have: the system refuses a write beyond, as it does on a
    full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


FORMS = {
    "file": ("ours.pt", None),
    "file, masters made": ("ours.pt", "float32"),
    "folder": ("ours", None),
    "folder, masters made": ("ours", "float32"),
}


def checkpoints(folder: Path) -> None:
    """A file and a folder of 3 MiB."""
    import torch.distributed.checkpoint as dcp

    adam_file(folder / "ours.pt", 3, 2)
    model = torch.nn.Linear(512, 512, dtype=torch.bfloat16)
    adamw = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    adamw.step()
    weights, state = get_state_dict(model, adamw)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=folder / "ours", no_dist=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("limit", [100, 300_000, 900_000])
@pytest.mark.parametrize(("name", "masters"), FORMS.values(), ids=FORMS)
def test_a_write_that_the_system_refuses_is_one_line_and_leaves_nothing(
    command, tmp_path, largest_file, name, masters, limit
):
    checkpoints(tmp_path)
    before = contents(tmp_path)
    largest_file(limit)
    made = [] if masters is None else ["--masters", masters]
    ran = command("convert", tmp_path / name, tmp_path / "new", "--to", "statestream", *made)
    largest_file(1 << 40)
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1), ran.err
    assert "File too large" in ran.err and str(tmp_path / "new") in ran.err
    assert contents(tmp_path) == before and not (tmp_path / "new").exists()


@pytest.mark.parametrize(("name", "masters"), FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("the disk is gone")])
def test_whatever_stops_it_half_way_is_raised_and_leaves_nothing(tmp_path, name, masters, error):
    checkpoints(tmp_path)
    before = contents(tmp_path)

    def stop(done: int, total: int) -> None:
        if done > total * 0.6:
            raise error

    from statestream.convert import convert_checkpoint

    run = convert_checkpoint if name == "ours" else convert_file
    with pytest.raises(type(error) if isinstance(error, OSError) else error):
        run(tmp_path / name, tmp_path / "new", "statestream", masters=masters, progress=stop)
    assert contents(tmp_path) == before and not list(tmp_path.glob("*new*")) and not list(tmp_path.glob(".*"))


def interrupted_once_it_writes(folder: Path) -> tuple[int, str, str]:
    """Exit status and output of a conversion that gets Ctrl-C as soon as its target has a part."""
    args = [sys.executable, "-m", "statestream", "convert", "ours.pt", "new.pt", "--to", "statestream"]
    with sigint_raises():
        started = subprocess.Popen(
            [*args, "--masters", "float32"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    while started.poll() is None and not (folder / ".new.pt.part").exists():
        time.sleep(0.005)
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=60)
    return started.returncode, out, err


def test_a_real_ctrl_c_is_one_line_and_leaves_nothing(tmp_path):
    adam_file(tmp_path / "ours.pt", 60, 4)
    for _ in range(5):
        found = interrupted_once_it_writes(tmp_path)
        if found[0] != 0:
            break
        (tmp_path / "new.pt").unlink()  # on a busy machine it was done before the signal came
    assert found == (130, "", "statestream: interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["ours.pt"]


ENDS_AN_ARCHIVE = """
import os, signal, sys
from pathlib import Path
from statestream.convert import convert_file

signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupted_before(number):
    left = number

    def local(frame, event, argument):
        nonlocal left
        if event == "line":
            left -= 1
            if left == -1:
                signal.raise_signal(signal.SIGINT)
        return local

    def enter(frame, event, argument):
        ends = frame.f_code.co_name == "__exit__" and frame.f_code.co_filename.endswith("serialization.py")
        return local if ends and Path(".new.pt.part").exists() else None

    sys.settrace(enter)
    try:
        convert_file("ours.pt", "new.pt", "statestream", masters="float32")
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        sys.settrace(None)
    return "done" if left >= 0 else "lost"


number, said = 0, ""
while said != "done":
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, interrupted_before(number).encode())
        os._exit(0)
    os.close(write)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = os.read(read, 20).decode() or f"ended with {status}"
    print(said, sorted(os.listdir()))
    Path("new.pt").unlink(missing_ok=True)
    number += 1
    if number > 200 or said.startswith("ended"):
        break
"""


def test_ctrl_c_at_any_line_that_ends_the_archive_ends_no_process(tmp_path):
    """There torch lets a destructor complete the archive, in a file that may be closed by then."""
    adam_file(tmp_path / "ours.pt", 1, 2)
    done = subprocess.run(
        [sys.executable, "-c", ENDS_AN_ARCHIVE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    *interrupted, last = done.stdout.splitlines()
    assert last == "done ['new.pt', 'ours.pt']", done.stdout + done.stderr
    assert len(interrupted) > 1 and set(interrupted) == {"interrupted ['ours.pt']"}, interrupted
