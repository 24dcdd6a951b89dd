"""torchtitan's metrics processor, which also records the run as ``narrowgauge train`` records its own.

A run gets a record by one line in its config function, ``with_record(config, gauges_every=100)``, or by an override on the
command line. Its rows lie beside torchtitan's other output, in ``dump_folder/narrowgauge``; a run that torchtitan resumes from a
checkpoint continues in its folder. torchtitan's console, TensorBoard and W&B keep their ``log_freq``.

Used of torchtitan: ``should_log``, which the Trainer calls first in each step and before the model runs, ``log``,
``log_validation``, ``close``, and the attributes ``optimizers`` and ``model_parts`` that it sets before the first step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config.override import derive, override
from torchtitan.trainer import Trainer

from narrowgauge.errors import RecipeError
from narrowgauge.gauges.recording.run_recorder import RunRecorder, folder_for

_ADVICE = "Leave the record out: narrowgauge report reads torchtitan's TensorBoard files too."


class NarrowgaugeMetrics(MetricsProcessor):
    """torchtitan's metrics, and a run folder with a row of each step: loss, audit, gauges and events.

    The run computes the same bits with and without it, with :class:`NarrowgaugeAdamW` or torchtitan's own optimizers. On several
    ranks, the first one writes.

    Args:
        config: torchtitan's, and what is recorded.
        parallel_dims, dump_folder, config_dict, others: as torchtitan gives them.
    Raises:
        RecipeError: pipeline parallelism, or several optimizers: a record is of one model and its optimizer.

    Cost: each step's loss is read and summed over the ranks, which torchtitan alone does every ``log_freq`` steps.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """torchtitan's, and the record."""

        run_folder: str = "narrowgauge"
        """In the dump folder; a run from its first step on that finds another's record there takes the next free number."""
        gauges_every: int = 0
        """Steps between samples of the gauges; 0 for none."""
        loggers: list[str] = field(default_factory=list)
        """Where rows and events also go: names of Narrowgauge's loggers."""

    config: Config
    recorder: RunRecorder | None = None

    def __init__(
        self,
        config: Config,
        *,
        parallel_dims: Any,
        dump_folder: str = "./outputs",
        config_dict: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        if parallel_dims.pp_enabled:
            raise RecipeError(
                "a record was requested of a run with pipeline stages, whose losses the first has not.", _ADVICE
            )
        super().__init__(
            config, parallel_dims=parallel_dims, dump_folder=dump_folder, config_dict=config_dict, **others
        )
        self._folder, self._settings = Path(dump_folder) / config.run_folder, config_dict or {}
        self._tokens = 0

    def should_log(self, step: int) -> bool:
        """True, so that the Trainer computes the loss of every step. The first call opens the run folder."""
        if self.recorder is None:
            self._open(step - 1)
        return True

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Record a step, and log it as torchtitan does where it is one of ``log_freq``."""
        found, recorder = extra_metrics or {}, self.recorder
        assert recorder is not None
        group = recorder.optimizer.param_groups[0]
        # The schedule has stepped by now: the rate of the step is among what the Trainer noted before.
        rate = next((value for name, value in found.items() if name.startswith("lr/")), group["lr"])
        recorder.step(
            global_avg_loss,
            tokens=self._tokens,
            lr=rate / group.get("lr_factor", 1.0),
            grad_norm=None if getattr(recorder.optimizer, "max_grad_norm", None) is not None else grad_norm,
        )
        if super().should_log(step):
            super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        """Record a validation, and log it as torchtitan does."""
        if self.recorder is not None:
            self.recorder.evaluate(loss)
        super().log_validation(loss, step, extra_metrics)

    def close(self) -> None:
        """End the record, as finished if the last step was done."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.close(finished=recorder.num_steps >= self._settings["training"]["steps"])
        super().close()

    def _open(self, done: int) -> None:
        """Open the run folder of a run that has done this many steps."""
        optimizers: list[torch.optim.Optimizer] = list(self.optimizers or ())
        parts = self.model_parts or []
        if len(parts) != 1 or len(optimizers) != 1:
            raise RecipeError(
                f"a record was requested of a run with {len(parts)} model parts and {len(optimizers)} optimizers.",
                _ADVICE,
            )
        settings = self._described(optimizers[0])
        self._tokens = settings["batch_size"] * settings["sequence_length"]
        self.recorder = RunRecorder(
            folder_for(self._folder, goes_on=done > 0),
            parts[0],
            optimizers[0],
            recipe=getattr(self.optimizers, "recipe", None),
            settings=settings,
            gauges_every=self.config.gauges_every,
            loggers=self.config.loggers,
            resume=done > 0,
        )
        if done:
            self.recorder.go_back(done)

    def _described(self, optimizer: Any) -> dict[str, Any]:
        """The run's settings under the names that ``narrowgauge train`` uses, by which runs are compared."""
        config, group = self._settings, optimizer.param_groups[0]
        training, model, seed = config["training"], config["model_spec"], config["debug"]["seed"]
        micro_batch = training["local_batch_size"] * self.parallel_dims.dp_replicate * self.parallel_dims.dp_shard
        batch_size = training["global_batch_size"] if training["global_batch_size"] > 0 else micro_batch
        clipping = getattr(optimizer, "max_grad_norm", None)
        return {
            "model": f"{model['name']} {model['flavor']}",
            "steps": training["steps"],
            "batch_size": batch_size,
            "sequence_length": training["seq_len"],
            "gradient_accumulation_steps": batch_size // micro_batch,
            "lr": group.get("initial_lr", group["lr"]) / group.get("lr_factor", 1.0),
            "schedule": config["lr_scheduler"]["decay_type"],
            "warmup_steps": config["lr_scheduler"]["warmup_steps"],
            "max_grad_norm": training["max_norm"] if clipping is None else clipping,
            **({} if seed is None else {"seed": seed}),
        }


def with_record(config: Trainer.Config, **fields: Any) -> Trainer.Config:
    """A config of torchtitan's, whose run is also recorded for ``narrowgauge report``.

    Args:
        config: changed in place; its own metrics settings are kept.
        fields: ``run_folder``, ``gauges_every`` and ``loggers``, as of :class:`NarrowgaugeMetrics.Config`.
    Returns:
        The same config.
    """
    config.metrics = derive(config.metrics, NarrowgaugeMetrics.Config, **fields)
    return config


@override(target=MetricsProcessor.Config, exact=True, description="a run folder of Narrowgauge")  # type: ignore[untyped-decorator]
def metrics(config: MetricsProcessor.Config, **fields: Any) -> NarrowgaugeMetrics.Config:
    """For ``--override.imports``: what :func:`with_record` does, with the fields of :class:`NarrowgaugeMetrics.Config`."""
    replaced: NarrowgaugeMetrics.Config = derive(config, NarrowgaugeMetrics.Config, **fields)
    return replaced
