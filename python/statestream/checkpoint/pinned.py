"""Host memory for an export: pinned, few allocations, and hardly more bytes than are needed.

torch's pinned allocator rounds each block up to a power of two, so that a tensor just above one takes twice
its bytes. Here tensors share blocks that are themselves powers of two, and each still has a storage of its
own bytes alone: whatever saves, copies or pickles one of them never takes the whole block with it.

torch's allocator does not know such a storage for a part of its block: it is not told of a `non_blocking` copy to a GPU
that reads one. So a block is not given back when the last of its tensors dies, but rests until the next export, which
waits for all that was queued on the devices before it gives back what rests.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from statestream.device.forks import Origin
from statestream.device.guards import wait_for_all_devices

__all__ = ["MOST", "Block", "host_tensors", "pack"]

MOST = 1.05
"""Pinned bytes asked for are at most this often the bytes needed, and one smallest block more."""

_ALIGNMENT = 64
"""Bytes: a cache line, and no tensor's first element shares one with its neighbour."""
_SMALLEST = 4096
"""Bytes of the smallest block: a page."""


@dataclass
class Block:
    """A power of two of bytes, and which item begins where in it."""

    nbytes: int
    offsets: dict[int, int] = field(default_factory=dict)


def pack(sizes: Sequence[int]) -> tuple[list[Block], list[int]]:
    """Blocks that hold items of `sizes` bytes, in all at most MOST times what they hold and one smallest block.

    Also the indices of items that have no place: those that no set of blocks would hold within that bound, such
    as a single large item just above a power of two. Empty items are in neither.
    """
    left = sorted((i for i, size in enumerate(sizes) if size), key=lambda i: -sizes[i])
    blocks: list[Block] = []
    without: list[int] = []
    used = asked = 0
    while left:
        block = _next_block(left, sizes, used, asked)
        if block is None:
            without.append(left.pop(0))
            continue
        blocks.append(block)
        used += sum(sizes[i] for i in block.offsets)
        asked += block.nbytes
        left = [i for i in left if i not in block.offsets]
    return blocks, without


def _next_block(left: list[int], sizes: Sequence[int], used: int, asked: int) -> Block | None:
    """The largest block that keeps the whole within the bound, filled with the largest items that fit."""
    nbytes = _power_of_two(sum(_aligned(sizes[i]) for i in left))
    while nbytes >= _SMALLEST:
        block, room, held = Block(nbytes), nbytes, 0
        for i in left:
            if _aligned(sizes[i]) <= room:
                block.offsets[i] = nbytes - room
                room -= _aligned(sizes[i])
                held += sizes[i]
        if held and asked + nbytes <= MOST * (used + held) + _SMALLEST:
            return block
        nbytes //= 2
    return None


def host_tensors(
    likes: Sequence[Tensor], dtypes: Sequence[torch.dtype], allocate: Callable[[int], Tensor] | None = None
) -> list[Tensor]:
    """For each tensor one of its shape, strides (dense) and the given dtype, not initialised, in pinned memory.

    `allocate(nbytes)` gives a pinned block as a flat uint8 tensor; torch's allocator by default. Once it refuses,
    with one warning, the rest is pageable, and so is an item that `pack` finds no place for.
    """
    _give_back()
    allocate = allocate or _pinned_block
    sizes = [like.numel() * dtype.itemsize for like, dtype in zip(likes, dtypes, strict=True)]
    tensors: dict[int, Tensor] = {}
    for block in pack(sizes)[0]:
        try:
            memory = allocate(block.nbytes)
        except (RuntimeError, MemoryError) as error:
            warnings.warn(
                f"{block.nbytes} bytes of host memory could not be pinned ({error}); the export goes to pageable "
                "memory, which takes longer. Raise the limit of locked memory (ulimit -l) or give the machine "
                "more memory",
                RuntimeWarning,
                stacklevel=2,
            )
            break
        buffer = (ctypes.c_byte * block.nbytes).from_address(memory.data_ptr())
        buffer.lease = _Lease(memory, Origin())  # each tensor keeps the buffer, and the buffer the block
        for i, offset in block.offsets.items():
            values = torch.frombuffer(buffer, dtype=dtypes[i], count=likes[i].numel(), offset=offset)
            tensors[i] = values.as_strided(likes[i].shape, likes[i].stride())
    return [
        tensors[i] if i in tensors else torch.empty_like(like, dtype=dtype, device="cpu", requires_grad=False)
        for i, (like, dtype) in enumerate(zip(likes, dtypes, strict=True))
    ]


_resting: list[_Lease] = []
"""Of blocks without tensors, which copies that were queued before may still read."""


def _give_back() -> None:
    blocks = [_resting.pop() for _ in range(len(_resting))]
    if blocks:
        wait_for_all_devices()
        blocks.clear()


class _Lease:
    """Keeps a block for the tensors in it, and then lets it rest."""

    def __init__(self, memory: Tensor, origin: Origin, rests: bool = False):
        self._memory, self._origin, self._rests = memory, origin, rests

    def __del__(self, resting: list[_Lease] = _resting) -> None:
        if self._origin.is_elsewhere():
            self._origin.keep(self._memory)  # torch's allocator would call CUDA, to note when copies are done
        elif not self._rests:
            resting.append(type(self)(self._memory, self._origin, rests=True))


def _pinned_block(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _power_of_two(nbytes: int) -> int:
    """The least power of two that is not below `nbytes`, and not below the smallest block."""
    return max(1 << (nbytes - 1).bit_length(), _SMALLEST)
