"""The one door into a run: its own settings, overlaid with the settings that are given.

``train --out RUN`` and ``resume RUN`` come through here. Omitted settings change nothing. Settings
that decide the numbers of a run from its start are refused, all others hold from its checkpoint on.
Nothing here needs PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowgauge.errors import RecordError
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

_FIXED = ("seed", "held_out", "sequence_length")
"""With other ones a run would read other sequences, some of them again."""
_OF_A_SITTING = ("out", "stop_after")
_PLACES = (*_OF_A_SITTING, "data")
"""Settings that name no property of a run: its tokens are known by their fingerprint."""


def enter(given: Mapping[str, Any], num_ranks: int = 1) -> tuple[TrainConfig, Run | None]:
    """Return the checked settings of a run, and its record if the folder ``out`` holds it already.

    Args:
        given: the settings that were named. For a new run, others have their defaults.
    Raises:
        NarrowgaugeError: an invalid setting, a folder with something else, or a setting that this
            run cannot change.
    """
    out = given.get("out")
    if out is None or not is_run(Path(out)):
        if out is not None:
            require_free(out)
        return TrainConfig.from_dict(given).validated().on_ranks(num_ranks), None
    run = run_of_trainer(Path(out))
    settings = {name: value for name, value in run.config.items() if name not in _OF_A_SITTING}
    file = str(run.path / "run.toml")
    config = TrainConfig.from_dict({**settings, **given}, file).validated().on_ranks(num_ranks)
    began = run.run.get("data")
    began = began if isinstance(began, dict) else {}
    split = {name: began[name] for name in ("held_out", "seed") if name in began}
    require_same_run(run, {**run.config, **split}, config)
    tokens = read_tokens(str(config.data))
    if data_fingerprint(tokens, config.held_out, config.seed) != run.data_fingerprint:
        raise RecordError(
            f"Cannot continue {run.path} because the tokens in {config.data} are not those that it "
            "started with.",
            "Restore its token map, or name its new place with --data.",
        )
    return config, run


def changed_settings(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
    """Return settings that differ: name and both values as text. A missing one is at its default.

    Example:
        >>> changed_settings({"lr": 0.003, "out": "a"}, {"lr": 0.007, "seed": 0, "out": "b"})
        [('lr', '0.003', '0.007')]
    """
    defaults = TrainConfig().to_dict()
    first = json_value({**defaults, **before})
    second = json_value({**defaults, **now})
    changes = []
    for name in {**first, **second}:
        if name not in _PLACES and first.get(name) != second.get(name):
            old = short(first[name]) if name in first else "not set"
            new = short(second[name]) if name in second else "not set"
            changes.append((name, old, new))
    return changes


def require_same_run(run: Run, before: Mapping[str, Any], config: TrainConfig) -> None:
    """Refuse settings that decide a run's numbers from the start: model, storage, seed, split and
    length of sequences.

    ``before`` are the settings with which it began.
    """
    for name, old, new in changed_settings(before, config.to_dict()):
        is_fixed = name in _FIXED
        if name == "model":  # the folder of a model may have moved
            is_fixed = bool({before.get("model"), config.model} & MODELS.keys())
        if name == "recipe":
            is_fixed = parse(before["recipe"]).storage != config.recipe.storage
        if is_fixed:
            raise RecordError(
                f"Cannot continue {run.path} with {name} = {new} because it began with {old}.",
                "Leave it as it was, or start another run with another --out.",
            )


def nothing_left(run: Run, config: TrainConfig) -> str:
    """Return a sentence if a run is finished and its settings ask for no further step.

    Refuse other changes of it.
    """
    if run.summary is None or config.steps > run.summary["steps"]:
        return ""
    for name, old, new in changed_settings(run.config, config.to_dict()):
        raise RecordError(
            f"Cannot change {name} of {run.path} from {old} to {new} because the run is finished.",
            "Name another --out, or train it further with a larger --steps.",
        )
    return f"{run.path} is finished: {counted(run.summary['steps'], 'step')}."


def require_no_checkpoint(run: Run, damaged: Sequence[str]) -> None:
    """Refuse to begin a run again that had a checkpoint.

    ``damaged`` says what is wrong with those that are there.
    """
    if damaged or any(event["kind"] == "checkpoint" for event in run.events):
        reasons = f": {'; '.join(damaged)}" if damaged else ""
        num_steps = run.steps[-1]["step"] if run.steps else 0
        raise RecordError(
            f"Cannot resume {run.path} because it holds no good checkpoint{reasons}. "
            f"Its record has {counted(num_steps, 'step')}.",
            f"Restore its checkpoints, or begin again at step 0: narrowgauge resume {run.path} "
            "--restart.",
        )


def require_steps_left(folder: Path, config: TrainConfig, step: int) -> None:
    """Refuse to end a run before the ``step`` that it has done."""
    for flag, last in (("--stop-after", config.stop_after), ("--steps", config.steps + 1)):
        if last is not None and last <= step:
            raise RecordError(
                f"Cannot end {folder} so early because it has done {counted(step, 'step')}.",
                f"Name a later step with {flag}, or leave it out.",
            )


def run_of_trainer(folder: Path) -> Run:
    """Return the record of a run of ``narrowgauge train``. Its settings are not parsed."""
    run = read_run(folder)
    if run.is_foreign or "recorder" in run.run:
        program = run.run.get("recorder", {}).get("program") or "another program"
        raise RecordError(
            f"{folder} records a loop of its own, in {program}, which has the model and its data.",
            "Name a run of narrowgauge train. A loop with RunRecorder(resume=True) continues when "
            "its program starts again.",
        )
    return run
