"""Parameters of Transformer Engine's kind: trained through FP32 masters, and quantised after each step."""

import copy
import io
import pickle

import pytest
import torch
from helpers.bits import differences, same_bits, snapshot
from helpers.quantized import Float8, quantized_parameter
from statestream import CPUOffloadOptimizer, FusedAdam

BF16, FP32 = torch.bfloat16, torch.float32
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}
SHAPES = ((33, 7), (5,), (64, 16))


def start(index):
    return torch.randn(SHAPES[index], generator=torch.Generator().manual_seed(index))


def gradient(index, step, dtype=FP32):
    return torch.randn(SHAPES[index], generator=torch.Generator().manual_seed(1000 * step + index)).to(dtype)


def quantized(dtype=BF16):
    return [quantized_parameter(start(i), dtype) for i in range(len(SHAPES))]


def train(optimizer, steps, dtype=FP32):
    for step in steps:
        for i, param in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            param.decoupled_grad = gradient(i, step, dtype)
        optimizer.step()


def build(params, **arguments):
    return FusedAdam(params, **{**SETTINGS, "master_weights": True, "use_decoupled_grad": True, **arguments})


def bytes_of(param):
    return param.bytes.view(torch.uint8)


@pytest.mark.parametrize("grad_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("moments", [FP32, BF16], ids=str)
def test_the_master_trains_as_an_fp32_parameter_does_and_the_parameter_is_quantised_from_it(dtype, grad_dtype, moments):
    params = quantized(dtype)
    twins = [torch.nn.Parameter(p.dequantize(dtype=FP32).detach()) for p in params]
    optimizer = build(params, exp_avg_dtype=moments, exp_avg_sq_dtype=moments)
    reference = build(twins, exp_avg_dtype=moments, exp_avg_sq_dtype=moments)
    for param, twin in zip(params, twins, strict=True):
        assert same_bits(optimizer.state[param]["master_param"], twin)
    for step in range(6):
        train(optimizer, [step], grad_dtype)
        train(reference, [step], grad_dtype)
        for param, twin in zip(params, twins, strict=True):
            assert same_bits(optimizer.state[param]["master_param"], twin)
            assert type(param) is Float8
            assert torch.equal(bytes_of(param), bytes_of(Float8.of(twin.detach())))
            for name in ("exp_avg", "exp_avg_sq", "step"):
                assert same_bits(optimizer.state[param][name], reference.state[twin][name])


def test_gradients_of_autograd_are_taken():
    param = quantized_parameter(start(2), FP32)
    optimizer = FusedAdam([param], lr=1e-2, master_weights=True)
    inputs = torch.randn(8, 64)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (inputs @ param).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]


def test_without_masters_they_are_refused_by_name_as_is_capturable():
    for arguments, found in (
        ({}, "master_weights=True"),
        ({"master_weights": True, "capturable": True}, "capturable=False"),
    ):
        params, plain = quantized(), torch.nn.Parameter(start(0))
        before = [bytes_of(param).clone() for param in params]
        optimizer = FusedAdam([plain], use_decoupled_grad=True, **arguments)
        optimizer.add_param_group({"params": params})
        for i, param in enumerate(params):
            param.decoupled_grad = gradient(i, 0)
        plain.decoupled_grad = gradient(0, 0)
        with pytest.raises(RuntimeError, match=rf"parameter 0 of group 1: .*Float8 .*{found}"):
            optimizer.step()
        assert all(map(torch.equal, map(bytes_of, params), before)) and torch.equal(plain, start(0))


def test_a_parameter_that_is_quantised_later_is_refused_by_the_step_before_anything_changes():
    first, second = torch.nn.Parameter(torch.ones(3)), quantized_parameter(torch.ones(3), FP32)
    optimizer = FusedAdam([first, torch.nn.Parameter(torch.ones(3))], lr=0.1)
    optimizer.param_groups[0]["params"][1] = second
    first.grad = second.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"parameter 1 of group 0: .*master_weights=True"):
        optimizer.step()
    assert torch.equal(first, torch.ones(3))


def test_remainders_are_of_bfloat16_parameters_alone():
    weight, param = torch.nn.Parameter(start(0).to(BF16)), quantized()[1]
    optimizer = build([weight, param], store_param_remainders=True)
    assert optimizer.state[weight]["master_param"].dtype is torch.int16
    assert optimizer.state[param]["master_param"].dtype is FP32
    train(optimizer, range(3))
    twin = torch.nn.Parameter(Float8.of(start(1)).dequantize(dtype=FP32))
    reference = build([torch.nn.Parameter(start(0).to(BF16)), twin], store_param_remainders=True)
    train(reference, range(3))
    assert same_bits(optimizer.state[param]["master_param"], twin)


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("offload", [False, True])
def test_a_resumed_run_is_bit_equal(order, offload):
    def states(params, optimizer):
        return [bytes_of(p) for p in params] + [p.scale for p in params], snapshot_of_state(params, optimizer)

    def snapshot_of_state(params, optimizer):
        return {f"{i} {k}": v.clone() for i, p in enumerate(params) for k, v in optimizer.state[p].items()}

    whole = quantized()
    uninterrupted = build(whole, exp_avg_dtype="bf16", state_dict_cpu_offload=offload)
    train(uninterrupted, range(6))

    part = quantized()
    old = build(part, exp_avg_dtype="bf16", state_dict_cpu_offload=offload)
    train(old, range(3))
    new_params = [quantized_parameter(torch.zeros(shape)) for shape in SHAPES]
    new = build(new_params, exp_avg_dtype="bf16", state_dict_cpu_offload=offload)
    file = io.BytesIO()
    torch.save(old.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    def load_weights():
        with torch.no_grad():
            for target, source in zip(new_params, part, strict=True):
                target.copy_(source)

    if order == "model first":
        load_weights()
    new.load_state_dict(saved)
    if order == "optimizer first":
        load_weights()
    train(new, range(3, 6))
    (bytes_a, state_a), (bytes_b, state_b) = states(whole, uninterrupted), states(new_params, new)
    assert all(torch.equal(a, b) for a, b in zip(bytes_a, bytes_b, strict=True))
    assert all(same_bits(state_a[name], state_b[name]) for name in state_a)


def test_a_state_dict_without_masters_starts_them_at_the_parameters_values():
    params = quantized()
    optimizer = build(params)
    train(optimizer, range(3))
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        del state["master_param"]
    new_params = [quantized_parameter(p.dequantize(dtype=FP32).detach()) for p in params]
    new = build(new_params)
    new.load_state_dict(saved)
    for param in new_params:
        assert same_bits(new.state[param]["master_param"], param.dequantize(dtype=FP32).detach())


def test_weights_written_from_outside_win_over_masters_and_equal_ones_leave_them():
    params = quantized()
    optimizer = build(params, lr=0.0, weight_decay=0.0)
    train(optimizer, [0])
    optimizer.set_scaled_state(params[0], "master_param", start(0))  # what the parameter was quantised from
    masters = [optimizer.state[p]["master_param"].clone() for p in params]
    assert not same_bits(masters[0], params[0].dequantize(dtype=FP32).detach())
    with torch.no_grad():
        params[0].copy_(Float8.of(start(0)))  # the same bytes: the master keeps the bits that the parameter lacks
        params[1].copy_(torch.full(SHAPES[1], 0.3))
    train(optimizer, [1])
    assert same_bits(optimizer.state[params[0]]["master_param"], masters[0])
    assert same_bits(
        optimizer.state[params[1]]["master_param"], Float8.of(torch.full(SHAPES[1], 0.3)).dequantize(dtype=FP32)
    )
    assert same_bits(optimizer.state[params[2]]["master_param"], masters[2])


def test_writes_that_leave_no_trace_are_found_by_refresh_masters():
    param = quantized()[0]
    optimizer = build([param], lr=0.0, weight_decay=0.0)
    train(optimizer, [0])
    param.bytes.copy_(torch.ones(SHAPES[0]))
    param.scale.fill_(2.0)
    optimizer.refresh_masters()
    assert torch.equal(optimizer.state[param]["master_param"], torch.full(SHAPES[0], 2.0))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_goes_on_alone(how):
    optimizer = build(quantized())
    train(optimizer, range(2))
    twin = copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    train(optimizer, range(2, 4))
    train(twin, range(2, 4))
    values = ("0", "1", "2")
    assert differences(snapshot(optimizer), snapshot(twin), ignoring=values) == []
    for a, b in zip(optimizer.param_groups[0]["params"], twin.param_groups[0]["params"], strict=True):
        assert a is not b and torch.equal(bytes_of(a), bytes_of(b))


def test_offload_refuses_them_by_name():
    with pytest.raises(ValueError, match=r"parameter 0 of group 0: Float8 .*without offload"):
        CPUOffloadOptimizer(build(quantized()), step_chunk_bytes=1 << 20)


def test_offload_takes_frozen_ones_and_refuses_one_that_is_unfrozen_by_name_before_anything_changes():
    plain, base = torch.nn.Parameter(start(0)), quantized()[1].requires_grad_(False)
    optimizer = CPUOffloadOptimizer(build([plain, base]), step_chunk_bytes=1 << 20)
    plain.decoupled_grad = gradient(0, 0)
    optimizer.step()
    before, base.decoupled_grad = plain.detach().clone(), gradient(1, 0)
    base.requires_grad_(True)
    with pytest.raises(ValueError, match=r"parameter 1 of group 0: Float8 .*without offload"):
        optimizer.step()
    assert torch.equal(plain, before) and [id(key) for key in optimizer.state] == [id(plain)]


def test_a_step_tells_autograd_that_the_parameter_was_written():
    param = quantized()[0]
    optimizer = build([param])
    before = param._version
    train(optimizer, [0])
    assert param._version > before


def test_an_empty_one_is_a_step_that_does_nothing():
    param = torch.nn.Parameter(Float8(torch.empty(0, dtype=torch.float8_e4m3fn), torch.ones(1), BF16))
    optimizer = build([param])
    param.decoupled_grad = torch.empty(0)
    optimizer.step()
    assert optimizer.state[param]["step"].item() == 1
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
