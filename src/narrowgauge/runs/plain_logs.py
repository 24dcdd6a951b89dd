"""Logs that any program leaves: tables with a row per step, exports of Weights & Biases, lines of text.

A table names its columns, and a line of text its values, so that what each number is need not be guessed; what neither names
is not read. The steps are in the first of :data:`STEPS` that is there: in an export of Weights & Biases a metric of optimizer
steps, where the run logged one, before ``_step``, which counts calls of ``wandb.log``.

Source: the columns of ``run.history()`` and of the charts' CSV export, Weights & Biases' documentation, "Export data"; the lines
of nanoGPT, Megatron-LM, torchtitan, llm.c and OLMo's trainers.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

STEPS: tuple[str, ...] = (
    "train/global_step", "trainer/global_step", "global_step", "step", "iteration", "iter", "steps", "_step",
)  # fmt: skip
"""The names of a column of steps, the best first; capitals do not count."""

Value = tuple[str, int, float]
"""A name, a step, and the value that was logged."""

# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def values_of_csv(text: str) -> Iterator[Value]:
    """The numbers of a table with a line of names; ``ValueError`` where it has no steps or holds several runs."""
    dialect = "\t" if "\t" in text.partition("\n")[0] and "," not in text.partition("\n")[0] else ","
    table = csv.DictReader(io.StringIO(text, newline=""), delimiter=dialect, strict=True)
    try:
        yield from _values(list(table))
    except csv.Error as error:
        raise ValueError(f"line {table.line_num}: {error}") from error


def values_of_json(text: str) -> Iterator[Value]:
    """The numbers of a list of objects, or of lines with an object each."""
    stripped = text.lstrip()
    rows: Any = (
        json.loads(text)
        if stripped.startswith("[")
        else [json.loads(line) for line in text.splitlines() if line.strip()]
    )
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("it is no list of objects")
    yield from _values(rows)


def _values(rows: Iterable[Mapping[Any, Any]]) -> Iterator[Value]:
    rows = list(rows)
    names = list(dict.fromkeys(str(name) for row in rows for name in row if name is not None))
    step_name = _step_name(names)
    if step_name is None:
        raise ValueError(f"it has no column of steps ({', '.join(STEPS[2:])})")
    told = _without_run(name for name in names if name != step_name)
    for number, row in enumerate(rows, 2):
        step = _number(row.get(step_name))
        if step is None:
            continue  # a row of another kind: evaluations of a table that counts them apart
        if step != int(step):
            raise ValueError(f"line {number} has the step {row.get(step_name)}, which is not a whole number")
        for name, own in told.items():
            value = _number(row.get(name))
            if value is not None:
                yield own, int(step), value


def _step_name(names: Iterable[str]) -> str | None:
    known = {name.strip().lower(): name for name in names}
    return next((known[name] for name in STEPS if name in known), None)


def _without_run(names: Iterable[str]) -> dict[str, str]:
    """The metric of each column; an export of charts puts ``NAME OF THE RUN - `` before it, and adds its extremes.

    ``ValueError`` where two runs have one metric: which of them is meant is not known.
    """
    found: dict[str, str] = {}
    for name in names:
        if name.endswith(("__MIN", "__MAX")):
            continue
        own = name.rpartition(" - ")[2].strip()
        if own in found.values():
            runs = sorted(
                {each.rpartition(" - ")[0] for each in (*found, name) if each.rpartition(" - ")[2].strip() == own}
            )
            raise ValueError(f"it holds {len(runs)} runs ({', '.join(runs[:4])}), and one was asked about: export one")
        found[name] = own
    return found


def _number(value: Any) -> float | None:
    """A number, or the text of one; ``None`` of anything else: a table may hold times, names and media."""
    if isinstance(value, bool) or value is None or value == "":
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


# ── lines of text ────────────────────────────────────────────────────────────────────────────────────────────────────────

_IN_TEXT: dict[str, str] = {
    "train loss": "train_loss", "training loss": "train_loss", "train_loss": "train_loss", "train/loss": "train_loss",
    "lm loss": "train_loss", "loss": "train_loss", "train/crossentropyloss": "train_loss", "train/ce loss": "train_loss",
    "val loss": "val_loss", "val_loss": "val_loss", "val/loss": "val_loss", "valid loss": "val_loss", "valid_loss": "val_loss",
    "validation loss": "val_loss", "validation_loss": "val_loss", "eval loss": "val_loss", "eval_loss": "val_loss",
    "learning rate": "lr", "learning_rate": "lr", "lr": "lr", "optim/learning_rate_group0": "lr",
    "grad norm": "grad_norm", "grad_norm": "grad_norm", "gradient norm": "grad_norm", "gradient_norm": "grad_norm",
    "gnorm": "grad_norm", "norm": "grad_norm", "optim/total_grad_norm": "grad_norm", "total_grad_norm": "grad_norm",
    "loss scale": "loss_scale", "loss_scale": "loss_scale",
}  # fmt: skip
"""What lines of logs call our columns; capitals do not count."""

_NUMERAL = r"[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?|nan|inf(?:inity)?)(?![\w.])"
_NAMED = "|".join(sorted(map(re.escape, _IN_TEXT), key=len, reverse=True))
# A name after another word is another one's: "test loss", "aux loss".
_PAIR = re.compile(
    rf"(?<![a-z]\s)(?<![\w/])['\"]?({_NAMED})['\"]?\s*[:=]?\s*({_NUMERAL})",
    re.IGNORECASE,
)
_STEP = re.compile(r"(?<![\w/])(?:global_step|iteration|iter|step)['\"]?\s*[:=]?\s*(\d[\d,]*)(?![\w.])", re.IGNORECASE)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_OF_EVALUATIONS = re.compile(r"\b(?:val|valid|validation|eval|evaluation)\b", re.IGNORECASE)
_OF_TESTS = re.compile(r"\btest\b", re.IGNORECASE)


def values_of_text(text: str) -> Iterator[Value]:
    """The values that lines of text name, at the step that the line names, or the line above which it is indented under.

    ``ValueError`` where steps begin anew in each epoch, so that no step is one.
    """
    step: int | None = None
    restarts = 0
    for raw in text.splitlines():
        line = _COLOURS.sub("", raw)
        named = _STEP.search(line)
        if named is not None:
            now = int(named[1].replace(",", ""))
            if step is not None and now < step and re.search(r"\bepoch\b", line, re.IGNORECASE):
                restarts += 1
            step = now
        elif not line[:1].isspace():
            continue
        if step is None or _OF_TESTS.search(line):
            continue
        if restarts > 1:
            raise ValueError(
                "its steps begin anew in each epoch, so that a step has several rows: log one count of all steps"
            )
        is_evaluation = bool(_OF_EVALUATIONS.search(line)) and not re.search(r"\btrain", line, re.IGNORECASE)
        for pair in _PAIR.finditer(line):
            name = _IN_TEXT[pair[1].lower()]
            yield "val_loss" if name == "train_loss" and is_evaluation else name, step, float(pair[2])
