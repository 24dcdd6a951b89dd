"""Commands on several ranks: started here with ``--nproc``, or by torchrun or Slurm, which start the same command on each rank.

Ranks that are started here run the command line as it was typed, and get the settings that it was parsed to. A rank that
torchrun or Slurm starts anew continues the run of its own job; the run folder names the job that made it.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from narrowgauge.cli.flags import SETTINGS
from narrowgauge.distributed.launch.placement import Placement, read_placement, variables
from narrowgauge.errors import RankError, RecordError, ReportedError
from narrowgauge.runs.events import Event
from narrowgauge.runs.record import is_run, read_run, read_settings
from narrowgauge.runs.writer import append_event

if TYPE_CHECKING:
    from narrowgauge.analysis.comparison.comparison import Comparison
    from narrowgauge.trainer.config import TrainConfig
    from narrowgauge.trainer.experiment.definition import ExperimentConfig
    from narrowgauge.trainer.exporting import Dtype


@dataclass(frozen=True)
class Launch:
    """How a command runs on ranks.

    Attributes:
        nproc: ranks to start here; None starts none.
        max_restarts: how often they are started anew.
        timeout: the longest time without progress in seconds; None is the default.
        settings: in a rank that ``--nproc`` started, what the command line was parsed to; else None.
    """

    nproc: int | None = None
    max_restarts: int = 0
    timeout: float | None = None
    settings: Mapping[str, Any] | None = None


OPTIONS = {"nproc": "--nproc", "max_restarts": "--max-restarts", "timeout": "--timeout"}


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--nproc``, ``--max-restarts`` and ``--timeout`` to a command, which gets a :class:`Launch`."""

    def launched(nproc: int | None, max_restarts: int, timeout: float | None, **others: Any) -> Any:
        if max_restarts and nproc is None:
            raise click.UsageError("--max-restarts is for ranks that --nproc starts.", click.get_current_context())
        # Removed: the processes that this one starts are not among these ranks.
        if (given := os.environ.pop(SETTINGS, None)) is not None:
            settings = json.loads(Path(given).read_text(encoding="utf-8"))
            return command(launch=Launch(timeout=timeout, settings=settings), **others)
        return command(launch=Launch(nproc, max_restarts, timeout), **others)

    launched.__doc__, launched.__name__ = command.__doc__, command.__name__
    launched.__click_params__ = list(getattr(command, "__click_params__", ()))  # type: ignore[attr-defined]
    launched = click.option(
        "--timeout", type=click.FloatRange(min=1), metavar="SECONDS",
        help="On several ranks, the longest time without progress.  [default: 1800]",
    )(launched)  # fmt: skip
    launched = click.option(
        "--max-restarts", type=click.IntRange(min=0), default=0, metavar="N",
        help="With --nproc, start the ranks anew from the last checkpoint if one is lost, at most N times.  [default: 0]",
    )(launched)  # fmt: skip
    return click.option(
        "--nproc", type=click.IntRange(min=1), metavar="N",
        help="Run on N ranks of this machine, as torchrun --nproc-per-node does.  [default: 1, or as torchrun or Slurm say]",
    )(launched)  # fmt: skip


def starts_ranks(launch: Launch) -> bool:
    """Whether this process is to start ranks, rather than to be one; a rank that is given ``--nproc`` is refused."""
    here = read_placement()
    if launch.nproc is None or (launch.nproc == 1 and not launch.max_restarts):
        return False
    if here.size > 1:
        raise RankError(
            f"--nproc {launch.nproc} was requested of rank {here.rank} of {here.size}, which {here.launcher} has started.",
            "Leave --nproc out: the ranks are there.",
        )
    return True


def require_one_process(command: str) -> None:
    """Refuse ranks of torchrun or Slurm in a command that reads or writes the files of a run as a whole."""
    here = read_placement()
    if here.size > 1:
        raise RankError(
            f"{command} runs in one process, and this is rank {here.rank} of {here.size}.",
            f"Start narrowgauge {command} once, without torchrun or srun: it reads the checkpoints of any number of ranks.",
        )


def start(launch: Launch, settings: Mapping[str, Any], goes_on: Callable[[], str], folder: Path | None = None) -> None:
    """Start the present command on the ranks of this machine and wait for them.

    Args:
        settings: what the command line was parsed to, as far as the ranks need it; see :attr:`Launch.settings`.
        goes_on: a sentence that says how the work goes on, for the line about a lost rank.
        folder: of the run, if there is one: its events name what was lost.
    Raises:
        RankError: a rank was lost.
        ReportedError: a rank has printed why it ended.
    """
    assert launch.nproc is not None
    from narrowgauge.distributed.launch.agent import run_on_ranks

    with tempfile.TemporaryDirectory(prefix="narrowgauge-") as name, variables({SETTINGS: f"{name}/settings.json"}):
        file = Path(name) / "settings.json"
        file.touch(mode=0o600)
        file.write_text(json.dumps(settings), encoding="utf-8")
        run_on_ranks(
            ["-m", "narrowgauge", *click.get_current_context().obj],
            launch.nproc,
            max_restarts=launch.max_restarts,
            how_to_resume=goes_on,
            note_loss=partial(_note_loss, folder),
        )


def _note_loss(folder: Path | None, step: int, said: str) -> None:
    """Record a lost rank in the events of a run, if the run exists yet."""
    if folder is not None:
        append_event(folder, Event("lost", step, said.rstrip(".")))


def how_to_resume(folder: Path) -> str:
    """A sentence that says how to resume a run, from step 0 if it has no checkpoint."""
    if not is_run(folder):
        return "Start it again."
    steps = [
        int(match[1]) for path in folder.glob("checkpoints/step-*") if (match := re.fullmatch(r"step-(\d+)", path.name))
    ]
    return f"narrowgauge resume {folder} goes on from step {max(steps, default=0)}."


def how_to_compare_on(folder: Path) -> str:
    return f"narrowgauge compare --out {folder} goes on." if (folder / "compare.toml").is_file() else "Start it again."


def joined(
    launch: Launch,
    goes_on: Callable[[], str],
    threads: int | None = None,
    is_order_invariant: bool = False,
    folder: Path | None = None,
) -> AbstractContextManager[Placement]:
    """The process group of this rank, or without ranks its threads; ``goes_on`` and ``folder`` as for :func:`start`.

    Args:
        threads: of each rank; None chooses.
        is_order_invariant: the bits must not depend on the number of threads.
    """
    from narrowgauge.distributed.launch import process_group as groups

    return groups.process_group(
        timeout_seconds=launch.timeout or groups.TIMEOUT_SECONDS,
        threads=threads,
        is_order_invariant=is_order_invariant,
        how_to_resume=goes_on,
        note_loss=partial(_note_loss, folder),
    )


def joined_run(launch: Launch, config: TrainConfig, folder: Path | None) -> AbstractContextManager[Placement]:
    """:func:`joined` for a run with these settings in a folder, if that is known."""

    def goes_on() -> str:
        return "" if folder is None else how_to_resume(folder)

    return joined(launch, goes_on, config.threads, config.recipe.reduction.order_invariant, folder)


def refuse_once() -> None:
    """End silently if an earlier attempt of this job was refused: a restart does not fix wrong settings."""
    folder = os.environ.get("NARROWGAUGE_AGENT_FOLDER")
    if folder and read_placement().attempt:
        for note in Path(folder).glob("reported-*"):
            if note.read_text() == "2":
                raise ReportedError(2)


def is_own_run(folder: Path | None) -> bool:
    """Whether a folder holds the run of this job, which was started anew.

    Raises:
        RankError: a restart cannot tell which run is its own.
    """
    here = read_placement()
    if here.max_attempts and (folder is None or here.job is None):
        raise _not_found_again("run" if folder is None else None)
    if folder is None or here.job is None or not is_run(folder):
        return False
    # A Slurm job may have many steps; torchrun counts no restart when a host joins.
    if here.launcher == "slurm" and not here.attempt:
        return False
    return bool(read_settings(folder).get("machine", {}).get("job") == here.job)


def _not_found_again(folder_of: str | None) -> RankError:
    """The error of a restart that cannot tell its own folder, say of a ``run``; with None, its own job."""
    what = "it has no name (torchrun: --rdzv-id)" if folder_of is None else f"no --out names its {folder_of} folder"
    return RankError(f"this job may be started anew, and {what}.", "Set it, so that a restart finds its own run.")


def is_restart() -> bool:
    """Whether this process was started anew after ranks were lost."""
    return read_placement().attempt > 0


def is_alone() -> bool:
    """Whether this process is the only rank, as far as torchrun and Slurm say."""
    return read_placement().size == 1


def is_new_and_alone(out: str | None) -> bool:
    """Whether this process is the only rank of a run that does not exist yet, whose settings can be checked at once."""
    return is_alone() and not is_own_run(None if out is None else Path(out))


def is_finished(folder: Path) -> bool:
    """Whether a run has ended by itself."""
    return read_run(folder).summary is not None


def train(config: TrainConfig, launch: Launch) -> Path | None:
    """Train on this rank, or alone; a job that was started anew continues its own run. Ranks but the first get None."""
    from narrowgauge.trainer.console import Console

    folder, is_first = None if config.out is None else Path(config.out), read_placement().is_first
    with Console(config.steps, config.log_every) if is_first else nullcontext() as console:
        if console is not None:
            console.stage("loading PyTorch")
        from narrowgauge.distributed.launch.agreement import describe_rank, require_same
        from narrowgauge.distributed.ranks import all_ranks
        from narrowgauge.trainer import loop

        with joined_run(launch, config, folder):
            require_same({**config.to_dict(), **describe_rank()})
            if all_ranks().of_first(lambda: is_own_run(folder)):
                assert folder is not None
                _note_restart(is_first)
                trained = folder if is_finished(folder) else loop.resume(folder, screen=console)
            else:
                trained = loop.train(config, screen=console)
    return trained if is_first else None


def _note_restart(is_first: bool) -> None:
    here = read_placement()
    if is_first:
        count = f" (restart {here.attempt} of at most {here.max_attempts})" if here.attempt else ""
        click.echo(f"note: the ranks were started anew{count}; {here.size} go on.", err=True)


def resume(
    folder: Path,
    config: TrainConfig,
    launch: Launch,
    stop_after: int | None,
    accept_changes: bool,
    chosen: Mapping[str, Any],
) -> Path | None:
    """``loop.resume`` on this rank, or alone; ranks but the first get None."""
    from narrowgauge.distributed.launch.agreement import describe_rank, require_same
    from narrowgauge.trainer import loop

    with joined_run(launch, config, folder):
        require_same({**config.to_dict(), **describe_rank()})
        resumed = loop.resume(folder, stop_after, accept_changes, chosen=chosen)
    return resumed if read_placement().is_first else None


def compare(
    config: ExperimentConfig, folder: Path | None, launch: Launch, stream: TextIO
) -> tuple[Comparison, Path] | None:
    """Compare on this rank, or alone; ``folder`` None takes a free one. Ranks but the first get None."""
    from narrowgauge.trainer.experiment import training

    if read_placement().launcher == "none":
        return training.run_experiment(config, folder, stream)
    from narrowgauge.distributed.launch.agreement import describe_rank, require_same
    from narrowgauge.trainer.experiment.shared_training import Lead, follow
    from narrowgauge.trainer.resume_checks import require_ranks

    def goes_on() -> str:
        return "" if folder is None else how_to_compare_on(folder)

    with joined(launch, goes_on, config.base.threads) as here:
        require_same({**config.to_dict(), **config.base.to_dict(), **describe_rank()})
        require_ranks(config.base, here.size)
        if here.max_attempts and folder is None:
            raise _not_found_again("comparison's")
        if not here.is_first:
            follow()
            return None
        _note_restart(is_restart())
        with Lead() as lead:
            return training.run_experiment(config, folder, stream, lead.train)


def export(launch: Launch, folder: Path, out: Path, dtype: Dtype, max_file_bytes: int) -> Path | None:
    """Export on this rank, which shares the files with the others, or alone; ranks but the first get None."""
    from narrowgauge.trainer import exporting

    if read_placement().launcher == "none":
        return exporting.export(folder, out, dtype, max_file_bytes)
    from narrowgauge.distributed.launch.agreement import describe_rank, require_same
    from narrowgauge.distributed.ranks import all_ranks

    with joined(launch, lambda: "Start it again.") as here:
        require_same({"folder": folder, "out": out, "dtype": dtype, "size": max_file_bytes, **describe_rank()})
        exporting.export(folder, out, dtype, max_file_bytes, all_ranks().apart())
    return out if here.is_first else None


def export_quantized(launch: Launch, folder: Path, out: Path, dtype: Dtype, max_file_bytes: int, compute: str) -> Path:
    """Export 8-bit codes of the weights, which one process does."""
    require_one_process("export --quantize")
    if starts_ranks(launch):
        raise RankError(
            f"--nproc {launch.nproc} and --quantize were requested.", "One process quantizes: leave --nproc out."
        )
    if dtype != "visible":
        raise RecordError(
            f"--dtype {dtype} and --quantize {compute} were requested.",
            "Codes are those of the weights that the model sees: leave --dtype out.",
        )
    from narrowgauge.trainer import quantized_export

    return quantized_export.export_quantized(folder, out, compute, max_file_bytes)
