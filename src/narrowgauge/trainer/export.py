"""Export a run as a Hugging Face folder, through ``save_pretrained``: the model as trained and
evaluated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from narrowgauge.runs.places import new_folder
from narrowgauge.trainer.language_model import without_progress_bars
from narrowgauge.trainer.loop import load
from narrowgauge.trainer.tokens import copy_tokenizer


def export(folder: Path, out: Path) -> Path:
    """Write the model of a run's newest good checkpoint as a Hugging Face folder, complete or
    absent.

    ``AutoModelForCausalLM`` and ``AutoTokenizer.from_pretrained(out)`` load it. The weights have
    the bits that the model sees. A run on tokens without a tokenizer exports only the model.

    Raises:
        RecordError: the run has no good checkpoint, ``out`` is not empty, or the disk is full.
    """
    with new_folder(out) as temporary:
        model: Any = load(folder).model
        tables = [model.config]
        if model.can_generate():
            tables.append(model.generation_config)
        for table in tables:
            table.use_cache = True
        copy_tokenizer(folder, temporary)
        if (temporary / "tokenizer_config.json").is_file():
            _name_the_end(tables, temporary)
        with without_progress_bars():
            model.save_pretrained(temporary)
        dtypes = {
            tensor.dtype for tensor in model.state_dict().values() if tensor.is_floating_point()
        }
        # Loading casts all weights to the declared dtype: one that changes no value.
        widest = max(dtypes | {torch.float32}, key=lambda dtype: dtype.itemsize)
        model.config.dtype = torch.bfloat16 if dtypes <= {torch.bfloat16} else widest
        model.config.save_pretrained(temporary)
        # safetensors gives its files mode 0600. The others follow the umask.
        for file in temporary.glob("*.safetensors"):
            file.chmod((temporary / "config.json").stat().st_mode)
    return out


def _name_the_end(tables: list[Any], folder: Path) -> None:
    """Give the configurations the end-of-text token of the tokenizer."""
    from transformers import PreTrainedTokenizerFast

    end = PreTrainedTokenizerFast.from_pretrained(folder).eos_token_id
    for table in tables:
        table.bos_token_id = table.eos_token_id = end
