"""State dicts of an offloaded optimizer, out of host memory and into it. Not a byte of state goes to the device."""

from __future__ import annotations

from typing import Any

from statestream.offload.adam.strategy import AdamStrategy
from statestream.offload.host.store import compact_copy
from statestream.offload.load import load_plain
from statestream.offload.one_pass import OnePassStrategy
from statestream.offload.per_parameter.strategy import PerParameterStrategy

__all__ = ["export_state", "load_state"]


def export_state(strategy: AdamStrategy | PerParameterStrategy | OnePassStrategy, snapshot: bool) -> dict[str, Any]:
    inner = strategy.inner
    if isinstance(strategy, AdamStrategy):
        strategy.adopt()  # all in one bank, rather than one by one as they are looked at
        chosen, inner.state_dict_cpu_offload = inner.state_dict_cpu_offload, snapshot
        try:
            return inner.state_dict()
        finally:
            inner.state_dict_cpu_offload = chosen
    if isinstance(strategy, PerParameterStrategy):
        strategy.take_back(strategy.members.values())
    state_dict = inner.state_dict()
    if not snapshot:
        return state_dict
    return {key: compact_copy(value) for key, value in state_dict.items()}


def load_state(strategy: AdamStrategy | PerParameterStrategy | OnePassStrategy, state_dict: dict[str, Any]) -> None:
    if isinstance(strategy, AdamStrategy):
        strategy.adopt()
        with strategy.inner_hooks.lent():
            strategy.inner.load_state_dict(state_dict)
    else:
        load_plain(strategy, state_dict)
