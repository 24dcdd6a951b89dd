"""A recipe in Hugging Face's ``Trainer``, and in TRL's, which are subclasses of it."""

from __future__ import annotations

from narrowgauge._public import offer

__getattr__, __dir__ = offer(__name__)
