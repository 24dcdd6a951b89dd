"""torchtitan 0.3.0's own Trainer on a CPU, on its debug model with one small layer.

torchtitan runs on accelerators: it asks its device for memory counters, and calls
``torch.distributed.set_timeout``, which came with PyTorch 2.14. Two stand-ins make its Trainer run
here with gloo, none of them part of a step. Import this module before anything of torchtitan.
"""

import importlib
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_CPU = {
    "device_count": lambda: 4, "current_device": lambda: 0, "get_device_name": lambda device=None: "cpu",
    "get_device_properties": lambda device=None: SimpleNamespace(total_memory=1 << 30),
    "memory_stats": lambda device=None: {}, "empty_cache": lambda: None, "reset_peak_memory_stats": lambda: None,
}  # fmt: skip
"""What torchtitan reads of a device, beyond what ``torch.cpu`` has."""


_tools = importlib.import_module("torchtitan.tools.utils")
_tools.device_type, _tools.device_module = "cpu", SimpleNamespace(**{**vars(torch.cpu), **_CPU})

from torchtitan import trainer as torchtitan_trainer  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel_ce_loss  # noqa: E402

if not hasattr(torch.distributed, "set_timeout"):
    torchtitan_trainer.dist_utils.set_pg_timeouts = lambda **_: None

VOCABULARY = 256
STEPS = 4
_SMALLER = {2048: VOCABULARY, 768: 192, 256: 64, 131072: 64}
_FEWER = {"n_heads": 4, "n_kv_heads": 4}


def batch_of(step: int, size: int = 4) -> Tensor:
    """The tokens of a step on all ranks, int64 ``[size, 17]``."""
    draw = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (size, 17), generator=draw)


class Batches:
    """:func:`batch_of` each step, shared out over the ranks."""

    def __init__(self, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any):
        self.step = 0
        self.ranks = dp_world_size
        self.rank = dp_rank
        self.share = local_batch_size

    def __iter__(self):
        while True:
            batch = batch_of(self.step, self.share * self.ranks).split(self.share)[self.rank]
            self.step += 1
            yield {"input": batch[:, :-1]}, batch[:, 1:]

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]


def shrink(config: Any) -> None:
    """Make a config of the debug model one of 86,000 parameters, too few to compile anything for."""
    for field in fields(config):
        value = getattr(config, field.name)
        for part in value if isinstance(value, list) else [value]:
            if is_dataclass(part):
                shrink(part)
        if type(value) is int:
            setattr(config, field.name, _FEWER.get(field.name, _SMALLER.get(value, value)))


def on_cpu(folder: Path, config: Any = None) -> Any:
    """Return one of torchtitan's configs with a model that a CPU computes, and :class:`Batches`."""
    config = config or llama3_debugmodel_ce_loss()
    model = config.model_spec.model
    model.layers = model.layers[:1]
    shrink(model)
    attention = model.layers[0].attention
    attention.inner_attention = ScaledDotProductAttention.Config()
    # Its own knows the large shape.
    attention.qkv_linear.wqkv.param_init = model.layers[0].feed_forward.w1.param_init
    config.tokenizer = SimpleNamespace(build=lambda **_: None)
    config.dataloader = SimpleNamespace(build=Batches)
    config.dump_folder = str(folder)
    config.training.local_batch_size = 4
    config.training.seq_len = 16
    config.training.steps = STEPS
    config.training.disable_cuda_graphs = True
    config.validator.enable = False
    config.debug.seed = 7
    config.lr_scheduler.decay_ratio = 0.5
    config.optimizer.implementation = "for-loop"
    config.metrics.log_freq = 1
    return config


def train(config: Any, steps: int = STEPS):
    """Return the losses of some steps, then the whole weights and states, and the optimizer.

    It is what :meth:`Trainer.train` does, without its two seconds of sleep at the end.
    """
    losses = []

    def log(step: int, loss: float, *_: Any, **__: Any) -> None:
        losses.append(loss)

    is_alone = not torch.distributed.is_initialized()
    try:
        trainer = config.build()
        trainer.metrics_processor.log = log
        trainer.checkpointer.load(step=config.checkpoint.load_step)
        batches = trainer.batch_generator(trainer.dataloader)
        while trainer.step < steps:
            trainer.step += 1
            trainer.train_step(batches)
            trainer.checkpointer.save(trainer.step, last_step=trainer.step == STEPS)
        (optimizer,) = trainer.optimizers
        values = trainer.model_parts[0].state_dict() | trainer.optimizers.state_dict()
        tensors = {}
        for name, value in values.items():
            if isinstance(value, Tensor):
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                tensors[name] = whole.detach().clone()
        trainer.close()
        return losses, tensors, optimizer
    finally:
        if is_alone and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
