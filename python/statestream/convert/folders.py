"""Folders of torch.distributed.checkpoint, converted a stored piece at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from statestream.convert.agreement import Agreement, comparable
from statestream.convert.folder_io import Entry, Reader, write_checkpoint
from statestream.convert.layout import STATE, Flat, group_label, param_label
from statestream.convert.rules import (
    ADAMS_TENSORS,
    Group,
    How,
    NewGroup,
    NewParam,
    Param,
    Request,
    convert,
)
from statestream.convert.target import appearing
from statestream.convert.values import dtype_of, sources, values_of
from statestream.state.state_format import MASTER, MOMENTS, STEP
from statestream.tensors.validate import count_of

__all__ = ["convert_checkpoint"]

Compare = Callable[[ChunkStorageMetadata, Tensor, Tensor | None], None]
"""Takes a piece of a master, and of its weight if that was read."""


@torch.no_grad()
def convert_checkpoint(
    source_folder: str | os.PathLike,
    target_folder: str | os.PathLike,
    to: str,
    *,
    source: str | None = None,
    masters: str | None = None,
    adam_w_mode: bool | None = None,
    drop: Collection[str] = (),
    optimizer: str | None = None,
    model: str | None = None,
    part_bytes: int = 256 * 1024 * 1024,
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Writes the checkpoint in `source_folder` anew, with the optimizer's state as that of another Adam.

    Everything else in it is carried over as it is. No process group is needed, and no model. Tensors stay in the
    pieces in which the ranks saved them. Host memory: twice `part_bytes` and a few of the largest pieces.

    Args:
        source_folder: written by ``dcp.save``, with the optimizer's state dict nested or flat.
        target_folder: is not there yet, or is empty. It appears when it is whole.
        to, source, adam_w_mode, drop: as in `convert_state_dict`.
        masters: as in `convert_state_dict`; weights are those of the checkpoint. For torch also "weights": masters
            become the weights, which are FP32 then, and nothing is lost.
        optimizer: where its state dict is in the checkpoint, such as "optim"; None: seen from the keys.
        model: where the weights are, such as "model"; None: found by the parameters' names.
        part_bytes: bytes of a file of the new checkpoint; a larger piece has one of its own.
        progress: called with the bytes written and the bytes in all, after each piece.

    Raises:
        ValueError: something cannot be kept, or is not there; it names the parameter and the way out.
        OSError: a file cannot be read or written. Either way nothing is left of the target.

    A RuntimeWarning says how many masters do not round to their weights, where both are in the checkpoint.
    """
    request = Request(to, source, masters, adam_w_mode, drop)
    if isinstance(part_bytes, bool) or not isinstance(part_bytes, int) or part_bytes < 1:
        raise ValueError(f"part_bytes: {part_bytes!r} is not a number of bytes")
    with appearing(source_folder, target_folder) as part:
        view = _FolderView(Reader(source_folder), optimizer, model)
        entries = view.rebuilt(convert(view.groups, request, flat=view.flat))
        write_checkpoint(part, entries, part_bytes, progress)
    view.agreement.warn()


@dataclass
class _Member:
    """A parameter's keys in the checkpoint, and how the rules see it."""

    name: str
    states: dict[str, str]
    weight: str | None
    param: Param


class _FolderView:
    """The optimizer's part of a checkpoint as the rules see it."""

    def __init__(self, reader: Reader, optimizer: str | None, model: str | None):
        self.reader, self.agreement = reader, Agreement()
        self.outer = _outer(reader, optimizer)
        inside = [k.removeprefix(self.outer) for k in reader if k.startswith(self.outer)]
        inside = [key for key in inside if key.startswith(("state.", "param_groups."))]
        self.own = {self.outer + key for key in inside}
        self.beside: set[str] = set()
        """Of these, what a user keeps beside the parameters' states."""
        self.outer_path = self._outer_path()
        self.flat = not any(re.fullmatch(r"param_groups\.\d+\.params", key) for key in inside)
        states, settings, names = self._flat(inside) if self.flat else self._nested(inside)
        self.names = names
        wanted = [self.outer + key for found in settings for key in found.values()]
        wanted += [self.outer + found[STEP] for found in states.values() if STEP in found]
        self.values = reader.values(wanted)
        if model is not None:
            before = f"{model}." if model else ""
        else:
            before = _model_prefix(reader, self.own, list(states))
        self.members = [[self._member(str(name), states, before) for name in group] for group in names]
        self.groups = [
            Group(
                group_label(group[0] if self.flat else number),
                {what: self.values[self.outer + key] for what, key in found.items()},
                [member.param for member in members],
            )
            for number, (found, group, members) in enumerate(zip(settings, names, self.members, strict=True))
        ]

    def _flat(self, keys: list[str]) -> tuple[dict[str, dict[str, str]], list[dict[str, str]], list[list[Any]]]:
        parts = Flat.of(keys)
        return parts.states, list(parts.settings.values()), [[name] for name in parts.settings]

    def _nested(self, keys: list[str]) -> tuple[dict[str, dict[str, str]], list[dict[str, str]], list[list[Any]]]:
        parts = Flat.of(keys, together=False)
        groups = [parts.settings[number] for number in sorted(parts.settings, key=int)]
        members = [self.outer + found.pop("params") for found in groups]
        lists = self.reader.values(members)
        for key in members:
            if not isinstance(lists[key], (list, tuple)):
                raise ValueError(f"{key} in the checkpoint is no list of parameters")
        names = [list(lists[key]) for key in members]
        return self._by_parameter(parts.states, {str(name) for group in names for name in group}), groups, names

    def _by_parameter(self, states: dict[str, dict[str, str]], listed: set[str]) -> dict[str, dict[str, str]]:
        """States by the parameter that has them. One that is a dict or list itself has a key for each value in it, and
        counts as one."""
        found: dict[str, dict[str, str]] = {}
        of_a_parameter = set()
        for name, keys in states.items():
            owner = _owner(name, listed)
            if owner is not None:
                of_a_parameter |= {self.outer + key for key in keys.values()}
                within = name.removeprefix(owner).removeprefix(".")
                found.setdefault(owner, {}).update((_outermost(within, what), key) for what, key in keys.items())
            elif name.isdigit() or keys.keys() & {*MOMENTS}:
                raise ValueError(f"the checkpoint has state of parameter {name!r}, which none of its groups lists")
        self.beside = {key for key in self.own if key.startswith(self.outer + STATE)} - of_a_parameter
        return found

    def _outer_path(self) -> tuple:
        """What comes before 'state' and 'param_groups' in the paths of the optimizer's entries."""
        for key in self.own:
            path = self.reader.paths.get(key)
            if path is not None:
                inner = next(i for i, part in enumerate(path) if str(part).startswith(("state", "param_groups")))
                return path[:inner]
        return ()

    def _member(self, name: str, states: dict[str, dict[str, str]], before: str | None) -> _Member:
        keys = {what: self.outer + key for what, key in states.get(name, {}).items()}
        dtypes = {}
        for what, key in keys.items():
            if what in ADAMS_TENSORS:
                if key not in self.reader.tensors:
                    raise ValueError(f"{key} in the checkpoint is no tensor")
                dtypes[what] = self.reader.tensors[key].properties.dtype
        weight = None if before is None or before + name not in self.reader.tensors else before + name
        step = self.values.get(keys.get(STEP, ""))
        return _Member(
            name,
            keys,
            weight,
            Param(
                param_label(name),
                dtypes,
                None if step is None else count_of(step, f"step of {param_label(name)}"),
                None if weight is None else self.reader.tensors[weight].properties.dtype,
                frozenset(keys) - {*ADAMS_TENSORS, STEP},
            ),
        )

    # ---- the new checkpoint ----

    def rebuilt(self, groups: list[NewGroup]) -> list[Entry]:
        """Every entry of the new checkpoint, tensors in the pieces that they are read in."""
        entries: dict[str, Entry] = {}
        weights: dict[str, Entry] = {}
        for number, (group, names, members) in enumerate(zip(groups, self.names, self.members, strict=True)):
            for member, param in zip(members, group.params, strict=True):
                for entry in self._states(member, param):
                    entries[entry.key] = entry
                if param.weight is not None:
                    master, path = member.states[MASTER], self.reader.paths.get(member.weight)
                    weights[member.weight] = self._tensor(
                        member.weight, path, param.weight, master, member.weight, self._comparing(member)
                    )
            settings = group.settings if self.flat else {**group.settings, "params": names}
            for what, value in settings.items():
                entry = Entry.of(*self._place("param_groups", names[0] if self.flat else number, what), value)
                entries[entry.key] = entry
        replaced = (self.own - self.beside) | weights.keys()
        others = [self._carried(key) for key in self.reader if key not in replaced]
        return [*others, *weights.values(), *entries.values()]

    def _place(self, kind: str, of: str | int, what: str) -> tuple[str, tuple | None]:
        """Key and path of a state or setting, in the form of the source."""
        inner = (f"{kind}.{of}.{what}",) if self.flat else (kind, of, what)
        return f"{self.outer}{kind}.{of}.{what}", (*self.outer_path, *inner) if self.reader.paths else None

    def _states(self, member: _Member, param: NewParam) -> list[Entry]:
        entries = []
        for what, how in param.states.items():
            kept, needs_weight = sources(how, what)
            state = None if kept is None else member.states[kept]
            weight = member.weight if needs_weight else None
            compare = self._comparing(member) if how is How.KEPT and what == MASTER else None
            entries.append(self._tensor(*self._place("state", member.name, what), how, state, weight, compare))
        if param.step is not None:
            step = torch.tensor(param.step, dtype=torch.float32, device="cpu")
            entries.append(Entry.of(*self._place("state", member.name, STEP), step))
        return entries

    def _carried(self, key: str) -> Entry:
        path = self.reader.paths.get(key)
        if key in self.reader.tensors:
            return self._tensor(key, path, How.KEPT, key, None)
        return Entry(key, path, BytesStorageMetadata(), lambda _: self.reader.bytes_of(key))

    def _comparing(self, member: _Member) -> Compare | None:
        """What compares a piece of a member's master with the weight, which is in the checkpoint."""
        if member.weight is None:
            return None
        master, own = (self.reader.tensors[key] for key in (member.states[MASTER], member.weight))
        if master.size != own.size or not comparable(master.properties.dtype, own.properties.dtype):
            return None

        def compare(piece: ChunkStorageMetadata, master: Tensor, weight: Tensor | None) -> None:
            if weight is None:
                weight = self.reader.read(member.weight, piece)
            self.agreement.compare(member.param.label, master, weight)

        return compare

    def _tensor(
        self,
        key: str,
        path: tuple | None,
        how: How,
        state: str | None,
        weight: str | None,
        compare: Compare | None = None,
    ) -> Entry:
        """An entry whose values are made of those of two others: in the pieces of the weight where there is one."""
        tensors = self.reader.tensors
        like = tensors[weight or state]
        if state is not None and tensors[state].size != like.size:
            raise ValueError(
                f"{state} has shape {tuple(tensors[state].size)} and {weight} {tuple(like.size)}: they are not of one "
                "parameter"
            )
        dtype = dtype_of(how, None if state is None else tensors[state].properties.dtype)
        metadata = TensorStorageMetadata(TensorProperties(dtype=dtype), like.size, list(like.chunks))

        def make(piece: ChunkStorageMetadata) -> Tensor:
            read = [None if k is None else self.reader.read(k, piece) for k in (state, weight)]
            if compare is not None:
                compare(piece, *read)
            return values_of(how, *read)

        return Entry(key, path, metadata, make)


def _owner(name: str, listed: set[str]) -> str | None:
    """The parameter that states of this name are of, or are within a state of."""
    while name not in listed:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return name


def _outermost(within: str, what: str) -> str:
    """Of a state in others, the name of the outermost one, unless an Adam's is called so too."""
    first = within.split(".")[0]
    return what if not within else f"{within}.{what}" if first in (*ADAMS_TENSORS, STEP) else first


def _outer(reader: Reader, optimizer: str | None) -> str:
    """What comes before `state.` and `param_groups.` in the keys of the optimizer's state dict."""
    matches = (re.match(r"((?:.*?\.)?)param_groups\.", key) for key in reader)
    found = list(dict.fromkeys(match[1] for match in matches if match))
    if optimizer is not None:
        outer = f"{optimizer}." if optimizer else ""
        if outer not in found:
            raise ValueError(f"optimizer: {optimizer!r} has no param_groups in the checkpoint")
        return outer
    if not found:
        raise ValueError("the checkpoint has no optimizer: none of its keys has param_groups in it")
    if len(found) > 1:
        names = ", ".join(repr(outer[:-1]) for outer in found)
        raise ValueError(f"the checkpoint has several optimizers; give optimizer= one of {names}")
    return found[0]


def _model_prefix(reader: Reader, own: set[str], names: list[str]) -> str | None:
    """What comes before every one of the names in the key of a tensor that is not the optimizer's; None: nothing
    does, the weights are not there."""
    keys = reader.tensors.keys() - own
    endings: dict[str, set[str]] = {}
    for key in keys:
        parts = key.split(".")
        for i in range(len(parts)):
            ending = ".".join(parts[i:])
            endings.setdefault(ending, set()).add(key.removesuffix(ending))
    found = set.intersection(*(endings.get(name, set()) for name in names)) if names else set()
    if len(found) > 1:
        candidates = ", ".join(repr(prefix.removesuffix(".")) for prefix in sorted(found))
        raise ValueError(f"the checkpoint has several models with these parameters; give model= one of {candidates}")
    return found.pop() if found else None
