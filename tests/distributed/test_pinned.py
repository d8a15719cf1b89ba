"""Pinned memory for an export: hardly more bytes than needed from an allocator that rounds up to powers of two, and no
tensor that takes its neighbours along."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from statestream.checkpoint import pinned
from statestream.checkpoint.pinned import host_tensors, pack
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

FP32 = 4


class RoundingAllocator:
    """Stands in for torch's pinned allocator: each block takes the next power of two of bytes."""

    def __init__(self, refuse_from: int | None = None):
        self.asked: list[int] = []
        self.blocks: list[weakref.ref] = []
        self.refuse_from = refuse_from

    def __call__(self, nbytes: int) -> torch.Tensor:
        if self.refuse_from is not None and len(self.asked) >= self.refuse_from:
            raise RuntimeError("CUDA error: out of memory")
        self.asked.append(self.rounded(nbytes))
        block = torch.empty(self.rounded(nbytes), dtype=torch.uint8)
        self.blocks.append(weakref.ref(block.untyped_storage()))
        return block[:nbytes]

    @staticmethod
    def rounded(nbytes: int) -> int:
        size = 1
        while size < nbytes:
            size *= 2
        return size


def llama_8b(ranks: int, rank: int) -> list[tuple[int, ...]]:
    """Local shapes of the 8B model's parameters, each cut along its rows as FSDP2 does."""
    hidden, ffn, vocabulary, key_values = 4096, 14336, 128256, 1024
    layer = [
        (hidden, hidden),
        (key_values, hidden),
        (key_values, hidden),
        (hidden, hidden),
        (ffn, hidden),
        (ffn, hidden),
        (hidden, ffn),
        (hidden,),
        (hidden,),
    ]
    local = []
    for rows, *rest in [(vocabulary, hidden), *layer * 32, (hidden,), (vocabulary, hidden)]:
        each = -(-rows // ranks)
        local.append((max(min(rows - rank * each, each), 0), *rest))
    return local


@pytest.mark.parametrize("kinds", [2, 3], ids=["moments", "moments and masters"])
@pytest.mark.parametrize("ranks", [8, 48, 96])
def test_pinned_bytes_of_an_8b_model_are_within_5_percent(ranks, kinds):
    for rank in (0, ranks - 1):
        shapes = [shape for shape in llama_8b(ranks, rank) for _ in range(kinds)]
        likes = [torch.empty(shape, device="meta") for shape in shapes]
        needed = sum(like.numel() for like in likes) * FP32
        allocator = RoundingAllocator()
        tensors = host_tensors(likes, [torch.float32] * len(likes), allocator)
        assert sum(allocator.asked) <= 1.05 * needed
        assert len(allocator.asked) <= 12
        inside = sum(tensor.untyped_storage().nbytes() for tensor in tensors if tensor.numel())
        assert inside == needed
        assert pack([like.numel() * FP32 for like in likes])[1] == []


def test_one_block_a_tensor_would_take_much_more():
    # What the test above measures against: were it within 5% too, that test would show nothing.
    sizes = [torch.Size(shape).numel() * FP32 for shape in llama_8b(48, 0)]
    assert sum(RoundingAllocator.rounded(size) for size in sizes) > 1.3 * sum(sizes)


@given(st.lists(st.one_of(st.integers(0, 300), st.integers(0, 1 << 34)), max_size=60))
def test_packing_gives_each_item_its_own_aligned_place_within_the_bound(sizes):
    blocks, without = pack(sizes)
    placed = [i for block in blocks for i in block.offsets]
    assert sorted([*placed, *without]) == [i for i, size in enumerate(sizes) if size]
    for block in blocks:
        assert block.nbytes & (block.nbytes - 1) == 0
        end = 0
        for i, offset in sorted(block.offsets.items(), key=lambda item: item[1]):
            assert offset >= end and offset % 64 == 0
            end = offset + sizes[i]
        assert end <= block.nbytes
    held = sum(sizes[i] for i in placed)
    assert sum(block.nbytes for block in blocks) <= 1.05 * held + 4096


def test_a_lone_large_item_above_a_power_of_two_has_no_place_and_all_others_do():
    assert pack([(1 << 30) + 4]) == ([], [0])
    blocks, without = pack([(1 << 30) + 4, *[1 << 26] * 4])
    assert without == [0]
    assert [block.nbytes for block in blocks] == [1 << 28]


def exported(count: int = 40, rows: int = 301) -> tuple[list[torch.Tensor], RoundingAllocator]:
    likes = [torch.empty(rows, 7) for _ in range(count)]
    allocator = RoundingAllocator()
    tensors = host_tensors(likes, [torch.float32] * count, allocator)
    for i, tensor in enumerate(tensors):
        tensor.fill_(i)
    return tensors, allocator


def test_tensors_of_one_block_hold_their_own_values_and_strides():
    like = torch.empty(5, 3, dtype=torch.bfloat16).t()
    a, b = host_tensors([like, like], [torch.float32, torch.int16], RoundingAllocator())
    values = torch.arange(15).reshape(3, 5)
    a.copy_(values)
    b.copy_(-values)
    assert a.stride() == b.stride() == like.stride()
    assert (a.dtype, b.dtype) == (torch.float32, torch.int16)
    assert torch.equal(a, values.float()) and torch.equal(b, -values.short())


def saved(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


@pytest.mark.parametrize("write", [saved, pickle.dumps], ids=["torch.save", "pickle"])
def test_a_saved_tensor_does_not_carry_its_block(write):
    tensors, allocator = exported()
    block = allocator.asked[0]
    assert block >= 16 * tensors[0].nbytes
    alone = len(write(tensors[3].clone()))
    assert len(write(tensors[3])) <= alone + 64


def test_a_deepcopied_tensor_does_not_carry_its_block():
    tensors, _ = exported()
    twin = copy.deepcopy(tensors[3])
    assert twin.untyped_storage().nbytes() == tensors[3].nbytes
    assert torch.equal(twin, tensors[3])


def test_a_shared_tensor_does_not_carry_its_block():
    tensors, _ = exported()
    tensors[3].share_memory_()
    assert tensors[3].untyped_storage().nbytes() == tensors[3].nbytes
    assert torch.equal(tensors[3], torch.full((301, 7), 3.0))
    assert torch.equal(tensors[4], torch.full((301, 7), 4.0))


@pytest.fixture
def waits(monkeypatch):
    """What had been given back whenever the devices were waited for."""
    found: list[object] = []
    monkeypatch.setattr(pinned, "wait_for_all_devices", lambda: found.append(None))
    host_tensors([], [])  # what rests is of other tests
    found.clear()
    return found


def test_a_block_lives_as_long_as_any_of_its_tensors():
    tensors, allocator = exported()
    block = allocator.blocks[0]
    last = tensors[0]
    del tensors
    gc.collect()
    assert block() is not None
    assert torch.equal(last, torch.zeros(301, 7))


def test_a_block_is_given_back_by_the_next_export_once_the_devices_were_waited_for(waits, monkeypatch):
    """A copy to a GPU may read it when its last tensor dies, in any stream; torch's allocator knows of none."""
    tensors, allocator = exported()
    lives = [block() is not None for block in allocator.blocks]
    del tensors
    gc.collect()
    assert waits == [] and [block() is not None for block in allocator.blocks] == lives, "it rests"
    there = []
    monkeypatch.setattr(
        pinned, "wait_for_all_devices", lambda: there.extend(block() is not None for block in allocator.blocks)
    )
    host_tensors([torch.empty(1)], [torch.float32], RoundingAllocator())
    assert there == lives, "the devices are waited for before anything is given back"
    assert all(block() is None for block in allocator.blocks)


def test_exports_wait_for_no_device_while_all_results_live(waits):
    tensors, _ = exported()
    more, _ = exported()
    assert waits == []
    del tensors, more
    gc.collect()
    exported()
    assert len(waits) == 1


@pytest.mark.parametrize("shared", [False, True], ids=["threads", "processes"])
def test_the_stager_of_an_async_save_copies_the_bytes_of_the_tensors_alone(shared):
    """For processes it shares the copies: by file, whole storages."""
    tensors, _ = exported()
    stager = StateDictStager(share_memory=shared)
    staged = list(stager.stage({"optim": dict(enumerate(tensors))})["optim"].values())
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in staged}
    assert sum(storage.nbytes() for storage in storages.values()) == sum(tensor.nbytes for tensor in tensors)
    assert all(storage.is_shared() == shared for storage in storages.values())
    assert all(torch.equal(a, b) for a, b in zip(staged, tensors, strict=True))


@pytest.mark.parametrize("refuse_from", [0, 1])
def test_refused_pinning_is_one_warning_and_pageable_memory(refuse_from):
    likes = [torch.empty(4096, 1024), torch.empty(2048, 1024), torch.empty(0, 4), torch.empty(())]
    dtypes = [torch.float32] * 4
    assert len(pack([like.numel() * FP32 for like in likes])[0]) > 1
    with pytest.warns(RuntimeWarning, match="could not be pinned") as warned:
        tensors = host_tensors(likes, dtypes, RoundingAllocator(refuse_from))
    assert len(warned) == 1
    for tensor, like in zip(tensors, likes, strict=True):
        assert tensor.shape == like.shape
        tensor.fill_(1)


def test_empty_tensors_and_none_at_all_ask_for_nothing():
    allocator = RoundingAllocator()
    assert host_tensors([], [], allocator) == []
    (empty,) = host_tensors([torch.empty(0, 5)], [torch.float32], allocator)
    assert empty.shape == (0, 5)
    assert allocator.asked == []


def test_the_allocator_is_asked_for_pinned_memory_by_default(monkeypatch):
    # Without a GPU torch refuses, which shows that it was asked.
    if torch.cuda.is_available():
        (tensor,) = host_tensors([torch.empty(8, 8)], [torch.float32])
        assert tensor.is_pinned()
        return
    with pytest.warns(RuntimeWarning, match="could not be pinned"):
        host_tensors([torch.empty(8, 8)], [torch.float32])
