"""The folder of caches that runs share: compiled kernels and tokenized text."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """``NARROWGAUGE_CACHE``, or ``narrowgauge`` in the user's cache folder of this platform."""
    if chosen := os.environ.get("NARROWGAUGE_CACHE"):
        return Path(chosen)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "narrowgauge"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "narrowgauge"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "narrowgauge"
