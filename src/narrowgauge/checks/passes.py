"""Run the passes of a set-up without leaving a trace: a step as the loop makes it, or the plain loss
of a batch in one process.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge.checks.set_up import SetUp, inner_name
from narrowgauge.checks.shadow import Shadow, eager
from narrowgauge.checks.sites import FirstBad, tensors_in
from narrowgauge.errors import RecipeError
from narrowgauge.measuring.resume import generators
from narrowgauge.numerics.dtensor import is_sharded, named_gradients, whole
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.torch_support import torch_names
from narrowgauge.torch_support.put_back import objects_of, put_back

Backward = Callable[[nn.Module, Any], object]
Gradients = dict[str, Tensor]
Loss = Callable[[nn.Module, Any], Tensor]


class Pass(NamedTuple):
    """What a pass left: whole gradients without a loss scale, float64, by name.

    Args:
        shadows: of the gradients that are followed.
        loss: the last loss; ``None`` after the loop's own ``backward``.
        value: the shadow of the loss; NaN if it is not followed.
        mode: what followed the pass.
        draws: whether the pass drew random numbers.
        loss_scale: of the passes, whether or not the gradients are unscaled.
        unstepped: names of tensors with a gradient that are in no optimizer.
        first_bad: what made the first value that is not finite, where that was traced.
    """

    gradients: Gradients
    shadows: Gradients
    loss: Any
    value: float
    mode: Any
    draws: bool
    loss_scale: float
    unstepped: list[str]
    first_bad: str


@dataclass
class Passes:
    """A set-up with its batch.

    Args:
        model: as the loop calls it.
        leaves: the tensors whose gradients are read, by name: the model's, and those ``outside``.
        parts: micro-batches of this rank.
        batch: what the loop's ``backward`` takes.
        keeps_weights: put weights back that a pass changes.

    Attributes:
        stepped: names of tensors that passes changed. They were put back.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    leaves: dict[str, Any]
    parts: Sequence[Any]
    batch: Any
    loss: Loss
    backward: Backward | None
    unseen: dict[str, str]
    is_training: bool = True
    keeps_weights: bool = False
    stepped: dict[str, None] = field(default_factory=dict, init=False)
    _weights: dict[str, Tensor] = field(default_factory=dict, init=False)
    _versions: dict[str, int] = field(default_factory=dict, init=False)

    def run(self, call: Callable[[], Any], mode: Any = None) -> Pass:
        """Run a call beside a mode, and put everything back."""
        with ExitStack() as undo:
            restored = put_back(self.model, self.leaves.values(), self.optimizers)
            self.unseen |= undo.enter_context(restored)
            scales = undo.enter_context(_scalers_put_back())
            self._set_mode()
            self._keep_weights()
            before = generators()
            if mode is not None:
                undo.enter_context(eager())
            with mode or nullcontext():
                value = call()
            draws = generators() != before
            raw = named_gradients(self.leaves)
            gradients = {}
            shadows = {}
            for name, g in raw.items():
                gradients[name] = _wide(whole(g.detach()), scales.left)
                if isinstance(mode, Shadow) and mode.follows(g):
                    shadows[name] = _wide(mode.of(g.detach()), scales.left)
            number = math.nan
            if isinstance(mode, Shadow) and isinstance(value, Tensor) and mode.follows(value):
                number = float(mode.of(value.detach()))
            first_bad = ""
            self._put_weights_back()
            if isinstance(mode, FirstBad):
                first_bad = mode.first([*tensors_in(value), *raw.values()])
            return Pass(
                gradients, shadows, value, number, mode, draws, scales.applied, self._unstepped(),
                first_bad,
            )  # fmt: skip

    def _set_mode(self) -> None:
        set_training(self.model, self.is_training)
        if not self.is_training:  # many a loop's backward= begins with model.train()
            for module in self.model.modules():
                vars(module)["train"] = lambda mode=True, module=module: module

    def _keep_weights(self) -> None:
        """Copy the weights once; note their versions."""
        for name, p in self.leaves.items():
            if not self.keeps_weights or is_sharded(p):  # FSDP2 writes its shards itself
                continue
            if name not in self._weights:
                self._weights[name] = p.detach().clone()
            self._versions[name] = p._version

    def forget_weights(self) -> None:
        """Keep no copy of the weights any more, after a step that changed none."""
        self.keeps_weights = False
        self._weights.clear()

    def _put_weights_back(self) -> None:
        """Put back the tensors that a pass changed, and note their names."""
        for name, values in self._weights.items():
            p = self.leaves[name]
            if p._version != self._versions[name] or not _has_values(p, values):
                self.stepped[name] = None
                p.data.copy_(values)

    def _unstepped(self) -> list[str]:
        known = set(map(id, (*self.model.parameters(), *self.leaves.values())))
        names = []
        for name, x in objects_of(self.model):
            if isinstance(x, Tensor) and x.is_leaf and x.grad is not None and id(x) not in known:
                names.append(inner_name(name))
        return names

    def step(self) -> Any:
        """Make the loop's own passes, or each micro-batch's loss divided by their number."""
        if self.backward is not None:
            self.backward(self.model, self.batch)
            return None
        return divided_losses(self.model, self.parts, self.loss, self.optimizers)

    def plain(self, batch: Any) -> Callable[[], Tensor]:
        """Return a call that makes the plain pass: the loss of a batch in one process."""
        model = torch_names.unwrapped_model(self.model)
        return lambda: self.ask(scalar(self.loss(model, batch)))

    def ask(self, value: Tensor, factor: Tensor | None = None) -> Tensor:
        """Fill the gradients of a loss without the hooks of its parameters, which are the loop's."""
        leaves = list(self.leaves.values())
        # Reentrant recomputation hides its leaves from the graph, and takes no other call.
        if any("CheckpointFunction" in node.name() for node in torch_names.graph_nodes(value)):
            value.backward(factor)
            return value
        gradients = torch.autograd.grad(value, leaves, factor, allow_unused=True)
        for p, g in zip(leaves, gradients, strict=True):
            p.grad = g
        return value


def _has_values(p: Tensor, values: Tensor) -> bool:
    """Return whether a tensor has these values, NaN among them."""
    return torch.equal(p, values) or torch.allclose(p, values, rtol=0.0, atol=0.0, equal_nan=True)


class OneProcess(TorchDispatchMode):
    """Refuse what waits for other ranks, where they do not make this pass."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            name = func._schema.name.split("::")[1].strip("_")
            raise RuntimeError(
                f"the loss calls {name} over ranks, and one process computes it here"
            )
        return func(*args, **(kwargs or {}))


def passes_of(
    set_up: SetUp, batch: Any, loss: Loss, backward: Backward | None, unseen: dict[str, str]
) -> Passes:
    """Return the passes of a set-up. Read the gradients of the parameters that train, and of those in
    an optimizer that are none of the model's.

    Args:
        unseen: filled with attributes that cannot be put back.
    """
    model = set_up.model
    leaves = {inner_name(n): p for n, p in model.named_parameters() if p.requires_grad}
    leaves |= set_up.outside
    parts = micro_batches(model, batch, loss)
    passes = Passes(model, set_up.optimizers, leaves, parts, batch, loss, backward, unseen)
    passes.keeps_weights = True
    return passes


def divided_losses(
    model: nn.Module,
    parts: Sequence[Any],
    loss: Loss,
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> Any:
    """Run a backward pass of each micro-batch's loss, divided by their number; return the last loss."""
    value: Any = None
    ours = [optimizer for optimizer in optimizers if isinstance(optimizer, Optimizer)]
    reduction = next((optimizer.reduction for optimizer in ours), None)
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


def set_training(model: nn.Module, is_training: bool) -> None:
    """Set the mode of a model. A model that trains already keeps the mode of each part."""
    if not is_training:
        for module in model.modules():
            module.training = False  # not train(False), which some modules override
    elif not model.training:
        model.train()


def _wide(gradient: Tensor, scale: float) -> Tensor:
    return gradient.to_dense().double() / scale


class _Scales:
    """The loss scale of the last losses, and what is left of it in the gradients.

    A scaler's step would still divide gradients that were scaled last.
    """

    def __init__(self) -> None:
        self.applied = 1.0
        self.left = 1.0


@contextmanager
def _scalers_put_back() -> Iterator[_Scales]:
    """Note the calls of torch's loss scalers, and restore them at the end."""
    scales = _Scales()
    saved = dict[GradScaler, dict[str, Any]]()
    methods = {name: getattr(GradScaler, name) for name in ("scale", "unscale_")}

    def noting(name: str) -> Callable[..., Any]:
        def method(scaler: GradScaler, *args: Any) -> Any:
            if scaler not in saved:
                states = scaler._per_optimizer_states.copy()
                saved[scaler] = vars(scaler) | {"_per_optimizer_states": states}
            result = methods[name](scaler, *args)
            scales.left = 1.0
            if name == "scale":
                scales.applied = scales.left = scaler.get_scale()
            return result

        return method

    for name in methods:
        setattr(GradScaler, name, noting(name))
    try:
        yield scales
    finally:
        for name, method in methods.items():
            setattr(GradScaler, name, method)
        for scaler, attributes in saved.items():
            vars(scaler).clear()
            vars(scaler).update(attributes)


def scalar(result: Any) -> Tensor:
    """Return what the user's ``loss`` returned, if a backward pass can begin there."""
    if not isinstance(result, Tensor) or result.numel() != 1 or not result.requires_grad:
        kind = f"a {type(result).__name__}"
        if isinstance(result, Tensor):
            kind = f"shape {tuple(result.shape)}"
            if not result.requires_grad:
                kind += ", without a graph"
        raise RecipeError(
            f"Cannot compare gradients because loss(model, batch) returned {kind}.",
            "Return the mean loss over the batch, a tensor of one element.",
        )
    return result


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
    """Return micro-batches as one.

    Concatenate tensors along their first dim; dicts, tuples, lists, dataclasses item by item.

    Raises:
        RecipeError: the micro-batches cannot be concatenated.

    Example:
        >>> concatenated([(torch.zeros(2, 3), 1), (torch.ones(1, 3), 1)])[0].shape
        torch.Size([3, 3])
    """
    first = parts[0]
    if len(parts) == 1 or first is None or isinstance(first, (int, float, str)):
        return first
    if isinstance(first, Tensor):
        try:
            if first.ndim:
                return torch.cat([part.to(first.device) for part in parts])
            return first
        except RuntimeError as error:
            raise RecipeError(
                "Cannot join the micro-batches because their shapes differ: "
                f"{', '.join(str(tuple(part.shape)) for part in parts)}.",
                "Pad them to one length.",
            ) from error
    if isinstance(first, Mapping):
        return {key: concatenated([part[key] for part in parts]) for key in first}
    if isinstance(first, (tuple, list)):
        items = [concatenated(items) for items in zip(*parts, strict=True)]
        if hasattr(first, "_fields"):
            return type(first)(*items)
        return type(first)(items)
    if is_dataclass(first) and not isinstance(first, type):
        joined = {}
        for item in fields(first):
            if item.init:
                joined[item.name] = concatenated([getattr(part, item.name) for part in parts])
        return replace(first, **joined)
    raise RecipeError(
        f"Cannot join micro-batches of type {type(first).__name__}.",
        "Pass tensors, in tuples, dicts or dataclasses.",
    )


# ── the plain loss ───────────────────────────────────────────────────────────────────────────────

MOST_TERMS = 16
"""Fit the weight of each micro-batch in a gradient up to this number of micro-batches of all ranks.
"""


class PlainLoss:
    """The loss of batches without the loop's own passes.

    Args:
        alone: makes the passes of one process.

    Attributes:
        whole: the micro-batches as one batch.
        times: how many times a mean the loss is; gradients are divided by it.
    """

    def __init__(self, alone: Passes) -> None:
        self.alone = alone
        self.whole = concatenated(alone.parts)
        self.times = 1
        self._terms: list[Gradients] | None = None

    def run(self, batch: Any, seed: int | None = None) -> Pass:
        """Return a plain pass of a batch, perhaps with other draws."""

        def call() -> Tensor:
            if seed is not None:
                torch.manual_seed(seed)
                random.seed(seed)
            return self.alone.plain(batch)()

        return self.divided(self.alone.run(call, Shadow()))

    def divided(self, plain: Pass) -> Pass:
        """Return a pass of the loss divided by ``times``."""
        if self.times == 1:
            return plain
        gradients = {name: g / self.times for name, g in plain.gradients.items()}
        shadows = {name: g / self.times for name, g in plain.shadows.items()}
        return plain._replace(gradients=gradients, shadows=shadows)

    def repeats(self, plain: Pass, seed: int | None = None) -> bool:
        """Return whether another plain pass, perhaps with other draws, gives the same gradients."""
        again = self.run(self.whole, seed)
        return all(torch.equal(x, again.gradients[n]) for n, x in plain.gradients.items())

    def terms(self, exact: Mapping[str, Tensor]) -> list[Gradients]:
        """Return the plain gradients of each micro-batch, if there are several and not too many."""
        if self._terms is None:
            self._terms = []
            for part in self.alone.parts if 1 < len(self.alone.parts) <= MOST_TERMS else []:
                term = self.run(part)
                gradients = {}
                for name, r in exact.items():
                    g = term.gradients.get(name, torch.zeros_like(r))
                    gradients[name] = term.shadows.get(name, g)
                self._terms.append(gradients)
        return self._terms
