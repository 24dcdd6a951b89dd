"""``prepare`` applies a recipe to a model: it builds the optimizer, rounds the weights and swaps
layers.

The order of the steps matters. An optimizer is first built of rounded copies, so that what it
refuses leaves the model as it was. Then the model is rounded, and on many ranks sharded, since FSDP2
gathers a group of parameters in one format. At the end the optimizer is built of the model's
parameters, and takes its tails from the float32 weights.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from narrowgauge.distributed import sharding
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.reduction import reduce_gradients_with, require_summable
from narrowgauge.errors import RecipeError
from narrowgauge.matmul.kept_layers import multiplied, roles_of
from narrowgauge.matmul.swapping import swap_linears
from narrowgauge.numerics.dtensor import own_part
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.optimizers import AdamW
from narrowgauge.optim.step.parameter_formats import (
    cast_statistics,
    refuse_shared_memory,
    round_in_place,
    rounded,
)
from narrowgauge.spec.computes import COMPUTES, Compute
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.parse import parse
from narrowgauge.spec.recipes import Recipe
from narrowgauge.torch_support.machine import multiplies
from narrowgauge.torch_support.torch_names import plain_name
from narrowgauge.transforms.scalify import rules_of, scalify

OptimizerT = TypeVar("OptimizerT", bound=Optimizer, default=AdamW)


def matrices_decay(named: Iterable[tuple[str, Tensor]], **options: Any) -> AdamW:
    """Return an AdamW in which only parameters of two dims or more decay, as language models
    usually train.
    """
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in named:
        groups[parameter.ndim < 2]["params"].append((name, parameter))
    return AdamW([group for group in groups if group["params"]], **options)


def prepare(
    model: nn.Module,
    recipe: str | Recipe = "bfloat16/word",
    *,
    optimizer: Callable[..., OptimizerT] = AdamW,  # type: ignore[assignment]  # mypy compares it with the bound of OptimizerT
    seed: int = 0,
    mesh: Any = None,
    offload: bool = False,
    average: bool = True,
    **options: Any,
) -> tuple[nn.Module, OptimizerT]:
    """Prepare a float32 model for training with a recipe, on one process or on the ranks of a mesh.

    The model then computes with each weight in its visible format. The optimizer holds the
    remaining bits. Before the first step, the stored weights are the given float32 weights, rounded
    once to the storage's code. The optimizer's defaults are ``torch.optim``'s.

    Language models usually train with ``betas=(0.9, 0.95)``, ``weight_decay=0.1`` of matrices alone
    (``optimizer=matrices_decay``) and ``max_grad_norm=1.0``, as ``narrowgauge train`` does.

    Args:
        model: a float32 model on one device, changed in place. A bfloat16 model is accepted too;
            its low bits start at random.
        recipe: a name such as ``"bfloat16/word"``, or a
            :class:`narrowgauge.spec.recipes.Recipe`.
        optimizer: one of Narrowgauge's classes, or a function that makes one from named parameters,
            ``storage=``, ``seed=`` and the options. It is first called with copies, to learn what
            it refuses.
        seed: seed of stochastic rounding.
        mesh: a ``DeviceMesh`` that contains this rank. The model is sharded over it. A mesh of two
            axes replicates a sharded model. Every rank starts from rank 0's values. ``None`` keeps
            the model whole; DistributedDataParallel may wrap it afterwards.
        offload: keep parameters, gradients and states in the host's memory, with a mesh.
        average: average gradients over the ranks of the mesh, as FSDP2 does. ``False`` adds them
            up. Use that if each loss is a micro-batch's part of the step's loss. The same bits on
            any number of ranks require it.
        options: of the optimizer: ``lr``, ``betas``, ``eps``, ``weight_decay``, ``max_grad_norm``,
            ``audit_every``, ``compile``, ``momentum`` of :class:`narrowgauge.SGD`, ….
    Returns:
        ``(model, optimizer)``: the same model and its ``torch.optim.Optimizer``. Call a model with
        float32 weights and a 16-bit compute under ``torch.autocast``. With the reduction
        ``reproducible``, put ``optimizer.reduction.micro_batch`` around each forward and backward
        pass. The ``state_dict()`` of both suffices to resume with the same
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
    _require_trainable(model, policy, mesh)
    visible = policy.storage.visible
    build = partial(optimizer, storage=policy.storage.name, seed=seed, **options)
    copies = []
    for name, parameter in _trained(model).items():
        copies.append((name, nn.Parameter(rounded(parameter.detach(), visible))))
    build(copies)
    del copies

    if mesh is not None:
        sharding.make_equal(model, mesh)
    floats = [p for p in model.parameters() if p.is_floating_point()]
    before = round_in_place(dict.fromkeys(floats, visible))
    values = {name: before[parameter] for name, parameter in _trained(model).items()}
    del before
    if policy.dtype == visible:
        cast_statistics(model, getattr(torch, visible))
    _narrow_linears(model, policy, seed)
    if mesh is not None:
        wire = policy.reduction.wire
        sharding.shard(model, mesh, offload=offload, wire=wire, average=average)
    if policy.compute.transform == "scalify":
        scalify(model)

    trained = _trained(model)
    stepper = build(list(trained.items()))
    stepped = stepper.parameter_names()  # a user's function may leave some out
    stepper.adopt({p: own_part(p, values[name]) for name, p in trained.items() if p in stepped})
    if policy.reduction.order_invariant:
        stepper.reduction = reduce_gradients_with(model, average=average)
    stepper.scales_loss = policy.compute.scales_loss
    return model, stepper


def _require_trainable(model: nn.Module, recipe: Recipe, mesh: Any) -> None:
    """Refuse a model that a recipe cannot train, in what its optimizer does not refuse."""
    this = f"this {type(model).__name__} by recipe '{recipe.name}'"
    if isinstance(model, nn.parallel.DistributedDataParallel) or sharding.has_shards(model):
        raise RecipeError(
            f"Cannot prepare {this} because fully_shard, parallelize_module or "
            "DistributedDataParallel has taken its parameters already.",
            "Prepare the model first: mesh=… shards it, and DistributedDataParallel may wrap it "
            "then. Or leave it as it is, and "
            "take ng.swap_linears, ng.AdamW and ng.reduce_gradients_with.",
        )
    visible = recipe.storage.visible
    if visible not in ("float32", recipe.dtype):
        raise RecipeError(
            f"Cannot train by recipe '{recipe.name}' because it computes in {recipe.dtype} with "
            f"{visible} weights, and autocast casts from float32 alone.",
            f"Take a compute in {visible}, or the storage 'float32'.",
        )
    for name, parameter in model.named_parameters():
        is_known = parameter.dtype in (torch.float32, getattr(torch, visible))
        if parameter.requires_grad and not is_known:
            raise RecipeError(
                f"Cannot train '{name}' of {this} because it is {dtype_name(parameter.dtype)}.",
                "Call model.float() first.",
            )
    refuse_shared_memory(_trained(model).values())
    if recipe.reduction.order_invariant:
        require_summable(model)
    if recipe.compute.transform == "scalify":
        rules_of(model)
    if mesh is not None:
        sharding.require_mesh(mesh)
    elif recipe.reduction.name != "native" and all_ranks().size > 1:
        raise RecipeError(
            f"Cannot sum gradients over ranks by recipe '{recipe.name}' alone.",
            "Pass mesh=init_device_mesh(…). To keep the model whole on every rank, take a recipe "
            "without a reduction, and ng.reduce_gradients_with or DistributedDataParallel.",
        )


def compute_scope(recipe: Recipe, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a model computes in the recipe's dtype: ``torch.autocast`` where
    float32 weights meet a 16-bit compute, else none.
    """
    if recipe.storage.visible != "float32" or recipe.dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, recipe.dtype))


def _trained(model: nn.Module) -> dict[str, Tensor]:
    """Return the trained parameters by their plain names."""
    return {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}


def _narrow_linears(model: nn.Module, recipe: Recipe, seed: int) -> None:
    """Swap the linear layers whose compute differs from PyTorch's own."""
    is_slow = next(model.parameters()).device.type != "cuda" and not multiplies(recipe.dtype)
    # PyTorch's own head would get unscaled gradients of its logits. They underflow in float16.
    is_scaled = bool(recipe.compute.transform) and recipe.dtype == "float16"
    wide = COMPUTES[recipe.dtype] if is_slow or is_scaled else None
    compute = recipe.compute if recipe.compute.name != recipe.dtype else wide
    roles = {}
    if not recipe.compute.is_wide:
        roles = roles_of(model, recipe.compute.keep_last, warns=True)

    def choose(name: str) -> Compute | None:
        return wide if name in roles else compute

    if any(choose(name) for name in multiplied(model)):
        swap_linears(model, choose, seed=seed)
