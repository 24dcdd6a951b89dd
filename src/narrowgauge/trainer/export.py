"""Export a run as a Hugging Face folder, through ``save_pretrained``.

A run stores each weight as the bits that the model sees. For many storages the optimizer adds a tail. The *visible*
export is the model as trained and evaluated. The *float32* export includes the tails, so that training can continue
elsewhere without losing small updates.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import disk_errors, whole_folder
from narrowgauge.trainer.data.tokens import load_tokenizer
from narrowgauge.trainer.language_model import without_progress_bars
from narrowgauge.trainer.session import Session, load

Dtype = Literal["visible", "float32"]


def export(folder: Path, out: Path, dtype: Dtype = "visible") -> Path:
    """Write the model of a run's newest good checkpoint as a Hugging Face folder, complete or absent.

    ``AutoModelForCausalLM`` and ``AutoTokenizer.from_pretrained(out)`` load it. The weights have the bits that the model sees.
    With ``"float32"`` they are the optimizer's stored weights, rounded to nearest if it stores float64. A run on a token map
    without a tokenizer exports only the model.

    Args:
        out: the folder to make; missing parents are made.

    Raises:
        RecordError: the run has no good checkpoint, ``out`` is not empty, or the disk is full.

    Cost: the model and its optimizer in memory.
    """
    out = Path(out)
    with disk_errors(out):
        occupied = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if occupied:
        reason = "is not empty" if out.is_dir() else "is a file"
        raise RecordError(
            f"Cannot export to {out}: it exists and {reason}.", "Name another folder, or remove this one."
        )
    session = load(folder)
    weights = _weights(session, dtype)
    dtypes = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    # Loading casts all weights to the declared dtype: one that changes no value.
    declared = torch.bfloat16 if dtypes <= {torch.bfloat16} else max(dtypes | {torch.float32}, key=lambda d: d.itemsize)
    config: Any = copy.deepcopy(session.model.config)
    config.dtype = declared
    settings = [config, copy.deepcopy(session.model.generation_config)] if session.model.can_generate() else [config]
    with whole_folder(out) as temporary:
        with without_progress_bars():
            session.model.save_pretrained(temporary, state_dict=weights)
        has_tokenizer = (session.folder / "tokenizer.json").is_file()
        end = _write_tokenizer(session.folder, temporary, config) if has_tokenizer else config.eos_token_id
        for table in settings:
            if has_tokenizer or table is not config:
                table.bos_token_id = table.eos_token_id = end
            table.use_cache = True
            table.save_pretrained(temporary)
        # safetensors gives its files mode 0600. The others follow the umask.
        for file in temporary.glob("*.safetensors"):
            file.chmod((temporary / "config.json").stat().st_mode)
    return out


def _weights(session: Session, dtype: Dtype) -> dict[str, Tensor]:
    """Return the entries of the model's state_dict. A tied parameter appears once, under its first name."""
    model, optimizer = session.model, session.optimizer
    weights: dict[str, Tensor] = {
        name: optimizer.stored(parameter).float() if dtype == "float32" else parameter.detach()
        for name, parameter in model.named_parameters()
    }
    if session.config.recipe.compute.transform == "unit":
        from narrowgauge.transforms.unit_scaling import plain_state_dict

        # Float32 weights that make the plain class equivalent to the unit-scaled model.
        for name, parameter in model.named_parameters():
            parameter.data = weights[name]
        plain = plain_state_dict(model)
        weights = {name: plain[name] for name in weights}
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    return {name: tensor.contiguous() for name, tensor in {**weights, **buffers}.items()}


def _write_tokenizer(folder: Path, out: Path, config: Any) -> int:
    """Write the tokenizer of a run as a Hugging Face one, and return its end-of-text token."""
    from transformers import PreTrainedTokenizerFast

    tokenizer, end = load_tokenizer(folder / "tokenizer.json")
    positions = getattr(config, "max_position_embeddings", None)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokenizer.id_to_token(end),
        eos_token=tokenizer.id_to_token(end),
        clean_up_tokenization_spaces=False,
        **({} if positions is None else {"model_max_length": positions}),
    )
    fast.save_pretrained(out)
    return end
