"""Reading a folder of torch.distributed.checkpoint by pieces, and writing another one, with no process group."""

from __future__ import annotations

import dataclasses
import gc
import io
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    LoadPlan,
    SavePlan,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from statestream.dcp_metadata import METADATA, classes_in

__all__ = ["Entry", "Reader", "write_checkpoint"]

Made = Tensor | io.BytesIO


class Reader:
    """A checkpoint's entries by key: `tensors` with their metadata, `objects` without, `paths` into the state dict that
    was saved (empty where it was flat already)."""

    def __init__(self, folder: str | os.PathLike):
        self._folder, self._storage = os.fspath(folder), FileSystemReader(folder)
        try:
            _refuse_code(Path(folder) / METADATA)
            with self._reading(METADATA):
                metadata = _checked(self._storage.read_metadata())
        except FileNotFoundError as error:
            raise ValueError(f"{self._folder} holds no checkpoint: it has no {METADATA}") from error
        self._storage.set_up_storage_reader(metadata, is_coordinator=True)
        entries = metadata.state_dict_metadata
        self.tensors = {key: m for key, m in entries.items() if isinstance(m, TensorStorageMetadata)}
        self.objects = [key for key in entries if key not in self.tensors]
        self.paths: dict[str, tuple] = dict(metadata.planner_data or {})

    def __iter__(self) -> Iterator[str]:
        return chain(self.tensors, self.objects)

    def read(self, key: str, piece: ChunkStorageMetadata) -> Tensor:
        """The part of a tensor that `piece` says, in host memory."""
        metadata = self.tensors[key]
        with self._reading(key):
            out = torch.empty(piece.sizes, dtype=metadata.properties.dtype, device="cpu")
            if out.numel():
                items = create_read_items_for_chunk_list(key, metadata, [piece])
                self._storage.read_data(LoadPlan(items), _Reads({key: out})).wait()
        return out

    def bytes_of(self, key: str) -> io.BytesIO:
        """An object as it was pickled."""
        reads = _Reads({})
        with self._reading(key):
            self._storage.read_data(LoadPlan([_object_item(key)]), reads).wait()
            return reads.found[key]

    def values(self, keys: Iterable[str]) -> dict[str, Any]:
        """Small values, whether they were saved as objects or as tensors. Objects of torch and of Python alone."""
        keys = list(dict.fromkeys(keys))
        outs = {
            k: torch.empty(m.size, dtype=m.properties.dtype, device="cpu")
            for k in keys
            if (m := self.tensors.get(k)) is not None
        }
        items = [_object_item(key) for key in keys if key not in outs]
        for key, out in outs.items():
            whole = ChunkStorageMetadata(torch.Size([0] * out.dim()), out.size())
            items += create_read_items_for_chunk_list(key, self.tensors[key], [whole])
        reads = _Reads(outs)
        with self._reading("a setting"):
            self._storage.read_data(LoadPlan(items), reads).wait()
        return outs | {key: _unpickled(key, file) for key, file in reads.found.items()}

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, MemoryError):
            raise
        except Exception as error:  # torch's reader may raise anything of bytes that are others than were written
            kind = type(error).__name__
            raise ValueError(f"{self._folder} is damaged: {what} cannot be read ({kind})") from error


def _refuse_code(path: Path) -> None:
    """torch unpickles the metadata, which would run what it names."""
    for module, name in sorted(classes_in(path)):
        if (module, name) not in _HARMLESS and not _is_record(module, name):
            raise ValueError(f"{path} names {module}.{name}, which is none of a checkpoint's: it is not read")


def _is_record(module: str, name: str) -> bool:
    """Whether it is a class of plain data of torch's checkpoints, or a dtype or layout."""
    if module == "torch":
        return isinstance(getattr(torch, name, None), (torch.dtype, torch.layout, torch.memory_format))
    if not module.startswith(("torch.distributed.checkpoint.", "torch.distributed._shard.")):
        return False
    found = getattr(sys.modules.get(module), name, None)  # a dotted name, as of a method, is none
    return isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, Enum))


_HARMLESS = {
    ("builtins", "set"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


def _checked(metadata: Metadata) -> Metadata:
    """As it is, if it says of every entry what is asked of it here; any error if not."""
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(key, str) or not isinstance(entry, (TensorStorageMetadata, BytesStorageMetadata)):
            raise TypeError(f"{key!r} is no entry")
        if isinstance(entry, TensorStorageMetadata):
            if not isinstance(entry.properties.dtype, torch.dtype):
                raise TypeError(f"{key} has no dtype")
            for piece in entry.chunks:
                for offset, size, whole in zip(piece.offsets, piece.sizes, entry.size, strict=True):
                    if min(offset, size, whole - offset - size) < 0:
                        raise ValueError(f"{key} has a piece that is no part of it")
    for index, stored in metadata.storage_data.items():
        if not isinstance(index.fqn, str) or min(stored.offset, stored.length) < 0:
            raise TypeError(f"{index} is nowhere")
        if Path(stored.relative_path).is_absolute() or ".." in Path(stored.relative_path).parts:
            raise ValueError(f"{stored.relative_path} is outside of the checkpoint")
    for path in (metadata.planner_data or {}).values():
        if not isinstance(path, tuple):
            raise TypeError(f"{path!r} is no path")
    return metadata


def _object_item(key: str) -> ReadItem:
    nowhere = torch.Size([0])
    index = MetadataIndex(key)
    return ReadItem(LoadItemType.BYTE_IO, index, nowhere, index, nowhere, nowhere)


def _unpickled(key: str, file: io.BytesIO) -> Any:
    try:
        return torch.load(file, weights_only=True)
    except Exception as error:
        raise ValueError(f"{key} in the checkpoint is no plain value ({error})") from error


class _Reads(DefaultLoadPlanner):
    """Tensors go to `outs`, by key; objects stay pickled in `found`."""

    def __init__(self, outs: dict[str, Tensor]):
        super().__init__()
        self.outs = outs
        self.found: dict[str, io.BytesIO] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.found[read_item.dest_index.fqn] = value

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self.outs[read_item.dest_index.fqn]
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, offset, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


@dataclass
class Entry:
    """One entry of a new checkpoint. `make` gives the values of a piece of a tensor, or the file of an object (asked
    with None); `path` as in `Reader.paths`."""

    key: str
    path: tuple | None
    metadata: TensorStorageMetadata | BytesStorageMetadata
    make: Callable[[ChunkStorageMetadata | None], Made]

    @classmethod
    def of(cls, key: str, path: tuple | None, value: Any) -> Entry:
        """Of a small value: tensors of no dimension are saved as tensors, as torch does."""
        if isinstance(value, Tensor) and value.dim() == 0:
            whole = ChunkStorageMetadata(torch.Size([]), torch.Size([]))
            metadata = TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.size(), [whole])
            return cls(key, path, metadata, lambda _: value)
        return cls(key, path, BytesStorageMetadata(), lambda _: _pickled(value))

    def pieces(self) -> list[ChunkStorageMetadata | None]:
        return [None] if isinstance(self.metadata, BytesStorageMetadata) else list(self.metadata.chunks)

    def nbytes(self, piece: ChunkStorageMetadata | None) -> int:
        return 0 if piece is None else math.prod(piece.sizes) * self.metadata.properties.dtype.itemsize


def _pickled(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    return file


def write_checkpoint(
    folder: Path, entries: list[Entry], part_bytes: int, progress: Callable[[int, int], object] | None
) -> None:
    """Writes the entries piece by piece, in files of `part_bytes`; the metadata, without which the folder is no
    checkpoint, comes last."""
    # torch's writer holds what it has written until its plan is done: a plan a file, and few bytes in each.
    plans: list[list[WriteItem]] = []
    room, total = 0, 0
    for entry in entries:
        for number, piece in enumerate(entry.pieces()):
            nbytes = entry.nbytes(piece)
            total += nbytes
            if not plans or nbytes > room:
                plans.append([])
                room = part_bytes
            plans[-1].append(_write_item(entry, number, piece))
            room -= nbytes
    writer = FileSystemWriter(folder, overwrite=False)
    writer.set_up_storage_writer(is_coordinator=True)
    writer.prepare_local_plan(SavePlan([]))  # makes the folder
    makes = _Makes({entry.key: entry for entry in entries}, total, progress)
    results = []
    for part in writer.prepare_global_plan([SavePlan(items) for items in plans]):
        results += [writer.write_data(part, makes).wait()]
        gc.collect()  # torch.load leaves cycles around what it has read, in some versions
    paths = {entry.key: entry.path for entry in entries}
    metadata = Metadata(
        state_dict_metadata={entry.key: entry.metadata for entry in entries},
        planner_data=None if None in paths.values() else paths,
    )
    writer.finish(metadata, results)


def _write_item(entry: Entry, number: int, piece: ChunkStorageMetadata | None) -> WriteItem:
    if piece is None:
        return WriteItem(MetadataIndex(entry.key), WriteItemType.BYTE_IO)
    data = TensorWriteData(chunk=piece, properties=entry.metadata.properties, size=entry.metadata.size)
    return WriteItem(MetadataIndex(entry.key, piece.offsets, number), WriteItemType.SHARD, tensor_data=data)


class _Makes(DefaultSavePlanner):
    """Makes each piece when the writer asks for it."""

    def __init__(self, entries: dict[str, Entry], total: int, progress: Callable[[int, int], object] | None):
        super().__init__()
        self.entries, self.total, self.progress = entries, total, progress
        self.done = 0

    def resolve_data(self, write_item: WriteItem) -> Made:
        entry = self.entries[write_item.index.fqn]
        piece = None if write_item.tensor_data is None else write_item.tensor_data.chunk
        made = entry.make(piece)
        self.done += entry.nbytes(piece)
        if self.progress is not None and piece is not None:
            self.progress(self.done, self.total)
        return made
