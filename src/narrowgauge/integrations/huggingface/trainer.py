"""A recipe in Hugging Face's ``Trainer``, and in TRL's, which are subclasses of it.

    class MyTrainer(NarrowgaugeTrainer, SFTTrainer): ...

    trainer = MyTrainer(model=…, args=…, train_dataset=…, recipe="bfloat16/word")

The Trainer keeps its loop, data, schedule, evaluation and checkpoints. What a recipe decides happens here: the model is prepared
where the Trainer makes its optimizer, after a checkpoint's weights were loaded and before the model is wrapped or compiled.
Autocast stays off, since the recipe casts. The optimizer clips gradients, in float32. Narrowgauge's scaler scales losses, and
gradients of micro-batches are summed in ``accumulation_dtype``.

Private methods of the Trainer that are overridden here, as of transformers 5.23:

| name | why |
|---|---|
| ``_clip_grad_norm``, ``_get_grad_norm`` | they clip gradients in their own format, and read the norm in that format |
| ``_save_optimizer_and_scheduler``, ``_load_optimizer_and_scheduler`` | with FSDP2 they take parameters' states alone |

Everything else is documented for subclasses: ``create_accelerator_and_postprocess``, ``create_optimizer``,
``create_scheduler``, ``training_step``, ``compute_loss``, ``evaluation_loop``, ``log``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowgauge.assembly.amax_sync import sync_amax
from narrowgauge.assembly.resumption import carried_with_audit, restore_with_audit
from narrowgauge.distributed.sharding import has_shards
from narrowgauge.errors import RecipeError
from narrowgauge.integrations.huggingface.callback import NarrowgaugeCallback
from narrowgauge.integrations.huggingface.trainer_audit import declared_by
from narrowgauge.integrations.huggingface.training_arguments import (
    make_optimizer,
    refuse_contradictions,
    require_whole_weights,
)
from narrowgauge.matmul.cast_cache import cached_weights
from narrowgauge.matmul.swapping import NarrowLayers, linears_of
from narrowgauge.optim.accumulation import GradientAccumulator
from narrowgauge.optim.audit import joined_over_ranks
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object


CARRIED = "narrowgauge.pt"
"""In a checkpoint of FSDP2, beside the parameters' states: the loss scale, delayed scales and the step of random bits."""


class NarrowgaugeTrainer(_Trainer):
    """A mixin that trains with a recipe: put it before ``Trainer``, ``SFTTrainer``, ``DPOTrainer`` or another subclass.

    Invariant: where the loop does the same arithmetic as ``narrowgauge train`` (same batches, rates and losses), losses and
    weights have the same bits. ``resume_from_checkpoint`` continues with the same bits.

    Args:
        positional, named: as for the Trainer that it is mixed with. Of its ``TrainingArguments``, ``learning_rate``,
            ``weight_decay`` (of what ``get_decay_parameter_names`` says), ``adam_beta1``, ``adam_beta2``,
            ``adam_epsilon``, ``max_grad_norm``, ``seed``, ``optim`` with ``optim_args`` and ``optim_target_modules`` are
            obeyed, and ``bf16`` and ``fp16`` agree with the recipe or are refused. ``optimizer_cls_and_kwargs`` may name
            another optimizer of Narrowgauge's.
        recipe: a name such as ``"bfloat16/word"``, a ``.toml`` file, or a :class:`narrowgauge.Recipe`.
        accumulation_dtype: the format in which the gradients of a step's micro-batches are summed, a row of
            ``narrowgauge.spec.ACCUMULATIONS``. ``None`` is float32 in one process; on several ranks, DDP and FSDP2 sum them in
            the parameters' own format before they communicate. With a named row the ranks communicate each micro-batch.
        audit_every: steps between audits; 0 disables them.
        compile: compile the optimizer's kernels; ``None`` decides by the model's size.

    Raises:
        RecipeError: an argument contradicts the recipe; the message says what to do.

    Cost: as :func:`narrowgauge.prepare`; with micro-batches 4 bytes a parameter for float32 sums.

    Example:
        >>> from transformers import Trainer
        >>> class MyTrainer(NarrowgaugeTrainer, Trainer):
        ...     pass
        >>> trainer = MyTrainer(model, recipe="float8-row/word")  # doctest: +SKIP
    """

    def __init__(
        self,
        *positional: Any,
        recipe: str | Path | Recipe = "bfloat16/word",
        accumulation_dtype: str | None = None,
        audit_every: int = 10,
        compile: bool | None = None,
        **named: Any,
    ) -> None:
        self.recipe = parse(recipe)
        self._settings = {"audit_every": audit_every, "compile": compile}
        self._accumulation_dtype = accumulation_dtype
        self._accumulator: GradientAccumulator | None = None
        self._linears: NarrowLayers | None = None
        self._norm: Tensor | None = None
        self._prepared: nn.Module | None = None
        self._scope = ExitStack()
        self._micro_batch = 0
        self.recipe_optimizer: Optimizer | None = None
        """The optimizer, without Accelerate's wrapper; ``None`` before training."""
        super().__init__(*positional, **named)
        if self.optimizer is not None:
            raise RecipeError(
                f"an optimizer was given to a trainer with recipe '{self.recipe.name}', which makes its own.",
                "Leave out optimizers=…; optimizer_cls_and_kwargs takes a class of Narrowgauge's.",
            )
        for name in ("label_smoother", "compute_loss_func"):
            if callable(loss := getattr(self, name)):
                setattr(self, name, _InFloat32(loss))
        self._callback = self._own_callback()

    def _own_callback(self) -> NarrowgaugeCallback:
        """The callback that was given, or a new one."""
        given = [each for each in self.callback_handler.callbacks if isinstance(each, NarrowgaugeCallback)]
        callback = given[0] if given else NarrowgaugeCallback(Path(self.args.output_dir or ".") / "narrowgauge")
        if not given:
            self.add_callback(callback)
        callback.recipe, callback.declared = self.recipe, declared_by(self)
        return callback

    # ── before training ─────────────────────────────────────────────────────────────────────────────────────────────

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's, without autocast and gradient scaling: the recipe casts, and our optimizer scales."""
        refuse_contradictions(self.args, self.recipe)
        config: Any = self.args.accelerator_config
        asked, self.args.mixed_precision = self.args.mixed_precision, "no"
        sums = config.gradient_accumulation_kwargs
        if self._accumulation_dtype is not None:
            # Ranks add up each micro-batch, which is then added in the format that was asked.
            config.gradient_accumulation_kwargs = {**(sums or {}), "sync_each_batch": True}
        try:
            super().create_accelerator_and_postprocess()
        finally:
            self.args.mixed_precision, config.gradient_accumulation_kwargs = asked, sums
        require_whole_weights(getattr(self.accelerator.state, "fsdp_plugin", None), self.recipe)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Prepare the model with the recipe, and make its optimizer; called by ``train()``."""
        if self.optimizer is None:
            target = self.model if model is None else model
            assert target is not None
            decayed = set(self.get_decay_parameter_names(target))
            optimizer = make_optimizer(
                target,
                self.args,
                self.recipe,
                decays=lambda name, _: name in decayed,
                given=self.optimizer_cls_and_kwargs,
                max_grad_norm=self._max_grad_norm,
                seed=self.args.seed,
                **self._settings,
            )
            self.optimizer = self.recipe_optimizer = optimizer
            self._linears, self._prepared = linears_of(target), target
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As the Trainer's, which calls it after it has wrapped or sharded the model: only then can the accumulator be made."""
        if self.recipe_optimizer is not None and self._prepared is not None:
            self._scope.close()  # of a training that was interrupted
            self._micro_batch = 0
            self._accumulator = self._make_accumulator(self._prepared)
            if has_shards(self._prepared):
                own = list(self.recipe_optimizer.parameter_names())
                self.recipe_optimizer.auditor.join = joined_over_ranks(own)
        return super().create_scheduler(num_training_steps, optimizer)

    @property
    def _max_grad_norm(self) -> float | None:
        """The norm to clip to; 0 in the arguments means no clipping."""
        asked = self.args.max_grad_norm
        return asked if asked and asked > 0 else None

    def _make_accumulator(self, model: nn.Module) -> GradientAccumulator | None:
        """The accumulator of a step's micro-batches, if there are several and autograd does not sum them."""
        alone, asked = self.args.world_size == 1, self._accumulation_dtype
        if self.args.gradient_accumulation_steps == 1 or (asked is None and not alone):
            return None
        parts, seed = self.args.gradient_accumulation_steps, self.args.seed
        return GradientAccumulator(model.parameters(), asked or "float32", seed, num_micro_batches=parts)

    # ── the step ────────────────────────────────────────────────────────────────────────────────────────────────────

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As the Trainer's, for one micro-batch, whose gradients go into the accumulator."""
        if self._linears is not None:
            self._set_compute(evaluating=False)
            place = self._micro_batch * self.args.world_size + self.args.process_index
            self._linears.set_first_sequence(place * self.args.per_device_train_batch_size)
        if self._micro_batch == 0:
            self._begin_step()
        # The Trainer counts the tokens of the whole step, where the model's loss asks for them.
        counted = num_items_in_batch if self._micro_batch == 0 else 0
        tokens = _num_tokens(inputs) if num_items_in_batch is None else counted
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        if self._accumulator is not None:
            self._accumulator.accumulate()
            self._sync_amax()
        self._micro_batch += 1
        self._callback.take_micro_batch(loss, tokens)
        return loss

    def _begin_step(self) -> None:
        if self._accumulator is not None:
            self._accumulator.step = self.state.global_step
        # Casts of weights that are sharded would keep the whole model on each rank.
        if self.args.gradient_accumulation_steps > 1 and not self._is_sharded:
            self._scope.enter_context(cached_weights())

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As the Trainer's; where the recipe scales losses, backward begins with the scale instead of 1."""
        found: Any = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss = found[0] if return_outputs else found
        scaler = self.recipe_optimizer.loss_scaler if self.recipe_optimizer is not None else None
        if scaler is not None and loss.requires_grad:
            loss.register_hook(scaler.scale)
        return found

    def _before_step(self, *_: Any) -> None:
        self._scope.close()
        if self._accumulator is not None:
            self._accumulator.finish()

    def _sync_amax(self) -> None:
        """Join delayed scales before DDP gives all ranks the first one's, in its next forward pass."""
        if self._linears is not None and self._prepared is not None:
            sync_amax(self._prepared, self._linears)

    def _after_step(self, *_: Any) -> None:
        assert self.recipe_optimizer is not None
        self._micro_batch = 0
        if self._norm is not None and self.recipe_optimizer.grad_norm is not None:
            self._norm.copy_(self.recipe_optimizer.grad_norm)
        self._norm = None

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Nothing: the optimizer clips."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor | None:
        """The norm before clipping, 0-d float32, which the step fills in; ``None`` where the optimizer computes none."""
        assert self.recipe_optimizer is not None
        self.recipe_optimizer.max_grad_norm = self._max_grad_norm
        if self._max_grad_norm is None and self.recipe_optimizer.loss_scaler is None:
            return None
        self._norm = torch.full((), math.nan, dtype=torch.float32, device=self.args.device)
        return self._norm

    # ── checkpoints of FSDP2 ────────────────────────────────────────────────────────────────────────────────────────

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self._is_sharded and self.args.should_save:
            torch.save(carried_with_audit(*self._carrying), Path(output_dir) / CARRIED)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self._is_sharded and (place := Path(checkpoint) / CARRIED).exists():
            restore_with_audit(*self._carrying, torch.load(place, weights_only=True, map_location="cpu"))

    @property
    def _is_sharded(self) -> bool:
        return bool(self.is_fsdp_enabled) and self.recipe_optimizer is not None

    @property
    def _carrying(self) -> tuple[Optimizer, nn.Module]:
        assert self.recipe_optimizer is not None and self._prepared is not None
        return self.recipe_optimizer, self._prepared

    # ── beside the step ─────────────────────────────────────────────────────────────────────────────────────────────

    def evaluation_loop(self, *positional: Any, **named: Any) -> Any:
        """As the Trainer's, in the recipe's compute for evaluation."""
        self._set_compute(evaluating=True)
        return super().evaluation_loop(*positional, **named)

    def _set_compute(self, evaluating: bool) -> None:
        """Set the computes of the narrow layers, where the recipe changes them."""
        if self._linears is None or not self.recipe.changes_compute:
            return
        recipe, progress = self.recipe, self.state.global_step / max(1, self.state.max_steps)
        recipe = recipe.in_evaluation if evaluating else recipe
        self._linears.set_compute(lambda name: recipe.compute_of(name, progress))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As the Trainer's, with what the storage did to the updates: ``edq``, ``lost_fraction``, ``num_skipped`` …"""
        if "loss" in logs and self.recipe_optimizer is not None:
            logs |= self._callback.readings(self.recipe_optimizer)
        super().log(logs, start_time)


class _InFloat32:
    """A loss that gets a model's outputs in float32, as from Accelerate's mixed precision."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        self.loss = loss

    def __call__(self, outputs: Any, *positional: Any, **named: Any) -> Tensor:
        from accelerate.utils import convert_to_fp32

        return self.loss(convert_to_fp32(outputs), *positional, **named)


def _num_tokens(inputs: Any) -> Any:
    """How many tokens a micro-batch trains on: those with a label, else all."""
    for name in ("labels", "attention_mask"):
        if isinstance(given := inputs.get(name), Tensor):
            return (given != -100).sum() if name == "labels" else given.sum()
    return inputs["input_ids"].numel() if "input_ids" in inputs else 0
