"""torchtitan 0.3.0's own Trainer on a CPU.

torchtitan runs on accelerators: it asks its device for memory counters, and calls
``torch.distributed.set_timeout``, which came with PyTorch 2.14. Two stand-ins make its Trainer run
here with gloo, none of them part of a step:

=========================================  =========================================================================
``torchtitan.tools.utils.device_module``   ``torch.cpu`` with counters that read 0
``set_pg_timeouts``                        after the first step; does nothing, before PyTorch 2.14
=========================================  =========================================================================

Import this module before anything of torchtitan.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

_CPU: dict[str, Any] = {
    "device_count": lambda: 1, "current_device": lambda: 0, "get_device_name": lambda device=None: "cpu",
    "get_device_properties": lambda device=None: SimpleNamespace(total_memory=1 << 30),
    "memory_stats": lambda device=None: {}, "empty_cache": lambda: None, "reset_peak_memory_stats": lambda: None,
}  # fmt: skip
"""What torchtitan reads of a device, beyond what ``torch.cpu`` has."""


_tools: Any = importlib.import_module("torchtitan.tools.utils")
_tools.device_type, _tools.device_module = "cpu", SimpleNamespace(**{**vars(torch.cpu), **_CPU})

from torchtitan import trainer as torchtitan_trainer  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel_ce_loss  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

if not hasattr(torch.distributed, "set_timeout"):
    torchtitan_trainer.dist_utils.set_pg_timeouts = lambda **_: None


VOCABULARY = 256
STEPS = 4
SEED = 7


class Words(BaseTokenizer):
    """A tokenizer that nothing asks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing."""

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


def batch_of(step: int, size: int = 4, length: int = 16) -> torch.Tensor:
    """The tokens of a step on all ranks, int64 ``[size, length + 1]``."""
    return torch.randint(
        VOCABULARY, (size, length + 1), generator=torch.Generator().manual_seed(step)
    )


class Batches(BaseDataLoader):
    """:func:`batch_of` each step, shared out over the ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Nothing."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        self.step = 0
        self.rank = dp_rank
        self.share = local_batch_size
        self.shape = local_batch_size * dp_world_size, seq_len

    def __iter__(self) -> Any:
        while True:
            batch = batch_of(self.step, *self.shape)[self.rank * self.share :][: self.share]
            self.step += 1
            yield {"input": batch[:, :-1]}, batch[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]


_SMALLER: dict[int, int] = {2048: VOCABULARY, 768: 192, 256: 64, 131072: 64}
_FEWER = {"n_heads": 4, "n_kv_heads": 4}


def shrink(config: Any) -> None:
    """Make a config of the debug model one of 86,000 parameters, too few to compile anything for."""
    for field in fields(config):
        value = getattr(config, field.name)
        for part in value if isinstance(value, list) else [value]:
            if is_dataclass(part):
                shrink(part)
        if type(value) is int:
            setattr(config, field.name, _FEWER.get(field.name, _SMALLER.get(value, value)))


def on_cpu(config: Trainer.Config, folder: Path) -> Trainer.Config:
    """Return one of torchtitan's configs, small and with one layer, attention that a CPU can
    compute, and :class:`Batches`.
    """
    model: Any = config.model_spec.model  # type: ignore[union-attr]
    model.layers = model.layers[:1]
    shrink(model)
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.attention.qkv_linear.wqkv.param_init = (
            layer.feed_forward.w1.param_init
        )  # its own knows the large shape
    config.tokenizer, config.dataloader, config.dump_folder = (
        Words.Config(),
        Batches.Config(),
        str(folder),
    )
    config.training.local_batch_size = 4
    config.training.seq_len = 16
    config.training.steps = STEPS
    config.training.disable_cuda_graphs = True
    config.validator.enable = False
    config.debug.seed = SEED
    config.lr_scheduler.decay_ratio = 0.5
    config.optimizer.implementation = "for-loop"
    config.metrics.log_freq = 1
    return config


def configured(folder: Path, optimizer: Any = None) -> Trainer.Config:
    """The debug model of torchtitan's registry :func:`on_cpu`, perhaps with another optimizer."""
    config = on_cpu(llama3_debugmodel_ce_loss(), folder)
    if optimizer is not None:
        config.optimizer = optimizer
    return config


@dataclass(frozen=True)
class Trained:
    """What a run has computed; its trainer is closed, and so is the process group that it made."""

    trainer: Trainer
    losses: list[float]
    weights: dict[str, torch.Tensor]
    states: dict[str, Any]


def train(config: Trainer.Config, steps: int | None = None) -> Trained:
    """A run of all steps, or of the first few of them.

    What :meth:`Trainer.train` does, without its two seconds of sleep at the end.
    """
    losses: list[float] = []
    try:
        trainer = config.build()
        log = trainer.metrics_processor.log

        def noted(step: int, loss: float, largest: float, grad_norm: float, **more: Any) -> None:
            losses.append(loss)
            log(step, loss, largest, grad_norm, **more)

        trainer.metrics_processor.log = noted
        trainer.checkpointer.load(step=config.checkpoint.load_step)
        batches = trainer.batch_generator(trainer.dataloader)
        while trainer.step < (config.training.steps if steps is None else steps):
            trainer.step += 1
            trainer.train_step(batches)
            trainer.checkpointer.save(trainer.step, last_step=trainer.step == config.training.steps)
        weights, states = (
            _copied(part.state_dict()) for part in (trainer.model_parts[0], trainer.optimizers)
        )
        trained = Trained(trainer, losses, weights, states)
        trainer.close()
        return trained
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    """Copy tensors whole, and other values as they are."""
    tensors = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value.detach()
    full_tensors = {}
    for name, x in tensors.items():
        full_tensors[name] = x.full_tensor() if hasattr(x, "full_tensor") else x
    return values | {name: value.clone() for name, value in full_tensors.items()}
