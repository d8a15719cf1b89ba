"""Optimizer state dicts in memory, nested or flat."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from statestream.checkpoint.state_dict import as_state_dict, check_settings, check_states_are_listed, checked_groups
from statestream.convert.agreement import Agreement
from statestream.convert.layout import Flat, group_label, groups_of, param_label
from statestream.convert.rules import ADAMS_TENSORS, Group, How, NewGroup, Param, Request, check_masters, convert
from statestream.convert.values import sources, values_of
from statestream.state.state_format import MASTER, STEP
from statestream.tensors.local import local_of
from statestream.tensors.sharding import as_dtensor_like
from statestream.tensors.validate import (
    FLOATS,
    count_of,
    readable,
)

__all__ = ["StateDictView", "convert_state_dict", "fp32_weights"]

Weights = Mapping[Hashable, Tensor] | Sequence[Tensor]
Make = Callable[[How, Tensor | None, Tensor | None], Tensor]
"""From local tensors, as `values_of`."""


@torch.no_grad()
def convert_state_dict(
    state_dict: Mapping[str, Any],
    to: str,
    *,
    source: str | None = None,
    masters: str | None = None,
    weights: Weights | None = None,
    adam_w_mode: bool | None = None,
    drop: Collection[str] = (),
) -> dict[str, Any]:
    """The state dict of one Adam as another's `load_state_dict` takes it.

    Args:
        state_dict: of ``optimizer.state_dict()`` or torch.distributed.checkpoint's ``get_optimizer_state_dict``, nested
            or flat. It is not changed; tensors that stay as they are, are passed on and not copied.
        to: "torch" (torch.optim.AdamW and Adam), "statestream" or "transformer_engine" (their FusedAdam).
        source: which of these it comes from; None: seen from its settings.
        masters: None: as they are. "float32": made from the weight, or of remainders with the weight, where there are
            none. "remainders": zeros where there are none.
        weights: the weights by the names or numbers that the state dict has for parameters, or in order. They are
            needed where masters are made, and tell which parameters need none.
        adam_w_mode: what the optimizer was or will be built with, where its dict does not say (Transformer Engine's
            never does); None: True.
        drop: what may be lost: "master_param", "max_exp_avg_sq", "step" (counts of one group that differ), and names
            of states that no Adam has.

    Raises:
        ValueError: something cannot be kept, or is not an Adam's; it names the parameter and the way out.

    Masters that are kept are compared with their weights, where these are given: a RuntimeWarning says how many differ.
    """
    if masters == "weights":
        raise ValueError("masters='weights': a state dict holds none; drop=['master_param'], and take fp32_weights()")
    request = Request(to, source, masters, adam_w_mode, drop)
    view = StateDictView(state_dict, weights)
    converted = view.converted(request)
    view.agreement.warn()
    return converted


@torch.no_grad()
def fp32_weights(state_dict: Mapping[str, Any], weights: Weights) -> Iterator[tuple[Hashable, Tensor]]:
    """The weights as FP32, each with its name or number: the master where there is one, the weight and its remainders
    joined, else the weight's own value. One is made at a time, when it is asked for.

    Arguments as in `convert_state_dict`. ValueError where the weight of a remainder is missing or not bfloat16. After
    the last, a RuntimeWarning says how many masters do not round to their weights, if any.
    """
    view = StateDictView(state_dict, weights)
    yield from view.fp32_weights()
    view.agreement.warn()


_NUMBERS = {"lr": 0.0, "betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 0.0}
"""The kinds of an Adam's settings."""


def _value_of_adam(value: Any, name: str, label: str) -> Tensor:
    value = readable(value, f"{name} of {label}")
    if value.dtype not in (FLOATS if name != MASTER else (*FLOATS, torch.int16)):
        wanted = "floating-point values" if name != MASTER else "floating-point values or int16 remainders"
        raise ValueError(f"{name} of {label}: {value.dtype} in the state dict, {wanted} wanted")
    return value


class StateDictView:
    """A state dict as the rules see it. `make` makes values anew; the weights are as in `convert_state_dict`."""

    def __init__(self, state_dict: Mapping[str, Any], weights: Weights | None, make: Make = values_of):
        self.make, self.agreement = make, Agreement()
        self.source = state_dict
        state_dict = as_state_dict(state_dict)
        self.flat = not state_dict.keys() & {"state", "param_groups"}
        names: list[Hashable] = []
        settings: list[tuple[str, dict[str, Any], list[Hashable]]] = []
        if self.flat:
            parts = Flat.of(state_dict)
            self.states = {
                name: {what: state_dict[key] for what, key in found.items()} for name, found in parts.states.items()
            }
            for name, found in parts.settings.items():
                values = {what: state_dict[key] for what, key in found.items()}
                settings.append((group_label(name), values, [name]))
        else:
            groups = checked_groups(state_dict)
            check_states_are_listed(state_dict["state"], [key for group in groups for key in group["params"]])
            self.states = dict(state_dict["state"])
            for number, (values, members) in enumerate(groups_of(state_dict)):
                check_settings(values, _NUMBERS, number)
                settings.append((group_label(number), values, members))
        for _, _, members in settings:
            names += members
        self.keys = names
        self.weights = weights if isinstance(weights, Mapping) else dict(zip(names, weights or (), strict=False))
        self.groups = [
            Group(label, values, [self._param(name) for name in members]) for label, values, members in settings
        ]

    def _param(self, name: Hashable) -> Param:
        state, label = self.states.get(name) or {}, param_label(name)
        if not isinstance(state, Mapping):
            raise ValueError(f"the state of {label}: expected a dict, found {type(state).__name__}")
        step = state.get(STEP)
        # DCP's flat load gives {} for a key that the checkpoint lacks.
        present = {k: v for k, v in state.items() if v is not None and not (isinstance(v, dict) and not v)}
        values = {k: _value_of_adam(v, k, label) for k, v in present.items() if k in ADAMS_TENSORS}
        first = next(iter(values), None)
        for key, value in values.items():
            if value.shape != values[first].shape:
                raise ValueError(
                    f"{key} of {label}: shape {tuple(value.shape)}, but {first} has {tuple(values[first].shape)}"
                )
        weight = self.weights.get(name)
        return Param(
            label,
            {k: v.dtype for k, v in values.items()},
            None if step is None else count_of(step, f"step of {label}"),
            None if weight is None else weight.dtype,
            frozenset(str(k) for k in present if k not in ADAMS_TENSORS and k != STEP),
        )

    def converted(self, request: Request) -> dict[str, Any]:
        """The state dict of another Adam, as `convert_state_dict` gives it."""
        return self._rebuilt(convert(self.groups, request, flat=self.flat))

    @torch.no_grad()
    def fp32_weights(self) -> Iterator[tuple[Hashable, Tensor]]:
        check_masters(self.groups)
        for key, param in zip(self.keys, (p for g in self.groups for p in g.params), strict=True):
            weight, master = self.weights.get(key), self.states.get(key, {}).get(MASTER)
            if weight is None:
                raise ValueError(f"weights: {param.label} is not among them")
            if weight.dtype is torch.float32:
                yield key, weight
            elif master is None:
                yield key, self._made(param.label, How.WEIGHT, None, weight)
            elif master.dtype is not torch.int16:
                self._compare(param.label, master, weight)
                yield key, master
            elif weight.dtype is torch.bfloat16:
                yield key, self._made(param.label, How.JOINED, master, weight)
            else:
                raise ValueError(
                    f"master_param of {param.label}: remainders are of bfloat16 weights, not {weight.dtype}"
                )

    def _rebuilt(self, groups: list[NewGroup]) -> dict[str, Any]:
        states: dict[Hashable, dict[str, Any]] = {}
        for name, param in zip(self.keys, (param for group in groups for param in group.params), strict=True):
            if param.states:
                states[name] = {key: self._value(name, key, how) for key, how in param.states.items()}
                if param.step is not None:
                    states[name][STEP] = torch.tensor(param.step, dtype=torch.float32, device="cpu")
        if self.flat:
            flat = {f"state.{name}.{what}": value for name, state in states.items() for what, value in state.items()}
            for name, group in zip(self.keys, groups, strict=True):
                flat |= {f"param_groups.{name}.{what}": value for what, value in group.settings.items()}
            return flat
        others = {key: value for key, value in self.source["state"].items() if key not in set(self.keys)}
        old_groups = self.source["param_groups"]
        return {
            "state": states | others,
            "param_groups": [
                {**new.settings, "params": list(old["params"])} for new, old in zip(groups, old_groups, strict=True)
            ],
        }

    def _value(self, name: Hashable, key: str, how: How) -> Tensor:
        kept, needs_weight = sources(how, key)
        state = None if kept is None else self.states[name][kept]
        if how is How.KEPT and key == MASTER:
            self._compare(param_label(name), state, self.weights.get(name))
        return self._made(param_label(name), how, state, self.weights[name] if needs_weight else None)

    def _compare(self, label: str, master: Tensor, weight: Tensor | None) -> None:
        if weight is not None:
            self.agreement.compare(label, local_of(master.detach()), local_of(weight.detach()))

    def _made(self, label: str, how: How, state: Tensor | None, weight: Tensor | None) -> Tensor:
        if how is How.KEPT:
            return state
        if state is not None and weight is not None and state.shape != weight.shape:
            raise ValueError(
                f"master_param of {label} has shape {tuple(state.shape)} and its weight {tuple(weight.shape)}: they "
                "are not of one parameter"
            )
        made = self.make(how, *(None if t is None else local_of(t.detach()) for t in (state, weight)))
        return as_dtensor_like(made, weight if state is None else state)
