"""Bad input is one clear line and exit status 2; --help answers without torch."""

import subprocess
import sys

import pytest
import torch
from statestream import kernels
from statestream.cli import main
from statestream.demo.settings import Settings

REFUSED = [
    (["--steps", "abc"], "--steps"),
    (["--steps", "1"], "--steps: 1 is too few"),
    (["--steps", "-4"], "--steps: -4 is too few"),
    (["--steps"], "--steps"),
    (["--device", "banana"], "--device: 'banana' is not one of auto, cpu, cuda"),
    (["--device", ""], "--device: ''"),
    (["--device", "meta"], "--device: 'meta'"),
    (["--device", "cuda:"], "--device: 'cuda:'"),
    (["--device", "cuda:-1"], "--device: 'cuda:-1'"),
    (["--device", "cuda:\N{SUPERSCRIPT TWO}"], "--device"),
    (["--device", "cuda:999"], "--device: cuda:999 cannot be used"),
    (["--moments", "fp12"], "--moments: 'fp12' is not supported"),
    (["--moments", "int64"], "--moments: 'int64' is not supported"),
    (["--seed", "-1"], "--seed: -1 is out of range"),
    (["--seed", "99999999999999999999"], "--seed"),
    (["--plant", "rumour"], "--plant: 'rumour' is unknown; use flip-bit, drop-step, drop-masters"),
    (["--frobnicate"], "--frobnicate"),
    (["extra"], "extra"),
]


@pytest.mark.parametrize(
    ("args", "said"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_bad_input_is_one_line_and_status_2(command, tmp_path, monkeypatch, args, said):
    monkeypatch.chdir(tmp_path)
    ran = command("demo", *args)
    assert ran.status == 2
    assert ran.out == ""
    assert ran.err.startswith("statestream: ")
    assert ran.err.count("\n") == 1
    assert said in ran.err
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_written_is_refused_before_training(command, tmp_path):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        ran = command("demo", "--out", out)
        assert (ran.status, ran.err.count("\n")) == (2, 1)
        assert "--out" in ran.err
    assert (tmp_path / "file").read_text() == "mine"


def test_unknown_command_is_one_line(command):
    ran = command("dmeo")
    assert (ran.status, ran.err.count("\n")) == (2, 1)
    assert "dmeo" in ran.err


def test_no_command_shows_what_there_is(command):
    ran = command()
    assert "demo" in ran.out + ran.err
    assert "Traceback" not in ran.err


def test_help_needs_no_torch():
    code = (
        "import sys\nfrom statestream.cli import main\n"
        "try: main(['demo', '--help'])\nfinally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for option in ("--steps", "--device", "--out", "--moments", "--seed"):
        assert option in done.stdout
    assert "--plant" not in done.stdout


def test_faults_of_our_own_are_not_hidden(tmp_path, monkeypatch):
    # Only what the user can put right becomes one line; the rest keeps its traceback.
    from statestream.demo import checkpoint

    def fail(*_args):
        raise ValueError("a fault")

    monkeypatch.setattr(checkpoint, "save", fail)
    with pytest.raises(ValueError, match="a fault"):
        main(["demo", "--steps", "2", "--device", "cpu", "--out", str(tmp_path)])


NO_KERNELS = [ImportError("built for the CPU alone"), RuntimeError("statestream cannot run on cuda: too old")]


@pytest.fixture(params=NO_KERNELS, ids=["CPU build", "old GPU"])
def gpu_without_kernels(request, monkeypatch):
    """A machine whose GPU torch sees, and statestream cannot use."""

    def refuse(_device, _formats):
        raise request.param

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(kernels, "has_adam", refuse)
    return str(request.param)


def test_gpu_without_kernels_is_refused_where_asked_for_by_name(command, tmp_path, gpu_without_kernels):
    ran = command("demo", "--device", "cuda", "--out", tmp_path / "out")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err == f"statestream: --device: cuda cannot be used: {gpu_without_kernels}\n"


def test_gpu_without_kernels_leaves_the_cpu_and_says_why(tmp_path, gpu_without_kernels):
    settings = Settings.checked(steps=2, device="auto", out=tmp_path, moments="bf16", seed=0)
    assert settings.device == torch.device("cpu")
    assert settings.remark == f"on the CPU, as {gpu_without_kernels}"
