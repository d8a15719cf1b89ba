"""`statestream demo --ranks N`: real processes, FSDP2 over gloo, resumed on as many ranks and on half as many."""

import errno
import re

import pytest
from statestream.demo import ranks as ranks_module
from statestream.demo import settings as settings_module
from statestream.demo.ranks import CLOSE, RanksOutcome
from statestream.demo.settings import Settings

pytestmark = pytest.mark.timeout(600)


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def test_two_ranks_resume_bit_for_bit_and_one_rank_closely(command, tmp_path):
    ran = command("demo", "--ranks", 2, "--steps", 4, "--device", "cpu", "--out", tmp_path)
    text = unwrapped(ran.out)
    assert ran.status == 0, ran
    assert "1,457,856 parameters, 4 steps, on cpu, 2 ranks" in text
    assert "equal bit for bit" in text
    assert re.search(r"close: resumed on 1 rank, the losses are within 0\.0\d+ nats", text)
    exported = float(re.search(r"exported to the host, by rank 0\D+([\d.]+) MB", text)[1])
    assert exported == pytest.approx(12 * 1_457_856 / 2 / 1e6, rel=0.01)  # half of the FP32 state
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png", "memory.png"]


def without_room(settings, progress, folder, world):
    """A part of the demo on a full disk."""
    if world.rank == 1:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_checkpoint_that_cannot_be_written_on_one_rank_is_said_in_its_words(tmp_path):
    settings = Settings.checked(device="cpu", ranks=2, steps=2, out=tmp_path, moments="bf16", seed=0)
    with pytest.raises(OSError, match="No space left on device"):
        ranks_module._spawn(settings, 2, without_room, tmp_path, lambda *_: None)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_any_number_of_ranks_resumes(command, tmp_path, ranks):
    ran = command("demo", "--ranks", ranks, "--steps", 30, "--device", "cpu", "--out", tmp_path)
    assert ran.status == 0, ran
    assert "equal bit for bit" in unwrapped(ran.out)


@pytest.mark.long
@pytest.mark.parametrize("fault", ["flip-bit", "drop-step"])
def test_planted_fault_is_found_on_the_rank_that_has_it(command, tmp_path, fault):
    ran = command("demo", "--ranks", 2, "--steps", 4, "--device", "cpu", "--out", tmp_path, "--plant", fault)
    text = unwrapped(ran.out)
    assert ran.status == 1, ran
    assert "DIFFERENT" in text
    assert re.search(r"after loading: \w+ of \S+ on rank [01]: 1 of", text)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--ranks", "3"], "--ranks: 3 does not divide a batch; use 1, 2, 4, 8"),
        (["--ranks", "0"], "--ranks: 0"),
        (["--ranks", "many"], "--ranks"),
        (["--ranks", "2", "--device", "cuda:1"], "--device: cuda:1 is one device"),
    ],
)
def test_ranks_that_cannot_be_are_one_line_and_status_2(command, args, said):
    ran = command("demo", *args)
    assert (ran.status, ran.err.count("\n")) == (2, 1)
    assert said in ran.err


def test_gpus_are_used_where_there_is_one_a_rank(monkeypatch, tmp_path):
    monkeypatch.setattr(settings_module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(settings_module.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(settings_module.kernels, "has_adam", lambda device, formats: True)
    options = {"steps": 2, "out": tmp_path, "moments": "bf16", "seed": 0}
    assert Settings.checked(device="auto", ranks=2, **options).device.type == "cuda"
    few = Settings.checked(device="auto", ranks=4, **options)
    assert few.device.type == "cpu" and "2 CUDA device(s)" in few.remark
    with pytest.raises(ValueError, match="cuda cannot be used"):
        Settings.checked(device="cuda", ranks=4, **options)


@pytest.mark.parametrize(("off", "right"), [(0.0, True), (CLOSE / 2, True), (1.1 * CLOSE, False)])
def test_losses_on_other_ranks_count(outcome, off, right):
    half = outcome.settings.half
    elsewhere = [loss + off for loss in outcome.uninterrupted[half:]]
    found = RanksOutcome(outcome, 1, elsewhere)
    assert found.furthest == pytest.approx(off)
    assert found.right is right
