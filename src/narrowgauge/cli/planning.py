"""``narrowgauge plan``: memory, speed, machines, and conclusions from measured times. One command for each question."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from narrowgauge.cli import flags
from narrowgauge.cli.exit_status import help_without_command
from narrowgauge.planner.efficiency import SOFTWARE
from narrowgauge.planner.layouts import read_layout
from narrowgauge.planner.model import PRESET_NAMES
from narrowgauge.planner.program import BASE_BITS, PROGRAMS, read_program
from narrowgauge.spec import tables
from narrowgauge.spec.update_rules import UPDATE_RULES

_SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def _amount(least: float) -> flags.Parsed:
    """Return a parser of a number such as ``10e9`` or ``10B``."""

    def read(text: str) -> float:
        scale = _SUFFIXES.get(text.strip()[-1:].lower(), 1.0)
        try:
            number = float(text if scale == 1.0 else text.strip()[:-1]) * scale
        except ValueError:
            number = math.nan
        if not least <= number < 1e18:
            raise click.BadParameter(
                f"'{text}' is not a number of at least {least:g}, such as 10e9 or 10B."
            )
        return number

    return flags.Parsed(read)


def _counts(text: str) -> list[int]:
    """Parse whole numbers with commas between them."""
    parts = _names(text)
    if not parts or not all(part.isdecimal() and 0 < int(part) < 10**7 for part in parts):
        raise click.BadParameter(f"'{text}' is not a list of numbers of at least 1, such as 8,16.")
    return [int(part) for part in parts]


def _names(text: str) -> list[str]:
    return [name for name in map(str.strip, text.split(",")) if name]


@click.group(
    "plan", short_help="What fits, how fast, on which machines.", invoke_without_command=True
)
@click.pass_context
def plan_group(context: click.Context) -> None:
    """Say what fits, how fast, on which machines, and why; nothing is trained.

    \b
    narrowgauge plan run --model llama-8b --chip H100-SXM --chips 8
    narrowgauge plan state --params 10e9 --recipe bfloat16/states8
    narrowgauge plan scaling 128:10d,256:7d --at 512,1024
    """
    help_without_command(context)


# Parameters have the names of the arguments of planner.plan.plan.
_recipe = click.option(
    "--recipe", "recipes", metavar="A,B,…|all", type=flags.RECIPES_OR_ALL,
    help="Recipes or .toml files; all: every one that the chips multiply natively.  [default: the usual six]",
)  # fmt: skip
_chip = click.option(
    "--chip", metavar="A,B,…", type=flags.Parsed(_names), help="Chips (narrowgauge show chips)."
)
_chips = click.option(
    "--chips",
    metavar="N,M,…",
    type=flags.Parsed(_counts),
    help="Numbers of chips; several are compared.  [default: 1]",
)
_layout = click.option(
    "--layout", metavar="FIELD=N,…", type=flags.Parsed(read_layout),
    help="Layouts to consider: values of data, shard, zero, tensor, pipeline, …; fsdp2 (what train runs); ddp.  [default: all]",
)  # fmt: skip
_optimizer = click.option(
    "--rule", "--optimizer", "optimizer",
    type=click.Choice([name for name, row in UPDATE_RULES.items() if row.moments is not None]),
    help="The update rule whose states are counted.  [default: adamw]",
)  # fmt: skip


@plan_group.command(
    "run", short_help="What fits, how fast, on which machines.",
    epilog=f"Presets besides those of narrowgauge show models: {', '.join(PRESET_NAMES)}.",
)  # fmt: skip
@click.option(
    "--model", metavar="TEXT", required=True, help="A preset, or a Hugging Face config.json."
)
@_recipe
@_chip
@_chips
@click.option(
    "--interconnect", "interconnect_gbit_per_second", type=_amount(1e-3), metavar="X",
    help="Rate of a node's network, Gbit/s in one direction.  [default: as usual for the chip]",
)  # fmt: skip
@click.option(
    "--cluster", metavar="FILE", multiple=True, type=click.Path(path_type=Path),
    help="A TOML file of chips, nodes and links, instead of --chip; several are compared.",
)  # fmt: skip
@click.option(
    "--sequence-length",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens per sequence.  [default: 4096 at most]",
)
@click.option(
    "--tokens-per-step", type=_amount(1), metavar="X", help="Tokens per step.  [default: by chips]"
)
@click.option(
    "--tokens", type=_amount(1), metavar="X", help="Tokens of the whole run (300e9), for days."
)
@click.option(
    "--days",
    type=_amount(1e-3),
    metavar="X",
    help="Days of the whole run, instead of --chips: the fewest chips.",
)
@click.option(
    "--software", type=click.Choice(list(SOFTWARE)),
    help="The libraries and years whose speed is planned.  [default: those usual on the chip]",
)  # fmt: skip
@click.option(
    "--program", metavar="NAME,FIELD=X,…", type=flags.Parsed(read_program),
    help=f"The training loop: {', '.join(PROGRAMS)}; fields such as loss=chunked, kernels=eager, release=true, offload=true.",
)  # fmt: skip
@click.option(
    "--lora",
    type=click.IntRange(min=1),
    metavar="R",
    help="Train adapters of rank R over frozen weights.",
)
@click.option(
    "--base",
    type=click.Choice(list(BASE_BITS)),
    help="Format of frozen weights.  [default: bfloat16]",
)
@_optimizer
@_layout
@click.option(
    "--explain",
    is_flag=True,
    help="Print every term of the best option: formula, interval, source.",
)
@flags.json_object
def run_command(as_json: bool, explain: bool, days: float | None, **asked: Any) -> None:
    """Say whether a model fits, how fast it trains, on which machines, and why.

    \b
    narrowgauge plan run --model llama-8b --chip H100-SXM --chips 8
    narrowgauge plan run --model config.json --cluster cluster.toml --tokens 300e9
    narrowgauge plan run --model llama-8b --chip H100-SXM --tokens 300e9 --days 14
    """
    from narrowgauge.planner.plan import plan, plan_within

    answer = plan_within(days, **flags.given(asked)) if days else plan(**flags.given(asked))
    parts = [*answer.tables(), *(answer.explanation() if explain else [])]
    _show(answer.row(), parts, answer.sentences(), as_json)


@plan_group.command("state", short_help="Bytes of weights, gradients and optimizer states.")
@click.option(
    "--params", type=_amount(1), metavar="X", required=True, help="The number of parameters (10e9)."
)
@click.option(
    "--recipe", "recipes", metavar="A,B,…", type=flags.RECIPES_OR_ALL,
    help="Recipes or .toml files.  [default: every storage of bfloat16 weights]",
)  # fmt: skip
@_chip
@_chips
@_optimizer
@_layout
@flags.json_list
def state_command(as_json: bool, **asked: Any) -> None:
    """Count the state of a number of parameters: weights, gradients and optimizer states.

    narrowgauge plan state --params 10e9 --recipe bfloat16/states8
    """
    from narrowgauge.planner.state import SENTENCES, plan_state, state_table

    rows = plan_state(**flags.given(asked))
    _show(rows, [state_table(rows, asked["params"])], SENTENCES, as_json)


def _show(
    row: Any,
    parts: list[tables.Table],
    sentences: Sequence[str],
    as_json: bool,
    first: Sequence[str] = (),
) -> None:
    """Print an answer as JSON, or as sentences, tables, and further sentences."""
    if as_json:
        return tables.write_json(row)
    if first:
        click.echo("\n".join([*first, ""]))
    tables.write(parts)
    return click.echo("\n".join(["", *sentences])) if sentences else None


@plan_group.command("scaling", short_help="What keeps more chips from saving time.")
@click.argument("measured", metavar="N:TIME,…")
@click.option(
    "--at",
    metavar="N,M,…",
    type=flags.Parsed(_counts),
    help="Numbers of chips to say the time for.",
)
@flags.json_object
def scaling_command(measured: str, at: list[int] | None, as_json: bool) -> None:
    """Say what does not scale, from measured times of one job on several numbers of chips.

    narrowgauge plan scaling 128:10d,256:7d --at 512,1024
    """
    from narrowgauge.planner.scaling_laws import fit, read_points, tables_of

    row = fit(read_points(measured)).row(at or ())
    _show(row, tables_of(row), [], as_json, first=row["sentences"])


@plan_group.command("regression", short_help="Which setting made a step slower.")
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@flags.json_object
def regression_command(before: Path, after: Path, as_json: bool) -> None:
    """Say which term of the step became slower between two launches, by how much, and which setting did it.

    BEFORE and AFTER are .toml files of launches.

    narrowgauge plan regression before.toml after.toml
    """
    from narrowgauge.planner.launches import compare_launches, read_launch, sentences_of, tables_of

    comparison = compare_launches(read_launch(before), read_launch(after))
    _show(comparison, tables_of(comparison), sentences_of(comparison), as_json)
