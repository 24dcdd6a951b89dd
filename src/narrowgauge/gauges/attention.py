"""Attention: queries and keys as PyTorch's attention kernel reads them.

The kernel needs queries and keys in memory, so recording them changes nothing. Attention modules, such as
``nn.MultiheadAttention`` and those of transformers, call ``scaled_dot_product_attention``. While gauges are attached, that name
refers to a recording wrapper. The wrapper does not know its caller, so operators at the start and end of the module's forward
keep a stack of running modules.

Attention through another kernel is not recorded: ``nn.MultiheadAttention`` with ``need_weights=True``, transformers' other
implementations than ``sdpa``, and compiled attention with dropout on a CPU. Nor is attention to all keys.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge import torch_names
from narrowgauge.gauges.hooks import ATTENTION, Undo, entry_of
from narrowgauge.gauges.sampling import SAMPLING, is_sampled, recorder_of
from narrowgauge.transforms.scaled_tensor import Scaled

KERNEL = "scaled_dot_product_attention"


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is attention, by the name of its class."""
    return "attention" in type(module).__name__.lower()


def record_module(module: nn.Module) -> Undo:
    """Record the attention that a module computes, until undone."""
    # A module that imported the function has its own name for it.
    owners = [F, sys.modules[type(module).__module__]]
    replaced = [_replace(owner) for owner in owners if hasattr(owner, KERNEL)]
    # Also if forward raises: activation checkpointing stops its recomputation that way.
    hooks = module.register_forward_pre_hook(_enter), module.register_forward_hook(_leave, always_call=True)

    def undo() -> None:
        for step in (*replaced, *(hook.remove for hook in hooks)):
            step()

    return undo


# ── the replaced name ───────────────────────────────────────────────────────────────────────────────────────────────────

_replaced: dict[Any, tuple[int, Any]] = {}
"""For each module of Python: the number of handles that need the wrapper, and the original."""


def _replace(owner: Any) -> Undo:
    """Replace the kernel's name by the wrapper until the last handle that needs it is removed."""
    current = getattr(owner, KERNEL)
    count, kernel = _replaced.get(owner, (0, current))
    if count and current is not _recording_call(kernel):
        kernel = current  # other code has replaced the wrapper since
    _replaced[owner] = count + 1, kernel
    setattr(owner, KERNEL, _recording_call(kernel))
    return functools.partial(_restore, owner)


def _restore(owner: Any) -> None:
    count, kernel = _replaced.pop(owner)
    if count > 1:
        _replaced[owner] = count - 1, kernel
    elif getattr(owner, KERNEL) is _recording_call(kernel):  # otherwise other code has replaced it since
        setattr(owner, KERNEL, kernel)


@functools.cache  # the same function each time, so that code compiled for earlier gauges is reused
def _recording_call(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(kernel)
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
    # A mask is not read; most often it is causal.
    if not is_causal and attn_mask is None:
        return
    # There compiled code splits the kernel up. A scale in a tensor would need a sync.
    if (torch.compiler.is_compiling() and query.device.type == "cpu" and dropout_p > 0) or isinstance(scale, Tensor):
        return
    scale = float(query.shape[-1]) ** -0.5 if scale is None else float(scale)
    query, key = _values(query), _values(key)
    if type(query) is type(key) is Tensor:
        record_running(query, key, scale)


def _values(x: Tensor) -> Tensor:
    """Return the values of a tensor. For a scaled tensor return only the first sequence, which is recorded."""
    x = x.detach()
    return x._data[:1] * x._scale if isinstance(x, Scaled) else x


# ── running modules ─────────────────────────────────────────────────────────────────────────────────────────────────────

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
def record_running(query: Tensor, key: Tensor, scale: float) -> None:
    """Record attention logits in the entry of the innermost running module."""
    recorder, index = recorder_of(_running[-1]) if _running else (None, -1)
    if recorder is not None:
        recorder.record_attention(index, query, key, scale)


run.register_fake(lambda entry, is_start: None)
record_running.register_fake(lambda query, key, scale: None)
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
