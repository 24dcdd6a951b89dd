"""Checks of the optimizer: options out of range, parameters on several devices, seeds that differ
between ranks, states of other parameters.

The options of a rule are checked when a param group is added or loaded, and at the step after a
script has set them.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError, suggestion, suggestion_or_all, warn_caller
from narrowgauge.numerics.hashing import step_seed
from narrowgauge.optim.low_bits import LOW_BITS
from narrowgauge.optim.rules.elementwise import ADAMW, Options
from narrowgauge.optim.rules.matrix import AnyRule, MatrixRule
from narrowgauge.optim.step.parameter_formats import is_shared_by_ranks
from narrowgauge.spec.require import require_choice, require_number
from narrowgauge.spec.storages import get_storage
from narrowgauge.spec.update_rules import UPDATE_RULES
from narrowgauge.torch_support.torch_names import default_store, is_captured

HOW = ("fused", "foreach", "capturable", "differentiable")
"""Options of ``torch.optim`` that say how to step, not what: they are ignored."""
NEVER = {
    "maximize": "Negate the loss: a step goes against the gradient.",
    "amsgrad": "Leave it out: no storage keeps the largest second moment.",
    "max_grad_norm": "Leave it out of param groups: max_grad_norm= is the optimizer's, for all groups. "
    "With ZeroRedundancyOptimizer call torch.nn.utils.clip_grad_norm_.",
}
"""Options that no rule obeys, and what to do instead."""


def check_options(group: Options, rule: AnyRule) -> None:
    """Refuse options of a group, or defaults, that are out of range or that the rule cannot obey."""
    for name in group:
        check_option(group, name, rule)


def check_option(group: Options, name: str, rule: AnyRule) -> None:
    """Refuse an option of a group, as :func:`check_options`.

    A negative ``lr`` passes: a schedule may end slightly below 0. A user's rule checks its own
    options. A group may hold other notes, such as ``initial_lr``.
    """
    value = group[name]
    row = UPDATE_RULES.get(rule.name)
    if name in HOW:
        return
    if name in NEVER:
        if value:
            raise RecipeError(f"Cannot obey {name} = {value}.", NEVER[name])
    elif name == "decoupled_weight_decay":
        if group.get("weight_decay") and bool(value) != bool(rule.decay):
            kinds = ("an L2 penalty", "decoupled from the gradient")
            raise RecipeError(
                f"Cannot load a state whose weight decay is {kinds[bool(value)]}: that of rule "
                f"'{rule.name}' is {kinds[not value]}.",
                "Use ng.AdamW for states of torch.optim.AdamW, and ng.Adam for torch.optim.Adam's.",
            )
    elif name in ("lr", "seed"):
        require_number(name, value, -math.inf, is_whole=name == "seed", is_open=True)
    elif name == "storage":
        get_storage(value)
    elif name == "low_bits":
        require_choice(name, value, LOW_BITS)
    elif name == "rule":
        rules = (rule.name, ADAMW.name) if isinstance(rule, MatrixRule) else (rule.name,)
        require_choice(name, value, rules)
    elif row is not None and name in row.option_names:
        row.check(name, value)
        momentum = group.get("momentum")
        dampening = group.get("dampening")
        is_odd = rule.name == "sgd" and (momentum == 0 or dampening != 0)
        if name == "nesterov" and value and is_odd:
            raise RecipeError(
                f"Cannot use nesterov with momentum = {momentum} and dampening = {dampening}.",
                "Try momentum above 0 and dampening = 0.",
            )
    elif row is not None and value is not None and value is not False:
        _refuse_unknown(name, rule.name)


def check_arguments(owner: type, names: Iterable[str], others: Options) -> None:
    """Refuse arguments that an optimizer does not have. ``names`` are those that it has.

    What ``torch.optim`` has besides is ignored, or refused if it would change a step.
    """
    for name, value in others.items():
        if name in NEVER or name in HOW:
            check_option(others, name, ADAMW)
        else:
            raise RecipeError(
                f"Cannot use {name} = {value!r}: {owner.__name__} has no such argument.",
                suggestion_or_all(name, names),
            )


@lru_cache
def _refuse_unknown(name: str, rule: str) -> None:
    """Refuse the name of another rule's option, and one that differs from an option by a letter."""
    names = UPDATE_RULES[rule].option_names
    near = suggestion(name, names, 0.89)  # no_weight_decay is a note
    if near or any(name in row.option_names for row in UPDATE_RULES.values()):
        raise RecipeError(
            f"Cannot set {name} in a param group because rule '{rule}' has no such option.",
            near or f"It has {', '.join(names)}.",
        )


def device_of_step(parameters: Iterable[Tensor]) -> torch.device:
    """Return the device of all parameters of a step. Refuse several devices, and a CUDA graph: each
    replay would repeat a step's numbers and random bits.
    """
    if is_captured():
        raise RecipeError(
            "Cannot step while a CUDA graph is captured: each replay would repeat this step's "
            "learning rate and random bits.",
            "Capture the forward and backward passes alone, and call step() after each replay.",
        )
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        raise RecipeError(
            f"Cannot step parameters on {' and '.join(sorted(map(str, devices)))} together.",
            "Make an optimizer for the parameters of each device.",
        )
    return devices.pop()


# ── parameters ────────────────────────────────────────────────────────────────────────────────────


def check_seeds(groups: Sequence[Options], names: Mapping[Tensor, str]) -> None:
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


def check_members(names: Mapping[Tensor, str], states: Mapping[Any, object]) -> None:
    """Refuse states of other parameters than the optimizer's, and name parameters without a
    gradient. Call it before the first step.
    """
    # ZeRO 3 shows one part of those that have states. A parameter without one may be a replacement.
    owners = {owner for owner in states if isinstance(owner, Tensor)}
    if owners - names.keys() and names.keys() - owners:
        raise RecipeError(
            "Cannot step because other parameters took the place of those that have states.",
            "After accelerator.prepare call "
            "narrowgauge.integrations.accelerate.pass_states_on(optimizer).",
        )
    idle = []
    for parameter, name in names.items():
        if parameter.requires_grad and parameter.grad is None:
            idle.append(name)
    if idle:
        warn_caller(
            f"The first step has no gradient of {len(idle)} parameters, such as '{idle[0]}'. If the "
            "model has other parameters by now (fully_shard, resize_token_embeddings), make the "
            "optimizer after that.",
        )
