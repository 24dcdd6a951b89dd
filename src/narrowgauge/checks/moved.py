"""Compare the weights of two checkpoints or models, one tensor at a time.

No code of a model runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, Readings
from narrowgauge.checks.set_up import inner_name
from narrowgauge.errors import RecordError
from narrowgauge.numerics.dtensor import whole
from narrowgauge.runs.finding import counted
from narrowgauge.spec.tables import Row, Table, name_columns, number_columns, text_columns

Weights = str | Path | nn.Module | Mapping[str, Any]
_CHUNK = 1 << 17  # values compared at once: they stay in the cache


class Moved(Readings):
    """Hold the differences of two sets of weights; ``print`` shows a table by kind of tensor.

    Attributes:
        rows: a dict for each tensor of both: ``name``, ``group``, ``dtype``, ``shape``, ``values``,
            ``differ`` and ``nonfinite`` (values), ``change`` (‖after − before‖ / ‖before‖),
            ``constant`` (its only value, or ``None``).
        ok: something moved, all values are finite, no vector is exactly 1, and both have the same
            tensors.
    """

    def __init__(self, rows: list[Row], readings: list[Reading]) -> None:
        self.rows, total, differ = (
            rows,
            *(sum(row[key] for row in rows) for key in ("values", "differ")),
        )
        line = f"{differ / max(1, total):.2%} of {counted(total, 'value')} in {counted(len(rows), 'tensor')} differ"
        super().__init__(readings, [line, *(self.table().plain().splitlines() if rows else ())])

    def table(self) -> Table:
        """Return a table with a row for each kind of tensor: the part of its name that layers
        share.
        """
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(row["group"], []).append(row)
        columns = (
            *name_columns(weights=lambda rows: rows[0]["group"]),
            *number_columns(
                tensors=len,
                values=lambda rows: sum(row["values"] for row in rows),
                differ=lambda rows: f"{sum(r['differ'] for r in rows) / max(1, sum(r['values'] for r in rows)):.2%}",
                equal=lambda rows: sum(not row["differ"] for row in rows),
                all_1=lambda rows: sum(row["constant"] == 1 for row in rows),
                all_0=lambda rows: sum(row["constant"] == 0 for row in rows),
                nonfinite=lambda rows: sum(row["nonfinite"] for row in rows),
                change_up_to=lambda rows: f"{max(row['change'] for row in rows):.2g}",
            ),
            *text_columns(dtype=lambda rows: list(dict.fromkeys(row["dtype"] for row in rows))),
        )
        return Table(columns, list(groups.values()))

    def to_dict(self) -> dict[str, Any]:
        """Return the readings and the rows as values for JSON."""
        return super().to_dict() | {"rows": self.rows}


def moved(before: Weights, after: Weights) -> Moved:
    """Compare the weights of two checkpoints or models, tensor by tensor.

    Args:
        before: a module, a ``state_dict`` (clone its tensors before training), a ``.safetensors``
            file, or a folder of them.
        after: the same, later. In another dtype, values of ``before`` are rounded to it first.
    Returns:
        A row for each tensor, and readings: nothing moved, equal tensors, vectors that are exactly
            1, values that are not
        finite, other shapes, tensors that one of both lacks.
    Raises:
        RecordError: a path holds no safetensors file, a damaged one, or tensors in parts: export
            such a checkpoint first.

    Cost: 7 ns a value on one CPU thread, and the largest tensor in memory twice.

    Example:
        >>> before = {"norm.weight": torch.ones(2), "proj.weight": torch.zeros(2, 2)}
        >>> print(moved(before, {**before, "proj.weight": torch.eye(2)}).lines[0])
        33.33% of 6 values in 2 tensors differ
    """
    first = tensors_of(before)
    second = tensors_of(after)
    rows = list[Row]()
    other = list[str]()
    for name in (name for name in second if name in first):
        a = first[name]()
        b = second[name]()
        rows.append(_compared(name, a, b)) if a.shape == b.shape else other.append(name)
    lacking = [
        [name for name in one if name not in two] for one, two in ((first, second), (second, first))
    ]
    equal = [row["name"] for row in rows if not row["differ"]]
    has_moved = len(equal) < len(rows)
    sides = f"{len(lacking[0])} only before, {len(lacking[1])} only after"
    names_of = {
        "nothing-moved": [] if has_moved else equal,
        "equal-tensors": equal if has_moved else [],
        "exactly-one": [
            r["name"] for r in rows if has_moved and r["constant"] == 1 and len(r["shape"]) == 1
        ],
        "nonfinite-values": [row["name"] for row in rows if row["nonfinite"]],
        "other-shapes": other,
        "other-tensors": lacking[0] + lacking[1],
    }
    return Moved(
        rows,
        [r for kind, names in names_of.items() for r in KINDS[kind].of(names, sides=sides)],
    )


def _compared(name: str, a: Tensor, b: Tensor) -> Row:
    differ = 0
    nonfinite = 0
    distance = 0.0
    length = 0.0
    constant = float(b.flatten()[0]) if b.numel() else None
    for x, y in zip(a.flatten().split(_CHUNK), b.flatten().split(_CHUNK), strict=True):
        x, y = x.to(b.device, b.dtype).double(), y.double()  # which compares values of every format
        differ += int(torch.count_nonzero(x != y))
        if bad := int(torch.count_nonzero(~y.isfinite())):
            nonfinite = nonfinite + bad
            differ = differ - int(torch.count_nonzero(x.isnan() & y.isnan()))
        distance += float(torch.linalg.vector_norm(y - x)) ** 2
        length += float(torch.linalg.vector_norm(x)) ** 2
        constant = None if constant is None or bool((y != constant).any()) else constant
    parts = [
        part
        for part in name.split(".")
        if part not in ("weight", "bias", "default") and not part.isdigit()
    ]
    return {
        "name": name,
        "group": (parts[-1] if parts else name) + ".bias" * (bool(parts) and name.endswith(".bias")),
        "dtype": " → ".join(dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in (a, b))),
        "change": (distance / length) ** 0.5 if length else float("inf") if distance else 0.0,
        "shape": [*b.shape], "values": b.numel(), "differ": differ, "constant": constant, "nonfinite": nonfinite,
    }  # fmt: skip


def tensors_of(weights: Weights) -> dict[str, Callable[[], Tensor]]:
    """Return a function for each name that reads its tensor."""
    if isinstance(weights, nn.Module):  # a tied tensor once, as in files
        firsts = {*dict(weights.named_parameters()), *dict(weights.named_buffers())}
        weights = {name: value for name, value in weights.state_dict().items() if name in firsts}
    if isinstance(weights, Mapping):
        tensors = {
            inner_name(name): value for name, value in weights.items() if isinstance(value, Tensor)
        }
        return {name: partial(whole, t.detach()) for name, t in tensors.items()}
    path = Path(weights)
    functions = dict[str, Callable[[], Tensor]]()
    try:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        for index in path.glob("*.safetensors.index.json"):
            files = sorted(
                {path / name for name in json.loads(index.read_bytes())["weight_map"].values()}
            )
        for opened in (safe_open(file, "pt") for file in files):
            names = {inner_name(name): name for name in opened.keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118
            if names.keys() & functions.keys():
                raise ValueError("two of its files hold parts of one tensor")
            functions |= {key: partial(opened.get_tensor, name) for key, name in names.items()}
        if not functions:
            raise ValueError("it holds no safetensors file")
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise RecordError(
            f"Cannot read weights from {path}: {error}.", "Name another file or folder."
        ) from error
    return functions
