"""``prepare`` applies a recipe to a model: it swaps layers, rounds the weights and builds the optimizer.

The trainer and the integrations call it as any loop does. Lightning wraps the model before it asks for an optimizer, so its
plugin calls the two halves, :func:`convert_model` and :func:`optimizer_for`.

The order of the steps matters. Unit scaling redraws the weights, so it comes first. The optimizer takes its tails from the
float32 weights *before* they are rounded, and its parameter groups from the parameters *after*. On many ranks the rounded
model is sharded in between, since FSDP2 gathers a group of parameters in one format. Propagated scales, autocast and the casts
of :mod:`narrowgauge.matmul.scopes` come last.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from narrowgauge.assembly.amax_sync import sync_amax_before_steps
from narrowgauge.assembly.parameter_rounding import round_parameters
from narrowgauge.assembly.resumption import carry_state
from narrowgauge.assembly.trainable import require_contiguous, require_summable, require_trainable
from narrowgauge.distributed import sharding
from narrowgauge.distributed.reduction import inner_of, reduce_gradients_with
from narrowgauge.distributed.sharding import has_shards, make_equal, require_mesh, settle
from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.machine.processor import multiplies
from narrowgauge.matmul.narrow_gather import gather_narrow
from narrowgauge.matmul.scopes import compute_in_scope
from narrowgauge.matmul.swapping import NarrowLayers, keep_ranks_apart, linear_names, swap_linears
from narrowgauge.numerics.scaling import LossScaler
from narrowgauge.numerics.shards import own_part
from narrowgauge.optim import optimizers
from narrowgauge.optim.optimizer import Optimizer, Options
from narrowgauge.optim.optimizers import AdamW
from narrowgauge.optim.validation import HOW_TORCH_STEPS
from narrowgauge.spec.computes import Compute
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.update_rules import get_rule

Made = TypeVar("Made", bound=Optimizer, default=AdamW)


def is_any(name: str, parameter: Tensor) -> bool:
    """True: every parameter is decayed, as in ``torch.optim``."""
    return True


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter has two dims or more: what language models decay."""
    return parameter.ndim >= 2


def no_options(name: str) -> Mapping[str, Any]:
    """No options of its own: every parameter is stepped with the optimizer's."""
    return {}


def outer_names(model: nn.Module) -> set[str]:
    """Names of the embeddings and of the output head: matrices by shape, of which each row is a token or a position.

    Matrix rules are meant for the matrices between them; give these ``{"rule": "adamw"}`` in ``options_of``.

    Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks".
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    outer = [module for module in model.modules() if isinstance(module, nn.Embedding) or module is head]
    members = {parameter for module in outer for parameter in module.parameters()}
    return {name for name, parameter in model.named_parameters() if parameter in members}


def class_of(rule: str) -> type[Any]:
    """The class of optimizer that has the rule of that name.

    Raises:
        RecipeError: no rule has it.
    """
    found: type[Any] = getattr(optimizers, get_rule(rule).optimizer)
    return found


def prepare(
    model: nn.Module,
    recipe: str | Path | Recipe = "bfloat16/word",
    *,
    optimizer: Callable[..., Made] = AdamW,  # type: ignore[assignment]  # mypy compares it with the bound of Made
    rule: str | None = None,
    lr: float | Tensor | None = None,
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    weight_decay: float | None = None,
    decays: Callable[[str, Tensor], bool] = is_any,
    options_of: Callable[[str], Mapping[str, Any]] = no_options,
    max_grad_norm: float | None = None,
    seed: int = 0,
    audit_every: int = 10,
    compile: bool | None = None,
    loss_scaler: LossScaler | None = None,
    mesh: Any = None,
    shard: str = "full",
    offload: bool = False,
    narrow_gather: bool = False,
    average: bool = True,
    **options: Any,
) -> tuple[nn.Module, Made]:
    """Prepare a float32 model for training with a recipe, on one process or on the ranks of a mesh.

    Invariant: the model computes with each weight in its visible format, and the optimizer holds the remaining bits. Before
    the first step, the stored weights are the given float32 weights, rounded once to the storage's code.

    The defaults are those of ``torch.optim.AdamW``: a loop that changes to ``prepare`` changes its formats, and nothing else.
    A :class:`DifferenceNotice` says once what still differs: learning rates that a compute multiplies, and a ``beta2`` at which
    a storage's second moments no longer fall. Language models are mostly trained with ``betas=(0.9, 0.95)``,
    ``weight_decay=0.1`` of matrices alone and ``max_grad_norm=1.0``, as ``narrowgauge train`` does.

    Args:
        model: a float32 model on one device, changed in place. A bfloat16 model is accepted too; its tails start at zero,
            since bits that were rounded away earlier cannot be recovered.
        recipe: a name such as ``"bfloat16/word"``, a ``.toml`` file, or a :class:`narrowgauge.Recipe`.
        optimizer: one of Narrowgauge's classes.
        rule: or its name in ``narrowgauge show rules``, such as ``"muon"``, with the class's own defaults. (A type checker takes
            the result for an AdamW then: give the class where that matters.)
        lr, betas, eps, weight_decay: of the optimizer; its own defaults if ``None``, for AdamW those of
            ``torch.optim.AdamW``: 1e-3, (0.9, 0.999), 1e-8 and a decoupled decay of 0.01.
        decays: whether a parameter is decayed, by its name and itself; by default all are, as in PyTorch. For matrices alone:
            ``decays=lambda name, parameter: parameter.ndim >= 2``.
        options_of: the options of a parameter that differ from the optimizer's, by its name: ``{"lr": 1e-4}``, or
            ``{"rule": "adamw"}`` where the optimizer has a matrix rule.
        max_grad_norm: clip the gradient norm to this value and skip steps with non-finite gradients; ``None`` does neither.
            PyTorch's ``clip_grad_norm_`` refuses a model with shards beside parameters that stay whole (``keep``).
        seed: of stochastic rounding.
        audit_every: steps between audits; 0 disables them.
        compile: compile the optimizer's kernels; ``None`` decides by model size.
        loss_scaler: ``None`` makes one where the compute is float16. It becomes ``optimizer.loss_scaler``: pass the loss
            through its ``scale`` before ``backward()``.
        mesh: a ``DeviceMesh`` over which the model is sharded, or replicated with ``shard="none"``; of two axes for replicas
            of a sharded model. Every rank starts from the values of the first. ``None`` leaves a model as it is: whole, or
            sharded by the caller, who may have run it. Its parameters stay the same objects.
        shard: ``"full"`` or ``"none"``, with a mesh.
        offload: keep parameters, gradients and states in the host's memory, with a mesh.
        narrow_gather: gather weights as the codes that their matmuls take, where the compute allows it (``narrowgauge show
            gathers``): half of bfloat16's bytes, the same bits. With a mesh, or a model sharded by the caller.
        average: average gradients over the ranks, as FSDP2 and DDP do. ``False`` adds them up, for losses that are a
            micro-batch's share of the step's: needed for the same bits on any number of ranks.
        options: further options of the optimizer, such as ``momentum`` of :class:`narrowgauge.SGD`.
    Returns:
        ``(model, optimizer)``: the same model and its ``torch.optim.Optimizer``. If something sums gradients over ranks, it is
        the optimizer's ``reduction``: in a step with several micro-batches its ``micro_batch`` surrounds each backward pass.
        To resume with the same bits, the model's and the optimizer's ``state_dict()`` suffice; the model's is that of the
        plain model.
    Raises:
        RecipeError: an unknown recipe or rule; a rule beside an optimizer; a ``keep`` pattern or override that matches
            nothing, or only one name of a tied parameter; a model of another dtype, without trainable parameters, or with
            sparse gradients; a batch norm or a group of shards that would mix dtypes; a mesh for a sharded model, or a
            float32 parameter to be sharded that is not contiguous; narrow gathers that no layer allows, or of a recipe
            whose compute changes; with an order-invariant reduction, a batch norm or dropout. What else a loop may not do
            with such a reduction is refused as it happens: see :func:`~narrowgauge.reduce_gradients_with`.

    Cost: a temporary float32 copy of the weights, on every rank.

    Example:
        >>> import torch, narrowgauge as ng
        >>> model, optimizer = ng.prepare(torch.nn.Linear(16, 4), "bfloat16/word", lr=1e-3)
        >>> model(torch.ones(1, 16, dtype=torch.bfloat16)).float().sum().backward()
        >>> optimizer.step()
        >>> model.weight.dtype
        torch.bfloat16
    """
    if rule is not None:
        if optimizer is not AdamW:
            raise RecipeError(
                f"rule = '{rule}' was requested beside an optimizer, which has a rule.", "Give one of the two."
            )
        optimizer = class_of(rule)
    _require_maker(optimizer)
    settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    named = {name: value for name, value in settings.items() if value is not None}
    _require_options(optimizer, {**named, **options})
    policy, inner = parse(recipe), inner_of(model)
    require_summable(model, policy, mesh)
    converted = convert_model(inner, policy, seed=seed, mesh=mesh, shard=shard, offload=offload)
    made = optimizer_for(
        converted,
        optimizer,
        decays=decays,
        options_of=options_of,
        max_grad_norm=max_grad_norm,
        seed=seed,
        audit_every=audit_every,
        compile=compile,
        loss_scaler=loss_scaler,
        **named,
        **options,
    )
    if narrow_gather:
        _gather_narrow(inner, policy)
    # FSDP2 and DDP average by themselves, and add up nothing.
    adds_up = not average and (inner is not model or has_shards(inner))
    if mesh is not None or policy.reduction.name != "native" or adds_up:
        made.reduction = reduce_gradients_with(model, policy.reduction, average=average, seed=seed, mesh=mesh)
    sync_amax_before_steps(inner, made)
    carry_state(made, inner)
    say_what_differs(made, policy)
    return model, made


def _require_options(optimizer: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuse options that one of the named optimizers does not have, before the model is changed."""
    if getattr(optimizers, getattr(optimizer, "__name__", ""), None) is not optimizer:
        return  # of another's, only its maker knows
    named = inspect.signature(optimizer).parameters.values()
    known = [*(one.name for one in named if one.kind is not one.VAR_KEYWORD), *Options.__annotations__]
    for name in given:
        if name not in known:
            raise RecipeError(
                f"{name} = {given[name]!r} was requested of {optimizer.__name__}, which has no such option.",
                suggestion(name, known) or "Leave it out.",
            )


class DifferenceNotice(UserWarning):
    """Says once how an optimizer differs from ``torch.optim.AdamW`` with the same options."""


_SAID: set[str] = set()


def say_what_differs(optimizer: Optimizer, recipe: Recipe) -> None:
    """Warn, once per process, of how a recipe's optimizer differs from ``torch.optim.AdamW`` with the same options."""
    for text in _differences(optimizer, recipe):
        if text not in _SAID:
            _SAID.add(text)
            warnings.warn(text, DifferenceNotice, stacklevel=3)


def _differences(optimizer: Optimizer, recipe: Recipe) -> Iterator[str]:
    if any("lr_factor" in group for group in optimizer.param_groups):
        yield (
            f"recipe '{recipe.name}' multiplies the learning rate of each parameter by a factor of its shape, and decays weights "
            f"as at a rate of {_DECAYED_AT:g}, whatever the rate: torch.optim.AdamW does neither."
        )
    for group in optimizer.param_groups:
        row = optimizer.rows[group["storage"]]
        beta2 = group["betas"][1] if "betas" in group else 0.0
        if row.highest_beta2 is not None and float(beta2) > row.highest_beta2:
            yield (
                f"beta2 = {float(beta2):g} moves the second moments of storage '{row.name}' by less than half a spacing: they "
                f"are rounded to {row.exp_avg_sq.mantissa_bits} mantissa bits and do not fall again. Take a beta2 below "
                f"{row.highest_beta2:.4g}, such as betas=(0.9, 0.95), or storage '{row.fallback}', which does not freeze."
            )
            return


@dataclass(frozen=True, slots=True, eq=False)
class Converted:
    """A model that computes as a recipe says and has no optimizer yet.

    Attributes:
        values: the float32 weights of what is trained (of a shard, this rank's), before they were rounded.
        factors: learning-rate factors by parameter name, where the compute has them.
    """

    model: nn.Module
    recipe: Recipe
    values: dict[Tensor, Tensor]
    factors: dict[str, float]
    linears: NarrowLayers | None


def convert_model(
    model: nn.Module, recipe: Recipe, *, seed: int = 0, mesh: Any = None, shard: str = "full", offload: bool = False
) -> Converted:
    """The first half of :func:`prepare`, which needs no optimizer; :func:`optimizer_for` is the second."""
    settle(model)
    require_trainable(model, recipe)
    if mesh is not None:
        require_mesh(model, mesh, shard)
        if shard == "full":
            require_contiguous(model, recipe)
        make_equal(model, mesh)
    factors = _rebuild(model, recipe, seed)
    values = round_parameters(model, recipe)
    if recipe.dtype == "float64":
        _widen_buffers(model)
    narrow = narrow_linears(model, recipe, seed)
    keep_ranks_apart(model)
    if mesh is not None:
        values = _shard(model, values, mesh, shard, offload)
    _propagate_scales(model, recipe)
    compute_in_scope(model, recipe)
    return Converted(model, recipe, values, factors, narrow)


def optimizer_for(
    converted: Converted,
    optimizer_class: Callable[..., Made] = AdamW,  # type: ignore[assignment]  # as for prepare
    *,
    seed: int = 0,
    loss_scaler: LossScaler | None = None,
    decays: Callable[[str, Tensor], bool] = is_any,
    options_of: Callable[[str], Mapping[str, Any]] = no_options,
    **options: Any,
) -> Made:
    """The second half of :func:`prepare`: the optimizer of a converted model, whose float32 values it takes over.

    ``options`` are the optimizer's, ``lr`` and ``weight_decay`` among them; its own defaults where left out.
    """
    policy = converted.recipe
    if "storage" in options:
        raise RecipeError(
            f"storage '{options['storage']}' was requested beside recipe '{policy.name}', which says how everything is stored.",
            "Leave it out, or name it in the recipe.",
        )
    options = {**{name: _default_of(optimizer_class, name) for name in ("lr", "weight_decay")}, **options}
    groups = _groups(converted, options, decays, options_of)
    given = [(group["params"][0][0], set(group)) for group in groups]
    optimizer = optimizer_class(
        groups,
        storage=policy.storage,
        seed=seed,
        loss_scaler=(loss_scaler or LossScaler()) if scales_loss(policy) else loss_scaler,
        **options,
    )
    if not isinstance(optimizer, Optimizer):
        raise _no_optimizer(type(optimizer).__name__)
    _require_known(given, optimizer)
    optimizer.name_parameters(converted.model)
    optimizer.adopt(converted.values)
    if converted.linears:
        converted.linears.follow(optimizer)
    return optimizer


def scales_loss(recipe: Recipe) -> bool:
    """Whether a recipe's loss must be scaled: one of its computes is float16."""
    return any(compute.scales_loss for compute in recipe.computes)


def narrow_linears(model: nn.Module, recipe: Recipe, seed: int) -> NarrowLayers | None:
    """Swap the linear layers whose compute differs from PyTorch's own, in any phase or in evaluation."""
    device = next(model.parameters()).device
    moments = [0.0, *(phase.until for phase in recipe.phases)]
    wanted: dict[str, Compute] = {}
    for name in linear_names(model):
        needed = {each.compute_of(name, at).name for each in (recipe, recipe.in_evaluation) for at in moments}
        if needed != {_compute_of_torch(recipe, name, device)}:
            wanted[name] = recipe.compute_of(name, 0.0)
    return swap_linears(model, wanted.get, seed=seed) if wanted else None


def _gather_narrow(model: nn.Module, recipe: Recipe) -> None:
    """Gather weights as codes, unless their compute changes."""
    if recipe.changes_compute:
        raise RecipeError(
            f"narrow gathers were requested of recipe '{recipe.name}', which changes its compute, and weights are gathered as "
            "the codes of one.",
            "Leave out the narrow gathers, or the phases and the compute of evaluation.",
        )
    gather_narrow(model)


def _compute_of_torch(recipe: Recipe, name: str, device: torch.device) -> str:
    """The compute that PyTorch's own layer implements, or ``""`` where ours is needed for speed or for the loss scale."""
    if recipe.keeps(name):
        return "float32"
    is_slow = device.type != "cuda" and not multiplies(recipe.dtype)
    # PyTorch's own head would receive unscaled gradients of its logits, which underflow in float16.
    is_scaled = bool(recipe.compute.transform) and recipe.dtype == "float16"
    is_plain = recipe.storage.visible in ("float32", recipe.dtype) and not is_slow and not is_scaled
    return recipe.dtype if is_plain else ""


def _rebuild(model: nn.Module, recipe: Recipe, seed: int) -> dict[str, float]:
    """Redraw the weights for unit scaling; returns the learning-rate factor of each parameter."""
    if recipe.compute.transform != "unit":
        return {}
    # Imported here since it imports transformers, which takes seconds.
    from narrowgauge.transforms import unit_scaling

    unit_scaling.unit_scale(model, seed)
    return unit_scaling.learning_rate_factors(model)


def _widen_buffers(model: nn.Module) -> None:
    """Take a model's floating-point buffers to float64."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                module._buffers[name] = buffer.double()


def _propagate_scales(model: nn.Module, recipe: Recipe) -> None:
    """Apply scale propagation where the compute has it; the linear layers have been swapped by now."""
    if recipe.compute.transform == "scalify":
        from narrowgauge.transforms import scalify

        scalify.scalify(model, getattr(torch, recipe.dtype) if recipe.storage.visible != "float32" else None)


def _shard(model: nn.Module, values: dict[Tensor, Tensor], mesh: Any, how: str, offload: bool) -> dict[Tensor, Tensor]:
    """Shard a rounded model; returns the float32 values of what this rank holds of its trainable parameters."""
    if how == "none":
        return values
    of_name = {name: values[parameter] for name, parameter in model.named_parameters() if parameter in values}
    sharding.shard(model, mesh, offload=offload)
    return {p: own_part(p, of_name[name]) for name, p in model.named_parameters() if name in of_name}


def _require_maker(optimizer: object) -> None:
    """Refuse what makes no optimizer of this package, before the model is changed."""
    if not callable(optimizer) or (isinstance(optimizer, type) and not issubclass(optimizer, Optimizer)):
        made = optimizer if isinstance(optimizer, type) else type(optimizer)
        raise _no_optimizer(f"{made.__module__}.{made.__qualname__}")


def _no_optimizer(found: str) -> RecipeError:
    return RecipeError(
        f"optimizer is {found}, which is no optimizer of narrowgauge.", "Take a class such as ng.AdamW or ng.SGD."
    )


def _default_of(optimizer: Callable[..., Any], name: str) -> Any:
    """An option's default: that of the nearest class which declares it; AdamW's where none does."""
    classes = [vars(base).get("__init__") for base in optimizer.__mro__] if isinstance(optimizer, type) else [optimizer]
    for made_by in (*classes, AdamW):
        try:
            declared = inspect.signature(made_by).parameters if callable(made_by) else {}
        except ValueError:  # of a callable in C
            continue
        if name in declared and declared[name].default is not inspect.Parameter.empty:
            return declared[name].default
    raise AssertionError(name)


def _own_options(name: str, options_of: Callable[[str], Mapping[str, Any]]) -> dict[str, Any]:
    """A parameter's own options; refuses those that its recipe or its group decides."""
    own = options_of(name)
    if not isinstance(own, Mapping):
        raise RecipeError(f"options_of gave {own!r} for '{name}'; it must give a dict.", "Give {} for no options.")
    if "storage" in own:
        raise RecipeError(
            f"options_of gave a storage for '{name}', and the recipe says how everything is stored.",
            "Name the storage in an override of the recipe.",
        )
    if "params" in own:
        raise RecipeError(f"options_of gave params for '{name}', which is one parameter.", "Leave params out.")
    return dict(own)


def _require_known(given: list[tuple[str, set[str]]], optimizer: Optimizer) -> None:
    """Refuse options of parameters that an optimizer would never read."""
    known = {*optimizer.defaults, *_KNOWN}
    for name, options in given:
        if strange := sorted(map(str, options - known)):
            raise RecipeError(
                f"options_of gave '{strange[0]}' for '{name}', which {type(optimizer).__name__} does not have.",
                suggestion(strange[0], known - _INTERNAL),
            )


_INTERNAL = {"params", "param_names", "storage", "lr_factor"}
_KNOWN = {*_INTERNAL, *HOW_TORCH_STEPS, "rule", "initial_lr", "amsgrad", "decoupled_weight_decay"}


def _are_equal(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether options are equal; a tensor, which may change, is equal to itself alone."""

    def same(a: Any, b: Any) -> bool:
        return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and bool(a == b))

    return mine.keys() == theirs.keys() and all(same(mine[name], theirs[name]) for name in mine)


# The learning rate at which weight decay has the same strength in a unit-scaled model as in any other.
_DECAYED_AT = 1e-3


def _groups(
    converted: Converted,
    whole: Mapping[str, Any],
    decays: Callable[[str, Tensor], bool],
    options_of: Callable[[str], Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Named parameter groups by storage, weight decay, learning-rate factor and options of their own.

    ``whole`` has the optimizer's ``lr`` and ``weight_decay``.
    """
    groups: list[tuple[tuple[Any, ...], dict[str, Any], list[tuple[str, Tensor]]]] = []
    for name, parameter in converted.model.named_parameters():
        if parameter.requires_grad:
            # The optimizer derives the storage of vectors from the storage of their group.
            storage = converted.recipe.storage_of(name, max(2, parameter.ndim))
            factor = converted.factors.get(name, 1.0)
            own = _own_options(name, options_of)
            key = (storage, decays(name, parameter), factor)
            alike = (members for others, theirs, members in groups if others == key and _are_equal(theirs, own))
            members = next(alike, None)
            if members is None:
                groups.append((key, own, members := []))
            members.append((name, parameter))
    made = []
    for (storage, decayed, factor), own, members in groups:
        options = {**whole, **own}
        decay = options["weight_decay"] if decayed else 0.0
        group: dict[str, Any] = {"params": members, **own, "storage": storage, "weight_decay": decay}
        if converted.factors:
            # Weight decay independent of the learning rate: as strong as at 1e-3.
            rate = options["lr"] * factor
            group |= {"lr": rate, "lr_factor": factor, "weight_decay": float(decay * _DECAYED_AT / rate)}
        made.append(group)
    return made
