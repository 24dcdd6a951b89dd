"""The trainings of a comparison, on one process or on all ranks of a job.

The first rank does what one process does: it reads the definition, measures, shows the progress and writes the page. Before each
training it tells the others which run is next; they take part in it, wait for the next one, and leave when it says that there is
none. An error in a training is one of all ranks; an error between two trainings ends the others silently.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import platform
import sys
from pathlib import Path
from typing import NoReturn

import torch

from narrowgauge.distributed.launch.process_group import threads_of_run
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.errors import NarrowgaugeError, ReportedError
from narrowgauge.gauges.recording.run_reporter import NullScreen, Screen
from narrowgauge.trainer import loop, recovery
from narrowgauge.trainer.config import CHANGEABLE_ON_RESUME, TrainConfig


class Lead:
    """What the first rank trains with, alone or with others; a context manager, which ends the others' wait at its end."""

    def __init__(self) -> None:
        self._is_shared = False

    def train(self, config: TrainConfig, goes_on: bool, screen: Screen) -> None:
        """:func:`train` on all ranks."""
        all_ranks().of_first(lambda: (config, goes_on))
        self._is_shared = True
        train(config, goes_on, screen)
        self._is_shared = False

    def __enter__(self) -> Lead:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is None:
            all_ranks().of_first(lambda: None)
        elif not self._is_shared:
            _tell(error)


def _tell(error: BaseException) -> None:
    """Tell the others, which wait for the next training, that this rank ends with an error."""

    def fail() -> NoReturn:
        raise error

    with contextlib.suppress(type(error)):
        all_ranks().of_first(fail)


def follow() -> None:
    """On every rank but the first: take part in its trainings until there are no more.

    Raises:
        NarrowgaugeError: a run failed, or the first rank has, and so do all.
        ReportedError: the first rank has ended with another error, or was interrupted between two trainings.
    """
    while (told := all_ranks().of_first(_first_rank_knows)) is not None:
        train(*told, NullScreen())


def _first_rank_knows() -> tuple[TrainConfig, bool] | None:
    raise AssertionError("called on the first rank alone")


def train(config: TrainConfig, goes_on: bool, screen: Screen) -> None:
    """Train a run of a comparison, or resume it where it ``goes_on``, with the threads that its recipe needs.

    Raises:
        NarrowgaugeError: the run failed; the message begins with the name of its folder. A divergence is no failure.
        KeyboardInterrupt: it was interrupted and has saved; all ranks stop after the same step.
    """
    _start_fresh()
    folder = Path(str(config.out))
    try:
        with threads_of_run(config.threads, config.recipe.reduction.order_invariant):
            if goes_on:
                chosen = {name: getattr(config, name) for name in CHANGEABLE_ON_RESUME}
                loop.resume(folder, chosen=chosen, screen=screen)
            else:
                loop.train(config, lent=True, screen=screen)
    except recovery.DivergenceError:
        pass  # it is in the record
    except ReportedError:
        raise
    except NarrowgaugeError as error:
        error.message = f"{folder.name}: {error.message}"
        raise


def _start_fresh() -> None:
    """Release what earlier runs left: their memory, its peak, and their compiled graphs."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if platform.libc_ver()[0] == "glibc":
        # Freed memory returns to the system; then the kernel resets the process's peak (proc(5), clear_refs).
        ctypes.CDLL(None).malloc_trim(0)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
