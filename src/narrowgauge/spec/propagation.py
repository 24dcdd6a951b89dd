"""Rules of scale propagation: the scale of each operation's result, and which operations measure a tensor.

A scaled tensor is ``data * scale`` (:mod:`narrowgauge.transforms.scaled_tensor`). Most rules derive a result's scale from the
scales of the operands. A few *measure* it: the root mean square of a tensor, rounded down to a power of two. The functions in
``transforms/`` read from this table whether to measure, and ``narrowgauge show scales`` prints it.

Source: Balança et al., Scalify, arXiv 2407.17353: scales are rounded down; its dynamic rescale measures the gradient of each
normalization, the weights after an optimizer step, and the gradient of the loss. Measuring the output of activations is an
addition: the source gives it the scale of the input. Its model has no gated MLP; in a Llama the product of gate and up
then reaches a root mean square of 140 within 40 steps, and the largest e4m3 is 448.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Measured = Literal["weight", "output", "gradient"]


@dataclass(frozen=True, slots=True)
class Rule:
    """How one kind of operation propagates a scale.

    Args:
        scale: of the result, in words.
        gradient: the scale of the input's gradient, for operations that are not composed of others with rules.
        measures: the tensors whose scale is measured: the ``weight`` (once per value), the ``output`` (in every forward pass),
            the ``gradient`` of the input (in every backward pass).
        operations: ``aten`` operations that are dispatched below autograd.
    """

    name: str
    scale: str
    gradient: str = "by these rules"
    measures: tuple[Measured, ...] = ()
    operations: tuple[str, ...] = ()


_RULES = (
    Rule(
        "view", "the same",
        operations=(
            "alias.default", "detach.default", "expand.default", "permute.default", "select.int", "slice.Tensor",
            "split.Tensor", "split_with_sizes.default", "squeeze.dim", "t.default", "transpose.int", "unsqueeze.default",
            "view.default",
        ),
    ),
    Rule(
        "copy", "the same",
        operations=(
            "_to_copy.default", "_unsafe_view.default", "clone.default", "neg.default", "select_backward.default",
            "slice_backward.default",
        ),
    ),
    Rule("product", "the product of the scales; of a number, its power of two", operations=("mul.Tensor", "mul.Scalar")),
    Rule("quotient", "the quotient of the scales", operations=("div.Tensor", "div.Scalar")),
    Rule("sum of two", "the larger one", operations=("add.Tensor", "sub.Tensor")),
    Rule("concatenation", "the largest one", operations=("cat.default",)),
    Rule("sum of n terms", "√n times, rounded down", operations=("sum.dim_IntList", "sum.default")),
    Rule("linear layer", "x's · w's · √inputs, rounded down", "dy's · w's · √outputs, rounded down", ("weight",)),
    Rule("embedding", "the weight's", "a plain tensor", ("weight",)),
    Rule("norm", "1", "measured", ("gradient",)),
    Rule("activation", "measured", "the same", ("output",)),
    Rule("attention", "the values'", "the same"),
    Rule("plain gradient that enters", "1 for a plain tensor that leaves", "measured", ("gradient",)),
)  # fmt: skip

RULES: dict[str, Rule] = {rule.name: rule for rule in _RULES}
