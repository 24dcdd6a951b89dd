"""The rows of the corpus: the text of ``loop.py`` with edits, and what the tools read of each.

A row is a loop, or the single step at the end of the text. One process runs a loop: a fault of ranks is
done to micro-batches.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import narrowgauge as ng
from corpus.loop import Loop, count
from narrowgauge.measuring.diagnose.diagnose import Diagnosis
from narrowgauge.measuring.reading import Readings
from narrowgauge.spec.toml import load_toml

FOLDER = Path(__file__).parent
TEXT = (FOLDER / "loop.py").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Row:
    """A program with edits, and what is read of it; nothing of a healthy one and of a silent fault.

    Attributes:
        is_loop: asked are the loop and its first step, not the single step at the end.
        edits: pairs of a text that ``loop.py`` has once and the text that replaces it.
        settings: of the loop, with and without the fault.
        fault: its public source, and what it is.
        steps: of the loop.
        asked: columns of the table. ``check`` and ``run`` are their kinds of readings.
        tensor, step, stage, value: of a reading; the tensor as a regular expression.
        says: words that are printed.
    """

    name: str
    section: str
    is_loop: bool
    edits: Sequence[Sequence[str]] = ()
    settings: str = ""
    fault: str = ""
    steps: int = 6
    asked: Sequence[str] = ()
    check: Sequence[str] = ()
    run: Sequence[str] = ()
    tensor: str = ""
    step: int | None = None
    stage: str | None = None
    value: float | None = None
    says: Sequence[str] = ()

    def names(self) -> dict[str, Any]:
        """Return the names of the edited text, a module of its own."""
        text = TEXT
        for old, new in self.edits:
            text = edited(text, old, new.strip("\n"))
        sys.modules[f"corpus.{self.name}"] = module = ModuleType(f"corpus.{self.name}")
        names = vars(module)
        names["ng"] = ng
        exec(compile(text, "loop.py", "exec"), names)
        return names

    def loop(self) -> Loop:
        """Return the edited loop."""
        names = self.names()
        loop = names["Loop"](eval(f"Settings({self.settings})", names), self.steps)
        return loop


def edited(text: str, old: str, new: str) -> str:
    """Replace ``old``, which the text has once, by ``new``. Further lines are indented like the first."""
    assert text.count(old) == 1, f"loop.py has {text.count(old)} times: {old}"
    line = text[text.rindex("\n", 0, text.index(old)) + 1 :]
    indent = line[: len(line) - len(line.lstrip())]
    return text.replace(old, new.replace("\n", f"\n{indent}"))


def completed(table: dict[str, Any], tables: dict[str, Any]) -> dict[str, Any]:
    """Return a row with what it shares with an earlier one: its edits come after those of that row."""
    if "like" not in table:
        return table
    shared = tables[table.pop("like")]
    return {**shared, **table, "edits": [*shared["edits"], *table.get("edits", ())]}


def load(file: str, is_loop: bool, *asked: str) -> list[Row]:
    """Return the rows of a file. A row that is a text alone is its settings; a list is its edits."""
    rows = []
    for section, tables in load_toml((FOLDER / file).read_text(encoding="utf-8")).items():
        for name, table in tables.items():
            fields = {"asked": asked}
            if isinstance(table, str):
                fields["settings"] = table
            elif isinstance(table, list):
                fields["edits"] = table
            else:
                tables[name] = table = completed(table, tables)
                fields |= table
            rows.append(Row(name, section, is_loop, **fields))
    return rows


FAULTS = load("faults.toml", True, "check", "run")
HEALTHY = load("healthy.toml", True, "check", "run")
PROGRAMS = load("programs.toml", False, "check")


# ── the columns ───────────────────────────────────────────────────────────────────────────────────


def first_step(row: Row) -> dict[str, Any]:
    """Return model, optimizer, batch, loss and backward of a step."""
    if not row.is_loop:
        return row.names()
    loop = row.loop()
    loop.step = 1
    parts = loop.batches(0)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        before, loop.model = loop.model, model
        value = loop.summed(batch) / count(batch)
        loop.model = before
        return value

    def backward(model: nn.Module, batch: Any) -> None:
        loop.passes(batch)
        loop.before_clip()
        if loop.scaler is not None:
            loop.scaler = loop.new_scaler(loop.settings.loss_scale)

    optimizers = [loop.optimizer, *loop.others]
    return {
        "model": loop.model, "optimizer": optimizers, "batch": parts, "loss": loss, "backward": backward,
    }  # fmt: skip


def checked(row: Row, folder: Path) -> Readings:
    """Compare the gradient of a step with the loss, the mean over all tokens."""
    names = first_step(row)
    options = {name: names[name] for name in ("batch", "loss", "backward")}
    return ng.check(names["model"], names["optimizer"], **options)


def recorded(row: Row, folder: Path) -> Diagnosis:
    """Record a run, which computes the same bits as without a record, and diagnose it."""
    plain = row.loop()
    plain.run()
    loop = row.loop()
    limit = loop.settings.clip or None
    optimizers = [*loop.others, loop.optimizer]
    with ng.RunRecorder(
        folder, loop.model, optimizers, max_grad_norm=limit, fingerprints_every=0
    ) as recorder:

        def after_step(loss: Tensor) -> None:
            scale = {} if loop.scaler is None else {"loss_scale": loop.scaler.get_scale()}
            recorder.step(loss, **scale)

        loop.after_step = after_step
        loop.run()
    for mine, its in zip(loop.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine.nan_to_num(), its.nan_to_num())
    diagnosis = ng.diagnose(folder)
    assert isinstance(diagnosis, Diagnosis)
    return diagnosis


COLUMNS = {"check": checked, "run": recorded}
