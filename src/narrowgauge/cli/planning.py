"""``narrowgauge plan``: memory, speed, machines, and conclusions from measured times and runs."""

import textwrap
from collections.abc import Sequence
from typing import Any

import click

from narrowgauge.cli import flags
from narrowgauge.planner.job import FOREIGN_RULES
from narrowgauge.planner.model import CONFIGS
from narrowgauge.planner.program import FROZEN_BITS, PROGRAMS
from narrowgauge.spec import tables
from narrowgauge.spec.update_rules import UPDATE_RULES

WIDTH = 120
"""Columns of an answer."""
_COUNT = click.IntRange(min=1)
_WIDTHS = click.Choice([*FROZEN_BITS])


@click.group("plan", short_help="What fits, how fast, on which machines.")
def plan_group() -> None:
    """Say what fits, how fast, on which machines, and why; nothing is trained.

    \b
    narrowgauge plan run --model llama-8b --chip H100-SXM --chips 8
    narrowgauge plan next run.toml chips=128 sequence_length=16384
    narrowgauge plan scaling 128:10d,256:7d --at 512
    """


@plan_group.command(
    "run", short_help="What fits, how fast, on which machines.",
    epilog=f"Presets beside those of narrowgauge show models: {', '.join(CONFIGS)}.",
)  # fmt: skip
@click.option(
    "--model", metavar="TEXT", required=True,
    help="A preset, a Hugging Face config.json, or its folder.",
)  # fmt: skip
@click.option(
    "--recipe", "--recipes", "recipes", metavar="A,B,…", help="[default: master and our own]"
)
@click.option(
    "--chip", metavar="NAME", help="A chip (narrowgauge show chips), or a TOML file of your own."
)
@click.option("--chips", type=_COUNT, metavar="N", help="Number of chips.  [default: 1]")
@click.option("--sequence-length", type=_COUNT, metavar="N", help="[default: 4096 at most]")
@click.option(
    "--tokens-per-step", metavar="X", type=float, help="[default: four million, of adapters 65,536]"
)
@click.option(
    "--tokens", metavar="X", type=float, help="Tokens of the whole run (300e9), for days."
)
@click.option(
    "--program", metavar="NAME,FIELD=X,…",
    help=f"The training loop: {', '.join(PROGRAMS)}; fields such as loss=chunked, offload=true.",
)  # fmt: skip
@click.option("--lora", type=_COUNT, metavar="R", help="Train adapters of rank R.")
@click.option("--base", type=_WIDTHS, help="Format of frozen weights in layers.")
@click.option("--experts", type=_WIDTHS, help="Format of frozen experts.")
@click.option(
    "--rule",
    "optimizer",
    type=click.Choice([*UPDATE_RULES, *FOREIGN_RULES]),
    help="[default: adamw]",
)
@click.option(
    "--layout", metavar="FIELD=N,…",
    help="Values of data, shard, zero, tensor, pipeline, micro_batch, …  [default: all]",
)  # fmt: skip
@flags.as_json
def run_command(as_json: bool, **asked: Any) -> None:
    """Say whether a model fits, how fast it trains, on which machines, and why.

    \b
    narrowgauge plan run --model llama-8b --chip H100-SXM --chips 8
    narrowgauge plan run --model config.json --chip mine.toml --chips 32 --tokens 300e9
    """
    from narrowgauge.planner.plan import plan

    answer = plan(**flags.passed(asked))
    _show(answer.row(), answer.tables(), answer.sentences(), as_json)


@plan_group.command("next", short_help="Tell one measured run, get the next.")
@click.argument("run", metavar="RUN")
@click.argument("changes", metavar="NAME=VALUE…", nargs=-1)
@flags.as_json
def next_command(run: str, changes: tuple[str, ...], as_json: bool) -> None:
    """Plan another run, corrected by RUN, which was measured. What is not said is RUN's.

    RUN is a run folder, a log (of torchtitan, trainer_state.json), or a TOML file: model, chip,
    chips, sequence_length, recipes, layout, program, tokens_per_second (of all chips) or
    tokens_per_second_per_chip, peak_gb; log names a log. Without a file, write these in quotes.

    \b
    narrowgauge plan next run.toml chips=128 sequence_length=16384
    narrowgauge plan next "log=train.log model=llama-8b chip=H100-SXM chips=8" chips=128
    narrowgauge plan next "model=llama-8b chip=H100-SXM chips=8 tokens_per_second=53336" chips=128
    """
    from narrowgauge.planner.layouts import read_values
    from narrowgauge.planner.measured_logs import read_measured

    measured = read_measured(run)
    answer = measured.next(**read_values(changes))
    if as_json:
        return tables.write_json({**answer.row(), "assumed": measured.assumed})
    return click.echo(f"{measured}\n{answer}")


@plan_group.command("scaling", short_help="What keeps more chips from saving time.")
@click.argument("measured", metavar="N:TIME,…")
@click.option(
    "--at", metavar="N", type=_COUNT, multiple=True, help="Number of chips to say the time for."
)
@flags.as_json
def scaling_command(measured: str, at: tuple[int, ...], as_json: bool) -> None:
    """Say what does not scale, from measured times of one job on several numbers of chips.

    narrowgauge plan scaling 128:10d,256:7d --at 512
    """
    from narrowgauge.planner.scaling import read_points, scaling_row

    row = scaling_row(read_points(measured), at)
    _show(row, [], row["sentences"], as_json)


def _show(row: Any, parts: list[tables.Table], sentences: Sequence[str], as_json: bool) -> None:
    """Print an answer as JSON, or as tables and sentences."""
    if as_json:
        return tables.write_json(row)
    tables.write(parts)
    if parts:
        click.echo()
    for line in sentences:
        click.echo(textwrap.fill(line, WIDTH, subsequent_indent="  ", break_long_words=False))
    return None
