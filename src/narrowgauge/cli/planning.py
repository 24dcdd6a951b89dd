"""``narrowgauge plan``: memory, speed, machines, and conclusions from measured times. One command for each question."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from narrowgauge.cli import flags
from narrowgauge.cli.exit_status import help_without_command
from narrowgauge.planner.efficiency import SOFTWARE
from narrowgauge.planner.layouts import NAMED_LAYOUTS, read_layout
from narrowgauge.planner.model import preset_names
from narrowgauge.spec import tables
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.update_rules import UPDATE_RULES

if TYPE_CHECKING:
    from narrowgauge.planner.plan_tables import Plan
    from narrowgauge.profiling.profile import Profile

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
            raise click.BadParameter(f"'{text}' is not a number of at least {least:g}, such as 10e9 or 10B.")
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


# Parameters have the names of the arguments of planner.plan.plan.
_recipe = click.option(
    "--recipe", "recipes", metavar="A,B,…|all", type=flags.RECIPES_OR_ALL, shell_complete=flags.many_recipes,
    help="Recipes or .toml files; all: every one that the chips multiply natively.  [default: the usual six]",
)  # fmt: skip
_chip = click.option(
    "--chip", metavar="A,B,…", type=flags.Parsed(_names), shell_complete=flags.chips, help="Chips (narrowgauge show chips)."
)  # fmt: skip
_chips = click.option(
    "--chips", metavar="N,M,…", type=flags.Parsed(_counts), help="Numbers of chips; several are compared.  [default: 1]"
)
_chips_per_node = click.option(
    "--chips-per-node", type=click.IntRange(min=1), metavar="N", help="Chips of a node.  [default: as usual]"
)
_cluster = click.option(
    "--cluster", metavar="FILE", multiple=True, type=click.Path(path_type=Path),
    help="A TOML file of nodes and links, instead of --chip; several are compared.",
)  # fmt: skip
_layout = click.option(
    "--layout", metavar="FIELD=N,…", type=flags.Parsed(read_layout),
    help="Layouts to consider: values of data, shard, zero, tensor, pipeline, …; fsdp2 (what train runs); ddp.  [default: all]",
)  # fmt: skip
_optimizer = click.option(
    "--rule", "--optimizer", "optimizer",
    type=click.Choice([name for name, row in UPDATE_RULES.items() if row.moments is not None]),
    help="The update rule whose states are counted.  [default: adamw]",
)  # fmt: skip
_explain = click.option(
    "--explain", is_flag=True, help="Print every term of the best option: formula, numbers, interval, source."
)


@plan_group.command(
    "run",
    short_help="What fits, how fast, on which machines.",
    epilog=f"Presets besides those of narrowgauge show models: {', '.join(preset_names())}.",
)
@click.option(
    "--model", metavar="TEXT", required=True, shell_complete=flags.of([*MODELS, *preset_names()], "file"),
    help="A preset, or a Hugging Face config.json.",
)  # fmt: skip
@flags.combined(_recipe, _chip, _chips, _chips_per_node)
@click.option(
    "--interconnect", "interconnect_gbit_per_second", type=_amount(1e-3), metavar="X",
    help="Rate of a node's network, Gbit/s in one direction.  [default: as usual for the chip]",
)  # fmt: skip
@_cluster
@click.option(
    "--sequence-length", type=click.IntRange(min=1), metavar="N", help="Tokens per sequence.  [default: 4096 at most]"
)
@click.option("--tokens-per-step", type=_amount(1), metavar="X", help="Tokens per step.  [default: by chips]")
@click.option("--tokens", type=_amount(1), metavar="X", help="Tokens of the whole run (300e9), for days and cost.")
@click.option(
    "--host-memory", "host_memory_gb", type=_amount(1), metavar="GB",
    help="Memory of a node's host: layouts that keep states there are searched too.  [default: none]",
)  # fmt: skip
@click.option(
    "--software", type=click.Choice(list(SOFTWARE)),
    help="The libraries and years whose speed is planned.  [default: those usual on the chip]",
)  # fmt: skip
@click.option(
    "--price", "--dollars-per-hour", "dollars_per_hour", type=_amount(0), metavar="X",
    help="Dollars for an hour of one chip; none is assumed.",
)  # fmt: skip
@click.option(
    "--days", type=_amount(1e-6), metavar="X",
    help="A deadline for --tokens: the fewest chips (up to --chips) that meet it.",
)  # fmt: skip
@click.option(
    "--budget", type=_amount(1e-6), metavar="X",
    help="Dollars for --tokens at --price: the fastest (up to --chips) that keeps it.",
)  # fmt: skip
@click.option(
    "--largest", type=click.Choice(["context", "batch"]), help="The longest sequences, or the most at once, that fit."
)
@_optimizer
@click.option(
    "--lora", type=click.IntRange(min=1), metavar="RANK", help="Train adapters of that rank over a frozen model."
)
@click.option(
    "--base", type=click.Choice(["bfloat16", "int8", "float8", "nf4", "nvfp4"]),
    help="With --lora: how the frozen layers are kept (nf4: QLoRA).  [default: bfloat16]",
)  # fmt: skip
@_layout
@click.option(
    "--minimize", type=click.Choice(["days", "cost", "chips"]),
    help="What the best option has least of.  [default: days; with --days chips]",
)  # fmt: skip
@_explain
@click.option(
    "--toml", metavar="[FILE]", is_flag=False, flag_value="-",
    help="Write the best option for narrowgauge train --config.  [default: to standard output, alone]",
)  # fmt: skip
@flags.json_object
def run_command(
    *,
    tokens_per_step: float | None,
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
    from narrowgauge.planner.plan import plan
    from narrowgauge.planner.plan_tables import train_settings
    from narrowgauge.runs.atomic_io import AGAIN, write_whole

    if asked["base"] is not None and asked["lora"] is None:
        raise click.UsageError("--base goes with --lora RANK.", click.get_current_context())
    if asked["lora"] is not None and toml:
        raise click.UsageError("--toml is for narrowgauge train, which runs no adapters.", click.get_current_context())
    if toml:  # a settings file must be one that train can run
        layout = {**NAMED_LAYOUTS["fsdp2"], **(layout or {})}
    answer = plan(
        layout=layout, tokens_per_step=None if tokens_per_step is None else int(tokens_per_step), **flags.given(asked)
    )
    if toml == "-":
        return click.echo(train_settings(answer), nl=False)
    if toml:
        write_whole(Path(toml), train_settings(answer).encode(), AGAIN)
    _show_plan(answer, as_json, explain)
    if toml and not as_json:
        click.echo(toml)
    return None


@plan_group.command("state", short_help="Bytes of weights, gradients and optimizer states.")
@click.option("--params", type=_amount(1), metavar="X", required=True, help="The number of parameters (10e9).")
@flags.combined(_recipe, _chip, _chips, _chips_per_node, _cluster, _optimizer, _layout, _explain, flags.json_object)
def state_command(as_json: bool, explain: bool, **asked: Any) -> None:
    """Count the state of a number of parameters: weights, gradients and optimizer states.

    narrowgauge plan state --params 10e9 --recipe bfloat16/states8
    """
    from narrowgauge.planner.plan import plan

    _show_plan(plan(**flags.given(asked)), as_json, explain)


def _show_plan(answer: Plan, as_json: bool, explain: bool) -> None:
    parts = [*answer.tables(), *(answer.explanation() if explain else [])]
    _show(answer.row(), parts, answer.sentences(), as_json)


def _show(row: tables.Row, parts: list[tables.Table], sentences: list[str], as_json: bool) -> None:
    """Print an answer as JSON, or as tables and sentences."""
    if as_json:
        return tables.write_json(row)
    tables.write(parts)
    return click.echo("\n".join(["", *sentences])) if sentences else None


def show_profile(profile: Profile, as_json: bool) -> None:
    """Print the costs of recipes layer by layer, as tables or as JSON."""
    if as_json:
        return tables.write_json(profile.rows)
    tables.write(profile.tables())
    return click.echo(f"\n{profile.text()}")


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
    from narrowgauge.planner.launches import measured_times
    from narrowgauge.planner.scaling_laws import fit, read_points
    from narrowgauge.runs.record import read_run

    is_times = ":" in measured[0] and not Path(measured[0]).exists()
    points = read_points(",".join(measured)) if is_times else measured_times([read_run(Path(run)) for run in measured])
    law = fit(points)
    _show(law.row(at or ()), law.tables(at or ()), law.sentences(), as_json)


@plan_group.command("regression", short_help="Which setting made a step slower.")
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option(
    "--chip", metavar="NAME", shell_complete=flags.chips,
    help="The chip (narrowgauge show chips), where runs or files do not name it.",
)  # fmt: skip
@flags.json_object
def regression_command(before: Path, after: Path, chip: str | None, as_json: bool) -> None:
    """Say which term of the step became slower between two launches, by how much, and which setting did it.

    BEFORE and AFTER are .toml files of launches, or run folders.

    narrowgauge plan regression before.toml after.toml
    """
    from narrowgauge.planner.launches import compare_launches, read_launch
    from narrowgauge.spec.chips import get_chip

    machine = None if chip is None else get_chip(chip)
    comparison = compare_launches(read_launch(before, machine), read_launch(after, machine))
    _show(comparison.row(), comparison.tables(), [], as_json)
