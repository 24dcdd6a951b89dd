"""The commands. Each parses its arguments, calls one function, and prints the result.

Every flag of ``train`` is a field of ``TrainConfig``, a key of a ``--config`` file, and a key of ``run.toml``. Flags override
the file, and the file overrides defaults. Commands check their input first, and import PyTorch (some seconds) only then.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import platform
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from narrowgauge import __version__
from narrowgauge.cli import diagnosing, flags, planning, watching
from narrowgauge.cli.exit_status import CommandGroup, help_without_command
from narrowgauge.errors import ChipError, RankError
from narrowgauge.spec import show, tables
from narrowgauge.spec.recipes import Recipe

if TYPE_CHECKING:
    from narrowgauge.trainer.config import TrainConfig

_run_folder = click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
_settings_file = click.option(
    "--config", "file", metavar="FILE", type=click.Path(path_type=Path),
    help="A TOML file of the same settings (batch_size = 8); flags override it.",
)  # fmt: skip

_nproc = click.option(
    "--nproc", type=click.IntRange(min=1), metavar="N",
    help="Run on N ranks of this machine: short for torchrun --nproc-per-node N -m narrowgauge.  [default: 1, or torchrun's]",
)  # fmt: skip


def keep_pages(mmap_threshold: int = 1 << 30, trim_threshold: int = (1 << 31) - 1) -> None:
    """Make glibc keep large freed buffers in this process. A training step frees and allocates the same buffers again.

    By default every buffer above 32 MiB is mapped and unmapped each time, and all of its pages fault again. Keeping
    the buffers makes a small model's compiled step faster. Does nothing without glibc. Its own maxima are 32 and 64 MiB.
    It changes the whole process, so only commands call it, and never the library.
    """
    if platform.libc_ver()[0] == "glibc":
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc = ctypes.CDLL(None)
        libc.mallopt(m_mmap_threshold, mmap_threshold)
        libc.mallopt(m_trim_threshold, trim_threshold)


def _ranks_to_start(nproc: int | None) -> int:
    """Return how many ranks this process must start; 0 if it is the only rank."""
    from narrowgauge.distributed import job

    size = job.world_size()
    if nproc is not None and size not in (1, nproc):
        raise RankError(f"Cannot start {nproc} ranks in one of torchrun's {size}.", "Leave --nproc out.")
    return nproc if nproc is not None and nproc > size else 0


def _run(config: TrainConfig, function: Callable[[], Path]) -> None:
    """Call a function of the training loop as one of the ranks, and print the folder that it returns."""
    from narrowgauge.distributed import job

    keep_pages()
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)  # PyTorch's own, at every step
    with job.joined(), job.threads_of(config.threads, config.recipe.reduction.order_invariant):
        job.require_same(config.to_dict())
        folder = function()
    if job.rank() == 0:
        click.echo(folder)


def _require_one_process(command: str) -> None:
    """Refuse torchrun's ranks in a command that needs the files of a whole run."""
    from narrowgauge.distributed import job

    if (size := job.world_size()) > 1:
        raise RankError(f"Cannot run narrowgauge {command} on {size} ranks.", "Start it once, without torchrun.")


@click.group(cls=CommandGroup, invoke_without_command=True)
@click.version_option(__version__, prog_name="narrowgauge", message="%(prog)s %(version)s")
@click.pass_context
def main(context: click.Context) -> None:
    """Train language models in narrow number formats, know what each costs, and get the same bits again.

    \b
    narrowgauge tokenize text.txt tokens
    narrowgauge train --data tokens --recipe bfloat16/word
    narrowgauge compare --recipes bfloat16/master,bfloat16/word --seeds 3
    narrowgauge plan run --model llama-8b --chip H100-SXM5 --chips 8
    narrowgauge diagnose trainer_state.json
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # PyTorch's own warnings to its developers
    help_without_command(context)


@main.group("show", short_help="Tables, recipes, and this machine's arithmetic.", invoke_without_command=True)
@click.pass_context
def show_group(context: click.Context) -> None:
    """Print a table (formats, recipes, storages, chips, …), a recipe, or this machine's arithmetic."""
    help_without_command(context)


def _print(as_json: bool, rows: list[tables.Row], parts: tables.Table | list[tables.Table]) -> None:
    if as_json:
        tables.write_json(rows)
    else:
        tables.write(parts)


def _print_table(name: str, as_json: bool) -> None:
    table = show.table(name)
    _print(as_json, table.rows, table)


for _name, (_help, *_) in show.TABLES.items():
    show_group.command(_name, help=_help)(flags.json_list(partial(_print_table, _name)))


@show_group.command("checks")
@flags.json_list
def show_checks(as_json: bool) -> None:
    """Readings: what measures each, its bound, and the bound's source."""
    from narrowgauge.analysis.kinds import kind_rows, kind_table

    _print(as_json, kind_rows(), kind_table())


@show_group.command("recipe", short_help="What one recipe stores, computes and loses.")
@click.argument("name")
@flags.json_list
def show_recipe(name: str, as_json: bool) -> None:
    """Print what the recipe NAME (or a .toml file) stores, computes and loses."""
    _print(as_json, *show.page_recipe(name))


@show_group.command("arithmetic", short_help="This machine's sums and roundings, measured.")
@click.option("--cuda", is_flag=True, help="Measure the GPU, not the CPU.")
@flags.json_object
def show_arithmetic(cuda: bool, as_json: bool) -> None:
    """Measure this machine's arithmetic: the bits that sums and functions give on fixed numbers.

    On two machines, compare the outputs with diff; of two runs, narrowgauge diagnose RUN OTHER compares it.
    """
    import torch

    from narrowgauge.gauges.arithmetic import measure_arithmetic

    if cuda and not torch.cuda.is_available():
        raise ChipError("Cannot measure a GPU because PyTorch sees none here.", "Leave --cuda out to measure this CPU.")
    table = measure_arithmetic(torch.device("cuda" if cuda else "cpu"))
    if as_json:
        return tables.write_json(table)
    return click.echo("\n".join(f"{name}: {text}" for part in table.values() for name, text in part.items()))


@main.command("tokenize", short_help="Make a token map from text, for train and compare.")
@click.argument("text", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--tokenizer", metavar="FILE", type=click.Path(path_type=Path),
    help="A tokenizer.json, or a Hugging Face folder with one.  [default: a token for each byte]",
)  # fmt: skip
def tokenize(text: Path, out: Path, tokenizer: Path | None) -> None:
    """Tokenize TEXT into a new token map OUT, the data of train and compare.

    TEXT is a text file, a .jsonl file with "text" in each line, or a folder of .txt, .md, .py and .jsonl files.
    """
    from narrowgauge.trainer.data.text import read_documents
    from narrowgauge.trainer.data.tokens import load_tokenizer, write_tokens

    click.echo(write_tokens(read_documents(text), *load_tokenizer(tokenizer), out))


@main.command("train", params=flags.of_settings())
@_settings_file
@_nproc
def train(file: Path | None, nproc: int | None, **settings: Any) -> None:
    """Train a language model on tokens, and record it in a run folder.

    The same command continues a run that was stopped.
    """
    from narrowgauge.distributed import job
    from narrowgauge.trainer.config import TrainConfig
    from narrowgauge.trainer.resume_checks import run_to_continue

    defaults = TrainConfig.from_toml(file) if file else TrainConfig()
    config = dataclasses.replace(defaults, **flags.given(settings))
    num_ranks, out = _ranks_to_start(nproc), config.out
    if job.world_size() == 1:
        config = config.validated()
        run_to_continue(config.on_ranks(num_ranks or 1))
    if num_ranks:
        words = click.get_current_context().obj
        job.launch(num_ranks, words if out is not None else [*words, "--out", str(config.out)])
    from narrowgauge.trainer import loop

    _run(config, lambda: loop.train(config))


@main.command("resume", short_help="Resume a run, on one or more ranks.")
@_run_folder
@click.option("--stop-after", type=click.IntRange(min=1), metavar="N", help="Stop again after this step.")
@click.option("--restart", is_flag=True, help="Begin again at step 0 if the run has lost its checkpoints.")
@_nproc
def resume(folder: Path, stop_after: int | None, restart: bool, nproc: int | None) -> None:
    """Resume the run in DIR, on at most as many ranks as a step has micro-batches.

    On one rank the result is bit-identical to an uninterrupted run.
    Settings that you edit in its run.toml before hold from there on.
    """
    from narrowgauge.distributed import job
    from narrowgauge.trainer import resume_checks
    from narrowgauge.trainer.config import TrainConfig

    config = TrainConfig.from_dict(resume_checks.unfinished_run(folder).config, str(folder / "run.toml"))
    if num_ranks := _ranks_to_start(nproc):
        config.require_ranks(num_ranks)
        job.launch(num_ranks, click.get_current_context().obj)
    from narrowgauge.trainer import loop

    _run(config, lambda: loop.resume(folder, stop_after, restart=restart))


@main.command(
    "compare", short_help="What several recipes cost, trained alike.", params=flags.of_settings(compared=True)
)
@click.option(
    "--recipes",
    metavar="A,B,…",
    type=flags.RECIPES,
    required=True,
    help="Recipes or .toml files.",
)
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    metavar="N",
    default=1,
    help="Seeds per recipe; 3 give useful intervals.  [default: 1]",
)
@click.option(
    "--out", metavar="DIR", type=click.Path(path_type=Path),
    help="Folder of the comparison, new or one to continue.  [default: comparisons/MODEL-N, the first free N]",
)  # fmt: skip
@flags.json_list
def compare(
    recipes: list[Recipe],
    seeds: int,
    out: Path | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Train with several recipes from the same initial weights on the same tokens, and report what each costs.

    The same command with --out DIR continues a stopped comparison; with more --recipes or --seeds it adds their runs.
    """
    _require_one_process("compare")
    from narrowgauge.trainer import compare as comparing

    keep_pages()
    configs = comparing.define(recipes, flags.given(settings), seeds=seeds)
    comparison, page = comparing.run_comparison(configs, out, sys.stderr if as_json else sys.stdout)
    if as_json:
        return tables.write_json(comparison.rows)
    tables.write(comparison.table())
    click.echo(f"\n{comparison.text()}")
    click.echo(f"\n{page}")


@main.command("report", short_help="Write one HTML page about runs.")
@click.argument("runs", metavar="RUN…", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out", metavar="FILE", type=click.Path(path_type=Path),
    help="The page to write.  [default: report.html in the one folder named]",
)  # fmt: skip
@click.option("--table", is_flag=True, help="Print the table of costs as markdown instead of writing a page.")
def report(runs: tuple[Path, ...], out: Path | None, table: bool) -> None:
    """Write one HTML page about runs. Each RUN is a run folder, the folder of a comparison, or the log of
    another framework: a Hugging Face trainer_state.json, a Lightning metrics.csv, TensorBoard event files, or their folder;
    or a table (CSV).
    """
    from narrowgauge.analysis.comparison.comparison import compare_runs
    from narrowgauge.report import publishing

    say = partial(click.echo, err=True)
    if table:
        click.echo(compare_runs(publishing.read_runs(runs, say)).table().markdown(), nl=False)
    if not table or out is not None:
        click.echo(publishing.report(runs, out, say))


@main.command("export", short_help="Write a run's model as a Hugging Face folder.")
@_run_folder
@click.argument("out", type=click.Path(path_type=Path))
def export(folder: Path, out: Path) -> None:
    """Export the model of the run in DIR to a Hugging Face folder OUT."""
    _require_one_process("export")
    from narrowgauge.trainer import export as exporting

    click.echo(exporting.export(folder, out))


@main.command("profile", short_help="Measure what recipes cost a model here.")
@click.option(
    "--model", required=True, metavar="TEXT",
    help="A preset (narrowgauge show models) or a folder with a config.json.",
)  # fmt: skip
@click.option(
    "--recipe", "--recipes", "recipes", required=True, metavar="A,B,…", type=flags.RECIPES,
    help="Recipes to compare with bfloat16 (narrowgauge show recipes).",
)  # fmt: skip
@click.option(
    "--numerics", metavar="DIR", type=click.Path(path_type=Path),
    help="Also train some steps on this token map and report the error of each layer's casts.",
)  # fmt: skip
@click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True, help="Sequences per step.")
@click.option(
    "--sequence-length", type=click.IntRange(min=1), default=256, show_default=True, help="Tokens per sequence."
)
@flags.json_list
def profile(model: str, recipes: list[Recipe], as_json: bool, **options: Any) -> None:
    """Measure what recipes cost a model here: whole steps, and each kind of linear layer."""
    from narrowgauge.profiling import profile as profiling

    rows = profiling.profile(model, recipes, **options, say=lambda line: click.echo(f"{line} …", err=True))
    _print(as_json, rows, profiling.tables_of(rows))


main.add_command(planning.plan_group)
main.add_command(watching.watch_command)
main.add_command(diagnosing.diagnose_command)
