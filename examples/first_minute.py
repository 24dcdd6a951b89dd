"""Two trainings from one start on one text, at the same 8 bytes per parameter: what each lost.

``./dev train`` runs this. Arguments are those of ``narrowgauge train``, without --recipe and --out; a --config file
takes the place of the settings below, and flags overrule both.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from narrowgauge.cli import train as train_command
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.runs.record import read_run
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.console import Console
from narrowgauge.trainer.loop import train

RECIPES = ("bfloat16/naive", "bfloat16/word")
# A rate as late in a run: the updates of a bfloat16 weight are then near half its spacing, and naive rounding begins to tell.
SETTINGS = TrainConfig(model="llama-1m", steps=300, lr=5e-4, eval_every=0, log_every=50)


def asked(words: list[str]) -> TrainConfig:
    """The settings of both trainings, from the words of a command line."""
    flags = train_command.make_context("./dev train", words).params
    file = flags.pop("file")
    given = {name: value for name, value in flags.items() if value is not None}
    config = replace(TrainConfig.from_toml(file) if file else SETTINGS, **given)
    if "recipe" in given or config.out is not None:
        raise click.UsageError(
            f"{' and '.join(RECIPES)} are trained, each in a folder of its own: leave out --recipe and --out."
        )
    return config


def verdict(naive: dict[str, Any], word: dict[str, Any]) -> str:
    """What the two runs show, in a sentence."""
    gap = naive["val_loss"] - word["val_loss"]
    ends = f"ends {abs(gap):.3f} nats {'behind' if gap > 0 else 'ahead of'} word"
    if naive["edq"] is None or word["edq"] is None:
        return f"naive bfloat16 {ends}, which stores as many bytes. What each lost was not audited."
    lost = 1 - naive["edq"]
    if lost < 0.01:
        return "At these settings naive bfloat16 lost nothing to speak of: its updates are large against its spacing."
    return (
        f"naive bfloat16 rounded {lost:.0%} of its updates away (nothing but this audit would have said so) and {ends}, "
        f"which stores as many bytes and lost {max(0.0, 1 - word['edq']):.1%}."
    )


def command(*words: str | Path) -> str:
    """A line that runs ``narrowgauge`` with these words from here."""
    script = shutil.which("narrowgauge", path=str(Path(sys.executable).parent))
    if script is None:
        return shlex.join([sys.executable, "-m", "narrowgauge", *map(str, words)])
    path = Path(script)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return shlex.join([str(shown), *map(str, words)])


def compare(folders: list[Path]) -> None:
    """Say what the two runs show, or how to go on with them."""
    summaries = [read_run(folder).summary for folder in folders]
    finished = [summary for summary in summaries if summary is not None]
    print()
    if len(finished) == len(folders):
        Console(1, 1).summary(finished)
        print(f"\n{verdict(*finished)}")
    print(f"The runs lie in {folders[0]} and {folders[1]}.")
    if len(finished) == len(folders):
        print(f"Next: {command('sample', folders[1], 'def main(')}   or   {command('train', '--help')}")
        return
    print("They were stopped before their last step, as asked. Go on with:")
    for folder in folders:
        print(f"  {command('resume', folder)}")


def main() -> None:
    """Train both, then compare."""
    try:
        config = asked(sys.argv[1:])
        compare([train(replace(config, recipe=recipe)) for recipe in RECIPES])
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


if __name__ == "__main__":
    main()
