"""Export a run as a Hugging Face folder, through ``save_pretrained``.

A run stores each weight as the bits that the model sees. For many storages the optimizer adds a tail. The *visible*
export is the model as trained and evaluated. The *float32* export includes the tails, so that training can continue
elsewhere without losing small updates.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import disk_errors, whole_folder
from narrowgauge.trainer.data.tokens import load_tokenizer
from narrowgauge.trainer.language_model import without_progress_bars
from narrowgauge.trainer.session import Session, load

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Dtype = Literal["visible", "float32"]


def export(folder: Path, out: Path, dtype: Dtype = "visible", max_shard_size: int | str = "5GB") -> Path:
    """Write the model of a run's newest good checkpoint as a Hugging Face folder, complete or absent.

    ``AutoModelForCausalLM`` and ``AutoTokenizer.from_pretrained(out)`` load it. The weights have the bits that the model sees.
    With ``"float32"`` they are the optimizer's stored weights, rounded to nearest if it stores float64. A run on a token map
    without a tokenizer exports only the model.

    Args:
        out: the folder to make; missing parents are made.
        max_shard_size: largest file, as for ``save_pretrained``.

    Raises:
        RecordError: the run has no good checkpoint, ``out`` is not empty, or the disk is full.

    Cost: the model and its optimizer in memory.
    """
    out = Path(out)
    refuse_occupied(out)
    return export_session(load(folder), out, dtype, max_shard_size)


def export_session(session: Session, out: Path, dtype: Dtype = "visible", max_shard_size: int | str = "5GB") -> Path:
    """Write the model of a session in memory, as :func:`export` does."""
    if dtype not in ("visible", "float32"):
        raise RecordError(f"Cannot export as {dtype!r}.", "Use 'visible' or 'float32'.")
    refuse_occupied(out)
    weights = _weights(session, dtype)
    dtypes = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    config = copy.deepcopy(session.model.config)
    # Loading casts all weights to the declared dtype: one that changes no value.
    config.dtype = (
        torch.bfloat16 if dtypes <= {torch.bfloat16} else max(dtypes | {torch.float32}, key=lambda d: d.itemsize)
    )
    config.use_cache = True
    with whole_folder(out) as temporary:
        try:
            with without_progress_bars():
                session.model.save_pretrained(temporary, state_dict=weights, max_shard_size=max_shard_size)
        except ValueError as error:
            raise RecordError(f"Cannot export files of {max_shard_size}: {error}", "Use 5GB or 500MB.") from error
        if (session.folder / "tokenizer.json").is_file():
            config.bos_token_id = config.eos_token_id = _write_tokenizer(session.folder, temporary, config)
        config.save_pretrained(temporary)
        _write_generation(session.model, temporary, config.eos_token_id)
    return out


def _weights(session: Session, dtype: Dtype) -> dict[str, Tensor]:
    """Return the entries of the model's state_dict. A tied parameter appears once, under its first name."""
    model, optimizer = session.model, session.optimizer
    if session.config.recipe.compute.transform == "unit":
        return _plain_weights(session, dtype)
    names = model.state_dict().keys()
    weights = {name: buffer for name, buffer in model.named_buffers() if name in names}
    for name, parameter in model.named_parameters():
        weights[name] = optimizer.stored(parameter).float() if dtype == "float32" else parameter
    return {name: tensor.detach().contiguous() for name, tensor in weights.items()}


def _plain_weights(session: Session, dtype: Dtype) -> dict[str, Tensor]:
    """Return float32 weights that make the plain class equivalent to the unit-scaled model."""
    from narrowgauge.transforms.unit_scaling import plain_state_dict

    model = session.model
    visible = {parameter: parameter.data for parameter in model.parameters()}
    try:
        if dtype == "float32":
            for parameter in visible:
                parameter.data = session.optimizer.stored(parameter).float()
        plain = plain_state_dict(model)
    finally:
        for parameter, data in visible.items():
            parameter.data = data
    names = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    return {name: tensor.contiguous() for name, tensor in plain.items() if name in names}


def _write_tokenizer(folder: Path, out: Path, config: Any) -> int:
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


def _write_generation(model: PreTrainedModel, out: Path, end: int | None) -> None:
    if model.can_generate():
        generation = copy.deepcopy(model.generation_config)
        generation.bos_token_id = generation.eos_token_id = end
        generation.use_cache = True
        generation.save_pretrained(out)


def refuse_occupied(out: Path) -> None:
    """Raise unless ``out`` does not exist or is an empty folder."""
    with disk_errors(out):
        occupied = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if occupied:
        reason = "is not empty" if out.is_dir() else "is a file"
        raise RecordError(
            f"Cannot export to {out}: it exists and {reason}.", "Name another folder, or remove this one."
        )
