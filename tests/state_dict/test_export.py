"""What state_dict() hands out: values, dtypes, layout, whose memory it is and how much of it."""

import copy
import io

import pytest
import torch
from distributed.test_sharding import world
from helpers.bits import differences, same_bits
from helpers.memory import peak_extra_bytes
from helpers.modes import FORMS, MODES, Mode
from helpers.stored import decoded
from helpers.training import build, train
from statestream import FusedAdam, kernels
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

FP32, BF16 = torch.float32, torch.bfloat16
MIB = 1 << 20


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def tensors_of(state_dict):
    found = {f"{i} {k}": v for i, state in state_dict["state"].items() for k, v in state.items()}
    for number, group in enumerate(state_dict["param_groups"]):
        found.update({f"group {number} {k}": v for k, v in group.items()})
    return found


def test_an_export_on_the_device_is_sharded_as_its_parameter():
    with world(1, (4,)) as mesh:
        param = torch.nn.Parameter(distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)], src_data_rank=None))
        optimizer = FusedAdam([param], exp_avg_dtype="bf16", exp_avg_sq_dtype="fp8")
        for name in ("exp_avg", "exp_avg_sq"):
            value = optimizer.state_dict()["state"][0][name]
            assert isinstance(value, DTensor) and value.placements == param.placements and value.shape == param.shape
            assert value.dtype is FP32 and value.to_local().shape == (2, 4)


@pytest.mark.parametrize("offload", [False, True], ids=["live", "snapshot"])
def test_what_an_export_takes_is_what_is_not_live(offload):
    param = torch.nn.Parameter(torch.randn(100))
    optimizer = FusedAdam([param], exp_avg_dtype="bf16", state_dict_cpu_offload=offload)
    optimizer.state_dict()
    step = 4
    assert optimizer._exported == (0, 800 + step if offload else 400)


@pytest.mark.parametrize(
    "held", [torch.arange(12.0).view(3, 4)[:, :2], torch.eye(3).to_sparse()], ids=["gaps", "sparse"]
)
def test_a_snapshot_of_a_users_tensor_is_apart_from_it_whatever_its_layout(held):
    param = torch.nn.Parameter(torch.randn(100))
    optimizer = FusedAdam([param], state_dict_cpu_offload=True)
    optimizer.state[param]["mine"] = held.clone() if held.layout is torch.sparse_coo else held
    exported = optimizer.state_dict()["state"][0]["mine"]
    wanted = exported.to_dense().clone()
    optimizer.state[param]["mine"].mul_(2)
    assert torch.equal(exported.to_dense(), wanted)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_export_holds_the_stored_values_as_fp32_in_the_parameters_layout(mode):
    optimizer = build(mode)
    train(optimizer, range(2))
    exported = optimizer.state_dict()["state"]
    for index, param in enumerate(params_of(optimizer)):
        assert set(exported[index]) == {"step", *mode.stored(param)}
        for name, stored in mode.stored(param).items():
            value, live = exported[index][name], optimizer.state[param][name]
            assert live.dtype is stored
            assert value.dtype is (torch.int16 if stored is torch.int16 else FP32)
            assert value.shape == param.shape and value.device.type == "cpu" and not value.requires_grad
            assert value.stride() == param.stride() or param.numel() <= 1, name
            assert same_bits(value, decoded(optimizer, param, name))
        step = exported[index]["step"]
        assert step.dtype is FP32 and step.shape == () and step.item() == 2


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_host_export_is_a_snapshot(form, capturable):
    if capturable and form.master == "remainders":
        capturable = False
    optimizer = build(form, state_dict_cpu_offload=True, capturable=capturable)
    optimizer.param_groups[0]["schedule"] = [1, 2]
    optimizer.state["run"] = {"losses": [1.0]}
    train(optimizer, range(2))
    exported = optimizer.state_dict()
    kept = copy.deepcopy(exported)
    train(optimizer, range(2, 4))
    optimizer.param_groups[0]["schedule"].append(3)
    optimizer.state["run"]["losses"].append(2.0)
    assert differences(tensors_of(exported), tensors_of(kept)) == []
    live = {v.untyped_storage().data_ptr() for p in params_of(optimizer) for v in optimizer.state[p].values()}
    live |= {p.untyped_storage().data_ptr() for p in params_of(optimizer)} - {0}
    for name, value in tensors_of(exported).items():
        if isinstance(value, torch.Tensor) and value.numel():
            assert value.untyped_storage().data_ptr() not in live, name


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_default_export_is_fp32_by_reference(form):
    optimizer = build(form)
    train(optimizer, range(2))
    exported = optimizer.state_dict()["state"]
    for index, param in enumerate(params_of(optimizer)):
        for name, value in exported[index].items():
            live = optimizer.state[param][name]
            assert (value is live) == (live.dtype in (FP32, torch.int16)), name


def bytes_saved(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    return file.tell()


@pytest.mark.parametrize("offload", [False, True])
def test_a_saved_file_holds_each_element_once(offload):
    params = [torch.nn.Parameter(torch.randn(n, dtype=BF16)) for n in (100_001, 65_537, 3)]
    mode = Mode(BF16, BF16, FP32, "fp32", offload)
    optimizer = FusedAdam(params, **mode.arguments)
    train(optimizer, range(1))
    needed = sum(param.numel() for param in params) * 12
    assert needed <= bytes_saved(optimizer.state_dict()) <= needed + 8192


# ---- memory ----

ELEMENTS = 2 * MIB  # of each of four parameters


def large_run(mode):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.zeros(ELEMENTS, dtype=mode.param)) for _ in range(4)]
    optimizer = FusedAdam(params, **mode.arguments)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


LARGE = [
    Mode(BF16, BF16, BF16, None, offload=True),
    Mode(BF16, BF16, FP32, "remainders", offload=True),
    Mode(BF16, FP32, BF16, "fp32", offload=True),
    Mode(FP32, BF16, BF16, None, offload=False),
]


def exported_bytes(state_dict):
    return sum(v.numel() * v.element_size() for s in state_dict["state"].values() for v in s.values())


@pytest.mark.parametrize("mode", LARGE, ids=str)
def test_an_export_needs_no_memory_beyond_its_result(mode):
    optimizer = large_run(mode)
    exported = exported_bytes(optimizer.state_dict())
    assert exported * 0.9 <= peak_extra_bytes(optimizer.state_dict) <= exported + 4 * MIB


def test_control_one_planted_temporary_breaks_the_bound(monkeypatch):
    optimizer = large_run(LARGE[0])
    exported = exported_bytes(optimizer.state_dict())
    decode = kernels.decode

    def with_temporary(state, out, **how):
        whole = state.float()  # as long as the last result is not there yet, this one comes on top
        decode(state, out, **how)
        return whole

    monkeypatch.setattr(kernels, "decode", with_temporary)
    assert peak_extra_bytes(optimizer.state_dict) > exported + 4 * MIB


@pytest.mark.parametrize("mode, source", [*((m, FP32) for m in LARGE), (LARGE[0], torch.float64), (LARGE[2], BF16)])
def test_a_load_needs_no_more_than_its_staging(mode, source):
    staging = MIB
    optimizer = large_run(mode)
    optimizer.export_staging_bytes = staging
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].to(source)
    optimizer.load_state_dict(saved)
    assert peak_extra_bytes(lambda: optimizer.load_state_dict(saved)) <= 2 * staging + 2 * MIB
