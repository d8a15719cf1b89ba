"""What the rest asks of a tensor: its local part, its layout, a tensor like it."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["address_of", "copy_version", "flat", "is_dense", "is_dtensor", "is_fake", "local_of", "same_layout"]

_PLAIN = (Tensor, torch.nn.Parameter)


def local_of(tensor: Tensor) -> Tensor:
    """A DTensor's local tensor, arrived if it comes out of a collective; any other tensor itself. Where its class wraps
    one dense tensor, that one. Call it without grad mode."""
    if type(tensor) in _PLAIN:
        return tensor
    to_local = getattr(tensor, "to_local", None)
    local = tensor if to_local is None else to_local()
    wait = getattr(local, "wait", None)  # an AsyncCollectiveTensor has no memory of its own to read
    if wait is not None:
        local = wait()
    return local if type(local) in _PLAIN else _unwrapped(local)


_WRAPPED: WeakKeyDictionary[type, str | None] = WeakKeyDictionary()
"""By class, the attribute that holds the one tensor that it wraps; None where that is not all of its values. Asked
once: torchao's answer reads a scale, for which the host would wait for the device."""

_DERIVED = ("_precomputed_scale",)
"""What torchao's float8 weights keep beside the tensor, and make anew from it after each step."""


def _unwrapped(tensor: Tensor) -> Tensor:
    """The dense tensor inside one such as torchao's float8 weights, which are cast when they are gathered: with the
    same shape and floating dtype, and nothing else that has values. Any other tensor itself."""
    cls = type(tensor)
    if cls not in _WRAPPED:
        names = []
        if is_traceable_wrapper_subclass(tensor) and not hasattr(cls, "quantize_"):
            names = [name for name in tensor.__tensor_flatten__()[0] if name not in _DERIVED]
        _WRAPPED[cls] = names[0] if len(names) == 1 else None
    name = _WRAPPED[cls]
    inner = None if name is None else getattr(tensor, name)
    if type(inner) not in _PLAIN or inner.shape != tensor.shape or inner.dtype is not tensor.dtype:
        return tensor
    return inner


def is_dtensor(tensor: Tensor) -> bool:
    return type(tensor) not in _PLAIN and hasattr(tensor, "device_mesh")


def is_fake(tensor: Tensor) -> bool:
    """Whether the tensor has no data: FakeTensorMode, or the meta device."""
    if tensor.device.type == "meta":
        return True
    if type(tensor) in _PLAIN and not hasattr(tensor, "fake_mode"):
        return False
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def address_of(tensor: Tensor) -> int:
    """Address of the first element; 0 where there are no data."""
    return 0 if is_fake(tensor) else tensor.data_ptr()


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, each once, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    if tensor.numel() == 0:
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape hold the same index at the same place. The stride of a dimension
    of size 1 says nothing."""
    if a.shape != b.shape:
        return False
    if a.stride() == b.stride() or a.numel() == 0:
        return True
    return all(size == 1 or x == y for size, x, y in zip(a.shape, a.stride(), b.stride(), strict=True))


def flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor as one dimension, in memory order; a view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def copy_version(tensor: Tensor) -> int | None:
    """How often autograd saw the tensor written; None where it does not count (inference mode)."""
    return None if tensor.is_inference() else tensor._version
