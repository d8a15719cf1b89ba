"""Live bytes of tensor memory on one kind of device, and their peak, counted by storage. Works on fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Counts every storage that an operation returns from when it is first seen until it is freed.

    torch's copy between devices is one operation here, while on a GPU it may need temporaries of its own;
    those are added from the rules of torch's CUDA copy. Blocks are rounded up as torch's caching allocator does.
    """

    ROUNDING = 512

    def __init__(self, device_type: str = "cuda"):
        super().__init__()
        self.device_type = device_type
        self.live = self.peak = self._mark = 0
        self._seen: dict[int, int] = {}

    def mark(self) -> None:
        """`extra` counts from here."""
        self._mark = self.peak = self.live

    @property
    def extra(self) -> int:
        """The most live bytes since the mark, beyond those that were live then."""
        return self.peak - self._mark

    @property
    def kept(self) -> int:
        """Bytes live now, beyond those at the mark."""
        return self.live - self._mark

    def count(self, *tensors: Any) -> None:
        """Takes tensors into account that were made outside this mode."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor):
                for plain in _plain(tensor):
                    self._add(plain)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default:
            self._hold(self._copy_temporaries(*args, **kwargs))
        out = func(*args, **kwargs)
        self.count(out)
        return out

    def _add(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != self.device_type:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._seen:
            self._seen[key] = -(-storage.nbytes() // self.ROUNDING) * self.ROUNDING
            self._hold(0, self._seen[key])
            weakref.finalize(storage, self._free, key)

    def _hold(self, passing: int, lasting: int = 0) -> None:
        self.live += lasting
        self.peak = max(self.peak, self.live + passing)

    def _free(self, key: int) -> None:
        self.live -= self._seen.pop(key)

    def _copy_temporaries(self, to: Any, source: Any, non_blocking: bool = False) -> int:
        """Device bytes that torch's copy between host and device allocates besides its arguments.

        A plain transfer needs none. Otherwise the side that converts (the device where the copy does not block,
        else the host) makes the values contiguous and of the target's dtype, and the other side a contiguous
        tensor of what crosses.
        """
        kinds = {to.device.type, source.device.type}
        if kinds != {"cpu", self.device_type}:
            return 0
        same_dtype = to.dtype is source.dtype
        if same_dtype and to.stride() == source.stride() and _is_one_run(to):
            return 0
        from_device = source.device.type == self.device_type
        converts_at_source = from_device == non_blocking
        crossing = to.dtype if converts_at_source else source.dtype
        if from_device:
            free = source.is_contiguous() and crossing is source.dtype
        else:
            free = to.is_contiguous() and crossing is to.dtype
        return 0 if free else to.numel() * crossing.itemsize


def _is_one_run(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if isinstance(inner, torch.Tensor):
            yield from _plain(inner)
