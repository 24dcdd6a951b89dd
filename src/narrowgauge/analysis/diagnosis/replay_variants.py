"""The table of what a replayed step is computed with: one row per change, and what the change shows.

A *place* is where a step rounds. Each is widened to float32 alone, all others as they were: what then remains of the difference
to the step in float32 is not from there. The replay, the command, the documentation and the tests read this table.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrowgauge.spec.tables import Row, Table, name_columns, text_columns


@dataclass(frozen=True, slots=True)
class ReplayVariant:
    """One way to compute the step once more.

    Args:
        name: its key in the table.
        changed: what differs from the run's own step.
        shows: what its difference to the step in float32 says.
        is_widening: one place is widened; the other rows are what they are compared with.
    """

    name: str
    changed: str
    shows: str
    is_widening: bool = True


_ROWS = (
    ReplayVariant(
        "as-run", "nothing: every rounding of the recipe, with sums in float32",
        "how far the recipe's roundings carry the step", is_widening=False,
    ),
    ReplayVariant(
        "float32", "every rounding is left out, from the same stored weights and moments",
        "the step that all others are compared with", is_widening=False,
    ),
    ReplayVariant("inputs", "linear layers take their inputs uncast, in all their matmuls", "casts of activations"),
    ReplayVariant("weights", "all layers take the stored weights uncast and uncut", "casts of weights, and bits that they hide"),
    ReplayVariant("output-gradients", "linear layers take gradients of their outputs uncast", "casts in the backward pass"),
    ReplayVariant("linear-outputs", "the outputs of linear layers are not rounded", "what a 16-bit result of a matmul loses"),
    ReplayVariant("attention", "rotary embedding, softmax and products of attention are not rounded", "attention in few bits"),
    ReplayVariant("norms", "the outputs of norms are not rounded", "normalization in few bits"),
    ReplayVariant("residual", "the residual stream and products of gates are not rounded", "a residual stream in few bits"),
    ReplayVariant("logits", "the head's logits are not rounded", "a head in few bits"),
    ReplayVariant("own-casts", "casts that the model's own code makes are left out", "a cast that no recipe asked for"),
    ReplayVariant("activation-gradients", "gradients between layers are not rounded", "a backward pass in few bits"),
    ReplayVariant(
        "weight-gradients", "gradients of weights are neither rounded nor added up in the format of their weights",
        "gradients of weights in few bits",
    ),
    ReplayVariant("accumulation", "gradients of micro-batches are summed in float32", "a sum over micro-batches in few bits"),
    ReplayVariant("storage", "the update is applied to float32 weights and moments", "updates that the storage rounds away"),
    ReplayVariant(
        "other-order", "the sequences of the batch in reverse, so that every sum over them has another order",
        "how far the order of sums carries the same step", is_widening=False,
    ),
    ReplayVariant(
        "other-order-float32", "the same in float32", "the part of it that float32 has too", is_widening=False,
    ),
)  # fmt: skip

REPLAY_VARIANTS: dict[str, ReplayVariant] = {row.name: row for row in _ROWS}
"""All rows by name."""
WIDENINGS: tuple[str, ...] = tuple(row.name for row in _ROWS if row.is_widening)


def variant_rows() -> list[Row]:
    """The table as plain values.

    Example:
        >>> [row["name"] for row in variant_rows()][:2]
        ['as-run', 'float32']
    """
    return [{"name": row.name, "changed": row.changed, "shows": row.shows} for row in _ROWS]


def variant_table() -> Table:
    """The table with the columns to print."""
    return Table(
        (*name_columns(variant="name"), *text_columns(what_is_changed="changed", what_it_shows="shows")), variant_rows()
    )
