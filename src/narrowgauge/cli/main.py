"""The commands. Each parses its arguments, calls one function, and prints the result.

Every flag of ``train`` is a field of ``Settings`` and a key of ``run.toml``. Commands check their
input first, and import PyTorch (some seconds) only then.
"""

import logging
import os
import warnings
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import click

from narrowgauge import __version__
from narrowgauge.cli import flags, planning
from narrowgauge.cli.exit_status import CommandGroup
from narrowgauge.errors import ChipError, RankError
from narrowgauge.runs.foreign_logs import log_file
from narrowgauge.runs.record import read_run
from narrowgauge.runs.text import plural
from narrowgauge.spec import show, tables
from narrowgauge.spec.parse import parse_names

_path = flags.PATH
_count = click.IntRange(min=1)


@click.group(cls=CommandGroup)
@click.version_option(__version__, prog_name="narrowgauge", message="%(prog)s %(version)s")
def main() -> None:
    """Train bfloat16 weights in 8 bytes a parameter: optimizers and number formats for PyTorch,
    and tools that measure what a format loses.

    \b
    narrowgauge tokenize text.txt tokens
    narrowgauge train --data tokens --recipe bfloat16/word
    narrowgauge compare --data tokens --recipes bfloat16/master,bfloat16/word --seeds 3
    narrowgauge plan run --model llama-8b --chip H100-SXM5 --chips 8
    narrowgauge diagnose trainer_state.json
    """
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # PyTorch's own warnings to its developers
    for name in ("torchao", "torch.utils._pytree"):  # what transformers imports says on import
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.formatwarning = lambda message, kind, *_, **__: f"{kind.__name__}: {message}\n"
    # PyTorch's own, at every step and at every checkpoint of one process.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module|torch.distributed is disabled")


@main.group("show", short_help="Tables, recipes, and this machine's arithmetic.")
def show_group() -> None:
    """Print a table (formats, recipes, storages, chips, …), a recipe, or this machine's arithmetic."""


def _print(as_json: bool, rows: Any, parts: tables.Table | list[tables.Table]) -> None:
    if as_json:
        tables.write_json(rows)
    else:
        tables.write(parts)


def _print_result(as_json: bool, result: Any) -> None:
    if as_json:
        tables.write_json(result.to_dict())
    else:
        click.echo(result)


def _print_table(name: str, as_json: bool) -> None:
    table = show.table(name)
    _print(as_json, table.rows, table)


for _name, (_help, *_) in show.TABLES.items():
    show_group.command(_name, help=_help)(flags.as_json(partial(_print_table, _name)))


@show_group.command("checks")
@flags.as_json
def show_checks(as_json: bool) -> None:
    """Readings: what measures each, its bound, and the bound's source."""
    from narrowgauge.measuring.kinds import kind_table

    table = kind_table()
    _print(as_json, table.rows, table)


@show_group.command("recipe")
@click.argument("name")
@flags.as_json
def show_recipe(name: str, as_json: bool) -> None:
    """What the recipe NAME stores, computes and loses."""
    facts = show.recipe_facts(name)
    columns = {"recipe": itemgetter(0), facts["recipe"]: itemgetter(1)}
    _print(as_json, facts, tables.Table([*facts.items()][1:], columns))


@show_group.command("arithmetic", short_help="This machine's sums and roundings, measured.")
@click.option("--cuda", is_flag=True, help="Measure the GPU, not the CPU.")
def show_arithmetic(cuda: bool) -> None:
    """Measure this machine's arithmetic: the bits that sums and functions give on fixed numbers, as
    JSON.

    On two machines, versions or numbers of threads (OMP_NUM_THREADS), compare the outputs with diff;
    of two runs, narrowgauge diagnose RUN OTHER compares it.
    """
    import torch

    from narrowgauge.measuring.provenance import describe_process

    if cuda and not torch.cuda.is_available():
        raise ChipError(
            "Cannot measure a GPU because PyTorch sees none here.",
            "Leave --cuda out to measure this CPU.",
        )
    tables.write_json(describe_process(torch.device("cuda" if cuda else "cpu")))


@main.command("tokenize", short_help="Make tokens from text, for train and compare.")
@click.argument("text", type=_path)
@click.argument("out", type=_path)
@click.option(
    "--tokenizer", metavar="DIR", type=_path,
    help="A Hugging Face folder with tokenizer.json.  [default: a token for each byte]",
)  # fmt: skip
def tokenize(text: Path, out: Path, tokenizer: Path | None) -> None:
    """Tokenize TEXT into a new folder OUT, the data of train and compare.

    TEXT is a text file, or a folder of .txt files, a document each. OUT holds tokens.npy, which any
    other pipeline may write too: one row of whole numbers.
    """
    from narrowgauge.trainer.tokens import load_tokenizer, read_texts, write_tokens

    click.echo(write_tokens(read_texts(text), load_tokenizer(tokenizer), out))


@main.command("train", params=flags.of_settings())
def train(**settings: Any) -> None:
    """Train a language model on tokens, and record it in a run folder.

    The same command continues a run that was stopped, bit for bit; --out RUN alone takes its
    settings. Several ranks are torchrun's:

    torchrun --nproc-per-node 2 -m narrowgauge train --gradient-accumulation-steps 2 --out runs/a
    """
    from narrowgauge.distributed import process_group
    from narrowgauge.trainer.settings import find_start

    named = flags.passed(settings)
    if process_group.world_size() == 1:
        # Before PyTorch is loaded: refuse what is wrong, and say that a run is finished.
        start = find_start(named)
        if start.is_finished:
            return click.echo(f"{start.settings.folder} is finished: {plural(start.step, 'step')}.")
    from narrowgauge.trainer import train as trainer

    with process_group.joined():
        folder = trainer.train(named)
    if process_group.rank() == 0:
        click.echo(folder)
    return None


@main.command(
    "compare",
    short_help="What several recipes cost, trained alike.",
    params=flags.of_settings(compared=True),
)
@click.option("--recipes", metavar="A,B,…", required=True, help="Recipes.")
@click.option(
    "--seeds",
    type=_count,
    metavar="N",
    default=1,
    help="Seeds per recipe; 3 give useful intervals.  [default: 1]",
)
@click.option(
    "--out", metavar="DIR", type=_path,
    help="Folder of the comparison, new or one to continue.  [default: comparisons/MODEL]",
)  # fmt: skip
@flags.as_json
def compare(recipes: str, seeds: int, out: Path | None, as_json: bool, **settings: Any) -> None:
    """Train with several recipes from the same initial weights on the same tokens, and report what
    each costs.

    The same command continues a stopped comparison; with more --recipes or --seeds it adds their
    runs.
    """
    from narrowgauge.distributed import process_group
    from narrowgauge.trainer import compare as comparing

    if (size := process_group.world_size()) > 1:
        raise RankError(
            f"Cannot run narrowgauge compare on {size} ranks.", "Start it once, without torchrun."
        )
    comparison, page = comparing.compare_recipes(
        parse_names(recipes), flags.passed(settings), seeds=seeds, out=out, say=partial(click.echo, err=as_json)
    )  # fmt: skip
    if as_json:
        return tables.write_json(comparison.rows)
    tables.write(comparison.table())
    return click.echo(f"\n{comparison.verdict}\n\n{page}")


@main.command("report", short_help="Write one HTML page about runs.")
@click.argument("runs", metavar="RUN…", nargs=-1, required=True, type=_path)
@click.option(
    "--out",
    metavar="FILE",
    type=_path,
    help="The page to write.  [default: report.html in the one folder named]",
)
def report(runs: tuple[Path, ...], out: Path | None) -> None:
    """Write one HTML page about runs.

    Each RUN is a run folder, the folder of a comparison, or the log of another framework: a Hugging
    Face trainer_state.json, a Lightning metrics.csv, or their folder; or a table (CSV).
    """
    from narrowgauge.report import publishing

    click.echo(publishing.report(runs, out))


@main.command("export", short_help="Write a run's model as a Hugging Face folder.")
@click.argument("folder", metavar="DIR", type=_path)
@click.argument("out", type=_path)
def export(folder: Path, out: Path) -> None:
    """Export the model of the run in DIR to a Hugging Face folder OUT."""
    from narrowgauge.trainer import export as exporting

    click.echo(exporting.export(folder, out))


@main.command(
    "diagnose", short_help="What a run shows beyond its bounds, or where two runs first differ."
)
@click.argument("run", metavar="RUN", type=_path)
@click.argument("other", metavar="[OTHER]", required=False, type=_path)
@flags.as_json
def diagnose(run: Path, other: Path | None, as_json: bool) -> None:
    """Print what the record of RUN shows beyond its bounds, earliest first, and what this record
    cannot show.

    With OTHER, a run that should have been equal: the first step, stage, tensor and rank in which
    they differ, and the recorded settings that differ.

    RUN is a run folder, finished or not, or the log of another framework, as for report.

    RUN may also be a trace of torch.profiler (.json, .json.gz): its time by the terms of a plan.
    OTHER is then the output of narrowgauge plan run --json.
    """
    from narrowgauge.planner.trace import is_trace, read_trace

    if is_trace(run) and log_file(run) is None:
        table = read_trace(run, other)
        return _print(as_json, table.rows, table)
    from narrowgauge.measuring.diagnose.diagnose import diagnose as diagnosing

    runs = [read_run(path) for path in (run, other) if path is not None]
    return _print_result(as_json, diagnosing(*runs))


@main.command("same", short_help="Which weights two models or checkpoints differ in.")
@click.argument("first", metavar="A", type=_path)
@click.argument("second", metavar="B", type=_path)
@flags.as_json
def same(first: Path, second: Path, as_json: bool) -> None:
    """Print which weights of B differ from those of A, the farthest first, and which are not
    finite.

    Each is a .safetensors file, a folder of them, such as a Hugging Face model, an adapter or an
    export, or a checkpoint of torch.distributed. No model runs.
    """
    from narrowgauge.measuring.same.same import same as compare

    _print_result(as_json, compare(first, second))


main.add_command(planning.plan_group)
