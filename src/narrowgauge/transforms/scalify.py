"""Scalify: every tensor of a model carries a power-of-two scale, so that the operands of its
matmuls are near one.

Outputs of activations, gradients behind a norm, and weights are measured, since errors of guesses
would accumulate there. A float8 matmul then needs no scale and no amax: it casts ``data`` directly.
Linear layers, embeddings, norms, activations and attention compute by a rule, from the embedding to
the last norm. Logits and the parameters' gradients are plain tensors.

Source: Balança et al., Scalify, arXiv 2407.17353; graphcore-research/jax-scalify, whose default
rounds scales down too. Measuring the output of activations is an addition, since the source's model
has no gated MLP.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.metrics import power_of_rms
from narrowgauge.torch_support.extension import extended_class
from narrowgauge.torch_support.torch_names import tree_map_only
from narrowgauge.transforms.scaled_tensor import (
    OWN,
    REAL,
    WIDE,
    Scaled,
    enter,
    leave,
    root_below,
    scale_of_one,
    unknown,
    value_of,
)

# ── rules ─────────────────────────────────────────────────────────────────────────────────────────


class _Ruled:
    """Mix into the class of a module that computes by a rule.

    The class changes, not the object's forward. So the module can be copied and pickled.
    """


class _Linear(_Ruled):
    """A linear layer: PyTorch's, transformers' Conv1D, or one with a ``product`` of its own.

    The operands of its three matmuls are near one. The output sums over the inputs, ``grad_input``
    over the outputs. Their sizes are the roots of these numbers, rounded down. The weight's scale is
    measured, and its gradient is a plain value. The bias is added at the scale of the product.
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        weight = self.weight
        if getattr(self, "is_transposed", not isinstance(self, nn.Linear)):
            weight = weight.t()
        outputs, inputs = weight.shape
        size = power_of_rms(weight)
        scale = (x.scale if isinstance(x, Scaled) else scale_of_one(x)) * size
        operands = [x, weight]
        if self.bias is not None:
            operands.append(self.bias)
        sizes = (root_below(outputs), None, None)[: len(operands)]
        token, *entered = enter((OWN, size, scale)[: len(operands)], sizes, *operands)
        multiply = getattr(self, "product", F.linear)
        return leave(multiply(*entered), token, scale, root_below(inputs))


class _Embedding(_Ruled):
    """Look up rows of the weight at its measured scale. Its gradient is a plain value."""

    def forward(self: Any, tokens: Tensor) -> Tensor:
        size = power_of_rms(self.weight)
        token, table = enter((REAL,), (None,), self.weight)
        rows = F.embedding(tokens, table, self.padding_idx) / size
        return leave(rows, token, size, 1.0)


class _Activation(_Ruled):
    """Apply it to the real value.

    Its output is measured. Its gradient has about the output gradient's size.
    """

    def forward(self: Any, x: Tensor) -> Any:
        token, real = enter((REAL,), (1.0,), x)
        return leave(super().forward(real), token, scale_of_one(token), None)  # type: ignore[misc]


class _Norm(_Ruled):
    """Apply a norm to the real value.

    The result has scale 1, since its size is one. Its gradient is measured. float16 is computed in
    float32, since the gradient of a small input is large.
    """

    def forward(self: Any, x: Tensor) -> Any:
        parameters = self._parameters
        named = {name: p for name, p in parameters.items() if p is not None}
        count = 1 + len(named)
        token, real, *vectors = enter((WIDE,) * count, (None,) * count, x, *named.values())
        for name, vector in zip(named, vectors, strict=True):
            named[name] = vector.to(torch.promote_types(vector.dtype, real.dtype))
        try:
            self._parameters = {**parameters, **named}
            raw = super().forward(real)  # type: ignore[misc]
        finally:
            self._parameters = parameters
        if x.dtype is torch.float16:
            raw = raw.half()
        return leave(raw, token, scale_of_one(token), 1.0)


# ── models ────────────────────────────────────────────────────────────────────────────────────────


def scalify(model: nn.Module) -> None:
    """Make a model compute with scaled tensors from its inputs to its outputs.

    Logits and gradients have the plain model's values. Every operand of a linear layer's three
    matmuls has a root mean square of the order of one. Parameters, ``state_dict`` and gradients are
    plain tensors under the same names. A linear layer with a method ``product(x, weight, bias)``,
    such as a narrow layer, multiplies its plain data with it.

    Args:
        model: changed in place. Each module with parameters, and each activation, gets its own
            class. Swap narrow layers before.
    Raises:
        RecipeError: a module's class has no rule, or has one already; or, when the model runs, an
            operation has none.
    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 2))
        >>> x = torch.ones(3, 8)
        >>> plain = model(x)
        >>> scalify(model)
        >>> torch.equal(model(x), plain)
        True
    """
    rules = rules_of(model)
    # The body of a Hugging Face model can also be called directly.
    plain: set[Any] = {model, getattr(model, "base_model", model)}
    if hasattr(model, "get_output_embeddings"):
        head = cast(Any, model).get_output_embeddings()
        plain.add(head)
        if type(head) is nn.Linear:  # its inputs and outputs are plain
            del rules[head]
    for module, rule in rules.items():
        kind: Any = type(module)
        module.__class__ = extended_class(rule, kind)
    for module in plain - {None}:
        module.register_forward_hook(_leave_values)


def rules_of(model: nn.Module) -> dict[nn.Module, Any]:
    """Return the rules of a model's modules. Refuse a module that needs one and has none."""
    rules = {}
    for name, module in model.named_modules():
        if isinstance(module, _Ruled):
            raise RecipeError(
                f"Cannot scalify this {type(model).__name__} because '{name}' is scalified already.",
                "Scalify the whole model once.",
            )
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            kind = "LayerNorm"
        # A subclass may compute anything, unless its product shows that only this differs.
        if isinstance(module, nn.Linear) and hasattr(module, "product"):
            kind = "Linear"
        if kind in _RULE_OF:
            rules[module] = _RULE_OF[kind]
        elif isinstance(module, nn.Linear) or list(module.parameters(False)):
            raise unknown(f"the module '{name}' of class {type(module).__name__}")
    return rules


_RULE_OF: dict[str, type[_Ruled]] = {
    "Linear": _Linear, "Conv1D": _Linear, "Embedding": _Embedding, "LayerNorm": _Norm,
    **dict.fromkeys(("GELU", "ReLU", "SiLU"), _Activation),
    **dict.fromkeys(("GELUActivation", "GELUTanh", "NewGELUActivation", "SiLUActivation"), _Activation),
}  # fmt: skip
"""By the class's name: a model of another library must not need transformers."""


def _leave_values(_: nn.Module, __: Any, result: Any) -> Any:
    return tree_map_only(Scaled, value_of, result)
