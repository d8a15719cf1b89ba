"""transformers' Trainer with its real code, on the CPU: both ways to hand it an optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from statestream import FusedAdam

from .optimizers import LR, MAKERS, SMALL, assert_same_run, fused, offloaded

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

STEPS, HALF = 16, 6  # within an epoch of 8


class Counting(torch.utils.data.Dataset):
    """Sequences that count up modulo 32: what comes next is soon learnt."""

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(12) + index) % 32
        return {"input_ids": ids, "labels": ids}


def language_model(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=32, max_position_embeddings=16, attention_dropout=0.1)
    return transformers.LlamaForCausalLM(config).to(dtype)


def arguments(folder: Path, **changes) -> transformers.TrainingArguments:
    settings = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 16,
        "learning_rate": LR,
        "warmup_steps": 3,
        "lr_scheduler_type": "cosine",
        "save_steps": HALF,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
    }
    return transformers.TrainingArguments(**settings | changes)


def given_class(folder: Path, make, **changes) -> transformers.Trainer:
    """`optimizer_cls_and_kwargs`: of a class Trainer makes the groups, with and without weight decay; of anything else
    it takes what its call returns for a factory, and hands that the model."""
    cls, kwargs = make
    return transformers.Trainer(
        language_model(), arguments(folder, **changes), train_dataset=Counting(), optimizer_cls_and_kwargs=(cls, kwargs)
    )


def given_optimizer(folder: Path, make, **changes) -> transformers.Trainer:
    """`optimizers=`."""
    model = language_model()
    return transformers.Trainer(
        model,
        arguments(folder, **changes),
        train_dataset=Counting(),
        eval_dataset=torch.utils.data.Subset(Counting(), range(16)),
        optimizers=(make(model.parameters()), None),
    )


CLASSES = {
    "FusedAdam": (FusedAdam, {"lr": LR, **SMALL}),
    "FusedAdam, exports to the host": (FusedAdam, {"lr": LR, **SMALL, "state_dict_cpu_offload": True}),
    "factory of CPUOffloadOptimizer": (
        lambda: lambda model, **options: offloaded(model.parameters(), **options),
        SMALL,
    ),
}
WAYS = [
    *(pytest.param(given_class, make, id=f"class, {name}") for name, make in CLASSES.items()),
    *(pytest.param(given_optimizer, make, id=f"optimizer, {name}") for name, make in MAKERS.items()),
]


def losses(trainer: transformers.Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def rates(trainer: transformers.Trainer) -> list[float]:
    return [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]


def bare(trainer: transformers.Trainer) -> torch.optim.Optimizer:
    """Without accelerate's wrapper."""
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


@pytest.mark.parametrize(("give", "make"), WAYS)
def test_the_loss_falls_and_a_resumed_run_equals_the_uninterrupted_one(tmp_path, give, make):
    whole = give(tmp_path / "whole", make)
    whole.train()
    assert losses(whole)[-1] < 0.6 * losses(whole)[0]
    assert len(bare(whole).param_groups) == (2 if isinstance(make, tuple) and make[0] is FusedAdam else 1)

    resumed = give(tmp_path / "resumed", make)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{HALF}"))
    assert losses(resumed)[-(STEPS - HALF) :] == losses(whole)[HALF:]
    assert_same_run(bare(whole), bare(resumed))


def test_the_control_a_checkpoint_without_its_optimizer_differs(tmp_path):
    make = MAKERS["FusedAdam"]
    whole = given_optimizer(tmp_path / "whole", make)
    whole.train()
    checkpoint = tmp_path / "whole" / f"checkpoint-{HALF}"
    (checkpoint / "optimizer.pt").unlink()
    resumed = given_optimizer(tmp_path / "resumed", make)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    with pytest.raises(AssertionError):
        assert_same_run(bare(whole), bare(resumed))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "reduce_lr_on_plateau"])
def test_schedules_are_those_of_torchs_adamw(tmp_path, schedule):
    changes = {"lr_scheduler_type": schedule, "save_strategy": "no"}
    if schedule == "reduce_lr_on_plateau":
        changes |= {"eval_strategy": "steps", "eval_steps": 2, "lr_scheduler_kwargs": {"patience": 0, "mode": "max"}}
    found = []
    for make in (MAKERS["FusedAdam"], MAKERS["CPUOffloadOptimizer of FusedAdam"], torch.optim.AdamW):
        trainer = given_optimizer(tmp_path, make, **changes)
        for group in trainer.optimizer.param_groups:
            group["lr"] = group["initial_lr"] = LR
        trainer.train()
        found.append(rates(trainer))
    assert len(set(found[0])) > 3
    assert found[0] == found[1] == found[2]


def test_gradients_are_accumulated_and_clipped_as_for_any_optimizer(tmp_path):
    """FP32 weights and moments, where the numbers are torch's up to rounding."""
    changes = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "save_strategy": "no"}
    found = []
    for make in (fused, lambda params: torch.optim.AdamW(params, lr=LR, weight_decay=0.01)):
        model = language_model(torch.float32)
        model.config.attention_dropout = 0.0
        trainer = transformers.Trainer(
            model, arguments(tmp_path, **changes), train_dataset=Counting(), optimizers=(make(model.parameters()), None)
        )
        trainer.train()
        found.append(losses(trainer))
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def in_float16(trainer: transformers.Trainer) -> transformers.Trainer:
    """What `fp16=True` does, for which accelerate wants a GPU."""
    accelerator = trainer.accelerator
    accelerator.native_amp = True
    accelerator.state._mixed_precision = "fp16"
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    return trainer


@pytest.mark.parametrize("make", [fused, offloaded], ids=["FusedAdam", "CPUOffloadOptimizer"])
def test_under_a_scaler_norms_clipping_and_skipped_steps_are_those_of_torchs_adamw(tmp_path, make):
    found = []
    for maker in (make, lambda params: torch.optim.AdamW(params, lr=LR, weight_decay=0.01)):
        model = language_model(torch.float32)
        model.config.attention_dropout = 0.0
        calls = []

        def overflow(grad: torch.Tensor, calls=calls) -> torch.Tensor:
            calls.append(grad)
            return grad * float("inf") if len(calls) in (3, 9) else grad

        model.lm_head.weight.register_hook(overflow)
        changes = {"max_grad_norm": 0.1, "save_strategy": "no"}
        trainer = in_float16(
            transformers.Trainer(
                model,
                arguments(tmp_path, **changes),
                train_dataset=Counting(),
                optimizers=(maker(model.parameters()), None),
            )
        )
        trainer.train()
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        steps = {float(state["step"]) for state in bare(trainer).state.values()}
        found.append((trainer.accelerator.scaler.get_scale(), steps, rates(trainer), losses(trainer), norms))
    ours, theirs = found
    assert ours[:3] == theirs[:3] and ours[1] == {STEPS - 2.0}
    assert ours[3] == pytest.approx(theirs[3], rel=0.01)
    assert ours[4] == pytest.approx(theirs[4], rel=0.05, nan_ok=True)
