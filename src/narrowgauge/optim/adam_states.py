"""States of other libraries and storages, in and out: :func:`load_states`, :func:`to_torch_state`,
:func:`full_weights`.

:mod:`narrowgauge.optim.foreign_states` reads them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import DataError
from narrowgauge.optim.foreign_states import OPTIONS, adopt, matched
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.spec.storages import STATE_NAMES


def load_states(optimizer: Optimizer, state: Mapping[str, Any]) -> str:
    """Load weights and moments from another library's Adam or AdamW, from torch's SGD, or from
    another storage.

    Load the model's weights first. If the state knows a weight more precisely (a tail, a float32
    master), the optimizer takes that weight. Moments and weights are rounded once, as the storage
    rounds. Parameters are matched by ``param_names`` if both have the same names, otherwise by the
    order of the groups. Names may differ by a prefix then. Options stay the optimizer's own, and a
    warning names those that differ. ``optimizer.load_state_dict(state)`` takes the state's options.

    Args:
        optimizer: ours, with the parameters in the same order.
        state: ``optimizer.state_dict()`` of the other library or storage.
    Returns:
        The name of the library.
    Raises:
        DataError: states of another rule or direction, or shapes that do not fit.
    Example:
        >>> import torch, narrowgauge as ng
        >>> weight = torch.nn.Parameter(torch.ones(2, 2))
        >>> theirs = torch.optim.AdamW([weight])
        >>> weight.sum().backward(), theirs.step()
        (None, None)
        >>> ours = ng.AdamW([torch.nn.Parameter(weight.detach().bfloat16())], storage="exact")
        >>> ng.load_states(ours, theirs.state_dict())
        'torch.optim'
    """
    library = adopt(optimizer, state)
    differ = set()
    for parameter, _, _, theirs in matched(optimizer, state["param_groups"]):
        ours = optimizer.group_of(parameter)
        for name in OPTIONS:
            if name in theirs and name in ours:
                was = _shown(theirs[name])
                now = _shown(ours[name])
                if was != now:
                    differ.add(f"{name} {was}, not {now}")
    if differ:
        warnings.warn(
            f"The state of {library} was trained with {'; '.join(sorted(differ))}.", stacklevel=2
        )
    return library


def _shown(option: Any) -> str:
    numbers = option if isinstance(option, tuple | list) else [option]
    return ", ".join(f"{float(number):g}" for number in numbers)


def to_torch_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the states as the ``state_dict()`` of ``torch.optim.Adam`` or ``AdamW``, with moments
    in float32.

    Their parameters must be float32, as :func:`full_weights` gives them: torch casts moments to the
    parameters' format.

    Args:
        optimizer: ours, of the rule Adam or AdamW.
    Returns:
        The state, with the optimizer's options.
    Raises:
        DataError: the optimizer has another rule.
    Example:
        >>> import torch, narrowgauge as ng
        >>> weight = torch.nn.Parameter(torch.ones(2, 2))
        >>> ours = ng.AdamW([weight], storage="float32")
        >>> weight.sum().backward(), ours.step()
        (None, None)
        >>> theirs = torch.optim.AdamW([weight])
        >>> theirs.load_state_dict(ng.to_torch_state(ours))
    """
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}.get(optimizer.rule.name)
    if kind is None:
        raise DataError(
            f"Cannot give the states of rule '{optimizer.rule.name}' to torch.optim.",
            "Only Adam's have a counterpart.",
        )
    saved = optimizer.state_dict()
    defaults = kind([torch.zeros(1)]).state_dict()["param_groups"][0]
    defaults["maximize"] = optimizer.maximize
    parameters = iter(optimizer.parameter_names())
    groups = []
    states = {}
    for group in saved["param_groups"]:
        options = dict(defaults)
        for name in (*defaults, "initial_lr", "param_names", "swa_lr"):
            if name in group:
                options[name] = group[name]
        groups.append(options)
        for number in group["params"]:
            parameter = next(parameters)
            if number in saved["state"]:
                states[number] = {"step": saved["state"][number]["step"]}
                for name in STATE_NAMES:
                    states[number][name] = optimizer.stored(parameter, name)
    return {"state": states, "param_groups": groups}


def full_weights(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return a model's ``state_dict()`` with the weights that the optimizer has stored, in float32.

    Args:
        model: with parameters of the optimizer. Its other tensors are as they are.
        optimizer: ours.
    Returns:
        The tensors by name. Tied weights are one tensor under both names.
    Example:
        >>> import torch, narrowgauge as ng
        >>> model = torch.nn.Linear(4, 4)
        >>> before = model.weight.detach().clone()
        >>> optimizer = ng.AdamW(model.parameters(), storage="exact")
        >>> torch.equal(ng.full_weights(model, optimizer)["weight"], before)
        True
        >>> model.save_pretrained("out", state_dict=ng.full_weights(model, optimizer))  # doctest: +SKIP
    """
    optimizer.settle()
    stored: dict[Any, Tensor] = {}
    for parameter in optimizer.parameter_names():
        stored[parameter] = optimizer.stored(parameter)
    weights: dict[str, Tensor] = model.state_dict()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in weights and parameter in stored:
            weights[name] = stored[parameter]
    return weights
