"""Variants of computes, named by a suffix: ``float8-delayed+smooth``.

``smooth``: Smooth-SwiGLU. Each channel of a down projection's input is divided by its own power of two before the cast, and the
weight's column is multiplied by it after *its* cast. So a channel with outliers neither saturates nor costs the other channels
precision. It applies to computes whose input shares one scale; with scales per row or block it brings no measurable gain
(docs/ideas/scaled-models.md).

``fresh``: in a compute with delayed scales, weights are scaled by their current amax. A weight changes once per step and its
cast is cached for all micro-batches, so a delayed scale saves nothing there. ``smooth`` includes it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from narrowgauge.errors import RecipeError
from narrowgauge.spec.computes import COMPUTES, Cast, Compute, Product

SMOOTHED = ("down_proj", "*.down_proj")
"""Patterns of the layers whose input is the product of a gate and another projection."""
_SMOOTH, _FRESH = "+smooth", "+fresh"


@lru_cache(None)
def find(name: str) -> Compute | None:
    """The compute or variant of that name.

    Args:
        name: such as ``"float8-row"`` or ``"float8-delayed+smooth"``, in full spelling.
    Returns:
        The compute, or ``None``.
    Example:
        >>> str(find("float8-delayed+smooth").output.left)
        'float8_e4m3fn, per tensor, channels smoothed'
    """
    base, plus, word = name.partition("+")
    compute = COMPUTES.get(base)
    if compute is None or not plus:
        return compute
    if plus + word == _SMOOTH and _can_smooth(compute):
        return _smoothed(_fresh(compute), name)
    if plus + word == _FRESH and compute.is_delayed:
        return replace(_fresh(compute), name=name, purpose=f"{base} with current scales for weights")
    return None


def named(name: str) -> Compute:
    """:func:`find` for a known name."""
    compute = find(name)
    if compute is None:
        raise KeyError(name)
    return compute


def names() -> list[str]:
    """All names that :func:`find` knows: computes, then variants."""
    return [*COMPUTES, *(name for compute in COMPUTES for word in (_SMOOTH, _FRESH) if find(name := compute + word))]


def at_layer(compute: Compute, layer: str) -> Compute:
    """The compute of one layer: a smooth compute smooths the layers of ``SMOOTHED`` only.

    Args:
        compute: a compute or a variant.
        layer: the dotted name of a linear layer.
    Returns:
        The compute of the layer.
    Example:
        >>> compute = find("float8-tensor+smooth")
        >>> [at_layer(compute, name).name for name in ("layers.0.mlp.down_proj", "layers.0.mlp.up_proj")]
        ['float8-tensor+smooth', 'float8-tensor']
    """
    if not compute.name.endswith(_SMOOTH) or _is_smoothed(layer):
        return compute
    base = compute.name.removesuffix(_SMOOTH)
    return find(base + _FRESH) or COMPUTES[base]


def check_layers(compute: Compute, layers: Iterable[str], model: str) -> None:
    """Refuse a smooth compute for a model without layers of ``SMOOTHED``.

    Args:
        compute: any.
        layers: the names of the model's linear layers.
        model: its name in the error message.
    Raises:
        RecipeError: no layer is a down projection.
    """
    names = list(layers)
    if compute.name.endswith(_SMOOTH) and not any(map(_is_smoothed, names)):
        raise RecipeError(
            f"compute '{compute.name}' smooths the input of a gated MLP's down projection, and {model} has no layer named "
            f"'down_proj'{f' among {names[0]}, …' if names else ''}.",
            f"Take '{compute.name.removesuffix(_SMOOTH)}'.",
        )


def _is_smoothed(layer: str) -> bool:
    return any(fnmatch.fnmatchcase(layer, pattern) for pattern in SMOOTHED)


def _can_smooth(compute: Compute) -> bool:
    """Whether the whole input shares one scale, derived from its amax."""
    return (
        not compute.transform
        and compute.output.left.granularity == "tensor"
        and compute.output.left.scaling != "static"
    )


def _fresh(compute: Compute) -> Compute:
    """The compute with current scales for weights."""
    return replace(
        compute,
        output=replace(compute.output, right=_current(compute.output.right)),
        grad_input=replace(compute.grad_input, right=_current(compute.grad_input.right)),
    )


def _smoothed(compute: Compute, name: str) -> Compute:
    """The compute with smoothed channels in both casts of the input. Their factors need the input, so scales are current."""
    left, kept = (replace(_current(cast), smooth=True) for cast in (compute.output.left, compute.grad_weight.right))
    return replace(
        compute,
        name=name,
        output=Product(left, compute.output.right, "float32"),
        grad_weight=replace(compute.grad_weight, right=kept),
        purpose=f"{compute.name} with down projections that tolerate outlier channels (their output matmul is in 16 bits)",
        source=f"Smooth-SwiGLU, Fishman et al. 2024 (2409.12517), over {compute.source}",
    )


def _current(cast: Cast) -> Cast:
    return replace(cast, scaling="current")
