"""``prepare`` applies a recipe to a model: it swaps layers, rounds the weights and builds the
optimizer.

The order of the steps matters. The optimizer takes its tails from the float32 weights *before* they
are rounded. It takes its parameter groups from the parameters *after*. On many ranks the rounded
model is sharded in between, since FSDP2 gathers a group of parameters in one format. Propagated
scales and autocast come last.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from narrowgauge.assembly.trainable import require_trainable
from narrowgauge.distributed import sharding
from narrowgauge.distributed.reduction import reduce_gradients_with
from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.matmul.roles import multiplied, roles_of
from narrowgauge.matmul.scopes import compute_in_scope
from narrowgauge.matmul.swapping import NarrowLayers, swap_linears
from narrowgauge.numerics.dtensor import own_part
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.optimizers import AdamW
from narrowgauge.optim.parameter_formats import cast_statistics, round_in_place, rounded
from narrowgauge.spec.computes import COMPUTES, Compute
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe
from narrowgauge.torch_support.machine import multiplies
from narrowgauge.torch_support.torch_names import plain_name

OptimizerT = TypeVar("OptimizerT", bound=Optimizer, default=AdamW)


Groups = list[dict[str, Any]]
"""Param groups, as an optimizer of PyTorch takes them."""


def one_group(model: nn.Module) -> Groups:
    """Return the trained parameters of a model in one param group."""
    return [{"params": [p for p in model.parameters() if p.requires_grad]}]


def matrices_decay(model: nn.Module) -> Groups:
    """Return param groups in which only parameters of two dims or more decay, as language models
    usually train.
    """
    matrices: list[Tensor] = []
    vectors: list[Tensor] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (matrices if parameter.ndim >= 2 else vectors).append(parameter)
    groups: Groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def prepare(
    model: nn.Module,
    recipe: str | Path | Recipe = "bfloat16/word",
    *,
    optimizer: type[OptimizerT] = AdamW,  # type: ignore[assignment]  # mypy compares it with the bound of OptimizerT
    groups: Callable[[nn.Module], Groups] = one_group,
    seed: int = 0,
    mesh: Any = None,
    shard: str = "full",
    offload: bool = False,
    average: bool = True,
    **options: Any,
) -> tuple[nn.Module, OptimizerT]:
    """Prepare a float32 model for training with a recipe, on one process or on the ranks of a mesh.

    The model then computes with each weight in its visible format. The optimizer holds the
    remaining bits. Before the first step, the stored weights are the given float32 weights, rounded
    once to the storage's code. The optimizer's defaults are ``torch.optim``'s.

    Language models usually train with ``betas=(0.9, 0.95)``, ``weight_decay=0.1`` of matrices alone
    and ``max_grad_norm=1.0``, as ``narrowgauge train`` does.

    Args:
        model: a float32 model on one device, changed in place. A bfloat16 model is accepted too;
            its tails start at zero.
        recipe: a name such as ``"bfloat16/word"``, or a
            :class:`narrowgauge.Recipe`.
        optimizer: one of Narrowgauge's classes.
        groups: returns param groups from the model. It is called before and after the model is
            rounded and sharded. :func:`matrices_decay` is one such function.
        seed: seed of stochastic rounding.
        mesh: a ``DeviceMesh`` that contains this rank. The model is sharded over it, or replicated
            with ``shard="none"``. A mesh of two axes replicates a sharded model. Every rank starts
            from rank 0's values. ``None`` keeps the model whole; DistributedDataParallel may wrap
            it afterwards.
        shard: ``"full"`` or ``"none"``, with a mesh.
        offload: keep parameters, gradients and states in the host's memory, with a mesh.
        average: average gradients over the ranks of the mesh, as FSDP2 does. ``False`` adds them
            up. Use that if each loss is a micro-batch's part of the step's loss. The same bits on
            any number of ranks require it.
        options: of the optimizer: ``lr``, ``betas``, ``eps``, ``weight_decay``, ``max_grad_norm``,
            ``audit_every``, ``compile``, ``momentum`` of :class:`narrowgauge.SGD`, ….
    Returns:
        ``(model, optimizer)``: the same model and its ``torch.optim.Optimizer``. If gradients are
        summed over ranks, ``optimizer.reduction`` sums them. Put its ``micro_batch`` around each
        forward and backward pass. The ``state_dict()`` of both suffices to resume with the same
        bits. The model's is the plain model's. A float16 compute needs
        ``torch.amp.GradScaler``, whose state belongs into a checkpoint too.
    Raises:
        RecipeError: an unknown recipe or option, or a model that the recipe cannot train. The model
            is unchanged then.

    Cost: a temporary float32 copy of the weights, on every rank.

    Example:
        >>> import torch, narrowgauge as ng
        >>> model, optimizer = ng.prepare(torch.nn.Linear(16, 4), "bfloat16/word", lr=1e-3)
        >>> model(torch.ones(1, 16, dtype=torch.bfloat16)).float().sum().backward()
        >>> optimizer.step()
        >>> model.weight.dtype
        torch.bfloat16
    """
    policy = parse(recipe)
    if "storage" in options:
        raise RecipeError(
            f"Cannot use storage '{options['storage']}' beside a recipe, which has a storage.",
            "Name it in the recipe.",
        )
    require_trainable(model, policy, mesh, shard)

    def built(is_trial: bool = False) -> OptimizerT:
        model_groups = _groups(model, policy, groups, is_trial)
        return optimizer(model_groups, storage=policy.storage.name, seed=seed, **options)

    _check_groups(built(is_trial=True))  # before the model is rounded
    if mesh is not None:
        sharding.make_equal(model, mesh)
    visible = policy.storage.visible
    values = round_in_place((p for p in model.parameters() if p.is_floating_point()), visible)
    values = {p: value for p, value in values.items() if p.requires_grad}
    if policy.dtype == visible:
        cast_statistics(model, lambda statistics: rounded(statistics, visible))
    narrow_linears(model, policy, seed)
    if mesh is not None and shard != "none":
        values = _shard(model, values, mesh, offload)
    _propagate_scales(model, policy)
    compute_in_scope(model, policy)

    stepper = built()
    stepper.name_parameters(model)
    stepper.adopt(values)
    if mesh is not None or policy.reduction.name != "native":
        stepper.reduction = reduce_gradients_with(
            model, policy.reduction, average=average, mesh=mesh
        )
    stepper.scales_loss = policy.compute.scales_loss
    return model, stepper


# ── the model ─────────────────────────────────────────────────────────────────────────────────────


def _propagate_scales(model: nn.Module, recipe: Recipe) -> None:
    """Apply scale propagation if the compute has it. The linear layers are already swapped."""
    if recipe.compute.transform == "scalify":
        from narrowgauge.transforms import scalify

        scalify.scalify(
            model, getattr(torch, recipe.dtype) if recipe.storage.visible != "float32" else None
        )


def narrow_linears(model: nn.Module, recipe: Recipe, seed: int) -> NarrowLayers | None:
    """Swap the linear layers whose compute differs from PyTorch's own."""
    plain = _compute_of_torch(recipe, next(model.parameters()).device)
    roles: dict[str, str] = {}
    if not recipe.compute.is_wide:
        roles = roles_of(model, recipe.compute.keep_last, warns=True)
    narrow: dict[str, Compute] = {}
    for name in multiplied(model):
        compute = recipe.compute
        if name in roles:
            compute = COMPUTES[recipe.dtype]
        if compute.name != plain:
            narrow[name] = compute
    if narrow:
        return swap_linears(model, narrow.get, seed=seed)
    return None


def _compute_of_torch(recipe: Recipe, device: torch.device) -> str:
    """Return the compute that PyTorch's own layer implements, or ``""`` if speed or the loss scale
    needs ours.
    """
    is_slow = device.type != "cuda" and not multiplies(recipe.dtype)
    # PyTorch's own head would get unscaled gradients of its logits. They underflow in float16.
    is_scaled = bool(recipe.compute.transform) and recipe.dtype == "float16"
    is_plain = recipe.storage.visible in ("float32", recipe.dtype) and not is_slow and not is_scaled
    return recipe.dtype if is_plain else ""


def _shard(
    model: nn.Module, values: dict[Tensor, Tensor], mesh: Any, offload: bool
) -> dict[Tensor, Tensor]:
    """Shard a rounded model. Return the float32 values of this rank's shards."""
    by_name = {
        name: values[parameter]
        for name, parameter in model.named_parameters()
        if parameter in values
    }
    sharding.shard(model, mesh, offload=offload)
    return {
        p: own_part(p, by_name[name]) for name, p in model.named_parameters() if name in by_name
    }


# ── the optimizer ─────────────────────────────────────────────────────────────────────────────────


def _groups(
    model: nn.Module, recipe: Recipe, groups: Callable[[nn.Module], Groups], is_trial: bool
) -> Groups:
    """Return param groups with names and the recipe's storage.

    For a trial, use tensors of the parameters' shapes instead.
    """
    names = {parameter: plain_name(name) for name, parameter in model.named_parameters()}
    dtype = getattr(torch, recipe.storage.visible)
    results = []
    for group in groups(model):
        members = []
        for parameter in group["params"]:
            name = names[parameter]
            if is_trial:
                value = torch.zeros((), dtype=dtype, device=parameter.device)
                parameter = nn.Parameter(value.expand(parameter.shape))
            members.append((name, parameter))
        # The optimizer derives the storage of vectors from the storage of their group.
        results.append({"storage": recipe.storage.name, **group, "params": members})
    return results


def _check_groups(optimizer: Optimizer) -> None:
    """Refuse options of groups that the optimizer would never read."""
    # Muon takes options that are not among its defaults.
    allowed = {*optimizer.defaults, "params", "param_names", "storage", "rule"}
    allowed.update(inspect.signature(type(optimizer)).parameters)
    for group in optimizer.param_groups:
        unknown = sorted(set(group) - allowed)
        if unknown:
            raise RecipeError(
                f"Cannot step a group with '{unknown[0]}' because {type(optimizer).__name__} has no "
                "such option.",
                suggestion(unknown[0], allowed),
            )
