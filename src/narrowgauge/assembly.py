"""The one joint: a model and a recipe become a model and an optimizer that train.

There is one legal order. Unit scaling redraws the weights first. Tails must be taken from the float32 weights *before* they
are cut; the optimizer must see the parameters *after*; linear layers become narrow, and follow the optimizer's steps;
propagated scales, autocast and the casts of :mod:`narrowgauge.matmul.scopes` go on last. ``prepare`` is that order.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from narrowgauge.errors import RecipeError
from narrowgauge.matmul.linears import Linears
from narrowgauge.matmul.scopes import compute_in_scope
from narrowgauge.matmul.swapping import linear_names, swap_linears
from narrowgauge.numerics.rounding import round_to_bfloat16, round_to_float16
from narrowgauge.numerics.scaling import LossScaler
from narrowgauge.optim.elementwise_optimizers import AdamW
from narrowgauge.spec import variants
from narrowgauge.spec.computes import Compute
from narrowgauge.spec.notation import parse
from narrowgauge.spec.processor import multiplies
from narrowgauge.spec.recipes import Recipe


def prepare(
    model: nn.Module,
    recipe: str | Path | Recipe = "bfloat16/word",
    *,
    lr: float | Tensor = 1e-3,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    max_grad_norm: float | None = 1.0,
    seed: int = 0,
    audit_every: int = 10,
    compile: bool | None = None,
    loss_scaler: LossScaler | None = None,
) -> tuple[nn.Module, AdamW]:
    """Make a float32 model and a recipe ready to train.

    Law: the model computes with each weight's visible format, the optimizer keeps the rest: before the first step the
    stored weights are the given float32 ones, cut once to the storage's code.

    Args:
        model: a float32 model on one device; it is changed in place. One already in bfloat16 is taken too, with tails
            of zero: what was cut before cannot be recovered.
        recipe: a name such as ``"bfloat16/word"``, a ``.toml`` file, or a :class:`narrowgauge.Recipe`.
        lr, betas, eps: as in AdamW.
        weight_decay: decoupled decay of matrices; parameters of one dimension are not decayed.
        max_grad_norm: clip to this norm, and skip steps whose gradients are not finite; ``None`` does neither.
        seed: seed of the stochastic rounding.
        audit_every: audit every so many steps; 0 never.
        compile: compile the optimizer's kernels; ``None`` decides by size.
        loss_scaler: what scales the loss; ``None`` makes one where the compute is float16. It is the optimizer's
            ``loss_scaler``, by whose ``scale`` the loss goes before ``backward()``.
    Returns:
        ``(model, optimizer)``: the same model, and a ``torch.optim.Optimizer`` for it.
    Raises:
        RecipeError: an unknown recipe, a ``keep`` pattern or override that matches nothing or one of two tied names,
            a model in another format, or one that is all frozen, or a batch norm that cannot compute so.

    Cost: a float32 copy of the weights while it runs.

    Example:
        >>> import torch, narrowgauge as ng
        >>> model, optimizer = ng.prepare(torch.nn.Linear(16, 4), "bfloat16/word", lr=1e-3)
        >>> model(torch.ones(1, 16, dtype=torch.bfloat16)).float().sum().backward()
        >>> optimizer.step()
        >>> model.weight.dtype
        torch.bfloat16
    """
    policy = parse(recipe)
    _check(model, policy)
    factors = _rebuild(model, policy, seed)
    values = _cut_parameters(model, policy)
    optimizer = AdamW(
        _groups(model, policy, weight_decay, lr, factors),
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        storage=policy.storage,
        max_grad_norm=max_grad_norm,
        seed=seed,
        audit_every=audit_every,
        compile=compile,
        loss_scaler=(loss_scaler or LossScaler()) if any(c.scales_loss for c in policy.computes) else loss_scaler,
    )
    optimizer.adopt(values)
    if narrow := narrow_linears(model, policy, seed):
        narrow.follow(optimizer)
    _propagate_scales(model, policy)
    compute_in_scope(model, policy)
    return model, optimizer


def narrow_linears(model: nn.Module, recipe: Recipe, seed: int) -> Linears | None:
    """Let the linear layers compute as the recipe says, where that is not what they do anyway.

    A layer that is plain at first and narrow in a later phase, or in evaluation, is swapped too.
    """
    device = next(model.parameters()).device
    moments = [0.0, *(phase.until for phase in recipe.phases)]
    computes = [recipe, replace(recipe, compute=recipe.evaluation, phases=())] if recipe.evaluation else [recipe]
    wanted: dict[str, Compute] = {}
    for name in linear_names(model):
        rows = {each.compute_of(name, at).name for each in computes for at in moments}
        if rows != {_row_of_torch(recipe, name, device)}:
            wanted[name] = recipe.compute_of(name, 0.0)
    return swap_linears(model, wanted.get, seed=seed) if wanted else None


def _row_of_torch(recipe: Recipe, name: str, device: torch.device) -> str:
    """The row that PyTorch's own layer of that name computes in; nothing where it computes in none as well as ours does."""
    if recipe.keeps(name):
        return "float32"
    is_slow = device.type != "cuda" and not multiplies(recipe.dtype)
    # A head of PyTorch's own would take the plain gradients of its logits, which float16 loses.
    is_scaled = bool(recipe.compute.transform) and recipe.dtype == "float16"
    is_plain = recipe.storage.visible in ("float32", recipe.dtype) and not is_slow and not is_scaled
    return recipe.dtype if is_plain else ""


def _rebuild(model: nn.Module, recipe: Recipe, seed: int) -> dict[str, float]:
    """Redraw the model as the compute asks; each parameter's share of the learning rate comes back."""
    if recipe.compute.transform != "unit":
        return {}
    # Only here: it knows transformers' models, which take seconds to load.
    from narrowgauge.transforms import unit_scaling

    unit_scaling.unit_scale(model, seed)
    return unit_scaling.learning_rate_factors(model)


def _propagate_scales(model: nn.Module, recipe: Recipe) -> None:
    """Let tensors carry scales, as the compute asks; the linear layers are what they will be by now."""
    if recipe.compute.transform == "scalify":
        from narrowgauge.transforms import scalify

        scalify.scalify(model, getattr(torch, recipe.dtype) if recipe.storage.visible != "float32" else None)


def _check(model: nn.Module, recipe: Recipe) -> None:
    """Refuse what could not be trained as asked, naming the first offender."""
    names = [name for name, _ in model.named_parameters()]
    if not names:
        raise RecipeError(f"recipe '{recipe.name}' was given a {type(model).__name__} without parameters.")
    known = {torch.float32, getattr(torch, recipe.storage.visible)}
    for name, parameter in model.named_parameters():
        if parameter.dtype not in known:
            raise RecipeError(
                f"recipe '{recipe.name}' takes a float32 model, and '{name}' of {type(model).__name__} is "
                f"{str(parameter.dtype).removeprefix('torch.')}.",
                "Call model.float() first.",
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecipeError(
            f"recipe '{recipe.name}' was given a {type(model).__name__} whose {len(names)} parameters are all frozen.",
            "Call requires_grad_() on those to train.",
        )
    _check_tied(model, recipe)
    modules = [name for name, _ in model.named_modules() if name]
    for pattern in recipe.keep:
        single = Recipe(recipe.compute, recipe.storage, keep=(pattern,))
        if not any(single.keeps(name) for name in [*names, *modules]):
            raise RecipeError(f"keep pattern '{pattern}' matches no module of {type(model).__name__}.", _first(modules))
    for override in recipe.overrides:
        linears = linear_names(model)
        if override.compute is not None and not any(override.matches(name) for name in linears):
            raise RecipeError(
                f"override pattern '{override.pattern}' matches no linear layer of {type(model).__name__}.",
                _first(linears),
            )
        if override.storage is None:
            continue
        if not any(override.matches(name) for name in names):
            raise RecipeError(
                f"override pattern '{override.pattern}' matches no parameter of {type(model).__name__}.", _first(names)
            )
        if override.storage.visible != recipe.storage.visible:
            raise RecipeError(
                f"override '{override.pattern}' stores {override.storage.visible} in a model of "
                f"{recipe.storage.visible}.",
                "Name the modules in keep = [...] to leave them in float32.",
            )
    for compute in recipe.computes:
        variants.check_layers(compute, linear_names(model), type(model).__name__)
    _check_statistics(model, recipe)


def _check_statistics(model: nn.Module, recipe: Recipe) -> None:
    """Batch norms take weights and running statistics of one format only; buffers are never cut."""
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm) or not module.affine or module.running_mean is None:
            continue
        visible = recipe.storage_of(f"{name}.weight" if name else "weight", 1).visible
        visible = visible if visible == "float32" else recipe.dtype
        found = str(module.running_mean.dtype).removeprefix("torch.")
        if found == visible:
            continue
        if visible == "float32":
            advice = "Call model.float() first."
        else:
            advice = f'Keep it in float32 with keep = ["{name}"].' if name else "Take recipe 'float32'."
        raise RecipeError(
            f"recipe '{recipe.name}' gives {visible} weights to '{name}', a {type(module).__name__} whose running "
            f"statistics are {found}; PyTorch computes no such mixture.",
            advice,
        )


def _check_tied(model: nn.Module, recipe: Recipe) -> None:
    """A tensor under two names lies in one format."""
    first: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(parameter, name)
        if recipe.keeps(other) != recipe.keeps(name):
            raise RecipeError(
                f"keep = {list(recipe.keep)} names only one of '{other}' and '{name}' of {type(model).__name__}, which "
                "are one tensor.",
                "Keep both modules or neither.",
            )


def _first(names: list[str]) -> str:
    return f"Its names are like '{names[0]}' and '{names[-1]}'." if names else ""


def _cut_parameters(model: nn.Module, recipe: Recipe) -> dict[Tensor, Tensor]:
    """Cut every parameter to its visible format; the float32 values of those that will be trained come back."""
    values: dict[Tensor, Tensor] = {}
    for name, parameter in model.named_parameters():
        storage = recipe.storage_of(name, parameter.ndim)
        if parameter.requires_grad:
            values[parameter] = parameter.data.float()
        if storage.visible == "float32":
            parameter.data = parameter.data.float()
        elif parameter.dtype is torch.float32:
            parameter.data = _ROUND[storage.visible](parameter.data)
    return values


# The rate at which a unit-scaled model's weight decay means what it means elsewhere.
_DECAYED_AT = 1e-3
_ROUND = {"bfloat16": round_to_bfloat16, "float16": round_to_float16}


def _groups(
    model: nn.Module, recipe: Recipe, weight_decay: float, lr: float | Tensor, factors: dict[str, float]
) -> list[dict[str, Any]]:
    """Param groups by (storage, decayed or not, share of the learning rate), with names, for ``torch.optim``."""
    groups: dict[tuple[str, bool, float], list[tuple[str, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # Vectors change row inside the optimizer, by the row of their group.
            storage = recipe.storage_of(name, max(2, parameter.ndim))
            groups.setdefault((storage.name, parameter.ndim >= 2, factors.get(name, 1.0)), []).append((name, parameter))
    made = []
    for (storage_name, decayed, factor), members in groups.items():
        decay = weight_decay if decayed else 0.0
        group: dict[str, Any] = {"params": members, "storage": storage_name, "weight_decay": decay}
        if factors:
            # Independent decay: what a rate of 1e-3 would make of it, whatever the rate is here.
            group |= {"lr": lr * factor, "lr_factor": factor}
            group["weight_decay"] = float(decay * _DECAYED_AT / (lr * factor))
        made.append(group)
    return made
