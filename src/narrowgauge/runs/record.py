"""The run folder: everything about a run, in files that a person can read and a crash cannot
damage.

::

    run.toml            all settings, with versions; a resume or the first forward pass may replace it
    steps.jsonl         a row per optimizer step
    evals.jsonl         a row per evaluation
    events.jsonl        a row per event
    gauges.jsonl        a row per step that the gauges sampled
    fingerprints.jsonl  a row per hashed step, with --fingerprints-every
    summary.json        the metrics of the finished run
    checkpoints/        see checkpoints/saving.py

The columns are in data/columns.toml. Rows are a log: a damaged row costs that row, and readers drop
it with a note. The last field of a row, ``crc``, is the CRC-32 of its text, so no damage passes for
a value. At any moment the last line may be torn, which is dropped without a note. What a run needs
to go on is in run.toml and its checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import date, time
from functools import cached_property
from pathlib import Path
from typing import Any

from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import damaged, load_json, read_bytes
from narrowgauge.runs.finding import counted
from narrowgauge.runs.foreign_logs import SOURCE, read_log
from narrowgauge.runs.places import is_run, only_run
from narrowgauge.runs.schema import REQUIRED, VERSION, Row, is_whole, short
from narrowgauge.spec.toml import load_toml


@dataclass(frozen=True)
class Run:
    """Hold the content of a run folder, as :func:`read_run` returns it.

    Args:
        path: the folder.
        run: ``run.toml``.
        steps, evals, events: the rows, in the order written.
        summary: the metrics of the finished run; ``None`` before.
        notes: sentences about damaged rows that were dropped.
    """

    path: Path
    run: Row
    steps: list[Row] = field(default_factory=list)
    evals: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    summary: Row | None = None
    notes: list[str] = field(default_factory=list)

    @cached_property
    def gauges(self) -> list[Row]:
        """Return the rows of ``gauges.jsonl``.

        Read them on first use: they are by far the largest.
        """
        return self.read("gauges")

    @cached_property
    def fingerprints(self) -> list[Row]:
        """Return the rows of ``fingerprints.jsonl``, read on first use."""
        return self.read("fingerprints")

    def read(self, kind: str) -> list[Row]:
        """Read the rows of a kind from the folder. Add notes about damaged and lost ones."""
        return read_rows(self.path / f"{kind}.jsonl", self.notes)

    @property
    def is_foreign(self) -> bool:
        """Return whether it was read from another framework's log."""
        return SOURCE in self.run

    @property
    def config(self) -> Row:
        """Return the settings, as :func:`config_of`."""
        return config_of(self.run)

    @property
    def data_fingerprint(self) -> str:
        """Return the fingerprint of the tokens at the start of the run; empty if it is lost."""
        return str(self.run.get("data", {}).get("fingerprint", ""))


def config_of(run: Row) -> Row:
    """Return the settings in a ``run.toml``: the ``[config]`` table, or the entries outside of
    tables if there is none.
    """
    outside = {name: value for name, value in run.items() if not isinstance(value, dict)}
    return dict(run.get("config", outside))


def read_run(path: str | Path) -> Run:
    """Read a run folder, finished or not, even while it is being written. Drop damaged rows.

    Args:
        path: the run folder, or a folder with one run. Or a Hugging Face ``trainer_state.json``, a
            Lightning ``metrics.csv``, or their folder, without a run of ours. Or a table (CSV).
    Returns:
        Its content. Values that a log lacks are absent.
    Raises:
        RecordError: the run is missing, its ``run.toml`` or a log is damaged, or another version
            wrote it.
    Example:
        >>> import tempfile, narrowgauge as ng
        >>> folder = Path(tempfile.mkdtemp(), "first")
        >>> from narrowgauge.runs import RunWriter
        >>> with RunWriter.create(folder, {"recipe": "bfloat16/word"}) as writer:
        ...     writer.append("steps", {"step": 1, "loss": float("nan")})
        >>> read_run(folder).steps
        [{'step': 1, 'loss': nan}]
    """
    path = only_run(path)
    log = None if is_run(path) else read_log(path)
    if log is not None:
        run = Run(**log)
        # A log has none of them, and its path may be a file.
        vars(run).update(gauges=[], fingerprints=[])
        return run
    settings = read_settings(path)
    notes: list[str] = []
    run = Run(path, settings, summary=read_summary(path / "summary.json", notes), notes=notes)
    for kind in ("steps", "evals", "events"):
        getattr(run, kind).extend(run.read(kind))
    return run


def read_settings(path: Path) -> Row:
    """Return ``run.toml`` of a run folder.

    Raise ``RecordError`` if it is missing, damaged, or of another version.
    """
    file = path / "run.toml"
    data = read_bytes(file)
    if data is None:
        raise RecordError(
            f"No run in {path}: it has no run.toml.", "Name the folder that was given as --out."
        )
    try:
        run: Row = load_toml(data.decode())
        if wrong := wrong_setting(run):
            raise ValueError(wrong)
    except ValueError as error:
        raise damaged(file, error) from error
    _require_known(run, path)
    return run


def wrong_setting(run: Row) -> str:
    """Describe what readers count with in a ``run.toml`` and cannot. Empty if nothing."""
    for name in ("config", "data"):
        if not isinstance(run.get(name, {}), dict):
            return f"its '{name}' is not a table"
    config = config_of(run)
    counts = {"schema_version": run.get("schema_version"), "seed": 0, "steps": 0, **config}
    for name in ("schema_version", "seed", "steps"):
        value = counts[name]
        if not is_whole(value):
            return f"its {name} = {short(value)} is not a whole number"
    return ""


def _require_known(table: Row, path: Path) -> None:
    version = table.get("schema_version", VERSION)
    if version != VERSION:
        raise RecordError(
            f"The run {path} has record schema {version}; this version reads {VERSION}.",
            "Read it with the version that wrote it.",
        )


def read_summary(file: Path, notes: list[str]) -> Row | None:
    """Return the metrics of a finished run.

    Without them, or if they are damaged, the run is not finished.
    """
    data = read_bytes(file)
    if data is None:
        return None
    try:
        summary = dict(load_json(data))
    except (ValueError, TypeError) as error:
        notes.append(f"{file.name} is damaged ({error}) and was left out")
        return None
    _require_known(summary, file.parent)
    return summary


# ── the lines of a file: one write appends a row and its newline ──────────────────────────────────


def read_rows(file: Path, notes: list[str]) -> list[Row]:
    """Return the rows of a file. Drop those that do not parse, and add a note about them."""
    _, rows = read_lines(file)
    notes.extend(note_of(file, rows))
    return [row for row in rows if row is not None]


def read_lines(file: Path) -> tuple[list[bytes], list[Row | None]]:
    """Return the whole lines of a file, and the row of each: ``None`` of one that does not parse.

    A last line without a newline is torn, and is no line.
    """
    *texts, _ = (read_bytes(file) or b"").split(b"\n")
    rows: list[Row | None] = []
    last = -math.inf
    for text in texts:
        row = _parsed(file.stem, text)
        if row is not None and file.stem == "steps":
            if row["step"] <= last:  # a damaged step
                row = None
            else:
                last = row["step"]
        rows.append(row)
    return texts, rows


def _parsed(kind: str, line: bytes) -> Row | None:
    try:
        row = load_json(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not is_whole(row.get("step")):
        return None
    for name in REQUIRED[kind]:
        if row.get(name) is None:
            return None
    return row


def note_of(file: Path, rows: list[Row | None]) -> list[str]:
    """Return a sentence about the lines of a file that do not parse, if there are any."""
    if None not in rows:
        return []
    number = counted(rows.count(None), "damaged row")
    first = rows.index(None) + 1
    return [f"{file.name} has {number} of {len(rows)}, the first in line {first}; left out"]


def toml_value(value: Any) -> Any:
    """Return a value that TOML has: without ``None``, numbers of NumPy and PyTorch as Python's, all
    else as text.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): toml_value(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [toml_value(item) for item in value]
    return value if isinstance(value, (bool, int, float, str, date, time)) else str(value)
