"""A recipe and a run folder in torchtitan's configs; without torchtitan, one line on what is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.integrations import imported_when_asked

if TYPE_CHECKING:
    from narrowgauge.integrations.torchtitan.converter import NarrowgaugeConverter as NarrowgaugeConverter
    from narrowgauge.integrations.torchtitan.metrics import NarrowgaugeMetrics as NarrowgaugeMetrics
    from narrowgauge.integrations.torchtitan.metrics import with_record as with_record
    from narrowgauge.integrations.torchtitan.optimizers_container import NarrowgaugeAdamW as NarrowgaugeAdamW
    from narrowgauge.integrations.torchtitan.optimizers_container import narrowgauge_adamw as narrowgauge_adamw
    from narrowgauge.integrations.torchtitan.optimizers_container import with_recipe as with_recipe

_HOMES = {
    "NarrowgaugeAdamW": "optimizers_container",
    "NarrowgaugeConverter": "converter",
    "NarrowgaugeMetrics": "metrics",
    "narrowgauge_adamw": "optimizers_container",
    "with_recipe": "optimizers_container",
    "with_record": "metrics",
}
__all__ = list(_HOMES)
__getattr__ = imported_when_asked(__name__, _HOMES)

# torchtitan's own imports of what is missing end deep in a module for mixtures of experts.
_ADVICE = {
    "torchtitan": "pip install 'narrowgauge[torchtitan]' (Python 3.11 or newer).",
    "triton": "PyTorch's wheels for CUDA bring it; to another on Linux, pip install triton adds it.",
}

try:
    import torchtitan.components.optimizer
    import torchtitan.models.common.linear  # noqa: F401
except ModuleNotFoundError as error:
    missing = (error.name or "").partition(".")[0]
    raise NarrowgaugeError(
        f"torchtitan was imported, and {missing} was not found.", _ADVICE.get(missing, f"pip install {missing}")
    ) from None
