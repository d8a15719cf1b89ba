"""Muon's state in host memory, streamed in whole batches.

What Muon orthogonalises together (variants.py) is stepped in one chunk; so every rank enters the same
collectives in the same order, and a matrix is never split. Chunks are cut from global shapes and the largest shard,
over all trained parameters: neither an uneven or empty shard nor a missing gradient moves a cut.

Within a chunk the optimizer's own step runs with its groups in number and order, other parameters filtered out, and
state tensors that lie in the ring. Groups are set back between chunks, so that each counts one step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from statestream.offload.host.store import largest_shard
from statestream.offload.muon.agreement import check_partition, check_same_plan, describe, joined
from statestream.offload.muon.variants import TorchMuon
from statestream.offload.per_parameter.infer_state import StateKind
from statestream.offload.per_parameter.member import Member
from statestream.offload.per_parameter.strategy import PerParameterStrategy
from statestream.offload.per_parameter.subset import Subset
from statestream.tensors.local import is_fake, local_of

__all__ = ["MuonStrategy"]


class MuonStrategy(PerParameterStrategy):
    """Keeps the state of a Muon in arenas and steps it through `device`, whole batches in chunks of at most `budget`
    bytes (None: all in one pass); a batch that alone is larger is a chunk by itself.

    Every trained parameter has state from construction on, zero until its first step. Where several ranks take
    part, building it, `add_param_group`, and the first step or load after more parameters were unfrozen are
    collective.

    Raises:
        RuntimeError: the ranks' plans differ, with both; or the plan's units do not partition the parameters.
    """

    def __init__(self, inner: torch.optim.Optimizer, device: Any, budget: int | None, layout: TorchMuon):
        self.layout, self.smallest = layout, layout.smallest
        self._agreed: Any = None
        super().__init__(inner, device, budget)

    def adopt(self, existing: dict[Tensor, dict[str, Any]] | None = None) -> None:
        super().adopt(existing)
        self.take_back(self.members.values())  # what the optimizer made for a group that was added

    def reserve(self, params: Sequence[Tensor], anew: Collection[int] = ()) -> None:
        super().reserve(params, anew)
        self._agree()
        self._complete()

    def loaded(self) -> None:
        self._complete()
        self.layout.sync_options()
        counter = self.layout.counter
        for group in self.inner.param_groups:
            for param in group["params"]:
                member, state = self.members.get(id(param)), self.inner.state.get(param, {})
                if member is not None and counter in member.kinds and counter not in state:
                    step = torch.tensor(float(group["step"]), dtype=torch.float32, device="cpu")
                    state[counter] = self.fill(param, counter, step)

    # ---- what is different from elementwise optimizers ----

    def _kinds(
        self, group: dict[str, Any], number: int, param: Tensor, state: Mapping[str, Any]
    ) -> tuple[list[StateKind], list[StateKind]]:
        count = []
        if self.layout.counter in self.inner.state.get(param, {}):
            count = [StateKind(self.layout.counter, (), torch.float32)]
        local, largest = (
            [StateKind(name, shape, param.dtype) for name in self.layout.states(group)] + count
            for shape in (tuple(local_of(param).shape), largest_shard(param))
        )
        return local, largest

    def _together(self, members: list[Member]) -> list[list[Member]]:
        of = {id(m.param): m for m in members}
        together: list[list[Member]] = []
        for group in self.inner.param_groups:
            params = [p for p in group["params"] if id(p) in of]
            runs = joined(self.layout.batches(group, params), len(params))
            together += [[of[id(params[i])] for i in run] for run in runs]
        return together

    def _complete(self) -> None:
        """Zero state, as the optimizer would make it, for members that have none."""
        self.make_room([param for m in self.members.values() if not self.inner.state.get(param := m.param)])
        for member in self.members.values():
            param = member.param
            if not self.inner.state.get(param):
                zero = torch.zeros((), dtype=torch.float32, device="cpu")
                self.inner.state[param] = {name: self.fill(param, name, zero) for name in member.kinds}

    def _agree(self) -> None:
        """The checks of a plan, when it is new."""
        layout = self.store.layout
        if layout is self._agreed:
            return
        params = [param for bank in self.store.banks for param in bank.units]
        check_partition(layout.plan, list(map(id, params)), {key: m.name for key, m in self.members.items()})
        if any(is_fake(local_of(param)) for param in params if param is not None):
            return  # memory is estimated, and there are no other ranks; or they are asked once there are data
        groups = self.layout.process_groups()
        if groups:
            description = describe(layout.plan, params)
            for group in groups:
                check_same_plan(group, description)
        self._agreed = layout

    def _step(self, jobs: dict[int, Member]) -> None:
        self.layout.sync_options()
        self._agree()  # whoever went on after it failed would find the ranks waiting for each other
        params = [m.param for m in jobs.values()]
        with _Once(self.inner, self.call) as subset:
            if self.store.layout.plan.ring_bytes:
                self._stream(jobs, subset)
            else:
                subset.update(params)
            subset.check(params)


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
