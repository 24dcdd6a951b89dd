"""Recompute the gradients of a run's step in float32, with one place of rounding at a time: find the cost of each rounding.

A float32 copy of the model takes the step with the stored weights: the exact step. Then each place of the recipe's rounding is
put in alone, and at last all together. A module computes in float32, or in the recipe's dtype if its place is put in. Values are
cast where they pass from one module to another. The three matmuls of a low-precision linear layer use the layer's own casts
(:mod:`narrowgauge.matmul.layer_matmuls`), with its random bits and delayed scales. A module's class decides its place: a linear
layer, a norm or an attention. Everything else is the residual stream.

``ng.audit`` measures the storage's losses of an update.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from narrowgauge.checkpoints.saving import latest_checkpoint
from narrowgauge.errors import NarrowgaugeError, RecordError
from narrowgauge.matmul.layer_matmuls import cast_to_slot, outlier_columns, scales_to_fold
from narrowgauge.matmul.linear import Linear, is_linear, is_transposed
from narrowgauge.matmul.operand import Operand, drawn_signs
from narrowgauge.numerics.quantization import padded, rotate
from narrowgauge.optim.accumulation import AccumulationWarning
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.schema import Row
from narrowgauge.spec.computes import COMPUTES, SLOTS, keeps_outlier_weights
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import STORAGES
from narrowgauge.spec.tables import Table, name_columns, number_columns, text_columns
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.language_model import loss_sum
from narrowgauge.trainer.recovery import skipped_batches
from narrowgauge.trainer.session import Session, build, data_of_run
from narrowgauge.trainer.step import differentiate, losses, train_step

PLACES: dict[str, str] = {
    "inputs": "linear layers cast their inputs, in all their matmuls",
    "weights": "all layers take the rounded weights, and linear layers cast them",
    "output-gradients": "linear layers cast the gradients of their outputs",
    "linear-outputs": "outputs of linear layers are rounded, and the gradients that reach them",
    "attention": "attention computes rotary embedding, softmax and products in the recipe's dtype",
    "norms": "outputs of norms are rounded, and the gradients that reach them",
    "residual": "the residual stream and products of gates have the recipe's dtype",
    "logits": "the head's logits are rounded, and their gradients",
    "weight-gradients": "gradients of weights are rounded to the format of their weights",
    "accumulation": "gradients of micro-batches are summed in bfloat16",
}
"""The places of a step's rounding, each with what it does alone."""
VARIANTS: dict[str, str] = {
    "run": "the run's own kernels",
    "all": "all places together, with sums in float32",
    **PLACES,
}
_CAST_AT = {"input": "inputs", "weight": "weights", "gradient": "output-gradients"}
"""The place at which each tensor of a layer is cast."""
_COLUMNS = ("batch_crc", "lr", "loss", "grad_norm", "skipped", "loss_scale")
"""Columns of a step's row that its arithmetic gives, in order."""
_OF_ONE_PROCESS: dict[str, Any] = {
    "replicas": 1, "offload": False, "narrow_gather": False, "verify_every": 0, "compile": False, "fingerprints_every": 0,
    "gauges_every": 0, "activation_checkpointing": False,
}  # fmt: skip
"""Settings that change no bit of an eager step on one process."""

Tensors = dict[str, Tensor]
Result = tuple[float, Tensors]
"""The mean loss of a step, and its gradients, unclipped and at loss scale 1."""


@dataclass(frozen=True)
class RoundingPlaces:
    """The gradients of a step with its roundings, compared with the float32 gradients.

    Args:
        started: the step of the checkpoint from which the steps were repeated; 0 for the initial weights.
        mismatch: a sentence about the first difference between the repeated steps and the record; empty without one.
        rows: ``name``, a key of :data:`VARIANTS`; relative differences of ``loss`` and ``gradient``; and ``share``, the
            squared difference of the gradient over that of ``all``. ``None`` if not finite. Places without rounding are left
            out.
    """

    step: int
    started: int
    mismatch: str
    rows: tuple[Row, ...]

    def table(self) -> Table:
        """Return the variants as a table."""
        columns = (
            *name_columns(variant="name"),
            *number_columns(loss="loss", gradient="gradient", share="share"),
            *text_columns(what_is_rounded="rounded"),
        )
        rows = [
            {name: value if value is None else float(f"{value:.3g}") for name, value in row.items() if name != "name"}
            | {"name": row["name"], "rounded": VARIANTS[row["name"]]}
            for row in self.rows
        ]
        return Table(
            columns, rows, "Relative differences to float32, and the share of the squared difference of all places"
        )

    def __str__(self) -> str:
        since = f"checkpoint {self.started}" if self.started else "the initial weights"
        match = self.mismatch or "it has the bits of the record"
        return f"Step {self.step}, repeated from {since}: {match}.\n{self.table().plain()}".rstrip()


def rounding_places(
    folder: str | Path,
    step: int,
    *,
    say: Callable[[str], object] = lambda line: None,
) -> RoundingPlaces:
    """Recompute the gradients of a run's step in float32, and with each place of their rounding alone.

    Nothing in the run folder changes, not even a lock. The model is not compiled.

    Args:
        folder: the run folder of ``narrowgauge train``.
        step: number of the step, from 1.
        say: called with a sentence before each slow part.
    Returns:
        The variants as rows; printed as a table.
    Raises:
        RecordError: the run or step is missing, or its data, model or checkpoint cannot be used.

    Cost: the steps since the nearest checkpoint, then a dozen eager passes in float32; memory for two models.
    Example: ``print(narrowgauge.rounding_places("runs/first", 28))``
    """
    run = require_step(Path(folder), step)
    config = TrainConfig.from_dict(run.config, str(run.path / "run.toml"))
    if config.recipe.compute.transform:
        raise NarrowgaugeError(
            f"Cannot compute a step of '{config.recipe.title}' in float32: '{config.recipe.compute.transform}' changes it.",
            "Choose a run of another recipe.",
        )
    config = dataclasses.replace(config, **_OF_ONE_PROCESS)
    data, recorded = data_of_run(run, config), {row["step"]: row for row in run.steps}
    with _threads_of(run), tempfile.TemporaryDirectory() as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore", AccumulationWarning)
        session = build(config, Path(temporary), data)
        session.skipped = skipped_batches(run.events)
        if (checkpoint := latest_checkpoint(run.path, lambda path, reason: None, at_most=step - 1)) is not None:
            session.load(checkpoint)
        started, mismatch = session.step, ""
        say(f"Repeating the run up to step {step}.")
        while session.step < step - 1:
            row = recorded.get(session.step + 1, {})
            is_left_out = "spike" in row and bool(row.get("skipped"))
            session.optimizer.skip_above = -1.0 if is_left_out else math.inf
            mismatch = mismatch or _mismatch(row, train_step(session))
        say("Computing the step in float32, and with each place of rounding alone.")
        wide = dataclasses.replace(config, recipe=Recipe(COMPUTES["float32"], STORAGES["float32"]))
        plain = build(wide, Path(temporary), data)
        rows, loss = _compare(_Step(session, plain))
        last = {"step": step, "batch_crc": session.batch_crc, "loss": loss}
        mismatch = mismatch or _mismatch(recorded.get(step, {}), last)
    return RoundingPlaces(step, started, mismatch, tuple(rows))


def require_step(folder: Path, step: int) -> Run:
    """Return the record of a run of the trainer that holds a step."""
    run = read_run(folder)
    if run.is_foreign or "recorder" in run.run:
        raise RecordError(
            f"Cannot repeat a step of {folder} because another program has its model and data.",
            "Name a run of narrowgauge train.",
        )
    last = run.steps[-1]["step"] if run.steps else 0
    if not 1 <= step <= last:
        raise RecordError(
            f"Cannot repeat step {step} of {folder}: its record holds {f'steps 1 to {last}' if last else 'no step'}.",
            "Name one of its steps." if last else "Train it first.",
        )
    return run


def _mismatch(recorded: Row, row: Row) -> str:
    for name in _COLUMNS:
        if name in recorded and name in row and repr(recorded[name]) != repr(row[name]):  # NaN equals NaN
            return f"the record differs at step {row['step']}, where {name} was {recorded[name]} and is {row[name]}"
    return ""


@contextmanager
def _threads_of(run: Run) -> Iterator[None]:
    """Use the run's number of threads, since sums inside a matmul depend on it."""
    before, recorded = torch.get_num_threads(), run.run.get("machine", {}).get("num_threads")
    torch.set_num_threads(recorded if isinstance(recorded, int) and recorded > 0 else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ── the variants ────────────────────────────────────────────────────────────────────────────────────────────────────


def _compare(step: _Step) -> tuple[list[Row], float]:
    """Return the rows of all variants and the run's loss. The run's own pass is last, as it advances delayed scales."""
    exact = step.gradients(())
    every = _row("all", step.gradients(PLACES), exact)
    rows = [row for name in PLACES if (row := _row(name, step.gradients((name,)), exact))["gradient"] != 0.0]
    for row in rows:
        if row["gradient"] is not None and every["gradient"]:
            row["share"] = (row["gradient"] / every["gradient"]) ** 2  # roundings of different places add up in squares
    run = step.gradients_of_run()
    return [_row("run", run, exact), every, *rows], run[0]


def _row(name: str, result: Result, exact: Result) -> Row:
    loss = abs(result[0] - exact[0]) / max(abs(exact[0]), 1e-30)
    gradient = _difference(result[1], exact[1])
    is_finite = math.isfinite(loss) and math.isfinite(gradient)
    differences = {"loss": loss, "gradient": gradient} if is_finite else dict.fromkeys(("loss", "gradient"))
    return {"name": name, **differences, "share": None}


def _difference(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference of two sets over the norm of the second, in float64; 0 for two zeros."""
    off = sum(float((tensors[name].double() - x.double()).square().sum()) for name, x in expected.items())
    total = sum(float(x.double().square().sum()) for x in expected.values())
    return (off / total) ** 0.5 if total else float(off > 0)


class _Step:
    """Computes the gradients of the next step of a session, in the float32 model of ``plain``.

    Attributes:
        rounded: the places that round now.
        dtype: the dtype of the recipe; ``None`` if it is float32.
        is_autocast: the residual stream and norms stay in float32, as under autocast.
        own_dtypes: the dtypes of the modules that are running, the innermost last.
    """

    def __init__(self, session: Session, plain: Session) -> None:
        self.session, self.plain = session, plain
        recipe, optimizer, scaler = session.config.recipe, session.optimizer, session.optimizer.loss_scaler
        self.scale = 1.0 if scaler is None else float(scaler.scale(torch.ones((), dtype=torch.float32)))
        self.named: Tensors = dict(session.model.named_parameters())
        trained = optimizer.parameter_names()
        self.visible = {name: p.detach().float().clone() for name, p in self.named.items()}
        self.stored = self.visible | {name: optimizer.stored(p) for name, p in self.named.items() if p in trained}
        self.rounded: frozenset[str] = frozenset()
        self.dtype: torch.dtype | None = None if recipe.dtype == "float32" else getattr(torch, recipe.dtype)
        self.is_autocast = recipe.storage.visible == "float32"
        self.own_dtypes: list[torch.dtype] = []

    def gradients_of_run(self) -> Result:
        """Compute the gradients as the run does."""
        loss = float(differentiate(self.session))
        tensors = {n: p.grad.detach().float() / self.scale for n, p in self.named.items() if p.grad is not None}
        self.session.optimizer.zero_grad(set_to_none=True)
        return loss, tensors

    def gradients(self, rounded: Collection[str]) -> Result:
        """Compute the gradients with rounding at these places alone."""
        self.rounded = frozenset(rounded)
        values = self.visible if "weights" in rounded else self.stored
        with torch.no_grad():
            for name, parameter in self.plain.model.named_parameters():
                parameter.copy_(values[name])
        total: Tensors = {}
        loss = 0.0
        with self._attached():
            for _, share in losses(self.session, lambda tokens: loss_sum(self.plain.model, tokens, chunked=False)):
                (share * self.scale).backward()
                loss += float(share.detach())
                for name, parameter in self.plain.model.named_parameters():
                    if parameter.grad is not None:
                        gradient, parameter.grad = self._stored_gradient(parameter.grad, name), None
                        total[name] = self._sum(total[name], gradient, name) if name in total else gradient
        return loss, {name: self._stored_gradient(gradient, name) / self.scale for name, gradient in total.items()}

    def _stored_gradient(self, gradient: Tensor, name: str) -> Tensor:
        """Round a gradient to the format in which the run's parameter holds it."""
        return gradient.to(self.named[name].dtype).float() if "weight-gradients" in self.rounded else gradient

    def _sum(self, total: Tensor, gradient: Tensor, name: str) -> Tensor:
        """Add two micro-batches' gradients as the run does."""
        is_narrow = self.session.config.accumulation_dtype == "bfloat16" and self.named[name].element_size() == 2
        total = total + gradient
        return total.bfloat16().float() if is_narrow and "accumulation" in self.rounded else total

    # ── the forward pass ──────────────────────────────────────────────────────────────────────────────────────────────

    def dtype_at(self, place: str) -> torch.dtype:
        """Return the dtype of a place: float32 unless it rounds now."""
        is_wide = self.is_autocast and place in ("norms", "residual")
        return self.dtype if place in self.rounded and not is_wide and self.dtype is not None else torch.float32

    @contextmanager
    def _attached(self) -> Iterator[None]:
        """Cast values where they enter and leave a module, and compute linear layers and embeddings as the recipe does."""
        undo: list[Callable[[], Any]] = []
        kept_modules: list[str] = []
        head = self.plain.model.get_output_embeddings()
        for name, module in self.plain.model.named_modules():
            if any(name.startswith(f"{outer}.") for outer in kept_modules):
                continue
            place = _place_of(module, head)
            if name and self.session.config.recipe.keeps(name):
                kept_modules.append(name)
                place = ""
            forward = {"linear-outputs": self._linear, "logits": self._linear, "embedding": self._embedding}.get(place)
            if forward is not None and "forward" not in vars(module):
                module.forward = partial(forward, name, module)
                undo.append(partial(delattr, module, "forward"))
            # Norms and matmuls compute in float32 and round their outputs.
            own_dtype = self.dtype_at(place) if place in ("attention", "residual") else torch.float32
            undo += [
                module.register_forward_pre_hook(partial(self._enter, own_dtype), with_kwargs=True).remove,
                module.register_forward_hook(partial(self._leave, self.dtype_at(place))).remove,
            ]
        try:
            yield
        finally:
            self.own_dtypes.clear()
            for remove in reversed(undo):
                remove()

    def _enter(self, own_dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.own_dtypes.append(own_dtype)
        return _cast((args, kwargs), own_dtype)

    def _leave(self, rounded: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
        self.own_dtypes.pop()
        return _cast(_cast(output, rounded), self.own_dtypes[-1] if self.own_dtypes else torch.float32)

    def _embedding(self, name: str, module: Any, ids: Tensor) -> Tensor:
        """Look up rows. Their gradient is added up in the format of the weight, token by token."""
        weight, dtype = module.weight, self._dtype_of(name)
        rows = F.embedding(ids, weight, module.padding_idx)
        if dtype is torch.float32 or "weight-gradients" not in self.rounded:
            return rows
        narrow = F.embedding(ids, weight.to(dtype), module.padding_idx).float()
        return narrow + (rows - narrow).detach()

    def _linear(self, name: str, module: Any, x: Tensor) -> Tensor:
        """Compute a linear layer as the recipe does."""
        layers = {} if self.session.linears is None else self.session.linears.layers
        layer, weight, dtype = layers.get(name), module.weight, self._dtype_of(name)
        if "weight-gradients" in self.rounded:
            # Round the gradient as it arrives, before the gradients of the weight's other uses are added.
            weight = weight.view_as(weight)
            weight.register_hook(lambda gradient: gradient.to(dtype).float())
        weight = weight.t() if is_transposed(module) else weight
        if isinstance(layer, Linear) and not layer.compute.is_wide:
            casts = _Casts(layer, self.rounded, x.shape[-2] if x.ndim > 2 else 1)
            product: Any = _Product
            y: Tensor = product.apply(x.reshape(-1, x.shape[-1]), weight, module.bias, casts)
            return y.view(*x.shape[:-1], -1)
        if self.is_autocast:
            x, weight = (
                _cast(_cast(t, self.dtype_at(p)), torch.float32) for t, p in ((x, "inputs"), (weight, "weights"))
            )
        return F.linear(x, weight, module.bias)

    def _dtype_of(self, module: str) -> torch.dtype:
        """Return the dtype of a module's weight in the run. A tied weight has its first name."""
        layer: Any = self.session.model.get_submodule(module)
        dtype: torch.dtype = layer.weight.dtype
        return dtype


def _place_of(module: nn.Module, head: nn.Module) -> str:
    """Return the place of a module's own operations, or of its output."""
    kind = type(module).__name__.lower()
    if is_linear(module):
        return "logits" if module is head else "linear-outputs"
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "norms" if "norm" in kind else "attention" if "attention" in kind or "rotary" in kind else "residual"


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Cast all floating tensors in nested values."""
    return tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, values)


# ── a narrow layer with some of its casts ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class _Casts:
    """The casts of one layer at the ``rounded`` places. ``length`` is the tokens of a sequence."""

    layer: Linear
    rounded: Collection[str]
    length: int

    def product(self, matmul: str, left: Tensor, right: Tensor) -> Tensor:
        """Compute one of the three matmuls in float32, without the padding of its operands."""
        slots, compute = (f"{matmul}.left", f"{matmul}.right"), self.layer.compute
        right_operand = self._operand(slots[1], right, None)
        fold = None if right_operand is None else scales_to_fold(right_operand.outer, compute, matmul)
        a = self._values(slots[0], left, self._operand(slots[0], left, fold), fold)
        b = self._values(slots[1], right, right_operand)
        if matmul == "output" and right_operand is not None and keeps_outlier_weights(compute):
            b = torch.where(outlier_columns(left, compute.output.left.outliers), right, b)
        rows, columns = left.shape[1 - SLOTS[slots[0]].dim], right.shape[1 - SLOTS[slots[1]].dim]
        a, b = a if SLOTS[slots[0]].dim == 1 else a.t(), b.t() if SLOTS[slots[1]].dim == 1 else b
        return (a @ b)[:rows, :columns]

    def _operand(self, slot: str, x: Tensor, fold: Tensor | None) -> Operand | None:
        """Return the operand that the layer casts; ``None`` where nothing is cast."""
        compute = self.layer.compute
        cast_slot = compute.cast_slots[slot]
        if _CAST_AT[SLOTS[slot].tensor] not in self.rounded or compute.casts[cast_slot].is_wide:
            return None
        keys, history = self.layer.keys(), self.layer.amax_history
        return cast_to_slot(x, compute, cast_slot, keys=keys, history=history, sequence_length=self.length, fold=fold)

    def _values(self, slot: str, x: Tensor, operand: Operand | None, fold: Tensor | None = None) -> Tensor:
        """Return the float32 values of an operand, in the layout of its tensor. Pad only a rotated operand."""
        cast = self.layer.compute.casts[slot]
        is_rotated = cast.rotation != "none"
        if operand is None:
            return self._rotated(slot, x) if is_rotated else x
        values = operand.data.float() if operand.outer is None else operand.data.float() * operand.outer
        if is_rotated:
            return values
        values = values[: x.shape[0], : x.shape[1]]
        values = values if fold is None else values / fold
        return torch.where(outlier_columns(x, cast.outliers), x, values) if cast.outliers else values

    def _rotated(self, slot: str, x: Tensor) -> Tensor:
        """Rotate ``x`` as the cast of a slot does, without rounding."""
        cast, dim = self.layer.compute.casts[slot], SLOTS[slot].dim
        signs = drawn_signs(cast, x.shape[dim], dim, self.layer.keys(), SLOTS[slot].matmul)
        return rotate(padded(x if signs is None else x * signs, cast, dim), dim, cast.rotation)


class _Product(torch.autograd.Function):
    """``x · wᵀ + b`` of ``[tokens, in]`` and ``[out, in]``, and its gradients, in a layer's casts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, casts: _Casts) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.casts, ctx.has_bias = casts, bias is not None
        y = casts.product("output", x, weight)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        by_input = ctx.casts.product("grad_input", grad, weight)
        by_weight = ctx.casts.product("grad_weight", grad, x)
        return by_input, by_weight, grad.sum(0) if ctx.has_bias else None, None
