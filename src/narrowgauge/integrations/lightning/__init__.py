"""A recipe and a run folder in Lightning's Trainer and in Fabric."""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowgauge.integrations import imported_when_asked

if TYPE_CHECKING:
    from narrowgauge.integrations.lightning.monitor import NarrowgaugeMonitor as NarrowgaugeMonitor
    from narrowgauge.integrations.lightning.precision import NarrowgaugePrecision as NarrowgaugePrecision

_HOMES = {"NarrowgaugeMonitor": "monitor", "NarrowgaugePrecision": "precision"}
__all__ = list(_HOMES)
__getattr__ = imported_when_asked(__name__, _HOMES)
