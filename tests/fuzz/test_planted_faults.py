"""Mistakes planted in the package, one at a time: the fuzz notices each within a few hundred programs."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from typing import Any

import pytest

from .play import play
from .program import Program

pytestmark = pytest.mark.filterwarnings("ignore")
MOST = 400

FAULTS = {
    "a load counts one step more": (
        "adam.fused_adam",
        "FusedAdam._load_param",
        "fill_(load.step)",
        "fill_(load.step + 1)",
    ),
    "a loaded master is not compared with the weight": (
        "adam.fused_adam",
        "FusedAdam._load_param",
        "self._backend.write_tracker.forget(load.param)",
        "pass",
    ),
    "gradient scale is forgotten": (
        "adam.state_backend",
        "ResidentState.step",
        "grad_scale=numbers.grad_scale",
        "grad_scale=1.0",
    ),
    "a skipped step is counted": (
        "adam.fused_adam",
        "FusedAdam.update",
        "        return\n",
        "        self.param_groups[0]['step'] += 1\n        return\n",
    ),
    "random bits are of the place in the group": (
        "adam.state_backend",
        "ResidentState.step",
        "optimizer.grad_name, first)",
        "optimizer.grad_name, 0)",
    ),
    "random bits are of the seed's low half": (
        "adam.state_backend",
        "ResidentState.step",
        "seed=self.rounding.seed",
        "seed=self.rounding.seed & 0xFFFFFFFF",
    ),
    "a written weight is not noticed": (
        "tensors.write_tracker",
        "_Seen.still_holds_of",
        "seen == tuple([of[other_place] for of in looks]) and",
        "seen[:2] == tuple([of[other_place] for of in looks])[:2] and",
    ),
    "a replaced address is not noticed": (
        "tensors.write_tracker",
        "_Seen.still_holds_of",
        "seen == tuple([of[other_place] for of in looks]) and None not in seen and not _is_gone(self.memories[place])",
        "seen[2:] == tuple([of[other_place] for of in looks])[2:]",
    ),
    "state keeps the layout that the parameter had": (
        "state.factory",
        "StateFactory._fits",
        "or not same_layout(local, target)",
        "",
    ),
    "values are dropped where the form changes": (
        "state.factory",
        "StateFactory.follow",
        "if old.tensor.shape == param.shape:",
        "if False:",
    ),
    "remainders are read as numbers": (
        "state.factory",
        "StateFactory.carry",
        "or (a.dtype is torch.int16) != (b.dtype is torch.int16)",
        "",
    ),
    "the host's state does not follow": (
        "offload.adam.streamed_state",
        "StreamedState.follow",
        "if fits and",
        "if fits or",
    ),
    "the last of an offloaded group is not counted": (
        "offload.adam.device_step",
        "AdamFlow.commit",
        "for unit in self.started:",
        "for unit in sorted(self.started)[:-1]:",
    ),
    "an offloaded master is not refreshed": (
        "offload.adam.strategy",
        "AdamStrategy._job",
        "refresh=job.formats.has_master and",
        "refresh=False and",
    ),
    "a group's settings are not loaded": ("adam.fused_adam", "FusedAdam._write", "update_group(group, loaded)", "pass"),
}


def planted(monkeypatch, module: str, path: str, old: str, new: str) -> None:
    """Puts a method with `new` in place of `old` where the real one is."""
    home = importlib.import_module(f"statestream.{module}")
    owner_name, name = path.split(".")
    owner = getattr(home, owner_name)
    source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    assert old in source, f"{path} has no {old!r}"
    made: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + source.replace(old, new, 1), vars(home), made)
    monkeypatch.setattr(owner, name, made[name])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_has_its_place_in_the_sources(fault, monkeypatch):
    planted(monkeypatch, *FAULTS[fault])


def fails(seed: int) -> bool:
    try:
        play(Program(seed))
    except Exception:
        return True
    return False


@pytest.mark.long  # two minutes
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault, monkeypatch):
    planted(monkeypatch, *FAULTS[fault])
    assert any(map(fails, range(MOST)))
