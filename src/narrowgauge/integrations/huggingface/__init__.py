"""A recipe in Hugging Face's ``Trainer``, and in TRL's, which are subclasses of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowgauge.integrations import imported_when_asked

if TYPE_CHECKING:
    from narrowgauge.integrations.huggingface.callback import NarrowgaugeCallback as NarrowgaugeCallback
    from narrowgauge.integrations.huggingface.trainer import NarrowgaugeTrainer as NarrowgaugeTrainer
    from narrowgauge.integrations.huggingface.training_arguments import optimizer_factory as optimizer_factory

_HOMES = {"NarrowgaugeCallback": "callback", "NarrowgaugeTrainer": "trainer", "optimizer_factory": "training_arguments"}
__all__ = list(_HOMES)
__getattr__ = imported_when_asked(__name__, _HOMES)
