"""States and weights for torch: in float32, as its own optimizers and models have them."""

from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import DataError
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.spec.storages import STATE_NAMES


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
    defaults = kind([torch.zeros(1)]).defaults
    groups = []
    for group in optimizer.state_dict()["param_groups"]:
        options = {**defaults, **group}
        for name in ("storage", "seed", "low_bits"):
            del options[name]
        groups.append(options)
    states = {}
    for number, parameter in enumerate(optimizer.parameter_names()):
        if optimizer.has_state(parameter):
            count = float(optimizer.state[parameter]["step"])
            states[number] = {"step": torch.tensor(count, device="cpu")}
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
    optimizer.finish_step()
    stored = {}
    for parameter in optimizer.parameter_names():
        stored[parameter] = optimizer.stored(parameter)
    weights = model.state_dict()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in weights and parameter in stored:
            weights[name] = stored[parameter]
    return weights
