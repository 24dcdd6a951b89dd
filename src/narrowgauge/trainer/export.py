"""Export a run as a Hugging Face folder, through ``save_pretrained``: the model as trained and
evaluated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from narrowgauge.runs.places import new_folder
from narrowgauge.trainer.language_model import without_progress_bars
from narrowgauge.trainer.session import Session, load


def export(folder: Path, out: Path) -> Path:
    """Write the model of a run's newest good checkpoint as a Hugging Face folder, complete or
    absent.

    ``AutoModelForCausalLM`` and ``AutoTokenizer.from_pretrained(out)`` load it. The weights have
    the bits that the model sees. A run on a token map without a tokenizer exports only the model.
    Missing parents of ``out`` are made.

    Raises:
        RecordError: the run has no good checkpoint, ``out`` is not empty, or the disk is full.
    """
    with new_folder(Path(out)) as temporary:
        _write(load(folder), temporary)
    return out


def _write(session: Session, temporary: Path) -> None:
    model: Any = session.model
    tensors = model.state_dict().values()
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    tables = [model.config]
    if model.can_generate():
        tables.append(model.generation_config)
    tokenizer = session.folder / "tokenizer.json"
    end = session.data.end_of_text
    with without_progress_bars():
        for table in tables:
            table.use_cache = True
        if tokenizer.is_file():
            _write_tokenizer(tokenizer, end, temporary, model.config)
            for table in tables:
                table.bos_token_id = table.eos_token_id = end
        model.save_pretrained(temporary)
        # Loading casts all weights to the declared dtype: one that changes no value.
        widest = max(dtypes | {torch.float32}, key=lambda dtype: dtype.itemsize)
        model.config.dtype = torch.bfloat16 if dtypes <= {torch.bfloat16} else widest
        model.config.save_pretrained(temporary)
        # safetensors gives its files mode 0600. The others follow the umask.
        for file in temporary.glob("*.safetensors"):
            file.chmod((temporary / "config.json").stat().st_mode)


def _write_tokenizer(file: Path, end: int, out: Path, config: Any) -> None:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer.from_file(str(file))
    options: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None:
        options["model_max_length"] = positions
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokenizer.id_to_token(end),
        eos_token=tokenizer.id_to_token(end),
        **options,
    )
    fast.save_pretrained(out)
