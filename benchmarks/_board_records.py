"""The board's rules and records: what every run of it has in common, and one line of ``docs/board.jsonl`` for each.

A record holds what a page needs of a run, the hash of the settings and of the tokens that it was trained with, and last the
SHA-256 of the line before it, so that an edited line is noticed. ``board.py`` writes records; ``docs/costs.py`` makes the page
and the figure from them. Nothing here needs PyTorch.

Claim and baseline: none of its own. Run: ``./dev bench board --check``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from narrowgauge.errors import RecipeError, RecordError
from narrowgauge.runs.atomic_io import lock
from narrowgauge.spec.notation import default_storage, parse
from narrowgauge.trainer.config import OF_RANKS, TrainConfig

FILE = Path(__file__).parents[1] / "docs" / "board.jsonl"

MASTER, WORD = "master", "word"
"""The storages that others are compared with."""

Cell = tuple[float, float]
"""A second-moment decay rate beta2 and a peak learning rate."""


@dataclass(frozen=True)
class Rules:
    """What every run of the board is trained with. Changing a field refuses all records of before.

    Attributes:
        betas, lrs, seeds: the values of beta2, the peak rates and the seeds, which are crossed.
        resolve: the difference in nats that a verdict tells from none.
        tokens: the fingerprint of each seed's tokens: the text, its tokenizer, and which documents the seed holds out.
        text: what the tokens were made of, in words.
        others: as ``TrainConfig`` has them.
    """

    betas: tuple[float, ...] = (0.95, 0.999)
    lrs: tuple[float, ...] = (3e-4, 1e-4)
    seeds: tuple[int, ...] = (0, 1, 2)
    resolve: float = 0.005
    tokens: Mapping[int, str] = field(
        default_factory=lambda: {
            0: "177050e86c5cc36063e9a176f089609a",
            1: "a407573d6a4a3ab5ad55fe8da735833a",
            2: "a749294f0f7c252426f642538c5d931c",
        }
    )
    text: str = "the source of CPython 3.11.7's standard library"
    model: str = "llama-1m"
    data: str = "stdlib"
    rule: str = "adamw"
    steps: int = 200
    batch_size: int = 4
    sequence_length: int = 128
    schedule: str = "cosine"
    warmup_steps: int = 20
    min_lr_ratio: float = 0.1
    beta1: float = 0.9
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    held_out: float = 0.05
    eval_batches: int = 64
    compile: bool = False

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Every combination of beta2 and peak rate."""
        return tuple(itertools.product(self.betas, self.lrs))

    @property
    def settings(self) -> dict[str, Any]:
        """Those of the rules that are settings of the trainer."""
        named = {each.name for each in dataclasses.fields(TrainConfig)}
        return {name: value for name, value in vars(self).items() if name in named}

    @property
    def settings_hash(self) -> str:
        """Equal for equal settings: 16 hexadecimal digits."""
        text = json.dumps(self.settings, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


RULES = Rules()


def over_word(compute: str) -> str:
    """The row that a compute is tried in: over ``word``, or over a storage of its own where it takes no other."""
    try:
        return parse(f"{compute}/{WORD}").name
    except RecipeError:
        return f"{compute}/{default_storage(compute)}"


_OF_A_RUN = ("recipe", "beta2", "lr", "seed", "out", "stop_after")
_RECORDED = (
    "eval_every", "checkpoint_every", "keep_checkpoints", "audit_every", "gauges_every", "fingerprints_every", "verify_every",
    "max_rollbacks", "tensorboard", "log_to", "log_every",
)  # fmt: skip
"""Settings that say what is written of a run, and change no bit of it."""


def difference(found: Mapping[str, Any], wanted: TrainConfig) -> str:
    """The first setting in which a run differs from what the rules want of it, as one line; empty where none does."""
    asked = wanted.filled().to_dict()
    shared = {*asked, *found} - {*_OF_A_RUN, *_RECORDED, *OF_RANKS}
    for name in ("beta2", "lr", *sorted(shared)):
        # A run of a version that had no such setting has its default.
        default = asked.get(name)
        if found.get(name, default) != asked.get(name):
            return f"{name} = {found.get(name)!r}, and the rules say {asked.get(name)!r}"
    return ""


@dataclass(frozen=True)
class RunRecord:
    """One training of the board.

    Args:
        row: what trained: a storage by its name, a recipe whose compute is not bfloat16, or a peer of ``peers.py``.
        recipe: as ``narrowgauge train --recipe`` takes it; for a peer, that of the model that it trained.
        package: and version of the peer; empty for ours.
        beta2, lr: the cell. A unit-scaled model's rate is as many times the usual one of its own.
        val_loss: in nats per token, as ``repr`` of the float writes it: every bit.
        bytes_per_param: counted from live tensors at the end; weight, gradient and states.
        step_seconds: of the median step, on whatever else that machine did; not for comparisons.
        wall_seconds: of the whole run, likewise.
        edq, noise: of the audit over the run; ``None`` for a peer, which has none.
        diverged: how; empty where it did not.
        weights: the fingerprint of the final stored weights.
        vectors: the processor's vector instructions that PyTorch uses; bits differ between them.
        date: when it ended, in UTC.
        settings: the hash of the rules' settings.
        data: the fingerprint of the tokens.
    """

    row: str
    recipe: str
    package: str
    rule: str
    beta2: float
    lr: float
    seed: int
    val_loss: str
    bytes_per_param: float
    step_seconds: float
    wall_seconds: float
    edq: float | None
    noise: float | None
    diverged: str
    weights: str
    narrowgauge: str
    torch: str
    python: str
    vectors: str
    threads: int
    date: str
    settings: str
    data: str

    kind = "run"

    @property
    def cell(self) -> Cell:
        return self.beta2, self.lr

    @property
    def loss(self) -> float:
        """The validation loss."""
        return float(self.val_loss)

    @property
    def arithmetic(self) -> tuple[str, str]:
        """What decides the bits beside settings and seed: runs are paired where it is the same."""
        return self.vectors, self.torch

    @property
    def place(self) -> tuple[Any, ...]:
        """What only one record may have."""
        return self.kind, self.row, self.cell, self.seed, self.arithmetic


@dataclass(frozen=True)
class StallRecord:
    """What a storage or a peer leaves of small updates: the stall case of ``stall.py``.

    Args:
        row: a storage, or a peer of ``peers.py``.
        package: and version of the peer; empty for ours.
        error: of the displacement, ‖moved − wanted‖ / ‖wanted‖, as ``repr`` of the float writes it.
        edq, noise: of the audit of its last step; ``None`` for a peer.
        settings: the hash of the case's constants.
    """

    row: str
    package: str
    error: str
    bytes_per_param: float
    edq: float | None
    noise: float | None
    narrowgauge: str
    torch: str
    python: str
    vectors: str
    date: str
    settings: str

    kind = "stall"

    @property
    def place(self) -> tuple[Any, ...]:
        """What only one record may have."""
        return self.kind, self.row, self.vectors, self.torch


Record = RunRecord | StallRecord
KINDS: dict[str, type[RunRecord] | type[StallRecord]] = {each.kind: each for each in (RunRecord, StallRecord)}


def line_of(record: Record) -> str:
    """A record as a line of the file, without the newline; its last key is the SHA-256 of the line without it."""
    return _sealed({"kind": record.kind, **dataclasses.asdict(record)})


def _sealed(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    return f'{text[:-1]}, "sha256": "{hashlib.sha256(text.encode()).hexdigest()}"}}'


def record_of(line: str) -> Record:
    """The record of a line; ``ValueError`` where the line is not as it was written."""
    try:
        content = json.loads(line)
        content.pop("sha256")
        kind = KINDS[content["kind"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError("this is no record of the board") from error
    if _sealed(content) != line:
        raise ValueError("the line was edited: it does not match its sha256")
    del content["kind"]
    if set(content) != {each.name for each in dataclasses.fields(kind)}:
        raise ValueError("it has other columns than this version's records")
    return kind(**content)


def refusal(record: Record, rules: Rules = RULES) -> str:
    """Why a record is not one of the board's rules; empty where it is."""
    if isinstance(record, StallRecord):
        return "" if repr(float(record.error)) == record.error else f"error {record.error!r} is no float as repr has it"
    if record.settings != rules.settings_hash:
        return f"its settings have the hash {record.settings}, and those of the rules {rules.settings_hash}"
    if record.seed not in rules.seeds or record.cell not in rules.cells:
        return f"beta2 {record.beta2:g}, lr {record.lr:g}, seed {record.seed} is not in the rules"
    if record.data != rules.tokens[record.seed]:
        return f"its tokens are {record.data}, and the rules' for seed {record.seed} {rules.tokens[record.seed]}"
    return "" if repr(record.loss) == record.val_loss else f"val_loss {record.val_loss!r} is no float as repr has it"


def faults(lines: Iterable[str], rules: Rules = RULES) -> list[str]:
    """What is wrong with a file of records, a line each; none where it is sound."""
    found: list[str] = []
    seen: dict[tuple[Any, ...], int] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = record_of(line)
        except ValueError as error:
            found.append(f"line {number}: {error}.")
            continue
        if reason := refusal(record, rules):
            found.append(f"line {number}: {reason}.")
        if record.place in seen:
            found.append(f"line {number}: the same run is on line {seen[record.place]}.")
        seen.setdefault(record.place, number)
    return found


def lines_in(file: Path = FILE) -> list[str]:
    """The lines of the file; none where it does not exist yet."""
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []


def read(file: Path = FILE, rules: Rules = RULES) -> list[Record]:
    """All records; ``RecordError`` where one of them is not as it was written, or of other rules."""
    lines = lines_in(file)
    if wrong := faults(lines, rules):
        raise RecordError(f"{file.name}, {wrong[0]}", "Restore the file; ./dev bench board --check lists all.")
    return [record_of(line) for line in lines]


def runs_of(records: Iterable[Record]) -> list[RunRecord]:
    """The trainings among records."""
    return [record for record in records if isinstance(record, RunRecord)]


def usual_seconds(runs: Sequence[RunRecord], row: str) -> float:
    """What a training of a row took: the median of its recorded times, or of all where it has none."""
    return statistics.median([run.wall_seconds for run in runs if run.row == row] or [run.wall_seconds for run in runs])


def append(new: Sequence[Record], file: Path = FILE, rules: Rules = RULES) -> tuple[list[Record], list[str]]:
    """Append records that are not there yet.

    Returns:
        Those that were appended, and a line for each that contradicts one that is there.
    """
    added: list[Record] = []
    contradictions = []
    with file.open("a", encoding="utf-8") as stream:
        lock(stream.fileno(), wait=True)  # another process may have the same runs
        there = {record.place: record for record in read(file, rules)}
        for record in new:
            other = there.get(record.place)
            if other is None:
                there[record.place] = record
                added.append(record)
            elif (same := _outcome(other)) != (mine := _outcome(record)):
                contradictions.append(f"{_title(record)} is recorded with {same}, and this run has {mine}.")
        stream.writelines(f"{line_of(record)}\n" for record in added)
    return added, contradictions


def _outcome(record: Record) -> str:
    return f"error {record.error}" if isinstance(record, StallRecord) else f"validation loss {record.val_loss}"


def _title(record: Record) -> str:
    if isinstance(record, StallRecord):
        return f"{record.row} in the stall case"
    return f"{record.row}, beta2 {record.beta2:g}, lr {record.lr:g}, seed {record.seed}"
