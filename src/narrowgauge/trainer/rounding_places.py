"""Recompute the gradients of a run's step in float32, with one place of rounding at a time: find the cost of each rounding.

A float32 copy of the model takes the step with the stored weights: the exact step. Then each place of the recipe's rounding is
put in alone, and at last all together. A compute with some of the recipe's casts is one like any other.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from narrowgauge.checkpoints.saving import latest_checkpoint
from narrowgauge.distributed.job import threads_of
from narrowgauge.errors import NarrowgaugeError, RecordError
from narrowgauge.gauges.nan_origin.tracing import first_bad_value
from narrowgauge.gauges.recording.step_row import StepReader
from narrowgauge.matmul.linear import Linear, is_linear
from narrowgauge.matmul.swapping import swap_linears
from narrowgauge.runs.schema import Row
from narrowgauge.spec.computes import COMPUTES, SLOTS, Cast, Compute
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import STORAGES
from narrowgauge.spec.tables import Table, name_columns, number_columns, text_columns
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.resume_checks import require_same_run, run_of_trainer
from narrowgauge.trainer.session import Session, build, open_on_ranks
from narrowgauge.trainer.step import differentiate, train_step

PLACES: dict[str, str] = {
    "inputs": "linear layers cast their inputs, in all their matmuls",
    "weights": "all layers take the rounded weights, and linear layers cast them",
    "output-gradients": "linear layers cast the gradients of their outputs",
    "activations": "outputs of layers, norms, attention and the residual stream have the recipe's dtype, and their gradients",
    "weight-gradients": "gradients of weights are rounded to the format of their weights",
    "accumulation": "gradients of micro-batches are summed in bfloat16",
}
"""The places of a step's rounding, each with what it does alone."""
VARIANTS = {
    "run": "the run's own kernels",
    "all": "all places together, with sums in float32",
    **PLACES,
}
_CAST_AT = {"input": "inputs", "weight": "weights", "gradient": "output-gradients"}
"""The place at which each tensor of a layer is cast."""
_COLUMNS = ("batch_crc", "lr", "loss", "grad_norm", "skipped", "loss_scale")
"""Columns of a step's row that its arithmetic gives, in order."""
_OF_ONE_PROCESS: dict[str, Any] = {
    "verify_every": 0, "compile": False, "fingerprints_every": 0, "gauges_every": 0, "activation_checkpointing": False,
}  # fmt: skip
"""Settings that change no bit of an eager step on one process."""

Result = tuple[float, dict[str, Tensor]]
"""The mean loss of a step, and its gradients, unclipped and at loss scale 1."""


@dataclass(frozen=True)
class RoundingPlaces:
    """The gradients of a step with its roundings, compared with the float32 gradients.

    Args:
        started: the step of the checkpoint from which the steps were repeated; 0 for the initial weights.
        mismatch: a sentence about the first difference between the repeated steps and the record; empty without one.
        rows: ``name``, a key of :data:`VARIANTS`; relative differences of ``loss`` and ``gradient``; and ``share``, the
            squared difference of the gradient over the one of ``all``. Places without rounding are left out.
        bad_value: the operation that made the first NaN or infinity of the run's step; empty if the step is finite.
    """

    step: int
    started: int
    mismatch: str
    rows: tuple[Row, ...]
    bad_value: str = ""

    def table(self) -> Table:
        """Return the variants as a table."""

        def number(name: str) -> Callable[[Row], float | None]:
            return lambda row: None if row[name] is None else float(f"{row[name]:.3g}")

        names = name_columns(variant="name")
        numbers = number_columns(**{name: number(name) for name in ("loss", "gradient", "share")})
        texts = text_columns(what_is_rounded=lambda row: VARIANTS[row["name"]])
        title = "Relative differences to float32, and their fractions of the squared difference of all places"
        return Table((*names, *numbers, *texts), list(self.rows), title)

    def __str__(self) -> str:
        since = f"checkpoint {self.started}" if self.started else "the initial weights"
        match = self.mismatch or "it has the bits of the record"
        bad_value = f"{self.bad_value}\n" if self.bad_value else ""
        return f"Step {self.step}, repeated from {since}: {match}.\n{bad_value}{self.table().plain()}".rstrip()


def rounding_places(
    folder: str | Path, step: int, *, say: Callable[[str], object] = lambda line: None
) -> RoundingPlaces:
    """Recompute the gradients of a run's step in float32, and with each place of rounding alone. The run folder stays as it is.

    Args:
        folder: the run folder of ``narrowgauge train``.
        step: number of the step, from 1.
        say: called with a sentence before each slow part.
    Returns:
        The variants as rows; printed as a table.
    Raises:
        RecordError: the run or step is missing, or its data, model or checkpoint cannot be used.
    Cost: the steps since the nearest checkpoint, then eight eager passes in float32; memory for two models.
    Example: ``print(narrowgauge.rounding_places("runs/first", 28))``
    """
    run = run_of_trainer(Path(folder))
    recorded = {row["step"]: row for row in run.steps}
    if step not in recorded:
        held = f"steps 1 to {max(recorded)}" if recorded else "no step"
        raise RecordError(
            f"Cannot repeat step {step} because {folder} holds {held}.",
            "Name a step that it holds.",
        )
    config = replace(
        TrainConfig.from_dict(run.config, str(run.path / "run.toml")), **_OF_ONE_PROCESS
    )
    _require_casts(config.recipe)
    checkpoint = latest_checkpoint(run.path, lambda path, reason: None, at_most=step - 1)
    if checkpoint is not None:
        require_same_run(run, checkpoint.state()["settings"], config)
    data = open_on_ranks(config, run)
    # Sums inside a matmul depend on the number of threads.
    threads = threads_of(run.run.get("machine", {}).get("num_threads"), False)
    with threads, tempfile.TemporaryDirectory() as temporary:
        session = build(config, Path(temporary), data)
        if checkpoint is not None:
            session.load(checkpoint)
        started, mismatch, reader = session.step, "", StepReader(session.model, session.optimizer)
        say(f"Repeating the run up to step {step}.")
        while session.step < step - 1:
            row = recorded.get(session.step + 1, {})
            is_left_out = "spike" in row and bool(row.get("skipped"))
            session.optimizer.skip_above = -1.0 if is_left_out else math.inf
            reader.begin()
            columns = train_step(session)
            mismatch = mismatch or _mismatch(row, reader.row(session.step, columns))
        say("Computing the step in float32, and with each place of rounding alone.")
        wide = replace(config, recipe=Recipe(COMPUTES["float32"], STORAGES["float32"]))
        copy = build(wide, Path(temporary), data)
        copy.step, copy.sequences = session.step, session.sequences
        copy.optimizer.loss_scaler = session.optimizer.loss_scaler
        layers = {} if session.linears is None else session.linears.layers
        computes = {
            name: layer.compute for name, layer in layers.items() if isinstance(layer, Linear)
        }
        narrow = {name: compute for name, compute in computes.items() if not compute.is_wide}
        copy.linears = swap_linears(copy.model, narrow.get, seed=config.seed) if narrow else None
        exact, every = (_rounded_result(session, copy, places) for places in ((), PLACES))
        alone = {name: _rounded_result(session, copy, (name,)) for name in PLACES}
        of_run = _result(session)
        last = {"step": step, "batch_crc": session.batch_crc, "loss": of_run[0]}
        mismatch = mismatch or _mismatch(recorded.get(step, {}), last)
        bad, is_finite = (
            None,
            math.isfinite(of_run[0]) and all(torch.isfinite(x).all() for x in of_run[1].values()),
        )
        if not is_finite:
            bad = first_bad_value(session.model, partial(differentiate, session))
    total = _row("all", every, exact)
    rows = [_row(name, result, exact, total["gradient"] or 0.0) for name, result in alone.items()]
    shown = (_row("run", of_run, exact), total, *(row for row in rows if row["gradient"] != 0.0))
    return RoundingPlaces(step, started, mismatch, shown, "" if bad is None else bad.message)


def _require_casts(recipe: Recipe) -> None:
    """Refuse a recipe whose step is more than its casts and its dtype."""
    reasons = {
        "its transform changes the model": recipe.compute.transform,
        "its outlier columns are not cast": any(
            row.output.left.outliers for row in recipe.computes
        ),
        "autocast leaves part of it in float32": recipe.storage.visible == "float32"
        and recipe.dtype != "float32",
    }
    if reason := next((text for text, holds in reasons.items() if holds), ""):
        raise NarrowgaugeError(
            f"Cannot compute a step of '{recipe.title}' with each rounding alone because {reason}.",
            "Choose a run of another recipe, such as bfloat16/word.",
        )


def _mismatch(recorded: Row, row: Row) -> str:
    for name in _COLUMNS:
        if (
            name in recorded and name in row and repr(recorded[name]) != repr(row[name])
        ):  # NaN equals NaN
            return f"the record differs at step {row['step']}, where {name} was {recorded[name]} and is {row[name]}"
    return ""


def _row(name: str, result: Result, exact: Result, total: float = 0.0) -> Row:
    """Return the row of a result. ``total`` is the difference of all places; those of single ones add up in squares."""
    loss = abs(result[0] - exact[0]) / max(abs(exact[0]), 1e-30)
    off = sum(
        float((result[1][name].double() - x.double()).square().sum())
        for name, x in exact[1].items()
    )
    squares = sum(float(x.double().square().sum()) for x in exact[1].values())
    gradient = (off / squares) ** 0.5 if squares else float(off > 0)
    if not (math.isfinite(loss) and math.isfinite(gradient)):
        return {"name": name, "loss": None, "gradient": None, "share": None}
    return {
        "name": name,
        "loss": loss,
        "gradient": gradient,
        "share": (gradient / total) ** 2 if total else None,
    }


# ── the step ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _result(session: Session) -> Result:
    """Compute the next step of a session, and drop its gradients."""
    scaler = session.optimizer.loss_scaler
    scale = 1.0 if scaler is None else float(scaler.scale(torch.ones((), dtype=torch.float32)))
    loss = float(differentiate(session))
    named = session.model.named_parameters()
    tensors = {name: p.grad.detach().float() / scale for name, p in named if p.grad is not None}
    session.optimizer.zero_grad(set_to_none=True)
    return loss, tensors


def _rounded_result(run: Session, copy: Session, places: Collection[str]) -> Result:
    """Compute the next step of a run in its float32 copy, with rounding at these places alone."""
    trained, dtype = run.optimizer.parameter_names(), getattr(torch, run.config.recipe.dtype)
    dtypes = {name: p.dtype for name, p in run.model.named_parameters()}
    sums_in_bfloat16 = "accumulation" in places and run.config.accumulation_dtype == "bfloat16"

    def cast(values: Any, dtype: torch.dtype) -> Any:
        return tree_map(
            lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, values
        )

    def round_gradient(dtype: torch.dtype, gradient: Tensor) -> Tensor:
        return gradient.to(dtype).float() if "weight-gradients" in places else gradient

    def round_sum(parameter: Any) -> None:
        parameter.grad = parameter.grad.bfloat16().float()

    def enter(module: Any, *inputs: Any) -> Any:  # a linear layer casts its inputs itself
        return cast(inputs, torch.float32 if is_linear(module) else dtype)

    if run.linears is not None and copy.linears is not None:
        layers = run.linears.layers
        copy.linears.set_compute(lambda name: _casting(layers[name].compute, places))
    with ExitStack() as undo:
        for name, parameter in copy.model.named_parameters():
            visible = run.model.get_parameter(name)
            is_stored = visible in trained and "weights" not in places
            parameter.data.copy_(run.optimizer.stored(visible) if is_stored else visible)
            undo.callback(parameter.register_hook(partial(round_gradient, dtypes[name])).remove)
            if sums_in_bfloat16 and visible.element_size() == 2:
                undo.callback(parameter.register_post_accumulate_grad_hook(round_sum).remove)
        for module in copy.model.modules() if "activations" in places else ():
            undo.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            undo.callback(
                module.register_forward_hook(lambda _, inputs, output: cast(output, dtype)).remove
            )
        loss, tensors = _result(copy)
    return loss, {
        name: round_gradient(dtypes[name], gradient) for name, gradient in tensors.items()
    }


def _casting(compute: Compute, places: Collection[str]) -> Compute:
    """Return a compute that casts the tensors at these places, and multiplies the others in float32."""
    casts = {
        slot: cast
        if _CAST_AT[SLOTS[slot].tensor] in places
        else Cast("float32", rotation=cast.rotation)
        for slot, cast in compute.casts.items()
    }
    products: dict[str, Any] = {
        name: replace(product, left=casts[f"{name}.left"], right=casts[f"{name}.right"])
        for name, product in compute.products.items()
    }
    return replace(compute, dtype="float32", **products)
