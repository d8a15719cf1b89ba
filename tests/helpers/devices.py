"""Host devices that stand for others."""

from __future__ import annotations

from statestream.device.queues import HostDevice

__all__ = ["Beyond"]


class Beyond(HostDevice):
    """Parameters are on the CPU, and the host's share of a step has to copy all the same, as from a GPU."""

    host_reaches_parameters = False
