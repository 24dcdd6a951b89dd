"""A sequence that is moved: at later positions, or behind padding, a model with relative positions has the same outputs for it.

Whether a model means its positions to be relative is read from it: rotary embeddings, ALiBi and relative biases go by these
names in modules and configurations. Of a model without them, or one that looks positions up in an embedding of its own, nothing
is asked. No position is later than those that the run itself uses, so that no table is read beyond its end.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from narrowgauge.recompute.capture import ForwardCall
from narrowgauge.recompute.inputs_and_outputs import tensors_in

_RELATIVE = ("rotary", "rope", "alibi", "relative")
"""Parts of names that only relative positions have."""
_TOKENS, _OFFSET = 32, 16
"""The length of the sequence that is moved, and how far at most."""
POSITIONS, MASK = "position_ids", "attention_mask"
"""The names that transformers gives to positions, and to the mask that leaves padding out."""
Outputs = Callable[[ForwardCall], Tensor]


def has_relative_positions(model: nn.Module) -> bool:
    """Whether modules or the configuration of a model name relative positions.

    Example:
        >>> class RotaryEmbedding(nn.Module): ...
        >>> has_relative_positions(nn.Sequential(RotaryEmbedding())), has_relative_positions(nn.Sequential())
        (True, False)
    """
    config = getattr(model, "config", None)
    # A setting that is none or false names what a model could have.
    settings = (
        {str(name): value for name, value in vars(config).items() if value} if hasattr(config, "__dict__") else {}
    )
    named = [*settings, *(str(value) for name, value in settings.items() if "position" in name)]
    named += [type(module).__name__ for module in model.modules()]
    return any(part in name.lower() for name in named for part in _RELATIVE)


def moved_sequences(model: nn.Module, call: ForwardCall, outputs: Outputs) -> Iterator[tuple[str, float]]:
    """How far outputs change when a sequence is moved, by the cause that it would be.

    Args:
        model: in evaluation mode, with relative positions.
        call: a slice of a step's, of tokens alone.
        outputs: of the model, for a call.
    """
    tokens = call.tokens
    assert tokens is not None
    length = min(_TOKENS, tokens.shape[1] // 2)
    offset = min(_OFFSET, tokens.shape[1] - length)
    if length < 2 or not _is_whole(call, tokens):
        return
    names = inspect.signature(model.forward).parameters
    first = _each(call, lambda name, t: t[:, :length])
    with _looked_up(model) as looked_up:
        base = outputs(first)
    if any(each.shape != base.shape[:2] or not each.equal(tokens[:, :length]) for each in looked_up):
        return
    places = torch.arange(length + offset, dtype=torch.int64, device=tokens.device).expand(len(tokens), -1)
    steps = places[:, :length]
    if POSITIONS in names:
        given = _with(first, **{POSITIONS: steps})
        moved = _with(first, **{POSITIONS: steps + offset})
        yield "positions-absolute", float((outputs(moved) - outputs(given)).abs().max())
    # Of a loop that passes no mask, padding is not asked: what its model does with one is no part of its training.
    if call.kwargs.get(MASK) is not None:
        mask = (places >= offset).long()
        padded = _each(first, lambda name, t: torch.cat([t[:, :1].expand(-1, offset), t], 1))
        without = _with(first, **{MASK: torch.ones_like(steps)})
        positions = {POSITIONS: (mask.cumsum(1) - 1).clamp_min(0)} if POSITIONS in call.kwargs else {}
        behind = outputs(_with(padded, **{MASK: mask}, **positions))[:, offset:]
        yield "padding-seen", float((behind - outputs(without)).abs().max())


def _is_whole(call: ForwardCall, tokens: Tensor) -> bool:
    """Whether no padding and no border of packed sequences is in the rows, and nothing that is not told by name."""
    mask, positions = call.kwargs.get(MASK), call.kwargs.get(POSITIONS)
    is_unpadded = mask is None or bool(mask.bool().all())
    is_one = positions is None or bool((positions.diff(dim=1) == 1).all())
    beside = [t for t in tensors_in(call.args) if t.ndim]
    return is_unpadded and is_one and len(beside) <= 1


def _each(call: ForwardCall, change: Callable[[str, Tensor], Tensor]) -> ForwardCall:
    def of(name: str, value: Any) -> Any:
        return change(name, value) if isinstance(value, Tensor) and value.ndim else value

    args = tuple(of("", value) for value in call.args)
    return replace(call, args=args, kwargs={name: of(name, value) for name, value in call.kwargs.items()})


def _with(call: ForwardCall, **inputs: Tensor) -> ForwardCall:
    return replace(call, kwargs={**call.kwargs, **inputs})


@contextmanager
def _looked_up(model: nn.Module) -> Iterator[list[Tensor]]:
    """What embeddings are asked for while a model is called."""
    found: list[Tensor] = []
    tables = {id(module) for module in model.modules() if isinstance(module, nn.Embedding)}

    def keep(module: nn.Module, args: Any) -> None:
        if id(module) in tables:
            found.extend(each for each in args[:1] if isinstance(each, Tensor))

    # Of all modules: the audit's passes leave our hooks on single ones out.
    handle = register_module_forward_pre_hook(keep)
    try:
        yield found
    finally:
        handle.remove()
