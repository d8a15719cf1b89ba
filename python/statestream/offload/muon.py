"""Muon's state in host memory, streamed in whole batches.

What Muon orthogonalises together (muon_layouts.py) is stepped in one chunk; so every rank enters the same
collectives in the same order, and a matrix is never split. Chunks are cut from global shapes and the largest shard,
over all trained parameters: neither an uneven or empty shard nor a missing gradient moves a cut.

Within a chunk the optimizer's own step runs with its groups in number and order, other parameters filtered out, and
state tensors that lie in the ring. Groups are set back between chunks, so that each counts one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from statestream.offload.learn import StateKind
from statestream.offload.muon_agreement import check_partition, check_same_plan, describe, joined
from statestream.offload.muon_layouts import TorchMuon
from statestream.offload.store import largest_shard
from statestream.offload.subset import Subset
from statestream.offload.whole_parameters import WholeParameters, _Member
from statestream.sharding import around
from statestream.tensors import local_of

__all__ = ["MuonBatches"]


class MuonBatches(WholeParameters):
    """Keeps the state of a Muon in arenas and steps it through `device`, whole batches in chunks of at most `budget`
    bytes (None: all in one pass); a batch that alone is larger is a chunk by itself.

    Every trained parameter has state from construction on, zero until its first step. Where several ranks take
    part, building it, `add_param_group` and the first step after more parameters were unfrozen are collective.

    Raises:
        RuntimeError: the ranks' plans differ, with both; or the plan's units do not partition the parameters.
    """

    def __init__(self, inner: torch.optim.Optimizer, device: Any, budget: int | None, layout: TorchMuon):
        self.layout, self.smallest = layout, layout.smallest
        self._agreed: Any = None
        super().__init__(inner, device, budget)

    def adopt(self, existing: dict[Tensor, dict[str, Any]] | None = None) -> None:
        super().adopt(existing)
        self._complete(m.param for m in self.members.values())
        self._agree()

    def step(self, grad_scale: float) -> None:
        self.layout.before_step()
        with_grad = list({id(p): p for p in self.params() if p.grad is not None}.values())
        self.follow(with_grad)
        if any(self.store.home(p) is None for p in with_grad):
            self.wait()
            self.reserve(with_grad)
        self._agree()
        made = self._complete(with_grad)
        jobs = {self.store.home(p).unit: self.members[id(p)] for p in with_grad}
        with _Once(self.inner, self.call) as subset:
            try:
                if self.store.layout.plan.ring_bytes:
                    self._stream(jobs, subset)
                else:
                    subset.update(with_grad)
                subset.check(with_grad)
            except BaseException:
                for param in made:
                    if id(param) not in subset.stepped:
                        self.inner.state.pop(param, None)
                raise

    def loaded(self) -> None:
        self._complete(m.param for m in self.members.values())
        self.layout.before_step()
        counter = self.layout.counter
        for group in self.inner.param_groups:
            if counter is None or group["algorithm"] != "adamw":
                continue
            for param in group["params"]:
                state, member = self.inner.state.get(param), self.members.get(id(param))
                if state and member is not None:
                    count = torch.as_tensor(state.get(counter, float(group["step"])), dtype=torch.float32)
                    known = counter in member.kinds
                    state[counter] = self.fill(param, counter, count) if known else count.to("cpu")

    # ---- what is different from elementwise optimizers ----

    def _kinds(self, group: dict[str, Any], number: int, param: Tensor) -> tuple[list[StateKind], list[StateKind]]:
        local = local_of(param)
        names = self.layout.states(group)
        found = [
            [StateKind(name, shape, param.dtype) for name in names]
            for shape in (tuple(local.shape), largest_shard(param))
        ]
        for name, value in self.inner.state.get(param, {}).items():
            # A count that the optimizer keeps on the device travels along.
            if isinstance(value, Tensor) and name not in names and local_of(value).device.type != "cpu":
                for kinds in found:
                    kinds.append(StateKind(name, tuple(local_of(value).shape), value.dtype))
        return found[0], found[1]

    def _together(self, members: list[_Member]) -> list[list[_Member]]:
        of = {id(m.param): m for m in members}
        runs: list[list[_Member]] = []
        for group in self.inner.param_groups:
            params = [p for p in group["params"] if id(p) in of]
            runs += [
                [of[id(params[i])] for i in run] for run in joined(self.layout.batches(group, params), len(params))
            ]
        return runs

    def _complete(self, params: Any) -> list[Tensor]:
        """Zero state, as the optimizer would make it, for those of `params` that have none; which they are."""
        made = []
        for param in params:
            if not self.inner.state.get(param):
                member = self.members[id(param)]
                state = {}
                for name in member.kinds:
                    view = self._host_view(member, name).zero_()
                    state[name] = around(view, param) if view.shape == local_of(param).shape else view
                self.inner.state[param] = state
                made.append(param)
        return made

    def _agree(self) -> None:
        """The checks of a plan, when it is new."""
        layout = self.store.layout
        if layout is self._agreed:
            return
        params = [param for bank in self.store.banks for param in bank.units]
        names = [self.members[id(p)].name for p in params]
        check_partition(layout.plan, names, [m.name for m in self.members.values()])
        groups = self.layout.process_groups()
        if groups:
            description = describe(layout.plan, params)
            for group in groups:
                check_same_plan(group, description)
        self._agreed = layout


class _Once(Subset):
    """A Subset that refuses to step a parameter twice in one step, or to leave one out."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.stepped: set[int] = set()

    def update(self, params: Sequence[Tensor]) -> None:
        twice = [p for p in params if id(p) in self.stepped]
        if twice:
            raise RuntimeError(f"{len(twice)} parameters were about to be updated twice in one step")
        super().update(params)
        self.stepped.update(map(id, params))

    def check(self, params: Sequence[Tensor]) -> None:
        if not self.ran:
            self.update([])  # counts the step
        if len(self.stepped) != len(params):
            raise RuntimeError(f"{len(self.stepped)} parameters of {len(params)} with a gradient were updated")
