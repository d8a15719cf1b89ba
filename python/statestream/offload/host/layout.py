"""A plan laid over arenas: which bytes of which arena go where in the ring, and where a piece lies there."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence, Set
from itertools import accumulate

from statestream.offload.host.arena import GRADS, Bank
from statestream.streaming.pipeline import Stage, Transfer
from statestream.streaming.plan import Chunk, Piece, Plan, Unit

__all__ = ["Layout"]

SMALL_GAP_BYTES = 1 << 20
"""State of parameters without a gradient travels along where it lies between others and is no more than this:
it costs less than a second copy would."""


class Layout:
    """`units` is what was planned; `banks` hold their state. In the ring a chunk's kinds lie one after another,
    each as it lies in its arena. A unit may have more sizes than its bank has arenas: the rest is room on the
    device that nothing is copied to or from."""

    def __init__(self, plan: Plan, units: Sequence[Unit], banks: Sequence[Bank]):
        self.plan, self.units, self.banks = plan, units, banks
        self._places: dict[int, dict[tuple[int, int], list[int]]] = {}
        self._all = self._stages(None)

    def stages(self, active: Set[int] | None = None) -> list[Stage]:
        """The passage of every chunk that has one of the `active` units (None: of all)."""
        return self._all if active is None else self._stages(active)

    def place(self, chunk: Chunk, piece: Piece, kind: int) -> int:
        """Byte of the ring at which the piece's state of this kind begins."""
        places = self._places.get(id(chunk))
        if places is None:
            places = self._places[id(chunk)] = self._places_of(chunk)
        return places[piece.unit, piece.first][kind]

    def _places_of(self, chunk: Chunk) -> dict[tuple[int, int], list[int]]:
        bank, first = self.banks[chunk.bank], chunk.pieces[0]
        bases = [chunk.offset, *(chunk.offset + end for end in accumulate(chunk.sizes))]
        places: dict[tuple[int, int], list[int]] = {(p.unit, p.first): [] for p in chunk.pieces}
        for kind in range(len(chunk.sizes)):
            in_arena = kind < len(bank.arenas)
            at = bases[kind] - (bank.start(kind, first) if in_arena else 0)
            for piece in chunk.pieces:
                places[piece.unit, piece.first].append(at + bank.start(kind, piece) if in_arena else at)
                if not in_arena:
                    at += self._nbytes(piece, kind)
        return places

    def _nbytes(self, piece: Piece, kind: int) -> int:
        unit = self.units[piece.unit]
        return unit.sizes[kind] // unit.grains * (piece.last - piece.first)

    def _stages(self, active: Set[int] | None) -> list[Stage]:
        stages: list[Stage] = []
        numbers: list[int] = []
        for number, chunk in enumerate(self.plan.chunks):
            runs = self._runs(chunk, active)
            if not runs:
                continue
            # Chunks left out never used the ring; the stores are in order, so the latest one that did will do.
            after = bisect_right(numbers, chunk.after) - 1 if chunk.after >= 0 else -1
            transfers = [t for run in runs for t in self._transfers(chunk, *run)]
            stages.append(Stage(tuple(transfers), after, chunk))
            numbers.append(number)
        return stages

    def _runs(self, chunk: Chunk, active: Set[int] | None) -> list[tuple[Piece, Piece]]:
        """First and last pieces of the stretches that have to travel."""
        if active is None:
            return [(chunk.pieces[0], chunk.pieces[-1])]
        runs: list[tuple[Piece, Piece]] = []
        gap = 0
        for piece in chunk.pieces:
            if piece.unit not in active:
                gap += sum(self._nbytes(piece, kind) for kind in range(len(chunk.sizes)))
                continue
            if runs and gap <= SMALL_GAP_BYTES:
                runs[-1] = (runs[-1][0], piece)
            else:
                runs.append((piece, piece))
            gap = 0
        return runs

    def _transfers(self, chunk: Chunk, first: Piece, last: Piece) -> list[Transfer]:
        bank = self.banks[chunk.bank]
        transfers = []
        for kind, arena in enumerate(bank.arenas):
            begin, end = bank.start(kind, first), bank.end(kind, last)
            if begin < end:
                place = self.place(chunk, first, kind)
                transfers.append(Transfer(arena.block, begin, place, end - begin, stored=arena.kind != GRADS))
        return transfers
