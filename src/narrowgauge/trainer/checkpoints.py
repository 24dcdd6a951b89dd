"""Checkpoints of a run: a folder per step, written by ``torch.distributed.checkpoint``, complete or
absent.

::

    checkpoints/step-00000040/
        __0_0.distcp …, .metadata    weights and states, by rank
        notes.json                   step, settings and loss scale
        manifest.json                the BLAKE2b of each other file

A checkpoint is written under another name, synced, and renamed. Only then are older ones removed.
One that does not match its manifest is skipped. To find one needs no PyTorch.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import TEMPORARY, digest, disk_error, sync
from narrowgauge.spec.tables import Row

if TYPE_CHECKING:
    from narrowgauge.optim.optimizer import Optimizer

_MANIFEST = "manifest.json"


def folders(run: Path) -> list[Path]:
    """Return the checkpoints of a run, the newest first. They may be damaged."""
    return sorted((run / "checkpoints").glob("step-*"), reverse=True)


def require(run: Path) -> tuple[Path, list[str]]:
    """Return the newest checkpoint of a run that matches its manifest, and the names of the damaged
    ones after it.

    Raises:
        RecordError: it has none.
    """
    damaged: list[str] = []
    for folder in folders(run):
        with contextlib.suppress(OSError, ValueError):  # a manifest that cannot be read
            if json.loads((folder / _MANIFEST).read_bytes()) == _digests(folder):
                return folder, damaged
        damaged.append(folder.name)
    reason = "it has no checkpoint"
    if damaged:
        reason = f"its checkpoints are damaged: {', '.join(damaged)}"
    raise RecordError(
        f"Cannot load {run}: {reason}.",
        "Restore one, or name another run.",
    )


def notes_of(folder: Path) -> Row:
    """Read the notes of a good checkpoint."""
    return json.loads((folder / "notes.json").read_bytes())


def _digests(folder: Path) -> dict[str, str]:
    return {file.name: digest(file) for file in folder.iterdir() if file.name != _MANIFEST}


def _states_of(model: Any, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state_dicts of a model and its optimizer, as DCP saves and loads them."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, states = get_state_dict(model, optimizer)
    return {"model_state_dict": weights, "optim_state_dict": states}


def save(run: Path, model: Any, optimizer: Optimizer, notes: Row, keep: int = 2) -> None:
    """Write a checkpoint of the step in ``notes``, and keep the newest ``keep``. All ranks call it.

    Raises:
        RecordError: on all ranks; the disk is full, or cannot be written. Earlier ones are whole.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save as save_states

    from narrowgauge.distributed.ranks import all_ranks

    ranks = all_ranks()
    place = run / "checkpoints"
    new = place / f"{TEMPORARY}step"
    final = place / f"step-{notes['step']:08d}"

    def clean() -> None:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)

    def publish() -> None:
        (new / "notes.json").write_text(json.dumps(notes, indent=1), encoding="utf-8")
        (new / _MANIFEST).write_text(json.dumps(_digests(new), indent=1), encoding="utf-8")
        for file in (*new.iterdir(), new):
            sync(file)
        # The run continued from an earlier checkpoint: this step's and later ones are damaged.
        for folder in folders(run):
            if folder >= final:
                number = len([*place.iterdir()])
                folder.rename(place / f"damaged-{number}-{folder.name}")
        new.rename(final)
        sync(place)
        for folder in folders(run)[keep:]:
            shutil.rmtree(folder)

    try:
        ranks.of_first(clean)
        save_states(_states_of(model, optimizer), checkpoint_id=new, no_dist=ranks.size == 1)
        ranks.of_first(publish)
    except (OSError, CheckpointException) as error:  # DCP gives the errors of all ranks
        failures = getattr(error, "failures", {0: (error, None)})
        raise disk_error(final, failures[min(failures)][0]) from error


def load(folder: Path, model: Any, optimizer: Optimizer) -> Row:
    """Load a good checkpoint, and return its notes. All ranks call it, however many wrote it."""
    from torch.distributed.checkpoint.state_dict import set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as load_states

    states = _states_of(model, optimizer)
    load_states(states, checkpoint_id=folder)
    set_state_dict(model, optimizer, **states)
    return notes_of(folder)
