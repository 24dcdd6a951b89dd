"""``python -m narrowgauge`` is the command ``narrowgauge``."""

from __future__ import annotations

from narrowgauge.cli.main import main

if __name__ == "__main__":
    main(prog_name="narrowgauge")
