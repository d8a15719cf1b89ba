"""State in host memory, streamed through the device in chunks."""

from statestream.offload.optimizer import CPUOffloadOptimizer

__all__ = ["CPUOffloadOptimizer"]
