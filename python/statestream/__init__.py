"""statestream: Adam whose state is small, whose checkpoint export is bounded, and whose step streams."""

from statestream.fused_adam import FusedAdam

__all__ = ["FusedAdam"]
__version__ = "0.1.0"
