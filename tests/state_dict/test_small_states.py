"""States of FP16 and FP8 payloads with scales: where the parameter goes they go, with values of any origin, and no
step, export or load takes memory beside them."""

import copy
import gc

import pytest
import torch
from helpers.bits import same_bits
from helpers.memory import peak_extra_bytes
from helpers.modes import BF16, FP8, FP16, FP32
from helpers.stored import decoded, storage_error
from statestream import FusedAdam
from statestream.state.stored import Stored

MIB = 2**20
MOMENTS = {"exp_avg_dtype": FP8, "exp_avg_sq_dtype": FP16}
MASTERS = {"master_weights": True, "master_weight_dtype": FP16}
NAMES = ("exp_avg", "exp_avg_sq", "master_param")


def build(shape=(6, 5, 8, 4), dtype=BF16, **arguments):
    param = torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype))
    optimizer = FusedAdam([param], **{"lr": 0.01, **MOMENTS, **MASTERS, **arguments})
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        param.grad = torch.empty_like(param).copy_(torch.randn(shape, generator=generator))
        optimizer.step()
    param.grad = None
    return param, optimizer


def values(optimizer, param):
    return {name: decoded(optimizer, param, name) for name in NAMES if name in optimizer.state[param]}


def within_rounding(found, wanted, dtypes, times=1.0):
    for name, value in wanted.items():
        scale = value.abs().sqrt().max() if name == "exp_avg_sq" else value.abs().max()
        # The scale of a block is at most twice its largest magnitude over the payload's largest.
        largest = {FP16: 65504.0, FP8: 448.0}[dtypes[name]]
        scale = torch.full_like(value, 2 * scale.item() / largest)
        allowed = times * storage_error(value, dtypes[name], scale=scale, root=name == "exp_avg_sq")
        assert torch.all((found[name].double() - value.double()).abs() <= allowed), name


DTYPES = {"exp_avg": FP8, "exp_avg_sq": FP16, "master_param": FP16}


# ---- following the parameter ----


@pytest.mark.parametrize("way", ["step", "state_dict", "get_unscaled_state"])
def test_another_memory_format_keeps_values_within_a_rounding(way):
    param, optimizer = build()
    before = values(optimizer, param)
    with torch.no_grad():
        param.data = param.data.to(memory_format=torch.channels_last)
    if way == "state_dict":
        found = optimizer.state_dict()["state"][0]
    elif way == "get_unscaled_state":
        found = {name: optimizer.get_unscaled_state(param, name) for name in NAMES}
    else:
        for group in optimizer.param_groups:
            group["lr"], group["betas"] = 0.0, (0.9999999, 0.9999999)
        param.grad = torch.zeros_like(param)
        optimizer.step()
        found = values(optimizer, param)
    within_rounding(found, before, DTYPES, times=1.0 if way != "step" else 3.0)
    for name in NAMES:
        state = optimizer.state[param][name]
        assert state.dtype is DTYPES[name] and state.stride() == param.stride()


def test_a_state_that_someone_replaced_by_plain_values_is_encoded():
    param, optimizer = build()
    wanted = {name: optimizer.get_unscaled_state(param, name) * 3 for name in NAMES}
    for name, value in wanted.items():
        optimizer.state[param][name] = value  # as trainers do that move or cast all that they find
    found = {name: optimizer.get_unscaled_state(param, name) for name in NAMES}
    within_rounding(found, wanted, DTYPES)
    assert {name: optimizer.state[param][name].dtype for name in NAMES} == DTYPES


def test_a_payload_that_was_copied_keeps_its_scales():
    param, optimizer = build()
    before = values(optimizer, param)
    for name in NAMES:
        optimizer.state[param][name] = optimizer.state[param][name].clone()
    after = {name: optimizer.get_unscaled_state(param, name) for name in NAMES}
    assert all(same_bits(before[name], after[name]) for name in NAMES)


def test_a_parameter_on_the_meta_device_gets_its_state_when_it_has_data():
    param = torch.nn.Parameter(torch.empty(300, 7, device="meta", dtype=BF16))
    optimizer = FusedAdam([param], **MOMENTS, **MASTERS)
    assert optimizer.state[param]["exp_avg"].device.type == "meta"
    real = torch.nn.Parameter(torch.randn(300, 7).to(BF16))
    torch.utils.swap_tensors(param, real)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.state[param]["step"].item() == 1
    assert torch.all(decoded(optimizer, param, "exp_avg") > 0)


def test_a_parameter_that_becomes_float32_loses_its_master_and_one_that_becomes_bfloat16_gets_one():
    param, optimizer = build()
    param.data = param.data.float()
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert "master_param" not in optimizer.state[param]
    assert set(optimizer.backend.scales[param]) == {"exp_avg", "exp_avg_sq"}
    param.grad = None
    param.data = param.data.bfloat16()
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert set(optimizer.backend.scales[param]) == set(NAMES)


def test_a_parameter_that_becomes_float16_gets_a_whole_master_for_its_remainders():
    param = torch.nn.Parameter(torch.randn(50).to(BF16))
    optimizer = FusedAdam([param], master_weights=True, store_param_remainders=True)
    param.grad = torch.ones_like(param)
    optimizer.step()
    param.grad = None
    param.data = param.data.half()
    param.grad = torch.zeros_like(param)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert optimizer.state[param]["master_param"].dtype is FP32
    assert torch.equal(optimizer.state[param]["master_param"], param.detach().float())


def test_scales_of_parameters_that_are_gone_are_dropped():
    param, optimizer = build()
    new = torch.nn.Parameter(param.detach().clone())
    optimizer.param_groups[0]["params"] = [new]
    optimizer.state_dict()
    assert list(optimizer.backend.scales) == [new]


# ---- loading ----


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, torch.float64], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_values_of_any_dtype_and_layout_are_loaded_to_nearest(dtype, transposed):
    param, optimizer = build((300, 7))
    other, new = build((300, 7), lr=0.5)
    saved = copy.deepcopy(optimizer.state_dict())
    for name in NAMES:
        value = saved["state"][0][name].to(dtype)
        saved["state"][0][name] = value.t().contiguous().t() if transposed else value
    new.load_state_dict(saved)
    for name in NAMES:
        whole = FusedAdam([torch.nn.Parameter(param.detach().clone())], **MOMENTS, **MASTERS)
        whole.set_scaled_state(whole.param_groups[0]["params"][0], name, saved["state"][0][name].float().contiguous())
        wanted = decoded(whole, whole.param_groups[0]["params"][0], name)
        assert same_bits(decoded(new, other, name), wanted), name


def test_a_refused_load_changes_neither_payloads_nor_scales():
    param, optimizer = build()
    before, scales = values(optimizer, param), copy.deepcopy(list(optimizer.backend.scales[param].values()))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"] *= 100
    saved["state"][0]["exp_avg_sq"] = torch.zeros(3)
    with pytest.raises(ValueError, match="exp_avg_sq of parameter 0"):
        optimizer.load_state_dict(saved)
    assert all(same_bits(before[name], value) for name, value in values(optimizer, param).items())
    assert all(torch.equal(a, b) for a, b in zip(scales, optimizer.backend.scales[param].values(), strict=True))


def test_a_payload_is_no_value_for_a_checkpoint():
    param, optimizer = build()
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg"] = optimizer.state[param]["exp_avg"]
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0: torch.uint8 in the state dict"):
        optimizer.load_state_dict(saved)


# ---- memory ----

FORMS = {
    "fp8": {"exp_avg_dtype": FP8, "exp_avg_sq_dtype": FP8},
    "fp16": {"exp_avg_dtype": FP16, "exp_avg_sq_dtype": FP16},
    "fp8 by random bits": {"exp_avg_dtype": FP8, "exp_avg_sq_dtype": FP8, "stochastic_rounding": True},
    "fp16 masters": {**MOMENTS, **MASTERS},
}
ELEMENTS = 8 * MIB


def large(form):
    param = torch.nn.Parameter(torch.zeros(ELEMENTS, dtype=BF16))
    optimizer = FusedAdam([param], **FORMS[form])
    param.grad = torch.ones_like(param)
    optimizer.step()
    gc.collect()
    return param, optimizer


@pytest.mark.parametrize("form", FORMS)
def test_a_step_takes_no_memory_beside_the_state(form):
    _, optimizer = large(form)
    extra = peak_extra_bytes(optimizer.step)
    assert extra < MIB  # an FP32 copy of one state would be 32 MiB


def test_control_one_copy_of_a_state_would_be_seen():
    param, optimizer = large("fp8")
    extra = peak_extra_bytes(lambda: (optimizer.get_unscaled_state(param, "exp_avg").sum(), optimizer.step()))
    assert extra > 4 * ELEMENTS - MIB


@pytest.mark.parametrize("form", FORMS)
def test_state_takes_its_payloads_and_a_scale_a_block(form):
    param, optimizer = large(form)
    kept = [v for name, v in optimizer.state[param].items() if name != "step"]
    kept += optimizer.backend.scales[param].values()
    payloads = {"fp8": 2, "fp16": 4, "fp8 by random bits": 2, "fp16 masters": 1 + 2 + 2}[form]
    scales = len(optimizer.backend.scales[param]) * 4 / 256
    assert sum(t.numel() * t.element_size() for t in kept) == ELEMENTS * (payloads + scales)


@pytest.mark.parametrize("form", FORMS)
def test_a_load_takes_no_more_than_its_staging(form):
    param, optimizer = large(form)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.export_staging_bytes = MIB
    for name, value in saved["state"][0].items():
        if name != "step":
            saved["state"][0][name] = value.double()
    extra = peak_extra_bytes(lambda: optimizer.load_state_dict(saved))
    assert extra < 3 * MIB
    assert param.numel() == ELEMENTS


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8])
def test_a_slice_is_read_and_written_with_the_scales_of_its_blocks(dtype):
    values = torch.arange(1000.0)
    whole = Stored(torch.zeros(1000, dtype=dtype), torch.ones(4))
    whole.encode(values)
    kept, part = whole.values().clone(), torch.empty(300)
    whole.decode(part, 512)
    assert torch.equal(part, kept[512:812])
    whole.encode(values[512:768] / 2, 512)
    assert torch.equal(whole.values()[512:768], kept[512:768] / 2)
    assert torch.equal(whole.values()[:512], kept[:512]) and torch.equal(whole.values()[768:], kept[768:])
