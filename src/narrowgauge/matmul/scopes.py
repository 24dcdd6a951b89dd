"""Scopes: the dtype in which a model computes, where that is not the dtype of its weights.

Over float32 weights a narrower compute is autocast. PyTorch has no such context for a compute whose dtype differs from that of
*narrow* weights (``float32/word``, ``float16/kahan``). There each module's own parameters are cast to the compute's dtype while
its forward runs, linear layers cast theirs in their matmul, and tensors between modules are in that dtype too. Modules that a
recipe keeps compute in float32, with casts around them.

A model in float64 takes another: transformers' norms, softmaxes, rotary embeddings and losses ask for float32 by name, where they
mean what is wider than the model. Each of its modules runs in a scope in which such a request is answered with float64.

Losses are float32, and float64 in a float64 model. Autocast computes them so. A Hugging Face model with narrow weights that is
called with labels computes its own loss in the dtype of its logits: its head outputs these in float32. A loss outside the
model is its caller's.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from narrowgauge.matmul.experts import NARROW
from narrowgauge.matmul.swapping import Layer
from narrowgauge.numerics.structures import map_tensors
from narrowgauge.spec.recipes import Recipe


def compute_scope(recipe: Recipe, device: torch.device) -> AbstractContextManager[Any]:
    """The context in which a model computes in the recipe's dtype: autocast over float32 weights, for float64 its own, else none.

    ``prepare`` puts it around the model's own forward; code that calls submodules enters it itself.
    """
    if recipe.dtype == "float64":
        return Float64Scope()
    if recipe.storage.visible != "float32" or recipe.dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, recipe.dtype))


def compute_in_scope(model: nn.Module, recipe: Recipe) -> None:
    """Let a model with rounded weights and swapped linear layers compute in the recipe's dtype in every call."""
    for module in model.modules():
        if isinstance(before := module.__dict__.get("forward"), _Forward):  # from an earlier prepare
            del module.forward
            if before.own is not None:
                module.forward = before.own
    if recipe.dtype == "float64":
        for module in model.modules():
            module.forward = _InFloat64(module)
        return
    if recipe.storage.visible not in ("float32", recipe.dtype):
        _cast_parameters(model, recipe)
    _widen_kept(model, recipe)
    if recipe.storage.visible != "float32" and recipe.dtype != "float32":
        _widen_logits(model)
    if isinstance(compute_scope(recipe, next(model.parameters()).device), torch.autocast):
        model.forward = _Scoped(model, recipe)


def _cast_parameters(model: nn.Module, recipe: Recipe) -> None:
    dtype, visible = (getattr(torch, name) for name in (recipe.dtype, recipe.storage.visible))
    for module in model.modules():
        own = [] if _casts_itself(module) else list(module._parameters.values())
        if module is model or any(parameter is not None and parameter.dtype is visible for parameter in own):
            module.forward = _Cast(module, dtype)


def _casts_itself(module: nn.Module) -> bool:
    return isinstance(module, Layer) or NARROW in module._modules or hasattr(module, "computes_in")


def _widen_kept(model: nn.Module, recipe: Recipe) -> None:
    """Casts around the outermost kept modules: float32 inputs, and outputs in the model's dtype."""
    if not recipe.keep or recipe.dtype == "float32":
        return
    done: list[str] = []
    for name, module in model.named_modules():
        if name and recipe.keeps(name) and not any(name.startswith(f"{outer}.") for outer in done):
            done.append(name)
            module.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
            if recipe.storage.visible == "float32":
                module.forward = _Scoped(module, None)
            else:
                module.register_forward_hook(_CAST_OUTPUTS[recipe.dtype])


# What Hugging Face's models call the child whose result is their logits: the names in transformers 5.23 of those that compute
# their loss from narrow ones. A child of another name is left alone, since its result may go on into narrow layers.
_HEADS = frozenset(
    (
        "answer_class", "classification_head", "classifier", "cls", "ctc_head", "decode_head", "discriminator_predictions",
        "generator_lm_head", "lm_head", "lm_loss", "lm_predictions", "logits_proj", "mlm_score", "multiple_choice_head",
        "predictions", "proj_out", "qa_outputs", "score", "segmentation_head", "sop_classifier", "vocab_projector",
    )
)  # fmt: skip
_LABELS = ("label", "start_positions")
# Losses of transformers that cast logits to float32 themselves, and the attribute by which a forward calls them.
_WIDE_ALREADY = ("ForCausalLM", "ForConditionalGeneration", "ForMaskedLM", "ForTokenClassification")
_LOSS_OF_TYPE = "loss_function"


def _widen_logits(model: nn.Module) -> None:
    """Make the heads of Hugging Face's models that compute their loss from narrow logits output these in float32."""
    for module in model.modules():
        if not _is_of_transformers(module) or not _takes_labels(module) or _widens_itself(module):
            continue
        for name, head in module.named_children():
            if name in _HEADS and _to_float32 not in head._forward_hooks.values():
                head.register_forward_hook(_to_float32)


def _is_of_transformers(module: nn.Module) -> bool:
    return hasattr(module, "base_model_prefix")


def _takes_labels(module: nn.Module) -> bool:
    return any(_is_label(name) for name in inspect.signature(module.forward).parameters)


def _is_label(name: str) -> bool:
    return any(word in name for word in _LABELS)


def _widens_itself(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return _LOSS_OF_TYPE in getattr(code, "co_names", ()) and getattr(module, "loss_type", None) in _WIDE_ALREADY


def _cast_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
    return _cast(args, torch.float32), _cast(kwargs, torch.float32)


def _to_bfloat16(_: nn.Module, __: Any, result: Any) -> Any:
    return _cast(result, torch.bfloat16)


def _to_float32(_: nn.Module, __: Any, result: Any) -> Any:
    return _cast(result, torch.float32)


def _to_float16(_: nn.Module, __: Any, result: Any) -> Any:
    return _cast(result, torch.float16)


# Module-level functions, so that a prepared model can be pickled.
_CAST_OUTPUTS = {"bfloat16": _to_bfloat16, "float16": _to_float16}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """The same structure with every floating-point tensor in ``dtype``."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


# Not __func__ and __wrapped__, by which a caller would pass the wrapper by.
_OF_FUNCTIONS = frozenset(
    [
        "__annotations__",
        "__closure__",
        "__code__",
        "__defaults__",
        "__globals__",
        "__kwdefaults__",
        "__name__",
        "__qualname__",
    ]
)


class _Forward:
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # A forward that was set on the object itself.
        self.own: Callable[..., Any] | None = module.__dict__.get("forward")

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Libraries inspect functions: Lightning compares the code of a forward with that of its class.
        if name in _OF_FUNCTIONS:
            return getattr(self.own or type(self.module).forward, name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    @property
    def __signature__(self) -> inspect.Signature:
        # Callers such as transformers inspect the names of the arguments.
        return inspect.signature(self.own or type(self.module).forward.__get__(self.module))


class _Scoped(_Forward):
    """A module's own forward in the scope of a recipe; for ``None`` with autocast disabled."""

    def __init__(self, module: nn.Module, recipe: Recipe | None) -> None:
        super().__init__(module)
        self.recipe = recipe

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = next(self.module.parameters()).device
        wide = torch.autocast(device.type, enabled=False)
        with wide if self.recipe is None else compute_scope(self.recipe, device):
            return self._call(*args, **kwargs)


class _InFloat64(_Forward):
    """A module's own forward in :class:`Float64Scope`. Every module has one: a checkpoint recomputes some without the model."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if _scopes_entered() else Float64Scope():
            return self._call(*args, **kwargs)


_OF_THREAD = threading.local()


def _scopes_entered() -> int:
    return getattr(_OF_THREAD, "entered", 0)


class Float64Scope(TorchFunctionMode):
    """A context in which code that asks for float32 gets float64; this package's own code, such as that of gauges, gets float32.

    Example:
        >>> from transformers.models.llama.modeling_llama import LlamaRMSNorm
        >>> norm, x = LlamaRMSNorm(2).double(), torch.tensor([1 / 3, 1.0], dtype=torch.float64)
        >>> with Float64Scope():
        ...     result = norm(x)
        >>> [torch.equal(y, x * (x.square().mean() + 1e-6).rsqrt()) for y in (result, norm(x))]
        [True, False]
    """

    def __enter__(self) -> Float64Scope:
        _OF_THREAD.entered = _scopes_entered() + 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _OF_THREAD.entered = _scopes_entered() - 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.partition(".")[0] == __name__.partition(".")[0]:
            return func(*args, **(kwargs or {}))
        wide = [torch.float64 if each is torch.float32 else each for each in args]
        named = {name: torch.float64 if each is torch.float32 else each for name, each in (kwargs or {}).items()}
        widened: Any = torch.Tensor.double if func is torch.Tensor.float else func
        return widened(*wide, **named)


class _Cast(_Forward):
    """A module's own forward with its inputs and its own parameters cast to another dtype; gradients keep theirs."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(module)
        self.dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args = _cast(args, self.dtype)
        kwargs = {name: value if self._is_of_loss(name) else _cast(value, self.dtype) for name, value in kwargs.items()}
        if _casts_itself(self.module):
            return self._call(*args, **kwargs)
        own = self.module._parameters
        self.module._parameters = _cast(own, self.dtype)
        try:
            return self._call(*args, **kwargs)
        finally:
            self.module._parameters = own

    def _is_of_loss(self, name: str) -> bool:
        return _is_label(name) and _is_of_transformers(self.module)
