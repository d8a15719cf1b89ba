"""What one rank holds of each parameter: the largest share that any rank has."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import prod

from statestream.planner.model import Model, Parameter
from statestream.planner.quantities import BadOption

__all__ = ["Mesh", "Share"]

MOST_RANKS = 1_000_000


@dataclass(frozen=True)
class Share:
    """A parameter and the shape of its local tensor."""

    parameter: Parameter
    local: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Of the local tensor."""
        return prod(self.local)


@dataclass(frozen=True)
class Mesh:
    """Ranks by what they do: `replicate` and `shard` as in FSDP2 (HSDP where both are above 1), `tensor` parallel."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard * self.tensor

    @classmethod
    def checked(cls, ranks: int | None, mesh: str | None) -> Mesh:
        """Of `ranks` (all shard) or of a text such as "replicate=2,shard=8,tensor=4". BadOption for what cannot be."""
        sizes = {"shard": ranks if ranks is not None else 1}
        if mesh is not None:
            sizes = _sizes(mesh)
        for size in sizes.values():
            if not 1 <= size <= MOST_RANKS:
                name = "ranks" if mesh is None else "mesh"
                raise BadOption(name, f"{size} is out of range; use 1 to {MOST_RANKS}")
        made = cls(**sizes)
        if mesh is not None and ranks is not None and ranks != made.ranks:
            raise BadOption("ranks", f"{ranks} is not the product of the mesh, {made.ranks}; give one of the two")
        if made.ranks > MOST_RANKS:
            raise BadOption("mesh", f"{made.ranks} ranks are out of range; use 1 to {MOST_RANKS}")
        return made

    def share(self, parameter: Parameter) -> Share:
        """Every dimension that is cut is rounded up, as on the rank that has most.

        Tensor parallelism cuts a dimension that divides evenly and leaves vectors whole; FSDP2 then cuts rows, of
        stacked experts that are fewer than the ranks their rows.
        """
        local = list(parameter.shape)
        if self.tensor > 1 and len(local) > 1:
            even = [d for d, size in enumerate(local) if size % self.tensor == 0]
            dim = even[-2] if len(even) > 2 else even[0] if even else 0  # of stacked matrices the rows
            local[dim] = -(-local[dim] // self.tensor)
        if self.shard > 1 and local:
            dim = 1 if len(local) > 2 and local[0] < self.shard <= local[1] else 0
            local[dim] = -(-local[dim] // self.shard)
        return Share(parameter, tuple(local))

    def shares(self, model: Model) -> list[Share]:
        return [self.share(parameter) for parameter in model.parameters]


def _sizes(text: str) -> dict[str, int]:
    known = [f.name for f in fields(Mesh)]
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if name not in known or name in sizes or not (size.isascii() and size.isdecimal()):
            raise BadOption("mesh", f"{text!r} is not understood; write it as replicate=2,shard=8,tensor=4")
        sizes[name] = int(size)
    return sizes
