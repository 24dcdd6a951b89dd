"""``narrowgauge plan``: what fits, how fast, on which machines, and what measured times say; one command for each question."""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from narrowgauge.cli import flags
from narrowgauge.cli.exit_status import help_without_command
from narrowgauge.planner.efficiency import SOFTWARE
from narrowgauge.planner.model import preset_names
from narrowgauge.spec import tables
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.update_rules import UPDATE_RULES

if TYPE_CHECKING:
    from narrowgauge.profiling.profile import Profile

_SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def _amount(least: float) -> flags.Parsed:
    """Return a number such as ``10e9`` or ``10B``."""

    def read(text: str) -> float:
        scale = _SUFFIXES.get(text.strip()[-1:].lower(), 1.0)
        try:
            number = float(text if scale == 1.0 else text.strip()[:-1]) * scale
        except ValueError:
            number = math.nan
        if not least <= number < 1e18:
            raise click.BadParameter(f"'{text}' is not a number of at least {least:g}, such as 10e9 or 10B.")
        return number

    return flags.Parsed(read)


def _counts(text: str) -> list[int]:
    """Whole numbers with commas between them."""
    parts = _names(text)
    if not parts or not all(part.isdecimal() and 0 < int(part) < 10**7 for part in parts):
        raise click.BadParameter(f"'{text}' is not a list of numbers of at least 1, such as 8,16.")
    return [int(part) for part in parts]


def _names(text: str) -> list[str]:
    return [name for name in map(str.strip, text.split(",")) if name]


def _layout(text: str) -> dict[str, Any]:
    from narrowgauge.planner.layouts import read_layout

    return read_layout(text)


@click.group("plan", short_help="What fits, how fast, on which machines.", invoke_without_command=True)
@click.pass_context
def plan_group(context: click.Context) -> None:
    """Say what fits, how fast, on which machines, and why; nothing is trained.

    \b
    narrowgauge plan run --model llama-8b --chip H100-SXM --chips 8
    narrowgauge plan state --params 10e9 --recipe bfloat16/states8
    narrowgauge plan scaling 128:10d,256:7d --at 512,1024
    """
    help_without_command(context)


_model = click.option(
    "--model",
    metavar="TEXT",
    required=True,
    shell_complete=flags.of([*MODELS, *preset_names()], "file"),
    help="A preset, or a Hugging Face config.json.",
)
_recipe = click.option(
    "--recipe",
    metavar="A,B,…|all",
    type=flags.RECIPES_OR_ALL,
    shell_complete=flags.many_recipes,
    help="Recipes or .toml files; all: every one that the chips multiply natively.  [default: the usual six]",
)
_chip = click.option(
    "--chip",
    metavar="A,B,…",
    type=flags.Parsed(_names),
    shell_complete=flags.chips,
    help="Chips (narrowgauge show chips).",
)
_one_chip = click.option(
    "--chip",
    metavar="NAME",
    type=flags.Parsed(_names),
    shell_complete=flags.chips,
    help="The chip (narrowgauge show chips), where runs or files do not name it.",
)
_chips = click.option(
    "--chips", metavar="N,M,…", type=flags.Parsed(_counts), help="Numbers of chips; several are compared.  [default: 1]"
)
_chips_per_node = click.option(
    "--chips-per-node", type=click.IntRange(min=1), metavar="N", help="Chips of a node.  [default: as usual]"
)
_cluster = click.option(
    "--cluster",
    metavar="FILE",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A TOML file of nodes and links, instead of --chip; several are compared.",
)
_layout_option = click.option(
    "--layout",
    metavar="FIELD=N,…",
    type=flags.Parsed(_layout),
    help="Layouts to consider: values of data, shard, zero, tensor, pipeline, …; fsdp2 (what train runs); ddp.  [default: all]",
)
_optimizer = click.option(
    "--rule",
    "--optimizer",
    "optimizer",
    type=click.Choice([name for name, row in UPDATE_RULES.items() if row.moments is not None]),
    help="The update rule whose states are counted.  [default: adamw]",
)
_explain = click.option(
    "--explain", is_flag=True, help="Print every term of the best option: formula, numbers, interval, source."
)


@plan_group.command(
    "run",
    short_help="What fits, how fast, on which machines.",
    epilog=f"Presets besides those of narrowgauge show models: {', '.join(preset_names())}.",
)
@flags.combined(_model, _recipe, _chip, _chips, _chips_per_node)
@click.option(
    "--interconnect",
    type=_amount(1e-3),
    metavar="X",
    help="Rate of a node's network, Gbit/s in one direction.  [default: as usual for the chip]",
)
@_cluster
@click.option(
    "--sequence-length",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens per sequence.  [default: 4096 at most]",
)
@click.option("--tokens-per-step", type=_amount(1), metavar="X", help="Tokens per step.  [default: by chips]")
@click.option("--tokens", type=_amount(1), metavar="X", help="Tokens of the whole run (300e9), for days and cost.")
@click.option(
    "--host-memory",
    type=_amount(1),
    metavar="GB",
    help="Memory of a node's host: layouts that keep states there are searched too.  [default: none]",
)
@click.option(
    "--software",
    type=click.Choice(list(SOFTWARE)),
    help="The libraries and years whose speed is planned.  [default: those usual on the chip]",
)
@click.option(
    "--price",
    "--dollars-per-hour",
    "dollars_per_hour",
    type=_amount(0),
    metavar="X",
    help="Dollars for an hour of one chip; none is assumed.",
)
@click.option(
    "--days",
    type=_amount(1e-6),
    metavar="X",
    help="A deadline for --tokens: the fewest chips (up to --chips) that meet it.",
)
@click.option(
    "--budget",
    type=_amount(1e-6),
    metavar="X",
    help="Dollars for --tokens at --price: the fastest (up to --chips) that keeps it.",
)
@click.option(
    "--largest",
    type=click.Choice(["context", "batch"]),
    help="The longest sequences, or the most at once, that fit.",
)
@_optimizer
@click.option(
    "--lora", type=click.IntRange(min=1), metavar="RANK", help="Train adapters of that rank over a frozen model."
)
@click.option(
    "--base",
    type=click.Choice(["bfloat16", "int8", "float8", "nf4", "nvfp4"]),
    help="With --lora: how the frozen layers are kept (nf4: QLoRA).  [default: bfloat16]",
)
@_layout_option
@click.option(
    "--minimize",
    type=click.Choice(["days", "cost", "chips"]),
    help="What the best option has least of.  [default: days; with --days chips]",
)
@flags.combined(_explain)
@click.option(
    "--toml",
    metavar="[FILE]",
    is_flag=False,
    flag_value="-",
    help="Write the best option for narrowgauge train --config.  [default: to standard output, alone]",
)
@flags.json_object
def run_command(
    model: str,
    *,
    interconnect: float | None,
    host_memory: float | None,
    tokens_per_step: float | None,
    lora: int | None,
    base: str | None,
    layout: dict[str, Any] | None,
    explain: bool,
    toml: str | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """Say whether a model fits, how fast it trains, on which machines, and why.

    \b
    narrowgauge plan run --model llama-8b --chip H100-SXM --chips 8
    narrowgauge plan run --model config.json --cluster cluster.toml --tokens 300e9
    narrowgauge plan run --model llama-8b --chip H100-SXM --tokens 300e9 --days 14 --price 2.5
    narrowgauge plan run --model llama-8b --chip H100-SXM --chips 8 --largest context
    """
    from narrowgauge.planner.layouts import NAMED_LAYOUTS

    if base is not None and lora is None:
        raise click.UsageError("--base goes with --lora RANK.", click.get_current_context())
    if lora is not None and toml:
        raise click.UsageError("--toml is for narrowgauge train, which runs no adapters.", click.get_current_context())
    found = _planned(
        model,
        **asked,
        # A settings file must be one that train can run.
        layout={**(NAMED_LAYOUTS["fsdp2"] if toml else {}), **(layout or {})},
        interconnect_gbit_per_second=interconnect,
        host_memory_gb=host_memory,
        tokens_per_step=tokens_per_step and int(tokens_per_step),
        lora=lora,
        base=base or "bfloat16",
    )
    if toml:
        from narrowgauge.planner.plan_tables import train_settings
        from narrowgauge.runs.atomic_io import AGAIN, write_whole

        settings = train_settings(found)
        if toml == "-":
            return click.echo(settings, nl=False)
        write_whole(Path(toml), settings.encode(), AGAIN)
    return _show_plan(found, as_json, explain, files=[toml])


@plan_group.command("state", short_help="Bytes of weights, gradients and optimizer states.")
@click.option("--params", type=_amount(1), metavar="X", required=True, help="The number of parameters (10e9).")
@flags.combined(
    _recipe, _chip, _chips, _chips_per_node, _cluster, _optimizer, _layout_option, _explain, flags.json_object
)
def state_command(params: float, as_json: bool, explain: bool, **asked: Any) -> None:
    """Count the state of a number of parameters: weights, gradients and optimizer states.

    narrowgauge plan state --params 10e9 --recipe bfloat16/states8
    """
    _show_plan(_planned(params=params, **asked), as_json, explain)


def _planned(
    model: str | None = None,
    *,
    recipe: Any,
    chip: list[str] | None,
    chips: list[int] | None,
    layout: dict[str, Any] | None,
    largest: str | None = None,
    optimizer: str | None,
    **asked: Any,
) -> Any:
    from narrowgauge.planner.plan import plan

    return plan(
        model,
        recipes=recipe or (),
        chip=chip or (),
        chips=chips or (),
        layout=layout or {},
        largest=largest or "",
        optimizer=optimizer or "adamw",
        **asked,
    )


def _show_plan(
    found: Any,
    as_json: bool,
    explain: bool,
    files: Sequence[str | None] = (),
) -> None:
    """Print a plan."""
    if as_json:
        return tables.write_json(found.row())
    tables.write([*found.tables(), *(found.explanation() if explain else [])])
    return _echo(["", *found.sentences(), *filter(None, files)])


def show_profile(found: Profile, as_json: bool) -> None:
    """Print what recipes cost layer by layer, as tables or as JSON."""
    if as_json:
        return tables.write_json(found.rows)
    tables.write(found.tables())
    return click.echo(f"\n{found.text()}")


@plan_group.command("scaling", short_help="What keeps more chips from saving time.")
@click.argument("measured", metavar="N:TIME,…|RUN…", nargs=-1, required=True)
@click.option("--at", metavar="N,M,…", type=flags.Parsed(_counts), help="Numbers of chips to say the time for.")
@flags.json_object
def scaling_command(measured: tuple[str, ...], at: list[int] | None, as_json: bool) -> None:
    """Say what does not scale, from measured times or from run folders.

    \b
    narrowgauge plan scaling 128:10d,256:7d --at 512,1024
    narrowgauge plan scaling runs/on8 runs/on32
    """
    text = ",".join(measured)
    if ":" in text and not any(Path(name).exists() for name in measured):
        from narrowgauge.planner.scaling_laws import fit, read_points

        law = fit(read_points(text))
        return _answer(law.row(at or ()), law.tables(at or ()), law.sentences(), as_json)
    from narrowgauge.planner.launches import attribute
    from narrowgauge.runs.record import read_run

    folders = [Path(name) for name in _names(text)]
    if not folders:
        raise click.UsageError("Times or run folders are missing.", click.get_current_context())
    steps = attribute([read_run(folder) for folder in folders])
    return _answer(steps.row(), steps.tables(), [], as_json)


def _answer(row: dict[str, Any], answer_tables: list[tables.Table], sentences: list[str], as_json: bool) -> None:
    """Print an answer."""
    if as_json:
        return tables.write_json(row)
    tables.write(answer_tables)
    return _echo(["", *sentences])


@plan_group.command("regression", short_help="Which setting made a step slower.")
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@flags.combined(_one_chip, flags.json_object)
def regression_command(before: Path, after: Path, chip: list[str] | None, as_json: bool) -> None:
    """Say which term of the step became slower between two launches, by how much, and which setting did it.

    BEFORE and AFTER are .toml files of launches, or run folders.

    narrowgauge plan regression before.toml after.toml
    """
    from narrowgauge.planner.launches import compare_launches, read_launch
    from narrowgauge.spec.chips import get_chip

    if len(chip or ()) > 1:
        raise click.UsageError("Both launches are of one chip.", click.get_current_context())
    machine = get_chip(chip[0]) if chip else None
    both = compare_launches(read_launch(before, machine), read_launch(after, machine))
    _answer(both.row(), both.tables(), both.sentences(), as_json)


def _echo(sentences: list[str]) -> None:
    """Print sentences, wrapped to a terminal's width."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        sentences = [_wrapped(line, width) for line in sentences]
    click.echo("\n".join(sentences))


def _wrapped(line: str, width: int) -> str:
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(
        line.strip(),
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
