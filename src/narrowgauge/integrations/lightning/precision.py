"""A recipe as the precision plugin of Lightning's Trainer and of Fabric.

Lightning converts a module, wraps it for its ranks, and only then asks for optimizers. So the plugin calls the two halves of
``prepare``: ``convert_module`` rounds the float32 weights, swaps layers, and keeps the float32 values until ``connect`` (in
Fabric: the first step) gives them to the optimizer. Lightning's own ``bf16-true`` rounds the weights first, and those bits are
lost.

Here are Lightning's hooks, in the order of a fit; :mod:`narrowgauge.integrations.lightning.converted_models` has the models. Sums
of micro-batches, sums over ranks, and clipping happen once, here, and are refused where Lightning would repeat them.

Private names of Lightning 2.6.6 that are used: ``_MockOptimizer``, by its name (what ``configure_optimizers`` becomes when it
returns ``None``), and ``WeightAveraging._average_model`` (whether its copy has buffers).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowgauge.assembly.preparation import optimizer_for, say_what_differs, scales_loss
from narrowgauge.assembly.resumption import restore_audit, saved_audit
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.reduction import GradientReduction, reduce_gradients_with
from narrowgauge.errors import RecipeError
from narrowgauge.integrations.lightning.converted_models import (
    ConvertedModels,
    bind,
    number_of_steps,
    require_averages,
    require_constant,
    require_recipe,
    take_back,
)
from narrowgauge.integrations.lightning.packages import joined_when_asked, map_tensors, trainer_of
from narrowgauge.matmul.scopes import compute_scope
from narrowgauge.numerics.scaling import LossScaler
from narrowgauge.optim.accumulation import GradientAccumulator
from narrowgauge.optim.audit import unwrapped
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.optimizers import AdamW
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.sums import Reduction

_Base: Any = object


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
        accumulation_dtype: how the micro-batches of ``accumulate_grad_batches`` are summed, a row of ``ng.spec.ACCUMULATIONS``.
            ``None`` is float32 on one rank; on several, DDP and FSDP2 sum them in the gradients' own format. A named row is
            refused on several ranks, in Fabric and for manual optimization.
        options: of the recipe's own optimizer: ``lr``, ``betas``, ``weight_decay``, ``decays``, ``max_grad_norm`` and others,
            with the defaults of :func:`narrowgauge.prepare`. The ``Trainer``'s ``gradient_clip_val`` clips in the same kernel.

    Raises:
        RecipeError: an unknown recipe.

    Source:
        ``lightning.pytorch.plugins.precision.Precision`` and ``HalfPrecision``, Lightning 2.6.6.
    """

    def __init__(
        self,
        recipe: str | Path | Recipe = "bfloat16/word",
        *,
        seed: int = 0,
        loss_scaler: LossScaler | None = None,
        accumulation_dtype: str | None = None,
        **options: Any,
    ) -> None:
        self.recipe = parse(recipe)
        self.precision = f"{self.recipe.dtype.replace('bfloat', 'bf').replace('float', '')}-true"
        if self.recipe.storage.visible == "float32" and self.recipe.dtype != "float32":
            self.precision = self.precision.replace("true", "mixed")
        self.seed, self.options = seed, options
        self.scaler = (loss_scaler or LossScaler()) if scales_loss(self.recipe) else loss_scaler
        self._first_request = None if self.scaler is None else self.scaler.request
        self._models = ConvertedModels(self.recipe, seed)
        self._optimizers: list[Optimizer] = []
        self._sums = MicroBatchSums(accumulation_dtype, seed)
        self._rank_sums = RankSums(self.recipe.reduction, seed)
        self._norms = StepNorms()
        self._saved_audits: list[Any] = []
        self._num_steps = 0.0
        self._quiet = ExitStack()

    # ── the model ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Round the weights and swap layers as the recipe says; the float32 values wait for the optimizer.

        Raises:
            RecipeError: a recipe that Fabric's hooks cannot obey; a model that was converted to another.
        """
        take_back(module, self._optimizers)
        if (trainer := trainer_of(module)) is None:
            require_constant(self.recipe)
            self._sums.require_unnamed("in Fabric, whose hooks do not say which backward pass is a step's last")
        else:
            self._models.forget()  # a Trainer fits one model at a time
        if trainer is not None and trainer.state.fn == "fit":
            self._optimizers.clear()
            self._saved_audits, self._sums.steps = [], 0
            self._sums.free()
        self._models.add(module)
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
            The optimizer, which takes over the model's float32 values.
        Raises:
            RecipeError: the plugin has not converted this model.
        """
        converted = self._models.find(module)
        chosen = {**self.options, **options}
        made = optimizer_for(converted, AdamW, seed=self.seed, loss_scaler=self.scaler, **chosen)
        converted.values.clear()
        say_what_differs(made, self.recipe)
        self._bind(made)
        return made

    def trained_part(self, module: nn.Module) -> nn.Module:
        """The model inside a converted module: the module itself, or what a LightningModule wraps."""
        return self._models.find(module).model

    # ── the optimizers ─────────────────────────────────────────────────────────────────────────────────────────────────

    def connect(
        self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Any], list[Any]]:
        """Give the optimizers the float32 values; without an optimizer, make the recipe's own.

        Raises:
            RecipeError: an optimizer that cannot store weights as the recipe says, or several for a scaled loss; phases where
                the Trainer cannot say how far training is; a reduction whose micro-batches Lightning would sum; an average
                that would mix buffers.
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
        self._models.drop_values()
        trainer = self._models.trainer
        if optimizers and trainer is not None:
            require_averages(self.recipe, trainer, bool(self._models.linears))
            self._num_steps = number_of_steps(self.recipe, trainer)
            self._rank_sums.install(model, unwrapped(optimizers[0]), trainer.accumulate_grad_batches)
        return model, optimizers, lr_schedulers

    def _bind(self, optimizer: Any) -> None:
        """Prepare an optimizer for the recipe, once."""
        inner = unwrapped(optimizer)
        if any(inner is known for known in self._optimizers):
            return
        require_recipe(inner, self.recipe)
        if not isinstance(inner, Optimizer):
            return
        for converted in self._models:
            bind(inner, converted, first=not self._optimizers)
        if self.scaler is not None:
            inner.loss_scaler = self.scaler
            # Fabric shows an optimizer to the plugin in its first step, after the loss was scaled.
            inner._control.begin_after(self._first_request)
        inner.register_load_state_dict_post_hook(self._restore)
        self._optimizers.append(inner)
        self._restore(inner)

    # ── the computes of a step ─────────────────────────────────────────────────────────────────────────────────────────

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

    @contextlib.contextmanager
    def train_step_context(self) -> Iterator[None]:
        """The compute of the phase that training is in."""
        self._models.set_compute(self._progress)
        with self.forward_context():
            yield

    @contextlib.contextmanager
    def val_step_context(self) -> Iterator[None]:
        """The compute of evaluation; afterwards that of training, for a checkpoint that may follow."""
        self._models.set_compute(self._progress, evaluating=True)
        try:
            with self.forward_context():
                yield
        finally:
            self._models.set_compute(self._progress)

    test_step_context = predict_step_context = val_step_context

    @property
    def _progress(self) -> float:
        """The fraction of the fit's steps that are done; without a fit training is over."""
        trainer = self._models.trainer
        is_fit = self._num_steps > 0 and trainer.state.fn == "fit"
        return trainer.global_step / self._num_steps if is_fit else 1.0

    # ── a step ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def convert_input(self, data: Any) -> Any:
        """Floating-point tensors in the compute's dtype, where the weights are narrow; autocast takes them as they are."""
        sizes: list[int] = []
        map_tensors(data, lambda x: sizes.append(x.shape[0]) if x.ndim else None)
        if sizes:
            self._models.place(sizes[0], self._sums.index)
        if self.recipe.storage.visible == "float32":
            return data
        dtype = getattr(torch, self.recipe.dtype)
        return map_tensors(data, lambda x: x.to(dtype) if x.is_floating_point() else x)

    def pre_backward(self, tensor: Tensor, module: nn.Module | None) -> Any:
        """Scale the loss, in the Trainer, whose callbacks see it scaled as with ``16-mixed``."""
        if trainer_of(module) is None:
            return None  # Fabric ignores what is returned
        return super().pre_backward(self._scaled(tensor), module)

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Differentiate, and count the micro-batches of the step."""
        self._sums.index += 1
        if trainer_of(model) is None:
            self._scaled(tensor).backward(*args, **kwargs)
        else:
            super().backward(tensor, model, *args, **kwargs)

    def post_backward(self, tensor: Tensor, module: nn.Module | None) -> Any:
        """Add the micro-batch's gradients to the sum, after the callbacks have seen them; refuse sums that Lightning makes."""
        trainer = trainer_of(module)
        if trainer is None:
            return None
        loss = super().post_backward(tensor, module)
        assert module is not None
        if not module.automatic_optimization:
            self._sums.require_unnamed("for manual optimization, whose micro-batches are yours to sum")
        elif trainer.accumulate_grad_batches > 1:
            self._rank_sums.require_whole_steps(trainer.accumulate_grad_batches)  # a schedule may have set it
            self._sums.take_in(self._optimizers)
        return loss

    def optimizer_step(
        self, optimizer: Any, model: nn.Module | None = None, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        """Step, with the sum of the micro-batches' gradients, clipped once."""
        self._bind(optimizer)
        try:
            if model is None:
                self._models.sync_amax()
                given = {} if closure is None else {"closure": closure}
                return optimizer.step(**given, **kwargs)
            assert closure is not None
            return super().optimizer_step(optimizer, model=model, closure=self._summed(closure), **kwargs)
        finally:
            self._sums.index = 0
            self._norms.end(unwrapped(optimizer))

    def _summed(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure that leaves the step's sum in ``p.grad`` and the same delayed scales on all ranks."""

        def run() -> Any:
            result = closure()
            self._sums.finish()
            self._models.sync_amax()
            return result

        return run

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    # ── clipping ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Let this step's kernel clip to the norm, which rounds no gradient; refuse if the optimizer has another norm."""
        inner = unwrapped(optimizer)
        if isinstance(inner, Optimizer):
            self._norms.set(inner, float(clip_val))
        else:
            super().clip_grad_by_norm(optimizer, clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Clip each gradient; refuse if the optimizer clips by norm itself."""
        refuse_second_clipping(f"gradient_clip_val = {clip_val} by value", unwrapped(optimizer))
        # Gradients are still scaled here; a power of two moves no bit of the limit.
        scale = 1.0 if self.scaler is None else float(self.scaler.scale_tensor)
        super().clip_grad_by_value(optimizer, clip_val * scale)

    def unscale_gradients(self, optimizer: Any) -> None:
        """Fabric's ``clip_gradients`` calls it before it clips; refuse if the optimizer clips, or if the loss is scaled."""
        refuse_second_clipping("fabric.clip_gradients()", unwrapped(optimizer))
        if self.scaler is not None:
            raise RecipeError(
                "fabric.clip_gradients() was called for a scaled loss, whose gradients the optimizer unscales in its step.",
                "Give max_grad_norm=… to the optimizer: it clips what it has unscaled.",
            )

    # ── saving and loading ─────────────────────────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        """State that the model's and the optimizers' own do not hold: scale, step and histories of the casts, audits."""
        state: dict[str, Any] = {"recipe": self.recipe.name}
        if self.scaler is not None:
            state["loss_scaler"] = self.scaler.state_dict()
        if self.recipe.phases:
            state["progress"] = self._progress
        state["accumulated_steps"], state["reduced_steps"] = self._sums.steps, self._rank_sums.steps
        state["linears"] = [linears.state_dict() for linears in self._models.linears]
        state["audits"] = [saved_audit(optimizer) for optimizer in self._optimizers]
        return state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load float64 weights again, in the Trainer, which loads a model's before its conversion: into float32 parameters."""
        trainer = self._models.trainer
        if self.recipe.storage.visible == "float64" and trainer is not None:
            strict = trainer.lightning_module.strict_loading
            trainer.strategy.load_model_state_dict(checkpoint, strict=strict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave; what belongs to optimizers follows when their own states are loaded."""
        if self.scaler is not None and "loss_scaler" in state_dict:
            self.scaler.load_state_dict(state_dict["loss_scaler"])
        if "progress" in state_dict:
            self._models.set_compute(state_dict["progress"])  # layers have the histories that their compute needs
        self._sums.steps = int(state_dict.get("accumulated_steps", 0))
        self._rank_sums.steps = int(state_dict.get("reduced_steps", 0))
        for linears, saved in zip(self._models.linears, state_dict.get("linears", ()), strict=False):
            linears.load_state_dict(saved)
        self._saved_audits = list(state_dict.get("audits", ()))
        for optimizer in self._optimizers:
            self._restore(optimizer)

    def _restore(self, optimizer: Any) -> None:
        """Give an optimizer its saved audit, which loading its states has emptied."""
        inner = unwrapped(optimizer)
        for known, saved in zip(self._optimizers, self._saved_audits, strict=False):
            if known is inner:
                restore_audit(known, saved)

    def teardown(self) -> None:
        """Free the sums of micro-batches, and leave the model's gradients alone."""
        self._quiet.close()
        self._sums.free()
        self._rank_sums.close()

    @property
    def _device(self) -> torch.device:
        parts = list(self._models)
        return next(parts[-1].model.parameters()).device if parts else torch.device("cpu")


if TYPE_CHECKING:
    NarrowgaugePrecision = RecipePrecision

__getattr__ = joined_when_asked(RecipePrecision, "NarrowgaugePrecision", "plugins.precision", "Precision")


# ── gradients between the backward pass and the step ──────────────────────────────────────────────────────────────────


class MicroBatchSums:
    """The gradients of a step's micro-batches on one rank, summed in a format of their own: float32 if ``dtype`` is ``None``.

    Attributes:
        index: how many micro-batches of the step came before.
    """

    def __init__(self, dtype: str | None, seed: int) -> None:
        self.dtype, self.seed, self.index = dtype, seed, 0
        self._sum: GradientAccumulator | None = None
        self._steps = 0

    @property
    def steps(self) -> int:
        """Steps whose micro-batches were summed: it seeds random bits."""
        return self._steps if self._sum is None else self._sum.step

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps = steps
        if self._sum is not None:
            self._sum.step = steps

    def take_in(self, optimizers: Iterable[Optimizer]) -> None:
        """Add the gradients of one micro-batch; on several ranks, where DDP and FSDP2 make the sums, refuse a named format."""
        if all_ranks().size > 1:
            self.require_unnamed("on several ranks, where DDP and FSDP2 sum micro-batches")
            return
        if self._sum is None:
            parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
            self._sum = GradientAccumulator(parameters, self.dtype or "float32", self.seed)
            self._sum.step = self._steps
        self._sum.accumulate()

    def finish(self) -> None:
        """Put the sums into ``p.grad``, if there are any."""
        if self._sum is not None:
            self._sum.finish()

    def free(self) -> None:
        """Free the sums, also of a step that was interrupted; the steps stay counted."""
        self._steps, self._sum, self.index = self.steps, None, 0

    def require_unnamed(self, where: str) -> None:
        """Refuse a named format where Lightning makes the sums."""
        if self.dtype is not None:
            raise RecipeError(
                f"accumulation_dtype='{self.dtype}' was requested {where}.", "Leave accumulation_dtype out."
            )


class RankSums:
    """The sum of gradients over ranks by the recipe's reduction, where it is not DDP's or FSDP2's own."""

    def __init__(self, row: Reduction, seed: int) -> None:
        self.row, self.seed = row, seed
        self._reduction: GradientReduction | None = None
        self._fills_buckets = False

    def install(self, model: nn.Module, optimizer: Any, micro_batches: int) -> None:
        """Sum the gradients of a model, as Lightning has wrapped it for its ranks, from now on."""
        if self.row.name == "native":
            return
        self.require_whole_steps(micro_batches)
        self.close()
        self._fills_buckets = isinstance(model, nn.parallel.DistributedDataParallel)
        optimizer.reduction = self._reduction = reduce_gradients_with(model, self.row, seed=self.seed)

    def require_whole_steps(self, micro_batches: int) -> None:
        """Refuse micro-batches, which Lightning sums before they are sent."""
        if self.row.name != "native" and micro_batches > 1:
            raise RecipeError(
                f"reduction '{self.row.name}' was requested of a recipe, and accumulate_grad_batches = {micro_batches} of the "
                "Trainer, which sends no gradients of single micro-batches.",
                "Accumulate none, or leave the reduction out of the recipe.",
            )

    @property
    def steps(self) -> int:
        """Steps that were summed: it seeds random bits."""
        return 0 if self._reduction is None else self._reduction.step

    @steps.setter
    def steps(self, steps: int) -> None:
        if self._reduction is not None:
            self._reduction.set_step(steps)
            if steps and self._fills_buckets and self.row.scale_bits:
                warnings.warn(
                    f"a fit with reduction '{self.row.name}' is resumed under DDP, whose buckets, and so the scales of what is "
                    "sent, are others in the first step: its bits differ from those of a fit that was not stopped.",
                    stacklevel=2,
                )

    def close(self) -> None:
        """Leave the model's gradients alone; the steps stay counted."""
        if self._reduction is not None:
            self._reduction.close()


class StepNorms:
    """The norm to which the optimizer's kernel clips one step: no gradient is rounded for it."""

    def __init__(self) -> None:
        self._before: dict[Optimizer, float | None] = {}

    def set(self, optimizer: Optimizer, norm: float) -> None:
        """Let the next step clip; refuse if the optimizer has another ``max_grad_norm`` itself."""
        if optimizer.max_grad_norm not in (None, norm):
            refuse_second_clipping(f"gradient_clip_val = {norm}", optimizer)
        self._before.setdefault(optimizer, optimizer.max_grad_norm)
        optimizer.max_grad_norm = norm

    def end(self, optimizer: Any) -> None:
        if optimizer in self._before:
            optimizer.max_grad_norm = self._before.pop(optimizer)


def refuse_second_clipping(what: str, optimizer: Any) -> None:
    """Refuse to clip the gradients of an optimizer that clips them itself."""
    norm = getattr(optimizer, "max_grad_norm", None)
    if norm is not None:
        raise RecipeError(
            f"{what} was requested of an optimizer that clips gradients to max_grad_norm = {norm} itself.",
            "Leave out one of the two.",
        )
