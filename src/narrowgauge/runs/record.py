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
import zlib
from dataclasses import dataclass, field
from datetime import date, time
from functools import cached_property
from pathlib import Path
from typing import Any

from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import damaged, load_json, read_bytes
from narrowgauge.runs.finding import counted
from narrowgauge.runs.foreign_logs import SOURCE, read_log
from narrowgauge.runs.places import ROW_FILES, is_run, only_run
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
        rows = (self.summary or {}).get("rows") or {}
        return read_rows(self.path / f"{kind}.jsonl", self.notes, rows.get(kind, 0))

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
        >>> with ng.runs.RunWriter.create(folder, {"recipe": "bfloat16/word"}) as writer:
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
        summary = dict(restored(load_json(verified(data))))
        wrong = wrong_value("summary", summary)
        if wrong:
            raise ValueError(f"it has {wrong}")
    except (ValueError, TypeError) as error:
        notes.append(f"{file.name} is damaged ({error}) and was left out")
        return None
    _require_known(summary, file.parent)
    return summary


# ── the lines of a file ───────────────────────────────────────────────────────────────────────────
#
# One write appends a row and its newline. So a last line without a newline is torn. JSON lacks NaN
# and infinities, so they are stored as "nan", "inf" and "-inf".

_QUOTED = tuple(f'"{name}"'.encode() for name in sorted(NOT_FINITE))
_CHECKSUM = b',"crc":"'


def sealed(text: str) -> bytes:
    """Return a JSON object as a line, with the CRC-32 of its text as the last field.

    Example:
        >>> sealed('{"step":1}')
        b'{"step":1,"crc":"17ccbd80"}\\n'
    """
    content = text.removesuffix("}").encode()
    return b'%b%b%08x"}\n' % (content, _CHECKSUM, zlib.crc32(content))


def verified(line: bytes) -> bytes:
    """Return the JSON object in a line, without its checksum. Some old lines have none.

    Raises:
        ValueError: the text has another checksum.
    """
    content, mark, checksum = line.rstrip(b"\n").rpartition(_CHECKSUM)
    if not mark:
        return line
    if checksum != b'%08x"}' % zlib.crc32(content):
        raise ValueError("it does not match its checksum")
    return content + b"}"


def read_rows(file: Path, notes: list[str], number: int = 0) -> list[Row]:
    """Return the rows of a file, which had at least a ``number`` of them.

    Drop damaged ones, and add a note about them and about lost ones.
    """
    _, rows = read_lines(file)
    notes.extend(note_of(file, rows))
    if len(rows) < number:
        notes.append(f"{file.name} lacks {number - len(rows):,} of its {number:,} rows")
    return [row for row in rows if row is not None]


def read_lines(file: Path) -> tuple[list[bytes], list[Row | None]]:
    """Return the whole lines of a file, and the row of each: ``None`` of a damaged line."""
    *texts, _ = (read_bytes(file) or b"").split(b"\n")
    rows = [_parsed(file.stem, text) for text in texts]
    if file.stem == "steps":
        _drop_repeated(rows)
    return texts, rows


def count_rows(folder: Path) -> dict[str, int]:
    """Return the number of lines in each file of rows."""
    return {name: (read_bytes(folder / f"{name}.jsonl") or b"").count(b"\n") for name in ROW_FILES}


def note_of(file: Path, rows: list[Row | None]) -> list[str]:
    """Return a sentence about the damaged lines of a file, if there are any."""
    if None not in rows:
        return []
    number = counted(rows.count(None), "damaged row")
    first = rows.index(None) + 1
    return [f"{file.name} has {number} of {len(rows)}, the first in line {first}; left out"]


def _parsed(kind: str, line: bytes) -> Row | None:
    try:
        row = load_json(verified(line))
    except ValueError:
        return None
    if any(name in line for name in _QUOTED):
        row = restored(row)
    if not isinstance(row, dict) or wrong_value(kind, row):
        return None
    return row


def _drop_repeated(rows: list[Row | None]) -> None:
    """Replace rows by ``None`` whose steps do not follow those before them."""
    last = -math.inf
    for place, row in enumerate(rows):
        if row is not None and row["step"] <= last:
            rows[place] = None
        elif row is not None:
            last = row["step"]


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
