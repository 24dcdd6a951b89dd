"""torchtitan, or one line on what it lacks: its own imports end deep in a module for mixtures of experts.

Imported before torchtitan by every module here that imports it.
"""

from __future__ import annotations

from narrowgauge.errors import NarrowgaugeError

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
