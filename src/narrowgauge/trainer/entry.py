"""Where a run begins or goes on: settings come from the newest good checkpoint, and those that are
named replace them. ``run.toml`` is a log, and decides nothing.

Nothing here needs PyTorch, so what is wrong is refused at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import read_bytes
from narrowgauge.runs.places import require_free
from narrowgauge.trainer import checkpoints
from narrowgauge.trainer.settings import FIXED, Settings
from narrowgauge.trainer.tokens import open_tokens


@dataclass(frozen=True)
class Entry:
    """A run that may begin or go on: its checked settings, and its newest good checkpoint.

    ``step`` is the checkpoint's. ``events`` are pairs of a kind and a sentence: what differs from
    what was asked for.
    """

    settings: Settings
    checkpoint: Path | None = None
    step: int = 0
    events: tuple[tuple[str, str], ...] = ()

    @property
    def is_finished(self) -> bool:
        has_summary = (self.settings.folder / "summary.json").is_file()
        return self.step >= self.settings.steps and has_summary


def enter(named: Mapping[str, Any], num_ranks: int = 1) -> Entry:
    """Return the run that settings ask for. Nothing is written.

    Args:
        named: the settings that were named; others are those of the run in ``out``, or defaults.
    Raises:
        NarrowgaugeError: an invalid setting, a folder with something else, or a run that has no
            good checkpoint left or cannot change a setting.
    """
    settings = Settings.from_dict(named)
    folder = settings.folder
    if not checkpoints.folders(folder):
        settings = settings.checked(num_ranks)
        begun = read_bytes(folder / "run.toml")
        if begun is None or b"\n[recorder]" in begun:  # of another program
            require_free(folder)
            return Entry(settings)
        words = "no checkpoint was saved yet, so the run begins again"
        return Entry(settings, events=(("note", words),))
    checkpoint, damaged = checkpoints.require(folder)
    notes = checkpoints.notes_of(checkpoint)
    table = {**notes["settings"], **named, "out": str(folder)}
    settings = Settings.from_dict(table, str(checkpoint)).checked(num_ranks)
    changes = changed_settings(Settings.from_dict(notes["settings"]), settings)
    is_done = notes["step"] >= settings.steps
    fixed = [words for name, words in changes.items() if is_done or name in FIXED]
    if open_tokens(settings.data).fingerprint != notes["tokens"]:
        fixed.append(f"the tokens in {settings.data} are not those that it started with")
    if fixed:
        raise RecordError(
            f"Cannot go on with {folder} after step {notes['step']} because {fixed[0]}.",
            "Leave the setting as it was, or start another run with another --out.",
        )
    events = []
    for name in damaged:
        events.append(("damaged-checkpoint", f"{name} does not match its checksums"))
    for words in changes.values():
        events.append(("changed-settings", f"{words} at step {notes['step']}"))
    return Entry(settings, checkpoint, notes["step"], tuple(events))


def changed_settings(before: Settings, settings: Settings) -> dict[str, str]:
    """Return the settings that differ from those before, each with both values.

    Example:
        >>> changed_settings(Settings(lr=0.003), Settings(lr=0.007))
        {'lr': 'lr was 0.003 and is 0.007'}
    """
    changes = {}
    for name, new in vars(settings).items():
        old = getattr(before, name)
        if name not in ("out", "data", "stop_after", "report_to") and new != old:
            changes[name] = f"{name} was {old} and is {new}"
    return changes
