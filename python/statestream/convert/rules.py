"""What each state and setting of one Adam becomes in the checkpoint of another: names, dtypes and counts, no values.

| | torch | statestream | transformer_engine |
|---|---|---|---|
| count of updates | one a parameter | one a parameter; calls in the group | one a group |
| master | none | of parameters that are not FP32 | of every parameter |
| settings alone | amsgrad | format_version | |
| cannot say | bias_correction=False | amsgrad | amsgrad, maximize, adam_w_mode |
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch

from statestream.arguments import HOW_TORCH_RUNS
from statestream.state.format_version import Masters, check_held, masters_in, number_of
from statestream.state.state_format import MASTER, MOMENTS, STEP
from statestream.tensors.validate import count_of

__all__ = [
    "ADAMS_TENSORS",
    "ENGINE",
    "STATESTREAM",
    "TORCH",
    "Group",
    "How",
    "NewGroup",
    "NewParam",
    "Param",
    "Request",
    "check_masters",
    "convert",
]

TORCH, STATESTREAM, ENGINE = FORMS = ("torch", "statestream", "transformer_engine")
MAX_EXP_AVG_SQ = "max_exp_avg_sq"
ADAMS_TENSORS = (*MOMENTS, MASTER, MAX_EXP_AVG_SQ)

DROPPABLE = {
    MAX_EXP_AVG_SQ: "AMSGrad's maximum",
    MASTER: "the masters",
    STEP: "counts that differ",
}
MASTERS = ("float32", "remainders", "weights")

_ADAM = ("lr", "betas", "eps", "weight_decay")
_TORCH_ONLY = {"amsgrad", "maximize", "decoupled_weight_decay", *HOW_TORCH_RUNS}
_ENGINE_ONLY = {"bias_correction", STEP}


class How(Enum):
    """Where the values of a new state come from."""

    KEPT = auto()
    """The state of that name."""
    WEIGHT = auto()
    """The weight, as FP32."""
    JOINED = auto()
    """The weight and its remainders, as FP32."""
    MASTER = auto()
    """The FP32 master."""
    ZEROS = auto()
    """Zeros, as int16: the remainders of a master that is its weight."""


@dataclass
class Param:
    """One parameter in the source: `label` for errors, dtypes of an Adam's state tensors (`step` aside), and of its
    weight where that is at hand; and names of states that no Adam has."""

    label: str
    dtypes: dict[str, torch.dtype]
    step: float | None = None
    weight: torch.dtype | None = None
    others: frozenset[str] = frozenset()


@dataclass
class Group:
    """`settings` without `params`. A flat checkpoint does not say who is in a group: each parameter is one there."""

    label: str
    settings: dict[str, Any]
    params: list[Param]


@dataclass(frozen=True)
class Request:
    """What is wanted; checked when made. See `convert_checkpoint` for the meaning of each."""

    to: str
    source: str | None = None
    masters: str | None = None
    adam_w_mode: bool | None = None
    drop: Collection[str] = ()

    def __post_init__(self):
        for name, value, allowed in (
            ("to", self.to, FORMS),
            ("source", self.source, (None, *FORMS)),
            ("masters", self.masters, (None, *MASTERS)),
        ):
            if value not in allowed:
                raise ValueError(f"{name}: {value!r} is not known; use {_either(allowed)}")
        wrong = [self.drop]
        if isinstance(self.drop, Collection) and not isinstance(self.drop, str):
            wrong = [name for name in self.drop if not isinstance(name, str) or name in MOMENTS]
        if wrong:
            raise ValueError(
                f"drop: {wrong[0]!r} is not one that may be lost; give a collection of {_either(DROPPABLE)}"
            )
        if self.masters is not None and (self.masters == "weights") != (self.to == TORCH):
            raise ValueError(
                f"masters={self.masters!r} with to={self.to!r}: torch.optim.AdamW keeps no masters, they may become "
                "its weights (masters='weights'); the others keep them as 'float32' or 'remainders'"
            )


@dataclass
class NewParam:
    states: dict[str, How]
    step: float | None = None
    weight: How | None = None
    """Where the values of the weight come from; None: it stays as it is."""


@dataclass
class NewGroup:
    settings: dict[str, Any]
    params: list[NewParam] = field(default_factory=list)


def convert(groups: list[Group], request: Request, flat: bool = False) -> list[NewGroup]:
    """What each group and parameter becomes. Raises ValueError for what cannot be kept, naming it and the way out."""
    source = request.source or _form_of(groups)
    others = frozenset().union(*(param.others for group in groups for param in group.params))
    if unknown := sorted(set(request.drop) - DROPPABLE.keys() - others):
        raise ValueError(f"drop: {unknown[0]!r} is no state here; choose from {_either((*DROPPABLE, *sorted(others)))}")
    for group in groups:
        _check(group, source, request)
    check_masters(groups)
    if source == ENGINE:
        _count_by_group(groups)
    any_master = request.masters == "float32" or any(MASTER in p.dtypes for g in groups for p in g.params)
    counts = _group_counts(groups, request, flat)
    new = [
        NewGroup(
            _settings(group, source, request, count),
            [_new_param(param, request, any_master) for param in group.params],
        )
        for group, count in zip(groups, counts, strict=True)
    ]
    if request.to == STATESTREAM:
        pairs = zip((p for g in groups for p in g.params), (p for g in new for p in g.params), strict=True)
        number = number_of(_masters_of(pairs))
        for group in new:
            group.settings["format_version"] = number
    return new


def check_masters(groups: list[Group]) -> None:
    """ValueError for masters that are not what their groups' `format_version` says."""
    for group in groups:
        held = masters_in(group.settings.get("format_version"), group.label)
        for param in group.params:
            if MASTER in param.dtypes and not (held is Masters.BOTH and param.weight is None):
                check_held(held, param.dtypes[MASTER], param.weight, f"master_param of {param.label}")


def _masters_of(params: Iterable[tuple[Param, NewParam]]) -> Masters:
    """What masters they are to have."""
    made = [(param.dtypes.get(MASTER), new.states.get(MASTER)) for param, new in params]
    bits = {how is How.ZEROS or (how is How.KEPT and old is torch.int16) for old, how in made if how is not None}
    if not bits:
        return Masters.NONE
    return Masters.FP32 if True not in bits else Masters.REMAINDERS if False not in bits else Masters.BOTH


def _flag(group: Group, key: str, default: bool = False) -> bool:
    value = group.settings.get(key)
    if value is not None and not (isinstance(value, (bool, int)) and value in (0, 1)):
        raise ValueError(f"{key} of {group.label} is a {type(value).__name__}; it must be true or false")
    return default if value is None else bool(value)


def _form_of(groups: list[Group]) -> str:
    keys = {key for group in groups for key in group.settings}
    if not keys.issuperset(_ADAM):
        raise ValueError(f"its groups hold {_listed(keys)}, which are not the settings of an Adam")
    if "format_version" in keys:
        return STATESTREAM
    return ENGINE if "bias_correction" in keys else TORCH


def _check(group: Group, source: str, request: Request) -> None:
    for key in _ADAM:
        if key not in group.settings:
            raise ValueError(f"{group.label} has no {key}")
    for param in group.params:
        if own := sorted(param.others - set(request.drop)):
            raise ValueError(
                f"{param.label} has a state {own[0]!r}, which is none of Adam's; drop=[{own[0]!r}] goes on without it"
            )
        if param.weight is not None and not param.weight.is_floating_point:
            raise ValueError(f"the weight of {param.label} is stored as {param.weight}, which no Adam updates")
        if not param.dtypes:
            continue
        for name in MOMENTS:
            if name not in param.dtypes:
                raise ValueError(f"{name} of {param.label} is missing")
        for name, dtype in param.dtypes.items():
            if not dtype.is_floating_point and (name, dtype) != (MASTER, torch.int16):
                raise ValueError(f"{name} of {param.label} is stored as {dtype}, which no Adam saves it as")
        if param.step is None and source != ENGINE:
            raise ValueError(f"step of {param.label} is missing")


def _count_by_group(groups: list[Group]) -> None:
    for group in groups:
        for param in group.params:
            if param.dtypes:
                param.step = _group_count(group)
                if param.step is None:
                    raise ValueError(f"step of {group.label} is missing")


def _group_count(group: Group) -> float | None:
    count = group.settings.get(STEP)
    return None if count is None else count_of(count, f"step of {group.label}")


def _group_counts(groups: list[Group], request: Request, flat: bool) -> list[int]:
    """The count of each group's calls. All groups of an optimizer are called alike, so it is the largest count of any
    parameter; but the peer has no other, so there it must be that of each of a group's parameters."""
    largest = int(max((p.step for g in groups for p in g.params if p.step is not None), default=0))
    counted = [_group_count(group) for group in groups]
    largest = max([largest, *(int(count) for count in counted if count is not None)])
    if request.to != ENGINE or STEP in request.drop:
        return [largest] * len(groups)
    if flat:
        together = [p for g in groups for p in g.params]
        _same_count(together, "the checkpoint is flat and does not say which parameters are in a group")
        return [largest] * len(groups)
    counts = []
    for group in groups:
        count = _same_count(group.params, f"{group.label} can have only one")
        counts.append(largest if count is None else int(count))
    return counts


def _same_count(params: list[Param], why: str) -> float | None:
    with_state = [p for p in params if p.step is not None]
    for param in with_state:
        if param.step != with_state[0].step:
            raise ValueError(
                f"step: {with_state[0].label} was updated {with_state[0].step:g} times and {param.label} "
                f"{param.step:g} times; Transformer Engine counts by group, and {why}. drop=['step'] gives all the "
                "largest count"
            )
    return with_state[0].step if with_state else None


def _settings(group: Group, source: str, request: Request, count: int) -> dict[str, Any]:
    old = dict(group.settings)
    amsgrad, maximize = _flag(group, "amsgrad"), _flag(group, "maximize")
    corrected = _flag(group, "bias_correction", True)
    decoupled = _flag(group, "decoupled_weight_decay", request.adam_w_mode is not False)
    if amsgrad and request.to != TORCH:
        if MAX_EXP_AVG_SQ not in request.drop:
            raise ValueError(
                f"{group.label} has amsgrad=True, which {_NAMES[request.to]} does not have; drop=['max_exp_avg_sq'] "
                "goes on without it"
            )
        amsgrad = False
    if not corrected and request.to == TORCH:
        raise ValueError(f"{group.label} has bias_correction=False, which torch.optim.AdamW does not have")
    if request.to == ENGINE:
        if maximize:
            raise ValueError(f"{group.label} has maximize=True, which {_NAMES[ENGINE]} does not have")
        if decoupled is not (request.adam_w_mode is not False):
            raise ValueError(
                f"{group.label} has decoupled_weight_decay={decoupled}, which {_NAMES[ENGINE]} keeps in none of its "
                f"groups: build it with adam_w_mode={decoupled}, and pass adam_w_mode={decoupled} here"
            )
    own = {"step", "format_version", *_ADAM, *_TORCH_ONLY, *_ENGINE_ONLY}
    new = {key: old[key] for key in _ADAM}
    if isinstance(new["betas"], list):
        new["betas"] = tuple(new["betas"])
    if request.to != ENGINE:
        new |= {"amsgrad": amsgrad, "maximize": maximize}
        new |= {key: old.get(key, default) for key, default in HOW_TORCH_RUNS.items()}
        new["decoupled_weight_decay"] = decoupled
    if request.to != TORCH:
        new |= {"bias_correction": corrected, STEP: count}
    return new | {key: value for key, value in old.items() if key not in own}


def _new_param(param: Param, request: Request, any_master: bool) -> NewParam:
    new = NewParam({name: How.KEPT for name in MOMENTS if name in param.dtypes})
    if request.to == TORCH:
        if MAX_EXP_AVG_SQ in param.dtypes:
            new.states[MAX_EXP_AVG_SQ] = How.KEPT
        new.weight = _weight(param, request)
    else:
        if MAX_EXP_AVG_SQ in param.dtypes and MAX_EXP_AVG_SQ not in request.drop:
            raise ValueError(
                f"max_exp_avg_sq of {param.label}: {_NAMES[request.to]} has no AMSGrad; drop=['max_exp_avg_sq'] goes "
                "on without it"
            )
        master = _master(param, request, any_master) if param.dtypes else None
        if master is not None:
            new.states[MASTER] = master
    if request.to != ENGINE and param.dtypes:
        new.step = param.step
    return new


def _weight(param: Param, request: Request) -> How | None:
    """What becomes of the weight where the target keeps no master."""
    stored = param.dtypes.get(MASTER)
    if stored is None or param.weight is torch.float32 or MASTER in request.drop:
        return None  # the peer's master of a float32 parameter is not the parameter's value
    if request.masters != "weights":
        raise ValueError(
            f"master_param of {param.label}: torch.optim.AdamW keeps no masters. masters='weights' makes them the "
            "weights, for a float32 model; drop=['master_param'] leaves the weights rounded as they are"
        )
    if param.weight is None:
        raise ValueError(f"master_param of {param.label} cannot become its weight, which is not there")
    return How.MASTER if stored is not torch.int16 else _joined(param)


def _master(param: Param, request: Request, any_master: bool) -> How | None:
    stored, weight = param.dtypes.get(MASTER), param.weight
    if MASTER in request.drop:
        return None
    if weight is torch.float32:
        return How.WEIGHT if request.to == ENGINE and any_master else None
    if request.masters == "float32":
        if stored is torch.int16:
            return _joined(param)
        if stored is None and weight is None:
            raise ValueError(f"master_param of {param.label} is made from its weight, which is not there")
        return How.WEIGHT if stored is None else How.KEPT
    if request.masters == "remainders" and stored is not torch.int16:
        if stored is not None:
            raise ValueError(
                f"master_param of {param.label}: an FP32 master becomes remainders only by changing the weight, which "
                "is not rounded as theirs is; keep masters='float32'"
            )
        if weight is None:
            raise ValueError(f"master_param of {param.label}: remainders need the weight, which is not there")
        return How.ZEROS if weight is torch.bfloat16 else How.WEIGHT
    return None if stored is None else How.KEPT


def _joined(param: Param) -> How:
    if param.weight is not torch.bfloat16:
        found = "which is not there" if param.weight is None else f"not the {param.weight} that is there"
        raise ValueError(
            f"master_param of {param.label} is 16 bits of remainder: FP32 values are made of them together with the "
            f"bfloat16 weight, {found}"
        )
    return How.JOINED


_NAMES = {
    TORCH: "torch.optim.AdamW",
    STATESTREAM: "statestream's FusedAdam",
    ENGINE: "Transformer Engine's FusedAdam",
}


def _either(names: Iterable[Any]) -> str:
    return ", ".join(repr(name) for name in names)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, names))[:8]) or "nothing"
