"""accelerate with its real code, on the CPU: prepare, schedulers, the scaler, saved and loaded state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from .optimizers import LR, MAKERS, Batches, assert_same_run, fused, model_of, offloaded

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

BATCH, EPOCHS = 8, 4


class Run:
    """A model, its optimizer, batches and schedule, prepared by one Accelerator."""

    def __init__(self, make, dtype: torch.dtype = torch.bfloat16, seed: int = 0):
        self.accelerator = accelerate.Accelerator(cpu=True)
        model = model_of(dtype, seed)
        optimizer = make(model.parameters())
        loader = torch.utils.data.DataLoader(Batches(dtype=dtype), batch_size=BATCH)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader))
        prepared = self.accelerator.prepare(model, optimizer, loader, schedule)
        self.model, self.optimizer, self.loader, self.schedule = prepared
        self.losses: list[float] = []
        self.rates: list[float] = []

    @property
    def bare(self) -> torch.optim.Optimizer:
        return self.optimizer.optimizer

    def epochs(self, count: int) -> Run:
        for _ in range(count):
            for inputs, targets in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = nn.functional.mse_loss(self.model(inputs).float(), targets.float())
                    self.accelerator.backward(loss)
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                self.losses.append(loss.item())
                self.rates.append(self.schedule.get_last_lr()[0])
        return self


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_loss_falls_and_a_resumed_run_equals_the_uninterrupted_one(tmp_path, make):
    whole = Run(make).epochs(EPOCHS)
    assert whole.losses[-1] < 0.6 * whole.losses[0]
    Run(make).epochs(EPOCHS // 2).accelerator.save_state(str(tmp_path))
    resumed = Run(make, seed=1)
    resumed.accelerator.load_state(str(tmp_path))
    resumed.epochs(EPOCHS - EPOCHS // 2)
    assert resumed.losses == whole.losses[len(whole.losses) // 2 :]
    assert resumed.rates == whole.rates[len(whole.rates) // 2 :]
    assert_same_run(whole.bare, resumed.bare)


def test_the_control_another_start_ends_elsewhere(tmp_path):
    make = MAKERS["FusedAdam"]
    with pytest.raises(AssertionError):
        assert_same_run(Run(make).epochs(1).bare, Run(make, seed=1).epochs(1).bare)


@pytest.mark.parametrize("make", [fused, offloaded], ids=["FusedAdam", "CPUOffloadOptimizer"])
def test_rates_and_losses_are_those_of_torchs_adamw(make):
    ours = Run(make, torch.float32).epochs(2)
    theirs = Run(lambda params: torch.optim.AdamW(params, lr=LR, weight_decay=0.01), torch.float32).epochs(2)
    assert ours.rates == theirs.rates
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-3)


def scaled_run(make, dtype: torch.dtype, infinite_at: tuple[int, ...]) -> dict[str, Any]:
    """Eight steps under accelerate's optimizer with a GradScaler, some with an infinite gradient."""
    accelerate.Accelerator(cpu=True)
    model = model_of(dtype)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    optimizer = accelerate.optimizer.AcceleratedOptimizer(
        make(model.parameters()), device_placement=False, scaler=scaler
    )
    found: dict[str, Any] = {"skipped": [], "scales": [], "losses": [], "norms": []}
    inputs, targets = Batches(dtype=dtype)[:8]
    for step in range(8):
        loss = nn.functional.mse_loss(model(inputs).float(), targets.float())
        scaler.scale(loss).backward()
        if step in infinite_at:
            next(model.parameters()).grad[0, 0] = float("inf")
        optimizer.step()
        found["skipped"].append(optimizer.step_was_skipped)
        found["norms"].append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        optimizer.zero_grad()
        found["scales"].append(scaler.get_scale())
        found["losses"].append(loss.item())
    found["steps"] = {float(state["step"]) for state in optimizer.optimizer.state.values()}
    return found


@pytest.mark.parametrize("make", [fused, offloaded], ids=["FusedAdam", "CPUOffloadOptimizer"])
@pytest.mark.parametrize("kernels", [False, True], ids=["AdamW", "fused AdamW"])
def test_the_scaler_skips_and_grows_as_with_torchs_adamw(make, kernels):
    infinite_at = (1, 5)

    def ours_told(params):
        optimizer = make(params)
        if kernels:
            optimizer._step_supports_amp_scaling = True
        return optimizer

    def adamw(params):
        return torch.optim.AdamW(params, lr=LR, weight_decay=0.01, fused=kernels)

    ours, theirs = (scaled_run(maker, torch.float32, infinite_at) for maker in (ours_told, adamw))
    assert ours["scales"] == theirs["scales"] and ours["scales"].count(2.0**10) > 1 < ours["scales"].count(2.0**9)
    assert ours["steps"] == theirs["steps"] == {6.0}
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-3)
    # accelerate does not see a skip that the optimizer makes by itself
    assert ours["skipped"] == theirs["skipped"] == [not kernels and step in infinite_at for step in range(8)]
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-3, nan_ok=True)


def test_state_is_saved_to_files_that_load_weights_only(tmp_path):
    run = Run(MAKERS["CPUOffloadOptimizer of FusedAdam"]).epochs(1)
    run.accelerator.save_state(str(tmp_path))
    file = next(Path(tmp_path).glob("optimizer*.bin"))
    saved = torch.load(file, weights_only=True)
    assert {value.dtype for value in saved["state"][0].values()} == {torch.float32}
