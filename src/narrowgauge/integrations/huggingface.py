"""Hugging Face's Trainer, and TRL's: the optimizer of their arguments, and a callback that records
and warns. Importing this module also lets ``from_pretrained`` load served models.
"""

from typing import Any

from transformers import TrainerCallback, TrainerState

from narrowgauge.errors import RecipeError
from narrowgauge.integrations import quantizer as quantizer  # registers itself
from narrowgauge.integrations.recording import RecordedCallback
from narrowgauge.optim.optimizers import AdamW
from narrowgauge.spec.tables import Row
from narrowgauge.torch_support.torch_names import unwrapped_optimizer

_SETTINGS = (
    "learning_rate", "lr_scheduler_type", "per_device_train_batch_size",
    "gradient_accumulation_steps", "world_size", "max_grad_norm", "seed",
)  # fmt: skip


def use_adamw(trainer: Any, **options: Any) -> Any:
    """Make a Trainer step with :class:`narrowgauge.AdamW`: ``transformers.Trainer`` and every one
    of TRL's.

    Call it before ``train()``.

    Args:
        trainer: its arguments give the rate, betas, epsilon and decay.
        options: further ones, such as ``storage``, or others in place of these.
    Returns:
        The same trainer.
    Raises:
        RecipeError: the trainer has an optimizer already.
    Example:
        >>> trainer = use_adamw(DPOTrainer(model, args=args), storage="word")  # doctest: +SKIP
    """
    if trainer.optimizer is not None:
        raise RecipeError(
            "Cannot choose an optimizer: the trainer already has "
            f"{type(unwrapped_optimizer(trainer.optimizer)).__name__}.",
            "Call use_adamw before train(), and give the trainer no optimizers=.",
        )
    args = trainer.args
    taken = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
    }
    trainer.optimizer_cls_and_kwargs = (AdamW, {**taken, **options})
    return trainer


class NarrowgaugeCallback(RecordedCallback, TrainerCallback):
    """Record a run of ``transformers.Trainer``, and log the optimizer's audit.

    Each step has a row, with the tokens of its ``input_ids``. The Trainer gives a loss only to its
    log entries: set ``logging_steps=1`` for each step's own, and ``logging_nan_inf_filter=False``
    to see a NaN. The arguments are those of every recorded callback; the folder is ``narrowgauge``
    in ``output_dir`` if none is given.

    Example:
        >>> callback = NarrowgaugeCallback()
        >>> trainer = Trainer(model, args, callbacks=[callback])  # doctest: +SKIP
    """

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **named: Any) -> None:
        model = named["model"]
        settings = {name: getattr(args, name) for name in _SETTINGS}
        self._audit: dict[str, float] = {}
        self._open(
            args.output_dir, model, unwrapped_optimizer(named["optimizer"]), state.global_step,
            settings={**settings, "steps": state.max_steps},
            max_grad_norm=args.max_grad_norm or None, on_row=self._keep_audit,
        )  # fmt: skip

        def count_tokens(model: Any, inputs: Any, named_inputs: dict[str, Any]) -> None:
            tokens = named_inputs.get("input_ids")
            if model.training and tokens is not None:
                self.tokens += tokens.numel() * args.world_size

        hook = model.register_forward_pre_hook(count_tokens, with_kwargs=True)
        self._undo.callback(hook.remove)

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **named: Any) -> None:
        self._record_step(state)

    def _record_step(self, state: TrainerState, loss: float | None = None, **columns: Any) -> None:
        """Record the last step, unless it is recorded. The loss comes only with a log entry."""
        if self.recorder is not None and self.recorder.num_steps < state.global_step:
            self._step(loss, **columns)

    def on_log(self, args: Any, state: TrainerState, control: Any, **named: Any) -> None:
        logs = named["logs"]
        if "loss" in logs:
            self._record_step(state, logs["loss"], grad_norm=logs.get("grad_norm"))
            logs.update(self._audit)
            state.log_history[-1].update(self._audit)
            self._audit = {}

    def _keep_audit(self, kind: str, row: Row) -> None:
        """Keep what was audited since the last log entry: an entry without an audit has none."""
        if kind == "steps" and row.get("edq") is not None:
            self._audit = {"edq": row["edq"], "update_noise": row["noise"]}
            self._audit["lost_fraction"] = row["lost_fraction"]

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **named: Any) -> None:
        self._record_step(state)
        self._evaluate(named["metrics"].get("eval_loss"))

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **named: Any) -> None:
        self._record_step(state)
        self._close(finished=state.global_step >= state.max_steps)
