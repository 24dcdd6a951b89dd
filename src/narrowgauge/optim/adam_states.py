"""States of other libraries and storages, in and out: :func:`load_states`, :func:`to_torch_state`,
:func:`full_weights`.

=====================  ===================================================================================================
torch.optim            moments of any float format, as they are; SGD's ``momentum_buffer`` too
bitsandbytes           8-bit codes of a map, times the largest value of each block
torchao                tensors of its own class: 8-bit or 4-bit codes of a map, or float8, times a scale per block
FusedAdam              TransformerEngine's and Apex's: one step for a group. TransformerEngine keeps float32 masters, or the
                       16 bits that the bfloat16 weight lacks
narrowgauge            of any storage and rule
=====================  ===================================================================================================

Decoding is exact in float32.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import DataError
from narrowgauge.numerics.rounding import at_least_float32
from narrowgauge.optim.loading import states_of, tensors_of
from narrowgauge.optim.optimizer import Optimizer, unnamed
from narrowgauge.optim.validation import known_row
from narrowgauge.spec.storages import STATE_NAMES

Entry = Mapping[str, Any]
Moments = dict[str, Tensor | int]
_8BIT = "__bnb_optimizer_quant_state__"
_ADVICE = "Give the state of torch's SGD, or of an Adam or AdamW of torch, bitsandbytes, torchao, TransformerEngine or Apex."
_OPTIONS = ("lr", "betas", "eps", "weight_decay")


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
    library = _adopt(optimizer, state)
    differ = {
        f"{name} {_shown(theirs)}, not {_shown(ours)}"
        for parameter, _, _, group in _matched(optimizer, state["param_groups"])
        for name, theirs in group.items()
        if name in _OPTIONS
        and _shown(theirs) != _shown(ours := optimizer.group_of(parameter).get(name, theirs))
    }
    if differ:
        warnings.warn(
            f"The state of {library} was trained with {'; '.join(sorted(differ))}.", stacklevel=2
        )
    return library


def _shown(option: Any) -> str:
    return ", ".join(
        f"{float(number):g}"
        for number in (option if isinstance(option, tuple | list) else [option])
    )


def resume_from(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load weights, moments and options of another library.

    This is ``load_state_dict`` of its state.
    """
    groups = state["param_groups"]
    if [len(group["params"]) for group in groups] != [
        len(group["params"]) for group in optimizer.param_groups
    ]:
        raise DataError(
            "The state's param groups have other sizes than the optimizer's.",
            "Call ng.load_states.",
        )
    _adopt(optimizer, state)
    for ours, theirs in zip(optimizer.param_groups, groups, strict=True):
        ours |= {name: theirs[name] for name in (*_OPTIONS, "initial_lr") if name in theirs}


def _adopt(optimizer: Optimizer, state: Mapping[str, Any]) -> str:
    """Store the weights and moments of a foreign state. Return the name of its library."""
    if not {"state", "param_groups"} <= set(state):
        raise DataError(
            "The state has no 'state' and 'param_groups'.", "Give the optimizer's state_dict()."
        )
    for group in state["param_groups"]:
        theirs = bool(group.get("maximize", optimizer.maximize))
        if theirs != optimizer.maximize:
            raise DataError(
                f"Cannot load a state of maximize = {theirs}: this optimizer steps the other way.",
                f"Make it with maximize={theirs}.",
            )
    values: dict[Tensor, Tensor] = {}
    moments: dict[Tensor, Moments] = {}
    libraries = set()
    for parameter, name, key, group in _matched(optimizer, state["param_groups"]):
        entry = state["state"].get(key)
        if not entry or entry.get("momentum_buffer", entry) is None:  # SGD without momentum
            continue
        entry = {
            **{name: value for name, value in entry.items() if name != _8BIT},
            **entry.get(_8BIT, {}),
        }
        library = _library(entry, group)
        libraries.add(library)
        if library == "narrowgauge":
            values[parameter], moments[parameter] = _of_narrowgauge(
                entry, group, optimizer, parameter
            )
        else:
            moments[parameter] = _moments(library, entry, group, parameter, name)
            values[parameter] = _weight(entry, optimizer, parameter)
    if state["state"] and not moments:
        raise DataError(
            "The keys of the state's 'state' are no numbers of its parameters.", _ADVICE
        )
    optimizer.adopt(values, moments)
    return next(
        iter(libraries - {"torch.optim"}), "torch.optim"
    )  # others leave small tensors to torch


def _of_narrowgauge(
    entry: Entry, group: Entry, optimizer: Optimizer, parameter: Tensor
) -> tuple[Tensor, Moments]:
    """Return the weight and the states of another storage.

    They are read over the same visible weight.
    """
    tensors = tensors_of(entry)
    dtype = getattr(torch, known_row(group["storage"]).visible)
    if tensors.keys() == {"step", *STATE_NAMES} and tensors["exp_avg"].dtype is torch.float32:
        dtype = torch.float32  # all in float32, whatever the storage of its group
    elif torch.float32 not in (dtype, parameter.dtype):
        dtype = parameter.dtype
    seen = parameter.detach() if parameter.dtype is dtype else optimizer.stored(parameter).to(dtype)
    state = states_of(optimizer, group, {seen: tensors})[seen]
    weight = state.stored("weight") if state.storage.beside else optimizer.stored(parameter)
    return weight, {
        "step": state.step,
        **{name: state.stored(name) for name in state.shapes_of_states},
    }


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
    keys = {*defaults, "initial_lr", "param_names", "swa_lr"}
    groups = [
        {
            **defaults,
            "maximize": optimizer.maximize,
            **{name: group[name] for name in keys & group.keys()},
        }
        for group in saved["param_groups"]
    ]
    numbers = [number for group in groups for number in group["params"]]
    states = {
        number: {
            "step": saved["state"][number]["step"],
            **{name: optimizer.stored(p, name) for name in STATE_NAMES},
        }
        for number, p in zip(numbers, optimizer.parameter_names(), strict=True)
        if number in saved["state"]
    }
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
    stored = {parameter: optimizer.stored(parameter) for parameter in optimizer.parameter_names()}
    weights: dict[str, Tensor] = model.state_dict()
    named = dict(model.named_parameters(remove_duplicate=False))
    return weights | {
        name: stored[p] for name, p in named.items() if p in stored and name in weights
    }


def _matched(optimizer: Optimizer, groups: list[Any]) -> list[tuple[Tensor, str, Any, Entry]]:
    """Return each parameter with its name, its key in the foreign state, and its foreign group."""
    names = optimizer.parameter_names()
    keys = [(key, group) for group in groups for key in group["params"]]
    theirs = [name for group in groups for name in group.get("param_names") or ()]
    if len(keys) != len(names):
        raise DataError(
            f"The state has {len(keys)} parameters, and the optimizer has {len(names)}.",
            "Make the optimizer with the same parameters in the same order.",
        )
    ours = list(names.values())
    if len(theirs) == len(keys) and ours != [unnamed(place) for place in range(len(ours))]:
        if set(theirs) == set(ours):
            by_name = dict(zip(theirs, keys, strict=True))
            return [(parameter, name, *by_name[name]) for parameter, name in names.items()]
        if not all(a.endswith(b) or b.endswith(a) for a, b in zip(theirs, ours, strict=True)):
            raise DataError(
                "The state's parameters have other names than the optimizer's, or another order.",
                "Make the optimizer with the same names, or save the state without 'param_names'.",
            )
    return [
        (parameter, name, *key) for (parameter, name), key in zip(names.items(), keys, strict=True)
    ]


def _library(entry: Entry, group: Entry) -> str:
    if "storage" in group:
        return "narrowgauge"
    if "state1" in entry:
        return "bitsandbytes"
    if any(hasattr(entry.get(kind), "codes") for kind in STATE_NAMES):
        return "torchao"
    return "FusedAdam" if "bias_correction" in group else "torch.optim"


_ADAM = {"step", *STATE_NAMES}
_KEYS = {
    "torch.optim": _ADAM | {"momentum_buffer"},
    "bitsandbytes": {
        "step",
        *(f"{part}{n}" for part in ("state", "qmap", "absmax") for n in (1, 2)),
    },
    "torchao": _ADAM,
    "FusedAdam": _ADAM | {"master_param"},
}


def _moments(library: str, entry: Entry, group: Entry, weight: Tensor, name: str) -> Moments:
    """Return the step and the moments, float32 or float64."""
    if odd := sorted(set(entry) - _KEYS[library]):
        raise DataError(f"The state of '{name}' contains '{odd[0]}'.", _ADVICE)
    kinds = ("momentum_buffer",) if "momentum_buffer" in entry else STATE_NAMES
    # FusedAdam counts the steps of a group. SGD counts none; any step but the first is like
    # another.
    step = 1 if kinds != STATE_NAMES else (group if library == "FusedAdam" else entry).get("step")
    if step is None:
        raise DataError(f"The state of '{name}' lacks 'step'.", _ADVICE)
    moments: Moments = {"step": int(step)}
    for kind in kinds:
        try:
            moment = _moment(library, entry, kind).contiguous()
        except KeyError as error:
            raise DataError(f"The state of '{name}' lacks {error}.", _ADVICE) from None
        if moment.shape != weight.shape:
            raise DataError(
                f"'{name}' has shape {tuple(weight.shape)}, and its state has shape "
                f"{tuple(moment.shape)}.",
                "Make the optimizer with the same parameters in the same order.",
            )
        moments[kind] = moment
    return moments


def _moment(library: str, entry: Entry, kind: str) -> Tensor:
    if library == "bitsandbytes":
        return _bitsandbytes(entry, str(1 + STATE_NAMES.index(kind)))
    is_quantized = library == "torchao" and hasattr(entry[kind], "codes")  # small tensors are not
    return _torchao(entry[kind]) if is_quantized else at_least_float32(entry[kind])


def _weight(entry: Entry, optimizer: Optimizer, parameter: Tensor) -> Tensor:
    """Return the float32 weight: the state's if it has one, else what the optimizer has stored."""
    master: Tensor | None = entry.get("master_param")
    if master is None:
        return optimizer.stored(parameter)
    if master.dtype is not torch.int16:
        return master.float()
    # TransformerEngine, multi_tensor/adam.cu: the weight was rounded up where the remainder is
    # negative.
    upper = (
        parameter.detach().to(torch.bfloat16).contiguous().view(torch.int16).int()
        - (master < 0).int()
    )
    return ((upper << 16) | (master.int() & 0xFFFF)).view(torch.float32)


def _scaled_blocks(values: Tensor, scales: Tensor, size: int) -> Tensor:
    scaled: Tensor = values.flatten() * scales.float().repeat_interleave(size)[: values.numel()]
    return scaled


def _bitsandbytes(entry: Entry, number: str) -> Tensor:
    """Return the value of each code in the map, times the absmax of its block (Dettmers et al.,
    ICLR 2022).
    """
    codes: Tensor = entry[f"state{number}"]
    if codes.dtype is not torch.uint8:
        return codes.float()  # small tensors stay in float32
    table = entry[f"qmap{number}"]
    scales = entry[f"absmax{number}"]
    if -(-codes.numel() // 256) != scales.numel():
        raise DataError(
            f"An 8-bit state has {scales.numel()} scales for {codes.numel()} values.",
            "Blocks of 256 are known, of bitsandbytes from 0.44 on.",
        )
    return _scaled_blocks(table.float()[codes.flatten().long()], scales, 256).reshape(codes.shape)


def _torchao(value: Any) -> Tensor:
    """Decode an optimizer state of torchao 0.18 (``optim/subclass_8bit.py``, ``subclass_4bit.py``,
    ``subclass_fp8.py``).
    """
    codes = value.codes
    scales = value.scale
    if codes.dtype is torch.float8_e4m3fn:
        values = codes.float()
    elif type(value).__name__.endswith("4bit"):
        values = value.qmap[torch.stack([codes >> 4, codes & 15], -1).flatten().long()]
    else:
        values = value.qmap[codes.flatten().long()]
    return _scaled_blocks(values, scales, values.numel() // scales.numel()).reshape(value.shape)
