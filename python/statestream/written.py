"""Whether a parameter was written since its last step, by its address and the versions that autograd counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from statestream.tensors import address_of, copy_version

__all__ = ["WriteWatch"]

_Look = tuple[int, int | None, int | None]
"""Address, version, version of the local tensor; None where autograd does not count (inference mode)."""

_version = attrgetter("_version")
_PLAIN = {Tensor, Parameter}


@dataclass(frozen=True, slots=True)
class _Seen:
    param: Tensor
    """Held, so that its id stays its own."""
    look: _Look
    memory: StorageWeakRef | None
    """None where there is none. While it is not expired, its address is no one else's."""


class WriteWatch:
    """Remembers how parameters looked. Writes through `.data` into the same memory leave no trace and are not
    noticed."""

    def __init__(self):
        self._seen: dict[int, _Seen] = {}

    def remember(self, params: Sequence[Tensor], locals: Sequence[Tensor]) -> None:
        """How the parameters, of which these are the local tensors, look now."""
        for param, local, look in zip(params, locals, _looks(params, locals), strict=True):
            seen = self._seen.get(id(param))
            if seen is not None and seen.look[0] == look[0] and not _is_gone(seen):
                memory = seen.memory
            else:
                memory = StorageWeakRef(local.untyped_storage()) if look[0] else None
            self._seen[id(param)] = _Seen(param, look, memory)

    def forget(self, param: Tensor | None = None) -> None:
        """The parameter (or every one) counts as written."""
        if param is None:
            self._seen.clear()
        else:
            self._seen.pop(id(param), None)

    def written(self, params: Sequence[Tensor], locals: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Of these parameters those that do not look as remembered, or cannot be told, each with its local tensor."""
        return [
            (param, local)
            for param, local, look in zip(params, locals, _looks(params, locals), strict=True)
            if (seen := self._seen.get(id(param))) is None or seen.look != look or None in look or _is_gone(seen)
        ]


def _is_gone(seen: _Seen) -> bool:
    """Whether the memory that it was in was freed: another tensor may be there now."""
    return seen.memory is not None and seen.memory.expired()


def _looks(params: Sequence[Tensor], locals: Sequence[Tensor]) -> list[_Look]:
    plain = set(map(type, locals)) <= _PLAIN
    addresses = map(Tensor.data_ptr if plain else address_of, locals)
    try:
        return list(zip(addresses, map(_version, params), map(_version, locals), strict=True))
    except RuntimeError:  # some have no version
        return [(address_of(b), copy_version(a), copy_version(b)) for a, b in zip(params, locals, strict=True)]
