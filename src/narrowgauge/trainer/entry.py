"""Where a run begins or goes on: settings come from the newest good checkpoint, and those that are
named replace them. ``run.toml`` is a log, and decides nothing.

Nothing here needs PyTorch, so what is wrong is refused at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import read_bytes
from narrowgauge.runs.places import require_free
from narrowgauge.trainer import checkpoints
from narrowgauge.trainer.settings import FIXED, Settings
from narrowgauge.trainer.tokens import open_tokens


class Entry(NamedTuple):
    """A run that may begin or go on: its checked settings, and its newest good checkpoint.

    ``step`` is the checkpoint's. ``events`` are pairs of a kind and a sentence: what differs from
    what was asked for.
    """

    settings: Settings
    checkpoint: Path | None = None
    step: int = 0
    events: tuple[tuple[str, str], ...] = ()

    @property
    def folder(self) -> Path:
        return self.settings.folder

    @property
    def is_finished(self) -> bool:
        return self.step >= self.settings.steps and (self.folder / "summary.json").is_file()


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
    if settings.out is None:
        return Entry(settings.checked(num_ranks))
    if not checkpoints.folders(folder):
        settings = settings.checked(num_ranks)
        begun = read_bytes(folder / "run.toml")
        if begun is None or b"\n[recorder]" in begun:  # of another program
            require_free(folder)
            return Entry(settings)
        words = "no checkpoint was saved yet, so the run begins again"
        return Entry(settings, events=(("note", words),))
    checkpoint = checkpoints.require_checkpoint(folder)
    notes = checkpoints.notes_of(checkpoint)
    before = notes["settings"]
    settings = Settings.from_dict({**before, **named}, str(checkpoint)).checked(num_ranks)
    changes = changed_settings(Settings.from_dict(before), settings)
    events = []
    for damaged in checkpoints.folders(folder):
        if damaged > checkpoint:
            words = f"{damaged.name} does not match its checksums and was not loaded"
            events.append(("damaged-checkpoint", words))
    for words in changes.values():
        events.append(("changed-settings", f"{words} at step {notes['step']}"))
    entry = Entry(settings, checkpoint, notes["step"], tuple(events))
    _require_same_run(entry, changes, notes["tokens"])
    return entry


def changed_settings(before: Settings, settings: Settings) -> dict[str, str]:
    """Return the settings that differ from those before, each with both values.

    Example:
        >>> changed_settings(Settings(lr=0.003), Settings(lr=0.007))
        {'lr': 'lr was 0.003 and is 0.007'}
    """
    changes = {}
    for name, new in settings.to_dict().items():
        old = getattr(before, name)
        if name not in ("out", "data", "stop_after", "report_to") and new != old:
            changes[name] = f"{name} was {old} and is {new}"
    return changes


def _require_same_run(entry: Entry, changes: Mapping[str, str], fingerprint: str) -> None:
    """Refuse to go on with settings that decide a run's numbers from its start, or too early an end."""
    settings = entry.settings
    problem = ""
    fixed = [changes[name] for name in FIXED if name in changes]
    if fixed:
        problem = f"its {fixed[0]}"
    elif settings.steps < entry.step:
        problem = f"it has done {entry.step} steps"
    elif entry.is_finished and changes:
        problem = f"it is finished, and {'; '.join(changes)} would change"
    elif open_tokens(settings.data).fingerprint != fingerprint:
        problem = f"the tokens in {settings.data} are not those that it started with"
    if problem:
        raise RecordError(
            f"Cannot go on with {entry.folder} because {problem}.",
            "Leave the setting as it was, or start another run with another --out.",
        )
