"""Files of torch.save: an optimizer's state dict by itself, or within a dict of a training run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from statestream.convert.layout import groups_of
from statestream.convert.rules import Request
from statestream.convert.scratch import Scratch
from statestream.convert.state_dicts import StateDictView
from statestream.convert.target import appearing
from statestream.interrupts import interrupts_held
from statestream.state.state_format import MASTER

__all__ = ["convert_file"]

_DEPTH = 3
"""How deep in a file an optimizer's state dict is looked for: {"optimizer_states": [state dict]}."""


@torch.no_grad()
def convert_file(
    source_file: str | os.PathLike,
    target_file: str | os.PathLike,
    to: str,
    *,
    source: str | None = None,
    masters: str | None = None,
    adam_w_mode: bool | None = None,
    drop: Collection[str] = (),
    optimizer: str | None = None,
    model: str | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Writes a file of torch.save anew, with the optimizer's state as that of another Adam, and all else as it is.

    The source is mapped, not read into memory, and what is made anew goes by parts into files without names beside
    the target, so that host memory does not grow with the state; the disk needs room for the target and for those.
    (torch's format from before 1.6 cannot be mapped and is read whole.) The target appears when it is whole.

    Args:
        source_file: holds nothing but tensors and plain values (``weights_only=True`` loads it).
        target_file: is not there yet.
        to, source, masters, adam_w_mode, drop: as in `convert_checkpoint`.
        optimizer: where its state dict is in the file, such as "optim" or "optimizer_states.0"; None: found.
        model: where the weights are; None: found by the parameters' names. Numbers say nothing of names: weights are
            found where the state dict has names, as those of (name, parameter) pairs and of DCP have.
        progress: called with the bytes made and written and those to make and write in all.

    Raises:
        ValueError: something cannot be kept or is not there. Nothing has been written.
        OSError: a file cannot be read or written.

    A RuntimeWarning says how many masters do not round to their weights, where both are in the file.
    """
    with appearing(source_file, target_file) as part:
        scratch = Scratch(part.parent)
        content = _load(Path(source_file))
        path = _find_optimizer(content, optimizer)
        state_dict = _at(content, path)
        weights = _Weights(content, path, state_dict, model)
        view = StateDictView(state_dict, weights.by_key or None, scratch.make)
        if masters != "weights":
            converted = view.converted(Request(to, source, masters, adam_w_mode, drop))
        else:
            Request(to, source, masters, adam_w_mode, drop)  # refuses it where it cannot be
            if not weights.by_key:
                raise ValueError(
                    "masters='weights': the file has no weights by the names of the optimizer's parameters (numbers do "
                    "not say which is which: make the optimizer of named_parameters(), or convert a checkpoint of DCP)"
                )
            made = dict(view.fp32_weights())
            converted = view.converted(Request(to, source, None, adam_w_mode, {*drop, MASTER}))
            content = _with(content, weights.path, weights.replaced(made))
        view.agreement.warn()
        _write(_with(content, path, converted), scratch, part, progress)


def _load(file: Path) -> Any:
    if not file.is_file():
        raise ValueError(f"{os.fspath(file)} is no file")
    load = partial(torch.load, file, map_location="cpu", weights_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a file that is none of torch.save's torch warns before it raises
            try:
                return load(mmap=True)
            except RuntimeError:  # torch's older format cannot be mapped
                return load()
    except OSError:
        raise
    except Exception as error:  # a file of anything else may raise anything
        # torch's own text advises to load it without the check, which would run what is in it
        kind = type(error).__name__
        problem = f"is no file of torch.save with tensors and plain values alone ({kind})"
        raise ValueError(f"{os.fspath(file)} {problem}") from None


# ---- where things are ----

Path_ = tuple[Hashable, ...]


def _at(content: Any, path: Path_) -> Any:
    for key in path:
        content = content[key]
    return content


def _with(content: Any, path: Path_, value: Any) -> Any:
    """The content with another value there; what was loaded is not changed."""
    if not path:
        return value
    changed = list(content) if isinstance(content, list) else dict(content)
    changed[path[0]] = _with(content[path[0]], path[1:], value)
    return changed


def _walk(content: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Mapping]]:
    if isinstance(content, Mapping):
        yield path, content
    if len(path) < _DEPTH and isinstance(content, (Mapping, list)):
        items = content.items() if isinstance(content, Mapping) else enumerate(content)
        for key, value in items:
            yield from _walk(value, (*path, key))


def _name(path: Path_) -> str:
    return ".".join(map(str, path))


def _is_optimizer(found: Mapping) -> bool:
    if isinstance(found.get("param_groups"), list):
        return isinstance(found.get("state"), Mapping)
    return any(isinstance(key, str) and key.startswith("param_groups.") for key in found)


def _find_optimizer(content: Any, wanted: str | None) -> Path_:
    found = [path for path, value in _walk(content) if _is_optimizer(value)]
    if wanted is not None:
        found = [path for path in found if _name(path) == wanted]
        if not found:
            raise ValueError(f"optimizer: the file has no optimizer's state dict at {wanted!r}")
    if not found:
        raise ValueError("the file has no optimizer's state dict: none of its dicts has state and param_groups")
    if len(found) > 1:
        names = ", ".join(repr(_name(path)) for path in found)
        raise ValueError(f"the file has several optimizers; give optimizer= one of {names}")
    return found[0]


class _Weights:
    """The weights in the file, by the keys that the optimizer's state dict has for parameters."""

    def __init__(self, content: Any, optimizer: Path_, state_dict: Mapping, wanted: str | None):
        self.path: Path_ = ()
        self.by_key: dict[Hashable, Tensor] = {}
        self.names: dict[Hashable, Hashable] = {}
        keys, names = _members(state_dict)
        for path, found in _walk(content):
            inside = path[: len(optimizer)] == optimizer
            if inside or (wanted is not None and _name(path) != wanted) or not _is_tensors(found):
                continue
            if not found.keys() >= set(names):
                continue
            if self.by_key:
                raise ValueError(
                    f"the file has several models with these parameters; give model= {_name(self.path)!r} or "
                    f"{_name(path)!r}"
                )
            self.path, self.found = path, found
            self.names = dict(zip(keys, names, strict=True))
            self.by_key = {key: found[name] for key, name in self.names.items()}
        if wanted is not None and not self.by_key:
            raise ValueError(f"model: the file has no weights of the optimizer's parameters at {wanted!r}")

    def replaced(self, made: Mapping[Hashable, Tensor]) -> dict[Hashable, Tensor]:
        return {**self.found, **{self.names[key]: value for key, value in made.items()}}


def _is_tensors(found: Mapping) -> bool:
    return bool(found) and all(isinstance(value, Tensor) for value in found.values())


def _members(state_dict: Mapping) -> tuple[list[Hashable], list[Hashable]]:
    """Keys of the parameters in the state dict, and their names where it has them."""
    if not isinstance(state_dict.get("param_groups"), list):
        names = dict.fromkeys(key.split(".", 1)[1].rpartition(".")[0] for key in state_dict if key.startswith("param_"))
        return list(names), list(names)
    keys, names = [], []
    for settings, members in groups_of(state_dict):
        named = settings.get("param_names", members)
        keys += members
        names += named if isinstance(named, (list, tuple)) and len(named) == len(members) else members
    return keys, names


# ---- writing ----


class _Counted:
    """A binary file that says how much was written to it. Where `stop` says so it raises KeyboardInterrupt, once: the
    archive is completed after that, and what is raised from there would end the process."""

    def __init__(self, file: BinaryIO, said: Callable[[int], object], stop: Callable[[], bool]):
        self.file, self.said, self.stop = file, said, stop
        self.written, self.stopped = 0, False

    def write(self, data: bytes) -> int:
        if not self.stopped and self.stop():
            self.stopped = True
            raise KeyboardInterrupt
        count = self.file.write(data)
        self.written += count
        self.said(self.written)
        return count

    def flush(self) -> None:
        self.file.flush()


def _write(content: Any, scratch: Scratch, file: Path, progress: Callable[[int, int], object] | None) -> None:
    tensors = _tensor_bytes(content)
    total = scratch.nbytes + tensors

    def said(done: int) -> None:
        if progress is not None:
            progress(done, total)

    scratch.fill(said)
    with file.open("xb") as stream, interrupts_held() as came:
        torch.save(content, _Counted(stream, lambda written: said(scratch.nbytes + min(written, tensors)), came))
        stream.flush()
        os.fsync(stream.fileno())  # a disk that is full may say so no earlier
    said(total)


def _tensor_bytes(content: Any) -> int:
    if isinstance(content, Tensor):
        return content.nbytes if content.layout is torch.strided else 0
    if isinstance(content, Mapping):
        content = list(content.values())
    return sum(map(_tensor_bytes, content)) if isinstance(content, (list, tuple)) else 0
