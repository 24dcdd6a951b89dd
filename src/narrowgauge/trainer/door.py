"""The one door into a run: its own settings, overlaid with the settings that are given.

``train --out RUN`` and ``resume RUN`` come through here. Omitted settings change nothing. Settings
that decide the numbers of a run from its start are refused, all others hold from its checkpoint on.
Nothing here needs PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import damaged, read_bytes, write_whole
from narrowgauge.runs.finding import counted
from narrowgauge.runs.places import is_run, require_free
from narrowgauge.runs.record import Run, read_run, wrong_setting
from narrowgauge.runs.schema import Row, short
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.tables import json_value
from narrowgauge.spec.toml import load_toml
from narrowgauge.trainer.config import TrainConfig

_OF_A_SITTING = ("out", "stop_after")
_PLACES = (*_OF_A_SITTING, "data")
"""Settings that name no property of a run: its tokens are known by their fingerprint."""
_OF_THE_START = ("seed", "held_out", "sequence_length", "model", "recipe")
"""Settings that decide a run's numbers from its first step on."""
_OF_THE_RATE = ("lr", "steps", "schedule", "warmup_steps", "min_lr_ratio")


class Entry(NamedTuple):
    """The checked settings of a run that may begin, and its record if it goes on."""

    config: TrainConfig
    run: Run | None = None

    @property
    def folder(self) -> Path:
        return Path(str(self.config.out))

    def nothing_left(self) -> str:
        """Return a sentence if the run is finished and its settings ask for no further step.

        Refuse other changes of it.
        """
        run = self.run
        if run is None or run.summary is None or self.config.steps > run.summary["steps"]:
            return ""
        for name, old, new in changed_settings(run.config, self.config.to_dict()):
            raise RecordError(
                f"Cannot change {name} of {run.path} from {old} to {new} because the run is "
                "finished.",
                "Name another --out, or train it further with a larger --steps.",
            )
        return f"{run.path} is finished: {counted(run.summary['steps'], 'step')}."


def enter(given: Mapping[str, Any], num_ranks: int = 1, *, goes_on: bool = False) -> Entry:
    """Return the run that settings ask for.

    Args:
        given: the settings that were named. For a new run, others have their defaults.
        goes_on: refuse a folder without a run.
    Raises:
        NarrowgaugeError: an invalid setting, or a folder with something else.
    """
    config = TrainConfig.from_dict(given)
    run = None
    if config.out is not None:
        out = Path(config.out)
        restore(out)
        if goes_on or is_run(out):
            run = run_of_trainer(out)
            own = {name: value for name, value in run.config.items() if name not in _OF_A_SITTING}
            config = TrainConfig.from_dict({**own, **given}, str(out / "run.toml"))
        else:
            require_free(out)
    return Entry(config.validated(num_ranks), run)


def changed_settings(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
    """Return settings that differ: name and both values as text. A missing one is at its default.

    Example:
        >>> changed_settings({"lr": 0.003, "out": "a"}, {"lr": 0.007, "seed": 0, "out": "b"})
        [('lr', '0.003', '0.007')]
    """
    defaults = json_value(TrainConfig().to_dict())
    first = {**defaults, **json_value(before)}
    second = {**defaults, **json_value(now)}
    changes = []
    for name in {**first, **second}:
        old = first.get(name)
        new = second.get(name)
        if name not in _PLACES and old != new:
            texts = ["not set" if value is None else short(value) for value in (old, new)]
            changes.append((name, *texts))
    return changes


def require_same_run(before: Run, config: TrainConfig, fingerprint: str) -> None:
    """Refuse to go on with another model, storage, seed, split, length of sequences, or tokens,
    known by their ``fingerprint``.

    ``before`` is the run as its checkpoint knows it.
    """
    first = TrainConfig.from_dict(before.config)
    for name, old, new in changed_settings(before.config, config.to_dict()):
        is_free = name not in _OF_THE_START
        if name == "model":  # a model folder may have moved
            is_free = first.model not in MODELS and config.model not in MODELS
        elif name == "recipe":
            is_free = first.recipe.storage == config.recipe.storage
        if not is_free:
            raise RecordError(
                f"Cannot continue {before.path} with {name} = {new} because it began with {old}.",
                "Leave it as it was, or start another run with another --out.",
            )
    if fingerprint != before.data_fingerprint:
        raise RecordError(
            f"Cannot continue {before.path} because the tokens in {config.data} are not those that it "
            "started with.",
            "Restore its token map, or name its new place with --data.",
        )


def changes(before: Mapping[str, Any], config: TrainConfig, step: int) -> list[Row]:
    """Return an event for each setting that is changed after a step, and for a rate that jumps."""
    messages = []
    moves_rate = False
    for name, old, new in changed_settings(before, config.to_dict()):
        messages.append(f"{name} was {old} up to step {step} and is {new} from there on")
        moves_rate = moves_rate or name in _OF_THE_RATE
    if moves_rate and step > 0:
        first = TrainConfig.from_dict(before).filled()
        rate = f"{first.learning_rate(min(step, first.steps)):.2e}"
        now = f"{config.learning_rate(step + 1):.2e}"
        if rate != now:
            messages.append(f"the learning rate was {rate} in step {step} and is {now} in the next")
    return [{"what": "changed-settings", "words": x, "severity": "warning"} for x in messages]


def lost_rows(run: Run, rows: Mapping[str, int], step: int) -> list[Row]:
    """Return a note for each file that lacks rows which it had at the checkpoint of a step.

    ``rows`` has the number of each file.
    """
    messages = []
    first = run.steps[0]["step"] if run.steps else step + 1
    if first > 1 and step > 0:
        messages.append(f"steps.jsonl lacks the first {counted(first - 1, 'step')}")
    for name in rows.keys() - {"steps"}:
        present = [row for row in getattr(run, name) if row["step"] <= step]
        missing = rows[name] - len(present)
        if missing > 0:
            messages.append(f"{name}.jsonl lacks {missing:,} of its first {rows[name]:,} rows")
    return [{"what": "note", "words": message} for message in sorted(messages)]


def require_no_checkpoint(run: Run, reasons: Sequence[str]) -> None:
    """Refuse to begin a run again that had a checkpoint, or was resumed from one.

    ``reasons`` say what is wrong with those that are there.
    """
    saved = [event for event in run.events if event["what"] in ("checkpoint", "resume")]
    every = run.config.get("checkpoint_every", 0)
    was_due = 0 < every < len(run.steps)  # its events may be lost as well
    if reasons or was_due or any(event["step"] for event in saved):
        raise RecordError(
            f"Cannot resume {run.path} because {no_good_checkpoint(reasons)}. Its record has "
            f"{counted(len(run.steps), 'step')}.",
            "Restore its checkpoints, or train it anew: narrowgauge train --config "
            f"{run.path}/run.toml --out OTHER.",
        )


def no_good_checkpoint(reasons: Sequence[str]) -> str:
    text = "it holds no good checkpoint"
    return f"{text}: {'; '.join(reasons)}" if reasons else text


def require_steps_left(config: TrainConfig, step: int) -> None:
    """Refuse to end a run before the ``step`` that it has done."""
    for flag, last in (("--stop-after", config.stop_after), ("--steps", config.steps + 1)):
        if last is not None and last <= step:
            raise RecordError(
                f"Cannot end {config.out} so early because it has done {counted(step, 'step')}.",
                f"Name a later step with {flag}, or leave it out.",
            )


def restore(folder: Path) -> None:
    """Restore a damaged or lost ``run.toml`` from the newest good checkpoint, which holds its text.

    Without a checkpoint do nothing: whoever reads the run says what is wrong.
    """
    if not (folder / "checkpoints").is_dir():
        return
    content = read_bytes(folder / "run.toml") or b""
    with suppress(ValueError):
        run = load_toml(content.decode())
        if not wrong_setting(run) and _is_whole(run):
            return
    from narrowgauge.checkpoints.saving import latest_checkpoint

    checkpoint, _ = latest_checkpoint(folder)
    if checkpoint is not None:
        write_whole(folder / "run.toml", checkpoint.state()["run"].encode())


def _is_whole(run: Row) -> bool:
    """Return whether a ``run.toml`` of the trainer has its last value; others may lack it."""
    return "recorder" in run or "unigram_loss" in run.get("data", {})


def run_of_trainer(folder: Path) -> Run:
    """Return the record of a run of ``narrowgauge train``. Its settings are not parsed.

    Its ``run.toml`` may have to come from its checkpoint.
    """
    restore(folder)
    run = read_run(folder)
    if run.is_foreign or "recorder" in run.run:
        program = run.run.get("recorder", {}).get("program") or "another program"
        raise RecordError(
            f"{folder} records a loop of its own, in {program}, which has the model and its data.",
            "Name a run of narrowgauge train. A loop with RunRecorder(resume=True) continues when "
            "its program starts again.",
        )
    if not _is_whole(run.run):
        raise damaged(folder / "run.toml", "it ends too early")
    return run
