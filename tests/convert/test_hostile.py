"""Checkpoints that nobody would write on purpose: each is converted or refused in one line, nothing half-written is
left, and the source keeps its bytes."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.command_line import Ran, command
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

__all__ = ["command"]

WAYS = [
    ("statestream",),
    ("statestream", "--masters", "float32"),
    ("statestream", "--masters", "remainders"),
    ("transformer_engine",),
    ("torch",),
    ("torch", "--masters", "weights"),
]


def checkpoint(flat: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)).bfloat16()
    adamw = torch.optim.AdamW(list(model.named_parameters()))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    adamw.step()
    weights, state = get_state_dict(model, adamw, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    return {"model": weights, "optim": state}


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(p): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def assert_refused(ran: Ran) -> None:
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1), ran.err
    assert ran.err.startswith("statestream: ")


def assert_converted_or_refused(command, source: str, way: tuple[str, ...]) -> None:
    before = contents(Path())
    ran = command("convert", source, "new", "--to", *way)
    if ran.status == 0:
        shutil.rmtree("new") if Path("new").is_dir() else Path("new").unlink()
    else:
        assert_refused(ran)
    assert contents(Path()) == before


# ---- damage at random ----


def junk() -> list[Any]:
    numbers = [None, True, -1, 0, -0.0, 7, 1e400, float("nan"), 10**400]
    values = ["", "junk", b"x", [], [None], (1, 2), {}, {"a": 1}]
    tensors = [torch.tensor(3), torch.tensor(float("nan")), torch.tensor(float("inf")), torch.zeros(0), torch.zeros(2)]
    odd = [torch.zeros(3, dtype=torch.complex64), torch.zeros(2, 2, dtype=torch.int64), torch.empty(3, device="meta")]
    return [*numbers, *values, *tensors, *odd, torch.eye(4).to_sparse()]


def spoilt(value: Any, chance: random.Random) -> Any:
    """The content of a checkpoint with one part of it another, or gone."""
    if isinstance(value, dict) and value and chance.random() < 0.92:
        key = chance.choice(list(value))
        if chance.random() < 0.12:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: spoilt(value[key], chance)}
    if isinstance(value, (list, tuple)) and value and chance.random() < 0.7:
        at = chance.randrange(len(value))
        return type(value)([*value[:at], spoilt(value[at], chance), *value[at + 1 :]])
    return chance.choice(junk())


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("seed", range(2))
def test_a_spoilt_file_is_converted_or_refused(here, command, seed, flat):
    chance, whole = random.Random(seed), checkpoint(flat)
    for _ in range(60):
        torch.save(spoilt(whole, chance), "a.pt")
        assert_converted_or_refused(command, "a.pt", chance.choice(WAYS))


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("seed", range(1))
def test_a_spoilt_folder_is_converted_or_refused(here, command, seed, flat):
    chance, whole = random.Random(seed), checkpoint(flat)
    for _ in range(6):
        while True:
            try:
                dcp.save(spoilt(whole, chance), checkpoint_id="a", no_dist=True)
                break
            except BaseException:  # what DCP itself does not save
                shutil.rmtree("a", ignore_errors=True)
        assert_converted_or_refused(command, "a", chance.choice(WAYS))
        shutil.rmtree("a")


@pytest.mark.parametrize("form", ["file", "folder", "metadata"])
def test_flipped_bytes_and_cuts_are_converted_or_refused(here, command, form):
    """Of the values a flipped byte is another value; of what says where they are, damage."""
    dcp.save(checkpoint(), checkpoint_id="a", no_dist=True)
    torch.save(checkpoint(), "a.pt")
    damaged = {"file": Path("a.pt"), "folder": Path("a/__0_0.distcp"), "metadata": Path("a/.metadata")}[form]
    whole, chance = damaged.read_bytes(), random.Random(3)
    for _ in range(40):
        content = bytearray(whole)
        for _ in range(chance.randrange(4)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        if chance.random() < 0.4:
            del content[chance.randrange(len(content)) :]
        damaged.write_bytes(content)
        assert_converted_or_refused(command, "a.pt" if form == "file" else "a", chance.choice(WAYS))


# ---- places ----


def file(name: str = "a.pt") -> None:
    torch.save(checkpoint(), name)


def folder(name: str = "a") -> None:
    dcp.save(checkpoint(), checkpoint_id=name, no_dist=True)


def loop() -> None:
    Path("b").symlink_to("a")
    Path("a").symlink_to("b")


def dangling_target() -> None:
    file("a")
    Path("new").symlink_to("gone")


def without_metadata() -> None:
    folder()
    Path("a/.metadata").unlink()


def unfinished() -> None:
    file("a")
    Path(".new.part").write_text("another one's")


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def file_with_code() -> None:
    torch.save(checkpoint() | {"extra": Bomb()}, "a")


def older_file_with_code() -> None:
    torch.save(checkpoint() | {"extra": Bomb()}, "a", _use_new_zipfile_serialization=False)


def bare_pickle_with_code() -> None:
    Path("a").write_bytes(pickle.dumps(Bomb()))


def metadata_with_code() -> None:
    folder()
    Path("a/.metadata").write_bytes(pickle.dumps(Bomb()))


def metadata_with_code_within() -> None:
    folder()
    metadata = pickle.loads(Path("a/.metadata").read_bytes())
    metadata.planner_data["more"] = Bomb()
    Path("a/.metadata").write_bytes(pickle.dumps(metadata))


class Method:
    """A method of a class that checkpoints do name a neighbour of."""

    def __reduce__(self):
        from torch.distributed.checkpoint.filesystem import FileSystem

        return FileSystem.rm_file, (FileSystem(), "a/__0_0.distcp")


def metadata_with_a_method_of_torchs() -> None:
    folder()
    metadata = pickle.loads(Path("a/.metadata").read_bytes())
    metadata.planner_data["more"] = Method()
    Path("a/.metadata").write_bytes(pickle.dumps(metadata))


def metadata_that_points_outside() -> None:
    folder()
    Path("a/__0_0.distcp").rename("elsewhere")
    metadata = pickle.loads(Path("a/.metadata").read_bytes())
    for stored in metadata.storage_data.values():
        object.__setattr__(stored, "relative_path", "../elsewhere")
    Path("a/.metadata").write_bytes(pickle.dumps(metadata))


def folder_of_text() -> None:
    Path("a").mkdir()
    Path("a/.metadata").mkdir()


PLACES: list[tuple[Callable[[], object], str, str]] = [
    (loop, "a", "does not exist"),
    (dangling_target, "new", "is there already"),
    (without_metadata, "new", "holds no checkpoint"),
    (unfinished, "new", "another conversion writes it, or one was stopped"),
    (file_with_code, "new", "tensors and plain values alone"),
    (older_file_with_code, "new", "tensors and plain values alone"),
    (bare_pickle_with_code, "new", "tensors and plain values alone"),
    (metadata_with_code, "new", "names posix.mkdir, which is none of a checkpoint's"),
    (metadata_with_code_within, "new", "names posix.mkdir, which is none of a checkpoint's"),
    (metadata_with_a_method_of_torchs, "new", "FileSystem, which is none of a checkpoint's"),
    (metadata_that_points_outside, "new", "is damaged: .metadata cannot be read"),
    (folder_of_text, "new", "Is a directory"),
    (lambda: folder("a"), "a/inside", "is within a, which is only read"),
    (lambda: folder("a"), "./a/../a/inside", "which is only read"),
    (lambda: folder("a"), "a", "is there already"),
    (lambda: folder("a"), "a/.metadata", "is a file; a folder's conversion needs a folder"),
    (lambda: file("a"), "a", "is there already"),
    (lambda: file("a"), "a/new", "a is no folder"),
    (lambda: file("a"), "/proc/new", "/proc/"),
    (lambda: folder("a"), "/proc/new", "/proc/"),
    (lambda: file("a"), ".", "names no file or folder"),
    (lambda: file("a"), "/", "names no file or folder"),
    (lambda: file("a"), "n" * 300, "File name too long"),
    (lambda: Path("a").write_bytes(b""), "new", "is no file of torch.save"),
    (lambda: os.mkfifo("a"), "new", "is no file"),
    (lambda: torch.save([], "a"), "new", "no optimizer's state dict"),
    (lambda: torch.save(torch.zeros(3), "a"), "new", "no optimizer's state dict"),
]


@pytest.mark.parametrize(("make", "target", "said"), PLACES)
def test_a_place_that_cannot_be_is_one_line_and_nothing_is_changed(here, command, make, target, said):
    make()
    links = [p for p in here.iterdir() if p.is_symlink()]
    before = contents(here) if not (here / "a").is_fifo() else None
    ran = command("convert", "a", target, "--to", "statestream")
    assert_refused(ran)
    assert said in ran.err and not Path("ran").exists()
    assert [p for p in here.iterdir() if p.is_symlink()] == links
    assert before is None or contents(here) == before


def test_an_empty_model_is_converted(here, command):
    torch.save(torch.optim.AdamW([torch.nn.Parameter(torch.empty(0))]).state_dict(), "a.pt")
    assert command("convert", "a.pt", "b.pt", "--to", "statestream").status == 0
    assert torch.load("b.pt", weights_only=True)["param_groups"][0]["params"] == [0]


NAMES = ["модель", "weights \N{SNOWMAN}.pt", "a b'c\"d", "new\nline"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_any_name_will_do(here, command, name):
    file()
    folder()
    for source in ("a.pt", "a"):
        ran = command("convert", source, name, "--to", "statestream")
        assert ran.status == 0 and ran.err == "", ran.err
        again = command("convert", name, "again", "--to", "torch")
        assert again.status == 0, again.err
        for made in (Path(name), Path("again")):
            shutil.rmtree(made) if made.is_dir() else made.unlink()


def test_a_name_of_bytes_that_are_no_text(here, command):
    file()
    assert command("convert", "a.pt", "\udcff", "--to", "statestream").status == 0
    assert Path("\udcff").stat().st_size > 100
    assert_refused(command("convert", "\udcff", "again", "--to", "torch"))  # torch maps no file of such a name
