"""The preset models: names, shapes, parameter counts and usual learning rates.

A preset is the shape of a decoder. The Hugging Face class of its family draws the weights, so nothing is downloaded. The small
Llamas are Narrowgauge's: they are named by size, and their matrices suit narrow formats (widths are multiples of 32, heads are
of 32 or 64). The large ones have the published shapes. The number of parameters follows from the shape without PyTorch.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from narrowgauge.errors import DataError, RecipeError, suggestion


@dataclass(frozen=True)
class Model:
    """One decoder's shape.

    Attributes:
        family: ``llama`` (rotary positions, RMS norms, gated MLP, no biases) or ``gpt2`` (learned positions, layer
            norms, biases).
        vocab_size, max_positions: in tokens.
        hidden_size, intermediate_size: widths of the residual stream and of the MLP.
        num_kv_heads: fewer key-value heads than heads is grouped-query attention.
        tie_embeddings: whether the input embedding is also the output projection.
        rope_theta: base of the rotary frequencies; None without rotary positions.
        source: where the shape is published.
        norm_epsilon: added to the variance in norms.
    """

    name: str
    family: Literal["llama", "gpt2"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    max_positions: int
    tie_embeddings: bool
    rope_theta: float | None
    source: str
    norm_epsilon: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def num_parameters(self) -> int:
        """Exact number of parameters; a tied embedding counts once.

        Example:
            >>> get_model("gpt2-124m").num_parameters
            124439808
        """
        embedding = self.vocab_size * self.hidden_size
        outside = embedding if self.tie_embeddings else 2 * embedding
        if self.family == "gpt2":
            # Learned positions, and the last layer norm's gain and bias.
            outside += self.max_positions * self.hidden_size + 2 * self.hidden_size
            return outside + self.num_layers * self._gpt2_layer_parameters
        return outside + self.hidden_size + self.num_layers * self._llama_layer_parameters

    @property
    def _llama_layer_parameters(self) -> int:
        key_value_size = self.num_kv_heads * self.head_dim
        attention = 2 * self.hidden_size * self.hidden_size + 2 * self.hidden_size * key_value_size
        return attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size

    @property
    def _gpt2_layer_parameters(self) -> int:
        attention = 4 * self.hidden_size * self.hidden_size + 4 * self.hidden_size
        mlp = 2 * self.hidden_size * self.intermediate_size + self.intermediate_size + self.hidden_size
        return attention + mlp + 4 * self.hidden_size


_OURS = "Narrowgauge"
_LLAMA2 = "Touvron et al., Llama 2, arXiv 2307.09288"
_LLAMA3 = "Llama Team, The Llama 3 Herd of Models, arXiv 2407.21783"
_LLAMA32 = "Meta, Llama 3.2 model card, 2024 (its rotary scaling beyond 8,192 positions is left out)"
_GPT2 = "Radford et al., Language Models are Unsupervised Multitask Learners, 2019"

_MODELS = (
    #     name         family    vocab   hidden  mlp    layers heads kv  positions tied  theta
    Model("llama-1m", "llama", 2048, 128, 320, 4, 4, 4, 2048, True, 10_000.0, _OURS),
    Model("llama-8m", "llama", 4096, 256, 768, 8, 4, 4, 2048, True, 10_000.0, _OURS),
    Model("llama-35m", "llama", 8192, 512, 1408, 8, 8, 8, 2048, False, 10_000.0, _OURS),
    Model("llama-125m", "llama", 32_000, 768, 2048, 12, 12, 12, 2048, False, 10_000.0, _OURS),
    Model("llama-1b", "llama", 128_256, 2048, 8192, 16, 32, 8, 131_072, True, 500_000.0, _LLAMA32),
    Model("llama-7b", "llama", 32_000, 4096, 11_008, 32, 32, 32, 4096, False, 10_000.0, _LLAMA2),
    Model("llama-8b", "llama", 128_256, 4096, 14_336, 32, 32, 8, 8192, False, 500_000.0, _LLAMA3),
    Model("llama-13b", "llama", 32_000, 5120, 13_824, 40, 40, 40, 4096, False, 10_000.0, _LLAMA2),
    Model("llama-70b", "llama", 128_256, 8192, 28_672, 80, 64, 8, 8192, False, 500_000.0, _LLAMA3),
    Model("gpt2-124m", "gpt2", 50_257, 768, 3072, 12, 12, 12, 1024, True, None, _GPT2),
)

MODELS: dict[str, Model] = {model.name: model for model in _MODELS}


def get_model(name: str) -> Model:
    """The preset of that name.

    Raises:
        RecipeError: no preset has that name.
    Example:
        >>> get_model("llama-8m").head_dim
        64
    """
    found = MODELS.get(name.strip().lower())
    if found is None:
        key = name.strip().lower()
        near = suggestion(nearest_in_size(key) or key, MODELS)
        raise RecipeError(f"no model is named {name!r}.", f"{near} (narrowgauge show models lists all.)".strip())
    return found


def nearest_in_size(name: str) -> str | None:
    """The preset nearest in parameters to what a name such as ``llama-2m`` says, of its family where there is one.

    Example:
        >>> nearest_in_size("llama-2m"), nearest_in_size("llama")
        ('llama-1m', None)
    """
    said = re.fullmatch(r"(.*?)-?(\d+(?:\.\d+)?)([kmbt])", name)
    size = float(said[2]) * _SIZES[said[3]] if said else 0.0
    if not said or not size:
        return None
    of_family = [model for model in _MODELS if said[1] and model.name.startswith(said[1])] or _MODELS
    return min(of_family, key=lambda model: abs(math.log(model.num_parameters / size))).name


_SIZES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""The files of weights that are read from a model folder: the first that exists."""
_KINDS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".gguf",
    ".ggml",
    ".npz",
    ".ot",
    ".onnx",
    ".distcp",
)
# What training leaves beside weights, and prepared data.
_BESIDE = (
    "optimizer",
    "scheduler",
    "scaler",
    "rng_state",
    "random_states",
    "trainer_state",
    "training_args",
    "train.",
    "valid.",
)


def weights_file(folder: Path) -> Path | None:
    """The file of weights in a Hugging Face model folder; ``None`` where it holds only a configuration.

    Raises:
        DataError: it holds weights of another kind, or a link to a file of weights that does not exist: a model that began from
            random weights instead would train without an error.
    Example:
        >>> weights_file(Path("no/such/folder")) is None
        True
    """
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    for name in WEIGHTS:
        if name in names:
            if not (folder / name).is_file():
                raise DataError(f"{folder / name} is a link to a file that is not there.", "Download the model again.")
            return folder / name
    found = [name for name in names if name.endswith(_KINDS) and not name.startswith(_BESIDE)]
    if found:
        raise DataError(
            f"the model folder {folder} holds weights in files that are not read here: {', '.join(found[:3])}"
            f"{f' and {len(found) - 3} more' if len(found) > 3 else ''}.",
            f"Weights are read from {' or '.join(WEIGHTS)}, which transformers' save_pretrained writes; from a folder with only "
            "config.json training starts from random weights.",
        )
    return None


def refuse_own_code(folder: Path) -> None:
    """Refuse a model folder, or its ``config.json``, that names Python files to execute (``auto_map``).

    Invariant: no code of a model folder is executed, with or without a prompt. Other errors of the file are left to its reader.

    Raises:
        DataError: it names code.
    Example:
        >>> refuse_own_code(Path("no/such/folder"))
    """
    file = folder / "config.json" if folder.is_dir() else folder
    try:
        named = json.loads(file.read_bytes()).get("auto_map")
    except (OSError, ValueError, AttributeError, RecursionError):
        return
    if named:
        classes = ", ".join(map(str, named.values())) if isinstance(named, dict) else str(named)
        raise DataError(
            f"the model folder {folder} has code of its own (auto_map in config.json: {classes}), and code of a model folder "
            "is never executed.",
            "If transformers has a class for its model_type, remove auto_map from a copy of config.json to use that class.",
        )


# ── usual peak learning rates by size ──────────────────────────────────────────────────────────────────────────────────
#
# The trainer's defaults, and what a diagnosis compares a run's own with.


LEARNING_RATES = ((4e6, 3e-3), (6e7, 1e-3), (6e8, 6e-4), (math.inf, 3e-4))
"""Peak learning rate by number of parameters, below each bound. Up to 100 million: rates at which small Llamas on source text are
stable with every storage; above: the published rates (GPT-3, arXiv 2005.14165, table 2.1)."""

UNIT_LEARNING_RATE = 0.5
"""For unit-scaled models of any width: the best rate of those tried at 1 million parameters."""


def usual_rate(num_parameters: int, *, is_unit: bool = False) -> float:
    """The usual peak learning rate of a model of this many parameters.

    Example:
        >>> usual_rate(1_000_000), usual_rate(7_000_000_000), usual_rate(1_000_000, is_unit=True)
        (0.003, 0.0003, 0.5)
    """
    return UNIT_LEARNING_RATE if is_unit else next(rate for bound, rate in LEARNING_RATES if num_parameters < bound)
