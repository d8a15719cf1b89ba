"""Many ranks with CUDA tensors in one process on a machine with no GPU: FakeTensorMode and a fake process group.

Nothing is computed; shapes, devices and the life of every tensor are as they would be. The product's own Python
runs unchanged, and its native calls see that the tensors are fake (kernels.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["fake_cuda_world"]


@contextlib.contextmanager
def fake_cuda_world(
    mesh_shape: tuple[int, ...] = (64,), names: tuple[str, ...] = ("dp",), rank: int = 5
) -> Iterator[DeviceMesh]:
    """A CUDA mesh of `mesh_shape` as `rank` sees it; tensors made inside are fake, on "cuda:0" or on the host."""
    ranks = 1
    for size in mesh_shape:
        ranks *= size
    copy_, to, getitem = torch.Tensor.copy_, torch.Tensor.to, torch.Tensor.__getitem__

    # The Python bindings of these three ask CUDA for the device or its index, which the ATen ops do not.
    def copy_by_op(self: torch.Tensor, other: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if isinstance(other, torch.Tensor):
            return torch.ops.aten.copy_.default(self, other, non_blocking)
        return copy_(self, other, non_blocking)

    def to_first_device(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple(_with_index(arg) for arg in args)
        return to(self, *args, **{key: _with_index(value) for key, value in kwargs.items()})

    def slice_by_op(self: torch.Tensor, key: Any) -> torch.Tensor:
        if isinstance(key, slice):
            return torch.ops.aten.slice.Tensor(self, 0, key.start, key.stop, key.step or 1)
        if isinstance(key, int):
            return torch.ops.aten.select.int(self, 0, key)
        return getitem(self, key)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        with contextlib.ExitStack() as stack:
            cuda = mock.patch.multiple(
                torch.cuda,
                current_device=mock.Mock(return_value=0),
                device_count=mock.Mock(return_value=ranks),
                set_device=mock.Mock(),
                is_initialized=mock.Mock(return_value=True),
                _exchange_device=mock.Mock(return_value=0),
                _maybe_exchange_device=mock.Mock(return_value=0),
            )
            stack.enter_context(cuda)
            # A torch without CUDA has no such function; one with CUDA has no such device.
            stack.enter_context(
                mock.patch.object(torch._C, "_cuda_hasPrimaryContext", mock.Mock(return_value=False), create=True)
            )
            stack.enter_context(
                mock.patch.multiple(torch.Tensor, copy_=copy_by_op, to=to_first_device, __getitem__=slice_by_op)
            )
            mesh = init_device_mesh("cuda", mesh_shape, mesh_dim_names=names)
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            yield mesh
    finally:
        dist.destroy_process_group()


def _with_index(device: Any) -> Any:
    is_cuda = isinstance(device, (str, torch.device)) and str(device) == "cuda"
    return torch.device("cuda", 0) if is_cuda else device
