"""Variants: rows of the computes changed by a word, ``float8-delayed+smooth``.

A variant is no row of the table: it is what a row becomes in some layers, and its name says of which row. There are two:

``smooth``: Smooth-SwiGLU. Each channel of what enters a down projection is divided by a power of two of its own before the
cast, and the weight's column is multiplied by the same after *its* cast, so that one channel which runs away neither
saturates nor takes the others' bits. It is for rows where the whole input shares one scale; those that scale each row or
block are measurably no better with it (docs/ideas/scaled-models.md).

``fresh``: in a row of delayed scales, weights are scaled by their own largest magnitude. A weight changes once a step and its
cast can be kept for all micro-batches, so nothing is won by guessing; a channel that grows grows in the weights that make it
too. ``smooth`` includes it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.spec.computes import COMPUTES, Cast, Compute, Product

SMOOTHED = ("down_proj", "*.down_proj")
"""Patterns of the layers whose input is a product of a gate and another projection."""
_SMOOTH, _FRESH = "+smooth", "+fresh"


@lru_cache(None)
def find(name: str) -> Compute | None:
    """The compute of that name, a row or a variant of one.

    Args:
        name: such as ``"float8-row"`` or ``"float8-delayed+smooth"``, spelt in full.
    Returns:
        The row, ``None`` where nothing has that name.
    Example:
        >>> str(find("float8-delayed+smooth").output.left)
        'float8_e4m3fn, per tensor, channels smoothed'
    """
    base, plus, word = name.partition("+")
    row = COMPUTES.get(base)
    if row is None or not plus:
        return row
    if plus + word == _SMOOTH and _can_smooth(row):
        return _smoothed(_fresh(row), name)
    if plus + word == _FRESH and row.is_delayed:
        return replace(
            _fresh(row), name=name, purpose=f"{base} whose weights are scaled by themselves, none by earlier steps"
        )
    return None


def get_compute(compute: str | Compute) -> Compute:
    """A compute by its name, or itself.

    Raises:
        RecipeError: no compute and no variant has that name.
    """
    found = find(compute) if isinstance(compute, str) else compute
    if found is None:
        advice = f"{suggestion(str(compute), names())} (narrowgauge show recipes lists all.)".strip()
        raise RecipeError(f"no compute is named '{compute}'.", advice)
    return found


def named(name: str) -> Compute:
    """:func:`find` for a name that is known to be one."""
    row = find(name)
    if row is None:
        raise KeyError(name)
    return row


def names() -> list[str]:
    """Every name that :func:`find` knows: rows, then their variants."""
    return [*COMPUTES, *(name for row in COMPUTES for word in (_SMOOTH, _FRESH) if find(name := row + word))]


def at_layer(row: Compute, layer: str) -> Compute:
    """A row as one layer computes it: a smooth one smooths where a gate's product enters, and nowhere else.

    Args:
        row: a row or a variant.
        layer: the dotted name of a linear layer.
    Returns:
        The row to compute the layer by.
    Example:
        >>> row = find("float8-tensor+smooth")
        >>> [at_layer(row, name).name for name in ("layers.0.mlp.down_proj", "layers.0.mlp.up_proj")]
        ['float8-tensor+smooth', 'float8-tensor']
    """
    if not row.name.endswith(_SMOOTH) or _is_smoothed(layer):
        return row
    base = row.name.removesuffix(_SMOOTH)
    return find(base + _FRESH) or COMPUTES[base]


def check_layers(row: Compute, layers: Iterable[str], model: str) -> None:
    """Refuse a smooth row for a model that has nothing to smooth.

    Args:
        row: any.
        layers: the names of the model's linear layers.
        model: what to call it.
    Raises:
        RecipeError: none of them is a down projection.
    """
    names = list(layers)
    if row.name.endswith(_SMOOTH) and not any(map(_is_smoothed, names)):
        raise RecipeError(
            f"compute '{row.name}' smooths what enters a gated MLP's down projection, and {model} has no layer named "
            f"'down_proj'{f' among {names[0]}, …' if names else ''}.",
            f"Take '{row.name.removesuffix(_SMOOTH)}'.",
        )


def _is_smoothed(layer: str) -> bool:
    return any(fnmatch.fnmatchcase(layer, pattern) for pattern in SMOOTHED)


def _can_smooth(row: Compute) -> bool:
    """Whether all of the input shares one scale, made from magnitudes."""
    return not row.transform and row.output.left.granularity == "tensor" and row.output.left.scaling != "static"


def _fresh(row: Compute) -> Compute:
    """With current scales for weights."""
    return replace(
        row,
        output=replace(row.output, right=_current(row.output.right)),
        grad_input=replace(row.grad_input, right=_current(row.grad_input.right)),
    )


def _smoothed(row: Compute, name: str) -> Compute:
    """With smoothed channels in both casts of the input, which have been read when their factors are known."""
    left, kept = (replace(_current(cast), smooth=True) for cast in (row.output.left, row.grad_weight.right))
    return replace(
        row,
        name=name,
        output=Product(left, row.output.right, "float32"),
        grad_weight=replace(row.grad_weight, right=kept),
        purpose=f"{row.name} whose down projections survive a channel that runs away (their output is multiplied in 16 bits)",
        source=f"Smooth-SwiGLU, Fishman et al. 2024 (2409.12517), over {row.source}",
    )


def _current(cast: Cast) -> Cast:
    return replace(cast, scaling="current")
