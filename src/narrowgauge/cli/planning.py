"""``narrowgauge plan``: what fits, how fast, on which machines, and what measured times say; one command for each question."""

from __future__ import annotations

import dataclasses
import itertools
import math
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from narrowgauge.cli import flags
from narrowgauge.cli.exit_status import help_without_command, say_former
from narrowgauge.planner.inputs.clusters import HERE
from narrowgauge.planner.inputs.efficiency import SOFTWARE
from narrowgauge.planner.inputs.model_configs import PRESETS
from narrowgauge.spec import tables
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.update_rules import UPDATE_RULES

if TYPE_CHECKING:
    from narrowgauge.profiling.profile_report import Profile

_SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def _amount(least: float) -> flags.Parsed:
    """A number such as ``10e9`` or ``10B``."""

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
    from narrowgauge.planner.inputs.layouts import read_layout

    return read_layout(text)


class PlanGroup(click.Group):
    """The questions; flags without one are the former spelling, which works until the next release."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """The context of the former spelling where its flags ask; with ``--help``, that of the present command's help."""
        flags_given = [] if not args or args[0] in self.commands else _flags_of(args)
        command = next((_FORMER[flag] for flag in flags_given if flag in _FORMER), None)
        if command is None:
            return super().make_context(info_name, args, parent, **extra)
        if "--help" in flags_given:
            above = click.Context(self, info_name=info_name, parent=parent)
            return command.make_context(command.name, ["--help"], above, **extra)
        return _former_command.make_context(info_name, args, parent, **extra)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuse flags of a question that is not named."""
        if args and args[0].startswith("-") and not ctx.resilient_parsing:
            flag = next(iter(_flags_of([word for word in args if word != "--"])), "")
            for name, command in self.commands.items():
                if any(flag in param.opts for param in command.params):
                    raise click.UsageError(_question_first(f"{name} {flag}"), ctx)
        return super().parse_args(ctx, args)


def _flags_of(args: list[str]) -> list[str]:
    """The words of a command line that can be flags, without their values."""
    words = itertools.takewhile(lambda word: word != "--", args)
    return [word.partition("=")[0] for word in words if word.startswith("-")]


def _question_first(asked: str) -> str:
    return f"Name the question first: narrowgauge plan {asked} …"


@click.group("plan", cls=PlanGroup, short_help="What fits, how fast, on which machines.", invoke_without_command=True)
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
    shell_complete=flags.of([*MODELS, *PRESETS], "file"),
    help="A preset, or a Hugging Face config.json.",
)
_recipe = click.option(
    "--recipe",
    metavar="A,B,…",
    type=flags.RECIPES,
    shell_complete=flags.many_recipes,
    help="Recipes or .toml files.  [default: all that the chips multiply natively]",
)
_chip = click.option(
    "--chip",
    metavar="A,B,…",
    type=flags.Parsed(_names),
    shell_complete=flags.chips,
    help="Chips (narrowgauge show chips), or here: this machine, as calibrated.",
)
_one_chip = click.option(
    "--chip",
    metavar="NAME",
    type=flags.Parsed(_names),
    shell_complete=flags.chips,
    help="The chip (narrowgauge show chips), where runs or files do not name it; or here: this machine, as calibrated.",
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
_html = click.option(
    "--html", metavar="[FILE]", is_flag=False, flag_value="plan.html", help="Write one page.  [default: plan.html]"
)


@plan_group.command(
    "run",
    short_help="What fits, how fast, on which machines.",
    epilog=f"Presets besides those of narrowgauge show models: {', '.join(PRESETS)}.",
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
    help="The libraries and years whose speed is planned.  [default: those usual on the chip, with wide intervals]",
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
    type=click.Choice(["days", "cost", "chips", "memory"]),
    help="What the best option has least of.  [default: days; with --days chips]",
)
@click.option(
    "--exact",
    is_flag=True,
    help="Count what a layer keeps in the model's own modules, not by formula; needs PyTorch, some seconds.",
)
@flags.combined(_explain, _html)
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
    exact: bool,
    explain: bool,
    html: str | None,
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
    from narrowgauge.planner.inputs.layouts import NAMED_LAYOUTS

    counts = None
    if exact:
        # It needs PyTorch, which a plan does not.
        from narrowgauge.profiling.exact_memory import LayerCounts

        counts = LayerCounts(model)
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
        counted=counts,
    )
    if counts is not None:
        from narrowgauge.profiling.exact_memory import require_counted

        require_counted(found)
    if toml:
        from narrowgauge.planner.plan_report import train_settings
        from narrowgauge.runs.atomic_io import AGAIN, write_whole

        settings = train_settings(found)
        if toml == "-":
            return click.echo(settings, nl=False)
        write_whole(Path(toml), settings.encode(), AGAIN)
    more = {"counted": counts.rows()} if counts else {}
    said = [counts.sentence()] if counts else []
    return _show_plan(found, html, as_json, explain, row=more, said=said, files=[toml])


@plan_group.command("state", short_help="Bytes of weights, gradients and optimizer states.")
@click.option("--params", type=_amount(1), metavar="X", required=True, help="The number of parameters (10e9).")
@flags.combined(
    _recipe, _chip, _chips, _chips_per_node, _cluster, _optimizer, _layout_option, _explain, _html, flags.json_object
)
def state_command(params: float, html: str | None, as_json: bool, explain: bool, **asked: Any) -> None:
    """Count the state of a number of parameters: weights, gradients and optimizer states.

    narrowgauge plan state --params 10e9 --recipe bfloat16/states8
    """
    _show_plan(_planned(params=params, **asked), html, as_json, explain)


def _planned(
    model: str | None = None,
    *,
    recipe: list[Recipe] | None,
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
    html: str | None,
    as_json: bool,
    explain: bool,
    *,
    row: dict[str, Any] | None = None,
    said: Sequence[str] = (),
    files: Sequence[str | None] = (),
) -> None:
    """Print a plan, and write its page where one was asked for; ``row`` and ``said`` are added to JSON and text."""
    if html:
        from narrowgauge.report.page import write_page
        from narrowgauge.report.plan_page import render_plan

        write_page(render_plan(found), Path(html))
    if as_json:
        return tables.write_object({**found.row(), **(row or {})})
    tables.write([*found.tables(), *(found.explanation() if explain else [])])
    return _echo(["", *found.sentences(), *said, *filter(None, [html, *files])])


@plan_group.command("layers", short_help="Casts and matmuls of each layer on one chip.")
@flags.model_and_recipes
@click.option(
    "--chip", required=True, metavar="NAME", shell_complete=flags.chips, help="The chip (narrowgauge show chips)."
)
@flags.batch_shape
@flags.json_list
def layers_command(model: str, recipes: list[Recipe], as_json: bool, **options: Any) -> None:
    """Predict what recipes cost on one chip layer by layer: casts, matmuls, and the fastest combination.

    narrowgauge plan layers --model llama-8b --recipe float8-tensor,float8-row --chip H200
    """
    from narrowgauge.profiling.profiler import profile

    show_profile(profile(model, recipes, **options), as_json)


def show_profile(found: Profile, as_json: bool) -> None:
    """Print what recipes cost layer by layer, as tables or as JSON."""
    if as_json:
        return tables.write_json(found.rows())
    tables.write(found.tables())
    return click.echo(f"\n{found.text()}")


@plan_group.command("scaling", short_help="What keeps more chips from saving time.")
@click.argument("measured", metavar="N:TIME,…|RUN…", nargs=-1, required=True)
@click.option("--at", metavar="N,M,…", type=flags.Parsed(_counts), help="Numbers of chips to say the time for.")
@flags.combined(_html, flags.json_object)
def scaling_command(measured: tuple[str, ...], at: list[int] | None, html: str | None, as_json: bool) -> None:
    """Say what does not scale, from measured times or from run folders.

    \b
    narrowgauge plan scaling 128:10d,256:7d --at 512,1024
    narrowgauge plan scaling runs/on8 runs/on32
    """
    from narrowgauge.planner.measured import launches, scaling_law

    page, text = "", ",".join(measured)
    if ":" in text and not any(Path(name).exists() for name in measured):
        found = scaling_law.fit(scaling_law.read_points(text))
        row, sentences = scaling_law.scaling_dict(found, at or ()), scaling_law.scaling_lines(found, at or ())
        if html:
            from narrowgauge.report.plan_page import render_scaling

            page = render_scaling(found, at or ())
    else:
        from narrowgauge.runs.record import read_run

        folders = [Path(name) for name in _names(text)]
        if not folders:
            raise click.UsageError("Times or run folders are missing.", click.get_current_context())
        steps = launches.attribute([read_run(folder) for folder in folders])
        row, sentences = launches.attribution_dict(steps), launches.attribution_lines(steps)
        if html:
            from narrowgauge.report.plan_page import render_attribution

            page = render_attribution(steps)
    _answer(row, sentences, as_json, html, page)


def _answer(row: dict[str, Any], sentences: list[str], as_json: bool, html: str | None, page: str) -> None:
    """Print an answer, and write its page where one was asked for."""
    if html:
        from narrowgauge.report.page import write_page

        write_page(page, Path(html))
    if as_json:
        return tables.write_object(row)
    return _echo([*sentences, *filter(None, [html])])


@plan_group.command("regression", short_help="Which setting made a step slower.")
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@flags.combined(_one_chip, _html, flags.json_object)
def regression_command(before: Path, after: Path, chip: list[str] | None, html: str | None, as_json: bool) -> None:
    """Say which term of the step became slower between two launches, by how much, and which setting did it.

    BEFORE and AFTER are .toml files of launches, or run folders.

    narrowgauge plan regression before.toml after.toml
    """
    from narrowgauge.planner.measured.launches import read_launch
    from narrowgauge.planner.measured.regression import compare_launches, regression_dict, regression_lines

    machine, shares = _calibrated(chip)
    found = compare_launches(read_launch(before, machine), read_launch(after, machine), shares)
    page = ""
    if html:
        from narrowgauge.report.plan_page import render_regression

        page = render_regression(found)
    _answer(regression_dict(found), regression_lines(found), as_json, html, page)


def _calibrated(names: list[str] | None) -> tuple[Any, Any]:
    """The chip of that name and, for this machine, its calibrated shares; None stands for the published ones."""
    if not names:
        return None, None
    if len(names) > 1:
        raise click.UsageError("Both launches are of one chip.", click.get_current_context())
    from narrowgauge.planner.measured.calibration import kept
    from narrowgauge.spec.chips import get_chip

    if names[0] != HERE:
        return get_chip(names[0]), None
    found = kept(HERE)
    return found.chip, found.shares


@plan_group.command("calibrate", short_help="How fast this machine is, from runs on it.")
@click.argument("runs", metavar="RUN…", nargs=-1, required=True, type=click.Path(path_type=Path))
@flags.combined(_one_chip, flags.json_object)
def calibrate_command(runs: tuple[Path, ...], chip: list[str] | None, as_json: bool) -> None:
    """Fit what this machine reaches of its rates to runs and to files of narrowgauge profile --json, for --chip here."""
    from narrowgauge.planner.measured import calibration
    from narrowgauge.spec.chips import get_chip

    names = [name for name in chip or () if name != HERE]
    if len(names) > 1:
        raise click.UsageError("One machine is calibrated at a time.", click.get_current_context())
    found = calibration.calibrate(runs, get_chip(names[0]) if names else None)
    file = calibration.keep(found)
    if as_json:
        shares = {name: dataclasses.asdict(found.shares[name]) for name in found.fitted}
        return tables.write_object({"name": found.name, "error": found.error, "worst": found.worst, "shares": shares})
    return _echo([*calibration.calibration_lines(found), str(file)])


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


# ── the former spelling: every question behind flags of narrowgauge plan ──────────────────────────────────────────────────

_FORMER = {
    "--model": run_command,
    "--params": state_command,
    "--measured": scaling_command,
    "--regression": regression_command,
    "--calibrate": calibrate_command,
}
"""The flag that asked a question, and its command now."""


def _former_params() -> list[click.Parameter]:
    """Every flag that the former spelling had."""
    flags_now: dict[str | None, click.Option] = {}
    for param in (param for command in _FORMER.values() for param in command.params):
        if isinstance(param, click.Option):
            flags_now.setdefault(param.name, param)
    own = list(flags_now.values())
    optional = [click.Option([f"--{param.name}"], type=param.type, hidden=True) for param in own if param.required]
    return [
        *(param for param in own if not param.required),
        *optional,
        click.Option(["--measured"], hidden=True),
        click.Option(["--regression"], nargs=2, type=click.Path(path_type=Path), hidden=True),
        click.Option(["--calibrate"], is_flag=True, hidden=True),
        click.Argument(["runs"], nargs=-1, type=click.Path(path_type=Path)),
    ]


@click.pass_context
def _ask_formerly(context: click.Context, /, runs: tuple[Path, ...], **asked: Any) -> None:
    """Former spelling of the questions: flags of `plan` itself, of which one asks and the others must belong to it."""
    given = {name for name, value in asked.items() if value not in (None, False, (), [])}
    found = [flag for flag in _FORMER if flag.removeprefix("--") in given]
    if not found:
        raise click.UsageError(_question_first("run --model"), context)
    if len(found) > 1:
        raise click.UsageError(f"{found[0]} and {found[1]} ask different questions.", context)
    command = _FORMER[found[0]]
    foreign = sorted(given - {param.name for param in command.params} - {found[0].removeprefix("--")})
    if foreign:
        raise click.UsageError(f"{_flag(foreign[0])} does not go with {found[0]}.", context)
    if runs and command not in (calibrate_command, scaling_command):
        raise click.UsageError(f"Got an unexpected argument ({runs[0]}).", context)
    words: dict[str, Any] = {name: asked[name] for name in given}
    if command is scaling_command:
        words["measured"] = (words["measured"], *map(str, runs))
    if command is regression_command:
        words["before"], words["after"] = words.pop("regression")
    if command is calibrate_command:
        if not runs:
            raise click.UsageError("Runs are missing: narrowgauge plan calibrate RUN….", context)
        words = {"runs": runs, **{name: value for name, value in words.items() if name != "calibrate"}}
    kept = " --model" if command is run_command else " --params" if command is state_command else ""
    say_former(f"narrowgauge plan {found[0]}", f"narrowgauge plan {command.name}{kept}")
    context.invoke(command, **words)


def _flag(name: str) -> str:
    return "--price" if name == "dollars_per_hour" else f"--{name.replace('_', '-')}"


_former_command = click.Command("plan", params=_former_params(), callback=_ask_formerly, help=_ask_formerly.__doc__)
