"""Runs of other frameworks, read from their logs. Values that a log does not hold stay unknown.

Such a run has losses, learning rates and gradient norms at the logged steps. It has no recipe, seed, bytes or audit. It is
named after its folder. :func:`narrowgauge.read_run` and ``narrowgauge report`` read it like a run folder.

A log does not say what a number is. It only has the name that a framework or a user chose. So :data:`NAMES` lists the
usual names of each of our columns, the best first. Nothing is guessed from values: a metric under another name is not read.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import disk_errors, load_json
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
"""The names of each column, the best first, with shell wildcards. Sources: our own names, Hugging Face's Trainer,
Lightning's tutorials and ``LearningRateMonitor``, torchtitan, and PyTorch's TensorBoard tutorial."""
_STEPS = ("train/global_step", "trainer/global_step", "global_step", "step", "iteration", "iter", "steps", "_step")
"""The names of a column of steps, the best first. Optimizer steps come before W&B's count of ``wandb.log`` calls."""
SOURCE = "source"
"""The table of ``Run.run`` that names the log of another framework's run."""

Value = tuple[str, Any, Any]
"""A name, a step, and a value."""


def named(names: Iterable[str], column: str) -> str | None:
    """Return the best name of a column among those of a log.

    Example:
        >>> named(["epoch", "eval_loss", "lr-AdamW"], "val_loss"), named(["epoch", "lr-AdamW"], "lr"), named(["acc"], "loss")
        ('eval_loss', 'lr-AdamW', None)
    """
    candidates = list(names)
    return next((name for pattern in NAMES[column] for name in candidates if fnmatchcase(name, pattern)), None)


# ── formats: each yields the values of a log ────────────────────────────────────────────────────────────────────────


def _trainer_state(path: Path) -> list[Path]:
    """Find Hugging Face's file: itself, in a folder, or in the folder's latest checkpoint, which repeats earlier rows."""
    if path.name == "trainer_state.json" and path.is_file():
        return [path]
    files = [
        path / "trainer_state.json",
        *sorted(path.glob("checkpoint-*/trainer_state.json"), key=_checkpoint_step)[::-1],
    ]
    return [file for file in files if file.is_file()][:1]


def _checkpoint_step(file: Path) -> int:
    number = file.parent.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def _read_trainer_state(files: list[Path]) -> Iterator[Value]:
    """Yield ``log_history``; each ``loss`` is the mean of the steps since the one before."""
    state: Any = load_json(files[0].read_bytes())
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list) or not all(isinstance(row, dict) for row in history):
        raise ValueError("it has no list log_history")
    for row in history:
        yield from ((name, row.get("step"), value) for name, value in row.items() if name not in ("step", "epoch"))


def _metrics_csv(path: Path) -> list[Path]:
    return [file for file in (path, path / "metrics.csv") if file.name == "metrics.csv" and file.is_file()][:1]


def _read_metrics_csv(files: list[Path]) -> Iterator[Value]:
    """Yield the columns of Lightning's CSVLogger. It counts steps from 0: its step 9 is our step 10."""
    rows, names = _csv_rows(files[0].read_text(encoding="utf-8"), ",")
    if "step" not in names:
        raise ValueError("it has no column 'step'")
    for line in rows:
        step = _strict_number("step", line["step"])
        for name, value in line.items():
            if name not in ("step", "epoch") and value:
                yield name, step + 1, _strict_number(name, value)


def _csv_rows(text: str, delimiter: str) -> tuple[list[dict[str, str]], list[str]]:
    table = csv.DictReader(io.StringIO(text, newline=""), strict=True, delimiter=delimiter)
    try:
        rows = list(table)
    except csv.Error as error:
        raise ValueError(f"line {table.line_num}: {error}") from error
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise ValueError(f"line {number} has not as many values as the first line has names")
    return rows, list(table.fieldnames or ())


def _strict_number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError as error:
        raise ValueError(f"column '{name}' holds {value!r}, which is not a number") from error


def _event_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.match("*.tfevents.*") else []
    return sorted(file for file in path.glob("*.tfevents.*") if file.is_file())


def _read_event_files(files: list[Path]) -> Iterator[Value]:
    """Yield the scalars of TensorBoard. Skip a truncated last record, as in a run in progress."""
    try:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.compat.tensorflow_stub import errors
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError as error:
        raise RecordError(
            f"Cannot read {files[0]}: the package tensorboard is not installed.", "pip install tensorboard."
        ) from error
    for file in files:
        records = PyRecordReader_New(str(file))
        try:
            while True:
                records.GetNext()
                event = event_pb2.Event.FromString(records.record())
                for value in event.summary.value:
                    if value.HasField("simple_value"):
                        yield value.tag, event.step, float(value.simple_value)
                    elif value.HasField("tensor") and not value.tensor.tensor_shape.dim:
                        array = make_ndarray(value.tensor)
                        if array.dtype.kind in "fiu":
                            yield value.tag, event.step, float(array)
        except errors.OutOfRangeError:
            continue
        except errors.DataLossError as error:
            if "runcated" not in str(error):
                raise ValueError(str(error.message).removeprefix(f"{file} ")) from error
        finally:
            records.file_handle.close()


def _by_ending(*endings: str) -> Callable[[Path], list[Path]]:
    """Find a file by the end of its name. A folder may hold any such file, and possibly no log."""
    return lambda path: [path] if path.suffix.lower() in endings and path.is_file() else []


def _text(files: list[Path]) -> str:
    return files[0].read_text(encoding="utf-8-sig", errors="replace")


def _read_csv(files: list[Path]) -> Iterator[Value]:
    """Yield the numbers of a table, or of a chart exported by Weights & Biases."""
    text = _text(files)
    head = text.partition("\n")[0]
    delimiter = "\t" if "\t" in head and "," not in head else ","
    return _table_values(_csv_rows(text, delimiter)[0])


def _read_json(files: list[Path]) -> Iterator[Value]:
    """Yield the numbers of rows: a list of objects, or an object a line."""
    text = _text(files)
    rows = (
        json.loads(text) if text.lstrip().startswith("[") else [json.loads(x) for x in text.splitlines() if x.strip()]
    )
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("it is no list of objects")
    return _table_values(rows)


def _table_values(rows: list[Any]) -> Iterator[Value]:
    names = list(dict.fromkeys(str(name) for row in rows for name in row))
    known = {name.strip().lower(): name for name in names}
    step_name = next((known[name] for name in _STEPS if name in known), None)
    if step_name is None:
        raise ValueError(f"it has no column of steps ({', '.join(_STEPS[2:])})")
    metrics: dict[str, str] = {}
    for name in names:
        if name == step_name or name.endswith(("__MIN", "__MAX")):
            continue
        metric = name.rpartition(" - ")[2].strip()  # exported charts put "NAME OF THE RUN - " before it
        if metric in metrics.values():
            raise ValueError(f"it holds several runs with {metric}, and one was asked about: export one")
        metrics[name] = metric
    for number, row in enumerate(rows, 2):
        step = _number(row.get(step_name))
        if step is None:
            continue  # a row of another kind: some tables count evaluations separately
        if step != int(step):
            raise ValueError(f"line {number} has the step {row.get(step_name)}, which is not a whole number")
        for name, metric in metrics.items():
            if (value := _number(row.get(name))) is not None:
                yield metric, int(step), value


def _number(value: Any) -> float | None:
    """Return a number, or the number in a text. Return ``None`` for times, names, media and anything else."""
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


_IN_TEXT: dict[str, tuple[str, ...]] = {
    "train_loss": (
        "train loss", "training loss", "train_loss", "train/loss", "lm loss", "loss", "train/crossentropyloss", "train/ce loss",
    ),
    "val_loss": (
        "val loss", "val_loss", "val/loss", "valid loss", "valid_loss", "validation loss", "validation_loss", "eval loss",
        "eval_loss",
    ),
    "lr": ("learning rate", "learning_rate", "lr", "optim/learning_rate_group0"),
    "grad_norm": (
        "grad norm", "grad_norm", "gradient norm", "gradient_norm", "gnorm", "norm", "optim/total_grad_norm", "total_grad_norm",
    ),
    "loss_scale": ("loss scale", "loss_scale"),
}  # fmt: skip
"""Names of our columns in lines of logs. Case is ignored."""
_COLUMN_OF = {word: column for column, words in _IN_TEXT.items() for word in words}
_NUMERAL = r"[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?|nan|inf(?:inity)?)(?![\w.])"
_WORDS = "|".join(sorted(map(re.escape, _COLUMN_OF), key=len, reverse=True))
# A name after another word is another one's: "test loss", "aux loss".
_PAIR = re.compile(rf"(?<![a-z]\s)(?<![\w/])['\"]?({_WORDS})['\"]?\s*[:=]?\s*({_NUMERAL})", re.IGNORECASE)
_STEP = re.compile(r"(?<![\w/])(?:global_step|iteration|iter|step)['\"]?\s*[:=]?\s*(\d[\d,]*)(?![\w.])", re.IGNORECASE)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_EVALUATION = re.compile(r"\b(?:val|valid|validation|eval|evaluation)\b", re.IGNORECASE)


def _read_text(files: list[Path]) -> Iterator[Value]:
    """Yield the values in lines of text. The step is in the line, or in the less indented line above."""
    step, restarts = None, 0
    for raw in _text(files).splitlines():
        line = _COLOURS.sub("", raw)
        if (match := _STEP.search(line)) is not None:
            now = int(match[1].replace(",", ""))
            restarts += step is not None and now < step and re.search(r"\bepoch\b", line, re.IGNORECASE) is not None
            step = now
        elif not line[:1].isspace():
            continue
        if step is None or re.search(r"\btest\b", line, re.IGNORECASE):
            continue
        if restarts > 1:
            raise ValueError(
                "its steps begin anew in each epoch, so a step has several rows: log one count of all steps"
            )
        is_evaluation = bool(_EVALUATION.search(line)) and not re.search(r"\btrain", line, re.IGNORECASE)
        for pair in _PAIR.finditer(line):
            column = _COLUMN_OF[pair[1].lower()]
            yield "val_loss" if column == "train_loss" and is_evaluation else column, step, float(pair[2])


# ── a run from any of them ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class LogFormat:
    """A format of logs.

    Args:
        find: return the log's files, from a folder or a file. Empty if there is no such log.
        read: return their values. Raises ``ValueError`` if they are damaged.
        is_of_folder: the run is named after the folder. Otherwise after the file, because a folder may hold several.
        counts_from_0: a log whose losses begin at step 0 counts its steps from 0.
    """

    name: str
    find: Callable[[Path], list[Path]]
    read: Callable[[list[Path]], Iterator[Value]]
    is_of_folder: bool = True
    counts_from_0: bool = True


FORMATS = (
    LogFormat("Hugging Face trainer_state.json", _trainer_state, _read_trainer_state, counts_from_0=False),
    LogFormat("Lightning metrics.csv", _metrics_csv, _read_metrics_csv, counts_from_0=False),
    LogFormat("TensorBoard events", _event_files, _read_event_files),
    LogFormat("CSV table or export (.csv, .tsv)", _by_ending(".csv", ".tsv"), _read_csv, is_of_folder=False),
    LogFormat("JSON rows (.json, .jsonl)", _by_ending(".json", ".jsonl"), _read_json, is_of_folder=False),
    LogFormat("log of text (.log, .txt, .out)", _by_ending(".log", ".txt", ".out"), _read_text, is_of_folder=False),
)
"""All formats, in the order tried. The first that matches reads the folder."""


def log_names() -> str:
    """Name the logs that can be read, to follow "a": ``Hugging Face trainer_state.json, Lightning metrics.csv or …``."""
    names = [row.name for row in FORMATS]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def is_log(path: Path) -> bool:
    """Return whether a file or folder is a log of another framework."""
    with disk_errors(path):
        return any(form.find(path) for form in FORMATS)


def read_log(path: Path) -> dict[str, Any] | None:
    """Return the fields of the :class:`narrowgauge.Run` that a log describes. Return ``None`` without a log.

    The summary has the last losses. It is ``None`` if the log says that the run has not ended.
    """
    with disk_errors(path):
        form, files = next(((form, files) for form in FORMATS if (files := form.find(path))), (None, []))
        if form is None:
            return None
        try:
            values = _by_name(form.read(files), form.counts_from_0)
            steps, evals = _rows(values, "steps"), _rows(values, "evals")
            config, is_finished = _progress(files[0])
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{files[0]} is damaged: {error}.", "Restore the file from a copy.") from error
    if not steps and not evals:
        raise RecordError(
            f"{files[0]} holds no loss: {form.name} with {', '.join(sorted(values)[:8]) or 'nothing'}.",
            f"If one of these is the loss, rename it to one of {', '.join(NAMES['loss'][:3])}.",
        )
    summary: Row = {"steps": max(row["step"] for row in (*steps, *evals))}
    if evals:
        summary["val_loss"] = evals[-1].get("val_loss")
    folder = path.parent if path.is_file() and form.is_of_folder else path
    source = {"format": form.name, "file": str(files[-1])}
    return {
        "path": folder,
        "run": {"config": config, SOURCE: source},
        "steps": steps,
        "evals": evals,
        "summary": summary if is_finished else None,
    }


def _progress(file: Path) -> tuple[Row, bool]:
    """Return the settings in a log, and whether its run has ended. Only Hugging Face's log says so."""
    state = load_json(file.read_bytes()) if file.name == "trainer_state.json" else {}
    done, planned = state.get("global_step"), state.get("max_steps")
    if isinstance(done, int) and isinstance(planned, int) and planned > 0:
        return {"steps": planned}, done >= planned
    return {}, True


def _by_name(values: Iterator[Value], counts_from_0: bool) -> dict[str, dict[int, Any]]:
    """Collect the values of each name by step; the last of one step counts."""
    series: dict[str, dict[int, Any]] = {}
    for name, step, value in values:
        if not is_whole(step):
            raise ValueError(f"{name} has step {short(step)}, which is not a whole number")
        series.setdefault(name, {})[int(step)] = value
    first = named(series, "loss")
    if counts_from_0 and first is not None and min(series[first]) == 0:
        return {name: {step + 1: value for step, value in steps.items()} for name, steps in series.items()}
    return series


def _rows(values: Mapping[str, Mapping[int, Any]], table: str) -> list[Row]:
    """Return the rows of ``"steps"`` or ``"evals"``, ascending. A row lacks the columns not logged at its step."""
    by_step: dict[int, Row] = {}
    for column in NAMES:
        name = named(values, column) if column in (STEP if table == "steps" else EVAL) else None
        for step, value in values[name].items() if name is not None else ():
            by_step.setdefault(step, {"step": step})[column] = value
    rows = [by_step[step] for step in sorted(by_step)]
    for row in rows:
        if wrong := wrong_value(table, row):
            raise ValueError(f"step {row['step']} has {wrong}")
    return rows
