"""A rank's share of a full tensor, against torch's own cutting of it, for every rank of small worlds."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import product

import pytest
import torch
import torch.distributed as dist
from statestream.tensors.sharding import as_dtensor_like, local_ranges, redistribute_like, shard_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def world(rank: int, mesh_shape: tuple[int, ...]):
    ranks = torch.Size(mesh_shape).numel()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield init_device_mesh("cpu", mesh_shape)
    finally:
        dist.destroy_process_group()


def values(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


CASES = [
    ((4,), (Shard(0),)),
    ((4,), (Shard(1),)),
    ((4,), (Replicate(),)),
    ((2, 2), (Shard(0), Shard(0))),
    ((2, 2), (Shard(0), Shard(1))),
    ((2, 2), (Replicate(), Shard(0))),
    ((2, 3), (Shard(1), Shard(0))),
    ((2, 2, 2), (Replicate(), Shard(1), Shard(1))),
]
STRIDED = [
    ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    ((2, 4), (_StridedShard(0, split_factor=4), Shard(0))),
    ((2, 2, 2), (Replicate(), _StridedShard(1, split_factor=2), Shard(1))),
]
SHAPES = [(3, 5), (1, 16), (10, 4), (16, 8), (8, 16, 3), (7, 9)]


@pytest.mark.parametrize(("mesh_shape", "placements"), CASES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_share_is_what_torch_would_cut_and_needs_no_copy(mesh_shape, placements, shape):
    full = values(shape)
    for rank in range(torch.Size(mesh_shape).numel()):
        with world(rank, mesh_shape) as mesh:
            judge = distribute_tensor(full, mesh, placements, src_data_rank=None)
            share = shard_of(full, judge, "exp_avg", "'w'")
            assert torch.equal(share, judge.to_local())
            assert share.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()


@pytest.mark.parametrize(("mesh_shape", "placements"), STRIDED, ids=str)
@pytest.mark.parametrize("shape", [(16, 8), (8, 16, 3)], ids=str)
def test_the_share_of_two_cuts_of_one_dimension_taken_right_to_left(mesh_shape, placements, shape):
    full = values(shape)
    for rank in range(torch.Size(mesh_shape).numel()):
        with world(rank, mesh_shape) as mesh:
            judge = distribute_tensor(full, mesh, placements, src_data_rank=None)
            assert torch.equal(shard_of(full, judge, "exp_avg", "'w'"), judge.to_local())


def test_right_to_left_is_tensor_parallel_first_then_fsdp():
    # By hand, with rows that do not come out even: tp cuts 10 rows into 5 and 5, fsdp each of them into 3 and 2.
    rows = {(0, 0): [0, 1, 2], (0, 1): [5, 6, 7], (1, 0): [3, 4], (1, 1): [8, 9]}
    full = values((10, 4))
    for (fsdp, tp), kept in rows.items():
        with world(2 * fsdp + tp, (2, 2)) as mesh:
            placements = (_StridedShard(0, split_factor=2), Shard(0))
            param = DTensor.from_local(
                full[kept], mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
            )
            assert torch.equal(shard_of(full, param, "exp_avg", "'w'"), full[kept])


def test_every_element_is_in_the_share_of_one_rank():
    full = values((11, 7))
    seen = torch.zeros(full.numel())
    for rank in range(6):
        with world(rank, (3, 2)) as mesh:
            param = distribute_tensor(full, mesh, (Shard(1), Shard(0)), src_data_rank=None)
            seen[shard_of(full, param, "exp_avg", "'w'").flatten().long()] += 1
    assert torch.equal(seen, torch.ones(full.numel()))


def test_a_rank_that_the_mesh_leaves_out_has_an_empty_share():
    full = values((8, 4))
    with world(3, (4,)):
        mesh = dist.device_mesh.DeviceMesh("cpu", [0, 1])
        param = distribute_tensor(full, mesh, (Shard(0),), src_data_rank=None)
        assert shard_of(full, param, "exp_avg", "'w'").numel() == 0
        assert local_ranges(param) == [[(0, 0)], [(0, 0)]]
        state = as_dtensor_like(torch.zeros_like(param.to_local()), param)
        assert state.shape == full.shape and state.to_local().numel() == 0


@pytest.mark.parametrize("placements", [(Shard(0),), (Replicate(),)], ids=str)
def test_a_dtensor_with_other_placements_is_refused_by_name(placements):
    full = values((8, 4))
    with world(1, (4,)) as mesh:
        value = distribute_tensor(full, mesh, (Shard(1),), src_data_rank=None)
        param = distribute_tensor(full, mesh, placements, src_data_rank=None)
        with pytest.raises(ValueError, match=r"exp_avg of 'w': placements .*checkpoint, which reshards"):
            shard_of(value, param, "exp_avg", "'w'")


def test_a_dtensor_on_other_ranks_is_refused_and_on_an_equal_mesh_taken():
    full = values((8, 4))
    with world(1, (4,)):
        meshes = [dist.device_mesh.DeviceMesh("cpu", order) for order in ([0, 1, 2, 3], [0, 1, 2, 3], [3, 2, 1, 0])]
        param, same, reversed_ = (distribute_tensor(full, mesh, (Shard(0),), src_data_rank=None) for mesh in meshes)
        assert torch.equal(shard_of(same, param, "exp_avg", "'w'"), param.to_local())
        with pytest.raises(ValueError, match="with other ranks"):
            shard_of(reversed_, param, "exp_avg", "'w'")


def test_a_dtensor_for_a_plain_parameter_is_refused_and_the_error_says_how_to_go_on():
    with world(0, (2,)) as mesh:
        value = distribute_tensor(values((8, 4)), mesh, (Shard(0),), src_data_rank=None)
        with pytest.raises(ValueError, match="full_tensor"):
            shard_of(value, values((8, 4)), "exp_avg", "'w'")


@pytest.mark.parametrize(("dtype", "shape"), list(product([torch.float32, torch.int16], [(3, 5), (1, 16)])), ids=str)
def test_a_wrapped_tensor_has_the_mesh_placements_shape_and_stride_of_its_model_and_its_own_dtype(dtype, shape):
    for rank in range(4):
        with world(rank, (4,)) as mesh:
            like = distribute_tensor(values(shape).bfloat16().t(), mesh, (Shard(0),), src_data_rank=None)
            local = torch.zeros_like(like.to_local(), dtype=dtype)
            wrapped = as_dtensor_like(local, like)
            assert (wrapped.shape, wrapped.stride(), wrapped.dtype) == (like.shape, like.stride(), dtype)
            assert (wrapped.device_mesh, wrapped.placements) == (like.device_mesh, like.placements)
            assert wrapped.to_local().untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
            assert wrapped._spec.tensor_meta.dtype is dtype  # what operators on it are planned with


def test_a_negated_view_has_its_sign_in_the_share():
    values = torch.arange(1.0, 7.0)
    share = shard_of(torch._neg_view(values), torch.empty(6), "exp_avg", "parameter 0")
    assert not share.is_neg() and torch.equal(share, -values)


@pytest.mark.parametrize("placements", [(Partial(),), (Replicate(),), (Shard(1),)], ids=str)
def test_a_gradient_that_is_placed_otherwise_is_redistributed_and_one_that_is_not_is_itself(placements):
    with world(1, (4,)) as mesh:
        param = distribute_tensor(values((8, 4)), mesh, (Shard(0),), src_data_rank=None)
        grad = DTensor.from_local(torch.ones(8, 4 if placements != (Shard(1),) else 1), mesh, placements)
        placed = redistribute_like(grad, param, "'w'")
        assert placed.placements == param.placements and placed.to_local().shape == param.to_local().shape
        assert redistribute_like(placed, param, "'w'") is placed
