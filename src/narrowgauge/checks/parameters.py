"""Check parameters: missing in the optimizer, listed twice, not finite, or without a gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import Tensor

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, of_all
from narrowgauge.checks.set_up import NAIVE, SetUp
from narrowgauge.numerics.dtensor import local_of
from narrowgauge.numerics.exact_sums import largest_magnitude


def parameter_readings(set_up: SetUp) -> Iterator[Reading]:
    """Yield parameters that are in no optimizer, listed twice, not finite, or without a gradient."""
    yield from _missing(set_up)
    if names := [name for name, p in set_up.parameters.items() if p.dtype in NAIVE and not _is_finite(p)]:
        yield KINDS["nonfinite-weights"].reading(of_all(names), len(names), 0)
    counts = Counter(id(p.parameter) for p in set_up.stepped)
    if names := [p.name for p in set_up.stepped if counts[id(p.parameter)] > 1]:
        yield KINDS["parameters-twice"].reading(of_all(names), len(set(names)), 0)
    trained = {p.name: p.parameter for p in set_up.trained}
    # TransformerEngine and Megatron store gradients elsewhere.
    places = ("grad", "main_grad", "decoupled_grad")
    lost = [name for name, p in trained.items() if all(getattr(p, place, None) is None for place in places)]
    if lost and len(lost) < len(trained):
        yield KINDS["no-gradient"].reading(of_all(lost), len(lost), 0, count=len(trained))


def _missing(set_up: SetUp) -> Iterator[Reading]:
    """Yield trainable parameters without an optimizer. If the optimizer has others of that shape, they were replaced."""
    stepped, in_model = set_up.stepped, {id(p) for p in set_up.model.parameters()}
    stepped_ids = {id(p.parameter) for p in stepped}
    if not in_model & stepped_ids and all(p.parameter.ndim == 1 for p in stepped):
        return  # flat partitions of the weights, as of DeepSpeed and Megatron
    lost = {name: p for name, p in set_up.parameters.items() if p.requires_grad and id(p) not in stepped_ids}
    shapes = {p.parameter.shape for p in stepped if id(p.parameter) not in in_model}
    if replaced := [name for name, p in lost.items() if p.shape in shapes]:
        yield KINDS["replaced-parameters"].reading(of_all(replaced), len(replaced), 0)
    elif lost:
        yield KINDS["missing-parameters"].reading(of_all(lost), len(lost), 0)


def _is_finite(parameter: Tensor) -> bool:
    """Return whether a parameter holds no NaN and, unless it is frozen, no infinity. A mask may be infinite."""
    values = local_of(parameter)
    if values.is_meta:
        return True
    largest = largest_magnitude(values)
    return bool(largest.isfinite() if parameter.requires_grad else ~largest.isnan())
