"""Whether a parameter was written since its last step, by its address and the versions that autograd counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from statestream.tensors.local import address_of, copy_version

__all__ = ["WriteTracker"]

_version = attrgetter("_version")
_PLAIN = {Tensor, Parameter}


class _Looks(NamedTuple):
    """Of several parameters; versions are None where autograd does not count (inference mode)."""

    ids: list[int]
    addresses: list[int]
    versions: list[int | None]
    local_versions: list[int | None]


@dataclass(slots=True, eq=False)
class _Seen:
    """How parameters looked that were stepped together, and that none was seen of since with others."""

    params: list[Tensor | None]
    """Held, so that their ids stay their own; None of one that was forgotten, whose id is 0 then."""
    looks: _Looks
    memories: list[StorageWeakRef | None]
    """None where there is none. While one is not expired, its address is no one else's."""

    def still_holds_of_all(self, looks: _Looks) -> bool:
        return looks == self.looks and None not in looks.versions and None not in looks.local_versions

    def still_holds_of(self, place: int, looks: _Looks, other_place: int) -> bool:
        seen = tuple([of[place] for of in self.looks])
        return (
            seen == tuple([of[other_place] for of in looks]) and None not in seen and not _is_gone(self.memories[place])
        )

    def any_is_gone(self) -> bool:
        return any(map(StorageWeakRef.expired, filter(None, self.memories)))

    def keep(self, places: list[int]) -> None:
        """Only what is at these places."""
        self.params = [self.params[place] for place in places]
        self.looks = _Looks(*([of[place] for place in places] for of in self.looks))
        self.memories = [self.memories[place] for place in places]


class WriteTracker:
    """Remembers how parameters looked. Writes through `.data` into the same memory leave no trace and are not
    noticed.

    Parameters are mostly stepped with the same others as before, and were not written: then whole lists are compared.
    Each is remembered once, whatever the others were that it was stepped with.
    """

    def __init__(self):
        self._places: dict[int, tuple[_Seen, int]] = {}
        """Of each parameter, by id: with which others it was last seen, and where among them."""

    def remember(self, params: Sequence[Tensor], locals: Sequence[Tensor]) -> None:
        """How the parameters, of which these are the local tensors, look now."""
        if not params:
            return
        looks = _looks(params, locals)
        seen = self._seen_with(looks)
        if seen is not None and seen.looks.addresses == looks.addresses and not seen.any_is_gone():
            seen.looks = looks
            return
        memories = list(map(self._memory, looks.ids, looks.addresses, locals))
        self._take_out(looks.ids)
        seen = _Seen(list(params), looks, memories)
        self._places.update((identity, (seen, place)) for place, identity in enumerate(looks.ids))

    @property
    def count(self) -> int:
        """How many parameters are remembered, and held."""
        return len(self._places)

    def params(self) -> list[Tensor]:
        return [seen.params[place] for seen, place in self._places.values()]

    def forget(self, param: Tensor | None = None) -> None:
        """The parameter (or every one) counts as written, and is held no longer."""
        if param is None:
            self._places.clear()
        elif id(param) in self._places:
            seen, place = self._places.pop(id(param))
            seen.params[place], seen.looks.ids[place] = None, 0

    def written(self, params: Sequence[Tensor], locals: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Of these parameters those that do not look as remembered, or cannot be told, each with its local tensor."""
        if not params:
            return []
        looks = _looks(params, locals)
        seen = self._seen_with(looks)
        if seen is not None and seen.still_holds_of_all(looks) and not seen.any_is_gone():
            return []
        return [
            (param, local)
            for i, (param, local) in enumerate(zip(params, locals, strict=True))
            if (found := self._places.get(id(param))) is None or not found[0].still_holds_of(found[1], looks, i)
        ]

    def _seen_with(self, looks: _Looks) -> _Seen | None:
        """What was last seen of just these parameters, together and in this order."""
        seen, _ = self._places.get(looks.ids[0], (None, 0))
        return seen if seen is not None and seen.looks.ids == looks.ids else None

    def _memory(self, identity: int, address: int, local: Tensor) -> StorageWeakRef | None:
        seen, place = self._places.get(identity, (None, 0))
        if seen is not None and seen.looks.addresses[place] == address and not _is_gone(seen.memories[place]):
            return seen.memories[place]
        return StorageWeakRef(local.untyped_storage()) if address else None

    def _take_out(self, ids: list[int]) -> None:
        """Of what was seen of these parameters, leaves what was seen of others with them."""
        leaving = {0, *ids}
        for seen in {seen for seen, _ in filter(None, map(self._places.get, ids))}:
            seen.keep([place for place, identity in enumerate(seen.looks.ids) if identity not in leaving])
            self._places.update((identity, (seen, place)) for place, identity in enumerate(seen.looks.ids))


def _is_gone(memory: StorageWeakRef | None) -> bool:
    """Whether the memory that a parameter was in was freed: another tensor may be there now."""
    return memory is not None and memory.expired()


def _looks(params: Sequence[Tensor], locals: Sequence[Tensor]) -> _Looks:
    plain = set(map(type, locals)) <= _PLAIN
    addresses = list(map(Tensor.data_ptr if plain else address_of, locals))
    ids = list(map(id, params))
    try:
        versions = list(map(_version, params))
        return _Looks(ids, addresses, versions, versions if locals is params else list(map(_version, locals)))
    except RuntimeError:  # some have no version
        return _Looks(ids, addresses, list(map(copy_version, params)), list(map(copy_version, locals)))
