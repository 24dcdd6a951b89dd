"""Silent faults of public training code. Each edits the text of ``loop.py``; ``faults.toml`` says what each is, and where.

One process runs the loop: a fault of ranks is done to micro-batches.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from corpus import loop
from corpus.loop import Loop, Settings
from narrowgauge.spec.toml import load_toml

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Fault:
    """One fault, and where a tool should locate it."""

    name: str
    stage: str
    where: str
    edits: list[dict[str, str]]
    options: str = ""

    @property
    def settings(self) -> Settings:
        return self._settings(loop)

    def loop(self, steps: int) -> Loop:
        """Return a loop with the fault, of a module of its own."""
        text = (FOLDER / "loop.py").read_text(encoding="utf-8")
        for edit in self.edits:
            text = edited(text, **edit)
        sys.modules[f"corpus.{self.name}"] = module = ModuleType(f"corpus.{self.name}")
        exec(compile(text, f"loop.py with {self.name}", "exec"), vars(module))
        faulty: Loop = module.Loop(self._settings(module), steps)
        return faulty

    def _settings(self, module: ModuleType) -> Any:
        return eval(f"Settings({self.options})", vars(module))


def edited(text: str, old: str = "", new: str = "", before: str = "", after: str = "", add: str = "") -> str:
    """Replace ``old`` by ``new``, or add lines before or after a line. The text has the old part once."""
    old = old or before or after
    assert text.count(old) == 1, f"loop.py has {text.count(old)} times: {old}"
    if not add:
        return text.replace(old, new)
    start = text.rindex("\n", 0, text.index(old)) + 1
    place = start if before else text.index("\n", text.index(old)) + 1
    return f"{text[:place]}{add}\n{text[place:]}"


ROWS = load_toml((FOLDER / "faults.toml").read_text(encoding="utf-8"))
FAULTS = [Fault(name, row["stage"], row["where"], row["edits"], row.get("settings", "")) for name, row in ROWS.items()]
