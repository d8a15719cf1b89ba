"""The share of the host at which both sides of a step end together, found from how long they take."""

from __future__ import annotations

__all__ = ["Balance"]

SKIPPED = 1
"""First steps that are not measured: host memory is touched for the first time, kernels are loaded."""

MEASURED = 5

LEAST = 0.02
"""Share that each side has while it is measured."""


class Balance:
    """`fraction` is the host's share of the bytes of state that are stepped, to be used in the next step.

    Steps are measured until `settled`; from then on it stays the same. Each measured step gives both rates, and the
    next share is the one at which they would have ended together. In the end it is the share of the quickest step, or
    one side alone where that promises to be quicker still.
    """

    def __init__(self) -> None:
        self.fraction = 0.5
        self.steps = 0
        self._quickest: tuple[float, float] | None = None

    @property
    def settled(self) -> bool:
        return self.steps >= SKIPPED + MEASURED

    def learn(self, device_bytes: int, device_seconds: float, host_bytes: int, host_seconds: float) -> None:
        """Takes in one step, made with `fraction`: bytes of state that each side updated, and the time from the begin
        of the step until its last result was in its place."""
        if self.settled:
            return
        self.steps += 1
        if self.steps <= SKIPPED or not device_bytes or not host_bytes:
            return
        device, host = device_bytes / max(device_seconds, 1e-9), host_bytes / max(host_seconds, 1e-9)
        took = (max(device_seconds, host_seconds), self.fraction)
        self._quickest = min(took, self._quickest or took)
        self.fraction = min(max(host / (host + device), LEAST), 1.0 - LEAST)
        if self.settled:
            total = device_bytes + host_bytes
            self.fraction = min(self._quickest, (total / device, 0.0), (total / host, 1.0))[1]
