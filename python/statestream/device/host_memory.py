"""Host memory for state: blocks of exact sizes, pinned as long as the system allows it."""

from __future__ import annotations

import contextlib
import mmap
import warnings
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from statestream.device.forks import Origin

__all__ = ["HostMemory"]


class _Mapping(mmap.mmap):
    """Page-aligned private memory, pinned while it lives if `unpin` is set.

    `torch.frombuffer` keeps its buffer alive, so this lives as long as any tensor in it does, and is unpinned
    before it is unmapped. In a child that was forked while it was pinned it is neither: the child never frees it.
    """

    unpin: Callable[[int], None] | None = None
    finish: list[Callable[[], None]]
    """Of each device that it was given out for: waits for the copies that were queued."""
    origin: Origin
    address = 0

    def __del__(self) -> None:
        if self.unpin is None:
            return
        if self.origin.is_elsewhere():
            self.origin.keep(self)  # or the child would unmap what it has mapped there since
            return
        for finish in self.finish:  # the driver would not wait before it gives up the pages
            finish()
        self.unpin(self.address)


class HostMemory:
    """Gives out host memory in exact blocks, pinned as long as the system allows it.

    `pin(address, nbytes)` pins a block and raises where the system refuses; `unpin(address)` undoes it, after
    `finish()` has waited for copies. The first refusal is one warning, and from then on blocks are pageable.
    (torch's own pinned allocator would round each block up to a power of two.) A pinned block is not there in a child
    that this process forks, as data loaders do: the kernel would copy it for each child, or move the parent's pages
    from under a copy of the GPU's.
    """

    def __init__(
        self,
        pin: Callable[[int, int], None] | None = None,
        unpin: Callable[[int], None] | None = None,
        finish: Callable[[], None] = lambda: None,
    ):
        self._pin, self._unpin, self._finish = pin, unpin, finish
        self._mappings: weakref.WeakSet[_Mapping] = weakref.WeakSet()

    @property
    def pinned_bytes(self) -> int:
        """Bytes of living blocks that are pinned."""
        return sum(len(mapping) for mapping in self._mappings if mapping.unpin is not None)

    def block(self, nbytes: int) -> Tensor:
        """`nbytes` zero bytes as a flat uint8 tensor. OSError where there is no such memory."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        mapping = _Mapping(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _advise(mapping, "MADV_HUGEPAGE")
        with torch.inference_mode(False):
            block = torch.frombuffer(mapping, dtype=torch.uint8)
        mapping.address, mapping.finish = block.data_ptr(), []
        self._keep(mapping)
        return block

    def take_over(self, other: HostMemory) -> None:
        """Pins here what `other` gave out and did not pin: its parameters have moved to a GPU."""
        for mapping in list(other._mappings):
            self._keep(mapping)

    def _keep(self, mapping: _Mapping) -> None:
        self._mappings.add(mapping)
        mapping.finish.append(self._finish)
        if self._pin is None or mapping.unpin is not None:
            return
        try:
            self._pin(mapping.address, len(mapping))
        except (RuntimeError, OSError) as error:
            self._pin = None
            warnings.warn(
                f"{len(mapping)} bytes of host memory could not be pinned ({error}); optimizer state goes to "
                "pageable memory, and copies will not overlap with computation. Raise the limit of locked "
                "memory (ulimit -l) or give the machine more memory",
                RuntimeWarning,
                stacklevel=3,
            )
        else:
            mapping.origin, mapping.unpin = Origin(), self._unpin
            _advise(mapping, "MADV_DONTFORK")


def _advise(mapping: _Mapping, advice: str) -> None:
    if hasattr(mmap, advice):
        with contextlib.suppress(OSError):
            mapping.madvise(getattr(mmap, advice))
