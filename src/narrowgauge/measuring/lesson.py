"""``narrowgauge.teaches``: read from one backward pass which token each row of logits learns, with
which weight, and in which format.

No name of a module or argument is used: a softmax is a call of ``cross_entropy`` or ``log_softmax``.
Whatever made the loss of it, its gradient on a row of logits is w (p − target), and on the
log-probabilities −w target: p are the probabilities, w is the weight of the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from narrowgauge.measuring.passes import Backward, Loss, divided_losses, micro_batches
from narrowgauge.measuring.reading import Readings
from narrowgauge.measuring.units import unit_of
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.tables import Table
from narrowgauge.torch_support.put_back import put_back
from narrowgauge.torch_support.torch_names import graph_nodes

_BLOCK = 2**24
"""Logits that are read at once in float64."""
_SHIFTS = (1, 0, -1, 2, 3)
"""Distances of a label from its row's token that are tried; the first of equals counts."""
_MOST = 0.9
"""Fraction of the rows that must agree on what they learn."""
_LEAST = 2.0**-14
"""Sum of a row's gradient over its absolute sum, where float32 alone rounds."""
_SHOWN = {
    "learns": "learns", "rows": "rows", "learn": "learned", "weights sum to": "weight_sum", "padding learns": "padding_learned",
    "softmax": "function", "format": "dtype",
}  # fmt: skip


class Lesson(Readings):
    """Hold what a loss teaches; ``taught`` is a flat dict of the facts."""

    taught: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return readings and facts as values for JSON."""
        return super().to_dict() | {"taught": self.taught}


def teaches(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    *,
    backward: Backward | None = None,
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
            A loss scale of ``backward`` is a factor of the weights.
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
    softmaxes = [softmax for softmax in trace.softmaxes if softmax.learned is not None]
    lesson = Lesson()
    lesson.taught = {}
    if not softmaxes:
        words = "no gradient reached a cross_entropy or log_softmax of logits"
        lesson.lines.append(f"what the loss teaches is not read: {words}")
        return lesson
    most = max(softmax.classes for softmax in softmaxes)
    softmaxes = [softmax for softmax in softmaxes if softmax.classes == most]
    lesson.taught = facts = _facts(softmaxes, _padding_of(model))
    _add_readings(facts, lesson)
    lesson.lines = Table([facts], _SHOWN).plain().splitlines()
    if facts["excess"]:
        lesson.lines.append(
            f"The gradient on a row of logits sums to {facts['excess']:.2g} of its size, not to 0: "
            "not the softmax alone gives it."
        )
    return lesson


# ── the softmaxes of a step ───────────────────────────────────────────────────────────────────────


@dataclass
class _Softmax:
    """A softmax of a loss.

    Args:
        dtype: format of the softmax.
        ids: of the embedding with as many rows as there are classes, ``[sequences, columns]``.

    Attributes:
        learned: a row for each row of logits: weight w, label (the largest entry of the target), its
            size (0 if no gradient reached it), and whether the target is one label, possibly
            smoothed. ``None`` before the backward pass.
        excess: sum of the gradient on a row of logits over its absolute sum, where it is beyond
            roundings.
    """

    name: str
    classes: int
    dtype: torch.dtype
    ids: Tensor | None
    learned: Any = None
    excess: float = 0.0


def _learned(target: Tensor) -> Tensor:
    """Return weight, label, its size and form of rows w · target."""
    weight = target.sum(-1)
    size, label = target.abs().max(-1)
    return torch.stack([weight, label, size, size > weight.abs() / 2], 1)


class _Trace(TorchFunctionMode):
    """Record the softmaxes of losses, in the order of the forward pass, and read them in each call of
    ``Tensor.backward``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.softmaxes: list[_Softmax] = []
        self._ids: dict[int, Tensor] = {}
        self._is_backward = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_outermost = func is Tensor.backward
        self._is_backward |= is_outermost
        try:
            result = func(*args, **kwargs)
        finally:
            self._is_backward &= not is_outermost
        if self._is_backward or not torch.is_grad_enabled():
            return result
        name = getattr(func, "__name__", "")
        if name == "embedding" and args[0].ndim:
            ids = args[0].detach()
            self._ids[len(args[1])] = ids.reshape(-1, ids.shape[-1]).cpu()
        if name == "cross_entropy":
            self._note(name, args[0], min(1, args[0].ndim - 1), result)
        if name == "log_softmax":
            self._note(name, args[0], kwargs.get("dim", [-1, *args[1:2]][-1]), result)
        return result

    def _note(self, name: str, logits: Tensor, dim: Any, result: Tensor) -> None:
        nodes = [node for node in graph_nodes(result) if node.name() == "LogSoftmaxBackward0"]
        if not nodes or type(logits) is not Tensor:
            return  # of shards nothing is read
        classes = logits.shape[dim]
        softmax = _Softmax(name, classes, result.dtype, self._ids.get(classes))

        def read(gradients: Any) -> None:
            if self._is_backward:  # not inside a fused loss
                rows = -gradients[0].detach().movedim(dim, -1).reshape(-1, classes)
                blocks = rows.split(max(1, _BLOCK // classes))
                softmax.learned = torch.cat([_learned(x.double()) for x in blocks]).cpu()

        def read_sums(gradient: Tensor) -> None:
            sums = gradient.sum(dim, dtype=torch.float64).abs()
            sizes = gradient.norm(1, dim, dtype=torch.float64).clamp(min=1e-300)
            excess = float((sums / sizes).max())
            if excess > max(_LEAST, 4 * unit_of(gradient.dtype)):
                softmax.excess = excess

        self.softmaxes.append(softmax)
        nodes[0].register_prehook(read)
        logits.register_hook(read_sums)


# ── the facts ─────────────────────────────────────────────────────────────────────────────────────


def _facts(softmaxes: list[_Softmax], padding: Any) -> dict[str, Any]:
    """Return how many rows learn, which token, with which weights, and in which format."""
    learned = torch.cat([softmax.learned for softmax in softmaxes])
    weight, label, size, is_label = learned.T
    narrowest = min(softmaxes, key=lambda softmax: softmax.dtype.itemsize)
    facts = {
        "rows": len(learned), "learned": int((size > 0).sum()), "weight_sum": float(weight.sum()),
        "learns": "a distribution", "shift": None, "padding": padding, "padding_learned": 0,
        "function": softmaxes[0].name, "dtype": dtype_name(narrowest.dtype), "sequences": 0,
        "excess": max(softmax.excess for softmax in softmaxes),
    }  # fmt: skip
    if padding is not None:
        facts["padding_learned"] = int(((label == padding) & (is_label > 0)).sum())
    if float(is_label.sum()) < _MOST * facts["learned"]:
        return facts
    facts["learns"] = "a label"
    shifts = set()
    # Chunks of the logits of one pass have its tokens.
    for _, members in groupby(softmaxes, key=lambda softmax: id(softmax.ids)):
        chunks = list(members)
        ids = chunks[0].ids
        if ids is not None:
            facts["sequences"] += len(ids)
        shifts.add(_shift(torch.cat([chunk.learned for chunk in chunks]), ids))
    if len(shifts) == 1 and None not in shifts:
        (facts["shift"],) = shifts
        facts["learns"] = f"token t{facts['shift']:+d}"
    return facts


def _shift(learned: Tensor, ids: Tensor | None) -> int | None:
    """Return the distance that most labels have from their rows' tokens; ``None`` without one."""
    if ids is None:
        return None
    columns, rest = divmod(len(learned), len(ids))
    if rest or not 1 < columns <= ids.shape[1]:
        return None
    padded = nn.functional.pad(ids, (1, 3), value=-1)
    _, label, size, _ = learned.T
    for shift in _SHIFTS:
        expected = padded[:, 1 + shift : 1 + shift + columns].flatten()
        if float((expected == label)[size > 0].double().mean()) >= _MOST:
            return shift
    return None


def _padding_of(model: nn.Module) -> Any:
    """Return the padding token that an embedding or the model's settings declare."""
    for module in model.modules():
        settings = getattr(module, "config", None)
        padding = getattr(module, "padding_idx", getattr(settings, "pad_token_id", None))
        if padding is not None:
            return padding
    return None


def _add_readings(facts: dict[str, Any], lesson: Lesson) -> None:
    shift = facts["shift"]
    # The first padding token of a sequence may be the end of its text.
    if shift is not None and shift > 1:
        lesson.add("wrong-labels", "", facts["learned"])
    elif shift is not None and facts["padding_learned"] > facts["sequences"]:
        lesson.add("wrong-labels", "", facts["padding_learned"])
    if facts["dtype"] in ("bfloat16", "float16"):
        lesson.add("loss-rounding", "the log-softmax", unit_of(getattr(torch, facts["dtype"])))
