"""A lower bound of the memory of a batch, to refuse batches that cannot fit before anything is built.

A layer saves about fifty bytes per token and feature for backward (counted for eager Llama blocks in bfloat16, whose process
grows by 70; in float32 by 90), and about forty where the compute keeps int8 or float8 codes. The logits exist in several dtypes.
The estimate is a lower bound: an accepted batch may still be too large, a refused one certainly is. Nothing here needs PyTorch.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

from narrowgauge.errors import ChipError
from narrowgauge.spec.models import MODELS
from narrowgauge.trainer.config import TrainConfig

LARGE_VOCABULARY = 16_384
"""Vocabulary size from which the trainer uses the chunked loss."""
ACTIVATION_BYTES = {False: 44, True: 40}
"""Bytes per token and feature that a layer of a preset keeps at least, by whether the compute keeps codes."""
_LEAST_BYTES = {False: 32, True: 26}  # of a model that is read from a folder: an MLP without a gate keeps least
LOGIT_BYTES = 10
_CHECKPOINTED_BYTES = 2  # only the layer's input
_TOKEN_BYTES = 8  # per token of the whole batch, as it is read


class Sizes(NamedTuple):
    """The sizes of a model that determine the memory of a batch."""

    num_layers: int
    hidden_size: int
    vocab_size: int


def sizes_of(model: str) -> Sizes | None:
    """The sizes of a preset, or from the ``config.json`` of a folder; ``None`` if it lacks the usual keys."""
    row = MODELS.get(model)
    if row is not None:
        return Sizes(row.num_layers, row.hidden_size, row.vocab_size)
    path = Path(model).expanduser()
    try:
        table = json.loads((path / "config.json" if path.is_dir() else path).read_bytes())
        layers, width = (table.get(long, table.get(short)) for long, short in _WORDS)
        return Sizes(int(layers), int(width), int(table["vocab_size"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


_WORDS = (("num_hidden_layers", "n_layer"), ("hidden_size", "n_embd"))


def batch_bytes(sizes: Sizes, config: TrainConfig) -> int:
    """A lower bound of the memory of a step, without weights and states.

    Args:
        sizes: sizes of the model.
        config: batch size, sequence length, accumulation steps, activation checkpointing.
    Returns:
        Bytes.
    Example:
        >>> config = TrainConfig(model="llama-8m", batch_size=8, sequence_length=256)
        >>> batch_bytes(sizes_of("llama-8m"), config) >> 20
        256
    """
    tokens = config.micro_batch_size * config.sequence_length
    each = kept_bytes(config)
    kept = each + _CHECKPOINTED_BYTES * sizes.num_layers if config.activation_checkpointing else each * sizes.num_layers
    logits = LOGIT_BYTES * min(sizes.vocab_size, LARGE_VOCABULARY)
    return tokens * (sizes.hidden_size * kept + logits) + config.tokens_per_step * _TOKEN_BYTES


def kept_bytes(config: TrainConfig) -> int:
    """Bytes per token and feature that a layer keeps at least; ``planner/activations.py`` counts what it keeps.

    Example:
        >>> kept_bytes(TrainConfig(model="llama-8m"))
        44
    """
    by_codes = ACTIVATION_BYTES if config.model in MODELS else _LEAST_BYTES
    return by_codes[config.recipe.compute.keeps_codes]


def free_bytes() -> int | None:
    """Free memory: of the GPU, or else what the system reports as available.

    Returns:
        Bytes; ``None`` if there seems to be a GPU and PyTorch, which knows its memory, is not loaded yet.
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
    """Refuse a batch that cannot fit.

    Args:
        config: the settings.
        otherwise: further advice, in addition to a smaller batch.
    Raises:
        ChipError: its activations and logits alone need more memory than is free.
    """
    sizes, free = sizes_of(config.model), free_bytes()
    if sizes is None or free is None:
        return
    needed = batch_bytes(sizes, config)
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
