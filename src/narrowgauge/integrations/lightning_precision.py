"""A recipe as the precision plugin of Lightning's Trainer and of Fabric.

Lightning converts a module, wraps it for its ranks, and only then asks for optimizers. So ``prepare`` is taken in two halves:
``convert_module`` rounds the float32 weights, swaps layers, and keeps the float32 values until ``connect`` (in Fabric: the first
step) gives them to the optimizer. Lightning's own ``bf16-true`` cuts the weights first, and those bits are lost.

What is private in Lightning 2.6.6 and used here: ``_MockOptimizer``, by its name (what ``configure_optimizers`` becomes when it
returns ``None``). Everything else is a documented hook of ``Precision``.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from narrowgauge.assembly import DEFAULTS, Converted, convert_model, optimizer_for, scales_loss
from narrowgauge.distributed.ranks import all_ranks, largest_of_ranks
from narrowgauge.distributed.reduction import reduce_gradients_with
from narrowgauge.distributed.sharding import has_shards, make_equal
from narrowgauge.errors import RecipeError
from narrowgauge.integrations.framework_optimizers import bind, require_recipe, restore_audit, saved_audit
from narrowgauge.integrations.lightning_packages import joined_when_asked, trainer_of
from narrowgauge.matmul.linears import Linears
from narrowgauge.matmul.scopes import compute_scope
from narrowgauge.numerics.scaling import LossScaler
from narrowgauge.optim.accumulation import GradientAccumulator
from narrowgauge.optim.audit import unwrapped
from narrowgauge.optim.elementwise_optimizers import AdamW
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe
from narrowgauge.trainable import unwrapped as undistributed

_Base: Any = object
_CONVERTED: weakref.WeakKeyDictionary[nn.Module, Converted] = weakref.WeakKeyDictionary()


class RecipePrecision(_Base):
    """A recipe as the precision plugin of Lightning's ``Trainer`` and of ``Fabric``.

    Invariant: losses and weights are those of :func:`narrowgauge.prepare` in the same loop, bit for bit. Gradients are clipped,
    unscaled and judged once, in the optimizer's kernel.

    ``configure_optimizers`` returns one of Narrowgauge's optimizers, whose parameters it stores as the recipe says, or ``None``:
    then the plugin makes the recipe's AdamW of ``options``. In Fabric call :meth:`optimizer` after ``fabric.setup_module``.

    Args:
        recipe: a name such as ``"float8-row/word"``, a ``.toml`` file, or a :class:`narrowgauge.Recipe`.
        seed: of the stochastic casts and of the recipe's own optimizer.
        loss_scaler: the scaler of the loss; ``None`` makes one where the compute is float16.
        accumulation_dtype: how the micro-batches of ``accumulate_grad_batches`` are summed, a row of ``ng.ACCUMULATIONS``; on
            many ranks DDP and FSDP2 sum them themselves, in the gradients' format.
        options: of the recipe's own optimizer: ``lr``, ``betas``, ``weight_decay``, ``max_grad_norm`` and others, with the
            defaults of :func:`narrowgauge.prepare`; the ``Trainer``'s ``gradient_clip_val`` replaces that of ``max_grad_norm``.

    Raises:
        RecipeError: an unknown recipe, or one whose compute changes during training.

    Source:
        ``lightning.pytorch.plugins.precision.Precision`` and ``HalfPrecision``, Lightning 2.6.6.
    """

    def __init__(
        self,
        recipe: str | Path | Recipe = "bfloat16/word",
        *,
        seed: int = 0,
        loss_scaler: LossScaler | None = None,
        accumulation_dtype: str = "float32",
        **options: Any,
    ) -> None:
        self.recipe = _constant(parse(recipe))
        self.precision = f"{self.recipe.dtype.replace('bfloat', 'bf').replace('float', '')}-true"
        if self.recipe.storage.visible == "float32" and self.recipe.dtype != "float32":
            self.precision = self.precision.replace("true", "mixed")
        self.seed, self.options, self.accumulation_dtype = seed, options, accumulation_dtype
        self.scaler = (loss_scaler or LossScaler()) if scales_loss(self.recipe) else loss_scaler
        self._models: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        self._optimizers: list[Optimizer] = []
        self._limits: dict[Optimizer, float | None] = {}
        self._accumulator: GradientAccumulator | None = None
        self._micro_batch = 0
        self._saved: dict[str, Any] = {}
        self._quiet = ExitStack()

    # ── the model ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Round the weights and swap layers as the recipe says; the float32 values wait for the optimizer."""
        converted, trainer = _CONVERTED.get(module), trainer_of(module)
        if converted is not None:
            _take_back(converted, self._optimizers)
        if trainer is not None:
            self._models.clear()  # a Trainer fits one model at a time
            self._optimizers.clear()
            self._saved, self._accumulator = {}, None
        if converted is None:
            if trainer is not None and not any(p.is_meta for p in module.parameters()):
                module.to(trainer.strategy.root_device)  # kernels are chosen for the device that the model is on
            _begin_alike(module)
            _CONVERTED[module] = convert_model(_trained_part(module), self.recipe, seed=self.seed)
        elif converted.recipe != self.recipe:
            raise RecipeError(
                f"recipe '{self.recipe.name}' was requested for a {type(module).__name__} that was converted for "
                f"'{converted.recipe.name}' before.",
                "Build it anew, or load it from a checkpoint.",
            )
        self._models[module] = None
        # Lightning says that this fit runs without an optimizer before it asks the plugin for one.
        self._quiet.close()
        self._quiet.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*`LightningModule.configure_optimizers` returned `None`.*")
        return module

    def optimizer(self, module: nn.Module, **options: Any) -> AdamW:
        """The recipe's AdamW for a converted model: for Fabric, and for ``configure_optimizers`` with a schedule.

        Args:
            module: what ``convert_module`` has converted, perhaps wrapped by DDP or Fabric.
            options: replace the plugin's own.
        Returns:
            The optimizer, which stores the model's float32 values.
        Raises:
            RecipeError: the plugin has not converted this model.
        """
        chosen = {
            **DEFAULTS,
            **self._clipping(module),
            **self.options,
            **options,
        }
        converted = self._converted(module)
        made = optimizer_for(AdamW, converted, seed=self.seed, loss_scaler=self.scaler, **chosen)
        converted.values.clear()
        self._bind(made)
        return made

    def trained_part(self, module: nn.Module) -> nn.Module:
        """The model inside a converted module: the module itself, or what a LightningModule wraps."""
        return self._converted(module).model

    def _converted(self, module: nn.Module) -> Converted:
        found = [_CONVERTED[part] for part in module.modules() if part in _CONVERTED]
        if not found:
            raise RecipeError(
                f"an optimizer was requested for a {type(module).__name__} that the plugin has not converted.",
                "Call fabric.setup_module(model) first, or make the optimizer in configure_optimizers().",
            )
        return found[0]

    def _clipping(self, module: nn.Module) -> dict[str, Any]:
        """No norm to clip to where the Trainer clips itself, else ``prepare``'s."""
        trainer = trainer_of(undistributed(module))
        clips = trainer is not None and trainer.gradient_clip_val
        return {"max_grad_norm": None} if clips else {}

    # ── the optimizers ─────────────────────────────────────────────────────────────────────────────────────────────────

    def connect(
        self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Any], list[Any]]:
        """Give the optimizers the float32 values; the recipe's own takes the place of none.

        Raises:
            RecipeError: an optimizer that cannot store weights as the recipe says, or several for a scaled loss.
        """
        self._quiet.close()
        optimizers = [self.optimizer(model) if type(o).__name__ == "_MockOptimizer" else o for o in optimizers]
        for optimizer in optimizers:
            self._bind(optimizer)
        if len(optimizers) > 1 and self.scaler is not None:
            raise RecipeError(
                f"{len(optimizers)} optimizers were given, and the loss of recipe '{self.recipe.name}' is scaled: the first "
                "to step would change the scale that the gradients of the others have.",
                "Take a bfloat16 recipe, or one optimizer.",
            )
        for converted in self._parts():
            converted.values.clear()  # of parameters that no optimizer steps, or of a model that is only evaluated
        self._sum_over_ranks(model, optimizers)
        return model, optimizers, lr_schedulers

    def _bind(self, optimizer: Any) -> None:
        """Prepare an optimizer for the recipe, once."""
        inner = unwrapped(optimizer)
        if any(inner is known for known in self._optimizers):
            return
        require_recipe(inner, self.recipe)
        if not isinstance(inner, Optimizer):
            return
        for converted in self._parts():
            bind(inner, converted, first=not self._optimizers)
        if self.scaler is not None:
            inner.loss_scaler = self.scaler
        inner.register_load_state_dict_post_hook(self._restore)
        self._optimizers.append(inner)
        self._restore(inner)

    def _sum_over_ranks(self, model: nn.Module, optimizers: list[Any]) -> None:
        """Sum gradients as the recipe's reduction says, where it is not DDP's or FSDP2's own."""
        if self.recipe.reduction.name == "native" or not optimizers:
            return
        trainer = trainer_of(undistributed(model))
        if trainer is not None and trainer.accumulate_grad_batches > 1:
            raise RecipeError(
                f"recipe '{self.recipe.name}' sums gradients over ranks by '{self.recipe.reduction.name}', and "
                f"accumulate_grad_batches = {trainer.accumulate_grad_batches} was requested, whose micro-batches Lightning "
                "does not send.",
                "Accumulate none, or leave the reduction out of the recipe.",
            )
        unwrapped(optimizers[0]).reduction = reduce_gradients_with(model, self.recipe.reduction.name, seed=self.seed)

    # ── a step ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def convert_input(self, data: Any) -> Any:
        """Floating-point tensors in the compute's dtype, where the weights are narrow; autocast takes them as they are."""
        self._place(data)
        if self.recipe.storage.visible == "float32":
            return data
        return _map(data, lambda x: x.to(getattr(torch, self.recipe.dtype)) if x.is_floating_point() else x)

    def _place(self, data: Any) -> None:
        """Tell the narrow layers which sequences of the step come next: their random bits are counted over all of them."""
        sizes: list[int] = []
        _map(data, lambda x: sizes.append(x.shape[0]) if x.ndim else None)
        here = all_ranks()
        leaf = here.rank + here.size * self._micro_batch
        for linears in self._linears() if sizes else ():
            linears.set_first_sequence(leaf * sizes[0])

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        """The recipe's compute: autocast over float32 weights, else its dtype for tensors that the module makes."""
        if self.recipe.storage.visible == "float32":
            with compute_scope(self.recipe, self._device):
                yield
            return
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, self.recipe.dtype))
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def pre_backward(self, tensor: Tensor, module: nn.Module | None) -> Any:
        """Scale the loss, in the Trainer, whose callbacks see it scaled as with ``16-mixed``."""
        if trainer_of(module) is None:
            return None  # Fabric ignores what is returned
        return super().pre_backward(self._scaled(tensor), module)

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Differentiate, and count the micro-batches of the step."""
        self._micro_batch += 1
        if trainer_of(model) is None:
            self._scaled(tensor).backward(*args, **kwargs)
        else:
            super().backward(tensor, model, *args, **kwargs)

    def post_backward(self, tensor: Tensor, module: nn.Module | None) -> Any:
        """Take the micro-batch's gradients into the sum, after the callbacks have seen them."""
        trainer = trainer_of(module)
        if trainer is None:
            return None
        loss = super().post_backward(tensor, module)
        assert module is not None
        if module.automatic_optimization and trainer.accumulate_grad_batches > 1 and all_ranks().size == 1:
            if self._accumulator is None:
                parameters = [p for optimizer in self._optimizers for g in optimizer.param_groups for p in g["params"]]
                self._accumulator = GradientAccumulator(parameters, self.accumulation_dtype, self.seed)
                self._accumulator.step = int(self._saved.get("accumulated_steps", 0))
            self._accumulator.accumulate()
        return loss

    def optimizer_step(
        self, optimizer: Any, model: nn.Module | None = None, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        """Step, with the sum of the micro-batches' gradients, clipped once."""
        self._bind(optimizer)
        inner = unwrapped(optimizer)
        try:
            if model is None:
                self._join_scales()
                given = {} if closure is None else {"closure": closure}
                return optimizer.step(**given, **kwargs)
            assert closure is not None
            return super().optimizer_step(optimizer, model=model, closure=self._summed(closure), **kwargs)
        finally:
            self._micro_batch = 0
            if inner in self._limits:
                inner.max_grad_norm = self._limits.pop(inner)

    def _summed(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure after which ``p.grad`` holds the step's sum, and delayed scales are those of all ranks."""

        def run() -> Any:
            result = closure()
            if self._accumulator is not None:
                self._accumulator.finish()
            self._join_scales()
            return result

        return run

    def _join_scales(self) -> None:
        """Let delayed scales be those of all ranks."""
        if all_ranks().size > 1:
            for linears in self._linears():
                linears.join_histories(largest_of_ranks)

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    # ── clipping ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Let this step's kernel clip to the norm: no gradient is rounded for it.

        Raises:
            RecipeError: the optimizer has another ``max_grad_norm`` itself.
        """
        inner = unwrapped(optimizer)
        if not isinstance(inner, Optimizer):
            super().clip_grad_by_norm(optimizer, clip_val)
            return
        if inner.max_grad_norm not in (None, float(clip_val)):
            raise _clipped_twice(f"gradient_clip_val = {clip_val}", inner.max_grad_norm)
        self._limits.setdefault(inner, inner.max_grad_norm)
        inner.max_grad_norm = float(clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Clip each gradient, where the optimizer does not clip by norm itself.

        Raises:
            RecipeError: it does.
        """
        inner = unwrapped(optimizer)
        if isinstance(inner, Optimizer) and inner.max_grad_norm is not None:
            raise _clipped_twice(f"gradient_clip_val = {clip_val} by value", inner.max_grad_norm)
        # Gradients are still scaled here; a power of two moves no bit of the limit.
        scale = 1.0 if self.scaler is None else float(self.scaler.scale_tensor)
        super().clip_grad_by_value(optimizer, clip_val * scale)

    def unscale_gradients(self, optimizer: Any) -> None:
        """Fabric's ``clip_gradients`` asks for it before it clips.

        Raises:
            RecipeError: the optimizer clips itself, or the loss is scaled and only the optimizer can unscale.
        """
        inner = unwrapped(optimizer)
        if getattr(inner, "max_grad_norm", None) is not None:
            raise _clipped_twice("fabric.clip_gradients()", inner.max_grad_norm)
        if self.scaler is not None:
            raise RecipeError(
                "fabric.clip_gradients() was called for a scaled loss, whose gradients the optimizer unscales in its step.",
                "Give max_grad_norm=… to the optimizer: it clips what it has unscaled.",
            )

    # ── saving and loading ─────────────────────────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        """What the model's and the optimizers' own states do not hold: scale, step and histories of the casts, audits."""
        state: dict[str, Any] = {"recipe": self.recipe.name}
        if self.scaler is not None:
            state["loss_scaler"] = self.scaler.state_dict()
        state["accumulated_steps"] = self._accumulated_steps
        state["linears"] = [linears.state_dict() for linears in self._linears()]
        state["audits"] = [saved_audit(optimizer) for optimizer in self._optimizers]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave; what belongs to optimizers follows when their own states are loaded."""
        if self.scaler is not None and "loss_scaler" in state_dict:
            self.scaler.load_state_dict(state_dict["loss_scaler"])
        self._saved = dict(state_dict)
        if self._accumulator is not None:
            self._accumulator.step = self._saved["accumulated_steps"]
        for linears, saved in zip(self._linears(), state_dict.get("linears", ()), strict=False):
            linears.load_state_dict(saved)
        for optimizer in self._optimizers:
            self._restore(optimizer)

    def _restore(self, optimizer: Any) -> None:
        """Give an optimizer its saved audit, which loading its states has emptied."""
        inner = unwrapped(optimizer)
        for known, saved in zip(self._optimizers, self._saved.get("audits", ()), strict=False):
            if known is inner:
                restore_audit(known, saved)

    def teardown(self) -> None:
        """Free the sums of micro-batches."""
        self._quiet.close()
        self._saved["accumulated_steps"] = self._accumulated_steps
        self._accumulator = None

    # ── what it holds ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _parts(self) -> list[Converted]:
        return [_CONVERTED[model] for model in self._models if model in _CONVERTED]

    def _linears(self) -> list[Linears]:
        return [converted.linears for converted in self._parts() if converted.linears is not None]

    @property
    def _accumulated_steps(self) -> int:
        """Steps whose micro-batches were summed: it seeds the sums' random bits."""
        return int(self._saved.get("accumulated_steps", 0)) if self._accumulator is None else self._accumulator.step

    @property
    def _device(self) -> torch.device:
        parts = self._parts()
        return next(parts[-1].model.parameters()).device if parts else torch.device("cpu")


def _constant(recipe: Recipe) -> Recipe:
    """Refuse a recipe whose compute changes: Lightning does not tell a plugin how far training is."""
    if recipe.phases or recipe.evaluation not in (None, recipe.compute):
        raise RecipeError(
            f"recipe '{recipe.name}' changes its compute during training or for evaluation, which a precision plugin cannot.",
            "Leave out phases and evaluation, or train with narrowgauge train.",
        )
    return recipe


def _trained_part(module: nn.Module) -> nn.Module:
    """The model inside a LightningModule that holds nothing else: its names are what a recipe's patterns are written for."""
    holders = [child for child in module.children() if any(True for _ in child.parameters())]
    is_lightning = hasattr(module, "training_step") and hasattr(module, "configure_optimizers")
    alone = is_lightning and len(holders) == 1 and not list(module.parameters(recurse=False))
    # Patterns cannot name a linear layer that is the whole model.
    return holders[0] if alone and any(True for _ in holders[0].children()) else module


def _take_back(converted: Converted, optimizers: list[Optimizer]) -> None:
    """Take the stored weights of an earlier fit, so that the optimizer of the next goes on from them."""
    for optimizer in optimizers:
        # Lightning has moved the model to the CPU after a fit on another device, where its states do not follow.
        with contextlib.suppress(RecipeError):
            for parameter in converted.model.parameters():
                if parameter in optimizer.state:
                    converted.values[parameter] = optimizer.stored(parameter)


def _begin_alike(module: nn.Module) -> None:
    """Give every rank the float32 weights of the first, as DDP will do with the rounded ones."""
    here = all_ranks()
    if here.size > 1 and not has_shards(module):
        device = next(module.parameters()).device.type
        make_equal(module, init_device_mesh(device, (here.size,)))


def _map(data: Any, function: Callable[[Tensor], Any]) -> Any:
    """The same structure with a function applied to every tensor."""
    from lightning_utilities import apply_to_collection  # of both packages

    return apply_to_collection(data, Tensor, function)


def _clipped_twice(what: str, max_grad_norm: float | None) -> RecipeError:
    return RecipeError(
        f"{what} was requested of an optimizer that clips gradients to max_grad_norm = {max_grad_norm} itself.",
        "Leave out one of the two.",
    )


if TYPE_CHECKING:
    NarrowgaugePrecision = RecipePrecision

__getattr__ = joined_when_asked(RecipePrecision, "NarrowgaugePrecision", "plugins.precision", "Precision")
