"""A state dict that does not fit is one error that names the place; nothing has changed, and no code of it has run."""

from __future__ import annotations

import copy
import pickle
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.bits import differences, snapshot
from helpers.modes import BF16, FP8, FP32, Mode
from helpers.training import build, make_params, train
from statestream import CPUOffloadOptimizer, FusedAdam
from statestream.convert import convert_state_dict

from .corruptions import CONVERT, CORRUPTIONS, FUSED, PLAIN, Lying, Ran

pytestmark = pytest.mark.filterwarnings("ignore")


def _torchs(cls: type, **options: Any) -> Any:
    def made(seed: int, lr: float) -> torch.optim.Optimizer:
        params = make_params(Mode(FP32), seed)
        return cls([{"params": params[:3]}, {"params": params[3:]}], lr=lr, **options)

    return made


def _fused(mode: Mode, **options: Any) -> Any:
    return lambda seed, lr: build(mode, seed, lr=lr, **options)


def _wrapped(make: Any, **options: Any) -> Any:
    return lambda seed, lr: CPUOffloadOptimizer(make(seed, lr), **options)


MASTERS = Mode(BF16, BF16, FP32, "fp32")
TARGETS = {
    "fp32": (FUSED, _fused(Mode(FP32))),
    "bf16 with masters": (FUSED, _fused(MASTERS)),
    "fp8 with remainders, to the host": (FUSED, _fused(Mode(BF16, FP8, FP8, "remainders", offload=True))),
    "capturable": (FUSED, _fused(Mode(FP32), capturable=True)),
    "offloaded, bf16 with masters": (FUSED, _wrapped(_fused(MASTERS), step_chunk_bytes=5_000)),
    "offloaded, half on the host": (FUSED, _wrapped(_fused(Mode(FP32, BF16, FP8)), cpu_fraction=0.5)),
    "offloaded AdamW": (PLAIN, _wrapped(_torchs(torch.optim.AdamW), step_chunk_bytes=60_000)),
    "offloaded Adam, amsgrad": (PLAIN, _wrapped(_torchs(torch.optim.Adam, amsgrad=True))),
}

LOADS = {
    target: [name for name, corruption in CORRUPTIONS.items() if kind in corruption.noticed_by]
    for target, (kind, _) in TARGETS.items()
}
ONE_BY_ONE = ("fp8 with remainders, to the host", "offloaded, bf16 with masters", "offloaded AdamW")
"""Of these each corruption is a test of its own; of the others all are one."""


class _Bench:
    """A trained optimizer, its twin that no load has touched, and a good state dict of another run."""

    def __init__(self, target: str):
        _, make = TARGETS[target]
        self.optimizer, self.undisturbed, other = make(0, 0.01), make(0, 0.01), make(5, 0.7)
        for optimizer, steps in ((self.optimizer, range(3)), (self.undisturbed, range(3)), (other, range(20, 25))):
            train(optimizer, steps)
        self.good = copy.deepcopy(other.state_dict())
        self.before, self.addresses = snapshot(self.optimizer), _addresses(self.optimizer)


@pytest.fixture(scope="module")
def benches():
    made: dict[str, _Bench] = {}

    def of(target: str) -> _Bench:
        if target not in made:
            made[target] = _Bench(target)
        return made[target]

    return of


def _addresses(optimizer: torch.optim.Optimizer) -> list[Any]:
    states = dict(optimizer.state.items())
    return [
        (index, name, value.data_ptr() if isinstance(value, torch.Tensor) else value)
        for index, param in enumerate(p for g in optimizer.param_groups for p in g["params"])
        for name, value in states[param].items()
    ]


def _spoilt(good: dict[str, Any], name: str) -> Any:
    state_dict = copy.deepcopy(good)
    changed = CORRUPTIONS[name].change(state_dict)
    return state_dict if changed is None else changed


@pytest.mark.parametrize(("target", "name"), [(t, name) for t in ONE_BY_ONE for name in LOADS[t]])
def test_a_load_names_the_place_and_changes_nothing(benches, target, name):
    bench = benches(target)
    state_dict = _spoilt(bench.good, name)
    with pytest.raises((ValueError, RuntimeError), match=re.compile(CORRUPTIONS[name].place, re.S)):
        bench.optimizer.load_state_dict(state_dict)
    assert differences(bench.before, snapshot(bench.optimizer)) == []
    assert bench.addresses == _addresses(bench.optimizer)


@pytest.mark.parametrize("target", TARGETS)
def test_after_all_of_them_the_next_steps_are_right_and_a_good_dict_loads(target):
    bench = _Bench(target)
    for name in LOADS[target]:
        with pytest.raises((ValueError, RuntimeError), match=re.compile(CORRUPTIONS[name].place, re.S)):
            bench.optimizer.load_state_dict(_spoilt(bench.good, name))
        assert target in ONE_BY_ONE or differences(bench.before, snapshot(bench.optimizer)) == [], name
    assert bench.addresses == _addresses(bench.optimizer)
    for optimizer in (bench.optimizer, bench.undisturbed):
        train(optimizer, range(3, 5))
    assert differences(snapshot(bench.optimizer), snapshot(bench.undisturbed)) == []
    for optimizer in (bench.optimizer, bench.undisturbed):
        optimizer.load_state_dict(copy.deepcopy(bench.good))
        train(optimizer, range(5, 6))
    assert differences(snapshot(bench.optimizer), snapshot(bench.undisturbed)) == []
    assert differences(snapshot(bench.optimizer), bench.before) != []


@pytest.mark.parametrize("name", [name for name, c in CORRUPTIONS.items() if CONVERT in c.noticed_by])
def test_a_conversion_names_the_place(benches, name):
    good = benches("fp32").good
    for to in ("torch", "transformer_engine", "statestream"):
        convert_state_dict(copy.deepcopy(good), to)
        with pytest.raises(ValueError, match=re.compile(CORRUPTIONS[name].place, re.S)):
            convert_state_dict(_spoilt(good, name), to)


# ---- what looks hostile and is not ----


@pytest.mark.parametrize("target", TARGETS)
def test_values_that_share_memory_are_copied(benches, target):
    """Each moment a part of one tensor, one of them of stride 0: state that is loaded shares nothing."""
    optimizer = TARGETS[target][1](0, 0.01)
    train(optimizer, range(1))
    state_dict = copy.deepcopy(optimizer.state_dict())
    shared = torch.linspace(0.5, 1.5, 400)
    for state in state_dict["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = shared[: state[name].numel()].view(state[name].shape)
    state_dict["state"][6]["exp_avg_sq"] = torch.tensor(2.25).expand(33, 2)
    optimizer.load_state_dict(state_dict)
    shared.zero_()
    spans = sorted(
        (value.data_ptr(), value.data_ptr() + value.nbytes)
        for state in dict(optimizer.state.items()).values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.numel()
    )
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    loaded = optimizer.state_dict()["state"]
    assert loaded[6]["exp_avg_sq"].eq(2.25).all()
    assert torch.allclose(loaded[6]["exp_avg"].reshape(-1), torch.linspace(0.5, 1.5, 400)[:66], rtol=0.07)


def test_a_tensor_of_another_class_is_read_as_the_plain_one_that_it_is(benches):
    bench = benches("fp32")
    optimizer, plain = (TARGETS["fp32"][1](0, 0.01) for _ in range(2))
    state_dict = copy.deepcopy(bench.good)
    state_dict["state"][6]["exp_avg"] = state_dict["state"][6]["exp_avg"].as_subclass(Lying)
    optimizer.load_state_dict(state_dict)
    plain.load_state_dict(bench.good)
    assert differences(snapshot(optimizer), snapshot(plain)) == []
    assert type(optimizer.state[optimizer.param_groups[1]["params"][3]]["exp_avg"]) is torch.Tensor


def test_control_such_a_class_does_run_code_where_it_is_used():
    with pytest.raises(Ran):
        torch.ones(3).as_subclass(Lying) + 1


# ---- files ----


class _Payload:
    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("where", ["a state", "a setting", "a step"])
def test_a_file_with_an_object_in_it_is_refused_and_runs_nothing(tmp_path, benches, where):
    bench, trace = benches("fp32"), tmp_path / "ran"
    state_dict = copy.deepcopy(bench.good)
    holder = state_dict["param_groups"][1] if where == "a setting" else state_dict["state"][6]
    holder[{"a state": "exp_avg", "a setting": "lr", "a step": "step"}[where]] = _Payload(str(trace))
    torch.save(state_dict, tmp_path / "file")
    with pytest.raises(pickle.UnpicklingError, match=r"(?i)weights"):
        bench.optimizer.load_state_dict(torch.load(tmp_path / "file", weights_only=True))
    assert not trace.exists()
    torch.load(tmp_path / "file", weights_only=False)["state"]
    assert trace.exists(), "the control: it does run where objects are let in"


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9, 0.999])
def test_a_file_that_is_cut_off_is_an_error_before_anything_changes(tmp_path, benches, kept):
    bench, file = benches("fp32"), tmp_path / "file"
    torch.save(bench.good, file)
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises((RuntimeError, EOFError, OSError)):
        bench.optimizer.load_state_dict(torch.load(file, weights_only=True))
    assert differences(bench.before, snapshot(bench.optimizer)) == []


def test_the_model_of_the_table_is_the_one_that_is_built():
    optimizer = FusedAdam([{"params": make_params(Mode(FP32))[:3]}, {"params": make_params(Mode(FP32))[3:]}])
    assert [len(g["params"]) for g in optimizer.param_groups] == [3, 4]
    assert optimizer.param_groups[1]["params"][3].shape == (33, 2)
