"""The commands: each parses its arguments, calls one function, and prints the result.

Every flag of ``train`` is a field of ``TrainConfig``, a key of a ``--config`` file, and a key of ``run.toml``. Flags override
the file, and the file overrides defaults. Commands check their input first and import PyTorch, which takes seconds, only then.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any, Literal

import click

from narrowgauge import __version__
from narrowgauge.cli import diagnosing, flags, launching, planning, watching
from narrowgauge.cli.exit_status import CommandGroup, help_without_command, say_former
from narrowgauge.spec import show, tables
from narrowgauge.spec.recipes import Recipe

_run_folder = click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
_settings_file = click.option(
    "--config", "file", metavar="FILE", type=click.Path(path_type=Path),
    help="A TOML file of the same settings (batch_size = 8); flags override it.",
)  # fmt: skip


@click.group(cls=CommandGroup, invoke_without_command=True)
@click.version_option(__version__, prog_name="narrowgauge", message="%(prog)s %(version)s")
@click.pass_context
def main(context: click.Context) -> None:
    """Train language models in narrow number formats, know what each costs, and get the same bits again."""
    help_without_command(context)
    if context.invoked_subcommand is None:
        click.echo(_next_steps())


_EXAMPLES = {
    "narrowgauge train --data text.txt --recipe bfloat16/word": "a run, and all that it loses",
    "narrowgauge compare --recipes bfloat16/master,bfloat16/word --seeds 3": "what a format costs",
    "narrowgauge plan run --model llama-8b --chip H100-SXM5 --chips 8": "what fits, and how fast",
    "narrowgauge diagnose trainer_state.json": "what went wrong, in a run of any framework",
}


def _next_steps() -> str:
    """Four commands to begin with, and what can be done with the newest run here."""
    from narrowgauge.runs.record import latest_folders

    lines = ["", "Examples:", *(f"  {words}\n      {why}" for words, why in _EXAMPLES.items())]
    for folder in latest_folders(Path("runs"))[:1]:
        then = "report" if (folder / "summary.json").is_file() else "resume"
        lines += ["", f"The newest run here: narrowgauge {then} {folder}"]
    return "\n".join(lines)


@main.group("show", short_help="Tables, their rows, and this machine.", invoke_without_command=True)
@click.pass_context
def show_group(context: click.Context) -> None:
    """Print a table (formats, recipes, storages, chips, frameworks, …), one of its rows, or the machine."""
    help_without_command(context)


def _add_table(name: str, help: str) -> None:
    @show_group.command(name, help=help)
    @flags.json_list
    def show_table(as_json: bool) -> None:
        if as_json:
            tables.write_json(show.rows(name))
        else:
            tables.write(show.table(name))


_add_table("formats", "Number formats: range and precision.")
_add_table("recipes", "Recipes: purpose, bytes, losses, native hardware.")
_add_table("aliases", "Names in other libraries, and the recipe that each means.")
_add_table("sets", "Named sets of recipes for compare, and the question that each answers.")
_add_table("computes", "How operands of the three matmuls are cast.")
_add_table("gathers", "Which computes can have sharded weights gathered as codes.")
_add_table("scales", "How scalify propagates and measures scales.")
_add_table("storages", "How weights and moments are stored between steps.")
_add_table("rules", "Update rules: options, usual rates, sources.")
_add_table("reductions", "How and in which format ranks sum gradients.")
_add_table("chips", "Accelerators: memory, bandwidth, peak rates, links.")
_add_table("models", "Preset models: shapes and parameter counts.")
_add_table("frameworks", "Checkpoints of other libraries, read and written.")


@show_group.command("format")
@click.argument("name", shell_complete=flags.number_formats)
@flags.json_list
def show_format(name: str, as_json: bool) -> None:
    """All properties of the format NAME."""
    if as_json:
        tables.write_json(show.detail_format(name))
    else:
        tables.write(show.page_format(name))


# A negative number would otherwise be parsed as an option.
@show_group.command("value", context_settings={"ignore_unknown_options": True})
@click.argument("value")
@flags.json_list
def show_value(value: str, as_json: bool) -> None:
    """VALUE (0.1, 1e-8, 0x1p-3, inf) rounded to every format."""
    if as_json:
        tables.write_json(show.detail_value(value))
    else:
        tables.write(show.page_value(value))


@show_group.command("recipe", short_help="What one recipe stores, computes and loses.")
@click.argument("name", shell_complete=flags.recipes)
@flags.json_list
def show_recipe(name: str, as_json: bool) -> None:
    """What the recipe NAME (or a .toml file) stores, computes and loses."""
    if as_json:
        tables.write_json(show.detail_recipe(name))
    else:
        tables.write(show.page_recipe(name))


@show_group.command("environment", short_help="This machine, for an issue report.")
@click.option("--torch", "with_torch", is_flag=True, help="Import PyTorch, and add what it reports (some seconds).")
@flags.json_list
def show_environment(with_torch: bool, as_json: bool) -> None:
    """Describe this machine for an issue report: versions, processor, GPUs, kernel cache, relevant variables."""
    # Imported here: reading the versions of packages takes longer than all tables.
    from narrowgauge.cli import environment

    found = environment.collect()
    if with_torch:
        found["torch"] = environment.collect_from_torch()
    if as_json:
        tables.write_json(found)
    else:
        click.echo(environment.describe(found))


_OF_ARITHMETIC: list[click.Parameter] = [
    click.Argument(["others"], metavar="[RUN|FILE]…", nargs=-1, type=click.Path(path_type=Path)),
    click.Option(
        ["--device"],
        type=click.Choice(["cpu", "cuda"]),
        help="What to measure.  [default: the device that runs train on]",
    ),
    click.Option(["--json", "as_json"], is_flag=True, help="Print a JSON object, which can be given as a FILE."),
]


@show_group.command("arithmetic", short_help="This machine's sums and roundings, measured.", params=_OF_ARITHMETIC)
def show_arithmetic(others: tuple[Path, ...], device: str | None, as_json: bool) -> None:
    """Measure this machine's arithmetic: orders of sums, roundings, last bits of functions. Takes some seconds.

    With a RUN folder, or a FILE of --json, print what differs between the two and what a run notices of it; with two of them,
    compare these, and measure nothing.
    """
    from narrowgauge.cli.environment import print_arithmetic

    print_arithmetic(others, device, as_json)


@main.command("fingerprint", params=_OF_ARITHMETIC, hidden=True)
@click.pass_context
def fingerprint(context: click.Context, /, **asked: Any) -> None:
    """Former spelling of `show arithmetic`."""
    say_former("narrowgauge fingerprint", "narrowgauge show arithmetic")
    context.invoke(show_arithmetic, **asked)


@main.command("train", cls=flags.SettingsCommand, params=flags.of_settings())
@_settings_file
@watching.flag
@launching.options
def train(file: Path | None, watched: bool, launch: launching.Launch, **settings: Any) -> None:
    """Train a language model on text, and record it in a run folder."""
    launching.refuse_once()
    from narrowgauge.trainer import memory, resume_checks
    from narrowgauge.trainer.config import TrainConfig

    if launch.settings is not None:
        return _echo_folder(launching.train(TrainConfig.from_dict(launch.settings), launch))
    defaults = TrainConfig.from_toml(file) if file else TrainConfig()
    given = {name: value for name, value in settings.items() if value is not None}
    config = dataclasses.replace(defaults, **given)
    is_start = launching.starts_ranks(launch)
    if is_start or launching.is_new_and_alone(config.out):
        config = config.validated()
        memory.require_batch(config)
        resume_checks.require_ranks(config, launch.nproc or 1)
        if is_start:
            folder = Path(str(config.out))
            with watching.watching(folder, watched):
                return launching.start(launch, config.to_dict(), lambda: launching.how_to_resume(folder), folder)
    with watching.watching(config.out, watched):
        trained = launching.train(config, launch)
    _echo_folder(trained)


def _echo_folder(folder: Path | None) -> None:
    if folder is not None:
        click.echo(folder)


@main.command(
    "resume",
    cls=flags.SettingsCommand,
    short_help="Resume a run, on any number of ranks.",
    params=flags.of_resumes(),
)
@_run_folder
@click.option("--stop-after", type=click.IntRange(min=1), metavar="N", help="Stop again after this step.")
@click.option(
    "--accept-changes", is_flag=True,
    help="Resume although run.toml was changed or rows are missing; the changes are recorded as a note.",
)  # fmt: skip
@launching.options
def resume(folder: Path, stop_after: int | None, accept_changes: bool, launch: launching.Launch, **chosen: Any) -> None:
    """Resume the run in DIR, on any number of ranks; on one, the result is bit-identical to an uninterrupted run."""
    launching.refuse_once()
    from narrowgauge.trainer import resume_checks
    from narrowgauge.trainer.config import TrainConfig

    if launching.is_restart() and launching.is_finished(folder):
        return _echo_folder(folder)
    given = {name: value for name, value in chosen.items() if value is not None}
    recorded = resume_checks.require_resumable(folder).config
    config = TrainConfig.from_dict({**recorded, **given}, str(folder / "run.toml"))
    config.require_agreement()
    if launching.starts_ranks(launch):
        resume_checks.require_ranks(config, launch.nproc or 1)
        return launching.start(launch, {}, lambda: launching.how_to_resume(folder), folder)
    _echo_folder(launching.resume(folder, config, launch, stop_after, accept_changes, chosen=given))


@main.command(
    "compare",
    cls=flags.SettingsCommand,
    short_help="What several recipes cost, trained alike.",
    params=flags.of_comparisons(),
)
@click.option(
    "--recipes",
    metavar="A,B,…",
    type=flags.RECIPES_HERE,
    shell_complete=flags.many_recipes,
    help="Recipes, .toml files or a named set (narrowgauge show sets); optional when --out continues a comparison.",
)
@click.option(
    "--seeds", type=click.IntRange(min=1), metavar="N", help="Seeds per recipe; 3 give useful intervals.  [default: 1]"
)
@click.option("--seconds", type=float, metavar="X", help="Seconds of training steps per run, instead of --steps.")
@click.option("--tokens", type=click.IntRange(min=1), metavar="N", help="Tokens per run, instead of --steps.")
@click.option(
    "--resolve",
    type=float,
    metavar="X",
    help="Difference of losses to tell from none: recipes are called as good only where they are certainly no worse than by X; "
    "otherwise the verdict says how many seeds it takes.  [default: 1 % of the loss]",
)
@click.option(
    "--out", metavar="DIR", type=click.Path(path_type=Path),
    help="Folder of the comparison: new, empty, or one to continue.  [default: comparisons/MODEL-N, the first free N]",
)  # fmt: skip
@_settings_file
@watching.flag
@flags.json_list
@launching.options
def compare(
    recipes: list[Recipe] | None,
    seeds: int | None,
    seconds: float | None,
    tokens: int | None,
    resolve: float | None,
    out: Path | None,
    file: Path | None,
    watched: bool,
    as_json: bool,
    launch: launching.Launch,
    **settings: Any,
) -> None:
    """Train with several recipes from the same initial weights on the same text, and report what each costs.

    narrowgauge compare --out DIR continues a stopped comparison, on any number of ranks. To add seeds or recipes, also give
    --seeds N or --recipes (all of them); all other settings stay as they are.
    """
    launching.refuse_once()
    from narrowgauge.trainer import resume_checks
    from narrowgauge.trainer.experiment import definition, training

    given = {name: value for name, value in settings.items() if value is not None}
    lengths = [f"--{name}" for name, value in (("seconds", seconds), ("tokens", tokens)) if value is not None]
    if lengths and "steps" in given:
        raise click.UsageError(
            f"--steps and {lengths[0]} were given: a run has one length.", click.get_current_context()
        )
    if recipes is None and out is None:
        raise click.UsageError("Missing option '--recipes'.", click.get_current_context())
    if launch.settings is not None:
        out, config = Path(launch.settings["out"]), definition.ExperimentConfig.from_dict(launch.settings["definition"])
    else:
        config = definition.config_of_flags(
            recipes, given, file=file, seeds=seeds, seconds=seconds, tokens=tokens, resolve=resolve, out=out
        )
    if launching.starts_ranks(launch):
        resume_checks.require_ranks(config.base, launch.nproc or 1)
        folder = out or training.free_folder(config.base.model)
        handed = {"definition": config.to_dict(), "out": str(folder)}
        with watching.watching(folder, watched):
            return launching.start(launch, handed, lambda: launching.how_to_compare_on(folder))
    if watched and out is None and launch.settings is None and launching.is_alone():
        out = training.free_folder(config.base.model)
    with watching.watching(out, watched and launch.settings is None):
        compared = launching.compare(config, out, launch, sys.stderr if as_json else sys.stdout)
    if compared is None:
        return None
    found, page = compared
    if as_json:
        return tables.write_json(found.rows)
    tables.write(found.table())
    click.echo(f"\n{found.text()}")
    for answer in found.answers:
        click.echo("\n".join(["", answer.question, *answer.sentences]))
    click.echo(f"\n{page}")


@main.command("report", short_help="Write one HTML page about runs.")
@click.argument("runs", metavar="RUN…", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out", metavar="FILE", type=click.Path(path_type=Path),
    help="The page to write.  [default: report.html in the one folder named, NAME.html next to NAME.zip]",
)  # fmt: skip
@click.option(
    "--pack", metavar="FILE", type=click.Path(path_type=Path),
    help="Write a zip file that report reads like the folders; a page only with --out.",
)  # fmt: skip
@click.option(
    "--table", "form", type=click.Choice(list(tables.FORMS)),
    help="Print the table of costs instead of writing a page: markdown, LaTeX (booktabs), or all values as CSV.",
)  # fmt: skip
def report(runs: tuple[Path, ...], out: Path | None, pack: Path | None, form: str | None) -> None:
    """Write one HTML page about runs. Each RUN is a run folder, the folder of a comparison, a zip file of --pack, or the log of
    another framework: a Hugging Face trainer_state.json, a Lightning metrics.csv, TensorBoard event files, or their folder;
    or a table (CSV, JSON rows, an export of Weights & Biases) or a log of text.

    --pack writes what a page needs, to share it: settings, logged rows and summaries, without checkpoints and data. run.toml is
    packed unchanged, with the paths of model, data and folder, and the versions and processor of the machine.
    """
    from narrowgauge.report import publishing
    from narrowgauge.report.publishing import report as write_report

    if pack is not None:
        click.echo(publishing.pack(runs, pack))
    if form is not None:
        click.echo(tables.FORMS[form](publishing.table(runs)), nl=False)
    if (pack is None and form is None) or out is not None:
        click.echo(write_report(runs, out))


@main.command("export", short_help="Write a run's model as a Hugging Face folder.")
@_run_folder
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--dtype", type=click.Choice(["visible", "float32"]), default="visible", show_default=True,
    help="The weights that the model sees, or the stored ones in float32.",
)  # fmt: skip
@click.option(
    "--max-shard-size", type=flags.Size(), default="5GB", show_default=True, metavar="SIZE",
    help="Largest file, unless one tensor is larger, as for save_pretrained: 500MB, 5GB.",
)  # fmt: skip
@click.option(
    "--quantize", metavar="COMPUTE",
    help="Store linear layers as 8-bit codes: int8-outlier, int8-outlier+threshold=4, int8-row, float8-row, … "
    "narrowgauge sample OUT TEXT continues a text with them.",
)  # fmt: skip
@launching.options
def export(
    folder: Path,
    out: Path,
    dtype: Literal["visible", "float32"],
    max_shard_size: int,
    quantize: str | None,
    launch: launching.Launch,
) -> None:
    """Export the model of the run in DIR to a Hugging Face folder OUT; ranks share the files among them."""
    launching.refuse_once()
    from narrowgauge.trainer import resume_checks

    resume_checks.refuse_occupied(out)
    resume_checks.require_trained(folder)
    if quantize is not None:
        _echo_folder(launching.export_quantized(launch, folder, out, dtype, max_shard_size, quantize))
        return
    if launching.starts_ranks(launch):
        return launching.start(launch, {}, lambda: "Start it again.")
    _echo_folder(launching.export(launch, folder, out, dtype, max_shard_size))


@main.command("convert", short_help="Convert a training state to another storage.")
@click.argument("source", metavar="CKPT", type=click.Path(path_type=Path))
@click.option(
    "--recipe",
    metavar="TEXT",
    type=flags.RECIPE,
    shell_complete=flags.recipes,
    help="The recipe to convert to, or a .toml file.",
)
@click.option(
    "--out", metavar="FOLDER", type=click.Path(path_type=Path),
    help="The output folder; new or empty.  [default: next to CKPT, named after the recipe]",
)  # fmt: skip
@click.option(
    "--optimizer", metavar="FILE", type=click.Path(path_type=Path),
    help="The optimizer state, if it is not in CKPT.",
)  # fmt: skip
@click.option(
    "--names", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Parameter names in the model's order, one per line, if CKPT does not contain them.",
)  # fmt: skip
@click.option(
    "--like", metavar="CKPT", type=click.Path(path_type=Path),
    help="Instead of --recipe: write a copy of this checkpoint of DeepSpeed, Megatron-Core or nanotron, with CKPT's state in it.",
)  # fmt: skip
@flags.json_list
def convert(
    source: Path,
    recipe: Recipe | None,
    out: Path | None,
    optimizer: Path | None,
    names: Path | None,
    like: Path | None,
    as_json: bool,
) -> None:
    """Convert the training state CKPT (a run, or a checkpoint of another library: see `show frameworks`) to another storage."""
    launching.require_one_process("convert")
    from narrowgauge.checkpoints.conversion.preflight import require_convertible

    require_convertible(source, recipe, out, optimizer, like)
    from narrowgauge.checkpoints.conversion import states

    listed = names.read_text(encoding="utf-8").split() if names is not None else ()
    report = states.convert(source, recipe, out, optimizer, listed, like)
    if as_json:
        tables.write_json(report.row())
    else:
        tables.write(report.table())


@main.command("profile", short_help="Measure what recipes cost a model here.")
@flags.model_and_recipes
@click.option(
    "--chip",
    metavar="NAME",
    hidden=True,
    shell_complete=flags.chips,
    help="Former spelling of narrowgauge plan layers: predict for this chip instead of measuring here.",
)
@click.option(
    "--numerics", is_flag=True, help="Also train some steps on text and report the error of each layer's casts."
)
@flags.batch_shape
@flags.json_list
def profile(model: str, recipes: list[Recipe], as_json: bool, **options: Any) -> None:
    """Measure what recipes cost a model here: casts, matmuls, step time, memory, and the fastest combination.

    narrowgauge plan layers predicts the same for another chip.
    """
    if options["chip"] is not None:
        say_former("narrowgauge profile --chip", "narrowgauge plan layers")
    from narrowgauge.profiling.profiler import profile as profiled

    found = profiled(model, recipes, **options, say=lambda line: click.echo(f"{line} …", err=True))
    planning.show_profile(found, as_json)


main.add_command(planning.plan_group)
main.add_command(watching.watch_command)
main.add_command(diagnosing.diagnose_command)
show_group.add_command(diagnosing.causes_command)


@main.command("sample", short_help="Continue a text with a run's model.")
@_run_folder
@click.argument("text")
@click.option("--tokens", type=click.IntRange(min=1), default=100, show_default=True, help="Tokens to generate.")
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.8,
    show_default=True,
    help="0 always picks the most likely token.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Sampling seed.")
def sample(folder: Path, text: str, tokens: int, temperature: float, seed: int) -> None:
    """Continue TEXT with the model of the run in DIR, or of an export with --quantize."""
    launching.require_one_process("sample")
    from narrowgauge.trainer import resume_checks

    resume_checks.require_sampled(folder)
    from narrowgauge.trainer import text_sampling

    click.echo(text_sampling.sample(folder, text, tokens, temperature, seed))
