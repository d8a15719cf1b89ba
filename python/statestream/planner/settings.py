"""What is asked of the optimizer, in a plan's terms."""

from __future__ import annotations

from dataclasses import dataclass, replace

from statestream.formats import FP32, REMAINDERS, Format
from statestream.planner.formats import MASTERS, MOMENTS, WEIGHTS, format_named
from statestream.planner.quantities import BadOption, parse_bytes

__all__ = ["DEFAULT_CHUNK", "DEFAULT_STAGING", "LEAST_STAGING", "Settings"]

DEFAULT_STAGING = 64 << 20
"""FusedAdam's export_staging_bytes."""
LEAST_STAGING = 2048
DEFAULT_CHUNK = 1 << 30
"""Bytes of a proposed step_chunk_bytes."""


@dataclass(frozen=True)
class Settings:
    """Formats of what is stored, and where.

    `weights` and `grads` None: as the model says. `master` None: no masters; weights that are stored as FP32 have none
    in any case. `chunk` is CPUOffloadOptimizer's step_chunk_bytes (None: one pass), `offload_gradients` its argument of
    that name, both without meaning unless `offload`. `host_export` is state_dict_cpu_offload, `staging`
    export_staging_bytes.
    """

    weights: Format | None = None
    grads: Format | None = None
    exp_avg: Format = FP32
    exp_avg_sq: Format = FP32
    master: Format | None = FP32
    offload: bool = False
    chunk: int | None = None
    host_export: bool = False
    staging: int = DEFAULT_STAGING
    offload_gradients: bool = False

    @classmethod
    def checked(
        cls,
        *,
        weights: str | None = None,
        grads: str | None = None,
        moments: str = "fp32",
        masters: str = "fp32",
        offload: bool = False,
        chunk: str | int | None = None,
        export: str = "device",
        staging: str | int = DEFAULT_STAGING,
        offload_gradients: bool = False,
    ) -> Settings:
        """From options as people write them; `moments` is one format, or two with a comma between: exp_avg's and
        exp_avg_sq's. BadOption names the one that cannot be."""
        pair = [format_named("moments", part, MOMENTS) for part in str(moments).split(",")]
        if len(pair) > 2:
            raise BadOption("moments", f"{moments!r} names {len(pair)} formats; Adam has two moments")
        if export not in ("device", "host"):
            raise BadOption("export", f"{export!r} is not supported; use device, host")
        size = parse_bytes("staging", staging)
        if size < LEAST_STAGING:
            raise BadOption("staging", f"{staging!r} is too small; use {LEAST_STAGING} bytes or more")
        made = cls(
            weights=None if weights is None else format_named("weights", weights, WEIGHTS),
            grads=None if grads is None else format_named("grads", grads, WEIGHTS),
            exp_avg=pair[0],
            exp_avg_sq=pair[-1],
            master=format_named("masters", masters, MASTERS),
            offload=offload or offload_gradients or chunk is not None,
            chunk=None if chunk is None else parse_bytes("chunk", chunk),
            host_export=export == "host",
            staging=size,
            offload_gradients=offload_gradients,
        )
        if made.weights is not None:
            made.check_weights(made.weights)
        return made

    def check_weights(self, weights: Format) -> None:
        """BadOption where such masters are asked for with weights of which none has any."""
        if self.master is REMAINDERS and weights.name not in ("bf16", "fp32"):
            raise BadOption(
                "masters", f"remainders are the bits that BF16 weights lack, and weights are {weights.name}"
            )

    def master_of(self, weights: Format) -> Format | None:
        """FP32 weights are their own masters; quantised ones have FP32 masters whatever is asked, and FP16 ones in the
        place of remainders."""
        if weights.name == "fp32" or self.master is None:
            return None
        whole = weights.name == "fp8" or (weights.name == "fp16" and self.master is REMAINDERS)
        return FP32 if whole else self.master

    def states(self, weights: Format) -> dict[str, Format]:
        """Format of each state of a parameter that is stored in `weights`, by its key in `optimizer.state`."""
        states = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        master = self.master_of(weights)
        return states if master is None else {**states, "master_param": master}

    def call(self) -> str:
        """The Python that asks for it."""
        arguments = ["params"]
        if self.master is not None:
            arguments.append("master_weights=True")
        if self.master is REMAINDERS:
            arguments.append("store_param_remainders=True")
        elif self.master is not None and self.master is not FP32:
            arguments.append(f'master_weight_dtype="{self.master.name}"')
        for name in ("exp_avg", "exp_avg_sq"):
            stored: Format = getattr(self, name)
            if stored is not FP32:
                arguments.append(f'{name}_dtype="{stored.name}"')
        if self.host_export and not self.offload:
            arguments.append("state_dict_cpu_offload=True")
        if self.staging != DEFAULT_STAGING and not self.offload:
            arguments.append(f"export_staging_bytes={self.staging}")
        adam = f"FusedAdam({', '.join(arguments)})"
        if not self.offload:
            return adam
        more = "" if self.chunk is None else f", step_chunk_bytes={self.chunk}"
        return f"CPUOffloadOptimizer({adam}{more}{', offload_gradients=True' if self.offload_gradients else ''})"

    def with_(self, **changes: object) -> Settings:
        return replace(self, **changes)
