"""Find the softmaxes in the graph of a loss, and read what each row of logits learns.

No name of a module or argument is used.

Whatever made a softmax loss, its gradient on a row of logits is w (p − target): p are the
probabilities, w is the weight of the row. Three kinds of nodes lead there, the first below the
loss. Softmaxes of attention, and most routers', lie behind a product.

- ``LogSoftmax`` or ``Softmax``: the gradient on the log-probabilities is −w target. It is read without a fit.
- ``Logsumexp``, or a custom autograd function of logits: fit the gradient of the logits.
- a custom autograd function of hidden states and a head W: fit the gradient of the hidden states, w (p − target) W.

A fit cannot tell the label from the second token where one probability is near 1. Such rows are not
sure, and not read.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_PRODUCTS = re.compile(
    "Mm|Addmm|Bmm|Baddbmm|Linear|.*Conv|ScaledDot|.*Norm$|Embedding|FusedRms|Grouped|AccumulateGrad"
)
"""Nodes at which the loss ends and the model begins."""
_SOFTMAXES = ("LogSoftmax", "Softmax", "Logsumexp")
_VIEWS = re.compile(
    "View|UnsafeView|Reshape|Slice|Select|Unbind|ToCopy|Squeeze|Unsqueeze|Alias|Index|Transpose|Permute"
    "|T$|Clone|Split|Expand"
)
_LOSSES = re.compile(".*Loss|BinaryCross|LogSigmoid|Abs|Pow|KlDiv|CosineSim|.*Sigmoid")
"""Nodes that name a term of a loss."""
_MOST_TENSORS = 4096
"""Results that are remembered, the latest ones."""
_BLOCK = 2**24
"""Logits that are read at once in float64."""
LABEL, DISTRIBUTION, OTHER = range(3)


class Target(NamedTuple):
    """What rows of logits learn: a value for each row.

    Args:
        label: the largest entry of the target.
        weight: w, times the loss scale.
        smoothing: share of the weight that is spread over all entries; NaN if it cannot be told.
        z_loss: coefficient of the squared log-sum-exp.
        misfit: relative distance of the gradient from the fit.
        form: one label, possibly smoothed; another distribution; or entries of both signs, or no
            target.
        is_live: the row has a gradient.
        is_sure: the label can be told.
    """

    label: Tensor
    weight: Tensor
    smoothing: Tensor
    z_loss: Tensor
    misfit: Tensor
    form: Tensor
    is_live: Tensor
    is_sure: Tensor


def joined(targets: Collection[Target]) -> Target:
    """Return the rows of several targets as one."""
    return Target(*(torch.cat(columns) for columns in zip(*targets, strict=True)))


@dataclass(eq=False)
class Term:
    """A softmax in the graph of a loss.

    Args:
        name: operation of the node, or name of the custom function.
        order: sequence number of the forward pass.
        classes: number of classes.
        rows: log-probabilities of ``LogSoftmax``, probabilities of ``Softmax``, else logits or
            hidden states.
        source: logits or hidden states with their graph, in the same rows; ``None`` if they were
            not remembered.
        root: node of the logits, or of the custom function.
        target: what its rows learn; ``None`` before the backward pass, or if nothing reached it.
    """

    name: str
    order: int
    classes: int
    rows: Tensor
    source: Tensor | None
    root: Any
    target: Target | None = None

    @property
    def kind(self) -> tuple[str, int]:
        """Return the name and the number of classes."""
        return self.name, self.classes

    @property
    def teaches(self) -> str:
        """Return what most rows learn."""
        assert self.target is not None
        live = self.target.is_live
        if self.name == "Softmax" and bool((self.target.weight[live] < 0).all()):
            return "a balance"
        forms = self.target.form[live].bincount(minlength=3)
        if forms[OTHER] > 0.1 * live.sum():
            return "another gradient"
        if forms[DISTRIBUTION] > 0.1 * live.sum():
            return "a distribution"
        return "a label"


class Trace(TorchFunctionMode):
    """Record token lookups, and the latest results by their graph node.

    Tell of each call of ``backward``.

    Args:
        before_backward: called with the tensor on which ``backward`` is called.
        after_lookup: called with the ids and the result of a lookup; returns the result.
    Attributes:
        lookups: sequence number, ids ``[sequences, columns]`` and size of the table of each lookup
            with gradients.
    """

    def __init__(
        self,
        before_backward: Callable[[Tensor], None] | None = None,
        after_lookup: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.before_backward = before_backward
        self.after_lookup = after_lookup
        self.lookups = list[tuple[int, Tensor, int]]()
        self.tensors = OrderedDict[Any, Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if func is Tensor.backward and self.before_backward is not None:
            self.before_backward(args[0])
        order = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        result = func(*args, **(kwargs or {}))
        if name == "backward":
            return result
        if name == "embedding" and len(args) > 1 and torch.is_grad_enabled():
            ids, table = args[:2]
            self.lookups.append((order, as_sequences(ids.detach()), len(table)))
            if self.after_lookup is not None:
                result = self.after_lookup(ids, result)
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.ndim and x.grad_fn is not None:
                self.tensors[x.grad_fn] = x
        while len(self.tensors) > _MOST_TENSORS:
            self.tensors.popitem(last=False)
        return result


def as_sequences(ids: Tensor) -> Tensor:
    """Return ids as ``[sequences, columns]``."""
    if ids.ndim:
        return ids.reshape(-1, ids.shape[-1])
    return ids.reshape(1, 1)


# ── the graph ─────────────────────────────────────────────────────────────────────────────────────


def _operation(node: Any) -> str:
    return re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2])


def _nodes(loss: Tensor, stops: Collection[Any] = ()) -> Iterator[tuple[Any, str, str]]:
    """Yield the nodes of a loss with their operation, and the first operation above them that names
    a term.

    The walk ends at softmaxes, products, leaves, and ``stops``.
    """
    stack: list[tuple[Any, str]] = [(loss.grad_fn, "")]
    visited = {None}
    while stack:
        node, term = stack.pop()
        if node in visited:
            continue
        visited.add(node)
        name = _operation(node)
        if not term and _LOSSES.match(name) and name != "NllLoss":
            term = name
        yield node, name, term
        is_end = node in stops or name in _SOFTMAXES or _PRODUCTS.match(name)
        if not is_end:
            stack += [(following, term) for following, _ in node.next_functions]


def terms_of(loss: Tensor, trace: Trace) -> tuple[list[Term], set[str]]:
    """Return the softmaxes of a loss, in order of the forward pass, and names of its other terms.

    A backward pass that follows fills their targets.
    """
    terms = {}
    for node, name, _ in _nodes(loss):
        if name in ("LogSoftmax", "Softmax"):
            terms[node] = _softmax(node, name, trace)
        elif name == "Logsumexp":
            roots = [n for n in _chain(node.next_functions[0][0]) if n in trace.tensors]
            if roots and roots[-1] not in terms:
                terms[roots[-1]] = _logsumexp(roots[-1], trace.tensors[roots[-1]])
        elif isinstance(node, BackwardCFunction):
            term = _function(node, name, trace)
            if term is not None:
                terms[node] = term
    other_names = set()
    for node, name, term_name in _nodes(loss, terms):
        if _PRODUCTS.match(name) and node not in terms:
            other_names.add(term_name or "a sum")
    return sorted(terms.values(), key=lambda term: term.order), other_names


def _chain(node: Any) -> list[Any]:
    """Return the nodes of which a node's result is a view or a cast, to the first other one."""
    chain = [node]
    while chain[-1] is not None and _VIEWS.match(_operation(chain[-1])):
        chain.append(chain[-1].next_functions[0][0])
    return chain


def _rows(x: Tensor, dim: int = -1) -> Tensor:
    """Return a tensor with its classes as columns."""
    return x.movedim(dim, -1).reshape(-1, x.shape[dim])


def _softmax(node: Any, name: str, trace: Trace) -> Term:
    result = node._saved_result
    dim = node._saved_dim
    dim -= 2**64 if dim >= 2**63 else 0  # saved without a sign
    rows = _rows(result.detach(), dim)
    chain = _chain(node.next_functions[0][0])
    root: Any = None
    source: Tensor | None = None
    for n in chain:
        if n in trace.tensors:
            root = n
            x = trace.tensors[n]
            if source is None and x.shape == result.shape:
                source = _rows(x, dim)
    if root is None and chain[-1] is not None:
        # Logits inside a fused function: take its hidden states.
        for n, _ in chain[-1].next_functions:
            x = trace.tensors.get(n, rows.new_zeros(0, 1))
            if source is None and x.numel() == len(rows) * x.shape[-1]:
                source = _rows(x)
    term = Term(name, node._sequence_nr(), rows.shape[1], rows, source, root)

    def read(gradients: Any, outer: Any) -> None:
        if outer[0] is not None:
            gradient = _rows(outer[0], dim)
            term.target = _by_blocks(
                _exact, -gradient if name == "LogSoftmax" else -gradient * rows
            )

    node.register_hook(read)
    return term


def _logsumexp(root: Any, logits: Tensor) -> Term:
    """Return the term of all uses of logits: their gradients are summed at the tensor."""
    source = _rows(logits)
    rows = source.detach()
    term = Term("Logsumexp", root._sequence_nr(), rows.shape[1], rows, source, root)

    def read(outer: Any) -> None:
        if outer[0] is not None:
            term.target = _fitted(rows, None, _rows(outer[0]))

    root.register_prehook(read)
    return term


def _function(node: Any, name: str, trace: Trace) -> Term | None:
    """Return the term of a custom function of logits, or of hidden states and a head."""
    tensors = {}
    for place, (edge, _) in enumerate(node.next_functions):
        x = trace.tensors.get(edge, getattr(edge, "variable", None))
        if x is not None and x.ndim > 1 and x.is_floating_point():
            tensors[place] = x
    place = next((place for place, x in tensors.items() if not x.is_leaf), -1)
    if place < 0:
        return None
    source = _rows(tensors.pop(place))
    rows = source.detach()
    head: Tensor | None = None
    classes = rows.shape[1]
    for x in tensors.values():
        if head is None and x.ndim == 2 and x.shape[1] == rows.shape[1]:
            head = x.detach()
            classes = len(head)
    term = Term(name, node._sequence_nr(), classes, rows, source, node)

    def read(gradients: Any, outer: Any) -> None:
        if gradients[place] is not None:
            term.target = _fitted(rows, head, _rows(gradients[place]))

    node.register_hook(read)
    return term


# ── the targets ───────────────────────────────────────────────────────────────────────────────────


def _by_blocks(function: Callable[..., Target], *matrices: Tensor, size: int = 0) -> Target:
    """Call a function on blocks of rows, and join the results on the CPU."""
    num_rows = max(1, _BLOCK // (size or matrices[0].shape[1]))
    targets = []
    for block in zip(*(matrix.split(num_rows) for matrix in matrices), strict=True):
        targets.append(Target(*map(Tensor.cpu, function(*block))))
    return joined(targets)


def _exact(target: Tensor) -> Target:
    """Read rows of w · target."""
    target = target.double()
    size = target.shape[1]
    weight = target.sum(-1)
    label = target.abs().argmax(-1, keepdim=True)
    top = target.gather(-1, label)
    rest = (weight[:, None] - top) / max(size - 1, 1)
    beside = (target - rest).scatter(-1, label, 0.0).norm(dim=-1)
    top = top[:, 0].abs()
    form = torch.where(beside > 1e-2 * top, DISTRIBUTION, LABEL)
    form[target.amin(-1) * target.amax(-1) < -1e-9 * top.square()] = OTHER
    smoothing = rest[:, 0] * size / weight.where(weight != 0, 1.0)
    zero = torch.zeros_like(weight)
    smoothing = smoothing.where(form == LABEL, zero)
    return Target(label[:, 0], weight, smoothing, zero, zero, form, top > 0, zero == 0)


def _logits(rows: Tensor, head: Tensor | None) -> Tensor:
    if head is None:
        return rows
    return rows @ head.to(rows.dtype).T


def _fitted(rows: Tensor, head: Tensor | None, gradient: Tensor) -> Target:
    """Fit rows g = w (p − target) W, where W is the head, or the identity for logits."""
    tolerance = 1e-5
    size = rows.shape[1]
    if head is not None:
        tolerance = 1e-4
        size = len(head)
        if head.numel() <= 2**27:
            head = head.double()
    if gradient.dtype.itemsize < 4:
        tolerance = 3e-2

    def fit(rows: Tensor, g: Tensor) -> Target:
        return _fitted_block(rows, head, g, tolerance)

    return _by_blocks(fit, rows, gradient, size=size)


def _through(x: Tensor, head: Tensor | None) -> Tensor:
    return x if head is None else x @ head


def _labels(mean: Tensor, head: Tensor | None, g: Tensor, tolerance: float) -> Tensor:
    """Return the label y of each row, ``[rows, 1]``, for which g is most nearly along (p − y) W.

    Args:
        mean: p W.
    """
    squares: Any = 1.0
    if head is not None:
        squares = head.square().sum(-1)
    # For each label at once: the length of (p − y) W, and its product with g.
    lengths = mean.square().sum(-1, keepdim=True) - 2 * _logits(mean, head) + squares
    along = (mean * g).sum(-1, keepdim=True) - _logits(g, head)
    floor = (tolerance / 20) ** 2 * float(torch.as_tensor(squares).mean())
    cosines = along / (lengths.clamp_min(0) + floor).sqrt()
    label: Tensor = cosines.abs().argmax(-1, keepdim=True)
    return label


def _fitted_block(rows: Tensor, head: Tensor | None, g: Tensor, tolerance: float) -> Target:
    """Fit a label alone, and a label with smoothing and a z-loss; take the first where it fits."""
    dtype = torch.float64 if head is None else head.dtype
    g = g.to(dtype)
    logits = _logits(rows.to(dtype), head)
    p = logits.softmax(-1)
    mean = _through(p, head)
    label = _labels(mean, head, g, tolerance)
    one_hot = torch.zeros_like(p).scatter(-1, label, 1.0)
    of_label = _through(p - one_hot, head)
    spread = _through(one_hot - 1 / p.shape[1], head)
    columns = torch.stack([of_label, spread, mean], -1)
    alone = (of_label * g).sum(-1) / of_label.square().sum(-1).clamp_min(1e-300)
    parts = torch.linalg.lstsq(columns.cpu(), g[..., None].cpu()).solution[..., 0].to(g.device)
    length = g.norm(dim=-1).clamp_min(1e-300)
    misfit = (g - alone[:, None] * of_label).norm(dim=-1) / length
    misfit_of_parts = (g - (columns @ parts[..., None])[..., 0]).norm(dim=-1) / length
    is_alone = misfit < tolerance
    misfit = torch.where(is_alone, misfit, misfit_of_parts)
    weight = torch.where(is_alone, alone, parts[:, 0])
    largest = p.amax(-1)
    smoothing = torch.where(is_alone, 0.0, parts[:, 1] / weight)
    # Of equal logits only w (1 − smoothing) can be told.
    smoothing[largest * p.shape[1] < 1.001] = torch.nan
    z_loss = torch.where(is_alone, 0.0, parts[:, 2] / weight / (2 * logits.logsumexp(-1)))
    is_sure = largest < 1 - min(10 * tolerance, 0.05)
    form = torch.where(is_sure & (misfit > 20 * tolerance), OTHER, LABEL)
    values = (weight.double(), smoothing.double(), z_loss.double(), misfit.double())
    return Target(label[:, 0], *values, form, g.abs().amax(-1) > 0, is_sure)
