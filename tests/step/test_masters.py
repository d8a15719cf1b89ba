"""FP32 masters and remainders follow weights that are written from outside, and nothing else moves them."""

import copy

import pytest
import torch
from helpers.bits import differences, same_bits, snapshot
from helpers.modes import Mode
from helpers.training import build, gradient, train
from statestream import CPUOffloadOptimizer, FusedAdam

BF16, FP32 = torch.bfloat16, torch.float32

MASTERS = ["fp32", "remainders"]


def run(master="fp32", n=64, steps=2, lr=1e-3):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(n).to(BF16))
    optimizer = FusedAdam([weight], lr=lr, **Mode(BF16, BF16, FP32, master).arguments)
    train(optimizer, range(steps))
    return weight, optimizer


def nothing(optimizer):
    """A step that updates nothing but looks at everything: lr 0 and no decay."""
    group = optimizer.param_groups[0]
    lr, group["lr"] = group["lr"], 0.0
    for param in group["params"]:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    group["lr"] = lr


WRITES = {
    "copy_": lambda w, v: w.copy_(v),
    "an index": lambda w, v: w.__setitem__(slice(None), v),
    "a view": lambda w, v: w.view(-1).copy_(v),
    "detach()": lambda w, v: w.detach().copy_(v),
    "load_state_dict": lambda w, v: _load(w, v),
    "a new .data": lambda w, v: setattr(w, "data", v.clone()),
    "foreach": lambda w, v: torch._foreach_copy_([w], [v]),
}


def _load(weight, values):
    module = torch.nn.Module()
    module.w = weight
    module.load_state_dict({"w": values})


@pytest.mark.parametrize("write", WRITES)
def test_the_next_step_starts_from_weights_that_were_written(write):
    weight, optimizer = run()
    values = torch.randn(64).to(BF16)
    with torch.no_grad():
        WRITES[write](weight, values)
    nothing(optimizer)
    assert same_bits(weight, values)
    assert same_bits(optimizer.state[weight]["master_param"], values.float())


def test_only_elements_that_were_changed_lose_their_low_bits():
    weight, optimizer = run()
    master = optimizer.state[weight]["master_param"].clone()
    assert not torch.equal(master, master.to(BF16).float()), "the masters have no low bits to lose"
    with torch.no_grad():
        weight[5] = 7.0
        weight[9:12] *= 2
    nothing(optimizer)
    expected = master.clone()
    expected[5] = 7.0
    expected[9:12] = weight[9:12].float()
    assert same_bits(optimizer.state[weight]["master_param"], expected)


@pytest.mark.parametrize("master", MASTERS)
def test_weights_written_with_their_own_values_change_no_bit(master):
    """A model loaded from the checkpoint that the masters come from."""
    weight, optimizer = run(master)
    held = optimizer.state[weight]["master_param"].clone()
    with torch.no_grad():
        weight.copy_(weight.clone())
    weight.data = weight.data.clone()
    nothing(optimizer)
    optimizer.refresh_masters()
    assert same_bits(optimizer.state[weight]["master_param"], held)


@pytest.mark.parametrize("master", MASTERS)
def test_steps_alone_never_bring_masters_back_to_weights(master):
    weight, optimizer = run(master, steps=0, lr=1e-5)  # each update is below half a unit of a BF16 weight
    before = weight.detach().clone()
    for _ in range(5):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    state = optimizer.state[weight]["master_param"]
    assert same_bits(weight, before) or (weight != before).sum() < 8
    if master == "fp32":
        moved = before.float() - state
        assert torch.allclose(moved, torch.full((64,), 5e-5), rtol=0.05, atol=3e-7)
    else:
        assert torch.unique(state).numel() > 1


def test_writes_through_data_need_refresh_masters():
    weight, optimizer = run()
    values = torch.randn(64).to(BF16)
    weight.data.copy_(values)
    optimizer.refresh_masters()
    assert same_bits(optimizer.state[weight]["master_param"], values.float())
    nothing(optimizer)
    assert same_bits(weight, values)


def test_refresh_masters_makes_no_state_and_does_nothing_without_masters():
    weight = torch.nn.Parameter(torch.ones(3, dtype=BF16))
    optimizer = FusedAdam([weight], master_weights=True)
    optimizer.refresh_masters()
    assert len(optimizer.state) == 0
    for mode in (Mode(FP32), Mode(BF16), Mode(BF16, master="remainders")):
        other = build(mode)
        train(other, range(1))
        before = snapshot(other)
        other.refresh_masters()
        assert differences(before, snapshot(other)) == []


@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("order", ["model first", "optimizer first", "optimizer alone, weights through a new .data"])
def test_both_load_orders_are_bit_equal(order, master):
    mode = Mode(BF16, BF16, FP32, master)
    source = build(mode)
    train(source, range(3))
    saved = copy.deepcopy(source.state_dict())
    weights = [p.detach().clone() for g in source.param_groups for p in g["params"]]
    target = build(mode, seed=6)
    train(target, range(20, 22))  # so that there is something to get wrong
    members = [p for g in target.param_groups for p in g["params"]]

    def load_weights():
        with torch.no_grad():
            for param, value in zip(members, weights, strict=True):
                if "data" in order:
                    param.data = value.clone(memory_format=torch.preserve_format)
                else:
                    param.copy_(value)

    if order == "model first":
        load_weights()
        target.load_state_dict(saved)
    else:
        target.load_state_dict(saved)
        load_weights()
    train(source, range(3, 6))
    train(target, range(3, 6))
    assert differences(snapshot(source), snapshot(target)) == []


@pytest.mark.parametrize("weight_bits, low", [(0x3F80, 0x8000), (0x0000, -1), (0x8000, 5), (0x7F7F, 0x7FFF)])
def test_remainders_join_with_whatever_weight_is_there(weight_bits, low):
    """The error is at most half a unit in the weight's last place."""
    bits = torch.tensor([weight_bits], dtype=torch.int32).to(torch.int16)
    weight = torch.nn.Parameter(bits.view(BF16).clone())
    optimizer = FusedAdam([weight], lr=1e-30, master_weights=True, store_param_remainders=True)
    optimizer.set_scaled_state(weight, "master_param", torch.tensor([low], dtype=torch.int32).to(torch.int16))
    before = weight.detach().clone()
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.isfinite(weight).all()
    assert same_bits(weight, before) or before.item() == 0


def test_masters_of_a_new_optimizer_start_at_the_weights_it_first_steps():
    """Not at those it was built with: a model loaded in between counts."""
    weight = torch.nn.Parameter(torch.ones(8, dtype=BF16))
    optimizer = FusedAdam([weight], lr=0.0, master_weights=True)
    with torch.no_grad():
        weight.fill_(2.5)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.all(optimizer.state[weight]["master_param"] == 2.5) and torch.all(weight == 2.5)


@pytest.mark.parametrize("master", [None, *MASTERS])
def test_a_model_moved_to_another_dtype_keeps_its_moments(master):
    module = torch.nn.Linear(4, 3)
    optimizer = FusedAdam(module.parameters(), lr=0.1, **Mode(BF16, FP32, FP32, master).arguments)
    train(optimizer, range(2))
    moments = [optimizer.state[p]["exp_avg"].clone() for p in module.parameters()]
    assert all("master_param" not in optimizer.state[p] for p in module.parameters())
    module.to(BF16)
    optimizer.param_groups[0]["lr"] = 0.0
    for param in module.parameters():
        param.grad = gradient(param, 0, 0) * 0
    optimizer.step()
    for param, old in zip(module.parameters(), moments, strict=True):
        state = optimizer.state[param]
        assert param.dtype is BF16 and state["step"].item() == 3
        assert ("master_param" in state) is (master is not None)
        torch.testing.assert_close(state["exp_avg"], old * 0.9)
    module.float()
    train(optimizer, range(1))
    assert all("master_param" not in optimizer.state[p] for p in module.parameters())


def test_a_model_moved_to_another_memory_format_keeps_every_element():
    module = torch.nn.Conv2d(3, 4, 3)
    plain = copy.deepcopy(module)
    first, second = FusedAdam(module.parameters(), lr=0.1), FusedAdam(plain.parameters(), lr=0.1)
    train(first, range(2))
    train(second, range(2))
    module.to(memory_format=torch.channels_last)
    assert module.weight.is_contiguous(memory_format=torch.channels_last)
    train(first, range(2, 4))
    train(second, range(2, 4))
    assert differences(snapshot(first), snapshot(second)) == []


@pytest.mark.parametrize("stepped", [0, 2])
def test_weights_win_over_masters_loaded_without_them(stepped):
    """Whether or not the optimizer has stepped before: a load makes the next step look at the weights anew."""
    _, source = run(steps=3)
    weight, optimizer = run(steps=0)
    train(optimizer, range(20, 20 + stepped))
    with torch.no_grad():
        own = weight.detach().clone()
        away = source.state_dict()
        away["state"][0]["master_param"] += 1.0
    optimizer.load_state_dict(away)
    nothing(optimizer)
    assert same_bits(weight, own)
    assert same_bits(optimizer.state[weight]["master_param"], own.float())


def test_a_load_after_the_model_was_moved_to_another_dtype_and_layout():
    """State that is there already is brought to where the parameter is now before values come in."""
    mode = Mode(BF16, BF16, FP32, "fp32")
    module = torch.nn.Conv2d(3, 4, 3)
    optimizer = FusedAdam(module.parameters(), lr=0.1, **mode.arguments)
    train(optimizer, range(1))
    source_module = copy.deepcopy(module).to(BF16)
    source = FusedAdam(source_module.parameters(), lr=0.1, **mode.arguments)
    train(source, range(3))
    module.to(BF16).to(memory_format=torch.channels_last)
    optimizer.load_state_dict(copy.deepcopy(source.state_dict()))
    for (name, param), other in zip(module.named_parameters(), source_module.parameters(), strict=True):
        held = optimizer.state[param]
        assert set(held) == set(source.state[other])
        for key, value in source.state[other].items():
            assert same_bits(held[key], value), (name, key)
            assert key == "step" or held[key].stride() == param.stride(), (name, key)


@pytest.fixture(scope="module")
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


SHARDED_WRITES = {
    "the DTensor": lambda w, v: w.copy_(v),
    "its local tensor": lambda w, v: w.to_local().copy_(v.to_local()),
    "a view of its local tensor": lambda w, v: w.to_local().view(-1).copy_(v.to_local().view(-1)),
}


@pytest.mark.parametrize("write", SHARDED_WRITES)
def test_writes_to_a_sharded_weight_are_followed(write, one_rank):
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(0)
    weight = torch.nn.Parameter(distribute_tensor(torch.randn(8, 4).to(BF16), one_rank, [Shard(0)]))
    values = distribute_tensor(torch.randn(8, 4).to(BF16), one_rank, [Shard(0)])
    optimizer = FusedAdam([weight], lr=1e-3, master_weights=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with torch.no_grad():
        SHARDED_WRITES[write](weight, values)
    nothing(optimizer)
    with torch.no_grad():
        assert same_bits(weight.to_local(), values.to_local())
        assert same_bits(optimizer.state[weight]["master_param"].to_local(), values.to_local().float())


@pytest.mark.parametrize("offload", [False, True])
def test_a_weight_that_moved_to_where_another_was_is_noticed(offload):
    """As an allocator gives memory out again that was freed: a new tensor at the address that is remembered."""
    room = bytearray(64)
    param = torch.nn.Parameter(torch.frombuffer(room, dtype=torch.bfloat16))
    optimizer = FusedAdam([param], lr=0.0, master_weights=True)
    if offload:
        optimizer = CPUOffloadOptimizer(optimizer)
    param.grad = torch.ones_like(param)
    optimizer.step()
    address, version = param.data_ptr(), param._version
    param.data = torch.zeros_like(param.data)  # the storage that was over the room is gone
    room[:] = torch.full((32,), 3.0, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    param.data = torch.frombuffer(room, dtype=torch.bfloat16)
    assert (param.data_ptr(), param._version) == (address, version)
    optimizer.step()
    assert (param == 3.0).all()
