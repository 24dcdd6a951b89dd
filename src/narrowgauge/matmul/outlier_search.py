"""Which columns of a model's inputs hold outliers: found on some batches before it is quantized, and checked while it is used.

In LLM.int8() the columns of a call decide, and a model in training has all of its weights at hand. A quantized one has 16-bit
weights only of the columns that were expected to hold outliers. Such features are few and hold outliers in every text (Dettmers
et al. 2022, 2208.07339, section 4: at most 7 of thousands, in nearly all layers at once), so some batches find them. What was
not found is counted where it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import RecipeError
from narrowgauge.matmul.experts import NARROW, grouped_layers, grouped_layers_of, is_experts, uninstall
from narrowgauge.matmul.inference import QuantizedExperts, QuantizedLinear
from narrowgauge.matmul.layer_matmuls import outlier_columns
from narrowgauge.matmul.linear import is_linear
from narrowgauge.matmul.swapping import chooser
from narrowgauge.spec.computes import COMPUTES, Compute
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.notation import get_compute


@torch.no_grad()
def find_outlier_columns(
    model: nn.Module,
    batches: Iterable[Any],
    compute: str | Compute = "int8-outlier",
    keep: tuple[str, ...] | None = None,
) -> dict[str, list[int]]:
    """Which columns of the linear layers' inputs hold outliers in some batches: those to keep the weights of in 16 bits.

    A column is found if one of its values reaches the threshold of the compute, in any batch, as the layer will decide it. The
    experts of a mixture share the columns of a projection.

    Args:
        model: before it is quantized.
        batches: each a tensor, which is given to the model, or a dict of its keyword arguments.
        compute, keep: as for :func:`quantize_for_inference`; another threshold is ``"int8-outlier+threshold=4"``.
    Returns:
        Ascending columns by the name of the layer; a layer without any has an empty list.
    Raises:
        RecipeError: the compute separates no outliers, or no layer was called.
    Cost: a forward pass for each batch.
    Example:
        >>> model, x = nn.Sequential(nn.Linear(4, 2)), torch.tensor([[0.5, 7.0, -1.0, -6.0]])
        >>> find_outlier_columns(model, [x])
        {'0': [1, 3]}
    """
    made = get_compute(compute)
    threshold = made.output.left.outliers
    if not threshold:
        raise RecipeError(f"compute '{made.name}' separates no outliers.", "Use int8-outlier.")
    choose = chooser(made, keep)
    found: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[..., None]:
        def look(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            columns = outlier_columns(inputs[0].reshape(-1, inputs[0].shape[-1]), threshold)
            found[name] = found[name] | columns if name in found else columns

        return look

    with ExitStack() as stack:
        projections = stack.enter_context(_visible_experts(model))
        linears = {name: module for name, module in model.named_modules() if is_linear(module)}
        for name, module in {**linears, **projections}.items():
            if choose(name) is not None:
                stack.callback(module.register_forward_pre_hook(watch(name)).remove)
        for batch in batches:
            model(**batch) if isinstance(batch, Mapping) else model(batch)
    if not found:
        raise RecipeError(
            f"No linear layer of {type(model).__name__} was called: there was no batch, or no layer to quantize.",
            "Give at least one batch, before the model is quantized.",
        )
    return {name: columns.nonzero().view(-1).tolist() for name, columns in found.items()}


@contextmanager
def _visible_experts(model: nn.Module) -> Iterator[dict[str, nn.Module]]:
    """The projections of all experts by name, as modules that are called with their input: for the time being, if need be."""
    plain = [module for module in model.modules() if is_experts(module)]
    added: list[Any] = [module for module in plain if not hasattr(module, NARROW)]

    def as_it_is(name: str) -> Compute | None:
        module = model.get_submodule(name.rpartition(".")[0])
        return COMPUTES[dtype_name(next(module.parameters()).dtype)] if module in added else None

    configs = [module.config for module in added if hasattr(module, "config")]
    try:
        grouped_layers(model, as_it_is)
        yield dict(grouped_layers_of(model))
    finally:
        for module, config in zip(added, configs, strict=True):
            uninstall(module, config)


def missed_outliers(model: nn.Module) -> dict[str, int]:
    """How many outlier columns met the widened codes since the model was quantized, as their weights were not kept in 16 bits.

    Args:
        model: quantized by :func:`narrowgauge.quantize_for_inference` or not.
    Returns:
        By the name of the layer, summed over its calls; layers of other computes than ``int8-outlier`` are left out.
    Example:
        >>> missed_outliers(nn.Linear(2, 2))
        {}
    """
    layers = (
        (name, each) for name, each in model.named_modules() if isinstance(each, (QuantizedLinear, QuantizedExperts))
    )
    return {name.replace(f".{NARROW}.", "."): int(each.missed) for name, each in layers if each.missed is not None}
