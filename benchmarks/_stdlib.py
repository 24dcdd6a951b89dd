"""The tokens of ``./dev train``, which the benchmarks train on."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from first_minute import stdlib_tokens as stdlib_tokens
