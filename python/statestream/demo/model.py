"""A byte-level GPT (pre-norm, learned positions) of one and a half million parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["CONTEXT", "ByteGPT"]

VOCABULARY = 256
CONTEXT = 128
WIDTH = 192
HEADS = 6
LAYERS = 3


class ByteGPT(nn.Module):
    """Bytes, int64 of (batch, CONTEXT), to logits of the next byte, (batch, CONTEXT, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float32, device="cpu")
        self.position = nn.Parameter(torch.empty(CONTEXT, WIDTH, dtype=torch.float32, device="cpu"))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = _norm()
        self.head = _linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Linear(nn.Linear):
    """Multiplies in FP32 on a CPU, whatever the weights are in: many CPUs take ten times as long in BF16."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return super().forward(x)
        bias = None if self.bias is None else self.bias.float()
        return functional.linear(x.float(), self.weight.float(), bias).to(x.dtype)


def _linear(of: int, to: int, bias: bool = True) -> Linear:
    return Linear(of, to, bias=bias, dtype=torch.float32, device="cpu")


def _norm() -> nn.LayerNorm:
    return nn.LayerNorm(WIDTH, dtype=torch.float32, device="cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = _norm()
        self.qkv = _linear(WIDTH, 3 * WIDTH)
        self.out = _linear(WIDTH, WIDTH)
        self.mlp_norm = _norm()
        self.up = _linear(WIDTH, 4 * WIDTH)
        self.down = _linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self._attend(self.attention_norm(x)))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, width)
