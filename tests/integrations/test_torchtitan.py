"""torchtitan's OptimizersContainer with its real code: its own groups, names and flat checkpoint."""

from __future__ import annotations

import pytest
import torch
from statestream import CPUOffloadOptimizer, FusedAdam
from torch import nn

from .optimizers import LR, SMALL, assert_same_run, model_of, train

titan = pytest.importorskip(
    "torchtitan.components.optimizer", reason="torchtitan is not installed", exc_type=ImportError
)
if not hasattr(titan.OptimizersContainer, "_resolve_optimizer_factory"):
    pytest.skip("this torchtitan has no OptimizersContainer._resolve_optimizer_factory", allow_module_level=True)

FACTORIES = {
    "FusedAdam": lambda groups, **options: FusedAdam(groups, **options),
    "CPUOffloadOptimizer": lambda groups, **options: CPUOffloadOptimizer(
        FusedAdam(groups, **options), step_chunk_bytes=1 << 15
    ),
}


class Container(titan.OptimizersContainer):
    @staticmethod
    def _resolve_optimizer_factory(name: str):
        return FACTORIES.get(name) or titan.OptimizersContainer._resolve_optimizer_factory(name)


def container(name: str, model: nn.Module, **options) -> Container:
    from torchtitan.components.optimizer.optimizer import ParamGroupConfig

    groups = [
        ParamGroupConfig(pattern="bias", optimizer_name=name, optimizer_kwargs={"lr": LR, "weight_decay": 0.0}),
        ParamGroupConfig(pattern=".*", optimizer_name=name, optimizer_kwargs={"lr": LR, "weight_decay": 0.01}),
    ]
    config = titan.OptimizersContainer.Config(
        param_groups=groups, implementation="for-loop", optimizer_factory_kwargs_by_name={name: options}
    )
    return Container(config, model_parts=[model])


@pytest.mark.parametrize("name", FACTORIES)
def test_the_loss_falls_and_a_resumed_run_equals_the_uninterrupted_one(name):
    model = model_of()
    whole = container(name, model, **SMALL)
    first = train(model, whole, range(12))
    saved = {key: value.clone() if torch.is_tensor(value) else value for key, value in whole.state_dict().items()}
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    last = train(model, whole, range(12, 24))
    assert last[-1] < 0.6 * first[0]

    again = model_of(seed=1)
    resumed = container(name, again, **SMALL)
    again.load_state_dict(weights)
    resumed.load_state_dict(saved)
    assert train(again, resumed, range(12, 24)) == last
    for ours, theirs in zip(whole, resumed, strict=True):
        assert_same_run(ours, theirs)


@pytest.mark.parametrize("name", FACTORIES)
def test_its_flat_state_has_the_keys_of_torchs_adamw_and_masters_and_a_fresh_one_counts_nothing(name):
    model = model_of()
    saved = container(name, model, **SMALL).state_dict()
    states = {key for key in saved if key.startswith("state.")}
    kinds = ("step", "exp_avg", "exp_avg_sq", "master_param")
    assert states == {f"state.{param}.{kind}" for param, _ in model.named_parameters() for kind in kinds}
    assert {float(saved[key]) for key in states if key.endswith(".step")} == {0.0}
    assert all(saved[f"param_groups.{param}.lr"] == LR for param, _ in model.named_parameters())
