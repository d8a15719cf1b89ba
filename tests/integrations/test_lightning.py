"""lightning's Trainer with its real code, on the CPU: configure_optimizers, checkpoints, resume, the scaler."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from .optimizers import LR, MAKERS, Batches, assert_same_run, fused, model_of, offloaded

lightning = pytest.importorskip("lightning", reason="lightning is not installed")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

EPOCHS, BATCH = 4, 8


class Module(lightning.LightningModule):
    def __init__(self, make, dtype: torch.dtype = torch.bfloat16, seed: int = 0):
        super().__init__()
        self.model, self.make = model_of(dtype, seed), make
        self.losses: list[float] = []
        self.rates: list[float] = []

    def training_step(self, batch, _):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.model(inputs).float(), targets.float())
        self.losses.append(loss.item())
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return loss

    def configure_optimizers(self):
        optimizer = self.make(self.parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * 6)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(module: Module, folder: Path, resume: Path | None = None, **options) -> lightning.Trainer:
    dtype = next(module.parameters()).dtype
    checkpoints = lightning.pytorch.callbacks.ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{epoch}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=EPOCHS,
            default_root_dir=folder,
            callbacks=[checkpoints],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **{"gradient_clip_val": 1.0} | options,
        )
        loader = torch.utils.data.DataLoader(Batches(dtype=dtype), batch_size=BATCH)
        trainer.fit(module, loader, ckpt_path=None if resume is None else str(resume))
    return trainer


def bare(trainer: lightning.Trainer) -> torch.optim.Optimizer:
    return trainer.optimizers[0]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_loss_falls_and_a_resumed_run_equals_the_uninterrupted_one(tmp_path, make):
    module = Module(make)
    whole = fit(module, tmp_path / "whole")
    assert module.losses[-1] < 0.6 * module.losses[0]
    again = Module(make, seed=1)
    resumed = fit(again, tmp_path / "resumed", tmp_path / "whole" / "epoch=1.ckpt")
    assert again.losses == module.losses[len(module.losses) // 2 :]
    assert again.rates == module.rates[len(module.rates) // 2 :]
    assert_same_run(bare(whole), bare(resumed))


def test_the_control_another_start_ends_elsewhere(tmp_path):
    make = MAKERS["FusedAdam"]
    runs = [fit(Module(make, seed=seed), tmp_path / str(seed)) for seed in (0, 1)]
    with pytest.raises(AssertionError):
        assert_same_run(*map(bare, runs))


def adamw(params):
    return torch.optim.AdamW(params, lr=LR, weight_decay=0.01)


@pytest.mark.parametrize("make", [fused, offloaded], ids=["FusedAdam", "CPUOffloadOptimizer"])
def test_rates_and_losses_are_those_of_torchs_adamw(tmp_path, make):
    ours, theirs = Module(make, torch.float32), Module(adamw, torch.float32)
    for module, folder in ((ours, tmp_path / "ours"), (theirs, tmp_path / "theirs")):
        fit(module, folder, accumulate_grad_batches=2)
    assert ours.rates == theirs.rates and len(set(ours.rates)) > 10
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-3)


class Overflowing(Module):
    """Two of its gradients are infinite before they are unscaled."""

    def on_after_backward(self):
        if len(self.losses) in (2, 7):
            next(self.parameters()).grad[0, 0] = float("inf")


@pytest.mark.parametrize("make", [fused, offloaded], ids=["FusedAdam", "CPUOffloadOptimizer"])
def test_the_scaler_skips_as_with_torchs_adamw(tmp_path, make):
    from lightning.pytorch.plugins.precision import MixedPrecision

    found = []
    for maker in (make, adamw):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
        module = Overflowing(maker, torch.float32)
        precision = MixedPrecision("bf16-mixed", "cpu")
        precision.scaler = scaler
        trainer = fit(module, tmp_path / str(len(found)), plugins=[precision], gradient_clip_val=None)
        steps = {float(state["step"]) for state in bare(trainer).state.values()}
        found.append((scaler.get_scale(), steps, module.losses))
    assert found[0][:2] == found[1][:2]
    assert found[0][1] == {EPOCHS * 6 - 2.0}
    assert found[0][2] == pytest.approx(found[1][2], rel=0.02)


def test_clipping_under_a_scaler_is_refused_as_for_fused_optimizers_and_there_is_a_way(tmp_path):
    """Lightning would clip gradients that are still scaled. An optimizer that leaves the unscaling to the scaler has
    them unscaled first."""
    from lightning.pytorch.plugins.precision import MixedPrecision

    def run(maker, folder: str) -> list[float]:
        precision = MixedPrecision("bf16-mixed", "cpu")
        precision.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        module = Module(maker, torch.float32)
        fit(module, tmp_path / folder, plugins=[precision], gradient_clip_val=0.1)
        return module.losses

    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        run(fused, "refused")

    def unscaled_by_the_scaler(params):
        optimizer = fused(params)
        optimizer._step_supports_amp_scaling = False
        return optimizer

    assert run(unscaled_by_the_scaler, "ours") == pytest.approx(run(adamw, "theirs"), rel=0.02)
