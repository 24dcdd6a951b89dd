"""Passes of a user's step that leave no trace, beside policies."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from narrowgauge.errors import RecipeError
from narrowgauge.measuring.beside import Beside, is_float, storage_key, tensors_in
from narrowgauge.measuring.policies.wide import Wide
from narrowgauge.measuring.resume import generators
from narrowgauge.numerics.dtensor import is_sharded, named_gradients, whole
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.torch_support import torch_names
from narrowgauge.torch_support.put_back import objects_of, put_back

Loss = Callable[[nn.Module, Any], Any]
Backward = Callable[[nn.Module, Any], Any]
Gradients = dict[str, Tensor]


class NotFollowed(ArithmeticError):
    """A pass that one process cannot make alone."""


class Pass(NamedTuple):
    """What a pass left.

    Args:
        gradients: by the names of the tensors, in their own formats.
        raw: the tensors that the gradients were copied from.
        shadows: of the gradients that are followed, without a loss scale that is left in them.
        loss: what the call returned.
        value: the shadow of the loss; NaN if it is not followed.
        draws: whether random numbers were drawn.
        changed: names of the tensors that the pass changed. They were put back.
        unlisted: names of tensors with a gradient that no module lists.
    """

    gradients: Gradients
    raw: list[Tensor]
    shadows: Gradients
    loss: Any
    value: float
    wide: Wide
    draws: bool
    changed: list[str]
    unlisted: list[str]


class Alone:
    """Refuse what waits for other ranks, in a pass that each process makes for itself."""

    def before(self, op: Any) -> None:
        if op.is_collective:
            name = op.name.strip("_")
            raise NotFollowed(f"the loss calls {name} over ranks, and one process computes it")

    def after(self, op: Any) -> None:
        return


class Constants(TorchFunctionMode):
    """Make constants of tensors that are detached, or computed without gradients.

    The slope of a loss is along the tensors that it has a gradient for, with the others held fixed.
    """

    def __init__(self, wide: Wide) -> None:
        super().__init__()
        self.wide = wide

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch_names.autograd_node() is not None or _is_in_autograd_function():
            return result
        if func in (Tensor.detach, torch.detach):
            result = result.clone()
        elif torch.is_grad_enabled():
            return result
        operands = set(map(storage_key, tensors_in((args, kwargs))))
        for x in tensors_in(result):
            if is_float(x) and storage_key(x) not in operands:
                self.wide.forget(x)
        return result


def _is_in_autograd_function() -> bool:
    """Return whether the forward pass of an autograd function runs: it is followed by its backward."""
    frame: Any = sys._getframe(2)
    file = torch.autograd.function.__file__
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return frame is not None


@dataclass
class Passes:
    """A model, its batch and its loss, as the loop has them.

    Args:
        model: as the loop calls it. ``plain_model`` computes the plain loss, without wrappers.
        leaves: the tensors whose gradients are read, by name.
        parts: micro-batches of this rank.
        batch: what the loop's ``backward`` takes.

    Attributes:
        whole: all micro-batches in one batch; ``None`` if they do not fit together.
        is_training: whether passes are in training mode.
        unrestored: attributes of the model that cannot be put back, with the reason.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    leaves: dict[str, Any]
    parts: list[Any]
    batch: Any
    loss: Loss
    backward: Backward | None = None
    is_training: bool = True
    unrestored: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.plain_model = torch_names.unwrapped_model(self.model)
        self.plain_leaves = self.leaves
        self.whole = concatenated(self.parts)
        self.scales: dict[GradScaler, dict[str, Any]] = {}

    @property
    def is_plain(self) -> bool:
        """Return whether the step is the plain loss's own backward pass."""
        return self.backward is None and len(self.parts) == 1

    # ── what is run ───────────────────────────────────────────────────────────────────────────────

    def step(self) -> Any:
        """Compute the gradients of a step as the loop does."""
        if self.backward is not None:
            self.backward(self.model, self.batch)
            return None
        return divided_losses(self.model, self.parts, self.loss, self.optimizers)

    def plain(self, batch: Any, factor: float = 1.0) -> Callable[[], Tensor]:
        """Return a call that computes the gradient of the plain loss, without the loop's hooks."""

        def call() -> Tensor:
            value = scalar(self.loss(self.plain_model, batch))
            start = torch.full_like(value, factor)
            nodes = torch_names.graph_nodes(value)
            if any("CheckpointFunction" in node.name() for node in nodes):
                value.backward(start)  # reentrant recomputation hides its leaves from the graph
                return value
            leaves = list(self.plain_leaves.values())
            gradients = torch.autograd.grad(value, leaves, start, allow_unused=True)
            for p, gradient in zip(leaves, gradients, strict=True):
                p.grad = gradient
            return value

        return call

    def forward(self) -> Any:
        """Compute the plain loss of the whole batch."""
        return self.loss(self.plain_model, self.whole)

    # ── how it is run ─────────────────────────────────────────────────────────────────────────────

    def run(
        self,
        call: Callable[[], Any],
        wide: Wide,
        *policies: Any,
        has_constants: bool = False,
        hooked: bool = False,
    ) -> Pass:
        """Run a call beside its shadow and other policies, and put everything back.

        Args:
            has_constants: what is detached is a constant for the shadow.
            hooked: take each gradient when it is complete, since the call may clear it.
        """
        is_plain = any(isinstance(policy, Alone) for policy in policies)
        leaves = self.plain_leaves if is_plain else self.leaves
        with ExitStack() as undo:
            model = self.plain_model if is_plain else self.model
            restored = put_back(model, leaves.values(), self.optimizers)
            self.unrestored |= undo.enter_context(restored)
            self.scales = undo.enter_context(_scalers_put_back())
            self._set_mode(model)
            changes = undo.enter_context(_weights_put_back(leaves))
            undo.enter_context(torch.compiler.set_stance("force_eager"))
            undo.enter_context(sdpa_kernel(SDPBackend.MATH))
            taken = undo.enter_context(_taken(leaves if hooked else {}, wide))
            before = generators()
            constants: Any = Constants(wide) if has_constants else nullcontext()
            with constants, Beside(wide, *policies):
                value = call()
            draws = bool(wide.draws) or generators() != before
            changes()
            gradients, shadows = self._read(leaves, wide)
            raw = [*named_gradients(leaves).values()]
            for name, (gradient, shadow) in taken.items():
                gradients[name] = gradient
                raw.append(gradient)
                shadows |= {name: shadow} if shadow is not None else {}
            number = math.nan
            if isinstance(value, Tensor) and value.numel() == 1 and wide.follows(value):
                number = float(wide.of(value.detach()).real)
            unlisted = self._unlisted(model, leaves)
            return Pass(
                gradients, raw, shadows, value, number, wide, draws, changes.names, unlisted
            )

    def _read(self, leaves: Mapping[str, Any], wide: Wide) -> tuple[Gradients, Gradients]:
        left = 1.0
        for scaler in self.scales:
            states = scaler._per_optimizer_states.values()
            if not any(state["stage"].value for state in states):
                left = scaler.get_scale()
        gradients: Gradients = {}
        shadows: Gradients = {}
        for name, raw in named_gradients(leaves).items():
            gradient = raw.detach()
            if gradient.layout is not torch.strided:
                gradient = gradient.to_dense()
            gradients[name] = gradient.clone() / left if left != 1.0 else gradient.clone()
            if is_sharded(gradient):
                gradients[name] = whole(gradients[name])
            elif wide.follows(gradient):
                shadows[name] = wide.of(gradient) / left
        return gradients, shadows

    def _set_mode(self, model: nn.Module) -> None:
        if self.is_training:
            if not model.training:
                model.train()
            return
        for module in model.modules():
            module.training = False  # not train(False), which some modules override
            vars(module)["train"] = _stays(module)

    def _unlisted(self, model: nn.Module, leaves: Mapping[str, Any]) -> list[str]:
        known = set(map(id, (*model.parameters(), *leaves.values())))
        names = []
        for name, x in objects_of(model):
            if isinstance(x, Tensor) and x.is_leaf and x.grad is not None and id(x) not in known:
                names.append(inner_name(name))
        return names


def inner_name(name: str) -> str:
    """Return a name without the prefixes of compilers, checkpoints and DistributedDataParallel."""
    return torch_names.plain_name(name).removeprefix("module.")


def _stays(module: nn.Module) -> Callable[..., nn.Module]:
    return lambda mode=True: module


class _Changes:
    """Copies of the weights, and the names of those that a pass changed."""

    def __init__(self, leaves: Mapping[str, Any]) -> None:
        self.leaves = leaves
        self.copies: dict[str, tuple[int, Tensor]] = {}
        self.names: list[str] = []
        for name, p in leaves.items():
            if not is_sharded(p):  # FSDP2 writes its shards itself
                self.copies[name] = p._version, p.detach().clone()

    def __call__(self) -> None:
        for name, (version, values) in list(self.copies.items()):
            p = self.leaves[name]
            if p._version != version or not _are_equal(p, values):
                self.names.append(name)
                p.data.copy_(values)
                self.copies[name] = p._version, values


def _are_equal(p: Tensor, values: Tensor) -> bool:
    """Return whether two tensors hold the same values, NaN among them."""
    return torch.equal(p, values) or (
        torch.equal(p.isnan(), values.isnan()) and torch.equal(p.nan_to_num(), values.nan_to_num())
    )


@contextmanager
def _weights_put_back(leaves: Mapping[str, Any]) -> Iterator[_Changes]:
    changes = _Changes(leaves)
    try:
        yield changes
    finally:
        changes()


@contextmanager
def _taken(leaves: Mapping[str, Any], wide: Wide) -> Iterator[dict[str, Any]]:
    """Take gradients at the end of each backward pass, with their shadows."""
    taken: dict[str, Any] = {}
    handles = []

    def take(name: str, p: Any) -> None:
        with torch_names.no_modes():
            gradient = named_gradients({name: p})[name].detach()
            shadow = wide.of(gradient).clone() if wide.follows(gradient) else None
            taken[name] = gradient.clone(), shadow

    for name, p in leaves.items():
        hook = p.register_post_accumulate_grad_hook(lambda p, name=name: take(name, p))
        handles.append(hook)
    try:
        yield taken
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _scalers_put_back() -> Iterator[dict[GradScaler, dict[str, Any]]]:
    """Note the loss scalers of torch that a pass calls, and restore them at the end."""
    saved: dict[GradScaler, dict[str, Any]] = {}
    scale = GradScaler.scale

    def noting(scaler: GradScaler, outputs: Any) -> Any:
        if scaler not in saved:
            states = scaler._per_optimizer_states.copy()
            saved[scaler] = vars(scaler) | {"_per_optimizer_states": states}
        return scale(scaler, outputs)

    GradScaler.scale = noting  # type: ignore[assignment, method-assign]
    try:
        yield saved
    finally:
        GradScaler.scale = scale  # type: ignore[method-assign]
        for scaler, attributes in saved.items():
            vars(scaler).clear()
            vars(scaler).update(attributes)


# ── batches ───────────────────────────────────────────────────────────────────────────────────────


def scalar(result: Any) -> Tensor:
    """Return what the user's ``loss`` returned, if a backward pass can begin there."""
    if isinstance(result, Tensor) and result.numel() == 1 and result.requires_grad:
        return result
    kind = f"a {type(result).__name__}"
    if isinstance(result, Tensor):
        graph = "" if result.requires_grad else ", without a graph"
        kind = f"shape {tuple(result.shape)}{graph}"
    raise RecipeError(
        f"Cannot compare gradients because loss(model, batch) returned {kind}.",
        "Return the mean loss over the batch, a tensor of one element.",
    )


def divided_losses(
    model: nn.Module,
    parts: Sequence[Any],
    loss: Loss,
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> Any:
    """Run a backward pass of each micro-batch's loss, divided by their number; return the last loss."""
    ours = [optimizer for optimizer in optimizers if isinstance(optimizer, Optimizer)]
    reduction = next((optimizer.reduction for optimizer in ours), None)
    value: Any = None
    for place, part in enumerate(parts, 1):
        is_last = place == len(parts)
        waits: Any = nullcontext()
        if reduction is not None:
            waits = reduction.micro_batch(is_last=is_last)
        elif not is_last:
            waits = getattr(model, "no_sync", nullcontext)()
        with waits:
            value = scalar(loss(model, part))
            (value / len(parts)).backward()
    return value


def micro_batches(model: nn.Module, batch: Any, loss: Loss) -> list[Any]:
    """Return the micro-batches in a list. A list that ``loss`` takes whole is one batch."""
    if not isinstance(batch, list):
        return [batch]
    if not batch:
        raise RecipeError(
            "Cannot compare gradients because batch= is an empty list.",
            "Pass a batch or micro-batches.",
        )
    try:
        with put_back(model), torch.no_grad():
            loss(model, batch)
        return [batch]
    except Exception:  # whatever the user's code raises for what it cannot read
        return batch


def concatenated(parts: Sequence[Any]) -> Any:
    """Return micro-batches as one; ``None`` if they have unlike shapes or an unknown type.

    Concatenate tensors along their first dim; dicts, tuples, lists, dataclasses item by item.

    Example:
        >>> concatenated([(torch.zeros(2, 3), 1), (torch.ones(1, 3), 1)])[0].shape
        torch.Size([3, 3])
    """
    try:
        return parts[0] if len(parts) == 1 else _joined(parts)
    except (RuntimeError, TypeError):
        return None


def _joined(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if first is None or isinstance(first, (int, float, str)):
        return first
    if isinstance(first, Tensor):
        return torch.cat([part.to(first.device) for part in parts]) if first.ndim else first
    if isinstance(first, Mapping):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if isinstance(first, (tuple, list)):
        items = [_joined(items) for items in zip(*parts, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if is_dataclass(first) and not isinstance(first, type):
        joined = {}
        for item in fields(first):
            if item.init:
                joined[item.name] = _joined([getattr(part, item.name) for part in parts])
        return replace(first, **joined)
    raise TypeError
