"""The schema of a run's record: every column of every file in a run folder, defined once.

Six tables describe the files of a run: :data:`STEP` (``steps.jsonl``), :data:`EVAL` (``evals.jsonl``), :data:`GAUGE`
(``gauges.jsonl``), :data:`FINGERPRINT` (``fingerprints.jsonl``), :data:`EVENT` (``events.jsonl``) and :data:`SUMMARY`
(``summary.json``). The writer and the reader check rows against these tables. The console and TensorBoard take their formats
and tags from them. The documentation prints them. Rows may hold further columns, which are not checked.

A row of ``gauges.jsonl`` names each tensor once, as ``KIND:NAME``. It lists the metrics in the order of :data:`METRICS`.
A thousand tensors times a thousand samples would otherwise be mostly keys::
    {"step": 20, "tensors": {"input:model.layers.0.mlp.down_proj": [4.2, 0.9, 0, ...]}, "updates": {...}, ...}

A metric that does not apply is null. An empty table is left out. Histograms count binary exponents, pooled over all tensors
of a kind. The counts are integers, so a reader may add them in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

Row = dict[str, Any]
"""One row of a record: column to value."""

VERSION = 2
"""The version of the run folder. Other versions are refused."""

Type = Literal["step", "count", "number", "flag", "text", "recipe", "object", "lists", "numbers"]
"""``step``: the whole number that orders rows. ``recipe``: a name, or a table. ``lists``: name to a list of numbers.
``numbers``: name to a number. Every value but a step may be null."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a record.

    Args:
        unit: of a number; empty for a ratio or a name.
        checked: readers compute with it, so a value of another type is refused.
        tag: TensorBoard's name for it. Columns without a tag are not shown there.
        label: text on the console, with ``{}`` for the value; also the heading in the table of finished runs.
        show: formats the value for the console.
        metrics: the entries of each list of a ``lists`` column, in order, or the names of a ``numbers`` column.
    """

    name: str
    type: Type
    help: str
    unit: str = ""
    checked: bool = True
    tag: str = ""
    label: str = ""
    show: Callable[[Any], str] = str
    metrics: tuple[Column, ...] = ()

    def text(self, row: Row) -> str:
        """Return the label and the row's value as the console prints them."""
        return self.label.format(self.show(row[self.name]))

    def cell(self, row: Row) -> str:
        """Return the row's value in a table; a dash where it has none."""
        return "–" if row.get(self.name) is None else self.show(row[self.name])


def lost_share(edq: float) -> str:
    """Return the fraction of updates lost on average, by an EDQ. Stochastic storages may exceed 1: nothing was lost.

    Example:
        >>> lost_share(0.25), lost_share(1.01)
        ('75.0%', '0.0%')
    """
    return f"{max(0.0, 1 - edq):.1%}"


def _table(columns: Iterable[Column]) -> dict[str, Column]:
    return {column.name: column for column in columns}


# ── what gauges measure ─────────────────────────────────────────────────────────────────────────────────────────────────

TENSOR_KINDS: dict[str, str] = {
    "input": "what enters a linear layer: the left operand of output",
    "output_grad": "the gradient of a linear layer's output: the left operand of grad_input",
    "weight": "the weights as the model sees them",
    "grad": "the gradients of the parameters",
    "exp_avg": "first moments",
    "exp_avg_sq": "second moments",
}
"""Every kind of tensor that gauges watch, and its meaning."""

FIRST_EXPONENT = -64
NUM_EXPONENTS = 112
"""Bin ``k`` of a histogram counts magnitudes from ``2**(FIRST_EXPONENT + k)`` to just below twice that. Smaller magnitudes are
in the first bin, larger ones in the last. Zeros and non-finite values are not counted."""

# Underflow, overflow and SQNR describe the cast before the tensor's matmul. Null without a cast.
_TENSOR = (
    Column("amax", "number", "largest magnitude"),
    Column("rms", "number", "root mean square"),
    Column("nonfinite", "number", "number of NaN and infinite values"),
    Column("underflow", "number", "share of the nonzero values that the cast rounds to zero"),
    Column("overflow", "number", "share of the values beyond the largest value of the cast's format"),
    Column("sqnr_db", "number", "signal-to-quantization-noise ratio of the cast", "dB"),
    Column("outlier", "number", "largest magnitude over the rms, of the sampled rows"),
    Column(
        "kurtosis", "number", "fourth moment over the squared second, of the sampled rows; 3 for a normal distribution"
    ),
    Column("top_feature", "number", "largest rms of one feature (column) over that of all, of the sampled rows"),
    Column("top_to_rest", "number", "energy of that feature over the energy of all others together"),
)
_UPDATE = (
    Column(
        "edq", "number", "effective descent quality over the audit's window: the share of the update that the storage took",
        tag="edq/{}",
    ),
    Column("noise", "number", "rounding noise relative to the intended update, over the audit's window"),
    Column("lost_fraction", "number", "share of intended changes that left the stored value as it was"),
    Column("unseen_fraction", "number", "share of intended changes that left the visible weight as it was"),
    Column("update_to_weight", "number", "rms of the visible weight's change over its rms, of the sampled rows"),
    Column("update_to_ulp", "number", "median of the visible weight's change over its spacing, of the sampled rows"),
    Column("imprecision_share", "number", "share of all elements whose visible weight did not change, over the audit's window"),
    Column("lost_decay", "number", "share of the intended weight decay that the storage did not take, over the audit's window"),
)  # fmt: skip
_MOMENT = (
    Column("bias", "number", "sum of the stored second moments of the sampled row over that of an exact float32 shadow"),
    Column("frozen_fraction", "number", "share of them that did not move since the last sample although the shadow did"),
)  # fmt: skip
_ATTENTION = (
    Column("max_logit", "number", "largest attention logit of the sampled queries"),
    Column("entropy", "number", "mean entropy of their attention weights, over that of uniform ones"),
)
_LOGITS = (
    Column("max", "number", "largest magnitude of the sampled logits"),
    Column("log_z", "number", "mean logarithm of their partition function"),
)

# ── one table per file ──────────────────────────────────────────────────────────────────────────────────────────────────

_STEP = Column("step", "step", "optimizer steps done")
_TOKENS = Column("tokens", "number", "tokens trained on so far", "tokens")
_MEMORY = Column(
    "peak_memory_bytes", "number", "most memory in use so far: of the device on CUDA, else of the process", "bytes"
)
_COUNTED = (
    Column(
        "activation_bytes", "number", "counted: tensors that a forward pass leaves for backward, activations and casts of "
        "weights; of a step's first micro-batch", "bytes",
    ),
    Column(
        "peak_tensor_bytes", "number", "counted: the most bytes of tensors at once in a step, of weights, states, gradients, "
        "activations and buffers", "bytes",
    ),
)  # fmt: skip


_share: Callable[[Any], str] = "{:.1%}".format
_AUDIT = (
    Column("edq", "number", "share of the intended update that was stored", label="update lost {}", show=lost_share),
    Column("noise", "number", "rounding noise relative to the intended update", show="{:.3f}".format),
    Column("lost_fraction", "number", "share of the intended changes that left the stored value as it was", show=_share),
    Column("unseen_fraction", "number", "share of the intended changes that left the visible weight as it was", show=_share),
    Column("imprecision_share", "number", "share of all elements whose visible weight did not change", show=_share),
    Column("lost_decay", "number", "share of the intended weight decay that was not stored", show=_share),
)  # fmt: skip
"""Metrics of the audit: in a step of an audited step, in a summary of the whole run."""

STEP = _table((
    _STEP,
    Column(
        "loss", "number", "mean training loss of the step", "nats per token",
        tag="train/loss", label="loss {}", show="{:.4f}".format,
    ),
    Column("lr", "number", "learning rate", tag="train/lr", label="lr {}", show="{:.2e}".format),
    Column("grad_norm", "number", "norm of all gradients before clipping, null where it was not computed", tag="train/grad_norm"),
    Column("embedding_grad_norm", "number", "of it, the norm of the embedding's gradient", tag="train/embedding_grad_norm"),
    _TOKENS,
    Column(
        "tokens_per_second", "number", "training throughput of the step", "tokens/s",
        tag="train/tokens_per_second", label="{} tokens/s", show="{:,.0f}".format,
    ),
    Column("seconds", "number", "duration of the step", "s"),
    Column("data_seconds", "number", "of it, how long the step waited for its tokens", "s"),
    Column("gradient_seconds", "number", "of it, forward and backward, communication included, without the wait for tokens", "s"),
    Column("update_seconds", "number", "of it, the optimizer's step", "s"),
    Column("batch_crc", "text", "checksum of the step's tokens, of all ranks together: equal for equal batches", checked=False),
    _MEMORY,
    *_COUNTED,
    Column("skipped", "flag", "the update was not applied"),
    Column("spike", "object", "why --on-spike left the step out: what, value, threshold, z", checked=False),
    Column("loss_scale", "number", "loss scale after the step", tag="train/loss_scale"),
    Column("saturated", "number", "values beyond a delayed scale, held at its end", "values", tag="train/saturated"),
    *(replace(column, tag=f"train/{column.name}") for column in _AUDIT),
    Column("audit_sums", "object", "in a loop of your own: the sums of which the audit's metrics are ratios", checked=False),
    Column(
        "recomputed", "object", "in a loop of your own, of a step that was compared with the optimizer's rule: how many tensors "
        "were ``compared``, how many readings are ``beyond`` their bound, and why others are ``unseen``", checked=False,
    ),
))  # fmt: skip
"""``steps.jsonl``: a row per optimizer step."""

EVAL = _table((
    _STEP,
    Column(
        "val_loss", "number", "mean validation loss", "nats per token",
        tag="validation/loss", label="validation loss {}", show="{:.4f}".format,
    ),
    _TOKENS,
    Column("seconds", "number", "training time so far", "s"),
    Column("evaluation_seconds", "number", "duration of the evaluation", "s"),
    Column("tokens_per_second", "number", "training throughput", "tokens/s"),
    _MEMORY,
))  # fmt: skip
"""``evals.jsonl``: a row per evaluation."""

EVENT = _table((
    Column("kind", "text", "a key of the table of event kinds"),
    Column("step", "step", "optimizer steps done when it happened; 0 is before the first", checked=False),
    Column("message", "text", "one sentence"),
    Column("tensor", "text", "the tensor or parameter it is about"),
    Column("rank", "count", "the process it is about, of a run on several ranks"),
    Column("value", "number", "what was measured, in the unit that the message names"),
    Column("threshold", "number", "what the value was compared with"),
    Column("expected", "number", "what the value should be; the threshold is then of their distance"),
    Column("stage", "text", "the stage of a step at which it was measured"),
    Column("advice", "text", "what to do"),
    Column("detector", "text", "the id of the detector or check that raised it"),
    Column("phase", "text", "of a first bad value: in which part of the step it was made"),
    Column("operation", "text", "of a first bad value: the operation that made it, by PyTorch's name"),
    Column("to_step", "number", "of a rollback: the step that the run went back to", "steps"),
    Column("batches", "number", "of a rollback: batches that are left out from then on", "batches"),
))  # fmt: skip
"""``events.jsonl``: a row per event."""

GAUGE = _table((
    _STEP,
    Column("tensors", "lists", "metrics of each watched tensor, by KIND:NAME", metrics=_TENSOR),
    Column("updates", "lists", "metrics of each parameter's update", metrics=_UPDATE),
    Column("moments", "lists", "metrics of each parameter's second moment", metrics=_MOMENT),
    Column("attention", "lists", "metrics of each attention module", metrics=_ATTENTION),
    Column("logits", "numbers", "metrics of the model's logits", tag="logits/{}", metrics=_LOGITS),
    Column("block_scales", "lists", "lowest, median and highest exponent of a tensor's block scales, by KIND:NAME"),
    Column("histograms", "lists", "histogram of binary exponents of each kind of tensor", "values", tag="exponents/{}"),
    Column("seconds", "number", "time that the sample took", "s", checked=False),
))  # fmt: skip
"""``gauges.jsonl``: a row per sampled step."""

_PRINT = (
    Column("fingerprint", "count", "64-bit hash of all bits and their places, alike for every way to shard the tensor"),
    Column("norm", "number", "square root of the sum of its squares"),
    Column("numel", "count", "number of its elements", "values"),
)

FINGERPRINT = _table((
    _STEP,
    Column(
        "tensors", "lists", "fingerprint, norm and size of each tensor of the step, in the order in which they come to be: "
        "``tokens:batch``, ``output:MODULE``, ``grad:PARAMETER``, ``clip:factor``, then the stored ``weight:``, ``exp_avg:`` and "
        "``exp_avg_sq:``; before them ``held:PARAMETER``, what changed since the last update",
        metrics=_PRINT,
    ),
    Column(
        "ranks", "lists", "on several ranks, one 64-bit hash a rank of its own part of each kind of tensor, of what it ``sent`` "
        "into the sum of the gradients, and the factor of its ``clip``",
    ),
    Column("parted", "lists", "tensors that ranks must hold alike and do not: the hash of each rank"),
))  # fmt: skip
"""``fingerprints.jsonl``: a row per hashed step."""

SUMMARY = _table((
    Column("schema_version", "count", "version of the run folder"),
    Column("recipe", "recipe", "the recipe's name, or its table where a name does not define it", checked=False, label="recipe"),
    Column("model", "text", "name or folder of the model", checked=False),
    Column("val_loss", "number", "last validation loss", "nats per token", label="val. loss", show="{:.4f}".format),
    Column("steps", "count", "optimizer steps done", "steps"),
    _TOKENS,
    Column(
        "bytes_per_param", "number", "weight, gradient and optimizer state", "bytes per parameter",
        label="bytes/param", show="{:.2f}".format,
    ),
    *(replace(column, label=column.label.removesuffix(" {}")) for column in _AUDIT),
    Column("tokens_per_second", "number", "median training throughput", "tokens/s", label="tokens/s", show="{:,.0f}".format),
    _MEMORY,
    Column("state_bytes", "number", "counted: weights, gradients, optimizer states and sums of micro-batches", "bytes"),
    *_COUNTED,
    Column("num_skipped", "count", "updates that were not applied", "steps"),
    Column("saturated", "number", "values beyond a delayed scale", "values"),
    Column("weights_fingerprint", "text", "hash of the final weights", checked=False),
    Column("seconds", "number", "training time", "s"),
    Column("wall_seconds", "number", "duration of the run", "s", label="seconds", show="{:.0f}".format),
))  # fmt: skip
"""``summary.json``: the metrics of a finished run."""

TABLES: dict[str, dict[str, Column]] = {
    "steps": STEP,
    "evals": EVAL,
    "events": EVENT,
    "gauges": GAUGE,
    "fingerprints": FINGERPRINT,
    "summary": SUMMARY,
}
"""The table of each file, by the file's stem."""


METRICS: dict[str, dict[str, Column]] = {
    column.name: _table(column.metrics) for column in GAUGE.values() if column.type == "lists" and column.metrics
}
"""The entries of the lists of each table of a ``gauges.jsonl`` row, in order."""


def metric_of(row: Row, table: str, name: str, metric: str) -> float | None:
    """Return one metric of a tensor, parameter or module in a row of ``gauges.jsonl``. Return ``None`` if it is missing.

    Example:
        >>> metric_of({"step": 1, "moments": {"w": [1.25, 0.0]}}, "moments", "w", "bias")
        1.25
    """
    values = row.get(table, {}).get(name)
    place = list(METRICS[table]).index(metric)
    return values[place] if values is not None and place < len(values) else None


# ── values of a row ─────────────────────────────────────────────────────────────────────────────────────────────────────


def number(value: Any) -> float | None:
    """Return a number as a float, NaN and infinities too; ``None`` for anything else."""
    return float(value) if isinstance(value, (int, float)) else None


def finite_number(value: Any) -> float | None:
    """Return a number as a float where it is a finite one.

    Example:
        >>> finite_number(True), finite_number(float("nan")), finite_number("fast")
        (1.0, None, None)
    """
    try:
        real = number(value)
    except OverflowError:  # a whole number beyond every float
        return None
    return real if real is not None and math.isfinite(real) else None


def step_of(row: Row) -> int:
    """Return the step of a row; 0 where it has none."""
    step = row.get("step")
    return int(step) if isinstance(step, (int, float)) else 0


# ── the check of a row ──────────────────────────────────────────────────────────────────────────────────────────────────

NOT_FINITE = frozenset({"nan", "inf", "-inf"})
"""How JSON, which has no such numbers, holds them."""
_NUMBER: frozenset[type] = frozenset({int, float, bool, type(None)})
_TYPES: dict[Type, frozenset[type]] = {
    **dict.fromkeys(("count", "number", "flag"), _NUMBER),
    "text": frozenset({str, type(None)}),
    "lists": frozenset(),  # its numbers are checked, too
    "numbers": frozenset(),
}
_CHECKED = {
    kind: {name: _TYPES[column.type] for name, column in table.items() if column.checked and column.type in _TYPES}
    for kind, table in TABLES.items()
}
"""The types of values that need no closer look, by table and column."""
_STEPWISE = frozenset(kind for kind, table in TABLES.items() if "step" in table and table["step"].checked)
TEXT = frozenset(name for name, types in _CHECKED["events"].items() if str in types)
"""Columns in which ``"nan"`` is text and not a number."""


def wrong_value(kind: str, row: Row) -> str:
    """Describe the first value in a row that does not have the type of its column. Empty if all have.

    Non-finite values may be given by name, as in the file.

    Cost: about 2 µs for a row of a step.

    Example:
        >>> wrong_value("evals", {"step": 3, "val_loss": "low"}), wrong_value("evals", {"step": 3, "val_loss": 2.5})
        ("val_loss = 'low', which is not a number", '')
    """
    checked = _CHECKED[kind]
    for name, value in row.items():
        types = checked.get(name)
        if types is not None and type(value) not in types and (reason := _why_wrong(TABLES[kind][name], value)):
            return reason
    step = row.get("step")
    if kind in _STEPWISE and not is_whole(step):
        return "no step" if step is None else f"step = {short(step)}, which is not a whole number"
    return ""


def _why_wrong(column: Column, value: Any) -> str:
    if column.type == "text":
        return f"{column.name} = {short(value)}, which is not text"
    if column.type not in ("lists", "numbers"):
        return "" if _is_number(value) else f"{column.name} = {short(value)}, which is not a number"
    if not isinstance(value, dict):
        return f"{column.name} = {short(value)}, which is not a table"
    for name, numbers in value.items() if column.type == "lists" else [(column.name, list(value.values()))]:
        if not isinstance(numbers, list | None):
            return f"{name} = {short(numbers)} in {column.name}, which is not a list"
        if numbers and not _NUMBER.issuperset(map(type, numbers)) and not all(map(_is_number, numbers)):
            return f"{name} = {short(numbers)} in {column.name}, which are not numbers"
    return ""


def _is_number(value: Any) -> bool:
    return type(value) in _NUMBER or (type(value) is str and value in NOT_FINITE)


def is_whole(value: Any) -> bool:
    """Return whether a value is a whole number, also as a float. ``True`` does not count."""
    return type(value) is int or (type(value) is float and value.is_integer())


def short(value: Any) -> str:
    """Format a value for a message, in at most forty characters."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def numbers_of(kind: str, row: Row) -> dict[str, float]:
    """Return the numbers of a row under their tags, as experiment trackers draw them.

    Args:
        kind: ``"steps"``, ``"evals"``, ``"gauges"`` or ``"events"``. The number of an event is its value, or 1.
        row: one row of that file.

    Example:
        >>> numbers_of("evals", {"step": 3, "val_loss": 2.5}), numbers_of("gauges", {"step": 1, "logits": {"max": 4.0}})
        ({'validation/loss': 2.5}, {'logits/max': 4.0})
    """
    numbers: dict[str, Any] = {}
    if kind == "events":
        numbers = {f"events/{row['kind']}": 1.0 if row.get("value") is None else row["value"]}
    elif kind == "gauges":
        for table, metrics in METRICS.items():
            for metric in (metric for metric in metrics.values() if metric.tag):
                for tensor in row.get(table, {}):
                    numbers[metric.tag.format(tensor)] = metric_of(row, table, tensor, metric.name)
        numbers |= {GAUGE["logits"].tag.format(name): value for name, value in row.get("logits", {}).items()}
    else:
        columns = {"steps": STEP, "evals": EVAL}[kind]
        numbers = {column.tag: row.get(column.name) for column in columns.values() if column.tag}
    return {tag: float(value) for tag, value in numbers.items() if value is not None}
