"""Check a run folder before training continues in it: whether it is over, and settings that changed since the run began.

Nothing here needs PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import TEMPORARY
from narrowgauge.runs.finding import counted
from narrowgauge.runs.record import Run, is_run, read_run
from narrowgauge.runs.schema import short
from narrowgauge.runs.writer import require_free
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.notation import parse
from narrowgauge.spec.tables import json_value
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.dataset import data_fingerprint
from narrowgauge.trainer.data.tokens import read_tokens

_FREE = ("out", "stop_after", "verify_every")
"""Settings that change no number of a run."""
_FIXED = ("seed", "held_out", "sequence_length")
"""Settings that a started run keeps: with others it would read other sequences, some of them again."""


def changed_settings(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
    """Return settings that differ: name and both values as text. A missing one is at its default.

    Example:
        >>> changed_settings({"lr": 0.003, "out": "a"}, {"lr": 0.007, "seed": 0, "out": "b"})
        [('lr', '0.003', '0.007')]
    """
    first, second = (json_value({**TrainConfig().to_dict(), **table}) for table in (before, now))
    names = [
        name
        for name in {**first, **second}
        if name not in _FREE and first.get(name) != second.get(name)
    ]
    texts = (
        [short(table[name]) if name in table else "not set" for name in names]
        for table in (first, second)
    )
    return list(zip(names, *texts, strict=True))


def other_settings(run: Run, config: TrainConfig) -> list[tuple[str, str, str]]:
    """Return the settings of a run that differ from requested ones, as :func:`changed_settings`. Those at None fit any."""
    settings = config.to_dict()
    recorded = {name: value for name, value in run.config.items() if name in settings}
    return [change for change in changed_settings(recorded, settings) if change[0] != "threads"]


def run_to_continue(config: TrainConfig) -> Run | None:
    """Return the run in the folder of checked settings, which then continues; ``None`` if the folder is free.

    Refuse a folder that holds something else, or a run with other settings or data.
    """
    folder = Path(str(config.out))
    if not is_run(folder):
        require_free(folder)
        return None
    run = run_of_trainer(folder)
    if changes := other_settings(run, config):
        name, before, now = changes[0]
        raise RecordError(
            f"Cannot continue in {folder} because its run has {name} = {before}, not {now}.",
            "Name another --out, or the settings of the run there.",
        )
    require_same_data(
        run, config, data_fingerprint(read_tokens(str(config.data)), config.held_out, config.seed)
    )
    return run


def require_same_data(run: Run, config: TrainConfig, fingerprint: str) -> None:
    """Refuse to continue a run on other tokens, or another split of them."""
    if fingerprint != run.data_fingerprint:
        raise RecordError(
            f"Cannot continue {run.path} because the tokens in {config.data} are not those that it started with.",
            "Restore its token map, or name its place as data in run.toml.",
        )


def is_over(run: Run) -> bool:
    return run.summary is not None or (
        bool(run.events) and run.events[-1].get("kind") == "divergence"
    )


def require_same_run(run: Run, saved: Mapping[str, Any], config: TrainConfig) -> None:
    """Refuse edited settings that a started run cannot change: its model, storage, split and length of sequences.

    ``saved`` are the settings in the run's checkpoint.
    """
    for name, old, new in changed_settings(saved, config.to_dict()):
        is_fixed = name in _FIXED or (name == "model" and {old, new} & MODELS.keys())
        if is_fixed or (
            name == "recipe" and parse(saved["recipe"]).storage != config.recipe.storage
        ):
            raise RecordError(
                f"{run.path / 'run.toml'} says {name} {new}, and the run began with {old}.",
                "Put it back, or start another run with narrowgauge train.",
            )


def require_restart(run: Run, config: TrainConfig, damage: str) -> None:
    """Refuse to begin a run again that had a checkpoint. ``damage`` says what is wrong with those that are there.

    A run that was killed while it wrote its first checkpoint had none.
    """
    last, first_due = (
        run.steps[-1]["step"] if run.steps else 0,
        config.checkpoint_every or config.steps,
    )
    was_writing = any((run.path / "checkpoints").glob(f"{TEMPORARY}*"))
    if (
        damage
        or (last > first_due and not was_writing)
        or any(event["kind"] == "stop" for event in run.events)
    ):
        raise RecordError(
            f"Cannot resume {run.path} because it holds no good checkpoint{damage and f': {damage}'}. Its record has "
            f"{counted(last, 'step')}.",
            f"Restore its checkpoints, or begin again at step 0: narrowgauge resume {run.path} --restart.",
        )


def run_of_trainer(folder: Path) -> Run:
    """Return the record of a run of ``narrowgauge train``. Its settings are not parsed."""
    run = read_run(folder)
    if run.is_foreign or "recorder" in run.run:
        program = run.run.get("recorder", {}).get("program") or "another program"
        raise RecordError(
            f"{folder} records a loop of its own, in {program}, which has the model and its data.",
            "Name a run of narrowgauge train. A loop with RunRecorder(resume=True) continues when its program starts again.",
        )
    return run


def unfinished_run(folder: Path) -> Run:
    run = run_of_trainer(folder)
    if run.summary is not None:
        loss = f"validation loss {run.summary['val_loss']:.4f}"
        message = f"{folder} is finished: {counted(run.summary['steps'], 'step')}, {loss}."
        raise RecordError(message, "Start another run with narrowgauge train.")
    return run
