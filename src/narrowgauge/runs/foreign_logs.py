"""Runs of other frameworks, read from the logs that they leave: what a log does not hold stays unknown.

Such a run has losses, learning rates and gradient norms at the steps that were logged, and no recipe, seed, bytes or audit. It is
named after its folder. :func:`narrowgauge.read_run` and ``narrowgauge report`` read it like a run folder.

A log has no column that says what a number is, only the name that a framework or a user gave it. So :data:`NAMES` lists the
usual names of each of our columns, the best first, and nothing is guessed from values: a metric under another name is not read.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import disk_errors, load_json
from narrowgauge.runs.plain_logs import Value, values_of_csv, values_of_json, values_of_text
from narrowgauge.runs.schema import EVAL, STEP, Row, is_whole, short, wrong_value

NAMES: dict[str, tuple[str, ...]] = {
    "loss": (
        "loss", "train_loss", "train/loss", "train_loss_step", "train/loss_step", "training_loss", "loss/train", "Loss/train",
        "loss_metrics/global_avg_loss", "train_loss_epoch",
    ),
    "lr": ("lr", "learning_rate", "train/lr", "train/learning_rate", "lr-*", "lr/*", "*/lr"),
    "grad_norm": ("grad_norm", "train/grad_norm", "gradient_norm", "grad_norm/total", "grad_2.0_norm_total"),
    "val_loss": (
        "val_loss", "eval_loss", "eval/loss", "validation/loss", "validation_loss", "val/loss", "valid_loss", "valid/loss",
        "loss/val", "Loss/val", "Loss/validation", "loss/validation", "val_loss_epoch", "validation_metrics/loss",
    ),
    "loss_scale": ("loss_scale", "train/loss_scale", "loss-scale", "Train/Samples/loss_scale", "grad_scale"),
}  # fmt: skip
"""The names of each column, the best first, with shell wildcards. Ours, and those of Hugging Face's Trainer, Lightning's
tutorials and ``LearningRateMonitor``, torchtitan, and PyTorch's TensorBoard tutorial."""


@dataclass
class Log:
    """What one log of another framework says.

    Attributes:
        values: for each name in the log, step to value, in the order logged; the last of one step counts.
        config: settings that the log states, under our names; most state none.
        is_finished: whether the run had ended; ``None`` where the log does not say.
    """

    values: dict[str, dict[int, Any]] = field(default_factory=dict)
    config: Row = field(default_factory=dict)
    is_finished: bool | None = None

    def add(self, name: str, step: Any, value: Any) -> None:
        """Take one value; ``ValueError`` where the step is not a whole number."""
        if not is_whole(step):
            raise ValueError(f"{name} has step {short(step)}, which is not a whole number")
        self.values.setdefault(name, {})[int(step)] = value

    def rows(self, table: str) -> list[Row]:
        """The rows of ``"steps"`` or ``"evals"``, ascending; a column that was not logged at a step is absent."""
        columns = [name for name in NAMES if name in (STEP if table == "steps" else EVAL)]
        found: dict[int, Row] = {}
        for column in columns:
            for step, value in self._series(column).items():
                found.setdefault(step, {"step": step})[column] = value
        rows = [found[step] for step in sorted(found)]
        for row in rows:
            if wrong := wrong_value(table, row):
                raise ValueError(f"step {row['step']} has {wrong}")
        return rows

    def _series(self, column: str) -> Mapping[int, Any]:
        name = named(self.values, column)
        return {} if name is None else self.values[name]


def named(names: Iterable[str], column: str) -> str | None:
    """The best name of a column among those of a log.

    Example:
        >>> named(["epoch", "eval_loss", "lr-AdamW"], "val_loss"), named(["epoch", "lr-AdamW"], "lr"), named(["acc"], "loss")
        ('eval_loss', 'lr-AdamW', None)
    """
    given = list(names)
    return next((name for pattern in NAMES[column] for name in given if fnmatchcase(name, pattern)), None)


# ── Hugging Face: trainer_state.json, which Trainer, TRL's and Accelerate's examples write into every checkpoint ─────────

_TRAINER_STATE = "trainer_state.json"


def _find_trainer_state(path: Path) -> list[Path]:
    """The file itself, that of the folder, or that of the folder's latest checkpoint, which holds those before it."""
    if path.name == _TRAINER_STATE and path.is_file():
        return [path]
    if (path / _TRAINER_STATE).is_file():
        return [path / _TRAINER_STATE]
    checkpoints = [
        (_step(place), place / _TRAINER_STATE)
        for place in path.glob("checkpoint-*")
        if (place / _TRAINER_STATE).is_file()
    ]
    return [max(checkpoints)[1]] if checkpoints else []


def _step(checkpoint: Path) -> int:
    number = checkpoint.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def _read_trainer_state(files: list[Path]) -> Log:
    """The rows of ``log_history``; each ``loss`` is the mean of the steps since the one before."""
    state: Any = load_json(files[0].read_bytes())
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list) or not all(isinstance(row, dict) for row in history):
        raise ValueError("it has no list log_history")
    log = Log()
    for row in history:
        for name, value in row.items():
            if name not in ("step", "epoch"):
                log.add(name, row.get("step"), value)
    done, wanted = state.get("global_step"), state.get("max_steps")
    if isinstance(done, int) and isinstance(wanted, int) and wanted > 0:
        log.config, log.is_finished = {"steps": wanted}, done >= wanted
    return log


# ── Lightning: metrics.csv, which the CSVLogger of its Trainer and of Fabric writes ──────────────────────────────────────

_METRICS_CSV = "metrics.csv"


def _find_metrics_csv(path: Path) -> list[Path]:
    """The file itself, or that of the folder (``lightning_logs/version_0``)."""
    if path.name == _METRICS_CSV and path.is_file():
        return [path]
    return [path / _METRICS_CSV] if (path / _METRICS_CSV).is_file() else []


def _read_metrics_csv(files: list[Path]) -> Log:
    """The columns; Lightning counts steps from 0 and we from 1, so a row of its step 9 is of our step 10."""
    table = csv.DictReader(io.StringIO(files[0].read_text(encoding="utf-8"), newline=""), strict=True)
    if "step" not in (table.fieldnames or ()):
        raise ValueError("it has no column 'step'")
    log = Log()
    for line in _rows(table):
        step = _number("step", line["step"])
        for name, value in line.items():
            if name not in ("step", "epoch") and value:
                log.add(name, step + 1, _number(name, value))
    return log


def _rows(table: csv.DictReader[str]) -> list[dict[str, str]]:
    try:
        rows = list(table)
    except csv.Error as error:
        raise ValueError(f"line {table.line_num}: {error}") from error
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise ValueError(f"line {number} has not as many values as the first line has names")
    return rows


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError as error:
        raise ValueError(f"column '{name}' holds {value!r}, which is not a number") from error


# ── TensorBoard: event files, read without TensorFlow ────────────────────────────────────────────────────────────────────

_PATTERN = "*.tfevents.*"


def _find_event_files(path: Path) -> list[Path]:
    """The file itself, or those of the folder, the oldest first."""
    if path.is_file() and path.match(_PATTERN):
        return [path]
    return sorted(place for place in path.glob(_PATTERN) if place.is_file()) if path.is_dir() else []


def _read_event_files(files: list[Path]) -> Log:
    """The scalars; a last record that is cut short, as in a run in progress, is left out."""
    log = Log()
    for file in files:
        for event in _events(file):
            for value in event.summary.value:
                if (number := _scalar(value)) is not None:
                    log.add(value.tag, event.step, number)
    return _from_one(log)


def _from_one(log: Log) -> Log:
    """The log, its steps counted from 1 where the losses begin at 0."""
    first = named(log.values, "loss")
    if first is not None and min(log.values[first]) == 0:
        log.values = {name: {step + 1: value for step, value in series.items()} for name, series in log.values.items()}
    return log


def _events(file: Path) -> Iterator[Any]:
    try:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.compat.tensorflow_stub import errors
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
    except ImportError as error:
        raise RecordError(
            f"Cannot read {file}: the package tensorboard is not installed.", "pip install tensorboard."
        ) from error
    records = PyRecordReader_New(str(file))
    try:
        while True:
            try:
                records.GetNext()
            except errors.OutOfRangeError:
                return
            except errors.DataLossError as error:
                if "runcated" in str(error):
                    return
                raise ValueError(str(error.message).removeprefix(f"{file} ")) from error
            yield event_pb2.Event.FromString(records.record())
    finally:
        records.file_handle.close()


def _scalar(value: Any) -> float | None:
    """The value of a scalar: ``simple_value`` of PyTorch's writer, or a tensor of TensorFlow's; ``None`` of anything else."""
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not value.HasField("tensor") or value.tensor.tensor_shape.dim:
        return None
    from tensorboard.util.tensor_util import make_ndarray

    array = make_ndarray(value.tensor)
    return float(array) if array.dtype.kind in "fiu" else None


# ── tables, exports of Weights & Biases, and text: files of any name ─────────────────────────────────────────────────────


def _find_by(*endings: str) -> Callable[[Path], list[Path]]:
    """The file itself, by the end of its name; a folder may hold any such file, and none of them need be a log."""
    return lambda path: [path] if path.suffix.lower() in endings and path.is_file() else []


def _read_by(values: Callable[[str], Iterator[Value]]) -> Callable[[list[Path]], Log]:
    """The values of a file's text; a run that counts its steps from 0 is counted from 1, as those of event files are."""

    def read(files: list[Path]) -> Log:
        log = Log()
        for name, step, value in values(files[0].read_text(encoding="utf-8-sig", errors="replace")):
            log.add(name, step, value)
        return _from_one(log)

    return read


# ── a run from any of them ───────────────────────────────────────────────────────────────────────────────────────────────

SOURCE = "source"
"""The table of ``Run.run`` that names the log from which a run of another framework was read."""


class LogRun(NamedTuple):
    """The run that a log describes: what :class:`narrowgauge.Run` holds, in its order."""

    path: Path
    run: Row
    steps: list[Row]
    evals: list[Row]
    events: list[Row]
    summary: Row | None


@dataclass(frozen=True)
class LogFormat:
    """A format of logs.

    Args:
        find: the files of the log in a folder, or of a file; none where there is no such log.
        read: what they hold; raises ``ValueError`` where they are damaged.
        is_of_folder: whether its run is named after the folder; else after the file, of which a folder may hold several.
    """

    name: str
    find: Callable[[Path], list[Path]]
    read: Callable[[list[Path]], Log]
    is_of_folder: bool = True


FORMATS = (
    LogFormat("Hugging Face trainer_state.json", _find_trainer_state, _read_trainer_state),
    LogFormat("Lightning metrics.csv", _find_metrics_csv, _read_metrics_csv),
    LogFormat("TensorBoard events", _find_event_files, _read_event_files),
    LogFormat(
        "CSV table or export (.csv, .tsv)", _find_by(".csv", ".tsv"), _read_by(values_of_csv), is_of_folder=False
    ),
    LogFormat("JSON rows (.json, .jsonl)", _find_by(".json", ".jsonl"), _read_by(values_of_json), is_of_folder=False),
    LogFormat(
        "log of text (.log, .txt, .out)", _find_by(".log", ".txt", ".out"), _read_by(values_of_text), is_of_folder=False
    ),
)
"""Every format, in the order tried: a folder with several is read by the first."""


def log_names() -> str:
    """The logs that can be read, to follow "a": ``Hugging Face trainer_state.json, Lightning metrics.csv or …``."""
    names = [row.name for row in FORMATS]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def logs_to_name(folder: Path, most: int = 3) -> str:
    """A sentence for advice with the files in a folder that are called as logs are and are read by their own name; or nothing.

    Example of what it says: `` It holds log.csv and train.log: name one of them.``
    """
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    # Not .json, .txt: hardly any file of these names is a log.
    names = [file.name for file in files if file.suffix.lower() in {".csv", ".tsv", ".jsonl", ".log"}]
    if not names:
        return ""
    return f" It holds {' and '.join(names[:most])}: name {'it' if len(names) == 1 else 'one of them'}."


def is_log(path: Path) -> bool:
    """Whether a file or folder is a log of another framework."""
    return _found(path) is not None


def read_log(path: Path) -> LogRun | None:
    """The run that a log describes, of a file or folder; ``None`` where neither is a log.

    Its summary has the last losses; there is none if the log says that the run has not ended.
    """
    found = _found(path)
    if found is None:
        return None
    form, files = found
    with disk_errors(path):
        try:
            log = form.read(files)
            steps, evals = log.rows("steps"), log.rows("evals")
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{files[0]} is damaged: {error}.", "Restore the file from a copy.") from error
    if not steps and not evals:
        names = ", ".join(sorted(log.values)[:8]) or "nothing"
        raise RecordError(
            f"{files[0]} holds no loss: {form.name} with {names}.",
            f"If one of these is the loss, rename it to one of {', '.join(NAMES['loss'][:3])}.",
        )
    source = {"format": form.name, "file": str(files[-1])}
    summary = None if log.is_finished is False else _summary(steps, evals)
    folder = path.parent if path.is_file() and form.is_of_folder else path
    return LogRun(folder, {SOURCE: source, "config": log.config}, steps, evals, [], summary)


def _found(path: Path) -> tuple[LogFormat, list[Path]] | None:
    with disk_errors(path):
        return next(((form, files) for form in FORMATS if (files := form.find(path))), None)


def _summary(steps: list[Row], evals: list[Row]) -> Row:
    summary: Row = {"steps": max(row["step"] for row in [*steps[-1:], *evals[-1:]])}
    last = next((row["val_loss"] for row in reversed(evals) if row["val_loss"] is not None), None)
    return summary if last is None else {**summary, "val_loss": last}
