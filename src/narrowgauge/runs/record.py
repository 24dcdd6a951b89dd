"""The run folder: everything about a run, in files that a person can read and a crash cannot
damage.

::

    run.toml            all settings, with versions; a resume may replace it
    steps.jsonl         a row per optimizer step
    evals.jsonl         a row per evaluation
    events.jsonl        a row per event
    gauges.jsonl        a row per step that the gauges sampled
    fingerprints.jsonl  a row per hashed step
    summary.json        the metrics of the finished run

The columns are in data/columns.toml. Rows are a log: readers drop a row that does not parse, with a
note. At any moment the last line may be torn, which is dropped without a note.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import damaged, load_json, read_bytes
from narrowgauge.runs.finding import counted
from narrowgauge.runs.foreign_logs import SOURCE, read_log
from narrowgauge.runs.places import is_run, only_run
from narrowgauge.runs.schema import VERSION, Row, is_whole, short
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
        """Return the rows of ``gauges.jsonl``, read on first use: they are by far the largest."""
        return self.read("gauges")

    @cached_property
    def fingerprints(self) -> list[Row]:
        """Return the rows of ``fingerprints.jsonl``, read on first use."""
        return self.read("fingerprints")

    def read(self, kind: str) -> list[Row]:
        """Read the rows of a kind. Drop those that do not parse, with a note."""
        if self.is_foreign:
            return []
        rows = rows_in(self.path / f"{kind}.jsonl", self.notes)
        return [row for _, row in rows if row is not None]

    @property
    def is_foreign(self) -> bool:
        """Return whether it was read from another framework's log."""
        return SOURCE in self.run

    @property
    def config(self) -> Row:
        """Return the settings: the table ``[config]`` of ``run.toml``."""
        return dict(self.run.get("config", {}))

    @property
    def data_fingerprint(self) -> str:
        """Return the fingerprint of the tokens at the start of the run; empty if it is lost."""
        return str(self.run.get("data", {}).get("fingerprint", ""))


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
        >>> with RunWriter.create(folder, {"config": {"recipe": "bfloat16/word"}}) as writer:
        ...     _ = writer.append("steps", {"step": 1, "loss": float("nan")})
        >>> read_run(folder).steps
        [{'step': 1, 'loss': nan}]
    """
    path = only_run(path)
    log = None if is_run(path) else read_log(path)
    if log is not None:
        return Run(**log)
    notes: list[str] = []
    run = Run(path, read_settings(path), summary=_read_summary(path, notes), notes=notes)
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
    except ValueError as error:
        raise damaged(file, error) from error
    version = run.get("schema_version")
    if wrong := wrong_setting(run):
        raise damaged(file, wrong)
    if version != VERSION:
        raise RecordError(
            f"The run {path} has record schema {version}; this version reads {VERSION}.",
            "Read it with the version that wrote it.",
        )
    return run


def wrong_setting(run: Row) -> str:
    """Describe what readers count with in a ``run.toml`` and cannot. Empty if nothing."""
    for name in ("config", "data"):
        if not isinstance(run.get(name, {}), dict):
            return f"its '{name}' is not a table"
    counts = {"seed": 0, "steps": 0, **run.get("config", {})}
    counts["schema_version"] = run.get("schema_version")
    for name in ("schema_version", "seed", "steps"):
        if not is_whole(counts[name]):
            return f"its {name} = {short(counts[name])} is not a whole number"
    return ""


def _read_summary(path: Path, notes: list[str]) -> Row | None:
    """Return the metrics of a finished run; without them, or if they are damaged, it is not finished."""
    data = read_bytes(path / "summary.json")
    try:
        return None if data is None else dict(load_json(data))
    except (ValueError, TypeError) as error:
        notes.append(f"summary.json is damaged ({error}) and was left out")
        return None


def rows_in(file: Path, notes: list[str]) -> list[tuple[bytes, Row | None]]:
    """Return the whole lines of a file with their rows: ``None`` of one that does not parse, with a
    note.

    A last line without a newline is torn, and is no line.
    """
    *lines, _ = (read_bytes(file) or b"").split(b"\n")
    rows: list[tuple[bytes, Row | None]] = []
    first = 0
    last = -1
    for number, line in enumerate(lines, 1):
        row = _parsed(file.stem, line)
        if row is not None and file.stem == "steps":
            if row["step"] <= last:  # a damaged step
                row = None
            else:
                last = row["step"]
        if row is None:
            first = first or number
        rows.append((line, row))
    if first:
        number = sum(row is None for _, row in rows)
        count = counted(number, "damaged row")
        notes.append(f"{file.name} has {count} of {len(rows)}, the first in line {first}; left out")
    return rows


def _parsed(kind: str, line: bytes) -> Row | None:
    try:
        row = load_json(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not is_whole(row.get("step")):
        return None
    if kind == "events" and row.get("what") is None:
        return None
    return row
