"""What may be wrong with a state dict, as data: a change to a good one, and what the error must name.

The good one is of seven parameters in two groups (helpers/training.py). A change is to the last parameter or group, so
that a load which writes as it reads has written all others by then.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

__all__ = ["ANY", "CONVERT", "CORRUPTIONS", "FUSED", "PLAIN", "Corruption", "Ran"]

FUSED, PLAIN, CONVERT = "FusedAdam", "another optimizer", "convert"
"""Who is to notice: FusedAdam's load, wrapped or not; a wrapped optimizer of torch's; the conversion."""
ANY = (FUSED, PLAIN, CONVERT)
LOADS = (FUSED, PLAIN)

LAST = r"(parameter 6|parameter 3 of group 1)\b"
"""One optimizer counts over all groups, as the dict does, the other within each."""


class Ran(BaseException):
    """Code that came with a state dict was run."""


@dataclass(frozen=True)
class Corruption:
    change: Callable[[dict[str, Any]], Any]
    """Changes a copy of a good dict in place; what it returns, if anything, takes its place."""
    place: str
    """A regular expression."""
    noticed_by: tuple[str, ...] = ANY


class _Functions(Tensor):
    """Would run code at every use."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise Ran(func)


class Lying(Tensor):
    """Says of itself what fits, and is something else when it is read."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise Ran(func)

    @property
    def shape(self):
        return torch.Size((33, 2))

    @property
    def dtype(self):
        return torch.float32


class _Dispatch(Tensor):
    """A wrapper without memory of its own."""

    @staticmethod
    def __new__(cls, like: Tensor):
        return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise Ran(func)


class _Unread:
    """An object that must be left alone."""

    def __getattr__(self, name: str) -> Any:
        raise Ran(name)


def _state(name: str, value: Any, number: int = 6) -> Callable[[dict], None]:
    def change(sd: dict) -> None:
        state = sd["state"][number]
        state[name] = value(state[name]) if isinstance(value, FunctionType) else value

    return change


def _without(name: str, number: int = 6) -> Callable[[dict], None]:
    def change(sd: dict) -> None:
        del sd["state"][number][name]

    return change


def _group(key: str, value: Any) -> Callable[[dict], None]:
    def change(sd: dict) -> None:
        sd["param_groups"][1][key] = value

    return change


def _at(key: str, value: Any) -> Callable[[dict], None]:
    def change(sd: dict) -> None:
        sd[key] = value

    return change


def _renumbered(sd: dict) -> None:
    for group in sd["param_groups"]:
        group["params"] = [key + 100 for key in group["params"]]


def _numbered_twice(sd: dict) -> None:
    sd["param_groups"][1]["params"][3] = 5
    del sd["state"][6]


def _cut_off(value: Tensor) -> Tensor:
    cut = value.contiguous().clone()
    cut.untyped_storage().resize_(cut.untyped_storage().nbytes() // 2)
    return cut


def _freed(value: Tensor) -> Tensor:
    freed = value.contiguous().clone()
    freed.untyped_storage().resize_(0)
    return freed


def _moments() -> dict[str, Corruption]:
    """What may stand where the last parameter's second moment belongs."""
    values: dict[str, Any] = {
        "None": None,
        "text": "zeros",
        "bytes": b"\0" * 264,
        "a number": 0.5,
        "a list": lambda v: v.tolist(),
        "a dict": {"values": 1},
        "an object": _Unread(),
        "an array": lambda v: v.float().numpy(),
        "a 0-dim tensor": torch.tensor(1.0),
        "one element": torch.ones(1),
        "another shape": torch.zeros(33, 3),
        "the transposed shape": lambda v: v.t(),
        "all elements in a row": lambda v: v.reshape(-1),
        "one dimension more": lambda v: v[None],
        "a part of it": lambda v: v[:10],
        "no elements": torch.zeros(0),
        "int64": lambda v: v.long(),
        "int16": lambda v: v.to(torch.int16),
        "uint8": lambda v: v.to(torch.uint8),
        "booleans": lambda v: v.bool(),
        "complex": lambda v: v + 0j,
        "quantised": lambda v: torch.quantize_per_tensor(v.float(), 0.1, 0, torch.quint8),
        "four bits": lambda v: torch.empty(33, 2, dtype=torch.float4_e2m1fn_x2),
        "sparse": lambda v: v.to_sparse(),
        "sparse rows": lambda v: v.to_sparse_csr(),
        "nested": lambda v: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "freed": _freed,
        "cut off": _cut_off,
        "of a class with functions": lambda v: v[:5].as_subclass(_Functions),
        "of a class that lies": lambda v: v[:5].as_subclass(Lying),
        "of a class that wraps": lambda v: _Dispatch(v),
    }
    moments = {}
    for name, value in values.items():
        # Where nothing is, an older optimizer had nothing; torch's own step says so.
        place = rf"exp_avg_sq of {LAST}"
        moments[f"exp_avg_sq: {name}"] = Corruption(_state("exp_avg_sq", value), place)
    without_data = Corruption(_state("exp_avg_sq", lambda v: v.to("meta")), rf"exp_avg_sq of {LAST}.*meta", LOADS)
    return moments | {"exp_avg_sq: on meta": without_data}


def _steps() -> dict[str, Corruption]:
    values = {
        "NaN": torch.tensor(math.nan),
        "infinite": torch.tensor(math.inf),
        "infinite number": math.inf,
        "negative": torch.tensor(-1.0),
        "negative number": -1,
        "half": 2.5,
        "huge": torch.tensor(1e30),
        "huge double": torch.tensor(2.0**53, dtype=torch.float64),
        "huge integer": 2**31,
        "beyond any float": 10**400,
        "two": torch.ones(2),
        "none at all": torch.ones(0),
        "on meta": torch.ones((), device="meta"),
        "freed": _freed(torch.ones(())),
        "complex": torch.tensor(1 + 1j),
        "text": "3",
        "bytes": b"3",
        "a list": [3],
        "a dict": {"step": 3},
        "an object": object(),
        "of a class with functions": torch.tensor(3.5).as_subclass(_Functions),
    }
    # torch's optimizers may have a step of several elements; FusedAdam's are counts.
    several = {"two", "none at all"}
    return {
        f"step: {name}": Corruption(
            _state("step", value), rf"step of {LAST}", (FUSED, CONVERT) if name in several else ANY
        )
        for name, value in values.items()
    }


def _settings() -> dict[str, Corruption]:
    numbers = {
        "NaN": math.nan,
        "NaN in a tensor": torch.tensor(math.nan),
        "text": "0.1",
        "a list": [0.1],
        "a dict": {},
        "two": torch.ones(2),
        "on meta": torch.ones((), device="meta"),
        "complex": 1j,
        "an object": object(),
        "NaN of a class with functions": torch.tensor(math.nan).as_subclass(_Functions),
    }
    found = {
        f"{key}: {name}": Corruption(_group(key, value), rf"\b{key}\b.* group 1")
        for key in ("lr", "weight_decay", "eps")
        for name, value in numbers.items()
    }
    pairs = {"one": (0.9,), "three": (0.9, 0.9, 0.9), "NaN": (0.9, math.nan), "text": "ab", "words": ("a", "b")}
    found |= {f"betas: {name}": Corruption(_group("betas", value), "betas.* group 1") for name, value in pairs.items()}
    refused = {
        "lr: infinite": ("lr", math.inf),
        "lr: negative": ("lr", -1e-3),
        "betas: 1": ("betas", (0.9, 1.0)),
        "eps: negative": ("eps", -1.0),
        "maximize: text": ("maximize", "no"),
        "maximize: a list": ("maximize", [False]),
        "bias_correction: text": ("bias_correction", "false"),
        "amsgrad: text": ("amsgrad", "off"),
        "step: NaN": ("step", math.nan),
        "step: negative": ("step", -1),
        "step: huge": ("step", 2**40),
        "step: text": ("step", "3"),
        "format_version: newer": ("format_version", 2),
        "format_version: text": ("format_version", "new"),
        "param_names: a number": ("param_names", 5),
        "param_names: too few": ("param_names", ["a"]),
    }
    return found | {
        f"group's {name}": Corruption(_group(key, value), rf"(?=.*\b{key}\b).*group 1", (FUSED,))
        for name, (key, value) in refused.items()
    }


_FORM = {
    "a list for all": Corruption(lambda sd: [sd], "state_dict: expected a dict, found list"),
    "text for all": Corruption(lambda sd: "sd", "state_dict: expected a dict, found str"),
    "no state": Corruption(lambda sd: sd.pop("state") and None, "'state'"),
    "no groups": Corruption(lambda sd: sd.pop("param_groups") and None, "'param_groups'"),
    "a list for states": Corruption(_at("state", [1]), "'state'.*list"),
    "nothing for states": Corruption(_at("state", None), "'state'.*NoneType"),
    "a dict for groups": Corruption(_at("param_groups", {}), "'param_groups'.*dict"),
    "nothing for groups": Corruption(_at("param_groups", None), "'param_groups'.*NoneType"),
    "text for groups": Corruption(_at("param_groups", "ab"), "'param_groups'.*str"),
    "numbers for groups": Corruption(_at("param_groups", [1, 2]), "group 0.*int"),
    "a group too few": Corruption(lambda sd: sd["param_groups"].pop() and None, "groups|none of its groups lists"),
    "a group too many": Corruption(lambda sd: sd["param_groups"].append({"params": []}), "groups of|groups", LOADS),
    "a parameter too few": Corruption(
        lambda sd: sd["param_groups"][1]["params"].pop() and None, "group 1|groups|parameter 6"
    ),
    "a parameter too many": Corruption(
        lambda sd: sd["param_groups"][1]["params"].append(7), "group 1|groups of", LOADS
    ),
    "parameters in another group": Corruption(
        lambda sd: sd["param_groups"][0]["params"].append(sd["param_groups"][1]["params"].pop(0)), "group", LOADS
    ),
    "other numbers of parameters": Corruption(_renumbered, "parameter 0, which none of its groups lists"),
    "one number for two parameters": Corruption(
        _numbered_twice,
        "group 1.*5",
        LOADS,
    ),
    "state of one parameter more": Corruption(
        lambda sd: sd["state"].__setitem__(9, sd["state"][6]), "parameter 9, which none of its groups lists"
    ),
    "no params": Corruption(lambda sd: sd["param_groups"][1].pop("params") and None, "group 1.*'params'"),
    "a number for params": Corruption(_group("params", 4), "'params' of group 1.*int"),
    "tensors for params": Corruption(_group("params", [torch.ones(2)] * 4), "'params' of group 1.*Tensor"),
    "lists for params": Corruption(_group("params", [[3], [4], [5], [6]]), "'params' of group 1.*list"),
    "a list for a parameter's state": Corruption(lambda sd: sd["state"].update({6: [1, 2]}), f"{LAST}.*list"),
    "text for a parameter's state": Corruption(lambda sd: sd["state"].update({6: "none"}), f"{LAST}.*str"),
    "exp_avg missing": Corruption(_without("exp_avg"), rf"exp_avg of {LAST}.*missing"),
    "exp_avg_sq missing": Corruption(_without("exp_avg_sq"), rf"exp_avg_sq of {LAST}.*missing"),
    "exp_avg of an empty tensor missing": Corruption(
        _without("exp_avg", 3), r"exp_avg of (parameter 3|parameter 0 of group 1)\b.*missing"
    ),
    "another state": Corruption(
        _state("momentum_buffer", torch.ones(33, 2)), LAST + ".*momentum_buffer", (FUSED, CONVERT)
    ),
}

CORRUPTIONS = _FORM | _moments() | _steps() | _settings()
