"""Training with published 8-bit states: what ``quality.py`` does so that they stand in its table beside ours.

A run with ``bfloat16/master`` is trained; after every step of its optimizer each matrix is cut, weight and both moments, to
what a row of ``tests/oracles/published_states.py`` keeps of it. The next step then begins with just the values that the
published optimizer would decode. Vectors keep ``master``, as those of ours do. Resuming needs nothing: what was cut is what is
saved. The audit in such a run's record is of the step before the cut, so it says nothing of the row.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

import narrowgauge as ng

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from oracles.published_states import PUBLISHED, PublishedStates

PREFIX = "published/"
NAMES = tuple(f"{PREFIX}{name}" for name in PUBLISHED)
"""What ``--storages`` takes besides our storages."""
_BYTES = "published.json"


def published(storage: str) -> PublishedStates | None:
    """The row of that name; ``None`` for a storage of ours."""
    return PUBLISHED[storage.removeprefix(PREFIX)] if storage.startswith(PREFIX) else None


def cut(row: PublishedStates, optimizer: ng.AdamW) -> None:
    """Replace the matrices of an optimizer with storage ``master``, and their moments, by what a row keeps of them."""
    matrices = [p for group in optimizer.param_groups for p in group["params"] if p.ndim > 1 and optimizer.num_steps(p)]
    weights = {p: row.weight.there_and_back(optimizer.stored(p)) for p in matrices}
    moments: dict[Tensor, dict[str, Tensor]] = {}
    for p in matrices:
        first, second = row.codes(p.numel())
        moments[p] = {
            "exp_avg": first.there_and_back(optimizer.stored(p, "exp_avg")),
            "exp_avg_sq": second.there_and_back(optimizer.stored(p, "exp_avg_sq")),
        }
    optimizer.adopt(weights, moments)


def bytes_per_param(row: PublishedStates, optimizer: ng.AdamW) -> float:
    """Bytes per parameter of a model: of a matrix by the row, of a vector by ``master``."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    total = sum(p.numel() * (row.bytes_per_param(*p.shape) if p.ndim > 1 else 16.0) for p in parameters)
    return total / sum(p.numel() for p in parameters)


@contextlib.contextmanager
def keeping(storage: str, folder: Path) -> Iterator[None]:
    """While it is entered, what is stepped is kept as a published row says; nothing is done for a storage of ours."""
    row = published(storage)
    if row is None:
        yield
        return

    @torch.no_grad()
    def after_step(optimizer: Any, *_: Any) -> None:
        cut(row, optimizer)
        if not (folder / _BYTES).exists():
            (folder / _BYTES).write_text(json.dumps({"bytes_per_param": bytes_per_param(row, optimizer)}))

    handle = register_optimizer_step_post_hook(after_step)
    try:
        yield
    finally:
        handle.remove()


def of_folder(folder: Path) -> tuple[str, dict[str, Any]] | None:
    """The name of the row that a run was trained with, and what replaces figures of its summary; ``None`` for ours."""
    named = PREFIX.replace("/", "-")
    row = next((name for name in PUBLISHED if folder.name.startswith(f"{named}{name}-beta")), None)
    if row is None:
        return None
    return f"{PREFIX}{row}", {**json.loads((folder / _BYTES).read_text()), "edq": None, "noise": None}
