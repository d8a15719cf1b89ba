"""State dicts of an offloaded optimizer, out of host memory and into it. Not a byte of state goes to the device."""

from __future__ import annotations

from typing import Any

from statestream.offload.adam.strategy import ElementRanges
from statestream.offload.host.store import compact_copy
from statestream.offload.load import load_plain
from statestream.offload.one_pass import OnePass
from statestream.offload.per_parameter.strategy import WholeParameters

__all__ = ["export_state", "load_state"]


def export_state(units: ElementRanges | WholeParameters | OnePass, snapshot: bool) -> dict[str, Any]:
    inner = units.inner
    if isinstance(units, ElementRanges):
        units.adopt()  # all in one bank, rather than one by one as they are looked at
        chosen, inner.state_dict_cpu_offload = inner.state_dict_cpu_offload, snapshot
        try:
            return inner.state_dict()
        finally:
            inner.state_dict_cpu_offload = chosen
    if isinstance(units, WholeParameters):
        units.take_back(units.members.values())
    state_dict = inner.state_dict()
    if not snapshot:
        return state_dict
    return {key: compact_copy(value) for key, value in state_dict.items()}


def load_state(units: ElementRanges | WholeParameters | OnePass, state_dict: dict[str, Any]) -> None:
    if isinstance(units, ElementRanges):
        units.adopt()
        with units.charge.lent():
            units.inner.load_state_dict(state_dict)
    else:
        load_plain(units, state_dict)
