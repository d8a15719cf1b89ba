"""The least intrusive way of training that fits a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from statestream.formats import FP32, REMAINDERS
from statestream.planner.estimate import Estimate, estimate
from statestream.planner.formats import MOMENTS
from statestream.planner.mesh import Share
from statestream.planner.quantities import BadOption
from statestream.planner.settings import DEFAULT_CHUNK, Settings

__all__ = ["Proposal", "propose"]


@dataclass(frozen=True)
class Proposal:
    """`changes` says what differs from the way that was asked for."""

    changes: str
    settings: Settings
    estimate: Estimate
    fits: bool

    @property
    def needed(self) -> int:
        """Device bytes without the reserve."""
        return self.estimate.device_peak


def propose(
    shares: Sequence[Share], asked: Settings, default_dtype: str, gpu_memory: int, reserve: int
) -> list[Proposal]:
    """Ways from the least to the most intrusive, up to the first that fits; all, where none does.

    First what changes no training at all (where an export goes), then what changes no precision (the masters' other
    halves), then precision (BF16 moments), then what makes each step wait for the link, and last what makes backward
    wait for it too, and a trainer clip by this package's function.

    A way fits where weights, gradients and state leave room for `reserve` (activations, gathered layers, the context),
    which a step, an export and a load may use in their turn.
    """
    found: list[Proposal] = []
    for changes, settings in _ladder(asked, _has_bf16(shares, asked, default_dtype)):
        try:
            made = estimate(shares, settings, default_dtype)
        except BadOption:
            if settings is asked:
                raise
            continue  # so much state that the proposed chunk is none of it
        extra = max(reserve, made.device_peak - made.resident)
        found.append(Proposal(changes, settings, made, made.resident + extra <= gpu_memory))
        if found[-1].fits:
            break
    return found


def _has_bf16(shares: Sequence[Share], asked: Settings, default_dtype: str) -> bool:
    trained = {s.parameter.dtype or default_dtype for s in shares if s.parameter.trained}
    names = {asked.weights.name} if asked.weights else trained
    return "bf16" in names and names <= {"bf16", "fp32"}


def _ladder(asked: Settings, bf16_weights: bool) -> list[tuple[str, Settings]]:
    ladder = [("as asked", asked)]
    if not asked.offload:
        ladder += _on_the_device(asked, bf16_weights)
        ladder.append(("state in host memory", asked.with_(offload=True, chunk=DEFAULT_CHUNK)))
    elif asked.chunk is None or asked.chunk > DEFAULT_CHUNK:
        ladder.append(("state in chunks of 1 GiB", asked.with_(chunk=DEFAULT_CHUNK)))
    if not asked.offload_gradients:
        chunk = DEFAULT_CHUNK if asked.chunk is None else min(asked.chunk, DEFAULT_CHUNK)
        streamed = asked.with_(offload=True, chunk=chunk, offload_gradients=True)
        ladder.append(("state and gradients in host memory", streamed))
    return ladder


def _on_the_device(asked: Settings, bf16_weights: bool) -> list[tuple[str, Settings]]:
    ladder: list[tuple[str, Settings]] = []
    now, said = asked, []
    if not now.host_export:
        now, said = now.with_(host_export=True), ["export to the host"]
        ladder.append((", ".join(said), now))
    if now.master is FP32 and bf16_weights:
        now, said = now.with_(master=REMAINDERS), [*said, "remainders for masters"]
        ladder.append((", ".join(said), now))
    if FP32 in (now.exp_avg, now.exp_avg_sq):
        bf16 = MOMENTS["bf16"]
        moments = [bf16 if stored is FP32 else stored for stored in (now.exp_avg, now.exp_avg_sq)]
        now, said = now.with_(exp_avg=moments[0], exp_avg_sq=moments[1]), [*said, "BF16 moments"]
        ladder.append((", ".join(said), now))
    return ladder
