"""Passes of a user's step that leave no trace, beside policies."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from narrowgauge.distributed.reduction import reduction_of
from narrowgauge.measuring.check.dispatch import (
    PolicyMode,
    is_float,
    is_in_autograd_function,
    storage_key,
    tensors_in,
)
from narrowgauge.measuring.check.policies.first_nonfinite import FirstNonfinite
from narrowgauge.measuring.check.policies.float64_shadow import Float64Shadow
from narrowgauge.numerics.dtensor import named_gradients
from narrowgauge.torch_support import torch_names
from narrowgauge.torch_support.preserve import generator_states, preserve_model

Loss = Callable[[nn.Module, Any], Any]
Backward = Loss
Gradients = dict[str, Tensor]
IS_ZERO = "it is exactly zero: take a batch whose loss has a gradient"
"""Why nothing of a gradient was compared."""


class Pass(NamedTuple):
    """What a pass left.

    Args:
        gradients: by the names of the tensors, in their own formats.
        shadows: of the gradients that are followed.
        loss: what the call returned.
        value: the shadow of the loss; NaN if it is not followed.
        draws: whether random numbers were drawn that another pass does not repeat.
        changed: names of the tensors that the pass changed. They were put back.
    """

    gradients: Gradients
    shadows: Gradients
    loss: Any
    value: float
    shadow: Float64Shadow
    draws: bool
    changed: list[str]

    @property
    def is_zero(self) -> bool:
        """Return whether the gradients that are followed are exactly zero without roundings."""
        return bool(self.shadows) and not any(x.any() for x in self.shadows.values())


class Constants(TorchFunctionMode):
    """Make constants of tensors that are detached, or computed without gradients.

    The slope of a loss is along the tensors that it has a gradient for, with the others held fixed.
    """

    def __init__(self, shadow: Float64Shadow) -> None:
        super().__init__()
        self.shadow = shadow

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch_names.autograd_node() is not None or is_in_autograd_function():
            return result
        if func in (Tensor.detach, torch.detach):
            result = result.clone()
        elif torch.is_grad_enabled():
            return result
        operands = set(map(storage_key, tensors_in((args, kwargs))))
        for x in tensors_in(result):
            if is_float(x) and storage_key(x) not in operands:
                self.shadow.forget(x)
        return result


@dataclass
class Passes:
    """A model, its micro-batches and its loss, as the loop has them.

    Args:
        leaves: the tensors whose gradients are read, by name.
        parts: micro-batches of this rank; ``all_parts`` of all ranks.
        batch: what the loop's ``backward`` takes.
        nonfinite: what it found in the first pass.
        is_training: whether passes are in training mode.
    """

    model: nn.Module
    leaves: dict[str, Any]
    parts: list[Any]
    loss: Loss
    batch: Any = None
    backward: Backward | None = None
    all_parts: Sequence[Any] = ()
    nonfinite: FirstNonfinite = field(default_factory=FirstNonfinite)
    is_training: bool = True

    def step(self) -> Any:
        """Compute the gradients of a step as the loop does: by default each micro-batch's loss, divided by
        their number. Return the last loss.
        """
        if self.backward is not None:
            return self.backward(self.model, self.batch)
        reduction = reduction_of(torch_names.unwrapped_model(self.model))
        value: Any = None
        for place, part in enumerate(self.parts, 1):
            sums: Any = nullcontext()
            if reduction is not None:
                sums = reduction.micro_batch(is_last=place == len(self.parts))
            with sums:
                value = self.loss(self.model, part)
                (value / len(self.parts)).backward()
        return value

    def plain_loss(self, batch: Any) -> Any:
        """Return the loss of the model without wrappers, such as DistributedDataParallel."""
        return self.loss(torch_names.unwrapped_model(self.model), batch)

    def plain(self, batch: Any, factor: float = 1.0) -> Callable[[], Any]:
        """Return a call that computes the gradient of the plain loss, without the loop's hooks."""

        def call() -> Any:
            value = self.plain_loss(batch)
            start = torch.full_like(value, factor)
            if any("CheckpointFunction" in x.name() for x in torch_names.graph_nodes(value)):
                value.backward(start)  # reentrant recomputation hides its leaves from the graph
                return value
            leaves = list(self.leaves.values())
            gradients = torch.autograd.grad(value, leaves, start, allow_unused=True)
            for p, gradient in zip(leaves, gradients, strict=True):
                p.grad = gradient
            return value

        return call

    def run(
        self,
        call: Callable[[], Any],
        shadow: Float64Shadow,
        *policies: Any,
        is_alone: bool = False,
        has_constants: bool = False,
    ) -> Pass:
        """Run a call beside its shadow and other policies, and put everything back.

        Args:
            is_alone: each process makes the pass for itself.
            has_constants: what is detached is a constant for the shadow.
        """
        gradients = {}
        value = math.nan
        with ExitStack() as undo:
            undo.enter_context(preserve_model(self.model, self.leaves.values()))
            changed = undo.enter_context(_weights_put_back(self.leaves))
            undo.enter_context(_scalers_put_back())
            undo.enter_context(torch.compiler.set_stance("force_eager"))
            undo.enter_context(sdpa_kernel(SDPBackend.MATH))
            self.model.train(self.is_training)
            before = generator_states()
            undo.enter_context(PolicyMode(shadow, *policies, is_alone=is_alone))
            with Constants(shadow) if has_constants else nullcontext():
                loss = call()
            for name, gradient in named_gradients(self.leaves).items():
                x = gradient.detach()
                gradients[name] = x.to_dense() if x.is_sparse else x.clone()
            # Numbers that each call draws anew from a seed are others for other shapes.
            draws = generator_states() != before or (shadow.draws and len(self.all_parts) > 1)
        shadows = {name: shadow.of(x) for name, x in gradients.items() if shadow.follows(x)}
        if isinstance(loss, Tensor) and loss.numel() == 1 and shadow.follows(loss):
            value = float(shadow.of(loss.detach()))
        return Pass(gradients, shadows, loss, value, shadow, draws, changed)


@contextmanager
def _weights_put_back(leaves: Mapping[str, Any]) -> Iterator[list[str]]:
    """Restore weights, and fill the list with the names of those that changed."""
    changed = list[str]()
    copies = {name: p.detach().clone() for name, p in leaves.items()}
    try:
        yield changed
    finally:
        for name, values in copies.items():
            p = leaves[name].detach()
            if not torch.equal(p.nan_to_num(), values.nan_to_num()):
                changed.append(name)
                p.copy_(values)


@contextmanager
def _scalers_put_back() -> Iterator[None]:
    """Restore the loss scalers of torch that a pass calls."""
    scale = GradScaler.scale
    with ExitStack() as undo:
        undo.callback(setattr, GradScaler, "scale", scale)

        def noting(scaler: GradScaler, outputs: Any) -> Any:
            undo.callback(vars(scaler).update, copy.deepcopy(vars(scaler)))  # the first comes last
            return scale(scaler, outputs)

        GradScaler.scale = noting  # type: ignore[assignment, method-assign]
        yield


# ── batches ───────────────────────────────────────────────────────────────────────────────────────


def micro_batches(model: nn.Module, batch: Any, loss: Loss) -> list[Any]:
    """Return the micro-batches in a list. A list that ``loss`` takes whole is one batch."""
    if not isinstance(batch, list):
        return [batch]
    try:
        with preserve_model(model), torch.no_grad():
            loss(model, batch)
        return [batch]
    except Exception:  # whatever the user's code raises for what it cannot read
        return batch


def concatenated(parts: Sequence[Any]) -> Any:
    """Return micro-batches as one; ``None`` if they have unlike shapes.

    Concatenate tensors along their first dim; dicts, tuples and lists item by item.

    Example:
        >>> concatenated([(torch.zeros(2, 3), 1), (torch.ones(1, 3), 1)])[0].shape
        torch.Size([3, 3])
    """
    if len(parts) == 1:
        return parts[0]
    trees = [dict(part) if isinstance(part, Mapping) else part for part in parts]
    try:
        return tree_map(_joined, *trees)
    except (RuntimeError, TypeError, ValueError):
        return None


def _joined(first: Any, *others: Any) -> Any:
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat([first, *(x.to(first.device) for x in others)])
    return first
