"""One training run that can be stepped, its parts built from a seed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from statestream import FusedAdam
from statestream.demo.data import Corpus
from statestream.demo.model import CONTEXT, ByteGPT
from statestream.demo.settings import Settings

__all__ = ["BATCH", "STAGING_BYTES", "Training", "World", "deterministic"]

BATCH = 8
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.1

STAGING_BYTES = 2**20
"""Device memory of an export, small beside this small model's state so that the bound is seen to hold."""


@dataclass(frozen=True)
class World:
    """The ranks that train one model together, by FSDP2; each takes an equal part of every batch."""

    rank: int = 0
    ranks: int = 1


class Training:
    """A model in BF16 with its optimizer: FP32 masters, moments as the settings say.

    `seed` is that of the initial weights; the batches are the settings' own, the same for every run. With a `world`,
    whose process group is there, the model is sharded over its ranks.
    """

    def __init__(self, settings: Settings, corpus: Corpus, seed: int, world: World | None = None) -> None:
        self.settings = settings
        self.corpus = corpus
        self.world = world
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = ByteGPT()
        self.model = model.to(settings.device, torch.bfloat16)
        if world is not None:
            _shard(self.model, settings.device, world)
        self.optimizer = FusedAdam(
            self.model.named_parameters(),
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            master_weights=True,
            exp_avg_dtype=settings.moments,
            exp_avg_sq_dtype=settings.moments,
            state_dict_cpu_offload=True,
            export_staging_bytes=STAGING_BYTES,
        )

    def run(self, first: int, end: int, on_step: Callable[[float], None]) -> list[float]:
        """Takes steps `first` up to, not including, `end`; returns the loss before each, in nats a byte, over all
        ranks."""
        losses = []
        for step in range(first, end):
            text, following = self._batch(step)
            logits = self.model(text).float()
            loss = functional.cross_entropy(logits.flatten(0, 1), following.flatten())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(self._mean(loss.detach()))
            on_step(losses[-1])
        return losses

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        text, following = self.corpus.batch(self.settings.seed, step, BATCH, CONTEXT)
        if self.world is not None:
            text, following = (part.chunk(self.world.ranks)[self.world.rank] for part in (text, following))
        return text.to(self.settings.device), following.to(self.settings.device)

    def _mean(self, loss: Tensor) -> float:
        if self.world is not None:
            dist.all_reduce(loss)
            loss /= self.world.ranks
        return loss.item()


def _shard(model: ByteGPT, device: torch.device, world: World) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (world.ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Makes torch's part of a step repeat its bits; statestream's does so by itself."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS refuses
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads memory before writing it
    # The one attention whose backward pass is deterministic on every GPU.
    attention = sdpa_kernel(SDPBackend.MATH) if device.type == "cuda" else nullcontext()
    try:
        with attention:
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill
