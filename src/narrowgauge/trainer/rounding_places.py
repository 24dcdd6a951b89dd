"""Recompute the gradients of a run's step, leaving out one place of rounding at a time: find the cost of each rounding.

The model computes in float32 throughout. The recipe rounds the output of a matmul, a norm or a sum of the residual stream,
and the gradients in backward. At these places the value is rounded to the recipe's dtype and kept in float32. So each place can
be left out alone. Sums inside a kernel stay float32, as in the recipe's kernels. A module's class decides what is rounded
in it: a linear layer, a norm or an attention. Everything else is the residual stream. The three matmuls of a low-precision
linear layer use the layer's own casts (:mod:`narrowgauge.matmul.layer_matmuls`), with its random bits and delayed scales.

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
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
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
from narrowgauge.trainer.recovery import skipped_batches
from narrowgauge.trainer.session import Session, build, data_of_run
from narrowgauge.trainer.step import differentiate, losses, train_step

PLACES: dict[str, str] = {
    "inputs": "linear layers take their inputs uncast, in all their matmuls",
    "weights": "all layers take the stored weights uncast and uncut",
    "output-gradients": "linear layers take gradients of their outputs uncast",
    "linear-outputs": "the outputs of linear layers are not rounded",
    "attention": "rotary embedding, softmax and products of attention are not rounded",
    "norms": "the outputs of norms are not rounded",
    "residual": "the residual stream and products of gates are not rounded",
    "logits": "the head's logits are not rounded",
    "own-casts": "casts that the model's own code makes are left out",
    "activation-gradients": "gradients between layers are not rounded",
    "weight-gradients": "gradients of weights are neither rounded nor added up in the format of their weights",
    "accumulation": "gradients of micro-batches are summed in float32",
}
"""The places of a step's rounding, each with the effect of leaving it out."""
VARIANTS: dict[str, str] = {
    "run": "nothing: the run's own kernels",
    "emulated": "nothing: every rounding of the recipe, with sums in float32",
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


@dataclass(frozen=True)
class RoundingPlaces:
    """The gradients of a step with roundings left out, compared with the float32 gradients.

    Args:
        started: the step of the checkpoint from which the steps were repeated; 0 for the initial weights.
        mismatch: a sentence about the first difference between the repeated steps and the record; empty without one.
        rows: ``name``, a key of :data:`VARIANTS`; relative differences of ``loss`` and ``gradient``; and ``removes``, the
            fraction of the emulated gradient's squared difference that leaving the place out removes; ``None`` if not finite.
    """

    step: int
    started: int
    mismatch: str
    rows: tuple[Row, ...]

    def table(self) -> Table:
        """Return the variants as a table."""
        columns = (
            *name_columns(variant="name"),
            *number_columns(loss="loss", gradient="gradient", removes="removes"),
            *text_columns(what_is_changed="changed"),
        )
        title = (
            "Relative differences to float32, and the share of the squared difference that leaving a place out removes"
        )
        rows = [
            {name: value if value is None else float(f"{value:.3g}") for name, value in row.items() if name != "name"}
            | {"name": row["name"], "changed": VARIANTS[row["name"]]}
            for row in self.rows
        ]
        return Table(columns, rows, title)

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
    """Recompute the gradients of a run's step in float32, and with each place of their rounding left out alone.

    Nothing in the run folder changes, not even a lock. The model is not compiled.

    Args:
        folder: the run folder of ``narrowgauge train``.
        step: number of the step, from 1.
        say: called with a sentence before each slow part.
    Returns:
        The variants as rows; printed as a table.
    Raises:
        RecordError: the run or step is missing, or its data, model or checkpoint cannot be used.

    Cost: the steps since the nearest checkpoint, then about fifteen eager passes in float32; memory for two models.
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
            judgement: Any = _RecordedJudgement(row) if config.on_spike != "report" else None
            mismatch = mismatch or _mismatch(row, train_step(session, judgement))
        say("Computing the step in float32, and with each place of rounding left out.")
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


class _RecordedJudgement:
    """Skip the update of a step that the run skipped as a spike. Replaces the trainer's judgement."""

    def __init__(self, row: Row) -> None:
        self.is_left_out = "spike" in row and bool(row.get("skipped"))

    def judge_loss(self, value: float) -> float:
        return -1.0 if self.is_left_out else math.inf

    def judge_norm(self, value: float | None) -> None:
        return None


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


class _Gradients(NamedTuple):
    """The gradients of a step, unclipped and at loss scale 1, and its mean loss."""

    loss: float
    tensors: Tensors


def _compare(step: _Step) -> tuple[list[Row], float]:
    """Return the rows of all variants and the run's loss. The run's own pass is last, as it advances delayed scales."""
    wide, emulated = step.gradients(PLACES), step.gradients(())
    rows = [_row("emulated", emulated, wide)]
    for name in PLACES:
        if name in step.emulation.seen:
            row = _row(name, step.gradients((name,)), wide)
            left, whole = row["gradient"], rows[0]["gradient"]
            # Roundings of different places add up in squares.
            rows.append({**row, "removes": 1.0 - (left / whole) ** 2} if left is not None and whole else row)
    run = step.gradients_of_run()
    return [_row("run", run, wide), *rows], run.loss


def _row(name: str, gradients: _Gradients, wide: _Gradients) -> Row:
    loss = abs(gradients.loss - wide.loss) / max(abs(wide.loss), 1e-30)
    gradient = _difference(gradients.tensors, wide.tensors)
    is_finite = math.isfinite(loss) and math.isfinite(gradient)
    return {
        "name": name,
        "loss": loss if is_finite else None,
        "gradient": gradient if is_finite else None,
        "removes": None,
    }


def _difference(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference of two sets over the norm of the second, in float64; 0 for two zeros."""
    off = sum(float((tensors[name].double() - x.double()).square().sum()) for name, x in expected.items())
    whole = sum(float(x.double().square().sum()) for x in expected.values())
    return (off / whole) ** 0.5 if whole else float(off > 0)


class _Step:
    """Computes the gradients of the next step of a session."""

    def __init__(self, session: Session, plain: Session) -> None:
        self.session, self.plain = session, plain
        self.emulation = _Emulation(plain, session)
        scaler, optimizer = session.optimizer.loss_scaler, session.optimizer
        self.scale = 1.0 if scaler is None else float(scaler.scale(torch.ones((), dtype=torch.float32)))
        self.named: Tensors = dict(session.model.named_parameters())
        trained = optimizer.parameter_names()
        self.stored = {name: optimizer.stored(p) for name, p in self.named.items() if p in trained}
        self.visible = {name: p.detach().float().clone() for name, p in self.named.items()}

    def gradients_of_run(self) -> _Gradients:
        """Compute the gradients as the run does."""
        loss = float(differentiate(self.session))
        tensors = {n: p.grad.detach().float() / self.scale for n, p in self.named.items() if p.grad is not None}
        self.session.optimizer.zero_grad(set_to_none=True)
        return _Gradients(loss, tensors)

    def gradients(self, wide: Collection[str]) -> _Gradients:
        """Compute the gradients with the roundings at all places but ``wide`` emulated."""
        session, emulation = self.session, self.emulation
        emulation.wide = frozenset(wide)
        self._set_weights("weights" in wide)
        total: Tensors = {}
        loss = 0.0
        for _, share in losses(session, emulation.loss):
            (share * self.scale).backward()
            loss += float(share.detach())
            for name, parameter in self.plain.model.named_parameters():
                if parameter.grad is not None:
                    gradient, parameter.grad = self._held(parameter.grad, name), None
                    total[name] = self._sum(total[name], gradient, name) if name in total else gradient
        return _Gradients(loss, {name: self._held(gradient, name) / self.scale for name, gradient in total.items()})

    def _set_weights(self, is_stored: bool) -> None:
        values = self.visible | (self.stored if is_stored else {})
        with torch.no_grad():
            for name, parameter in self.plain.model.named_parameters():
                parameter.copy_(values[name])
        if any(bool((self.visible[name] != self.stored[name]).any()) for name in self.stored):
            self.emulation.seen.add("weights")

    def _held(self, gradient: Tensor, name: str) -> Tensor:
        """Round a gradient to the format in which the run's parameter holds it."""
        dtype = self.named[name].dtype
        if dtype is torch.float32:
            return gradient
        self.emulation.seen.add("weight-gradients")
        return gradient if "weight-gradients" in self.emulation.wide else _rounded(gradient, dtype)

    def _sum(self, total: Tensor, gradient: Tensor, name: str) -> Tensor:
        """Add two micro-batches' gradients as the run does."""
        is_narrow = self.session.config.accumulation_dtype == "bfloat16" and self.named[name].element_size() == 2
        if is_narrow:
            self.emulation.seen.add("accumulation")
        is_rounded = is_narrow and "accumulation" not in self.emulation.wide
        return _rounded(total + gradient, torch.bfloat16 if is_rounded else None)


# ── a narrow layer with some of its casts left out ──────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class _Casts:
    """The casts of one layer, except at the ``wide`` places. ``length`` is the tokens of a sequence."""

    layer: Linear
    wide: Collection[str]
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
        if _CAST_AT[SLOTS[slot].tensor] in self.wide or compute.casts[cast_slot].is_wide:
            return None
        history = self.layer.amax_history
        if SLOTS[slot].tensor == "input" and self.layer.scale_owner:
            history = self.layer.scale_owner[0].amax_history
        keys = self.layer.keys()
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


# ── the forward and backward pass ───────────────────────────────────────────────────────────────────────────────────

_MOVES = frozenset((
    "view", "reshape", "transpose", "permute", "contiguous", "clone", "cat", "stack", "expand", "repeat",
    "repeat_interleave", "split", "chunk", "unbind", "squeeze", "unsqueeze", "flatten", "unflatten", "__getitem__",
    "index_select", "detach", "to", "float", "type_as", "masked_fill", "where", "narrow", "t", "movedim", "swapaxes",
    "__get__", "neg", "__neg__", "abs", "relu", "embedding", "roll", "flip", "dropout", "apply",
))  # fmt: skip
"""Functions that only move values: nothing is rounded."""
_INSIDE_NORM = "inside a norm"
_ATTENTION = "scaled_dot_product_attention"
_AUTOCAST = frozenset((_ATTENTION, "matmul", "__matmul__", "bmm", "baddbmm"))
"""Functions that autocast computes in 16 bits even if everything between them is float32."""
_CASTS = frozenset(("to", "type", "half", "bfloat16"))
_DTYPE_OF = {"half": torch.float16, "bfloat16": torch.bfloat16}


def _rounded(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x.clone() if dtype is None else x.to(dtype).to(x.dtype)


class _Rounded(torch.autograd.Function):
    """Round a value to one format, and its gradient to another. ``None`` rounds nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to: torch.dtype | None, back: torch.dtype | None) -> Tensor:
        ctx.back = back
        return _rounded(x, to)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _rounded(grads[0], ctx.back), None, None


class _LookedUp(torch.autograd.Function):
    """Look up rows of a weight. Their gradients are added up in a format."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int | None, dtype: torch.dtype | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.others = weight.shape[0], -1 if padding is None else padding, dtype
        return weight[ids]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (ids,), (count, padding, dtype), grad = ctx.saved_tensors, ctx.others, grads[0]
        narrow = grad if dtype is None else grad.to(dtype)
        by_weight = torch.ops.aten.embedding_dense_backward(narrow, ids, count, padding, False)
        return by_weight.to(grad.dtype), None, None, None


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Apply one of our functions, hidden from the mode."""
    with torch._C.DisableTorchFunction():
        return cast(Tensor, function.apply(*arguments))


class _Emulation(TorchFunctionMode):
    """Round the result of every operation of a float32 model where a session's recipe rounds.

    Attributes:
        wide: the places without rounding.
        seen: the places with some rounding.
    """

    def __init__(self, plain: Session, session: Session) -> None:
        super().__init__()
        self.plain, self.session = plain, session
        recipe = session.config.recipe
        self.wide: frozenset[str] = frozenset()
        self.seen: set[str] = set()
        self.dtype = None if recipe.dtype == "float32" else cast(torch.dtype, getattr(torch, recipe.dtype))
        self.stream = None if recipe.storage.visible == "float32" else self.dtype  # autocast leaves it in float32
        self._places: list[str | None] = []
        self._norm_input: Any = None
        self._dtypes = {name: p.dtype for name, p in session.model.named_parameters(remove_duplicate=False)}

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the summed loss of a micro-batch, to be differentiated."""
        self._places.clear()
        with self._attached(), self:
            return self.plain.loss(tokens)

    def round(self, x: Tensor, place: str, dtype: torch.dtype | None) -> Tensor:
        """Round a value and its gradient as the recipe does at a place."""
        if dtype is None:
            return x
        self.seen |= {place, "activation-gradients"}
        to = None if place in self.wide else dtype
        return _apply(_Rounded, x, to, None if "activation-gradients" in self.wide else dtype)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        place = self._places[-1] if self._places else None
        if name in _CASTS and args and _is_value(args[0]):
            dtypes = [x for x in (_DTYPE_OF.get(name), kwargs.get("dtype"), *args[1:]) if isinstance(x, torch.dtype)]
            if dtypes and dtypes[0].is_floating_point and dtypes[0].itemsize < 4:  # a cast in the model's own code
                self.seen.add("own-casts")
                return args[0] if "own-casts" in self.wide else _apply(_Rounded, args[0], dtypes[0], dtypes[0])
        if name == _ATTENTION and self.dtype is not None and "attention" not in self.wide:
            # The kernel itself, since it rounds inside: attention weights before they multiply the values, and in backward.
            self.seen.add("attention")
            args, kwargs = tree_map(lambda x: x.to(self.dtype) if _is_value(x) else x, (args, kwargs))
            return func(*args, **kwargs).float()
        result = func(*args, **kwargs)
        if place == _INSIDE_NORM:
            # Norms compute in float32, and convert back before their weight multiplies.
            is_back = name == "to" and args[0] is not self._norm_input and _is_value(result) and self.stream is not None
            return self.round(result, "norms", self.stream) if is_back else result
        dtype = self.dtype if name in _AUTOCAST else self.stream
        if place is None or dtype is None or name in _MOVES or (name.endswith("_") and not name.endswith("__")):
            return result
        return tree_map(lambda x: self.round(x, place, dtype) if _is_value(x) and x.requires_grad else x, result)

    @contextmanager
    def _attached(self) -> Iterator[None]:
        undo: list[Callable[[], Any]] = []
        keeps = self.session.config.recipe.keeps
        wide_modules: list[str] = []
        for name, module in self.plain.model.named_modules():
            if any(name.startswith(f"{outer}.") for outer in wide_modules):
                continue
            if is_wide := bool(name) and keeps(name):
                wide_modules.append(name)
            forward = self._linear if is_linear(module) else self._embedding if type(module) is nn.Embedding else None
            if forward is not None and not is_wide and "forward" not in vars(module):
                module.forward = partial(forward, name, module)
                undo.append(partial(delattr, module, "forward"))
            inside, after = (None, "residual") if is_wide else _places_of(module)
            undo += [
                module.register_forward_pre_hook(partial(self._enter, inside)).remove,
                module.register_forward_hook(partial(self._leave, after)).remove,
            ]
        try:
            yield
        finally:
            for remove in reversed(undo):
                remove()

    def _enter(self, inside: str | None, module: nn.Module, args: Any) -> None:
        self._places.append(inside)
        if inside == _INSIDE_NORM:
            self._norm_input = args[0] if args else None

    def _leave(self, after: str | None, module: nn.Module, args: Any, output: Any) -> Any:
        self._places.pop()
        if after is None or self.stream is None:
            return output
        return tree_map(lambda x: self.round(x, after, self.stream) if _is_value(x) else x, output)

    def _gradient_dtype(self, name: str) -> torch.dtype | None:
        """Return the format that stores the gradient of a module's weight; ``None`` without rounding."""
        dtype = self._dtypes[f"{name}.weight"]
        if dtype is torch.float32:
            return None
        self.seen.add("weight-gradients")
        return None if "weight-gradients" in self.wide else dtype

    def _embedding(self, name: str, module: Any, ids: Tensor) -> Tensor:
        """Look up rows. Their gradient is added up in the format of the weight, token by token."""
        y = _apply(_LookedUp, module.weight, ids, module.padding_idx, self._gradient_dtype(name))
        return self.round(y, "residual", self.stream)

    def _linear(self, name: str, module: Any, x: Tensor) -> Tensor:
        """Compute a linear layer as the recipe does."""
        layers = {} if self.session.linears is None else self.session.linears.layers
        layer, dtype, weight = layers.get(name), self._gradient_dtype(name), module.weight
        if dtype is not None:
            # Round the gradient as it arrives, before the gradients of the weight's other uses are added.
            weight = _apply(_Rounded, weight, None, dtype)
        weight = weight.t() if is_transposed(module) else weight
        if isinstance(layer, Linear) and not layer.compute.is_wide:
            self.seen |= set(_CAST_AT.values())
            rows = x.reshape(-1, x.shape[-1])
            casts = _Casts(layer, self.wide, x.shape[-2] if x.ndim > 2 else 1)
            y = _apply(_Product, rows, weight, module.bias, casts)
            with torch._C.DisableTorchFunction():
                y = y.view(*x.shape[:-1], -1)
        else:
            if self.stream is None:  # autocast
                x, weight = self.round(x, "inputs", self.dtype), self.round(weight, "weights", self.dtype)
            with torch._C.DisableTorchFunction():
                y = F.linear(x, weight, module.bias)
        is_head = module is self.plain.model.get_output_embeddings()
        return self.round(y, "logits" if is_head else "linear-outputs", self.dtype)


def _places_of(module: nn.Module) -> tuple[str | None, str | None]:
    """Return the place of a module's own operations, and the place of its output; ``None`` without rounding."""
    kind = type(module).__name__.lower()
    if is_linear(module) or isinstance(module, nn.Embedding):
        return None, None
    if "norm" in kind:
        return _INSIDE_NORM, "norms"
    if "rotary" in kind:
        return None, "attention"
    return ("attention", None) if "attention" in kind else ("residual", None)


def _is_value(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype is torch.float32
