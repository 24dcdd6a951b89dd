"""A recipe and a run folder in torchtitan's configs; without torchtitan, one line on what is missing."""

from __future__ import annotations

from narrowgauge._public import offer
from narrowgauge.errors import NarrowgaugeError

__getattr__, __dir__ = offer(__name__)

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
