"""Parameters that change after the optimizer was built: frozen, replaced, moved, of another dtype or layout."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from distributed.test_sharding import world
from simulated_device.device import SimulatedDevice
from statestream import CPUOffloadOptimizer, FusedAdam
from statestream.device.host_memory import HostMemory
from statestream.device.queues import HostDevice
from statestream.offload.host.store import largest_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import Parameter

from .conftest import Pinning, assert_same_training, assert_same_values, make_params, set_grads, train

pytestmark = pytest.mark.filterwarnings("ignore:.*need more than step_chunk_bytes")

MAKERS = {
    "fused_adam": lambda p: FusedAdam(p, lr=0.1, master_weights=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
}
CHUNK = 60_000


@pytest.mark.parametrize("name", ["fused_adam", "adamw"])
def test_frozen_parameters_cost_nothing_and_train_when_they_are_unfrozen(name):
    shapes = [(1000,)] * 10
    params, reference = make_params(shapes=shapes), make_params(shapes=shapes)
    for ps in (params, reference):
        for p in ps[1:]:
            p.requires_grad_(False)
    optimizer, plain = CPUOffloadOptimizer(MAKERS[name](params), 20_000), MAKERS[name](reference)
    one = optimizer.host_state_bytes
    assert one == 2 * 1024 * 4
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps, [0, 1], missing=lambda _: range(1, 10))
        for p in ps:
            p.requires_grad_(True)
        train(o, ps, [2, 3])
    assert optimizer.host_state_bytes == 10 * one
    assert_same_training(params, optimizer, reference, plain)


@pytest.mark.parametrize("name", ["fused_adam", "adamw"])
def test_parameters_that_are_replaced_are_followed(name):
    params, reference = make_params(), make_params()
    optimizer, plain = CPUOffloadOptimizer(MAKERS[name](params), 20_000), MAKERS[name](reference)
    size = optimizer.host_state_bytes
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps, [0])
        fresh = make_params(seed=4)
        o.param_groups[0]["params"][:] = fresh
        ps[:] = fresh
        train(o, ps, [1, 2])
    assert_same_training(params, optimizer, reference, plain)
    assert optimizer.host_state_bytes == size, "memory of parameters that are gone is kept"


@pytest.mark.parametrize("name", ["fused_adam", "adamw", "adamw_masters"])
@pytest.mark.parametrize("then", ["step", "save"])
def test_tensors_that_a_trainer_puts_in_the_state_are_taken_back(name, then):
    """Lightning, for one, replaces every state by a copy on the model's device."""
    make = (lambda p: FusedAdam(p, lr=0.1, master_weights=True)) if name == "adamw_masters" else MAKERS[name]
    params, reference = make_params(torch.bfloat16), make_params(torch.bfloat16)
    optimizer, plain = CPUOffloadOptimizer(make(params), CHUNK), make(reference)
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps, range(2))
        for p in ps:
            o.state[p] = {k: v.clone().mul_(2.0) for k, v in o.state[p].items()}
        if then == "step":
            train(o, ps, [2])
    saved = optimizer.state_dict()
    storages = {a.block.untyped_storage().data_ptr() for b in optimizer.strategy.store.banks for a in b.arenas}
    assert all(optimizer.state[p]["exp_avg"].untyped_storage().data_ptr() in storages for p in params)
    for i, state in plain.state_dict()["state"].items():
        for key, value in state.items():
            assert_same_values(saved["state"][i][key], value, key)
    train(optimizer, params, range(3, 5))
    train(plain, reference, range(3, 5))
    assert_same_training(params, optimizer, reference, plain)
    for p in params:
        assert optimizer.state[p]["exp_avg"].untyped_storage().data_ptr() in storages


def test_parameters_that_change_their_shape_in_place():
    params, reference = make_params(), make_params()
    optimizer, plain = CPUOffloadOptimizer(FusedAdam(params, lr=0.1), 3_000), FusedAdam(reference, lr=0.1)
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps, range(2))
        for i in (0, 4):
            ps[i].data = torch.ones(5, 300 + i)
        train(o, ps, range(2, 4))
    assert_same_training(params, optimizer, reference, plain)


@pytest.mark.parametrize("name", ["fused_adam", "adamw"])
def test_an_older_group_may_go_and_a_newer_one_stay(name):
    params, reference = make_params(), make_params()
    optimizer, plain = CPUOffloadOptimizer(MAKERS[name](params[:3]), 20_000), MAKERS[name](reference[:3])
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps[:3], [0])
        o.add_param_group({"params": ps[3:]})
        train(o, ps, [1])
        ps[:3] = make_params(seed=4)[:3]
        o.param_groups[0]["params"][:] = ps[:3]
        train(o, ps, [2, 3])
    assert len(optimizer.strategy.store.banks) == 2
    assert_same_training(params, optimizer, reference, plain)


@pytest.mark.parametrize("swap", [True, False])
def test_meta_parameters_that_become_real_later(swap, monkeypatch):
    """In place, or as new parameters that are put in the groups."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", swap)
    with torch.device("meta"):
        model = torch.nn.Linear(20, 30).to(torch.bfloat16)
    optimizer = CPUOffloadOptimizer(FusedAdam(model.parameters(), lr=0.1, master_weights=True), 3000)
    reference = torch.nn.Linear(20, 30).to(torch.bfloat16)
    model.to_empty(device="cpu")
    model.load_state_dict(reference.state_dict())
    params, others = list(model.parameters()), list(reference.parameters())
    if not swap:
        optimizer.param_groups[0]["params"][:] = params
    plain = FusedAdam(others, lr=0.1, master_weights=True)
    train(optimizer, params, range(3))
    train(plain, others, range(3))
    assert_same_training(params, optimizer, others, plain)


def pair_of(make, dtype=torch.float32, shapes=None, chunk=3_000):
    kwargs = {} if shapes is None else {"shapes": shapes}
    params, reference = make_params(dtype, **kwargs), make_params(dtype, **kwargs)
    return params, CPUOffloadOptimizer(make(params), chunk), reference, make(reference)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: FusedAdam(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
    ],
)
def test_a_memory_format_that_changes_under_the_state(make):
    """The state of torch's optimizers keeps its own strides: in the ring it has to be read with them."""
    params, optimizer, reference, plain = pair_of(make, shapes=[(8, 3, 5, 5), (30,), (40, 20)])
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps, [0])
        ps[0].data = ps[0].data.to(memory_format=torch.channels_last)
        ps[2].data = ps[2].data.t().contiguous().t()
        train(o, ps, [1, 2])
        o.load_state_dict(o.state_dict())
        train(o, ps, [3])
    assert_same_training(params, optimizer, reference, plain)


@pytest.mark.parametrize("new", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: FusedAdam(p, lr=0.1, master_weights=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
    ],
)
def test_a_model_that_changes_its_dtype(make, new):
    """Those of torch's optimizers that go on with the state they have."""
    params, optimizer, reference, plain = pair_of(make, torch.bfloat16 if new is torch.float32 else torch.float32)
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps, [0])
        for p in ps:
            p.grad = None
            p.data = p.data.to(new)
        train(o, ps, [1, 2])
    assert_same_training(params, optimizer, reference, plain)
    assert len(optimizer.strategy.store.banks) == 1, "each parameter has a bank of its own now"
    live = {a.block.untyped_storage().data_ptr() for b in optimizer.strategy.store.banks for a in b.arenas}
    for p in params:
        for name, value in optimizer.state[p].items():
            assert not value.dim() or value.untyped_storage().data_ptr() in live, name


@pytest.mark.parametrize("name", ["fused_adam", "adamw"])
def test_state_of_a_model_that_moves_to_a_gpu_is_pinned_then(name, on_device):
    """Built for parameters on the CPU or the meta device its memory is pageable; copies would never overlap."""
    params, optimizer, reference, plain = pair_of(MAKERS[name], torch.bfloat16)
    train(optimizer, params, [0])
    train(plain, reference, [0])
    assert optimizer.pinned_bytes == 0
    pinning = Pinning()
    gpu = on_device(HostDevice())
    gpu.memory = HostMemory(pinning.pin, pinning.unpin)
    optimizer.strategy.device.torch_device = torch.device("cuda")  # as if the parameters had been elsewhere until now
    train(optimizer, params, range(1, 3))
    train(plain, reference, range(1, 3))
    assert_same_training(params, optimizer, reference, plain)
    assert optimizer.strategy.device is gpu
    assert optimizer.pinned_bytes == optimizer.host_state_bytes == sum(pinning.pinned.values())
    optimizer.add_param_group({"params": make_params(torch.bfloat16, shapes=[(700,)], seed=5)})
    assert optimizer.pinned_bytes == optimizer.host_state_bytes == sum(pinning.pinned.values())
    for bank in optimizer.strategy.store.banks:
        for arena in bank.arenas:
            assert pinning.pinned.get(arena.block.data_ptr(), 0) == arena.nbytes
    del optimizer, bank, arena
    gc.collect()
    assert not pinning.pinned


REMAINDERS = {"master_weights": True, "store_param_remainders": True}


@pytest.mark.parametrize("options", [{"master_weights": True}, REMAINDERS], ids=["masters", "remainders"])
@pytest.mark.parametrize("new", [torch.float32, torch.float16])
def test_an_optimizer_is_wrapped_after_its_model_changed_its_dtype(options, new):
    """State that was made for the old dtype: a master too many, or remainders where there is a master now."""
    params, reference = make_params(torch.bfloat16), make_params(torch.bfloat16)
    inner, plain = FusedAdam(params, lr=0.1, **options), FusedAdam(reference, lr=0.1, **options)
    for o, ps in ((inner, params), (plain, reference)):
        train(o, ps, [0, 1])
        for p in ps:
            p.grad = None
            p.data = p.data.to(new)
    optimizer = CPUOffloadOptimizer(inner, 20_000)
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps, [2, 3])
    assert_same_training(params, optimizer, reference, plain)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("options", [{"master_weights": True}, REMAINDERS], ids=["masters", "remainders"])
@pytest.mark.parametrize("old, new", [(torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)])
def test_masters_that_a_new_dtype_has_none_of_are_not_refreshed(wrapped, options, old, new):
    params, reference = make_params(old), make_params(old)
    optimizer, plain = FusedAdam(params, lr=0.1, **options), FusedAdam(reference, lr=0.1, **options)
    optimizer = CPUOffloadOptimizer(optimizer, 20_000) if wrapped else optimizer
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps, [0])
        for p in ps:
            p.grad = None
            p.data = p.data.to(new)
    optimizer.refresh_masters()
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps, [1])
    assert_same_training(params, optimizer, reference, plain)


def test_live_state_of_bfloat16_and_float16_parameters_with_remainders_can_be_saved(tmp_path):
    """Their masters have two dtypes, of which torch.save takes one a memory; the empty ones too."""
    shapes = [(100,), (300,), (0,), (0,), (7, 3)]
    params = [p for dtype in (torch.bfloat16, torch.float16, torch.float32) for p in make_params(dtype, shapes)]
    optimizer = CPUOffloadOptimizer(FusedAdam(params, **REMAINDERS), 3_000, state_dict_snapshot=False)
    train(optimizer, params, [0])
    state_dict = optimizer.state_dict()
    torch.save(state_dict, tmp_path / "state")
    saved = torch.load(tmp_path / "state", weights_only=True)["state"]
    for index, state in state_dict["state"].items():
        for name, value in state.items():
            assert_same_values(saved[index][name], value, f"{name} of parameter {index}")


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_that_is_listed_twice_changes_its_dtype():
    params, reference = make_params(torch.bfloat16), make_params(torch.bfloat16)
    optimizer = CPUOffloadOptimizer(FusedAdam([*params, params[0]], lr=0.1, master_weights=True), 20_000)
    plain = FusedAdam([*reference, reference[0]], lr=0.1, master_weights=True)
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps, [0])
        for p in ps:
            p.grad = None
            p.data = p.data.float()
        train(o, ps, [1])
    assert_same_training(params, optimizer, reference, plain)


def test_state_of_parameters_without_gradients_follows_a_dtype_there_and_back():
    """Its room is given another form with the others', while it is still what the old form was."""
    params, reference = make_params(torch.bfloat16), make_params(torch.bfloat16)
    options = {"lr": 0.1, "master_weights": True}
    optimizer, plain = CPUOffloadOptimizer(FusedAdam(params, **options), 20_000), FusedAdam(reference, **options)
    for o, ps in ((optimizer, params), (plain, reference)):
        train(o, ps, [0])
        for step, dtype in ((1, torch.float32), (2, torch.bfloat16)):
            for p in ps:
                p.grad = None
                p.data = p.data.to(dtype)
            train(o, ps, [step], missing=lambda _: (3, 4, 5))
        train(o, ps, [3])
    assert_same_training(params, optimizer, reference, plain)


def test_a_users_own_entries_come_along_when_an_optimizer_is_wrapped():
    params = make_params()
    inner = FusedAdam(params, lr=0.1)
    set_grads(params, 0)
    inner.step()
    inner.state[params[0]]["note"] = "mine"
    assert CPUOffloadOptimizer(inner, 20_000).state[params[0]]["note"] == "mine"


def test_a_copy_to_be_pickled_has_scales_of_its_own():
    params = make_params()
    optimizer = CPUOffloadOptimizer(FusedAdam(params, lr=0.1, exp_avg_dtype="fp8"), 20_000)
    set_grads(params, 0)
    optimizer.step()
    mine, theirs = optimizer.inner.backend.scales, optimizer.strategy.detached().backend.scales
    for param in params:
        assert mine[param].keys() == theirs[param].keys() == {"exp_avg"}
        assert_same_values(mine[param]["exp_avg"], theirs[param]["exp_avg"])
        assert mine[param]["exp_avg"].data_ptr() != theirs[param]["exp_avg"].data_ptr()


def test_a_layout_that_changes_while_the_last_step_is_still_stored(on_device):
    shape = (8, 3, 5, 5)
    params, reference = make_params(shapes=[shape, (100,)]), make_params(shapes=[shape, (100,)])
    device = on_device(SimulatedDevice(1, style="late"))
    optimizer = CPUOffloadOptimizer(FusedAdam(params, lr=0.1), 6_000)
    judge = FusedAdam(reference, lr=0.1)
    train(optimizer, params, range(1))
    train(judge, reference, range(1))
    assert device.queues["store"]
    for ps in (params, reference):  # with weights of their own: a copy of the old ones would wait for the step
        ps[0].data = torch.ones(shape).to(memory_format=torch.channels_last)
    train(optimizer, params, range(1, 2))
    train(judge, reference, range(1, 2))
    device.settle()
    assert_same_training(params, optimizer, reference, judge)


@pytest.mark.parametrize(
    ("mesh_shape", "placements", "largest"),
    [
        ((4,), (Shard(0),), (2, 9)),
        ((4,), (Shard(1),), (5, 3)),
        ((2, 2), (Replicate(), Shard(0)), (3, 9)),
        ((2, 2), (Shard(0), Shard(0)), (2, 9)),
        ((2, 2), (Shard(0), Shard(1)), (3, 5)),
    ],
)
def test_the_largest_shard_is_that_of_the_rank_which_has_most(mesh_shape, placements, largest):
    sizes = []
    for rank in range(4):
        with world(rank, mesh_shape) as mesh:
            param = distribute_tensor(torch.zeros(5, 9), mesh, placements, src_data_rank=None)
            assert largest_shard(param) == largest
            sizes.append(tuple(param.to_local().shape))
    assert max(sizes) == largest


def test_another_share_of_the_host_is_another_plan():
    params = make_params()
    store = CPUOffloadOptimizer(FusedAdam(params, lr=0.1), 20_000).strategy.store
    whole = sum(chunk.nbytes for chunk in store.plan.chunks)
    store.share(0.5)
    half = sum(chunk.nbytes for chunk in store.plan.chunks)
    assert half == pytest.approx(whole / 2, abs=12 * 256)
    store.share(0.0)
    assert sum(chunk.nbytes for chunk in store.plan.chunks) == whole


def test_every_rank_makes_the_same_plan_of_uneven_shards():
    plans = []
    for rank in range(4):
        with world(rank, (4,)) as mesh:
            full = [torch.zeros(shape) for shape in ((5, 1000), (3, 700), (16, 100))]
            params = [Parameter(distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None)) for t in full]
            plans.append(CPUOffloadOptimizer(FusedAdam(params), 20_000).strategy.store.plan)
    assert plans[1:] == plans[:1] * 3


def test_state_that_is_made_anew_is_zero_whatever_was_there():
    params = make_params(shapes=[(600,), (300,)])
    optimizer = CPUOffloadOptimizer(FusedAdam(params, lr=0.1, exp_avg_dtype="fp8", exp_avg_sq_dtype="fp16"), 20_000)
    fresh = copy.deepcopy(optimizer.state_dict())
    for param in params:
        param.grad = torch.full_like(param, float("inf"))
    optimizer.step()
    optimizer.load_state_dict({**fresh, "state": {}})
    for state in optimizer.state_dict()["state"].values():
        assert all(bool((value == 0).all()) for value in state.values())
