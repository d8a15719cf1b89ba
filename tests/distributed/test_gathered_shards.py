"""DTensors whose local tensors are read all at once: the bits of the plain shards, and whatever does not fit is left
for a closer look."""

from __future__ import annotations

import pytest
import torch
from statestream import FusedAdam, kernels
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.helpers.bits import same_bits

from .test_sharding import CASES, SHAPES, world

pytestmark = pytest.mark.skipif(kernels._EXCHANGE is None, reason="this torch has no exchange of many tensors")

BF16 = torch.bfloat16
MODES = {
    "FP32": {},
    "BF16": {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    "masters": {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "master_weights": True},
    "remainders": {"master_weights": True, "store_param_remainders": True},
}


def sharded(full: torch.Tensor, mesh, placements) -> DTensor:
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def trained(placed, dtype: torch.dtype, **options) -> tuple[list[torch.nn.Parameter], FusedAdam]:
    """Three steps of parameters that `placed` makes of whole tensors, the second written to in between."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda shape: torch.randn(shape, generator=generator).to(dtype)  # noqa: E731
    params = [torch.nn.Parameter(placed(draw(shape))) for shape in SHAPES]
    optimizer = FusedAdam(params, lr=0.1, weight_decay=0.1, **options)
    for _ in range(3):
        for param, shape in zip(params, SHAPES, strict=True):
            param.grad = placed(draw(shape))
        optimizer.step()
        with torch.no_grad():
            params[1].mul_(1.5)
    return params, optimizer


@pytest.mark.parametrize(("mesh_shape", "placements"), CASES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_shards_step_as_the_plain_tensors_that_they_are(mesh_shape, placements, mode, monkeypatch):
    if any(getattr(p, "dim", 0) >= 2 for p in placements):
        pytest.skip("the shapes have two dimensions")
    left = []
    native = kernels.gather
    monkeypatch.setattr(kernels, "gather", lambda *a, **k: left.append((found := native(*a, **k))[1]) or found)
    dtype = torch.float32 if mode == "FP32" else BF16
    with world(1, mesh_shape) as mesh:
        params, optimizer = trained(lambda full: sharded(full, mesh, placements), dtype, **MODES[mode])
        assert left == [[]] * 3, "none had to be looked at one by one"
        shares, judge = trained(lambda full: sharded(full, mesh, placements).to_local(), dtype, **MODES[mode])
        for param, share in zip(params, shares, strict=True):
            ours, wanted = {"param": param, **optimizer.state[param]}, {"param": share, **judge.state[share]}
            assert ours.keys() == wanted.keys()
            for key, tensor in ours.items():
                assert same_bits(tensor.to_local() if isinstance(tensor, DTensor) else tensor, wanted[key]), key


def one(mesh, *, param=None, grad=None, state=None, **changed):
    """gather of one sharded parameter, of which some parts are exchanged."""
    like = sharded(torch.ones(6, 4), mesh, (Shard(0),))
    param = torch.nn.Parameter(like if param is None else param)
    param.decoupled_grad = like if grad is None else grad
    kept = {"exp_avg": like.clone(), "exp_avg_sq": like.clone(), "step": torch.tensor(0.0)} | (state or {})
    options = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32, "masters": {}, "step_on_device": False}
    options |= {"scales": {}, "sharded": True, "extras": False, "first_ordinal": 0} | changed
    return kernels.gather([param], "decoupled_grad", {param: kept}, **options)


def test_what_fits_is_taken_whatever_object_says_so():
    with world(1, (4,)) as mesh:
        (call,), left = one(mesh)
        assert left == []
        assert call.rows[0] == 8
        assert (type(call.params[0]), type(call.locals[0])) == (DTensor, torch.Tensor)
        assert call.rows[1] == call.locals[0].data_ptr() == call.params[0].to_local().data_ptr()
        # A spec of its own that says the same.
        again = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)], run_check=False, shape=(6, 4), stride=(4, 1))
        assert again._spec is not sharded(torch.ones(6, 4), mesh, (Shard(0),))._spec
        assert one(mesh, grad=again)[1] == []
        equal = init_device_mesh("cpu", (4,))
        assert equal is not mesh
        assert one(mesh, grad=from_local(equal, Shard(0), torch.ones(2, 4)))[1] == []


def from_local(mesh, placement, local, shape=(6, 4)):
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=(4, 1))


DIFFERENT = {
    "a sum still to be taken": lambda mesh: {"grad": from_local(mesh, Partial(), torch.ones(2, 4), (2, 4))},
    "other placements": lambda mesh: {"grad": from_local(mesh, Replicate(), torch.ones(2, 4), (2, 4))},
    "another whole": lambda mesh: {"grad": from_local(mesh, Shard(0), torch.ones(2, 4), (5, 4))},
    "another mesh": lambda mesh: {"grad": from_local(DeviceMesh("cpu", [3, 1, 2, 0]), Shard(0), torch.ones(2, 4))},
    "a plain gradient": lambda mesh: {"grad": torch.ones(2, 4)},
    "a plain parameter": lambda mesh: {"param": torch.ones(2, 4)},
    "a local gradient of another layout": lambda mesh: {"grad": from_local(mesh, Shard(0), torch.ones(4, 2).t())},
    "a moment of another local shape": lambda mesh: {
        "state": {"exp_avg": from_local(mesh, Shard(0), torch.ones(1, 4))}
    },
    "a moment of another dtype": lambda mesh: {
        "state": {"exp_avg": from_local(mesh, Shard(0), torch.ones(2, 4, dtype=BF16))}
    },
    "DTensors left out": lambda mesh: {"sharded": False},
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_does_not_fit_is_left_for_a_closer_look(what):
    with world(1, (4,)) as mesh:
        assert one(mesh, **DIFFERENT[what](mesh)) == ([], [0])


def test_autograd_is_told_that_local_tensors_were_written():
    with world(1, (4,)) as mesh:
        param = torch.nn.Parameter(sharded(torch.randn(8, 4), mesh, (Shard(0),)))
        optimizer = FusedAdam([param])
        param.grad = torch.ones_like(param)
        with torch.no_grad():
            local = param.to_local()
        before = param._version, local._version
        optimizer.step()
        assert param._version > before[0] and local._version > before[1]
