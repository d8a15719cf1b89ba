"""One step, and three thousand, against Adam in float64, with torch's own optimizer as the yardstick."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from statestream.kernels import AdamOptions

from native.adam_judge import adam_step, ulps
from native.kernel_runner import ADAMW, ALL_F32, CHUNK, State, random_values, update, updated

ELEMENTS = 1_000_000
STEP_NUMBERS = [*range(1, 21), *(n * n for n in range(5, 25)), *range(25_000, 1_000_001, 25_000)]
"""Each gives scalars that round differently; errors are pooled so that no one rounding decides."""

L2 = replace(ADAMW, decoupled=False, weight_decay=0.1)
UNCORRECTED = 10**9
"""A step number at which 1 - beta^t is 1 even in double: torch's Adam without bias correction."""


@dataclass(frozen=True)
class Case:
    name: str
    options: AdamOptions
    grad_scale: float = 1.0


TRAINING = [
    Case("adamw", ADAMW),
    Case("adam with l2", L2),
    Case("adamw maximizing", replace(ADAMW, maximize=True)),
    Case("adam with l2 maximizing", replace(L2, maximize=True)),
    Case("adamw without bias correction", replace(ADAMW, bias_correction=False)),
    Case("adam with l2 without bias correction", replace(L2, bias_correction=False)),
    Case("grad_scale 65536", ADAMW, 65536.0),
    Case("grad_scale 3", ADAMW, 3.0),
    Case("betas 0.9 0.95", replace(ADAMW, beta2=0.95)),
    Case("betas 0.8 0.9", replace(ADAMW, beta1=0.8, beta2=0.9)),
    Case("betas near 1", replace(ADAMW, beta1=0.999, beta2=0.9999999)),
    Case("eps 0", replace(ADAMW, eps=0.0)),
    Case("lr 0.1 and weight_decay 0.5", replace(ADAMW, lr=0.1, weight_decay=0.5)),
]
SHORT_MEMORY = [
    Case("betas 0.5 0.5", replace(ADAMW, beta1=0.5, beta2=0.5)),
    Case("betas 0.3 0.3", replace(ADAMW, beta1=0.3, beta2=0.3)),
    Case("betas 0 0.99", replace(ADAMW, beta1=0.0, beta2=0.99)),
    Case("betas 0.9 0", replace(ADAMW, beta2=0.0)),
    Case("betas 0 0", replace(ADAMW, beta1=0.0, beta2=0.0)),
]


def torch_optimizer(state: State, options: AdamOptions, t: int) -> tuple[torch.optim.Optimizer, torch.Tensor]:
    """torch's single-tensor Adam(W) in the same state, about to take step t."""
    param = torch.nn.Parameter(state.param.clone())
    make = torch.optim.AdamW if options.decoupled else torch.optim.Adam
    optimizer = make(
        [param],
        lr=float(np.float32(options.lr)),
        betas=(float(options.beta1), float(options.beta2)),
        eps=options.eps,
        weight_decay=options.weight_decay,
        maximize=options.maximize,
        foreach=False,
        fused=False,
    )
    optimizer.state[param] = {
        "step": torch.tensor(float((t if options.bias_correction else UNCORRECTED) - 1)),
        "exp_avg": state.exp_avg.clone(),
        "exp_avg_sq": state.exp_avg_sq.clone(),
    }
    return optimizer, param


def torch_step(state: State, case: Case, t: int) -> State:
    optimizer, param = torch_optimizer(state, case.options, t)
    # As GradScaler unscales: times the reciprocal, rounded to FP32.
    param.grad = state.grad * torch.tensor(1 / case.grad_scale, dtype=torch.float32)
    optimizer.step()
    kept = optimizer.state[param]
    return State(param.detach(), state.grad, kept["exp_avg"], kept["exp_avg_sq"], None, kept["step"])


class Errors:
    """Errors in ulps of each of the four results, gathered over step numbers."""

    def __init__(self):
        self.by_result: dict[str, list[np.ndarray]] = {}

    def add(self, got: State, judged, weight_name: str) -> None:
        for name, result, want, magnitude in (
            (weight_name, got.param, judged.weight, judged.weight_magnitude),
            ("exp_avg", got.exp_avg, judged.exp_avg, judged.exp_avg_magnitude),
            ("exp_avg_sq", got.exp_avg_sq, judged.exp_avg_sq, judged.exp_avg_sq_magnitude),
        ):
            self.by_result.setdefault(name, []).append(ulps(result.numpy(), want, magnitude))

    def largest(self) -> dict[str, float]:
        return {name: max(float(e.max()) for e in parts) for name, parts in self.by_result.items()}

    def rms(self) -> dict[str, float]:
        return {name: float(np.sqrt(np.mean(np.concatenate(parts) ** 2))) for name, parts in self.by_result.items()}


def one_step_errors(case: Case) -> tuple[Errors, Errors]:
    """Ours and torch's. Half of the weights are zero: their result is the update itself, bare."""
    ours, theirs = Errors(), Errors()
    for t in STEP_NUMBERS:
        values = random_values(ELEMENTS // len(STEP_NUMBERS), seed=t)
        half = len(values.weight) // 2
        values.weight[:half] = 0.0
        before = State.of(values, ALL_F32, step=t - 1)
        pair = (updated(before, ALL_F32, case.options, grad_scale=case.grad_scale), torch_step(before, case, t))
        for part, weight_name in ((slice(0, half), "update"), (slice(half, None), "weight")):
            old = before[part]
            judged = adam_step(old.param, old.grad, old.exp_avg, old.exp_avg_sq, case.options, t, case.grad_scale)
            for errors, after in zip((ours, theirs), pair, strict=True):
                errors.add(after[part], judged, weight_name)
    return ours, theirs


@pytest.mark.parametrize("case", TRAINING, ids=lambda c: c.name)
def test_one_step_is_at_least_as_exact_as_torch(case):
    ours, theirs = one_step_errors(case)
    for name, largest in ours.largest().items():
        assert largest <= theirs.largest()[name] + 1, f"largest error of {name}, ulps"
        rms, torch_rms = ours.rms()[name], theirs.rms()[name]
        assert rms <= 1.02 * torch_rms, f"RMS error of {name}, ulps"
        # Were the unit too large, both would look exact and nothing be judged.
        assert 0.2 < torch_rms < 1.5, f"RMS error of torch's {name}, ulps"


@pytest.mark.parametrize("case", SHORT_MEMORY, ids=lambda c: c.name)
def test_one_step_with_small_betas_is_within_an_ulp_of_torch(case):
    ours, theirs = one_step_errors(case)
    for name, largest in ours.largest().items():
        assert largest <= theirs.largest()[name] + 1, f"largest error of {name}, ulps"


def test_the_judge_of_one_step_sees_a_wrong_beta_and_decay_that_comes_last():
    options = replace(ADAMW, lr=0.1, weight_decay=0.5)
    before = State.of(random_values(1000, seed=0), ALL_F32, step=6)
    numbers = (before.param, before.grad, before.exp_avg, before.exp_avg_sq)
    after, right = updated(before, ALL_F32, options), adam_step(*numbers, options, 7)
    assert ulps(after.exp_avg_sq.numpy(), right.exp_avg_sq, right.exp_avg_sq_magnitude).max() < 4
    assert ulps(after.param.numpy(), right.weight, right.weight_magnitude).max() < 6

    wrong_beta = adam_step(*numbers, replace(options, beta2=0.9991), 7)
    assert ulps(after.exp_avg_sq.numpy(), wrong_beta.exp_avg_sq, right.exp_avg_sq_magnitude).max() > 100
    old = before.param.double().numpy()
    moved = 0.95 * old - right.weight
    assert ulps(after.param.numpy(), 0.95 * (old - moved), right.weight_magnitude).max() > 1e4


@pytest.mark.parametrize("beta2, times", [(0.999, 5), (0.95, 2)])
def test_after_3000_steps_exp_avg_sq_is_times_as_exact_as_torchs(beta2, times):
    n, steps = 2000, 3000
    options = replace(ADAMW, beta2=beta2)
    rng = np.random.default_rng(3)
    spread = 10.0 ** rng.uniform(-4, 0, n)
    values = random_values(n, seed=3)
    values.exp_avg.zero_()
    values.exp_avg_sq.zero_()
    state = State.of(values, ALL_F32)
    optimizer, param = torch_optimizer(state, options, t=1)
    weight, m, v = state.param.numpy(), np.zeros(n), np.zeros(n)
    for t in range(1, steps + 1):
        grad = (rng.standard_normal(n) * spread).astype(np.float32)
        state.grad.copy_(torch.from_numpy(grad))
        update(state, ALL_F32, options)
        param.grad = torch.from_numpy(grad)
        optimizer.step()
        judged = adam_step(weight, grad, m, v, options, t)
        weight, m, v = judged.weight, judged.exp_avg, judged.exp_avg_sq

    def relative_rms(exp_avg_sq: torch.Tensor) -> float:
        return float(np.sqrt(np.mean((exp_avg_sq.numpy() / v - 1) ** 2)))

    ours, theirs = relative_rms(state.exp_avg_sq), relative_rms(optimizer.state[param]["exp_avg_sq"])
    print(f"RMS relative error of exp_avg_sq after {steps} steps: {ours:.2e}, torch {theirs:.2e}")
    assert ours <= theirs / times
    assert state.step.item() == steps


@pytest.mark.parametrize("threads", [1, 3])
def test_a_large_tensor_is_as_exact_as_a_small_one(threads):
    values = random_values(3 * CHUNK + 77, seed=5)
    state = State.of(values, ALL_F32, step=9)
    after = updated(state, ALL_F32, threads=threads)
    judged = adam_step(state.param, state.grad, state.exp_avg, state.exp_avg_sq, ADAMW, 10)
    assert ulps(after.param.numpy(), judged.weight, judged.weight_magnitude).max() < 6
