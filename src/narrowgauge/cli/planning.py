"""``narrowgauge plan``: memory, speed, machines, and conclusions from measured times.

One command for each question.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from narrowgauge.cli import flags
from narrowgauge.cli.exit_status import help_without_command
from narrowgauge.planner.layouts import read_fields, read_layout
from narrowgauge.planner.model import PRESET_NAMES
from narrowgauge.planner.program import BASES, PARTS, PROGRAMS, read_program
from narrowgauge.spec import tables
from narrowgauge.spec.update_rules import UPDATE_RULES

WIDTH = 120
"""Columns of an answer."""
_SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def _amount(text: str) -> float:
    """Parse a number such as ``10e9`` or ``10B``."""
    digits = text.strip()
    scale = _SUFFIXES.get(digits[-1:].lower(), 1.0)
    try:
        return float(digits if scale == 1.0 else digits[:-1]) * scale
    except ValueError:
        raise click.BadParameter(f"'{text}' is not a number such as 10e9 or 10B.") from None


AMOUNT = flags.Parsed(_amount)


def _counts(text: str) -> list[int]:
    """Parse whole numbers with commas between them."""
    parts = _names(text)
    if not parts or not all(map(str.isdecimal, parts)):
        raise click.BadParameter(f"'{text}' is not a list of numbers of at least 1, such as 8,16.")
    return list(map(int, parts))


def _parts(text: str) -> dict[str, str]:
    """Parse parts and how they are stored: ``head=trained,experts=nf4``."""
    return read_fields(text, "table of parts", (), PARTS, "For instance head=trained.")[1]


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
    narrowgauge plan longest --model llama-8b --chip RTX-4090 --lora 16 --base nf4
    narrowgauge plan scaling 128:10d,256:7d --at 512,1024
    """
    help_without_command(context)


# Parameters have the names of the arguments of planner.plan.plan.
_recipe = click.option(
    "--recipe", "recipes", metavar="A,B,…|all", type=flags.RECIPES_OR_ALL,
    help="Recipes or .toml files; all: every one that the chips multiply natively.  [default: master and our own]",
)  # fmt: skip
_chip = click.option(
    "--chip",
    metavar="A,B,…",
    type=flags.Parsed(_names),
    help='Chips (narrowgauge show chips), or .toml files: like = "H100-SXM", and what differs.',
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


_QUESTION = (
    _recipe,
    _chip,
    _chips,
    click.option(
        "--interconnect", "interconnect_gbit_per_second", type=AMOUNT, metavar="X",
        help="Rate of a node's network, Gbit/s in one direction.  [default: as usual for the chip]",
    ),
    click.option(
        "--cluster", metavar="FILE", multiple=True, type=click.Path(path_type=Path),
        help="A TOML file of chips, nodes and links, instead of --chip; several are compared.",
    ),
    click.option(
        "--tokens-per-step", type=AMOUNT, metavar="X", help="Tokens per step.  [default: by chips]"
    ),
    click.option(
        "--program", metavar="NAME,FIELD=X,…", type=flags.Parsed(read_program),
        help=f"The training loop: {', '.join(PROGRAMS)}; fields such as loss=chunked, kernels=eager, release=true, offload=true.",
    ),
    click.option(
        "--lora",
        type=click.IntRange(min=1),
        metavar="R",
        help="Train adapters of rank R over frozen weights.",
    ),
    click.option(
        "--base",
        type=click.Choice(BASES),
        help="Format of frozen weights in layers.  [default: bfloat16]",
    ),
    click.option(
        "--part", "parts", metavar="PART=FORMAT,…", type=flags.Parsed(_parts),
        help=f"How parts are stored: {', '.join(PARTS)}; formats, frozen, trained, loraR, joined by +.",
    ),
    click.option(
        "--like", metavar="X", type=AMOUNT, help="Measured tokens/s of all chips of the first row."
    ),
    _optimizer,
    _layout,
)  # fmt: skip


_MODEL = "A preset, a Hugging Face config.json, or org/name in the hub's cache."


def _question(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags of a question to a command."""
    for option in reversed(_QUESTION):
        command = option(command)
    return command


@plan_group.command(
    "run", short_help="What fits, how fast, on which machines.",
    epilog=f"Presets besides those of narrowgauge show models: {', '.join(PRESET_NAMES)}.",
)  # fmt: skip
@click.option("--model", metavar="TEXT", required=True, help=_MODEL)
@_question
@click.option(
    "--sequence-length",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens per sequence.  [default: 4096 at most]",
)
@click.option(
    "--tokens", type=AMOUNT, metavar="X", help="Tokens of the whole run (300e9), for days."
)
@click.option("--price", type=AMOUNT, metavar="X", help="Price of a chip-hour.")
@click.option("--explain", is_flag=True, help="Print every term of the best option.")
@flags.json_object
def run_command(as_json: bool, explain: bool, **asked: Any) -> None:
    """Say whether a model fits, how fast it trains, on which machines, and why.

    \b
    narrowgauge plan run --model llama-8b --chip H100-SXM --chips 8
    narrowgauge plan run --model config.json --cluster cluster.toml --tokens 300e9
    narrowgauge plan run --model llama-8b --chip H100-SXM --chips 32,48 --tokens 300e9
    """
    from narrowgauge.planner.plan import plan

    answer = plan(**flags.given(asked))
    sentences = answer.sentences()
    if explain:
        sentences += answer.explanation()
    _show(answer.row(), answer.tables(), sentences, as_json)


@plan_group.command("longest", short_help="The longest sequence that fits.")
@click.option("--model", metavar="TEXT", required=True, help=_MODEL)
@_question
@flags.json_object
def longest_command(as_json: bool, **asked: Any) -> None:
    """Say how long sequences may be.

    narrowgauge plan longest --model llama-8b --chip RTX-4090 --lora 16 --base nf4
    """
    from narrowgauge.planner.plan import plan_longest

    answer = plan_longest(**flags.given(asked))
    first = [f"The longest sequence that fits has {answer.best.sequence_length:,} tokens."]
    _show(answer.row(), answer.tables(), answer.sentences(), as_json, first)


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
        _write_lines([*first, ""])
    tables.write(parts)
    if sentences:
        _write_lines(["", *sentences])


def _write_lines(lines: Sequence[str]) -> None:
    """Print lines, broken at :data:`WIDTH` columns."""
    for line in lines:
        click.echo(textwrap.fill(line, WIDTH, subsequent_indent="  ", break_long_words=False))


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
    from narrowgauge.planner.scaling import read_points, scaling_row, tables_of

    row = scaling_row(read_points(measured), at or ())
    _show(row, tables_of(row), (), as_json, first=row["sentences"])
