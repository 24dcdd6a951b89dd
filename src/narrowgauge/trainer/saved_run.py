"""A run on the disk at its newest good checkpoint: opened without its weights, or loaded as a session."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from narrowgauge.distributed.ranks import ALONE, Ranks
from narrowgauge.errors import RecordError
from narrowgauge.runs.record import read_run
from narrowgauge.trainer import language_model
from narrowgauge.trainer.checkpoint import Checkpoint, latest_checkpoint
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data import Dataset, open_data
from narrowgauge.trainer.session import Session, build

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class SavedRun:
    """A run on the disk, whose weights are not loaded.

    Args:
        model: on the meta device.
        config: the settings.
        checkpoint: the newest good one.
        tokenizer_path: the run's ``tokenizer.json``, if the data came with one.
    """

    model: PreTrainedModel
    config: TrainConfig
    checkpoint: Checkpoint
    tokenizer_path: Path | None


def open_run(folder: str | Path, ranks: Ranks = ALONE) -> SavedRun:
    """Open a run folder at its newest good checkpoint, without its weights.

    Args:
        folder: the run folder.
        ranks: which open it together; all call this.
    Raises:
        RecordError: no such run, or one of a newer version, or no good checkpoint.
    """
    config, data = _opened(Path(folder))
    damaged = _Damaged(Path(folder))
    checkpoint = latest_checkpoint(Path(folder), damaged.add, ranks)
    if checkpoint is None:
        raise damaged.error()
    return SavedRun(language_model.skeleton(config.model, data.vocab_size), config, checkpoint, data.tokenizer_path)


def load(folder: str | Path) -> Session:
    """Load the session of a run folder at its newest good checkpoint, for export or sampling.

    Args:
        folder: a run folder.
    Returns:
        The session, without compilation or gauges.
    Raises:
        RecordError: no such run, or one of a newer version, or no good checkpoint.
    """
    config, data = _opened(Path(folder))
    damaged = _Damaged(Path(folder))
    session = build(dataclasses.replace(config, compile=False), Path(folder), data)
    session.restore(damaged.add)
    if session.step == 0:
        raise damaged.error()
    return session


def _opened(folder: Path) -> tuple[TrainConfig, Dataset]:
    """The settings and the tokens of a run."""
    run = read_run(folder)
    config = TrainConfig.from_dict(run.config, str(folder / "run.toml"))
    data = open_data(folder)
    data.require_same(run.data_fingerprint)
    return config, data


class _Damaged:
    """Checkpoints that were passed over, and why."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []

    def add(self, path: Path, reason: str) -> None:
        self.said.append(f"{path.name} is damaged ({reason})")

    def error(self) -> RecordError:
        """What it means that no good one is left."""
        return RecordError(
            f"{self.folder} holds no good checkpoint{': ' + '; '.join(self.said) if self.said else ''}.",
            f"narrowgauge resume {self.folder} restarts it from step 0.",
        )
