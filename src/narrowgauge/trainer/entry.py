"""Where a run begins or continues: settings come from the newest good checkpoint, and those that are
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
    """A run that may begin or continue: its checked settings, and its newest good checkpoint.

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
    settings = Settings(**named)
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
    step = notes["step"]
    before = Settings(**notes["settings"])
    settings = Settings(**{**notes["settings"], **named, "out": str(folder)})
    settings = settings.checked(num_ranks)
    events = [("damaged-checkpoint", f"{name} does not match its checksums") for name in damaged]
    fixed = []
    for name, new in vars(settings).items():
        old = getattr(before, name)
        if name not in ("out", "data", "stop_after") and new != old:
            words = f"{name} was {old} and is {new}"
            events.append(("changed-settings", f"{words} at step {step}"))
            if step >= settings.steps or name in FIXED:
                fixed.append(words)
    if open_tokens(settings.data).fingerprint != notes["tokens"]:
        fixed.append(f"the tokens in {settings.data} are not those that it started with")
    if fixed:
        raise RecordError(
            f"Cannot continue {folder} after step {step} because {fixed[0]}.",
            "Leave the setting as it was, or start another run with another --out.",
        )
    return Entry(settings, checkpoint, step, tuple(events))
