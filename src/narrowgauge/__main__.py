"""``python -m narrowgauge`` is the command ``narrowgauge``."""

from __future__ import annotations

import sys

try:
    from narrowgauge.cli.main import main
except (
    KeyboardInterrupt
):  # of a rank that has just been started, for one; whoever started it says so
    sys.exit(130)

if __name__ == "__main__":
    main(prog_name="narrowgauge")
