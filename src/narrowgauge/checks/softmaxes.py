"""Find the softmaxes of a loss, and read what each row of logits learns.

No name of a module or argument is used: a softmax is a call of ``cross_entropy``, ``log_softmax`` or
``logsumexp``. Whatever made the loss of it, its gradient on a row of logits is w (p − target): p are
the probabilities, w is the weight of the row.

- ``cross_entropy`` and ``log_softmax``: the gradient on the log-probabilities is −w target.
- ``logsumexp``: the gradient on the logits is w p but at the label, so w is the median of its ratio to p.

A fused loss that makes no logits, and a loss of ``softmax`` itself, are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from narrowgauge.checks.float32_copy import is_in_function
from narrowgauge.torch_support.torch_names import graph_nodes

LOG_SUM = "logsumexp"
_SOFTMAXES = ("cross_entropy", "log_softmax", LOG_SUM)
_BLOCK = 2**24
"""Logits that are read at once in float64."""
LABEL, DISTRIBUTION, OTHER = range(3)


class Target(NamedTuple):
    """What rows of logits learn: a value for each row.

    Args:
        label: the largest entry of the target.
        weight: w, times the loss scale.
        smoothing: share of the weight that is spread over all entries.
        cross_entropy: of the label.
        form: one label, possibly smoothed; another distribution; or entries of both signs.
        is_live: the row has a gradient.
    """

    label: Tensor
    weight: Tensor
    smoothing: Tensor
    cross_entropy: Tensor
    form: Tensor
    is_live: Tensor


def joined(targets: Collection[Target]) -> Target:
    """Return the rows of several targets as one."""
    return Target(*(torch.cat(columns) for columns in zip(*targets, strict=True)))


@dataclass(eq=False)
class Term:
    """A softmax of a loss.

    Args:
        name: the function that made it.
        number: backward passes before it.
        source: logits with their graph, in rows.
        dtype: format of the softmax.
        lookups: ids ``[sequences, columns]`` and size of the table of each lookup before it.
        target: what its rows learn; ``None`` before the backward pass, or if nothing reached it.
    """

    name: str
    number: int
    source: Tensor
    dtype: torch.dtype
    lookups: list[tuple[Tensor, int]]
    target: Target | None = None

    @property
    def kind(self) -> tuple[str, int]:
        """Return the function and the number of classes."""
        return self.name, self.source.shape[1]

    @property
    def teaches(self) -> str:
        """Return what most rows learn."""
        assert self.target is not None
        live = self.target.is_live
        forms = self.target.form[live].bincount(minlength=3)
        if forms[OTHER] > 0.1 * live.sum():
            return "another gradient"
        if forms[DISTRIBUTION] > 0.1 * live.sum():
            return "a distribution"
        return "a label"


class Trace(TorchFunctionMode):
    """Record the softmaxes of losses, in the order of the forward pass, and read their targets in each
    call of ``Tensor.backward``.

    Args:
        after_lookup: called with the ids and the result of a lookup; returns the result.
    Attributes:
        number: calls of ``backward``.
        draws: dropouts that drew without a gradient, as of a teacher in training mode.
    """

    def __init__(self, after_lookup: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.after_lookup = after_lookup
        self.lookups = list[tuple[Tensor, int]]()
        self.terms = list[Term]()
        self.number = 0
        self.draws = 0
        self._nodes = set[Any]()
        self._is_backward = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_backward = func is Tensor.backward
        if is_backward:
            self._is_backward = True
            try:
                return func(*args, **kwargs)
            finally:
                self._is_backward = False
                self.number += 1
                self.lookups = []
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if self._is_backward:
            return result
        if not torch.is_grad_enabled():
            is_noise = name == "dropout" and kwargs.get("training", True) and kwargs.get("p", 0.5)
            # A recomputed block's first pass makes no graph either.
            self.draws += bool(is_noise) and not is_in_function()
            return result
        if name == "embedding" and len(args) > 1:
            ids, table = args[:2]
            self.lookups.append((as_sequences(ids.detach()), len(table)))
            if self.after_lookup is not None:
                result = self.after_lookup(ids, result)
        if name in _SOFTMAXES and result.requires_grad:
            self._note(name, args, kwargs, result)
        return result

    def _note(self, name: str, args: Any, kwargs: Any, result: Tensor) -> None:
        logits: Tensor = args[0] if args else kwargs["input"]
        dim: Any = -1
        if name == "cross_entropy":
            dim = min(1, logits.ndim - 1)
        elif "dim" in kwargs:
            dim = kwargs["dim"]
        elif len(args) > 1:
            dim = args[1]
        if not isinstance(dim, int) or type(logits) is not Tensor:  # logits in shards are not read
            return
        node = None
        if name == LOG_SUM:
            base = logits._base
            if base is not None and base.shape[-1] == logits.shape[dim]:
                logits = base  # one row of many may be summed at a time
                dim = -1
            node = logits.grad_fn
        else:
            nodes = graph_nodes(result)
            node = next((n for n in nodes if n.name() == "LogSoftmaxBackward0"), None)
        if node is None or node in self._nodes:
            return
        self._nodes.add(node)
        source = _rows(logits, dim)
        term = Term(name, self.number, source, result.dtype, [*self.lookups])
        self.terms.append(term)

        def read(gradients: Any) -> None:
            if gradients[0] is not None and self._is_backward:
                function = _of_logits if name == LOG_SUM else _of_log_probabilities
                gradient = _rows(gradients[0], dim)
                term.target = _by_blocks(function, source.detach(), gradient)

        node.register_prehook(read)


def as_sequences(ids: Tensor) -> Tensor:
    """Return ids as ``[sequences, columns]``."""
    if ids.ndim:
        return ids.reshape(-1, ids.shape[-1])
    return ids.reshape(1, 1)


def _rows(x: Tensor, dim: int) -> Tensor:
    """Return a tensor with its classes as columns."""
    return x.movedim(dim, -1).reshape(-1, x.shape[dim])


def _by_blocks(function: Callable[..., Target], *matrices: Tensor) -> Target:
    """Call a function on blocks of rows, and join the results on the CPU."""
    num_rows = max(1, _BLOCK // matrices[0].shape[1])
    targets = []
    for block in zip(*(matrix.split(num_rows) for matrix in matrices), strict=True):
        targets.append(Target(*map(Tensor.cpu, function(*block))))
    return joined(targets)


def _of_log_probabilities(logits: Tensor, gradient: Tensor) -> Target:
    """Read rows −w target."""
    log_p = logits.double().log_softmax(-1)
    return _target(log_p, -gradient.double(), 0.0, 1e-9)


def _of_logits(logits: Tensor, gradient: Tensor) -> Target:
    """Read rows w (p − target)."""
    log_p = logits.double().log_softmax(-1)
    p = log_p.exp()
    unit = torch.finfo(gradient.dtype).eps
    of_p = (gradient.double() / p).median(-1, keepdim=True).values * p
    floor = 16 * unit * of_p.abs().amax(-1)
    return _target(log_p, of_p - gradient.double(), floor, max(1e-9, 4 * unit))


def _target(log_p: Tensor, target: Tensor, floor: Any, negative: float) -> Target:
    """Read rows of w · target.

    Args:
        floor: of the largest entry of a row that learns.
        negative: product of entries of both signs, over the largest one's square, that is no
            rounding.
    """
    size = target.shape[1]
    weight = target.sum(-1)
    label = target.abs().argmax(-1, keepdim=True)
    top = target.gather(-1, label)
    rest = (weight[:, None] - top) / max(size - 1, 1)
    beside = (target - rest).scatter(-1, label, 0.0).norm(dim=-1)
    top = top[:, 0].abs()
    form = torch.where(beside > 1e-2 * top, DISTRIBUTION, LABEL)
    form[target.amin(-1) * target.amax(-1) < -negative * top.square()] = OTHER
    smoothing = rest[:, 0] * size / weight.where(weight != 0, 1.0)
    cross_entropy = -log_p.gather(-1, label)[:, 0]
    return Target(label[:, 0], weight, smoothing, cross_entropy, form, top > floor)
