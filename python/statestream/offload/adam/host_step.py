"""The host's share of a step of FusedAdam: gradients come down, the CPU kernel updates, weights go up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from statestream import kernels
from statestream.offload.adam.factory import STATES
from statestream.streaming.host_pipeline import Passage
from statestream.streaming.plan import GRAIN_ELEMENTS, Piece
from statestream.tensors.local import flat, is_fake

__all__ = ["AdamOnHost", "grain_bytes"]

_GRAD_BYTES = 4 * GRAIN_ELEMENTS
"""Room for a grain of gradients, whatever their dtype."""

Placed = tuple[Piece, int]
"""A piece, and its offset in the slot: gradients first, weights after them."""


def grain_bytes(param: Tensor, offloaded: bool = False) -> int:
    """Bytes of a slot that one grain of the parameter takes; `offloaded`: its gradient is in host memory."""
    return (0 if offloaded else _GRAD_BYTES) + GRAIN_ELEMENTS * param.element_size()


class AdamOnHost:
    """host_stream.HostStepper beside a flow on the device, with which it shares jobs and the note of what is done.

    `in_place`: the host reads gradients and writes weights where they are, and nothing is copied.
    """

    def __init__(self, flow: Any, threads: int, in_place: bool):
        self.flow, self.threads, self.in_place = flow, threads, in_place
        self.done: set[tuple[int, int]] = set()

    def down(self, chunk: Sequence[Placed]) -> list[Passage]:
        found = []
        for piece, at in chunk:
            job = self.flow.jobs[piece.unit]
            if (piece.unit, piece.first) in self.done or is_fake(job.local):
                continue
            if job.grad_kind < 0:
                found += _passage(job.grad, job.span(piece), at)
            if job.reads_weight:
                found += _passage(job.local, job.span(piece), _weights(job, piece, at))
        return found

    def up(self, chunk: Sequence[Placed]) -> list[Passage]:
        found = []
        for piece, at in chunk:
            job = self.flow.jobs[piece.unit]
            if (piece.unit, piece.first) in self.done and not is_fake(job.local):
                found += _passage(job.local, job.span(piece), _weights(job, piece, at))
        return found

    def step(self, chunk: Sequence[Placed], slot: Tensor | None) -> None:
        self._update(chunk, slot)

    def begun(self, chunk: Sequence[Placed]) -> bool:
        return bool(self._rest(chunk))

    def finish(self, chunk: Sequence[Placed], slot: Tensor | None) -> None:
        self._update(self._rest(chunk), slot)

    def torn(self, chunks: Sequence[Sequence[Placed]], error: BaseException) -> None:
        self.flow.lose(piece.unit for chunk in chunks for piece, _ in chunk)

    def _rest(self, chunk: Sequence[Placed]) -> list[Placed]:
        waiting = set(self.flow.rest([piece for piece, _ in chunk]))
        return [(piece, at) for piece, at in chunk if piece in waiting]

    def _update(self, placed: Iterable[Placed], slot: Tensor | None) -> None:
        offsets = dict(placed)
        for pieces in self.flow.calls(offsets):
            job, table = self.flow.jobs[pieces[0].unit], self.flow.table(pieces)
            for piece in pieces:
                self._add(table, piece, offsets[piece], slot)
            kernels.adam(
                torch.device("cpu"),
                table.rows,
                job.formats,
                job.options,
                grad_scale=self.flow.grad_scale,
                advance=False,
                threads=self.threads,
                **table.rounding,
            )
            self.done.update([(p.unit, p.first) for p in pieces])
            self.flow.note(pieces)

    def _add(self, table: Any, piece: Piece, at: int, slot: Tensor | None) -> None:
        job = self.flow.jobs[piece.unit]
        if is_fake(job.local):
            return
        begin, n = job.span(piece)
        if self.in_place:
            weight = flat(job.local)[begin : begin + n]
        else:
            weight = _in_slot(slot, _weights(job, piece, at), n, job.local)
        if self.in_place or job.grad_kind >= 0:
            grad = flat(job.grad)[begin : begin + n]
        else:
            grad = _in_slot(slot, at, n, job.grad)
        bank = self.flow.layout.banks[self.flow.layout.units[piece.unit].bank]
        states = {kind: bank.arenas[kind].block[bank.start(kind, piece) :] for kind in job.kinds if kind >= 0}
        if job.refresh and n:
            values, scales = (states.get(kind) for kind in job.master_kinds)
            master, scale = job.master(n, values, scales)
            kernels.refresh_master(weight, master, scale=scale)
        places = [states[kind].data_ptr() if kind >= 0 else 0 for kind in job.kinds]
        row = self.flow.row(job, n, weight.data_ptr(), grad.data_ptr(), places[: len(STATES)])
        table.add(job, begin, row, places[len(STATES) :])


def _weights(job: Any, piece: Piece, at: int) -> int:
    """Where the weights of a piece begin in the slot."""
    return at if job.grad_kind >= 0 else at + _GRAD_BYTES * (piece.last - piece.first)


def _in_slot(slot: Tensor, at: int, n: int, like: Tensor) -> Tensor:
    return slot[at : at + n * like.element_size()].view(like.dtype)


def _passage(tensor: Tensor, span: tuple[int, int], at: int) -> list[Passage]:
    (begin, n), size = span, tensor.element_size()
    return [Passage(flat(tensor).view(torch.uint8), begin * size, at, n * size)] if n else []
