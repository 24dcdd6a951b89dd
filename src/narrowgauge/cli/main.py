"""The command line: it parses, calls and prints, and decides nothing.

Every flag of ``train`` is a field of ``TrainConfig``, so a flag, a key of a ``--config`` file and a key of ``run.toml``
are the same thing; a flag overrules the file, and the file the default. Each mistake costs one line on standard error
(what was asked, what was found, what to do) and exit status 2. PyTorch, which takes seconds, is loaded when a command
needs it, and not before what can be refused without it is refused.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import click

from narrowgauge import __version__
from narrowgauge.cli import environment, flags
from narrowgauge.errors import NarrowgaugeError, Terminated, shortened, suggestion
from narrowgauge.spec import details, show, tables
from narrowgauge.spec.recipes import Recipe


class Door(click.Group):
    """The one place where an error becomes a line and a status: 2 for a mistake, 130 for Ctrl-C, 143 for SIGTERM."""

    def main(
        self, args: Sequence[str] | None = None, prog_name: str | None = None, *_: object, **extra: Any
    ) -> NoReturn:
        """Run one command and leave the process."""
        extra["standalone_mode"] = False
        try:
            status = super().main(args, prog_name, **extra)
        except NarrowgaugeError as error:
            status = _complain(type(error).__name__, str(error), 2)
        except click.Abort as abort:
            is_terminated = isinstance(abort.__cause__, Terminated)
            status = _complain("Interrupted", str(abort) or "the command was stopped.", 143 if is_terminated else 130)
        except click.ClickException as error:
            status = _complain("UsageError", _with_advice(error), 2)
        except OSError as error:
            status = _refused(error)
        try:
            sys.stdout.flush()
        except OSError as error:
            status = _refused(error)
        sys.exit(status if isinstance(status, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was named; without one, print the help."""
        try:
            return super().invoke(ctx)
        # click would print an empty line before it passes the interruption on.
        except KeyboardInterrupt as interruption:
            raise click.Abort(str(interruption)) from interruption


def _complain(kind: str, message: str, status: int) -> int:
    click.echo(f"{kind}: {shortened(' '.join(message.split()))}", err=True)
    return status


def _refused(error: OSError) -> int:
    """Standard output took no more, or a path was given that no system takes; anything else is a fault of ours."""
    if error.errno in _NO_PATHS:
        return _complain("OSError", f"Cannot open '{error.filename}': {error.strerror}. Name another path.", 2)
    if error.filename is not None or error.errno not in _UNWRITABLE:
        raise error
    # What is left in its buffer would be tried again at the end of the process, with a traceback.
    sys.stdout = io.StringIO()
    # A reader who has seen enough, such as head, is no mistake.
    if error.errno == errno.EPIPE:
        return 1
    return _complain("OSError", f"Cannot write to standard output: {error.strerror}. Send it elsewhere.", 2)


_NO_PATHS = (errno.ENAMETOOLONG, errno.ELOOP)
_UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def _with_advice(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    if context is None:
        return error.format_message()
    said = error.format_message()
    # click offers every name that is a little alike.
    if isinstance(error, click.NoSuchOption):
        flags = [flag for option in context.command.params for flag in (*option.opts, *option.secondary_opts)]
        said = f"No such option '{error.option_name}'. {suggestion(error.option_name, flags)}"
    return f"{said} ({context.command_path} --help says more.)"


_as_json = click.option("--json", "as_json", is_flag=True, help="Print a list of objects instead.")
_run_folder = click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))


@click.group(cls=Door, invoke_without_command=True)
@click.version_option(__version__, prog_name="narrowgauge", message="%(prog)s %(version)s")
@click.pass_context
def main(context: click.Context) -> None:
    """Train language models in narrow number formats, know what each costs, and get the same bits again."""
    _help_without_command(context)


@main.group("show", invoke_without_command=True)
@click.pass_context
def show_group(context: click.Context) -> None:
    """Print the tables: formats, recipes, aliases, computes, scales, storages, chips, models, or one entry; the environment."""
    _help_without_command(context)


def _help_without_command(context: click.Context) -> None:
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def _add_table(name: str, help: str) -> None:
    @show_group.command(name, help=help)
    @_as_json
    def show_table(as_json: bool) -> None:
        if as_json:
            tables.write_json(show.rows(name))
        else:
            tables.write(show.table(name))


_add_table("formats", "Number formats: what each can hold.")
_add_table("recipes", "Recipes: what each is for, bytes per parameter, what it loses, native where.")
_add_table("aliases", "What recipes are called elsewhere, and the recipe that each name means.")
_add_table("computes", "How the operands of a linear layer's three matmuls are cast.")
_add_table("scales", "What scale each operation of scalify hands on, and which measure a tensor.")
_add_table("storages", "How weights and moments are kept between steps.")
_add_table("chips", "Accelerators: memory, bandwidth, peak rates, links.")
_add_table("models", "Preset models: shapes and parameter counts.")


@show_group.command("format")
@click.argument("name", shell_complete=flags.number_formats)
@_as_json
def show_format(name: str, as_json: bool) -> None:
    """Every figure of the format NAME."""
    if as_json:
        tables.write_json(details.detail_format(name))
    else:
        tables.write(details.page_format(name))


# A number may begin with a minus, which would otherwise be taken for an option.
@show_group.command("value", context_settings={"ignore_unknown_options": True})
@click.argument("value")
@_as_json
def show_value(value: str, as_json: bool) -> None:
    """What VALUE (0.1, 1e-8, 0x1p-3, inf) becomes in every format."""
    if as_json:
        tables.write_json(details.detail_value(value))
    else:
        tables.write(details.page_value(value))


@show_group.command("recipe")
@click.argument("name", shell_complete=flags.recipes)
@_as_json
def show_recipe(name: str, as_json: bool) -> None:
    """What the recipe NAME (or a .toml file) stores and computes, in which formats, and what it loses."""
    if as_json:
        tables.write_json(details.detail_recipe(name))
    else:
        tables.write(details.page_recipe(name))


@show_group.command("environment")
@click.option("--torch", "with_torch", is_flag=True, help="Import PyTorch, and add what it reports (some seconds).")
@_as_json
def show_environment(with_torch: bool, as_json: bool) -> None:
    """Describe this machine for an issue report: versions, processor, GPUs, kernel cache, relevant variables."""
    found = environment.collect()
    if with_torch:
        found["torch"] = environment.collect_from_torch()
    if as_json:
        tables.write_json(found)
    else:
        click.echo(environment.describe(found))


@main.command("train", params=flags.of_settings())
@click.option(
    "--config", "file", metavar="FILE", type=click.Path(path_type=Path),
    help="A TOML file of the same settings (batch_size = 8); flags overrule it.",
)  # fmt: skip
def train(file: Path | None, **settings: Any) -> None:
    """Train a language model on text, and keep everything about it in a run folder."""
    from narrowgauge.trainer import memory
    from narrowgauge.trainer.config import TrainConfig

    asked = TrainConfig.from_toml(file) if file else TrainConfig()
    given = {name: value for name, value in settings.items() if value is not None}
    config = dataclasses.replace(asked, **given).validated()
    memory.require_batch(config)
    from narrowgauge.trainer.console import Console

    with Console(config.steps, config.log_every) as console:
        console.stage("loading PyTorch")
        from narrowgauge.trainer import loop

        folder = loop.train(config, screen=console)
    click.echo(folder)


@main.command("resume")
@_run_folder
@click.option("--stop-after", type=click.IntRange(min=1), metavar="N", help="Stop again after this step.")
@click.option(
    "--accept-changes", is_flag=True,
    help="Go on although run.toml was changed or rows are missing; what it is becomes a note of the run.",
)  # fmt: skip
def resume(folder: Path, stop_after: int | None, accept_changes: bool) -> None:
    """Go on with the run in DIR, bit for bit as if it had never stopped."""
    from narrowgauge.trainer import preflight

    preflight.require_resumable(folder)
    from narrowgauge.trainer import loop

    click.echo(loop.resume(folder, stop_after, *([True] if accept_changes else [])))


@main.command("compare", params=flags.of_comparisons())
@click.option(
    "--recipes",
    metavar="A,B,…",
    type=flags.RECIPES,
    shell_complete=flags.many_recipes,
    help="Recipes or .toml files; to go on with --out, those it has, unless given.",
)
@click.option(
    "--seeds", type=click.IntRange(min=1), metavar="N", help="Starts per recipe; 3 give useful intervals.  [default: 1]"
)
@click.option("--seconds", type=float, metavar="X", help="Seconds of training steps per run, instead of --steps.")
@click.option("--tokens", type=click.IntRange(min=1), metavar="N", help="Tokens per run, instead of --steps.")
@click.option(
    "--out", metavar="DIR", type=click.Path(path_type=Path),
    help="Folder of the comparison: new, empty, or one to go on with.  [default: comparisons/MODEL-N, the first free N]",
)  # fmt: skip
@click.option(
    "--config", "file", metavar="FILE", type=click.Path(path_type=Path),
    help="A TOML file of the same settings (batch_size = 8); flags overrule it.",
)  # fmt: skip
@_as_json
def compare(
    recipes: list[Recipe] | None,
    seeds: int | None,
    seconds: float | None,
    tokens: int | None,
    out: Path | None,
    file: Path | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Train in several recipes from the same starts on the same text, and say in words what each costs.

    What was stopped goes on with: narrowgauge compare --out DIR. More seeds or recipes are added with --seeds N or --recipes
    (all of them); what is not given stays as it was.
    """
    from narrowgauge.experiment import definition, training

    given = {name: value for name, value in settings.items() if value is not None}
    lengths = [f"--{name}" for name, value in (("seconds", seconds), ("tokens", tokens)) if value is not None]
    if lengths and "steps" in given:
        raise click.UsageError(
            f"--steps and {lengths[0]} were given: a run has one length.", click.get_current_context()
        )
    if recipes is None and out is None:
        raise click.UsageError("Missing option '--recipes'.", click.get_current_context())
    config = definition.config_of_flags(recipes, given, file=file, seeds=seeds, seconds=seconds, tokens=tokens, out=out)
    found, page = training.run_experiment(config, out, sys.stderr if as_json else sys.stdout)
    if as_json:
        return tables.write_json(found.rows)
    tables.write(found.table())
    click.echo(f"\n{found.text()}\n\n{page}")


@main.command("report")
@click.argument("runs", metavar="RUN…", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out", metavar="FILE", type=click.Path(path_type=Path),
    help="The page to write.  [default: report.html in the one folder named, NAME.html next to NAME.zip]",
)  # fmt: skip
@click.option(
    "--pack", metavar="FILE", type=click.Path(path_type=Path),
    help="Write no page, unless --out is given, but one zip file that report reads as it reads the folders.",
)  # fmt: skip
def report(runs: tuple[Path, ...], out: Path | None, pack: Path | None) -> None:
    """Write one page on runs. Each RUN is the folder of a run or of a comparison, or a zip file of --pack.

    --pack packs what a page is made from, to hand it to somebody else: settings, logged rows and summaries, and no
    checkpoints or data. They are packed as they are: run.toml holds the paths of model, data and folder as they were
    given, and the versions and processor of the machine.
    """
    from narrowgauge.report import packed_runs
    from narrowgauge.report.write import report as write_report

    if pack is not None:
        click.echo(packed_runs.pack(runs, pack))
    if pack is None or out is not None:
        click.echo(write_report(runs, out))


@main.command("export")
@_run_folder
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--dtype", type=click.Choice(["visible", "float32"]), default="visible", show_default=True,
    help="The weights as the model sees them, or the exact stored ones.",
)  # fmt: skip
def export(folder: Path, out: Path, dtype: Literal["visible", "float32"]) -> None:
    """Write the model of the run in DIR as a Hugging Face folder OUT."""
    from narrowgauge.trainer import preflight

    preflight.refuse_occupied(out)
    preflight.require_trained(folder)
    from narrowgauge.trainer import exporting

    click.echo(exporting.export(folder, out, dtype))


@main.command("convert")
@click.argument("source", metavar="CKPT", type=click.Path(path_type=Path))
@click.option(
    "--recipe",
    required=True,
    metavar="TEXT",
    type=flags.RECIPE,
    shell_complete=flags.recipes,
    help="The recipe to convert to, or a .toml file that says one.",
)
@click.option(
    "--out", metavar="FOLDER", type=click.Path(path_type=Path),
    help="The folder to make; new or empty.  [default: beside CKPT, named after the recipe]",
)  # fmt: skip
@click.option(
    "--optimizer", metavar="FILE", type=click.Path(path_type=Path),
    help="The optimizer's state, where it lies apart from the weights.",
)  # fmt: skip
@click.option(
    "--names", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="The parameters' names in the model's order, a line each, where CKPT does not tell it.",
)  # fmt: skip
@_as_json
def convert(
    source: Path, recipe: Recipe, out: Path | None, optimizer: Path | None, names: Path | None, as_json: bool
) -> None:
    """Take the training state CKPT (a run, a checkpoint, a file of torch.save, Hugging Face weights) to another storage."""
    from narrowgauge.conversion.preflight import require_convertible

    require_convertible(source, recipe, out, optimizer)
    from narrowgauge.conversion import states

    listed = names.read_text(encoding="utf-8").split() if names is not None else ()
    report = states.convert(source, recipe, out, optimizer, listed)
    if as_json:
        tables.write_json(report.row())
    else:
        tables.write(report.table())


@main.command("profile")
@click.option(
    "--model",
    required=True,
    metavar="TEXT",
    shell_complete=flags.models,
    help="A preset (narrowgauge show models) or a folder with a config.json.",
)
@click.option(
    "--recipes",
    required=True,
    metavar="A,B,…",
    type=flags.RECIPES,
    shell_complete=flags.many_recipes,
    help="Recipes to compare with bfloat16 (narrowgauge show recipes).",
)
@click.option(
    "--chip",
    metavar="NAME",
    shell_complete=flags.chips,
    help="Predict for this chip (narrowgauge show chips) instead of measuring here.",
)
@click.option("--numerics", is_flag=True, help="Also train some steps on text and say what each layer's casts lose.")
@click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True, help="Sequences per step.")
@click.option(
    "--sequence-length", type=click.IntRange(min=1), default=256, show_default=True, help="Tokens per sequence."
)
@_as_json
def profile(as_json: bool, **asked: Any) -> None:
    """Say what recipes would cost a model: each layer's casts and matmuls, the whole step, memory, and the fastest mixture."""
    from narrowgauge.profiling.profiler import profile as profiled

    found = profiled(
        asked.pop("model"), asked.pop("recipes"), **asked, say=lambda line: click.echo(f"{line} …", err=True)
    )
    if as_json:
        tables.write_json(found.rows())
    else:
        tables.write(found.tables())
        click.echo(f"\n{found.text()}")


@main.command("sample")
@_run_folder
@click.argument("text")
@click.option("--tokens", type=click.IntRange(min=1), default=100, show_default=True, help="How many to write.")
@click.option(
    "--temperature", type=click.FloatRange(min=0), default=0.8, show_default=True, help="0 takes the likeliest token."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the random choices.")
def sample(folder: Path, text: str, tokens: int, temperature: float, seed: int) -> None:
    """Let the model of the run in DIR go on from TEXT."""
    from narrowgauge.trainer import preflight

    preflight.require_trained(folder)
    from narrowgauge.trainer import exporting

    click.echo(exporting.sample(folder, text, tokens, temperature, seed))
