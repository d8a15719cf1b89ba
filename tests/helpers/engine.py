"""What Transformer Engine's FusedAdam holds in a state dict, as tests/te/layout.json records it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["LAYOUT", "arguments_of", "engine_dict"]

LAYOUT: dict[str, Any] = json.loads((Path(__file__).parents[1] / "te" / "layout.json").read_text())


def arguments_of(mode: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a mode with dtypes in place of their names."""
    return {k: getattr(torch, v) if isinstance(v, str) else v for k, v in mode["arguments"].items()}


def engine_dict(
    state_dict: dict[str, Any], params: list[Tensor], group_step: Any, masters: bool = True
) -> dict[str, Any]:
    """One of FusedAdam's own dicts in the peer's form: its count a group, none a parameter, and where there are
    `masters` one of float32 parameters too, which the peer makes and never updates."""
    saved = copy.deepcopy(state_dict)
    for index, state in saved["state"].items():
        del state["step"]
        if masters and "master_param" not in state:
            state["master_param"] = params[index].detach().float().clone()
    kept = LAYOUT["group"]
    saved["param_groups"] = [
        {**{key: group[key] for key in kept}, "step": group_step} for group in saved["param_groups"]
    ]
    return saved
