"""What gauges write down of a sampled step: the columns of ``gauges.jsonl``, in one place for writers and readers.

A row names each tensor once, as ``KIND:NAME``, and lists its figures in a fixed order, since a thousand tensors times a
thousand samples would otherwise be mostly keys::

    {"step": 20, "tensors": {"input:model.layers.0.mlp.down_proj": [4.2, 0.9, 0, ...]},
     "updates": {...}, "moments": {...}, "attention": {...}, "logits": {...}, "block_scales": {...}, "histograms": {...}}

A figure that does not apply is null; a table without rows is left out. Histograms count binary exponents, pooled over all
tensors of a kind: sums of integers, which a reader may merge in any order.
"""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]

KINDS: dict[str, str] = {
    "input": "what enters a linear layer: the left operand of output",
    "output_grad": "the gradient of a linear layer's output: the left operand of grad_input",
    "weight": "the weights as the model sees them",
    "grad": "the gradients of the parameters",
    "exp_avg": "first moments",
    "exp_avg_sq": "second moments",
}
"""Every kind of tensor that gauges watch, and its meaning."""

TENSOR_FIELDS: dict[str, str] = {
    "amax": "largest magnitude",
    "rms": "root of the mean square",
    "nonfinite": "how many values are NaN or infinite",
    "underflow": "share of the nonzero values that the cast makes zero",
    "overflow": "share of the values beyond the cast's end",
    "sqnr_db": "signal to quantization noise of the cast, in decibels",
    "outlier": "largest magnitude over the rms, of the sampled rows",
    "kurtosis": "fourth moment over the squared second, of the sampled rows; 3 for a normal distribution",
    "top_feature": "largest rms of one feature (column) over that of all, of the sampled rows",
    "top_to_rest": "energy of that feature over the energy of all others together",
}
"""The figures of a tensor, in the order of their columns. Underflow, overflow and SQNR are of the cast by which the tensor
enters its matmul, and null where it enters as it is."""

UPDATE_FIELDS: dict[str, str] = {
    "edq": "effective descent quality over the audit's window: the share of the update that the storage took",
    "noise": "what arrived beside the update, relative to it, over the audit's window",
    "lost_fraction": "share of intended changes that left the stored value as it was",
    "unseen_fraction": "share of intended changes that left the visible weight as it was",
    "update_to_weight": "rms of the visible weight's change over its rms, of the sampled rows",
    "update_to_ulp": "median of the visible weight's change over its spacing, of the sampled rows",
}
"""The figures of a parameter's update, in the order of their columns."""

MOMENT_FIELDS: dict[str, str] = {
    "bias": "sum of the stored second moments of the sampled row over that of an exact float32 shadow",
    "frozen_fraction": "share of them that did not move since the last sample although the shadow did",
}
"""The figures of a parameter's second moment, in the order of their columns."""

ATTENTION_FIELDS: dict[str, str] = {
    "max_logit": "largest attention logit of the sampled queries",
    "entropy": "mean entropy of their attention weights, over that of even ones",
}
"""The figures of an attention module, in the order of their columns."""

FIRST_EXPONENT = -64
NUM_EXPONENTS = 112
"""Bin ``k`` of a histogram counts magnitudes from ``2**(FIRST_EXPONENT + k)`` to just below twice that; smaller ones fall
into the first bin, larger ones into the last; zeros and values that are not finite into none."""


def figure(row: Row, table: str, name: str, field: str) -> float | None:
    """One figure of a row of ``gauges.jsonl``.

    Args:
        row: the row.
        table: ``tensors``, ``updates``, ``moments`` or ``attention``.
        name: of the tensor, parameter or module, as the row has it.
        field: a column of that table.
    Returns:
        The figure, or ``None`` where the row has none.
    Example:
        >>> figure({"step": 1, "moments": {"w": [1.25, 0.0]}}, "moments", "w", "bias")
        1.25
    """
    values = row.get(table, {}).get(name)
    place = list(FIELDS[table]).index(field)
    return values[place] if values is not None and place < len(values) else None


FIELDS: dict[str, dict[str, str]] = {
    "tensors": TENSOR_FIELDS,
    "updates": UPDATE_FIELDS,
    "moments": MOMENT_FIELDS,
    "attention": ATTENTION_FIELDS,
}
"""The columns of each table."""
