"""``narrowgauge plan``: what fits, how fast, on which machines, and what the next doubling buys.

The command answers one of four questions: it plans a run (``--model`` or ``--params``), reads measured times (``--measured``),
compares two launches (``--regression``), or calibrates (``--calibrate``). Flags of another question are refused.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from narrowgauge.cli import flags
from narrowgauge.planner.inputs.efficiency import SOFTWARE
from narrowgauge.planner.inputs.model_configs import PRESETS
from narrowgauge.spec import tables
from narrowgauge.spec.models import MODELS

QUESTIONS: dict[str, tuple[str, ...]] = {
    "model": (
        "recipe", "chip", "chips", "chips_per_node", "interconnect", "dollars_per_hour", "host_memory", "software", "cluster",
        "sequence_length", "tokens_per_step", "tokens", "days", "budget", "largest", "optimizer", "lora", "base", "layout",
        "minimize", "exact", "explain", "html", "toml",
    ),
    "params": ("recipe", "chip", "chips", "chips_per_node", "cluster", "optimizer", "layout", "explain", "html"),
    "measured": ("at", "html"),
    "regression": ("chip", "html"),
    "calibrate": ("chip",),
}  # fmt: skip
"""What each question may be asked with; every one also with ``--json``."""


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
            raise click.BadParameter(f"'{text}' is no number from {least:g} on, such as 10e9 or 10B.")
        return number

    return flags.Parsed(read)


def _counts(text: str) -> list[int]:
    """Whole numbers with commas between them."""
    parts = _names(text)
    if not parts or not all(part.isdecimal() and 0 < int(part) < 10**7 for part in parts):
        raise click.BadParameter(f"'{text}' is no list of numbers from 1 on, such as 8,16.")
    return [int(part) for part in parts]


def _names(text: str) -> list[str]:
    return [name for name in map(str.strip, text.split(",")) if name]


def _layout(text: str) -> dict[str, Any]:
    from narrowgauge.planner.inputs.layouts import read_layout

    return read_layout(text)


@click.command("plan", epilog=f"Presets besides those of narrowgauge show models: {', '.join(PRESETS)}.")
@click.option(
    "--model",
    metavar="TEXT",
    shell_complete=flags.of([*MODELS, *PRESETS], "file"),
    help="A preset, or a Hugging Face config.json.",
)
@click.option("--params", type=_amount(1), metavar="X", help="A number of parameters (10e9): their state alone.")
@click.option(
    "--recipe",
    metavar="A,B,…",
    type=flags.RECIPES,
    shell_complete=flags.many_recipes,
    help="Recipes or .toml files.  [default: all that the chips multiply natively]",
)
@click.option(
    "--chip",
    metavar="A,B,…",
    type=flags.Parsed(_names),
    shell_complete=flags.chips,
    help="Chips (narrowgauge show chips), or here: this machine, as calibrated.",
)
@click.option(
    "--chips", metavar="N,M,…", type=flags.Parsed(_counts), help="Numbers of chips; several are compared.  [default: 1]"
)
@click.option(
    "--chips-per-node",
    type=click.IntRange(min=1),
    metavar="N",
    help="Chips of a node.  [default: as usual]",
)
@click.option(
    "--interconnect",
    type=_amount(1e-3),
    metavar="X",
    help="Rate of a node's network, Gbit/s in one direction.  [default: as usual for the chip]",
)
@click.option(
    "--cluster",
    metavar="FILE",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A TOML file of nodes and links, instead of --chip; several are compared.",
)
@click.option(
    "--sequence-length",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens per sequence.  [default: 4096 at most]",
)
@click.option(
    "--tokens-per-step",
    type=_amount(1),
    metavar="X",
    help="Tokens per step.  [default: by chips]",
)
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
    default=None,
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
@click.option(
    "--optimizer",
    type=click.Choice(["adamw", "muon", "adafactor"]),
    help="Whose states are counted.  [default: adamw]",
)
@click.option(
    "--lora", type=click.IntRange(min=1), metavar="RANK", help="Train adapters of that rank over a frozen model."
)
@click.option(
    "--base",
    type=click.Choice(["bfloat16", "int8", "float8", "nf4", "nvfp4"]),
    help="With --lora: how the frozen layers are kept (nf4: QLoRA).  [default: bfloat16]",
)
@click.option(
    "--layout",
    metavar="FIELD=N,…",
    type=flags.Parsed(_layout),
    help="Layouts to consider: values of data, shard, zero, tensor, pipeline, …; fsdp2 (what train runs); ddp.  [default: all]",
)
@click.option(
    "--minimize",
    type=click.Choice(["days", "cost", "chips", "memory"]),
    default=None,
    help="What the best option has least of.  [default: days; with --days chips]",
)
@click.option(
    "--exact",
    is_flag=True,
    help="Count what a layer keeps in the model's own modules, not by formula; needs PyTorch, some seconds.",
)
@click.option(
    "--measured", metavar="N:TIME,…", help="Measured times (128:10d,256:7d), or run folders: what does not scale."
)
@click.option(
    "--at", metavar="N,M,…", type=flags.Parsed(_counts), help="With --measured: numbers of chips to say the time for."
)
@click.option(
    "--regression",
    nargs=2,
    metavar="BEFORE AFTER",
    type=click.Path(path_type=Path),
    help="Two launches, as .toml files or run folders: which term of the step became slower, by how much.",
)
@click.option(
    "--calibrate", is_flag=True, help="Fit the shares of the peak rates to the runs and profiles RUN…, for --chip."
)
@click.option(
    "--explain", is_flag=True, help="Print every term of the best option: formula, numbers, interval, source."
)
@click.option(
    "--html", metavar="[FILE]", is_flag=False, flag_value="plan.html", help="Write one page.  [default: plan.html]"
)
@click.option(
    "--toml",
    metavar="[FILE]",
    is_flag=False,
    flag_value="-",
    help="Write the best option for narrowgauge train --config.  [default: to standard output, alone]",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@click.argument("runs", metavar="[RUN]…", nargs=-1, type=click.Path(path_type=Path))
def plan_command(runs: tuple[Path, ...], as_json: bool, **asked: Any) -> None:
    """Say what fits, how fast, on which machines, and why; nothing is trained.

    \b
    narrowgauge plan --model llama-8b --chip H100-SXM --chips 8
    narrowgauge plan --params 10e9 --recipe bfloat16/states8
    narrowgauge plan --model config.json --cluster cluster.toml --tokens 300e9
    narrowgauge plan --model llama-8b --chip H100-SXM --tokens 300e9 --days 14 --price 2.5
    narrowgauge plan --model llama-8b --chip H100-SXM --chips 8 --largest context
    narrowgauge plan --measured 128:10d,256:7d --at 512,1024
    narrowgauge plan --regression before.toml after.toml
    narrowgauge plan --calibrate RUN…
    """
    question = _question(click.get_current_context(), asked, runs)
    _ANSWERS[question](asked, runs, as_json)


def _question(context: click.Context, asked: dict[str, Any], runs: tuple[Path, ...]) -> str:
    """The one question that is asked; everything else must belong to it."""
    given = {name for name, value in asked.items() if value not in (None, False, (), [])}
    found = [name for name in QUESTIONS if name in given]
    if len(found) != 1:
        said = (
            f"{_flag(found[0])} and {_flag(found[1])} ask different questions." if found else "No question was asked."
        )
        raise click.UsageError(f"{said} Give one of {', '.join(map(_flag, QUESTIONS))}.", context)
    foreign = sorted(given - {found[0], *QUESTIONS[found[0]]})
    if foreign:
        raise click.UsageError(f"{_flag(foreign[0])} does not go with {_flag(found[0])}.", context)
    if runs and found[0] not in ("calibrate", "measured"):
        raise click.UsageError(
            f"Got an unexpected argument ({runs[0]}): runs go with --calibrate and --measured.", context
        )
    if found[0] == "calibrate" and not runs:
        raise click.UsageError("--calibrate needs runs: narrowgauge plan --calibrate RUN….", context)
    return found[0]


def _flag(name: str) -> str:
    return "--price" if name == "dollars_per_hour" else f"--{name.replace('_', '-')}"


def _plan(asked: dict[str, Any], runs: tuple[Path, ...], as_json: bool) -> None:
    from narrowgauge.planner.inputs.layouts import NAMED_LAYOUTS
    from narrowgauge.planner.plan import plan

    counts = None
    if asked["exact"]:
        # It needs PyTorch, which a plan does not.
        from narrowgauge.profiling.exact_memory import LayerCounts

        counts = LayerCounts(asked["model"])
    # A settings file must be one that train can run.
    layout = {**(NAMED_LAYOUTS["fsdp2"] if asked["toml"] else {}), **(asked["layout"] or {})}
    found = plan(
        asked["model"],
        params=asked["params"],
        recipes=asked["recipe"] or (),
        chip=asked["chip"] or (),
        chips=asked["chips"] or (),
        cluster=asked["cluster"],
        chips_per_node=asked["chips_per_node"],
        interconnect_gbit_per_second=asked["interconnect"],
        dollars_per_hour=asked["dollars_per_hour"],
        host_memory_gb=asked["host_memory"],
        software=asked["software"],
        sequence_length=asked["sequence_length"],
        tokens_per_step=asked["tokens_per_step"] and int(asked["tokens_per_step"]),
        tokens=asked["tokens"],
        days=asked["days"],
        budget=asked["budget"],
        largest=asked["largest"] or "",
        optimizer=asked["optimizer"] or "adamw",
        lora=asked["lora"],
        base=_base(asked),
        minimize=asked["minimize"],
        layout=layout,
        counted=counts,
    )
    if counts is not None:
        from narrowgauge.profiling.exact_memory import require_counted

        require_counted(found)
    if asked["toml"]:
        from narrowgauge.planner.plan_report import train_settings
        from narrowgauge.runs.atomic_io import AGAIN, write_whole

        settings = train_settings(found)
        if asked["toml"] == "-":
            return click.echo(settings, nl=False)
        write_whole(Path(asked["toml"]), settings.encode(), AGAIN)
    if asked["html"]:
        from narrowgauge.report.page import write_page
        from narrowgauge.report.plan_page import render_plan

        write_page(render_plan(found), Path(asked["html"]))
    if as_json:
        return tables.write_object({**found.row(), **({"counted": counts.rows()} if counts else {})})
    tables.write([*found.tables(), *(found.explanation() if asked["explain"] else [])])
    said = [*found.sentences(), *([counts.sentence()] if counts else [])]
    _echo(["", *said, *filter(None, [asked["html"], asked["toml"]])])
    return None


def _base(asked: dict[str, Any]) -> str:
    """How frozen layers are kept; refused where nothing is frozen, and where the trainer should run it."""
    if asked["base"] is not None and asked["lora"] is None:
        raise click.UsageError("--base goes with --lora RANK.", click.get_current_context())
    if asked["lora"] is not None and asked["toml"]:
        raise click.UsageError("--toml is for narrowgauge train, which runs no adapters.", click.get_current_context())
    return asked["base"] or "bfloat16"


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


def _measured(asked: dict[str, Any], runs: tuple[Path, ...], as_json: bool) -> None:
    from narrowgauge.planner.measured import launches, scaling_law

    at = asked["at"] or ()
    if ":" in asked["measured"] and not Path(asked["measured"]).exists():
        found = scaling_law.fit(scaling_law.read_points(asked["measured"]))
        row, sentences = scaling_law.scaling_dict(found, at), scaling_law.scaling_lines(found, at)
        if asked["html"]:
            from narrowgauge.report.page import write_page
            from narrowgauge.report.plan_page import render_scaling

            write_page(render_scaling(found, at), Path(asked["html"]))
    else:
        from narrowgauge.runs.record import read_run

        folders = [*map(Path, _names(asked["measured"])), *runs]
        if not folders:
            raise click.UsageError("--measured needs times or run folders.", click.get_current_context())
        steps = launches.attribute([read_run(folder) for folder in folders])
        row, sentences = launches.attribution_dict(steps), launches.attribution_lines(steps)
        if asked["html"]:
            from narrowgauge.report.page import write_page
            from narrowgauge.report.plan_page import render_attribution

            write_page(render_attribution(steps), Path(asked["html"]))
    if as_json:
        return tables.write_object(row)
    return _echo([*sentences, *filter(None, [asked["html"]])])


def _regression(asked: dict[str, Any], runs: tuple[Path, ...], as_json: bool) -> None:
    from narrowgauge.planner.measured.launches import read_launch
    from narrowgauge.planner.measured.regression import compare_launches, regression_dict, regression_lines

    chip, shares = _calibrated(asked["chip"])
    before, after = (read_launch(path, chip) for path in asked["regression"])
    found = compare_launches(before, after, shares)
    if asked["html"]:
        from narrowgauge.report.page import write_page
        from narrowgauge.report.plan_page import render_regression

        write_page(render_regression(found), Path(asked["html"]))
    if as_json:
        return tables.write_object(regression_dict(found))
    return _echo([*regression_lines(found), *filter(None, [asked["html"]])])


def _calibrate(asked: dict[str, Any], runs: tuple[Path, ...], as_json: bool) -> None:
    from narrowgauge.planner.inputs.clusters import HERE
    from narrowgauge.planner.measured import calibration
    from narrowgauge.spec.chips import get_chip

    names = [name for name in asked["chip"] or () if name != HERE]
    if len(names) > 1:
        raise click.UsageError("One machine is calibrated at a time.", click.get_current_context())
    found = calibration.calibrate(runs, get_chip(names[0]) if names else None)
    file = calibration.keep(found)
    if as_json:
        shares = {name: dataclasses.asdict(found.shares[name]) for name in found.fitted}
        return tables.write_object({"name": found.name, "error": found.error, "worst": found.worst, "shares": shares})
    return _echo([*calibration.calibration_lines(found), str(file)])


def _calibrated(names: list[str] | None) -> tuple[Any, Any]:
    """The chip of that name and its shares: those of this machine as calibrated, or the published ones of the table's."""
    if not names:
        return None, None
    if len(names) > 1:
        raise click.UsageError("Both launches are of one chip.", click.get_current_context())
    from narrowgauge.planner.inputs.clusters import HERE
    from narrowgauge.planner.measured.calibration import kept
    from narrowgauge.spec.chips import get_chip

    if names[0] != HERE:
        return get_chip(names[0]), None
    found = kept(HERE)
    return found.chip, found.shares


_ANSWERS: dict[str, Callable[[dict[str, Any], tuple[Path, ...], bool], None]] = {
    "model": _plan,
    "params": _plan,
    "measured": _measured,
    "regression": _regression,
    "calibrate": _calibrate,
}
