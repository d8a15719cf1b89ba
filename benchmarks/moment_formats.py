"""Claim: a training run hardly notices in which format its moments are stored.

python -m benchmarks.moment_formats [--steps N]

The demo's model, a GPT of 1.5 million BF16 weights with masters, on the same batches from the same weights. Every run
leaves the first in the end, however small the cause: how far one does that merely begins with one weight moved by a
unit in its last place says what of a difference is chance.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from statestream import FusedAdam
from statestream.demo.data import Corpus
from statestream.demo.model import CONTEXT, ByteGPT
from statestream.demo.training import BATCH, LEARNING_RATE, WEIGHT_DECAY, deterministic
from torch import Tensor
from torch.nn import functional

from benchmarks.runner import Report

FORMATS: dict[str, dict[str, Any]] = {
    "FP32": {},
    "FP32, one weight moved": {},
    "BF16": {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    "BF16 by random bits": {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "stochastic_rounding": True},
    "FP16": {"exp_avg_dtype": "fp16", "exp_avg_sq_dtype": "fp16"},
    "FP8 and BF16": {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "bf16"},
    "FP8": {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"},
    "FP8 by random bits": {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8", "stochastic_rounding": True},
}
MOVED = "FP32, one weight moved"
AVERAGED = 50
"""Steps over which a loss is averaged."""


class Run:
    """One training run: losses, in nats a byte, and where its masters went."""

    def __init__(self, name: str, corpus: Corpus, steps: int):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = ByteGPT().to(torch.bfloat16)
        optimizer = FusedAdam(
            model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, master_weights=True, **FORMATS[name]
        )
        self.start = self._masters(model, optimizer)
        if name == MOVED:
            with torch.no_grad():  # its master follows
                first = model.blocks[0].qkv.weight[0]
                first[0] = torch.nextafter(first[0], torch.ones((), dtype=torch.bfloat16))
        self.losses: list[float] = []
        for step in range(steps):
            text, following = corpus.batch(0, step, BATCH, CONTEXT)
            loss = functional.cross_entropy(model(text).float().flatten(0, 1), following.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.losses.append(loss.item())
        self.end = self._masters(model, optimizer)
        report, count = optimizer.memory_report().host, sum(p.numel() for p in model.parameters())
        self.bytes = sum(n for kind, n in report.items() if kind.startswith("exp_avg")) / count

    @staticmethod
    def _masters(model: ByteGPT, optimizer: FusedAdam) -> Tensor:
        return torch.cat([optimizer.get_unscaled_state(p, "master_param").flatten() for p in model.parameters()])

    def final(self) -> float:
        last = self.losses[-AVERAGED:]
        return sum(last) / len(last)

    def apart(self, other: Run) -> float:
        """How far the weights are from the other's, in units of how far the other's went."""
        return ((self.end - other.end).norm() / (other.end - other.start).norm()).item()


def measure(steps: int, root: Path | None = None) -> Report:
    report = Report(
        "moment_formats",
        f"Moments in every format: {steps} steps of the demo's model",
        ["moments", "bytes a parameter", f"loss, last {AVERAGED}", "to FP32's", "largest difference", "weights apart"],
    )
    report.notes = [
        f"Loss in nats a byte. The largest difference is between means of {AVERAGED} steps, over the whole run. "
        "Weights apart: the distance from FP32's last weights, in units of how far those went from the first.",
        f"{MOVED}: by one unit in its last place, before the first step.",
    ]
    corpus = Corpus(root)
    with deterministic(torch.device("cpu")):
        runs: dict[str, Run] = {}
        for name in FORMATS:
            run = runs[name] = Run(name, corpus, steps)
            exact = runs["FP32"]
            far = max(abs(a - b) for a, b in zip(means(run.losses), means(exact.losses), strict=True))
            change = f"{run.final() - exact.final():+.4f}"
            report.add(name, f"{run.bytes:.2f}", f"{run.final():.4f}", change, f"{far:.4f}", f"{run.apart(exact):.3f}")
            report.series[name] = list(enumerate(run.losses, 1))
    return report


def means(losses: list[float]) -> list[float]:
    """Over each AVERAGED steps, or all where there are fewer."""
    width = min(AVERAGED, len(losses))
    return [sum(losses[i : i + width]) / width for i in range(len(losses) - width + 1)]


def plot_of(series: dict[str, list[tuple[float, float]]]) -> Callable[..., None]:
    exact = means([loss for _, loss in series["FP32"]])

    def plot(left, right) -> None:
        for number, (name, points) in enumerate(series.items()):
            line = {"label": name, "color": f"C{number}", "linewidth": 1}
            smooth = means([loss for _, loss in points])
            steps = range(len(points) - len(smooth) + 1, len(points) + 1)
            left.plot(steps, smooth, **line)
            if name != "FP32":
                right.plot(steps, [a - b for a, b in zip(smooth, exact, strict=True)], **line)
        left.set(xlabel="step", ylabel=f"loss, nats a byte, mean of {AVERAGED} steps")
        right.set(xlabel="step", ylabel="the same, less FP32's")
        for axes in (left, right):
            axes.grid(alpha=0.3)
            axes.legend(fontsize=7)

    return plot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    report = measure(parser.parse_args().steps)
    print(report.write(plot_of(report.series), panels=2))


if __name__ == "__main__":
    main()
