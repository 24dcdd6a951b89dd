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
from corpus import loop
from corpus.loop import Loop, Settings
from narrowgauge.spec.toml import load_toml

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    """A fault, and where a tool should locate it; or a healthy loop, without a stage."""

    name: str
    options: str
    edits: tuple[dict[str, str], ...]
    stage: str = ""
    where: str = ""

    @property
    def settings(self) -> Settings:
        """Return the settings of a loop without edits."""
        return self._settings(loop)

    def loop(self, steps: int) -> Loop:
        """Return the edited loop, of a module of its own."""
        text = (FOLDER / "loop.py").read_text(encoding="utf-8")
        for edit in self.edits:
            text = edited(text, **edit)
        sys.modules[f"corpus.{self.name}"] = module = ModuleType(f"corpus.{self.name}")
        exec(compile(text, f"loop.py, {self.name}", "exec"), vars(module))
        own_loop: Loop = module.Loop(self._settings(module), steps)
        return own_loop

    def _settings(self, module: ModuleType) -> Any:
        return eval(f"Settings({self.options})", {**vars(module), "ng": ng})


def edited(text: str, old: str = "", new: str = "", before: str = "", after: str = "", add: str = "") -> str:
    """Replace ``old`` by ``new``, or add lines before or after a line. The text has the old part once."""
    old = old or before or after
    assert text.count(old) == 1, f"loop.py has {text.count(old)} times: {old}"
    if not add:
        return text.replace(old, new)
    start = text.rindex("\n", 0, text.index(old)) + 1
    place = start if before else text.index("\n", text.index(old)) + 1
    return f"{text[:place]}{add}\n{text[place:]}"


def read(name: str) -> list[Row]:
    rows = load_toml((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    return [
        Row(key, row.get("settings", ""), tuple(row.get("edits", ())), row.get("stage", ""), row.get("where", ""))
        for key, row in rows.items()
    ]


FAULTS, HEALTHY = read("faults"), read("healthy")
