"""Where things are kept that cost seconds to make and belong to no run: compiled kernels, tokenised text."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """Where what many runs share is kept: ``NARROWGAUGE_CACHE``, or the user's cache of this platform."""
    if chosen := os.environ.get("NARROWGAUGE_CACHE"):
        return Path(chosen)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "narrowgauge"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "narrowgauge"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "narrowgauge"
