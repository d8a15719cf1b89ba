"""Step counters beyond 2^24, from where on a float32 no longer counts."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from helpers.bits import differences, same_bits, snapshot
from helpers.modes import BF16, FP8, FP16, FP32, Mode
from helpers.training import build, train
from statestream import CPUOffloadOptimizer, FusedAdam

LAST = 2**24
"""The last count that adding one makes: LAST + 1 is no float32."""

MASTERS = Mode(None, FP32, BF16, "fp32")
OPTIMIZERS = {
    "masters": lambda **more: build(MASTERS, **more),
    "blocks with scales": lambda **more: build(Mode(BF16, FP8, FP16, "fp16"), **more),
    "offloaded": lambda **more: CPUOffloadOptimizer(build(MASTERS, **more), 6_000),
}


def counted_to(optimizer: Any, steps: int) -> Any:
    """The optimizer after two steps, which it believes to be so many."""
    train(optimizer, range(2))
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group["step"] = steps
    for state in saved["state"].values():
        state["step"] = torch.tensor(float(steps))
    optimizer.load_state_dict(saved)
    return optimizer


def counts(optimizer: Any) -> tuple[set[float], set[float]]:
    """Of the parameters, and of the groups."""
    of_params = {optimizer.state[p]["step"].item() for group in optimizer.param_groups for p in group["params"]}
    return of_params, {float(group["step"]) for group in optimizer.param_groups}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_parameters_count_stays_at_its_last_and_the_groups_goes_on(kind):
    optimizer = counted_to(OPTIMIZERS[kind](), LAST - 2)
    seen = []
    for step in range(5):
        train(optimizer, [step])
        seen.append(counts(optimizer))
    assert [params for params, _ in seen] == [{LAST - 1}, {LAST}, {LAST}, {LAST}, {LAST}]
    assert [groups for _, groups in seen] == [{LAST - 1}, {LAST}, {LAST + 1}, {LAST + 2}, {LAST + 3}]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_updates_there_are_those_without_bias_correction(kind):
    """Both corrections are 1 to the last bit since long: what stands still is not needed."""
    corrected, plain = (counted_to(OPTIMIZERS[kind](bias_correction=b), LAST - 2) for b in (True, False))
    weights = [p for group in plain.param_groups for p in group["params"]]
    with torch.no_grad():
        for mine, other in zip(weights, [p for g in corrected.param_groups for p in g["params"]], strict=True):
            mine.copy_(other)
    plain.load_state_dict({**corrected.state_dict(), "param_groups": plain.state_dict()["param_groups"]})
    for step in range(5):
        train(corrected, [step])
        train(plain, [step])
    ignored = ("bias_correction",)
    assert not differences(snapshot(corrected), snapshot(plain), ignoring=ignored)


def test_control_early_in_training_bias_correction_shows():
    corrected, plain = (counted_to(build(MASTERS, bias_correction=b), 2) for b in (True, False))
    assert differences(snapshot(corrected), snapshot(plain), ignoring=("bias_correction",))


def test_a_checkpoint_holds_both_counts_and_the_next_run_goes_on_from_them():
    optimizer, resumed = counted_to(build(MASTERS), LAST - 1), build(MASTERS)
    train(optimizer, range(4))
    file = io.BytesIO()
    torch.save((optimizer.state_dict(), [p.detach() for g in optimizer.param_groups for p in g["params"]]), file)
    file.seek(0)
    saved, weights = torch.load(file, weights_only=True)
    assert {group["step"] for group in saved["param_groups"]} == {LAST + 3}
    assert {state["step"].item() for state in saved["state"].values()} == {LAST}
    with torch.no_grad():
        for param, value in zip([p for g in resumed.param_groups for p in g["params"]], weights, strict=True):
            param.copy_(value)
    resumed.load_state_dict(saved)
    for one in (optimizer, resumed):
        train(one, range(4, 6))
    assert not differences(snapshot(resumed), snapshot(optimizer))
    assert counts(resumed) == ({LAST}, {LAST + 5})


def test_torchs_adamw_stops_counting_there_too():
    """So a checkpoint means the same to both."""
    param = torch.nn.Parameter(torch.ones(3))
    ours, torchs = FusedAdam([param]), torch.optim.AdamW([param])
    for optimizer in (ours, torchs):
        param.grad = torch.ones(3)
        optimizer.step()
        optimizer.state[param]["step"].fill_(LAST - 1)
        for _ in range(3):
            optimizer.step()
    assert ours.state[param]["step"].item() == torchs.state[param]["step"].item() == LAST


def test_with_capturable_the_groups_count_is_a_float32_and_stays_as_well():
    optimizer = counted_to(build(MASTERS, capturable=True), LAST - 1)
    train(optimizer, range(3))
    assert counts(optimizer) == ({LAST}, {LAST})


def test_random_bits_repeat_once_the_count_stays():
    """They hang on the count. Before, each step draws anew; from there on every step draws the same."""

    def drawn(steps: int) -> torch.Tensor:
        param = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        param.grad = torch.ones_like(param)
        optimizer = FusedAdam([param], lr=1e-3, stochastic_rounding=("param",))
        for name, value in {"step": steps, "exp_avg": 1, "exp_avg_sq": 1}.items():
            optimizer.state[param][name].fill_(value)
        optimizer.step()
        return param.detach().clone()

    assert not same_bits(drawn(LAST - 3), drawn(LAST - 2))
    assert not same_bits(drawn(LAST - 2), drawn(LAST - 1))
    assert same_bits(drawn(LAST - 1), drawn(LAST))
