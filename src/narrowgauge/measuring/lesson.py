"""``narrowgauge.teaches``: read from one backward pass which token each row of logits learns, with
which weight, and in which format.

No name of a module or argument is used: a softmax is a call of ``cross_entropy`` or ``log_softmax``.
Whatever made the loss of it, its gradient on a row of logits is w (p − target), and on the
log-probabilities −w target: p are the probabilities, w is the weight of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from narrowgauge.measuring.passes import Backward, Loss, divided_losses, micro_batches
from narrowgauge.measuring.reading import Reading, Readings, measured
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.tables import Table, number_columns, text_columns
from narrowgauge.torch_support.put_back import put_back
from narrowgauge.torch_support.torch_names import graph_nodes

_BLOCK = 2**24
"""Logits that are read at once in float64."""
_SHIFTS = (1, 0, -1, 2, 3)
"""Distances of a label from its row's token that are tried; the first of equals counts."""
_MOST = 0.9
"""Share of the labels that settles a shift."""
_COLUMNS = (
    *text_columns(learns="learns"),
    *number_columns(
        rows="rows", learn="learned", weights_sum_to="weight_sum", padding_learns="padding_learned"
    ),
    *text_columns(softmax="function", format="dtype"),
)


class Lesson(Readings):
    """Hold what a loss teaches; ``taught`` is a flat dict of the facts."""

    def __init__(self, taught: dict[str, Any], readings: list[Reading], lines: list[str]) -> None:
        super().__init__(readings, lines)
        self.taught = taught

    def to_dict(self) -> dict[str, Any]:
        """Return readings and facts as values for JSON."""
        return super().to_dict() | {"taught": self.taught}


def teaches(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    *,
    backward: Backward | None = None,
    loss_scale: float = 1.0,
) -> Lesson:
    """Read what a loss teaches: which token each row of logits learns, with which weight, in which
    format.

    Print the result: a line of facts, and warnings. Gradients, buffers, generators and attributes of
    modules are as before at the end. On several ranks all make the call, and each reads its own rows.

    Args:
        model: as the loop calls it, possibly wrapped or compiled. Compiled parts run eagerly here.
        batch: this rank's batch. A list holds micro-batches; a list of tensors is one batch.
        loss: ``loss(model, batch)`` returns the objective of a batch.
        backward: ``backward(model, batch)`` computes the gradients of a step as the loop does, by
            calls of ``.backward()``, without the optimizer's step. ``None``: each micro-batch's
            loss, divided by their number.
        loss_scale: factor of the losses on which ``backward`` begins.
    Returns:
        Warnings and lines. ``taught`` is a flat dict of the facts, for assertions: ``shift``,
            ``learned``, ``weight_sum`` … It is empty, and the reason printed, where the loss calls
            neither ``cross_entropy`` nor ``log_softmax``, as a fused one.

    Cost: one step as configured, and about three copies of the logits.

    Example:
        >>> import torch, narrowgauge as ng
        >>> model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16))
        >>> def loss(model, tokens):
        ...     return torch.nn.functional.cross_entropy(model(tokens)[:, :-1].mT, tokens[:, 1:])
        >>> ng.teaches(model, torch.arange(24).view(2, 12) % 7, loss).taught["shift"]
        1
    """
    parts = micro_batches(model, batch, loss)
    with (
        put_back(model, model.parameters()),
        torch.compiler.set_stance("force_eager"),
        _Trace() as trace,
    ):
        if backward is None:
            divided_losses(model, parts, loss)
        else:
            backward(model, batch)
    softmaxes = _of_the_loss(trace.softmaxes)
    if not softmaxes:
        words = "no gradient reached a cross_entropy or log_softmax of logits"
        return Lesson({}, [], [f"what the loss teaches is not read: {words}"])
    facts = _facts(softmaxes, loss_scale)
    _add_padding(facts, model, softmaxes)
    lines = Table(_COLUMNS, [facts]).plain().splitlines()
    if facts["rest"] > max(1e-4, torch.finfo(softmaxes[0].dtype).eps):
        lines.append(
            f"over the classes the gradient on the logits sums to {facts['rest']:.2g} of its size, "
            "and a softmax's to 0: something stands between softmax and gradient, or beside them"
        )
    return Lesson(facts, _readings(facts), lines)


# ── the softmaxes of a step ───────────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class _Softmax:
    """A softmax of a loss.

    Args:
        logits: in rows, without their graph.
        dtype: format of the softmax.
        ids: of the embedding before it, ``[sequences, columns]``, if any.

    Attributes:
        learned: a row for each row of logits: weight w, label (the largest entry of the target),
            whether the target is one label, possibly smoothed, and whether a gradient reached it.
            ``None`` before the backward pass.
        rest: size of the sums of the gradient on the logits over the classes, relative to it.
    """

    name: str
    logits: Tensor
    dtype: torch.dtype
    ids: Tensor | None
    learned: Any = None
    rest: float = 0.0

    def read(self, gradient: Tensor) -> None:
        """Read what each row learns from a gradient on log-probabilities."""
        blocks = gradient.split(max(1, _BLOCK // gradient.shape[1]))
        self.learned = torch.cat([_learned(-block.double()) for block in blocks]).cpu()

    def read_sum(self, gradient: Tensor) -> None:
        """Read the sums of the gradient on the logits."""
        wide = gradient.double()
        size = float(wide.abs().sum())
        if size:
            self.rest = float(wide.sum(-1).abs().sum()) / size


def _is_log_softmax(node: Any) -> bool:
    return bool(node.name() == "LogSoftmaxBackward0")


def _learned(target: Tensor) -> Tensor:
    """Return weight, label, form and presence of rows w · target."""
    weight = target.sum(-1)
    label = target.abs().argmax(-1, keepdim=True)
    top = target.gather(-1, label)
    smooth = (weight[:, None] - top) / max(target.shape[1] - 1, 1)
    beside = (target - smooth).scatter(-1, label, 0.0).norm(dim=-1)
    size = top[:, 0].abs()
    has_one_sign = target.amin(-1) * target.amax(-1) >= -1e-9 * size.square()
    is_label = (beside <= 1e-2 * size) & has_one_sign
    return torch.stack([weight, label[:, 0], is_label, size > 0], 1)


class _Trace(TorchFunctionMode):
    """Record the softmaxes of losses, in the order of the forward pass, and read them in each call of
    ``Tensor.backward``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.softmaxes = list[_Softmax]()
        self._ids = dict[int, Tensor]()
        self._nodes = set[Any]()
        self._is_backward = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            self._is_backward = True
            try:
                return func(*args, **kwargs)  # type: ignore[no-untyped-call]
            finally:
                self._is_backward = False
                self._ids = {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if self._is_backward or not torch.is_grad_enabled():
            return result
        if name == "embedding" and args[0].ndim:
            ids = args[0].detach()
            self._ids[len(args[1])] = ids.reshape(-1, ids.shape[-1]).cpu()
        if name in ("cross_entropy", "log_softmax") and result.requires_grad:
            dim = kwargs.get("dim", [-1, *args[1:2]][-1])
            if name == "cross_entropy":
                dim = min(1, args[0].ndim - 1)
            if isinstance(dim, int) and type(args[0]) is Tensor:  # shards are not read
                self._note(name, args[0], dim, result)
        return result

    def _note(self, name: str, logits: Tensor, dim: int, result: Tensor) -> None:
        nodes = graph_nodes(result)
        node = next(filter(_is_log_softmax, nodes), None)
        if node is None or node in self._nodes:
            return
        self._nodes.add(node)
        classes = logits.shape[dim]

        def rows(x: Tensor) -> Tensor:
            return x.detach().movedim(dim, -1).reshape(-1, classes)

        # The table of the classes, else the largest one.
        table = max(self._ids, default=0)
        if classes in self._ids:
            table = classes
        softmax = _Softmax(name, rows(logits), result.dtype, self._ids.get(table))
        self.softmaxes.append(softmax)

        def read(gradients: Any) -> None:
            if self._is_backward:  # not inside a fused loss
                softmax.read(rows(gradients[0]))

        node.register_prehook(read)
        logits.register_hook(lambda gradient: softmax.read_sum(rows(gradient)))


def _of_the_loss(softmaxes: Sequence[_Softmax]) -> list[_Softmax]:
    """Return the softmaxes with the most classes of those that a gradient reached."""
    by_classes = dict[int, list[_Softmax]]()
    most = 0
    for softmax in softmaxes:
        if softmax.learned is not None:
            classes = softmax.logits.shape[1]
            # Chunks whose labels are all ignored stay: they hold the places of the others.
            by_classes.setdefault(classes, []).append(softmax)
            if softmax.learned[:, 3].any():
                most = max(most, classes)
    return by_classes.get(most, [])


# ── the facts ─────────────────────────────────────────────────────────────────────────────────────


def _facts(softmaxes: Sequence[_Softmax], loss_scale: float) -> dict[str, Any]:
    """Return how many rows learn, which token, with which weights, and in which format."""
    learned = torch.cat(list(map(attrgetter("learned"), softmaxes)))
    weights = learned[learned[:, 3] > 0, 0] / loss_scale
    narrowest = min(softmaxes, key=lambda softmax: softmax.dtype.itemsize)
    dtype = narrowest.dtype
    facts = {
        "rows": len(learned), "learned": len(weights), "weight_sum": float(weights.sum()),
        "unlearned": int((weights < 0).sum()), "learns": "a label", "shift": None,
        "function": softmaxes[0].name, "dtype": dtype_name(dtype),
        "rest": max(softmaxes, key=lambda softmax: softmax.rest).rest, "log_error": 0.0,
    }  # fmt: skip
    if dtype.itemsize < 4:
        log_p = softmaxes[0].logits.float().log_softmax(-1)
        facts["log_error"] = torch.finfo(dtype).eps / 2 * float(log_p.abs().median())
    if float(learned[:, 2].sum()) < _MOST * len(weights):
        return facts | {"learns": "a distribution"}
    shifts = _shifts(softmaxes)
    if shifts:
        facts["shift"] = shifts[0]
        facts["learns"] = "token " + " and ".join(f"t{shift:+d}" for shift in shifts)
    return facts


def _shifts(softmaxes: Sequence[_Softmax]) -> list[int]:
    """Return the distances of labels from their rows' tokens, of each softmax over the tokens of a
    pass. Softmaxes with no more rows than there are tokens are chunks of one.
    """
    groups = dict[int, list[_Softmax]]()
    for softmax in softmaxes:
        groups.setdefault(id(softmax.ids), []).append(softmax)
    shifts = set[int]()
    for members in groups.values():
        parts = list(map(attrgetter("learned"), members))
        ids = members[0].ids
        if ids is not None and sum(map(len, parts)) <= ids.numel():
            parts = [torch.cat(parts)]
        for part in parts:
            shift = _shift(part, ids)
            if shift is None:
                return []
            shifts.add(shift)
    return sorted(shifts)


def _columns(num_rows: int, ids: Any) -> int:
    """Return the logits of each sequence; 0 if there are not as many for each, or one alone."""
    if ids is None:
        return 0
    columns, rest = divmod(num_rows, len(ids))
    if rest or not 1 < columns <= ids.shape[1]:
        return 0
    return columns


def _shift(learned: Tensor, ids: Any) -> int | None:
    """Return the distance that most labels have from their rows' tokens; ``None`` without one."""
    columns = _columns(len(learned), ids)
    if not columns:
        return None
    padded = nn.functional.pad(ids, (1, 3), value=-1)
    is_live = learned[:, 3] > 0
    for shift in _SHIFTS:
        expected = padded[:, 1 + shift : 1 + shift + columns].flatten()
        if float((expected == learned[:, 1])[is_live].double().mean()) >= _MOST:
            return shift
    return None


def _add_padding(facts: dict[str, Any], model: nn.Module, softmaxes: Sequence[_Softmax]) -> None:
    """Add the padding token that an embedding or the model's settings declare, and how many rows
    learn it.
    """
    learned = torch.cat(list(map(attrgetter("learned"), softmaxes)))
    sequences = {}
    for softmax in softmaxes:
        if softmax.ids is not None:
            sequences[id(softmax.ids)] = len(softmax.ids)
    facts |= {"padding": None, "padding_learned": 0, "sequences": sum(sequences.values())}
    for module in model.modules():
        settings = getattr(module, "config", None)
        padding = getattr(module, "padding_idx", getattr(settings, "pad_token_id", None))
        if padding is not None:
            is_padding = (learned[:, 1] == padding) & (learned[:, 2:] > 0).all(1)
            facts |= {"padding": padding, "padding_learned": int(is_padding.sum())}


def _readings(facts: dict[str, Any]) -> list[Reading]:
    readings = []
    shift = facts["shift"]
    # The first padding token of a sequence may be the end of its text.
    if shift is not None and facts["padding_learned"] > facts["sequences"]:
        readings.append(measured("wrong-labels", "", facts["padding_learned"], 0))
    if shift is not None and shift > 1:
        readings.append(measured("wrong-shift", "", shift, 1))
    if facts["log_error"]:
        readings.append(measured("narrow-softmax", "", facts["log_error"], 0))
    return readings
