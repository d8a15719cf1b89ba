"""The host's share of a step of FusedAdam: gradients come down, the CPU kernel updates, weights go up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from statestream.adam.calls import Call
from statestream.offload.adam.device_step import AdamFlow, Refresh, StreamedJob, refresh_masters
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
    """A host_pipeline.HostStepper beside a flow on the device, with which it shares jobs and the note of what is done.

    `in_place`: the host reads gradients and writes weights where they are, and nothing is copied.
    """

    def __init__(self, flow: AdamFlow, threads: int, in_place: bool):
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
        flow, offsets = self.flow, dict(placed)
        for pieces in flow.calls(offsets):
            call = flow.call(torch.device("cpu"), pieces)
            refresh_masters([self._add(call, piece, offsets[piece], slot) for piece in pieces])
            call.run(
                flow.jobs[pieces[0].unit].options,
                seed=flow.seed,
                grad_scale=flow.grad_scale,
                advance=False,
                threads=self.threads,
            )
            self.done.update([(p.unit, p.first) for p in pieces])
            flow.note(pieces)

    def _add(self, call: Call, piece: Piece, at: int, slot: Tensor | None) -> Refresh | None:
        job = self.flow.jobs[piece.unit]
        if is_fake(job.local):
            return None
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
        return self.flow.add(
            call, piece, weight, grad.data_ptr(), lambda kind: (bank.arenas[kind].block, bank.start(kind, piece))
        )


def _weights(job: StreamedJob, piece: Piece, at: int) -> int:
    """Where the weights of a piece begin in the slot."""
    return at if job.grad_kind >= 0 else at + _GRAD_BYTES * (piece.last - piece.first)


def _in_slot(slot: Tensor, at: int, n: int, like: Tensor) -> Tensor:
    return slot[at : at + n * like.element_size()].view(like.dtype)


def _passage(tensor: Tensor, span: tuple[int, int], at: int) -> list[Passage]:
    (begin, n), size = span, tensor.element_size()
    return [Passage(flat(tensor).view(torch.uint8), begin * size, at, n * size)] if n else []
