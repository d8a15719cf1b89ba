from __future__ import annotations

from offload.conftest import on_device

__all__ = ["on_device"]
