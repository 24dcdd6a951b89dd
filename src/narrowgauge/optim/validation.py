"""Checks of the optimizer: options out of range, parameters and gradients in the wrong format.

The options of a rule are checked when a param group is added, loaded and stepped.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.numerics.dtensor import is_sharded, local_of
from narrowgauge.numerics.hashing import step_seed
from narrowgauge.optim.low_bits import LOW_BITS
from narrowgauge.optim.parameter_formats import is_shared_by_ranks
from narrowgauge.optim.rules.elementwise import ADAMW
from narrowgauge.optim.rules.matrix import AnyRule, MatrixRule
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.storages import STORAGES, Storage
from narrowgauge.spec.update_rules import UPDATE_RULES
from narrowgauge.spec.values import require_number
from narrowgauge.torch_support.torch_names import default_store, is_captured

FLAGS = ("amsgrad", "differentiable", "capturable")
"""Options of ``torch.optim`` that no param group here has. They may be false or ``None``."""
HOW_TO_RUN = ("fused", "foreach")
"""Options of ``torch.optim`` for what is done anyway."""
_OF_THE_OPTIMIZER = ("max_grad_norm", "audit_every", "compile")


def check_options(options: Mapping[str, Any], rule: AnyRule) -> None:
    """Refuse options (of a group, or defaults) that are out of range or that the rule cannot obey."""
    for name in _OF_THE_OPTIMIZER:
        if name in options:
            advice = "Pass it to the optimizer."
            if name == "max_grad_norm":
                advice += " With ZeroRedundancyOptimizer call torch.nn.utils.clip_grad_norm_."
            raise RecipeError(
                f"Cannot set {name} = {options[name]} in a param group because it applies to all "
                "groups.",
                advice,
            )
    if options.get("low_bits", "random") not in LOW_BITS:
        raise RecipeError(
            f"Cannot begin with low_bits = {options['low_bits']!r}.", "Take 'zero' or 'random'."
        )
    check_step(options, rule)
    if "lr" in options and rule.name in UPDATE_RULES:
        require_number("lr", options["lr"])


def check_step(options: Mapping[str, Any], rule: AnyRule) -> None:
    """Refuse options out of range, before every step.

    A negative ``lr`` passes: a schedule may end slightly below 0.
    """
    if options.get("maximize"):
        raise RecipeError(
            "Cannot set maximize = True in a param group because it applies to all groups.",
            "Pass maximize=True to the optimizer.",
        )
    for name in FLAGS:
        if options.get(name):
            raise RecipeError(
                f"Cannot obey {name} = {options[name]}: this optimizer does not have it.",
                "Leave it out.",
            )
    allowed = [rule.name]
    if isinstance(rule, MatrixRule):
        allowed.append(ADAMW.name)
    if options.get("rule", rule.name) not in allowed:
        raise RecipeError(
            f"Cannot step a param group by rule = {options['rule']!r} because the optimizer's rule is "
            f"'{rule.name}': a group may have {' or '.join(map(repr, allowed))}.",
            suggestion(str(options["rule"]).lower(), allowed)
            or "Build another optimizer for these parameters.",
        )
    if "lr" in options:
        require_number("lr", options["lr"], -math.inf, is_open=True)
    row = UPDATE_RULES.get(rule.name)  # a user's rule checks its own options
    if row is None:
        return
    for name in row.option_names:
        if name in options and name != "lr":
            row.check(name, options[name])


def check_vectors(group: Mapping[str, Any], rule: AnyRule) -> None:
    """Refuse vectors that AdamW would step at a rate of Muon's, tens of times too large."""
    has_one_rate = group.get("adjust_lr_fn") == "match_rms_adamw"
    if rule.name != "muon" or group.get("rule") == ADAMW.name or has_one_rate:
        return
    for parameter in group["params"]:
        if parameter.requires_grad and parameter.ndim < 2:
            raise RecipeError(
                f"Cannot step a parameter of shape {tuple(parameter.shape)} by Muon because it is "
                "no matrix.",
                "Give vectors a group of their own: {'params': vectors, 'rule': 'adamw', 'lr': "
                "3e-4}. Or set adjust_lr_fn='match_rms_adamw': one rate of AdamW serves both then.",
            )


def check_one_device(parameters: Iterable[Tensor]) -> torch.device:
    """Return the device of all parameters of a step. Refuse several devices."""
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        raise RecipeError(
            f"Cannot step parameters on {' and '.join(sorted(map(str, devices)))} together.",
            "Make an optimizer for the parameters of each device.",
        )
    return devices.pop()


def refuse_capture() -> None:
    """Refuse a CUDA graph: each replay would repeat a step's numbers and random bits."""
    if is_captured():
        raise RecipeError(
            "Cannot step while a CUDA graph is captured: each replay would repeat this step's "
            "learning rate and random bits.",
            "Capture the forward and backward passes alone, and call step() after each replay.",
        )


# ── storages, parameters and gradients ────────────────────────────────────────────────────────────


def known_row(storage: object) -> Storage:
    """Return the row of a name."""
    name = storage if isinstance(storage, str) else ""
    row = STORAGES.get(name)
    if row is None:
        near = suggestion(name, STORAGES)
        last = name.rpartition("/")[2]
        if last in STORAGES:
            near = f"A recipe is a compute and a storage; the storage is '{last}'."
        raise RecipeError(
            f"no storage is named {storage!r}.",
            f"{near} (narrowgauge show storages lists all.)".strip(),
        )
    return row


def check_bounded(rule: AnyRule, storage: Storage) -> None:
    """Refuse a rule whose new states the largest magnitudes of a row do not bound, where states
    have scales by row.
    """
    if storage.scaled and not isinstance(rule, MatrixRule) and not rule.monotone:
        raise RecipeError(
            f"Cannot step rule '{rule.name}' in storage '{storage.name}' because its states have "
            "scales by row, and the rule "
            "does not say that it is monotone.",
            "Take a storage such as 'word' or 'exact', or Rule(…, monotone=True) if larger "
            "gradients and states always give "
            "larger new states.",
        )


def check_visible(parameter: Tensor, storage: Storage, requested: str) -> None:
    """Refuse a parameter that is not in the storage's visible format."""
    if parameter.dtype is not getattr(torch, storage.visible):
        advice = "Leave it to an optimizer of torch.optim: no storage holds it."
        if parameter.dtype is torch.float64:
            advice = (
                "Call model.float(). Storage 'float64' then keeps masters and moments in float64."
            )
        elif parameter.dtype in (torch.bfloat16, torch.float16):
            advice = "'word', 'exact' and others take it, in a param group of its own if other weights differ."
        raise RecipeError(
            f"storage '{requested}' holds {storage.visible} weights, and a parameter of shape "
            f"{tuple(parameter.shape)} is {dtype_name(parameter.dtype)}.",
            advice,
        )


def check_seeds(groups: Sequence[Mapping[str, Any]], names: Mapping[Tensor, str]) -> None:
    """Refuse a seed that differs from the seed of another rank's optimizer of equal parameters.

    The ranks compare in the store where they met, so none waits for another.
    """
    if not is_shared_by_ranks() or torch.distributed.get_world_size() == 1:
        return
    members = [(name, tuple(parameter.shape)) for parameter, name in names.items()]
    key = f"narrowgauge/{hashlib.sha256(repr(members).encode()).hexdigest()}"
    store = default_store()
    number = store.add(f"{key}/{torch.distributed.get_rank()}", 1)  # of such optimizers
    seeds = str([step_seed(group["seed"], 0) for group in groups])
    if store.compare_set(f"{key}/seeds/{number}", "", seeds).decode() != seeds:
        raise RecipeError(
            f"Cannot step with seed = {groups[0]['seed']} because another rank, which has the same "
            "parameters, has another seed: their weights would differ.",
            "Pass the same seed= on every rank.",
        )


def check_real(parameter: Tensor) -> None:
    """Refuse a parameter without values."""
    if nn.parameter.is_lazy(parameter):
        raise RecipeError(
            "Cannot store a parameter of a lazy module because its shape is not known yet.",
            "Pass a batch through the model first, and build the optimizer after.",
        )
    if parameter.is_meta:
        raise RecipeError(
            f"Cannot store a parameter of shape {tuple(parameter.shape)} because it is on the meta "
            "device.",
            "Give the model its memory (to_empty) and values first, and build the optimizer after.",
        )


def check_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Refuse a gradient that no kernel takes."""
    if gradient.is_sparse:
        raise RecipeError(
            "Cannot step because a gradient is sparse.", "Build the embedding with sparse=False."
        )
    if is_sharded(gradient) != is_sharded(parameter):
        raise RecipeError(
            f"Cannot step because a parameter of shape {tuple(parameter.shape)} or its gradient is "
            "a DTensor, and the other "
            "is not.",
            "Give both the same mesh and placements: parallelize_module or distribute_tensor.",
        )
    if gradient.shape != parameter.shape:  # autograd keeps both equal until .data is another tensor
        raise RecipeError(
            f"Cannot step because a gradient has the shape {tuple(gradient.shape)}, and its "
            "parameter "
            f"{tuple(parameter.shape)}.",
            "Drop the gradients (zero_grad) when a parameter is resized.",
        )


def refuse_unscaled(gradients: Iterable[Tensor]) -> None:
    """Refuse float16's gradients of a loss that nobody scaled.

    Distributed checkpoints make a state by a step with zero gradients, which have any scale.
    """
    if any(bool(local_of(gradient).any()) for gradient in gradients):
        raise RecipeError(
            "Cannot step because nobody scaled the loss, and small gradients are zero in float16.",
            "Make scaler = torch.amp.GradScaler(device), and call scaler.scale(loss).backward(), "
            "scaler.step(optimizer), scaler.update(). Or take a bfloat16 recipe.",
        )


# ── states and their parameters ───────────────────────────────────────────────────────────────────


def check_members(names: Mapping[Tensor, str], states: Mapping[Any, object]) -> None:
    """Refuse states of other parameters than the optimizer's, and name parameters without a
    gradient. Call it before the first step.
    """
    if any(isinstance(parameter, Tensor) and parameter not in names for parameter in states):
        raise RecipeError(
            "Cannot step because other parameters took the place of those that have states.",
            "After accelerator.prepare call "
            "narrowgauge.integrations.accelerate.pass_states_on(optimizer).",
        )
    idle = []
    for parameter, name in names.items():
        has_gradient = parameter.grad is not None or hasattr(parameter, "main_grad")
        if parameter.requires_grad and not has_gradient:
            idle.append(name)
    if idle:
        listed = ", ".join(map(repr, idle[:3]))
        more = f" and {len(idle) - 3} more" if len(idle) > 3 else ""
        warnings.warn(
            f"The first step has no gradient of {listed}{more}. If the model has other parameters "
            "by now (fully_shard, resize_token_embeddings), make the optimizer after that.",
            stacklevel=2,
        )


def sizes_of(groups: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return the number of parameters of each param group."""
    return [len(group["params"]) for group in groups]


def agree(groups: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]], rule: AnyRule) -> None:
    """Refuse saved param groups of other sizes, storages or rules."""
    if sizes_of(saved) != sizes_of(groups):
        raise ValueError(
            "loaded state dict has parameter groups of other sizes than the optimizer's"
        )
    row = UPDATE_RULES.get(rule.name)
    names = row.option_names if row else ()
    for mine, theirs in zip(groups, saved, strict=True):
        if theirs["storage"] != mine["storage"]:
            raise RecipeError(
                f"Cannot load a state of storage '{theirs['storage']}' into an optimizer of "
                f"storage '{mine['storage']}'.",
                "Build the optimizer with the storage of the state, or load "
                "ng.to_torch_state(old), beside ng.full_weights(model, old).",
            )
        missing = sorted(mine.keys() & set(names) - theirs.keys())
        if missing:
            raise RecipeError(
                f"Cannot load a state without the option '{missing[0]}'.",
                "Save it by this version.",
            )
        ours = mine.get("param_names", ())
        saved_names = theirs.get("param_names", ())
        if list(ours) != list(saved_names) and sorted(ours) == sorted(saved_names):
            raise RecipeError(
                "Cannot load a state of the same parameters in another order.",
                "Take the state's order.",
            )
        check_options(theirs, rule)
