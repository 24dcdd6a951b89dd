"""The rows of the corpus: ``faults.toml`` and ``healthy.toml``. Each is the text of ``loop.py`` with edits, and settings.

One process runs the loop: a fault of ranks is done to micro-batches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import narrowgauge as ng
from corpus import loop
from corpus.loop import Loop, Settings
from narrowgauge.spec.toml import load_toml

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    """A fault, and where a tool should locate it; or a healthy loop, without a stage."""

    name: str
    options: str = ""
    edits: tuple[tuple[str, str], ...] = ()
    stage: str = ""
    where: str = ""
    fault: str = ""

    @property
    def settings(self) -> Settings:
        """Return the settings of a loop without edits."""
        return self._settings(loop)

    def loop(self, steps: int) -> Loop:
        """Return the edited loop, of a module of its own."""
        text = (FOLDER / "loop.py").read_text(encoding="utf-8")
        for old, new in self.edits:
            text = edited(text, old, new)
        sys.modules[f"corpus.{self.name}"] = module = ModuleType(f"corpus.{self.name}")
        exec(compile(text, f"loop.py, {self.name}", "exec"), vars(module))
        own_loop: Loop = module.Loop(self._settings(module), steps)
        return own_loop

    def _settings(self, module: ModuleType) -> Any:
        return eval(f"Settings({self.options})", {**vars(module), "ng": ng})


def edited(text: str, old: str, new: str) -> str:
    """Replace ``old``, which the text has once, by ``new``. Further lines are indented like the first."""
    assert text.count(old) == 1, f"loop.py has {text.count(old)} times: {old}"
    line = text[text.rindex("\n", 0, text.index(old)) + 1 :]
    indent = line[: len(line) - len(line.lstrip())]
    return text.replace(old, new.replace("\n", f"\n{indent}"))


def rows(stage: str, tables: dict[str, Any]) -> Iterator[Row]:
    """Yield the rows of a stage. A table without edits may be its settings alone."""
    for name, table in tables.items():
        row = {"settings": table} if isinstance(table, str) else table
        settings = row.get("settings", "")
        edits = tuple((old, new) for old, new in row.get("edits", ()))
        for number, options in enumerate([settings] if isinstance(settings, str) else settings):
            numbered = f"{name} {number + 1}" if number else name
            where, fault = row.get("where", ""), row.get("fault", "")
            yield Row(numbered, options, edits, stage, where, fault)


def load(name: str) -> dict[str, Any]:
    return load_toml((FOLDER / name).read_text(encoding="utf-8"))


FAULTS = [row for stage, tables in load("faults.toml").items() for row in rows(stage, tables)]
HEALTHY = [*rows("", load("healthy.toml"))]
