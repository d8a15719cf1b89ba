"""lightning's Trainer with its real code, on the CPU: configure_optimizers, checkpoints, resume, the scaler."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from statestream import CPUOffloadOptimizer
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
    """Two of its gradients are infinite before they are unscaled. Norms are read after the step."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.norms: list[float] = []

    def on_after_backward(self):
        if len(self.losses) in (2, 7):
            next(self.parameters()).grad[0, 0] = float("inf")

    def on_train_batch_end(self, *_):
        self.norms.append(nn.utils.get_total_norm([p.grad for p in self.parameters()]).item())


def scaled(precision: str) -> lightning.pytorch.plugins.MixedPrecision:
    """Lightning turns "16-mixed" into "bf16-mixed" on a CPU where it is given by name."""
    plugin = lightning.pytorch.plugins.MixedPrecision(precision, "cpu")
    plugin.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
    return plugin


@pytest.mark.parametrize("clip", [None, 0.1], ids=["not clipped", "clipped"])
@pytest.mark.parametrize("make", [fused, offloaded], ids=["FusedAdam", "CPUOffloadOptimizer"])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_the_scaler_unscales_clips_and_skips_as_with_torchs_adamw(tmp_path, make, precision, clip):
    found = []
    for maker in (make, adamw):
        plugin, module = scaled(precision), Overflowing(maker, torch.float32)
        trainer = fit(module, tmp_path / str(len(found)), plugins=[plugin], gradient_clip_val=clip)
        steps = {float(state["step"]) for state in bare(trainer).state.values()}
        found.append((plugin.scaler.get_scale(), steps, module.losses, module.norms))
    (scale, steps, losses, norms), theirs = found
    assert (scale, steps) == theirs[:2] and steps == {EPOCHS * 6 - 2.0}
    assert losses == pytest.approx(theirs[2], rel=0.02)
    assert norms == pytest.approx(theirs[3], rel=0.02, nan_ok=True)
    if clip is not None:
        assert max(norm for norm in norms if norm < float("inf")) <= clip * 1.001


@pytest.mark.parametrize("make", [fused, offloaded], ids=["FusedAdam", "CPUOffloadOptimizer"])
def test_without_a_scaler_mixed_precision_clips_as_with_torchs_adamw(tmp_path, make):
    found = []
    for maker in (make, adamw):
        module = Module(maker, torch.float32)
        fit(module, tmp_path / str(len(found)), precision="bf16-mixed", gradient_clip_val=0.1)
        found.append(module.losses)
    assert found[0] == pytest.approx(found[1], rel=0.02)


def test_clipping_is_refused_where_the_step_unscales_as_for_torchs_fused_adamw(tmp_path):
    """Float16 gradients, which torch's scaler does not unscale: Lightning would clip them while they are scaled. And
    with offloaded gradients it would find none."""

    def with_offloaded_gradients(params):
        return CPUOffloadOptimizer(fused(params), offload_gradients=True)

    for maker, dtype in ((fused, torch.float16), (with_offloaded_gradients, torch.float32)):
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
            fit(Module(maker, dtype), tmp_path, plugins=[scaled("bf16-mixed")])
