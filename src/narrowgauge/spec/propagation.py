"""Rules of scale propagation: what scale each operation on scaled tensors hands on, and which of them look at a tensor.

A scaled tensor is ``data * scale`` (:mod:`narrowgauge.transforms.scaled_tensor`). Most rules guess how large a result is from
the scales that go in; a few *measure* it, the root mean square of a tensor, rounded down to a power of two. The functions in
``transforms/`` look up here whether they measure, so this table is what is done; the documentation and ``narrowgauge show
scales`` print it.

Source: Balança et al., Scalify, arXiv 2407.17353: scales rounded down; its dynamic rescale measures the gradient behind each
normalization, the weights after an optimizer's step and the gradient that enters. One measurement is ours: of what an
activation hands on, which the source leaves at its input's scale. Its model had no gated MLP; in a Llama's the product of gate
and up then grows to a root mean square of 140 within 40 steps, and e4m3 ends at 448.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Measured = Literal["weight", "output", "gradient"]


@dataclass(frozen=True, slots=True)
class Rule:
    """How one kind of operation hands a scale on.

    Args:
        name: of the kind.
        scale: of the result, in words.
        gradient: of what goes back to the input, where the operation is no sum of others that have rules.
        measures: which tensors are read for a scale: the ``weight`` (once while it stays what it is), the ``output`` (in each
            forward pass), the ``gradient`` of the input (in each backward pass).
        operations: of PyTorch's ``aten``, of those that are looked up below automatic differentiation.
    """

    name: str
    scale: str
    gradient: str = "by these rules"
    measures: tuple[Measured, ...] = ()
    operations: tuple[str, ...] = ()


_ROWS = (
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
    Rule("product", "the scales' product; a number's is its power of two", operations=("mul.Tensor", "mul.Scalar")),
    Rule("quotient", "the scales' quotient", operations=("div.Tensor", "div.Scalar")),
    Rule("sum of two", "the larger", operations=("add.Tensor", "sub.Tensor")),
    Rule("concatenation", "the largest", operations=("cat.default",)),
    Rule("sum of n terms", "√n times, rounded down", operations=("sum.dim_IntList", "sum.default")),
    Rule("linear layer", "x's · w's · √inputs, rounded down", "dy's · w's · √outputs, rounded down", ("weight",)),
    Rule("embedding", "the weight's", "a plain tensor", ("weight",)),
    Rule("norm", "1", "measured", ("gradient",)),
    Rule("activation", "measured", "the same", ("output",)),
    Rule("attention", "the values'", "the same"),
    Rule("plain gradient that enters", "1, where a plain tensor left", "measured", ("gradient",)),
)  # fmt: skip

RULES: dict[str, Rule] = {row.name: row for row in _ROWS}
"""Every rule by name."""
