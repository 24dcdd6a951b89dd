"""A lower bound of the memory of a batch, to refuse batches that cannot fit before anything is built.

What a layer keeps for backward is the planner's count (:mod:`narrowgauge.planner.memory.activations`), for fused kernels.
Compiled layers keep about that much; eager modules keep 50 % more. The logits exist in several dtypes. The estimate is a lower
bound: an accepted batch may still be too large, a refused one certainly is. Nothing here needs PyTorch.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from narrowgauge.errors import ChipError, NarrowgaugeError
from narrowgauge.planner.inputs.architectures import Architecture
from narrowgauge.planner.inputs.model_configs import read_architecture
from narrowgauge.planner.memory.activations import bytes_per_token, layer_tensors, widths_of
from narrowgauge.planner.memory.rank_memory import LARGE_VOCABULARY, bytes_per_logit
from narrowgauge.trainer.config import TrainConfig

_TOKEN_BYTES = 8  # per token of the whole batch, as it is read


def shape_of(model: str) -> Architecture | None:
    """The architecture of a preset or a model folder; ``None`` if its family is not known, or the folder does not say it.

    Example:
        >>> shape_of("llama-8m").num_layers, shape_of("no/such/folder")
        (8, None)
    """
    try:
        return read_architecture(model)
    except NarrowgaugeError:
        return None


def batch_bytes(architecture: Architecture, config: TrainConfig) -> int:
    """A lower bound of the memory of a step in bytes, without weights and states.

    Example:
        >>> config = TrainConfig(model="llama-8m", batch_size=8, sequence_length=256)
        >>> batch_bytes(shape_of("llama-8m"), config) >> 20
        232
    """
    tokens = config.micro_batch_size * config.sequence_length
    widths = widths_of(config.recipe.compute, config.recipe.storage.visible)
    kept = layer_bytes(architecture, config)
    if config.activation_checkpointing:
        layers = kept + widths.stream * architecture.hidden_size * architecture.num_layers
    else:
        layers = kept * architecture.num_layers
    logits = max(bytes_per_logit(widths.matmul)) * min(architecture.vocab_size, LARGE_VOCABULARY)
    return int(tokens * (layers + logits)) + config.tokens_per_step * _TOKEN_BYTES


def layer_bytes(architecture: Architecture, config: TrainConfig) -> float:
    """Bytes per token that a layer keeps at least, by the planner's count of fused kernels.

    Example:
        >>> shape = shape_of("llama-8m")
        >>> round(layer_bytes(shape, TrainConfig(model="llama-8m")) / shape.hidden_size)
        34
    """
    mixture = architecture.mixture
    is_mixture = mixture is not None and mixture.num_layers == architecture.num_layers
    return bytes_per_token(layer_tensors(architecture, config.recipe, is_mixture=is_mixture, kernels="fused"))


def free_bytes() -> int | None:
    """Free memory in bytes: of the GPU, or else what the system reports as available.

    ``None`` if there seems to be a GPU and PyTorch, which knows its memory, is not loaded yet.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    if torch is None and Path("/dev/nvidiactl").exists():
        return None
    info = Path("/proc/meminfo")
    if info.is_file():
        lines = dict(line.split(":", 1) for line in info.read_text().splitlines())
        if "MemAvailable" in lines:
            return int(lines["MemAvailable"].split()[0]) << 10
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _gib(size: int) -> str:
    gib = size / 2**30
    return f"{gib:,.1f}" if gib < 1e6 else f"{gib:.1e}"


def require_batch(config: TrainConfig, otherwise: str = "") -> None:
    """Refuse a batch whose activations and logits alone need more memory than is free; ``otherwise`` is further advice."""
    architecture, free = shape_of(config.model), free_bytes()
    if architecture is None or free is None:
        return
    needed = batch_bytes(architecture, config)
    if needed <= free:
        return
    # Micro-batches run one after the other, so one of them must fit.
    fitting = config.micro_batch_size * free // needed
    smaller = (
        f"At most {fitting:,} such sequences fit: lower --batch-size or raise --gradient-accumulation-steps."
        if fitting
        else f"Use a --sequence-length below {config.sequence_length}, or a smaller model."
    )
    raise ChipError(
        f"a batch of {config.micro_batch_size:,} × {config.sequence_length} tokens of {config.model} takes about "
        f"{_gib(needed)} GiB in addition to weights and states, and {_gib(free)} GiB are free here.",
        f"{smaller} {otherwise}".strip(),
    )
