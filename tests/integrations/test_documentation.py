"""docs/trainers.md: the lines under each trainer's heading train with the real package."""

from __future__ import annotations

import pytest
import torch
from docs.pages import sections, snippets, text_of
from statestream import CPUOffloadOptimizer, FusedAdam
from torch import nn

from .optimizers import Batches, model_of

SECTIONS = sections(text_of("docs/trainers.md"))


def run(name: str, number: int = 0, **names) -> dict:
    exec(compile(snippets(SECTIONS[name], "python")[number], f"docs/trainers.md, {name}", "exec"), names)
    return names


def loss_function(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs.float(), targets.float())


def loader() -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(Batches(), batch_size=8)


def test_every_snippet_is_run_here():
    found = {name: len(snippets(text, "python")) for name, text in SECTIONS.items()}
    trainers = {"transformers": 2, "accelerate": 1, "lightning": 1, "torchtitan": 1, "nemo-automodel": 1}
    assert {name: count for name, count in found.items() if count} == trainers


@pytest.mark.parametrize("number", [0, 1])
def test_transformers(tmp_path, number):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from .test_transformers import Counting, arguments, bare, language_model, losses

    args = arguments(tmp_path, save_strategy="no")
    trainer = run("transformers", number, model=language_model(), dataset=Counting(), args=args)["trainer"]
    assert losses(trainer)[-1] < losses(trainer)[0]
    assert type(bare(trainer)) is (FusedAdam, CPUOffloadOptimizer)[number]


def test_accelerate(tmp_path, monkeypatch):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    monkeypatch.chdir(tmp_path)
    names = run("accelerate", model=model_of(), loader=loader(), loss_function=loss_function)
    states = names["optimizer"].optimizer.state.values()
    assert {float(state["step"]) for state in states} == {6.0}
    assert list((tmp_path / "checkpoint").iterdir())


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    module = run("lightning", loss_function=loss_function)["Module"](model_of())
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, loader())
    assert {float(state["step"]) for state in trainer.optimizers[0].state.values()} == {6.0}


def test_torchtitan():
    titan = pytest.importorskip(
        "torchtitan.components.optimizer.optimizer", reason="torchtitan is not installed", exc_type=ImportError
    )
    optimizers = run("torchtitan")["Optimizers"]
    group = titan.ParamGroupConfig(pattern=".*", optimizer_name="FusedAdam", optimizer_kwargs={"lr": 1e-3})
    config = titan.OptimizersContainer.Config(
        param_groups=[group],
        implementation="for-loop",
        optimizer_factory_kwargs_by_name={"FusedAdam": {"master_weights": True}},
    )
    (optimizer,) = optimizers(config, model_parts=[model_of()])
    assert type(optimizer) is FusedAdam and optimizer.master_weights


def test_nemo_automodel():
    pytest.importorskip(
        "nemo_automodel.components.optim.optimizer", reason="nemo-automodel is not installed", exc_type=ImportError
    )
    optimizer = run("nemo-automodel", model=model_of())["optimizer"]
    assert optimizer.exp_avg_dtype is torch.bfloat16
