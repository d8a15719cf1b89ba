"""Any tensor that is exchanged, moved or laid out otherwise between two steps is noticed by the next: it has the bits
of a copy of the optimizer that was left alone, and memory that was left behind is not written."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from helpers.bits import same_bits
from statestream import FusedAdam
from torch import Tensor

BF16 = torch.bfloat16
SHAPE = (6, 10)
MODES = {
    "FP32": (torch.float32, {}),
    "BF16, masters": (BF16, {"master_weights": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}),
    "FP8 and FP16": (BF16, {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16"}),
}


def elsewhere(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def at_an_odd_offset(tensor: Tensor) -> Tensor:
    room = torch.zeros(tensor.numel() + 3, dtype=tensor.dtype)
    room[3:].copy_(tensor.detach().reshape(-1))
    return room[3:].view(tensor.shape)


def transposed(tensor: Tensor) -> Tensor:
    return tensor.detach().t().contiguous().t()


PLACES: dict[str, Callable[[Tensor], Tensor]] = {f.__name__: f for f in (elsewhere, at_an_odd_offset, transposed)}


def exchange_param(optimizer: FusedAdam, param: Tensor, place: Callable) -> list[Tensor]:
    left = param.data
    param.data = place(param)
    return [left]


def exchange_grad(optimizer: FusedAdam, param: Tensor, place: Callable) -> list[Tensor]:
    left, param.grad = param.grad, place(param.grad)
    return [left]


def exchange_states(optimizer: FusedAdam, param: Tensor, place: Callable) -> list[Tensor]:
    """Other tensors in the dictionary."""
    state = optimizer.state[param]
    left = dict(state)
    for name, tensor in left.items():
        state[name] = (elsewhere if tensor.dim() == 0 else place)(tensor)
    return list(left.values())


def exchange_memory_of_states(optimizer: FusedAdam, param: Tensor, place: Callable) -> list[Tensor]:
    """Other memory under the same tensors."""
    left = []
    for tensor in optimizer.state[param].values():
        left.append(tensor.detach())
        tensor.data = (elsewhere if tensor.dim() == 0 else place)(tensor)
    return left


def exchange_dictionary(optimizer: FusedAdam, param: Tensor, place: Callable) -> list[Tensor]:
    left = optimizer.state[param]
    optimizer.state[param] = {name: (elsewhere if t.dim() == 0 else place)(t) for name, t in left.items()}
    return list(left.values())


EXCHANGES = {
    f.__name__: f
    for f in (exchange_param, exchange_grad, exchange_states, exchange_memory_of_states, exchange_dictionary)
}


def started(mode: str) -> tuple[list[torch.nn.Parameter], FusedAdam]:
    dtype, options = MODES[mode]
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(SHAPE, generator=generator).to(dtype)) for _ in range(3)]
    optimizer = FusedAdam(params, lr=0.1, weight_decay=0.1, **options)
    for _ in range(2):
        give_gradients(params, generator)
        optimizer.step()
    give_gradients(params, generator)
    return params, optimizer


def give_gradients(params: list[torch.nn.Parameter], generator: torch.Generator) -> None:
    for param in params:
        param.grad = torch.randn(SHAPE, generator=generator).to(param.dtype)


def memory(tensor: Tensor) -> list[int]:
    return list(bytes(tensor.untyped_storage()))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("mode", MODES)
def test_what_was_exchanged_is_noticed(mode, exchange, place):
    if MODES[mode][1].get("exp_avg_dtype") == "fp8" and place == "transposed":
        pytest.skip("blocks with scales follow memory: another layout is another rounding (tests/state_dict)")
    params, optimizer = started(mode)
    judged, judge = copy.deepcopy((params, optimizer))
    for param, wanted in zip(params, judged, strict=True):  # deepcopy leaves gradients behind
        wanted.grad = param.grad.clone()
    left = EXCHANGES[exchange](optimizer, params[1], PLACES[place])
    before = [memory(tensor) for tensor in left]
    versions = [param._version for param in params]
    optimizer.step()
    assert [param._version for param in params] == [version + 1 for version in versions], "autograd is told once"
    judge.step()
    for param, wanted in zip(params, judged, strict=True):
        assert same_bits(param, wanted)
        for name, tensor in judge.state[wanted].items():
            assert same_bits(optimizer.state[param][name], tensor), name
    assert [memory(tensor) for tensor in left] == before, "memory that nobody uses any more was written"


@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_of_another_dtype_is_noticed(mode):
    params, optimizer = started(mode)
    other = BF16 if params[0].dtype is torch.float32 else torch.float32
    optimizer.use_decoupled_grad = True
    for param in params:
        param.decoupled_grad = param.grad
    optimizer.step()
    params[1].decoupled_grad = params[1].decoupled_grad.to(other)
    judged, judge = copy.deepcopy((params, optimizer))
    for param, wanted in zip(params, judged, strict=True):
        wanted.decoupled_grad = param.decoupled_grad.float()
    optimizer.step()
    judge.step()
    assert all(same_bits(param, wanted) for param, wanted in zip(params, judged, strict=True))


def test_state_follows_a_parameter_that_is_swapped_onto_another_device():
    param = torch.nn.Parameter(torch.ones(8, device="meta"))
    optimizer = FusedAdam([param], lr=0.1)
    optimizer.state_dict()  # makes its state, without data
    torch.utils.swap_tensors(param, torch.nn.Parameter(torch.ones(8)))
    param.grad = torch.ones(8)
    optimizer.step()
    assert {value.device.type for value in optimizer.state[param].values()} == {"cpu"}
    assert optimizer.state[param]["step"] == 1
    assert (param < 1).all()


def test_the_scales_of_a_master_go_with_it():
    param = torch.nn.Parameter(torch.ones(300, dtype=BF16))
    optimizer = FusedAdam([param], lr=0.1, master_weights=True, master_weight_dtype="fp16", exp_avg_dtype="fp8")
    assert set(optimizer.state[param]) > {"master_param"}
    assert set(optimizer.backend.scales[param]) == {"exp_avg", "master_param"}
    param.data = param.data.float()
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert "master_param" not in optimizer.state[param]
    assert set(optimizer.backend.scales[param]) == {"exp_avg"}


def test_remainders_of_a_bfloat16_parameter_are_no_master_of_a_float16_one():
    param = torch.nn.Parameter(torch.randn(300).to(BF16))
    optimizer = FusedAdam([param], lr=0.1, master_weights=True, store_param_remainders=True)
    param.grad = torch.randn(300).to(BF16)
    optimizer.step()
    assert optimizer.state[param]["master_param"].dtype is torch.int16
    param.data = param.data.half()
    exported = optimizer.state_dict()["state"][0]["master_param"]
    assert torch.equal(exported, param.detach().float())


@pytest.mark.parametrize("count", [5, torch.tensor(5)], ids=["a number", "a tensor of integers"])
def test_a_counter_of_another_kind_goes_on_from_its_count(count):
    params = [torch.nn.Parameter(torch.ones(8)) for _ in range(2)]
    put, judge = (FusedAdam([param], lr=0.1) for param in params)
    put.state[params[0]]["step"] = count
    judge.state[params[1]]["step"].fill_(5)
    for param, optimizer in zip(params, (put, judge), strict=True):
        param.grad = torch.ones(8)
        optimizer.step()
    assert put.state[params[0]]["step"].dtype is torch.float32 and put.state[params[0]]["step"] == 6
    assert same_bits(*params)
