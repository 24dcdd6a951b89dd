"""Attention: queries and keys as the attention kernel reads them.

The kernel needs queries and keys in memory, so recording them changes nothing. There are two ways to reach them.
The code of the module's class shows which one applies:

- *Named.* Models of transformers look up the kernel by a name in their config. While gauges are attached, the look-up returns
  the same kernel in a recording wrapper. Names, configs and masks do not change.
- *Called.* A module, such as ``nn.MultiheadAttention``, calls PyTorch's ``scaled_dot_product_attention``. While gauges are
  attached, that name refers to a recording wrapper. The wrapper does not know its caller, so operators at the start and end of
  the module's forward keep a stack of running modules.

Attention without a kernel is not recorded: ``nn.MultiheadAttention`` with ``need_weights=True``, compiled ``eager`` attention of
transformers, and compiled attention with dropout on a CPU.
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

from narrowgauge import torch_names
from narrowgauge.gauges.hooks import ATTENTION, entry_of
from narrowgauge.gauges.sampling import SAMPLING, is_sampled, record_attention
from narrowgauge.transforms.scaled_tensor import Scaled

Undo = Callable[[], object]


def attention_hook_for(module: nn.Module) -> Callable[[nn.Module], Undo] | None:
    """Return the function that starts recording a module's attention. It returns one that stops. ``None`` without attention."""
    kind = type(module)
    if isinstance(module, nn.MultiheadAttention):
        return _hook_called
    if kind.__module__.startswith("torch."):
        return None
    names = _names(kind)
    if "ALL_ATTENTION_FUNCTIONS" in names and "get_interface" in names:
        return _hook_named
    return _hook_called if "scaled_dot_product_attention" in names else None


def _names(kind: type[nn.Module]) -> set[str]:
    """Return the names used in the code of a class's forward, and in functions that it calls in the same file."""
    names: set[str] = set()
    functions = [inspect.unwrap(kind.forward)]
    for function in functions:
        if not isinstance(function, FunctionType):
            continue
        new = set(_names_in(function.__code__)) - names
        names |= new
        called = (getattr(kind, name, function.__globals__.get(name)) for name in sorted(new))
        functions += [callee for callee in called if getattr(callee, "__module__", None) == function.__module__]
    return names


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _is_kernel(query: Tensor, scale: float | None, dropout: float) -> bool:
    """Return whether queries and keys are in memory and the scale is a number. A tensor would need a sync."""
    splits = torch.compiler.is_compiling() and query.device.type == "cpu" and dropout > 0
    return not splits and not isinstance(scale, Tensor)


def _record(operator: Callable[..., None], query: Tensor, key: Tensor, scale: float | None, *rest: Any) -> None:
    scale = float(query.shape[-1]) ** -0.5 if scale is None else float(scale)
    query, key = _values(query), _values(key)
    if type(query) is type(key) is Tensor:
        operator(query, key, scale, *rest)


def _values(x: Tensor) -> Tensor:
    """Return the values of a tensor. For a scaled tensor return only the first sequence, which is recorded."""
    x = x.detach()
    return x._data[:1] * x._scale if isinstance(x, Scaled) else x


# ── replaced names ──────────────────────────────────────────────────────────────────────────────────────────────────────

_replaced: dict[tuple[Any, str], tuple[int, Any]] = {}
"""For each owner (module or class) and name: the number of handles that need the replacement, and the original."""


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Undo:
    """Replace an attribute by ``make(original)`` until the last handle that needs it is removed."""
    count, before = _replaced.get((owner, name), (0, getattr(owner, name)))
    _replaced[owner, name] = count + 1, before
    setattr(owner, name, make(before))
    return functools.partial(_restore, owner, name, make)


def _restore(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    count, before = _replaced.pop((owner, name))
    if count > 1:
        _replaced[owner, name] = count - 1, before
    elif getattr(owner, name) is make(before):  # otherwise other code has replaced it since
        setattr(owner, name, before)


# ── named ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _hook_named(module: nn.Module) -> Undo:
    from transformers.modeling_utils import AttentionInterface

    return _replace(AttentionInterface, "get_interface", _recording_look_up)


@functools.cache  # the same function each time, so that code compiled for earlier gauges is reused
def _recording_look_up(look_up: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(look_up)
    def get_interface(self: Any, attn_implementation: str, default: Any) -> Any:
        return functools.partial(_recorded, look_up(self, attn_implementation, default), attn_implementation)

    return get_interface


def _recorded(
    kernel: Callable[..., Any], name: str, module: nn.Module, query: Tensor, key: Tensor, *rest: Any, **options: Any
) -> Any:
    """Record queries and keys, then call the kernel. transformers calls this instead of the kernel."""
    entry = entry_of(module, ATTENTION)
    if entry is not None and is_sampled(module) and not (name == "eager" and torch.compiler.is_compiling()):
        is_causal, scale = options.get("is_causal"), options.get("scaling")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if _is_kernel(query, scale, options.get("dropout", 0.0)):
            _record(record_attention, query, key, scale, entry, bool(is_causal))
    return kernel(module, query, key, *rest, **options)


# ── called ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

_running: list[Tensor] = []
"""The entries of the modules whose forward is running, innermost last."""


@torch.library.custom_op("narrowgauge::run_attention", mutates_args=())
def run(entry: Tensor, is_start: bool) -> None:
    """Push the entry of a module whose forward starts. At its end pop it, and the entries of modules inside it."""
    if is_start:
        _running.append(entry)
        return
    places = [k for k, running in enumerate(_running) if running.data_ptr() == entry.data_ptr()]
    del _running[places[0] if places else len(_running) :]


@torch.library.custom_op("narrowgauge::record_running_attention", mutates_args=())
def record_running(query: Tensor, key: Tensor, scale: float, is_causal: bool) -> None:
    """Record attention logits in the entry of the innermost running module."""
    if _running:
        record_attention(query, key, scale, _running[-1], is_causal)


@run.register_fake
def _(entry: Tensor, is_start: bool) -> None:
    return None


@record_running.register_fake
def _(query: Tensor, key: Tensor, scale: float, is_causal: bool) -> None:
    return None


for _operator in (run, record_running):
    torch_names.keep_effect(_operator)


def _run(module: nn.Module, is_start: bool) -> None:
    entry = entry_of(module, ATTENTION)
    if entry is not None and is_sampled(module):
        run(entry, is_start)


def _enter(module: nn.Module, args: Any) -> None:
    _run(module, True)


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    _run(module, False)


def _hook_called(module: nn.Module) -> Undo:
    name = "scaled_dot_product_attention"
    # A module that imported the function has its own name for it.
    owners = [F, sys.modules[type(module).__module__]]
    replaced = [_replace(owner, name, _recording_call) for owner in owners if hasattr(owner, name)]
    # Also if forward raises: activation checkpointing stops its recomputation that way.
    hooks = module.register_forward_pre_hook(_enter), module.register_forward_hook(_leave, always_call=True)

    def undo() -> None:
        for step in (*replaced, *(hook.remove for hook in hooks)):
            step()

    return undo


@functools.cache
def _recording_call(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def scaled_dot_product_attention(*args: Any, **options: Any) -> Tensor:
        mask = args[3] if len(args) > 3 else options.get("attn_mask")
        if type(mask).__name__ == "CausalBias":  # its module imports Dynamo, which takes seconds
            from torch.nn.attention.bias import CausalBias

            # It checks whether it was called with the original function.
            result: Tensor = CausalBias.__torch_function__(F.scaled_dot_product_attention, (CausalBias,), args, options)
            return result
        if torch.is_grad_enabled() and SAMPLING.is_on:
            _record_call(*args, **options)
        return kernel(*args, **options)

    return scaled_dot_product_attention


def _record_call(
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
        # The mask is not read; most often it is causal.
        _record(record_running, query, key, scale, is_causal or attn_mask is not None)
