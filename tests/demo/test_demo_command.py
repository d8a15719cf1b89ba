"""`statestream demo`, whole: its verdict, its files, its exit status."""

import contextlib
import errno
import os
import re
import subprocess
import sys

import pytest
import torch
from matplotlib import image
from statestream.demo import checkpoint


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def written(folder):
    return sorted(path.name for path in folder.iterdir())


def test_resumed_run_equals_the_run_that_never_stopped(command, tmp_path):
    out = tmp_path / "new" / "folder"
    ran = command("demo", "--steps", 11, "--device", "cpu", "--out", out)
    assert ran.status == 0, ran
    assert "equal bit for bit" in unwrapped(ran.out)
    assert "DIFFERENT" not in ran.out
    assert "8.00 (moments 4.00, FP32 weights 4.00)" in ran.out
    assert "12.00 (moments 8.00, FP32 weights 4.00)" in ran.out  # torch.optim.AdamW
    first, last = (float(re.search(rf"loss, {step} step\D+([\d.]+)", ran.out)[1]) for step in ("first", "last"))
    assert 5.0 < first < 6.5  # about log(256), what knowing nothing gives
    assert last < first - 1.5
    assert written(out) == ["loss.png", "memory.png"]
    for path in out.iterdir():
        pixels = image.imread(path)
        assert min(pixels.shape[:2]) > 300
        assert pixels[..., :3].std() > 0.05, f"{path.name} is blank"


def test_fp32_moments_and_torch_left_as_it_was(command, tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    before = (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
    ran = command("demo", "--steps", 2, "--device", "cpu", "--out", tmp_path, "--moments", "torch.float32", "--seed", 3)
    assert ran.status == 0, ran
    assert ran.out.count("12.00 (moments 8.00, FP32 weights 4.00)") == 2  # ours and torch.optim.AdamW's
    after = (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
    assert before == after
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("moments", [pytest.param("fp16", marks=pytest.mark.long), "fp8"])
def test_scaled_moments_are_compared_by_their_values(command, tmp_path, moments):
    """The same values may be stored with another scale after a load."""
    ran = command("demo", "--steps", 6, "--device", "cpu", "--out", tmp_path, "--moments", moments)
    assert ran.status == 0, ran
    assert "equal bit for bit" in unwrapped(ran.out)


@pytest.mark.parametrize(
    ("fault", "moments", "after_loading"),
    [
        ("flip-bit", "bf16", r"exp_avg of blocks\.0\.qkv\.weight: 1 of 110,592 elements"),
        pytest.param(
            *("flip-bit", "fp32", r"exp_avg of blocks\.0\.qkv\.weight: 1 of 110,592 elements"), marks=pytest.mark.long
        ),
        pytest.param(
            *("flip-bit", "fp16", r"exp_avg of blocks\.0\.qkv\.weight: 1 of 110,592 elements"), marks=pytest.mark.long
        ),
        pytest.param(
            *("flip-bit", "fp8", r"exp_avg of blocks\.0\.qkv\.weight: \d+ of 110,592 elements"), marks=pytest.mark.long
        ),
        ("drop-step", "bf16", r"step of blocks\.0\.attention_norm\.bias: 1 of 1 elements"),
        ("drop-masters", "bf16", r"master_param of blocks\.0\.attention_norm\.bias: \d+ of 192 elements"),
    ],
)
def test_planted_fault_is_found_after_loading_and_at_the_end(command, tmp_path, fault, moments, after_loading):
    ran = command("demo", "--steps", 4, "--device", "cpu", "--out", tmp_path, "--moments", moments, "--plant", fault)
    text = unwrapped(ran.out)
    assert ran.status == 1, ran
    assert "DIFFERENT" in text
    assert "equal bit for bit" not in text
    assert re.search(f"after loading: {after_loading}", text)
    assert "at the end: " in text
    assert written(tmp_path) == ["loss.png", "memory.png"]
    if fault == "flip-bit":
        assert text.count("after loading: ") == 1, "the flipped bit alone differs"


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_stopped_half_way_leaves_no_files_and_says_so_in_a_line(command, tmp_path, monkeypatch, fault):
    def fail(*_args):
        raise fault

    monkeypatch.setattr(checkpoint, "load", fail)
    ran = command("demo", "--steps", 2, "--device", "cpu", "--out", tmp_path)
    last = ran.err.strip().splitlines()[-1]
    if isinstance(fault, KeyboardInterrupt):
        assert (ran.status, last) == (130, "statestream: interrupted")
    else:
        assert (ran.status, last) == (2, "statestream: [Errno 28] No space left on device")
    assert "Traceback" not in ran.err
    assert written(tmp_path) == []


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are POSIX")
def test_runs_as_a_module_and_shows_a_progress_bar_on_an_ascii_terminal(tmp_path):
    import pty

    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "statestream", "demo", "--steps", "3", "--device", "cpu", "--out", str(tmp_path)],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "TERM": "xterm", "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # Linux's word for the end of a pseudo-terminal
        while part := os.read(ours, 65536):
            shown += part
    os.close(ours)
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, shown
    assert "equal bit for bit" in unwrapped(said)
    for words in (b"never interrupted", b"before the export", b"after the load", b"/6", b"loss"):
        assert words in shown, words
    assert said.isascii() and shown.isascii()
    assert b"arning" not in shown


@pytest.mark.long
def test_default_demo_takes_under_90_seconds(tmp_path):
    done = subprocess.run([sys.executable, "-m", "statestream", "demo", "--out", tmp_path], timeout=90)
    assert done.returncode == 0
