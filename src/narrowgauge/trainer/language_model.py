"""Language models built from a configuration and a seed, and their loss.

The models are Hugging Face classes, so a trained model is a folder that other tools can read. A
preset is a configuration in ``narrowgauge.spec.models``. Weights are drawn in float32 from the seed
only, so every recipe starts from the same weights. Nothing is downloaded.

The loss is a *sum* over tokens. Sums of micro-batches of any size add up to the sum of the batch,
which is divided once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.errors import DataError
from narrowgauge.numerics.rounding import at_least_float32
from narrowgauge.spec.models import MODELS, Model
from narrowgauge.trainer.tokens import SAFELY, explained

if TYPE_CHECKING:  # transformers takes seconds to import: each function below imports what it needs
    from transformers import PretrainedConfig, PreTrainedModel


_WEIGHTS = (
    ".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".npz", ".distcp",
)  # fmt: skip


def has_weights(folder: Path) -> bool:
    """Return whether a model folder holds weights, also of a kind that transformers refuses: a model
    would otherwise start from random ones.
    """
    return any(file.name.endswith(_WEIGHTS) for file in folder.iterdir())


def build(model: str, *, vocab_size: int | None = None, seed: int) -> PreTrainedModel:
    """Return a causal language model in float32 on the CPU, in training mode, without dropout.

    Initial weights depend on ``seed`` and the configuration only.

    Args:
        model: the name of a preset (``narrowgauge show models``), or a folder with ``config.json``.
            Weights in it are loaded and upcast to float32; no code in it is run.
        vocab_size: number of token embeddings, instead of the configuration's. Loaded weights keep
            their own number, which must be at least this.

    Raises:
        DataError: what transformers cannot read, or weights that do not fit the text.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = Path(model)
    is_loaded = model not in MODELS and not (folder.is_dir() and not has_weights(folder))
    built: Any
    with explained(model), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        config: Any
        if model in MODELS:
            config = _preset_config(MODELS[model])
        else:
            config = AutoConfig.from_pretrained(model, **SAFELY)
        for field, value in vars(config).items():
            if isinstance(value, float) and "drop" in field:
                setattr(config, field, 0.0)
        config.use_cache = False
        if is_loaded:
            built = AutoModelForCausalLM.from_pretrained(
                model, config=config, dtype=torch.float32, weights_only=True, **SAFELY
            )
        else:
            text_config = config.get_text_config()
            text_config.vocab_size = vocab_size or text_config.vocab_size
            built = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=False
            )
    rows = len(built.get_input_embeddings().weight)
    if vocab_size is not None and vocab_size > rows:
        raise DataError(
            f"The weights in {model} have {rows:,} token embeddings; the text has {vocab_size:,} "
            "different tokens.",
            "Use the tokenizer of these weights, or a folder with only config.json to start from "
            "random weights.",
        )
    if _sees_targets(built.eval()):
        raise DataError(
            f"Cannot train '{model}' because its logits depend on later tokens, which are the targets.",
            "Name a causal language model, such as Llama or GPT-2.",
        )
    return built.train()


@torch.no_grad()
def _sees_targets(model: Any) -> bool:
    """Return whether the logits of a token change with the token after it, beyond rounding."""
    first, second = model(input_ids=torch.tensor([[0, 1], [0, 2]]), use_cache=False).logits[:, 0]
    return bool((first - second).abs().max() > 1e-4 * first.abs().max())


def loss_sum(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return the summed cross entropy of predicting each next token, a float32 or float64 scalar in
    nats.

    Args:
        tokens: int64 ``[batch, sequence + 1]``; inputs are all but the last of each row, targets
            all but the first.
    """
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    values = at_least_float32(logits.flatten(0, -2))
    return F.cross_entropy(values, tokens[:, 1:].reshape(-1), reduction="sum")


def _preset_config(row: Model) -> PretrainedConfig:
    from transformers import AutoConfig

    options: dict[str, Any] = {
        "vocab_size": row.vocab_size, "hidden_size": row.hidden_size,
        "num_hidden_layers": row.num_layers, "num_attention_heads": row.num_heads,
        "max_position_embeddings": row.max_positions, "tie_word_embeddings": row.tie_embeddings,
        # The defaults of the classes belong to other tokenizers; export writes the correct ones.
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    if row.family == "gpt2":
        options["n_inner"] = row.intermediate_size
    else:
        options |= {
            "intermediate_size": row.intermediate_size, "num_key_value_heads": row.num_kv_heads, "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": row.rope_theta},
        }  # fmt: skip
    return AutoConfig.for_model(row.family, **options)
