"""Two trainings from one start on one text, at the same 8 bytes per parameter: what each lost.

``./dev train`` runs this. Arguments are those of ``narrowgauge train``, without --recipe and --out.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import click

from narrowgauge.cli import train as train_command
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.runs.record import read_run
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.console import Console
from narrowgauge.trainer.loop import train

RECIPES = ("bfloat16/naive", "bfloat16/word")
# A rate as late in a run: the updates of a bfloat16 weight are then near half its spacing, and naive rounding begins to tell.
SETTINGS = ["--model", "llama-1m", "--steps", "300", "--lr", "5e-4", "--eval-every", "0", "--log-every", "50"]


def verdict(naive: dict[str, float], word: dict[str, float]) -> str:
    """What the two runs show, in a sentence."""
    gap = naive["val_loss"] - word["val_loss"]
    lost = 1 - naive["edq"]
    if lost < 0.01:
        return "At these settings naive bfloat16 lost nothing to speak of: its updates are large against its spacing."
    return (
        f"naive bfloat16 rounded {lost:.0%} of its updates away without a word from anyone, and ends {gap:+.3f} nats "
        f"{'behind' if gap > 0 else 'from'} word, which stores as many bytes and lost {max(0.0, 1 - word['edq']):.1%}."
    )


def main() -> None:
    """Train both, then compare."""
    try:
        flags = train_command.make_context("./dev train", [*SETTINGS, *sys.argv[1:]]).params
        config = TrainConfig(**{name: value for name, value in flags.items() if value is not None})
        folders = [train(replace(config, recipe=recipe)) for recipe in RECIPES]
    except NarrowgaugeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
    except click.exceptions.Exit as stop:  # --help
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    summaries = [read_run(Path(folder)).summary or {} for folder in folders]
    print()
    Console(1, 1).summary(summaries)
    print(f"\n{verdict(*summaries)}")
    print(f"The runs lie in {folders[0]} and {folders[1]}.")
    print(f'Next: .venv/bin/narrowgauge sample {folders[1]} "def main("   or   .venv/bin/narrowgauge train --help')


if __name__ == "__main__":
    main()
