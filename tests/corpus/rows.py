"""The rows of the corpus: ``faults.toml`` and ``healthy.toml``. Each is the text of ``loop.py`` with edits, and settings.

One process runs the loop: a fault of ranks is done to micro-batches.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import narrowgauge as ng
from corpus.loop import Loop
from narrowgauge.spec.toml import load_toml

FOLDER = Path(__file__).parent
TEXT = (FOLDER / "loop.py").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Row:
    """A fault, and where a tool should locate it; or a healthy loop, without a stage."""

    name: str
    settings: str = ""
    edits: tuple[tuple[str, str], ...] = ()
    stage: str = ""
    where: str = ""
    fault: str = ""

    def loop(self, steps: int, *, is_edited: bool = True) -> Loop:
        """Return the loop, of a module of its own; without its edits it is the healthy twin."""
        text = TEXT
        for old, new in self.edits if is_edited else ():
            text = edited(text, old, new)
        sys.modules[f"corpus.{self.name}"] = module = ModuleType(f"corpus.{self.name}")
        exec(compile(text, f"loop.py, {self.name}", "exec"), vars(module))
        settings = eval(f"Settings({self.settings})", {**vars(module), "ng": ng})
        own_loop: Loop = module.Loop(settings, steps)
        return own_loop


def edited(text: str, old: str, new: str) -> str:
    """Replace ``old``, which the text has once, by ``new``. Further lines are indented like the first."""
    assert text.count(old) == 1, f"loop.py has {text.count(old)} times: {old}"
    line = text[text.rindex("\n", 0, text.index(old)) + 1 :]
    indent = line[: len(line) - len(line.lstrip())]
    return text.replace(old, new.replace("\n", f"\n{indent}"))


def rows(stage: str, tables: dict[str, Any]) -> list[Row]:
    """Return the rows of a stage. A table without edits may be its settings alone."""
    result = []
    for name, table in tables.items():
        fields = {"settings": table} if isinstance(table, str) else table
        result.append(Row(name, stage=stage, **fields))
    return result


def load(name: str) -> dict[str, Any]:
    return load_toml((FOLDER / name).read_text(encoding="utf-8"))


HEALTHY = rows("", load("healthy.toml"))
FAULTS = [row for stage, tables in load("faults.toml").items() for row in rows(stage, tables)]
