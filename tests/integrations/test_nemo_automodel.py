"""nemo-automodel's builder with its real code: a dotted name, arguments out of YAML with dtypes as strings."""

from __future__ import annotations

import pytest
import torch
from statestream import FusedAdam
from torch import nn

from .optimizers import LR, assert_same_run, model_of, train

optim = pytest.importorskip(
    "nemo_automodel.components.optim.optimizer", reason="nemo-automodel is not installed", exc_type=ImportError
)

OPTIONS = {
    "lr": LR,
    "betas": [0.9, 0.95],
    "weight_decay": 0.01,
    "master_weights": True,
    "exp_avg_dtype": "torch.bfloat16",
    "exp_avg_sq_dtype": "bfloat16",
    "master_weight_dtype": "torch.float32",
}
NAMES = {"FusedAdam": "statestream.FusedAdam", "CPUOffloadOptimizer": f"{__name__}.offloaded"}


def offloaded(params, **options):
    """What a recipe names to have the state in host memory."""
    from statestream import CPUOffloadOptimizer

    return CPUOffloadOptimizer(FusedAdam(params, **options), step_chunk_bytes=1 << 15)


def built(name: str, model: nn.Module) -> torch.optim.Optimizer:
    (optimizer,) = optim.build_optimizer(model, (NAMES[name], OPTIONS))
    return optimizer


@pytest.mark.parametrize("name", NAMES)
def test_strings_become_the_dtypes_that_they_name(name):
    model = model_of()
    optimizer = built(name, model)
    state = optimizer.state[next(model.parameters())]
    assert {key: value.dtype for key, value in state.items()} == {
        "step": torch.float32,
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
        "master_param": torch.float32,
    }
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_falls_and_a_resumed_run_equals_the_uninterrupted_one(name):
    model = model_of()
    whole = built(name, model)
    first = train(model, whole, range(12))
    saved, weights = whole.state_dict(), {key: value.clone() for key, value in model.state_dict().items()}
    again = model_of(seed=1)
    resumed = built(name, again)
    again.load_state_dict(weights)
    resumed.load_state_dict(saved)
    last = train(model, whole, range(12, 24))
    assert last[-1] < 0.6 * first[0]
    assert train(again, resumed, range(12, 24)) == last
    assert_same_run(whole, resumed)


def test_its_schedule_drives_the_learning_rate():
    model = model_of()
    optimizer = built("FusedAdam", model)
    schedule = optim.OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=LR,
        min_lr=LR / 10,
        lr_warmup_steps=2,
        lr_decay_steps=8,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=8,
        wd_incr_style="constant",
    )
    rates = []
    for step in range(8):
        train(model, optimizer, range(step, step + 1))
        schedule.step(1)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[1] == LR and rates[-1] == pytest.approx(LR / 10)
