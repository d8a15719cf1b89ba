"""Whether a parameter was written since its last step, by its address and the versions that autograd counts."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from torch import Tensor
from torch.nn import Parameter

from statestream.tensors import address_of, copy_version

__all__ = ["WriteWatch"]

_Look = tuple[int, int | None, int | None]
"""Address, version, version of the local tensor; None where autograd does not count (inference mode)."""

_version = attrgetter("_version")
_PLAIN = {Tensor, Parameter}


class WriteWatch:
    """Remembers how parameters looked. Writes through `.data` leave no trace and are not noticed."""

    def __init__(self):
        self._seen: dict[int, tuple[Tensor, _Look]] = {}  # the tensor is held, so that its id stays its own

    def remember(self, params: Sequence[Tensor], locals: Sequence[Tensor]) -> None:
        """How the parameters, of which these are the local tensors, look now."""
        self._seen.update(zip(map(id, params), zip(params, _looks(params, locals), strict=True), strict=True))

    def forget(self, param: Tensor | None = None) -> None:
        """The parameter (or every one) counts as written."""
        if param is None:
            self._seen.clear()
        else:
            self._seen.pop(id(param), None)

    def written(self, params: Sequence[Tensor], locals: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Of these parameters those that do not look as remembered, or cannot be told, each with its local tensor."""
        never = (None, None)
        return [
            (param, local)
            for param, local, look in zip(params, locals, _looks(params, locals), strict=True)
            if self._seen.get(id(param), never)[1] != look or None in look
        ]


def _looks(params: Sequence[Tensor], locals: Sequence[Tensor]) -> list[_Look]:
    plain = set(map(type, locals)) <= _PLAIN
    addresses = map(Tensor.data_ptr if plain else address_of, locals)
    try:
        return list(zip(addresses, map(_version, params), map(_version, locals), strict=True))
    except RuntimeError:  # some have no version
        return [(address_of(b), copy_version(a), copy_version(b)) for a, b in zip(params, locals, strict=True)]
