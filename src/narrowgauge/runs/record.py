"""The run folder: everything about a run, in files that a person can read and a crash cannot damage.

::

    run.toml            all settings, with versions; a resume or the first forward pass may replace it
    steps.jsonl         a row per optimizer step
    evals.jsonl         a row per evaluation
    events.jsonl        a row per event
    gauges.jsonl        a row per step that the gauges sampled
    fingerprints.jsonl  a row per hashed step, with --fingerprints-every
    summary.json        the metrics of the finished run
    checkpoints/        see checkpoints/saving.py

The columns are in data/columns.toml. A reader at any moment finds valid rows and at worst one torn last line, which is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, time
from functools import cached_property
from pathlib import Path
from typing import Any

from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import disk_errors, load_json, read_bytes
from narrowgauge.runs.foreign_logs import SOURCE, read_log
from narrowgauge.runs.schema import NOT_FINITE, TEXT, VERSION, Row, is_whole, short, wrong_value
from narrowgauge.spec.toml import load_toml


@dataclass(frozen=True)
class Run:
    """Hold the content of a run folder, as :func:`read_run` returns it.

    Args:
        path: the folder.
        run: ``run.toml``.
        steps, evals, events: the rows, in the order written.
        summary: the metrics of the finished run; ``None`` before.
    """

    path: Path
    run: Row
    steps: list[Row] = field(default_factory=list)
    evals: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    summary: Row | None = None

    @cached_property
    def gauges(self) -> list[Row]:
        """Return the rows of ``gauges.jsonl``. Read them on first use: they are by far the largest."""
        return read_rows(self.path / "gauges.jsonl")

    @cached_property
    def fingerprints(self) -> list[Row]:
        """Return the rows of ``fingerprints.jsonl``, read on first use."""
        return read_rows(self.path / "fingerprints.jsonl")

    @property
    def is_foreign(self) -> bool:
        """Return whether it was read from another framework's log."""
        return SOURCE in self.run

    @property
    def config(self) -> Row:
        """Return the settings, as :func:`config_of`."""
        config = config_of(self.run)
        if not isinstance(config, dict):
            raise self._damaged("'config' is not a table")
        return config

    @property
    def data_fingerprint(self) -> str:
        """Return the fingerprint of the tokens at the start of the run. Raise ``RecordError`` if ``run.toml`` has none."""
        data = self.run.get("data")
        fingerprint = data.get("fingerprint") if isinstance(data, dict) else None
        if not isinstance(fingerprint, str):
            raise self._damaged("its table [data] holds no fingerprint")
        return fingerprint

    def _damaged(self, reason: str) -> RecordError:
        return RecordError(
            f"{self.path / 'run.toml'} is damaged: {reason}.", "Restore the file from a copy."
        )


def config_of(run: Row) -> Any:
    """Return the settings in a ``run.toml``: the ``[config]`` table, or the entries outside of tables if there is none."""
    return run.get(
        "config", {name: value for name, value in run.items() if not isinstance(value, dict)}
    )


def is_run(path: Path) -> bool:
    with disk_errors(path):
        return (path / "run.toml").is_file()


def read_run(path: str | Path) -> Run:
    """Read a run folder, finished or not, even while it is being written. Drop a torn last line.

    Args:
        path: the run folder. Or a Hugging Face ``trainer_state.json``, a Lightning ``metrics.csv`` or TensorBoard event files,
            or their folder. Or a table (CSV).
    Returns:
        Its content. Values that a log lacks are absent.
    Raises:
        RecordError: the run is missing, a file is damaged, or a newer version wrote it.
    Example:
        >>> import tempfile, narrowgauge as ng
        >>> folder = Path(tempfile.mkdtemp(), "first")
        >>> with ng.runs.RunWriter.create(folder, {"recipe": "bfloat16/word"}) as writer:
        ...     writer.append("steps", {"step": 1, "loss": float("nan")})
        >>> read_run(folder).steps
        [{'step': 1, 'loss': nan}]
    """
    path = Path(path)
    if not is_run(path) and (log := read_log(path)) is not None:
        run_of_log = Run(**log)
        vars(run_of_log).update(
            gauges=[], fingerprints=[]
        )  # a log has neither, and its path may be a file
        return run_of_log
    run = read_settings(path)
    steps, evals, events = (
        read_rows(path / f"{name}.jsonl") for name in ("steps", "evals", "events")
    )
    return Run(path, run, steps, evals, events, read_summary(path / "summary.json"))


def read_settings(path: Path) -> Row:
    """Return ``run.toml`` of a run folder. Raise ``RecordError`` if it is missing, damaged, or of another version."""
    file = path / "run.toml"
    data = read_bytes(file)
    if data is None:
        problem = (
            "the file is no log that can be read"
            if path.is_file()
            else "there is no such folder or file"
        )
        reason = "the folder has no run.toml" if path.is_dir() else problem
        raise RecordError(
            f"No run in {path}: {reason}.",
            f"Name the folder that was given as --out.{latest_runs(path)}",
        )
    try:
        run: Row = load_toml(data.decode())
        if wrong := wrong_setting(run):
            raise ValueError(wrong)
    except (ValueError, KeyError) as error:
        raise RecordError(
            f"{file} is damaged: {error}.", "Restore the file from a copy."
        ) from error
    _require_known(run, path)
    return run


def wrong_setting(run: Row) -> str:
    """Name a number in ``run.toml`` that readers count with and that is not whole. Empty if all are."""
    config = run["config"] if isinstance(run.get("config"), dict) else {}
    numbers = {
        "schema_version": run["schema_version"],
        "seed": config.get("seed", 0),
        "steps": config.get("steps", 0),
    }
    wrong = next((key for key, value in numbers.items() if not is_whole(value)), None)
    return "" if wrong is None else f"its {wrong} = {short(numbers[wrong])} is not a whole number"


def latest_runs(path: Path) -> str:
    """Return a sentence with the three newest runs in or beside a folder, or else in ``runs/`` here; empty without runs."""
    for place in (path, path.parent, Path("runs")):
        with suppress(OSError):
            files = sorted(
                place.glob("*/run.toml"), key=lambda file: file.stat().st_mtime, reverse=True
            )
            if files:
                return (
                    f" The latest runs there: {', '.join(str(file.parent) for file in files[:3])}."
                )
    return ""


def _require_known(table: Row, path: Path) -> None:
    if (version := table.get("schema_version", VERSION)) != VERSION:
        raise RecordError(
            f"The run {path} has record schema {version}; this version reads {VERSION}.",
            "Read it with the version that wrote it.",
        )


def read_summary(file: Path) -> Row | None:
    data = read_bytes(file)
    if data is None:
        return None
    try:
        summary = restored(load_json(data))
        if wrong := wrong_value("summary", summary) if isinstance(summary, dict) else "no object":
            raise ValueError(f"it has {wrong}")
    except (ValueError, RecursionError) as error:
        advice = "Delete it; narrowgauge resume writes it again."
        raise RecordError(f"{file} is damaged: {error}.", advice) from error
    _require_known(summary, file.parent)
    return dict(summary)


# ── the lines of a file ─────────────────────────────────────────────────────────────────────────────────────────────────
#
# One write appends a row and its newline. So a last line without a newline is torn, and dropped. Any other line that does not
# parse is refused. JSON lacks NaN and infinities, so they are stored as "nan", "inf" and "-inf".

ROW_FILES = ("steps", "evals", "events", "gauges", "fingerprints")
"""The kinds of rows. Each has a file: ``steps.jsonl`` and so on."""
_QUOTED = tuple(f'"{name}"'.encode() for name in sorted(NOT_FINITE))


def read_rows(file: Path) -> list[Row]:
    """Return the rows of a file. Drop a torn last line, refuse a damaged line."""
    return [row for _, row in rows_with_lengths(file)]


def rows_with_lengths(file: Path) -> Iterator[tuple[int, Row]]:
    """Yield each row of a file with the length of its line in bytes."""
    *lines, _ = (read_bytes(file) or b"").split(b"\n")
    for number, line in enumerate(lines, 1):
        row: Any = None
        try:
            row = load_json(line)
            row = restored(row) if any(name in line for name in _QUOTED) else row
            problem = wrong_value(file.stem, row) if isinstance(row, dict) else "no object"
        except (ValueError, RecursionError) as error:
            problem = f"no row ({error})"
        if problem:
            raise RecordError(
                f"{file} is damaged: line {number} of {len(lines)} has {problem}.",
                "Delete that line.",
            )
        yield len(line) + 1, row


def restored(value: Any, key: str = "") -> Any:
    """Turn the names of NaN and infinities back into floats. Leave columns of text unchanged."""
    if isinstance(value, dict):
        return {name: restored(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [restored(item, key) for item in value]
    if isinstance(value, str) and value in NOT_FINITE and key not in TEXT:
        return float(value)
    return value


def toml_value(value: Any) -> Any:
    """Return a value that TOML has: without ``None``, numbers of NumPy and PyTorch as Python's, all else as text."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, dict):
        return {str(key): toml_value(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [toml_value(item) for item in value]
    return value if isinstance(value, (bool, int, float, str, date, time)) else str(value)
