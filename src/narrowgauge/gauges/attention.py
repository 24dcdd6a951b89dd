"""Attention as gauges see it: queries and keys on their way into the kernel that multiplies them.

They are in memory for the kernel, so looking at them changes nothing. How to get at them depends on who calls the kernel,
which the code of a module's class tells:

- *Named.* Transformers' models look up the kernel by a name in their config. While gauges are attached the look-up hands out
  that same kernel with a mark in front of it, whichever it is. Names, configs and masks stay.
- *Called.* A module calls PyTorch's ``scaled_dot_product_attention`` itself. While gauges are attached that name is one of a
  function that goes on with PyTorch's, behind a mark. Whose call it is the function cannot know; so operators at the start
  and the end of the module's forward say which one runs.
- *Projected.* ``nn.MultiheadAttention`` keeps queries and keys to itself. Its inputs and weights are in memory, so the mark
  projects once more, for the first sequence of the batch.

What is compiled and no kernel is not marked: transformers' ``eager``, and on a CPU any attention with dropout, become matmuls
between which a compiler leaves neither queries nor keys in memory.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias

from narrowgauge import _torch
from narrowgauge.gauges.hooks import as_multiplied, place_of
from narrowgauge.gauges.recorder import SWITCH, board_of, is_sampled, mark_attention
from narrowgauge.numerics.plain import linear
from narrowgauge.transforms.scaled_tensor import Scaled

Undo = Callable[[], object]


class Watch:
    """A module's attention being marked, until it is removed."""

    def __init__(self, undo: Undo) -> None:
        self.remove = undo


def way_of(module: nn.Module) -> Callable[[nn.Module], Undo] | None:
    """How to get at a module's attention: what lets it be marked and returns what ends that; nothing where it has none."""
    kind = type(module)
    if kind.forward is nn.MultiheadAttention.forward:
        return _watch_projected
    if kind.__module__.startswith("torch."):
        return None
    names = _names(kind)
    if "ALL_ATTENTION_FUNCTIONS" in names and "get_interface" in names:
        return _watch_named
    return _watch_called if "scaled_dot_product_attention" in names else None


def watch(module: nn.Module) -> Watch:
    """Let a module's attention be marked."""
    way = way_of(module)
    assert way is not None
    return Watch(way(module))


def unseen(names: list[str], step: int) -> str:
    """What to say where none of a model's attention was marked."""
    return (
        f"gauges saw no attention at step {step}, of {len(names)} modules like '{names[0]}': they did not run, or no kernel "
        "computes it. Compiled, transformers' 'eager', and dropout on a CPU, are none. "
        "Take attn_implementation='sdpa', or do not compile."
    )


def _names(kind: type[nn.Module]) -> set[str]:
    """The names in the code of a class's forward, and of what it calls in the same file."""
    found: set[str] = set()
    functions = [inspect.unwrap(kind.forward)]
    for function in functions:
        if not isinstance(function, FunctionType):
            continue
        new = set(_names_in(function.__code__)) - found
        found |= new
        called = (getattr(kind, name, function.__globals__.get(name)) for name in sorted(new))
        functions += [one for one in called if getattr(one, "__module__", None) == function.__module__]
    return found


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _is_kernel(query: Tensor, scale: float | None, dropout: float) -> bool:
    """Whether queries and keys are in memory; and the scale is a number, not one for which the host would have to wait."""
    splits = torch.compiler.is_compiling() and query.device.type == "cpu" and dropout > 0
    return not splits and not isinstance(scale, Tensor)


def _mark(mark: Callable[..., None], query: Tensor, key: Tensor, scale: float | None, *rest: Any) -> None:
    scale = float(query.shape[-1]) ** -0.5 if scale is None else float(scale)
    query, key = _values(query), _values(key)
    if type(query) is type(key) is Tensor:
        mark(query, key, scale, *rest)


def _values(x: Tensor) -> Tensor:
    """Of the first sequence, which alone is looked at where a tensor carries its scale."""
    x = x.detach()
    return x._data[:1] * x._scale if isinstance(x, Scaled) else x


# ── names that stand for others ─────────────────────────────────────────────────────────────────────────────────────────

_replaced: dict[tuple[Any, str], tuple[int, Any]] = {}
"""Of a module or class and a name in it: how many watches need it replaced, and what it stood for."""


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Undo:
    """Let a name stand for what ``make`` makes of what it stood for, until the last watch that needs it ends."""
    count, before = _replaced.get((owner, name), (0, getattr(owner, name)))
    _replaced[owner, name] = count + 1, before
    setattr(owner, name, make(before))
    return functools.partial(_restore, owner, name, make)


def _restore(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    count, before = _replaced.pop((owner, name))
    if count > 1:
        _replaced[owner, name] = count - 1, before
    elif getattr(owner, name) is make(before):  # else somebody else has replaced it since
        setattr(owner, name, before)


def _together(*undos: Undo) -> Undo:
    return lambda: [undo() for undo in undos]


# ── named ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _watch_named(module: nn.Module) -> Undo:
    from transformers.modeling_utils import AttentionInterface

    return _replace(AttentionInterface, "get_interface", _marking_look_up)


@functools.cache  # the same function each time, so that what was compiled for the last gauges serves the next
def _marking_look_up(look_up: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(look_up)
    def get_interface(self: Any, attn_implementation: str, default: Any) -> Any:
        return functools.partial(_marked, look_up(self, attn_implementation, default), attn_implementation)

    return get_interface


def _marked(
    kernel: Callable[..., Any], name: str, module: nn.Module, query: Tensor, key: Tensor, *rest: Any, **options: Any
) -> Any:
    """What transformers calls in place of a kernel: the kernel, behind a mark."""
    place = place_of(module, 2)
    if place is not None and is_sampled(module) and not (name == "eager" and torch.compiler.is_compiling()):
        is_causal, scale = options.get("is_causal"), options.get("scaling")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if _is_kernel(query, scale, options.get("dropout", 0.0)):
            _mark(mark_attention, query, key, scale, place, bool(is_causal))
    return kernel(module, query, key, *rest, **options)


# ── called ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

_running: list[Tensor] = []
"""The places of the modules whose forward runs, the innermost last."""


@torch.library.custom_op("narrowgauge::enter_attention", mutates_args=())
def enter(place: Tensor) -> None:
    """Say that the forward of a module begins."""
    _running.append(place)


@torch.library.custom_op("narrowgauge::leave_attention", mutates_args=())
def leave(place: Tensor) -> None:
    """Say that it ends, and that of what runs inside of it."""
    own = [k for k, other in enumerate(_running) if other.data_ptr() == place.data_ptr()]
    del _running[own[0] if own else len(_running) :]


@torch.library.custom_op("narrowgauge::mark_running_attention", mutates_args=())
def mark_running(query: Tensor, key: Tensor, scale: float, is_causal: bool) -> None:
    """Note an attention's logits at the place of the module that runs."""
    if _running:
        mark_attention(query, key, scale, _running[-1], is_causal)


@enter.register_fake
@leave.register_fake
def _(place: Tensor) -> None:
    return None


@mark_running.register_fake
def _(query: Tensor, key: Tensor, scale: float, is_causal: bool) -> None:
    return None


for _operator in (enter, leave, mark_running):
    _torch.keep_effect(_operator)


def _enter(module: nn.Module, args: Any) -> None:
    place = place_of(module, 2)
    if place is not None and is_sampled(module):
        enter(place)


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    place = place_of(module, 2)
    if place is not None and is_sampled(module):
        leave(place)


def _watch_called(module: nn.Module) -> Undo:
    name = "scaled_dot_product_attention"
    # A file that imported the function has a name of its own for it.
    owners = [F, sys.modules[type(module).__module__]]
    replaced = [_replace(owner, name, _marking_call) for owner in owners if hasattr(owner, name)]
    # Also where forward raises: a checkpoint stops its second forward so.
    hooks = module.register_forward_pre_hook(_enter), module.register_forward_hook(_leave, always_call=True)
    return _together(*replaced, *(hook.remove for hook in hooks))


@functools.cache
def _marking_call(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def scaled_dot_product_attention(*args: Any, **options: Any) -> Tensor:
        mask = args[3] if len(args) > 3 else options.get("attn_mask")
        if isinstance(mask, CausalBias):  # it asks whether it was given the function that has the name
            result: Tensor = CausalBias.__torch_function__(F.scaled_dot_product_attention, (CausalBias,), args, options)
            return result
        if torch.is_grad_enabled() and SWITCH.is_on:
            _mark_call(*args, **options)
        return kernel(*args, **options)

    return scaled_dot_product_attention


def _mark_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    if _is_kernel(query, scale, dropout_p):
        # A mask is not read: most often it is a causal one.
        _mark(mark_running, query, key, scale, is_causal or attn_mask is not None)


# ── projected ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.library.custom_op("narrowgauge::mark_projected_attention", mutates_args=())
def mark_projected(
    query: Tensor,
    key: Tensor,
    weight: Tensor,
    key_weight: Tensor | None,
    bias: Tensor | None,
    num_heads: int,
    batch_first: bool,
    is_causal: bool,
    place: Tensor,
) -> None:
    """Note an attention at a place of a board, by what its queries and keys are made of: the inputs and the weights."""
    board, index = board_of(place)
    if board is None or not board.is_open:
        return
    width = weight.shape[1] if key_weight is None else weight.shape[0]
    both = weight[:width], weight[width : 2 * width] if key_weight is None else key_weight
    heads = []
    for k, (x, own) in enumerate(zip((query, key), both, strict=True)):
        first = x if x.ndim == 2 else x.select(0 if batch_first else 1, 0)
        y = linear(first.to(own.dtype), own, None if bias is None else bias[k * width : (k + 1) * width])
        heads.append(y.unflatten(-1, (num_heads, -1)).transpose(0, 1))
    board.mark_attention(index, heads[0], heads[1], float(heads[0].shape[-1]) ** -0.5, is_causal)


@mark_projected.register_fake
def _(
    query: Tensor, key: Tensor, weight: Tensor, key_weight: Tensor | None, bias: Tensor | None, num_heads: int,
    batch_first: bool, is_causal: bool, place: Tensor,
) -> None:  # fmt: skip
    return None


_torch.keep_effect(mark_projected)


def _watch_projected(module: nn.Module) -> Undo:
    undo: Undo = module.register_forward_pre_hook(_mark_inputs, with_kwargs=True).remove
    return undo


def _mark_inputs(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    if is_sampled(module):
        _mark_projected(module, *args, **options)


def _mark_projected(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> None:
    weight, key_weight = module.in_proj_weight, None
    if weight is None:
        weight, key_weight = module.q_proj_weight, module.k_proj_weight.detach()
    weight, bias = weight.detach(), None if module.in_proj_bias is None else module.in_proj_bias.detach()
    place = place_of(module, 2)
    if type(weight) is not Tensor or place is None:
        return
    mark_projected(
        as_multiplied(query).detach(), as_multiplied(key).detach(), weight, key_weight, bias, module.num_heads,
        module.batch_first,
        is_causal or attn_mask is not None, place,
    )  # fmt: skip
