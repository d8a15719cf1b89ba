"""Names in a flat optimizer state dict, ``state.<parameter>.<state>`` and ``param_groups.<parameter>.<setting>``, and
in a checkpoint of a nested one, where the settings are ``param_groups.<number>.<setting>``."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["STATE", "Flat", "group_label", "groups_of", "param_label"]

STATE, GROUPS = "state.", "param_groups."


@dataclass
class Flat:
    """Keys by parameter and what they hold of it; settings by group number where they are nested."""

    states: dict[str, dict[str, str]] = field(default_factory=dict)
    settings: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, keys: Iterable[str], together: bool = True) -> Flat:
        """Keys of both kinds. `together`: settings are of parameters too, and each that has state must have some."""
        flat = cls()
        for key in keys:
            for prefix, found in ((STATE, flat.states), (GROUPS, flat.settings)):
                if key.startswith(prefix):
                    name, _, what = key.removeprefix(prefix).rpartition(".")
                    if name:
                        found.setdefault(name, {})[what] = key
        if not flat.settings:
            raise ValueError("the state dict has neither 'param_groups' nor keys that begin with 'param_groups.'")
        for name in flat.states if together else ():
            if name not in flat.settings:
                raise ValueError(f"'{name}' has state and no settings in the state dict")
        return flat


def groups_of(state_dict: Mapping[str, Any]) -> list[tuple[dict[str, Any], list[Hashable]]]:
    """Settings and members of each group of a nested state dict. ValueError where they are not what an optimizer
    saves."""
    found = []
    for number, group in enumerate(state_dict["param_groups"]):
        members = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(members, (list, tuple)) or not all(isinstance(member, (int, str)) for member in members):
            raise ValueError(f"{group_label(number)} is no dict with a list of numbers or names as 'params'")
        found.append(({key: value for key, value in group.items() if key != "params"}, list(members)))
    return found


def group_label(group: int | str) -> str:
    return f"group {group}" if isinstance(group, int) else f"the group of '{group}'"


def param_label(name: Hashable) -> str:
    return f"parameter {name}" if isinstance(name, int) else f"'{name}'"
