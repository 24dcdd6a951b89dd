"""The models that a precision plugin of Lightning's has converted to a recipe, and the optimizers that are made for them.

The float32 values wait here until Lightning asks for optimizers. A note on the module itself says what it was converted to: a
second ``Trainer`` finds it there, and nothing outlives the module.

The recipe decides how each parameter is stored. An optimizer that names another storage, even the default ``word``, contradicts
the recipe and is refused, and so is an optimizer of another library, which stores only what the model sees.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge._torch import plain_name
from narrowgauge.assembly.amax_sync import sync_amax
from narrowgauge.assembly.parameter_rounding import visible
from narrowgauge.assembly.preparation import Converted, convert_model, scales_loss
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.sharding import begin_alike, has_shards
from narrowgauge.errors import RecipeError
from narrowgauge.integrations.lightning.packages import trainer_of
from narrowgauge.matmul.swapping import NarrowLayers, keep_ranks_apart
from narrowgauge.numerics.shards import local_of
from narrowgauge.optim.audit import joined_over_ranks
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.validation import EXPECTED, OF_RECIPE, check_rule, check_visible
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import Storage, for_vectors

_NOTE = "_narrowgauge_converted"


class ConvertedModels:
    """The models that one plugin has converted, while they live."""

    def __init__(self, recipe: Recipe, seed: int) -> None:
        self.recipe, self.seed = recipe, seed
        self._modules: list[weakref.ref[nn.Module]] = []

    def __iter__(self) -> Iterator[Converted]:
        for module in self._living():
            if (converted := converted_of(module)) is not None:
                yield converted

    @property
    def linears(self) -> list[NarrowLayers]:
        return [converted.linears for converted in self if converted.linears is not None]

    @property
    def trainer(self) -> Any:
        """The ``Trainer`` of the model that was converted last; ``None`` in Fabric."""
        return next((trainer_of(module) for module in reversed(list(self._living()))), None)

    def add(self, module: nn.Module) -> None:
        """Convert a module, unless an earlier fit has done so; refuse one that was converted to another recipe."""
        converted, trainer = converted_of(module), trainer_of(module)
        if converted is None:
            if trainer is not None and not any(p.is_meta for p in module.parameters()):
                module.to(trainer.strategy.root_device)  # kernels are chosen for the device that the model is on
            begin_alike(module)
            made = convert_model(_trained_part(module), self.recipe, seed=self.seed)
            vars(module)[_NOTE] = _Note(made)
            keep_ranks_apart(module)
        elif converted.recipe != self.recipe:
            raise RecipeError(
                f"recipe '{self.recipe.name}' was requested for a {type(module).__name__} that was converted for "
                f"'{converted.recipe.name}' before.",
                "Build it anew, or load it from a checkpoint.",
            )
        if all(module is not known for known in self._living()):
            self._modules.append(weakref.ref(module))
        if (now := converted_of(module)) is not None:
            expect_storage(now)

    def forget(self) -> None:
        """Forget the models, which stay as they are."""
        self._modules.clear()

    def drop_values(self) -> None:
        """Free the float32 values of parameters that no optimizer steps, or of a model that is only evaluated."""
        for converted in self:
            converted.values.clear()
            leave_storage_open(converted.model.parameters())

    def find(self, module: nn.Module) -> Converted:
        """What a module, perhaps wrapped, was converted to; refuses one that was not."""
        for part in module.modules():
            if (converted := converted_of(part)) is not None:
                return converted
        raise RecipeError(
            f"an optimizer was requested for a {type(module).__name__} that the plugin has not converted.",
            "Call fabric.setup_module(model) first, or make the optimizer in configure_optimizers().",
        )

    # ── the narrow layers ──────────────────────────────────────────────────────────────────────────────────────────────

    def set_compute(self, progress: float, evaluating: bool = False) -> None:
        """Set the computes of the narrow layers, if the recipe changes them; ``progress`` is the fraction of all steps done."""
        if self.recipe.changes_compute:
            recipe = self.recipe.in_evaluation if evaluating else self.recipe
            for linears in self.linears:
                linears.set_compute(lambda name: recipe.compute_of(name, progress))

    def place(self, size: int, micro_batch: int) -> None:
        """Set which sequences of the step come next; random bits are keyed by a sequence's place in the step.

        A micro-batch has ``size`` sequences, and ``micro_batch`` micro-batches of the step came before on this rank.
        """
        here = all_ranks()
        for linears in self.linears:
            linears.set_first_sequence((here.rank + here.size * micro_batch) * size)

    def sync_amax(self) -> None:
        """Max-reduce the amax histories over the ranks; a step's closure has run the backward passes by now."""
        for converted in self:
            if converted.linears is not None:
                sync_amax(converted.model, converted.linears)

    def _living(self) -> Iterator[nn.Module]:
        return (module for reference in self._modules if (module := reference()) is not None)


class _Note:
    """What a module was converted to. A copy of the module has other parameters, so its note is empty."""

    def __init__(self, converted: Converted | None = None) -> None:
        self.converted = converted

    def __reduce__(self) -> tuple[type[_Note], tuple[()]]:
        return _Note, ()


def converted_of(module: nn.Module) -> Converted | None:
    """What this very module was converted to, if it was."""
    note: _Note | None = vars(module).get(_NOTE)
    return None if note is None else note.converted


def take_back(module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Read the stored weights of an earlier fit, so that the next fit's optimizer continues from them.

    Warns if there are none and no checkpoint brings them. ``optimizers`` are those of the plugin's last fit; nothing is done
    unless a fit comes next.
    """
    converted, trainer = converted_of(module), trainer_of(module)
    if converted is None or (trainer is not None and trainer.state.fn != "fit"):
        return
    for optimizer in optimizers:
        # Lightning has moved the model to the CPU after a fit on another device, where its states do not follow.
        with contextlib.suppress(RecipeError):
            for parameter in converted.model.parameters():
                if parameter in optimizer.state:
                    converted.values[parameter] = optimizer.stored(parameter)
    storage, is_resumed = converted.recipe.storage, trainer is not None and trainer.ckpt_path is not None
    if storage.beside and not converted.values and not is_resumed:
        warnings.warn(
            f"a {type(module).__name__} that was trained or evaluated in '{converted.recipe.name}' before is fitted from its "
            f"{storage.visible} weights: the bits that were stored beside them are gone. Build it anew, resume from a "
            "checkpoint, or give the next Trainer the plugin of the last.",
            stacklevel=2,
        )


def _trained_part(module: nn.Module) -> nn.Module:
    """The model inside a LightningModule that holds nothing else: a recipe's patterns are written for its names."""
    holders = [child for child in module.children() if any(True for _ in child.parameters())]
    is_lightning = hasattr(module, "training_step") and hasattr(module, "configure_optimizers")
    alone = is_lightning and len(holders) == 1 and not list(module.parameters(recurse=False))
    # Patterns cannot name a linear layer that is the whole model.
    return holders[0] if alone and any(True for _ in holders[0].children()) else module


def require_averages(recipe: Recipe, trainer: Any, has_narrow_layers: bool) -> None:
    """Refuse an average that would mix buffers: ``WeightAveraging`` pairs the model's with those of its copy by position.

    Narrow layers have added theirs between those of the model since the copy was made.
    """
    for callback in trainer.callbacks:
        average = getattr(callback, "_average_model", None) if _is_weight_averaging(callback) else None
        if has_narrow_layers and average is not None and any(True for _ in average.module.buffers()):
            raise RecipeError(
                f"{type(callback).__name__} was requested for a model with buffers, which it pairs by position with those of a "
                f"copy made before; recipe '{recipe.name}' has given the model's linear layers others since.",
                "Take StochasticWeightAveraging, which averages parameters alone, or a recipe that swaps no layers.",
            )


def _is_weight_averaging(callback: Any) -> bool:
    return any(base.__name__ == "WeightAveraging" for base in type(callback).__mro__)


def require_constant(recipe: Recipe) -> None:
    """Refuse recipes that need what Fabric does not tell a plugin: the step, or the model as it is wrapped for its ranks."""
    asked = {
        "phases": bool(recipe.phases),
        "another compute for evaluation": recipe.evaluation not in (None, recipe.compute),
        f"reduction '{recipe.reduction.name}'": recipe.reduction.name != "native",
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise RecipeError(
                f"recipe '{recipe.name}' was given to Fabric and has {what}, of which Fabric tells a plugin nothing.",
                "Leave it out, or take Lightning's Trainer, or ng.prepare in a loop of your own.",
            )


def number_of_steps(recipe: Recipe, trainer: Any) -> float:
    """The number of steps of a fit, where a recipe has phases; else 0. Refuses a fit of unknown length."""
    if not recipe.phases:
        return 0.0
    is_manual = not trainer.lightning_module.automatic_optimization
    steps = 0.0 if is_manual else float(trainer.estimated_stepping_batches)
    if not 0 < steps < float("inf"):
        reason = "is manual, so that steps are yours to count" if is_manual else "has no end"
        raise RecipeError(
            f"recipe '{recipe.name}' has phases, which are fractions of all steps, and this training {reason}.",
            "Leave out the phases." if is_manual else "Give the Trainer max_steps or max_epochs.",
        )
    return steps


# ── optimizers that the user's module makes ───────────────────────────────────────────────────────────────────────────


def require_recipe(optimizer: Any, recipe: Recipe) -> None:
    """Refuse another library's optimizer where the recipe stores more than the model sees, or scales the loss."""
    if isinstance(optimizer, Optimizer) or (recipe.storage.visible == "float32" and not scales_loss(recipe)):
        return
    raise RecipeError(
        f"recipe '{recipe.name}' was given {type(optimizer).__module__}.{type(optimizer).__name__}, which stores weights and "
        "moments in the parameters' own format and unscales no loss.",
        "Return ng.AdamW (or another of Narrowgauge's) from configure_optimizers, or None for the recipe's own.",
    )


def bind(optimizer: Optimizer, converted: Converted, *, first: bool = True) -> None:
    """Let a user's optimizer store a converted model's parameters as the recipe says, from their float32 values.

    Parameters that have states, or were written to after the conversion, keep their values. The values that are taken over are
    removed from ``converted``. The layers of the model count the steps of the ``first`` optimizer.

    Raises:
        RecipeError: a group of another storage, or whose parameters the recipe stores differently; a group without the
            learning-rate factors that the recipe's compute needs.
    """
    names: dict[Tensor, str] = {parameter: plain_name(name) for name, parameter in converted.model.named_parameters()}
    own = [p for group in optimizer.param_groups for p in group["params"] if p in names]
    leave_storage_open(own)
    if not own:
        return
    for group in optimizer.param_groups:
        _store_as(optimizer, group, names, converted)
    optimizer.name_parameters(converted.model)
    values = {p: converted.values.pop(p) for p in own if p in converted.values}
    fresh = {p: v.to(local_of(p).device) for p, v in values.items() if p not in optimizer.state}
    optimizer.adopt({p: v for p, v in fresh.items() if _is_unchanged(p, v)})
    if converted.linears is not None and first:
        converted.linears.follow(optimizer)
    if has_shards(converted.model):
        optimizer.auditor.join = joined_over_ranks(list(optimizer.parameter_names()))


def expect_storage(converted: Converted) -> None:
    """Tell the optimizer that is made next how the recipe of a converted model stores its parameters."""
    named = converted.model.named_parameters()
    EXPECTED[converted.model] = {n: converted.recipe.storage_of(plain_name(n), max(2, p.ndim)) for n, p in named}


def leave_storage_open(parameters: Iterable[Tensor]) -> None:
    """End :func:`expect_storage` for parameters that have their optimizer, or get none."""
    gone = set(parameters)
    for model, rows in EXPECTED.items():
        for name, parameter in model.named_parameters():
            if parameter in gone:
                rows.pop(name, None)


def _is_unchanged(parameter: Tensor, value: Tensor) -> bool:
    """Whether a parameter still equals its float32 value, rounded."""
    shown = local_of(parameter.detach())
    return torch.equal(visible(local_of(value), dtype_name(shown.dtype)), shown)


def _store_as(optimizer: Optimizer, group: dict[str, Any], names: Mapping[Tensor, str], converted: Converted) -> None:
    """Set a group's storage to the recipe's."""
    recipe = converted.recipe
    members = [p for p in group["params"] if p in names]
    # The storage of vectors follows from that of their group.
    wanted = {(row := recipe.storage_of(names[p], max(2, p.ndim))).name: row for p in members}
    if not wanted or any(p in optimizer.state for p in members):
        return
    if len(wanted) > 1:
        raise RecipeError(
            f"a param group holds parameters that recipe '{recipe.name}' stores as {' and '.join(sorted(wanted))}.",
            OF_RECIPE,
        )
    if converted.factors and "lr_factor" not in group:
        raise RecipeError(
            f"recipe '{recipe.name}' multiplies the learning rate of each parameter by a factor, and a param group has none.",
            OF_RECIPE,
        )
    (row,) = wanted.values()
    if group["storage"] != row.name and optimizer.names_storage(group):
        raise RecipeError(
            f"the optimizer was built with storage '{group['storage']}', and recipe '{recipe.name}' stores '{row.name}'.",
            "Leave storage out of the optimizer, or name the same one in the recipe.",
        )
    _check(optimizer, members, row)
    optimizer.rows[row.name], group["storage"] = row, row.name


def _check(optimizer: Optimizer, members: Iterable[Tensor], row: Storage) -> None:
    for parameter in members:
        storage = for_vectors(row) if parameter.ndim < 2 else row
        check_visible(parameter, storage)
        check_rule(optimizer.rule, storage)
