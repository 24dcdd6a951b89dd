"""Export of a run's model as int8 or float8 codes, and loading it back to sample from.

The folder is a Hugging Face folder whose linear layers hold ``weight_codes`` and ``weight_scales`` instead of weights
(:mod:`narrowgauge.matmul.inference`). Its ``config.json`` says so under ``quantization_config``. The weights are in
``quantized.safetensors``: transformers (5.23) only warns of a method that it does not know, and would draw the weights that a
``model.safetensors`` lacks at random; of a folder without one, ``from_pretrained`` says that it has no weights.

In ``int8-outlier`` the export also decides which columns may hold outliers: it runs the model on sequences that were held out of
the training data, and keeps the weights of the columns that it finds in 16 bits.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from narrowgauge.checkpoints.checkpoint_files import write_one_by_one
from narrowgauge.checkpoints.conversion.folders import new_folder
from narrowgauge.errors import RecordError
from narrowgauge.matmul.inference import quantize_for_inference, with_codes
from narrowgauge.matmul.linear import is_linear
from narrowgauge.matmul.outlier_search import find_outlier_columns
from narrowgauge.matmul.swapping import chooser
from narrowgauge.runs.atomic_io import AGAIN, disk_errors
from narrowgauge.spec.computes import Compute, keeps_outlier_weights
from narrowgauge.trainer.exporting import MAX_FILE_BYTES, export, split_files
from narrowgauge.trainer.language_model import without_progress_bars
from narrowgauge.trainer.resume_checks import QUANTIZED_BY, quantization_of, refuse_occupied
from narrowgauge.trainer.session import open_run

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CALIBRATION_SEQUENCES = 64
"""Held-out sequences on which outlier columns are looked for."""
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "config.json")
_STEM = "quantized"


def export_quantized(
    folder: Path,
    out: Path,
    compute: str | Compute,
    max_file_bytes: int = MAX_FILE_BYTES,
    sequences: int = CALIBRATION_SEQUENCES,
) -> Path:
    """Export a run's newest good checkpoint with its linear layers and experts stored as codes.

    Invariant: ``out`` is complete or absent. :func:`load_quantized` gives the bits of
    :func:`narrowgauge.quantize_for_inference` of the model that the run evaluates.

    Args:
        out: the folder to make, as for :func:`narrowgauge.trainer.exporting.export`.
        compute: whose codes to store: ``int8-outlier``, ``int8-outlier+threshold=4``, ``int8-row`` and others.
        max_file_bytes: weights that need more are written to several files with an index.
        sequences: held-out sequences, of the run's length, on which ``int8-outlier`` looks for outlier columns.

    Raises:
        RecipeError: the compute has no such codes.
        RecordError: the run has no good checkpoint, or ``out`` is occupied.

    Cost: an export of the weights to a temporary folder first; memory for the whole model; in ``int8-outlier`` a forward pass
        for each sequence.
    """
    made, out = with_codes(compute), Path(out)
    refuse_occupied(out)
    with TemporaryDirectory(prefix="narrowgauge-export-") as temporary:
        plain = export(Path(folder), Path(temporary) / "plain")
        model = _loaded(plain)
        columns = _outlier_columns(model, Path(folder), made, sequences) if keeps_outlier_weights(made) else None
        quantize_for_inference(model, made, outlier_columns=columns)
        with new_folder(out) as whole, disk_errors(out, AGAIN):
            _write(model, plain, whole, made, max_file_bytes)
    return out


def load_quantized(folder: str | Path) -> PreTrainedModel:
    """Load what :func:`export_quantized` wrote: the same bits.

    Returns:
        The model in evaluation mode, on the CPU.

    Raises:
        RecordError: the folder holds no such model, or its files do not fit together.

    Cost: memory for the model in 16 bits while it is built, then for what is stored.
    """
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(folder)
    said = quantization_of(folder)
    if said is None:
        raise RecordError(
            f"{folder} holds no model that was exported with --quantize.",
            "Other exports load with AutoModelForCausalLM.from_pretrained.",
        )
    made = with_codes(said["compute"])
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    del config.quantization_config
    with torch.random.fork_rng(devices=[]):  # what is drawn here is overwritten
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype, trust_remote_code=False)
        _drop_weights(model, made)
        quantize_for_inference(model, made, outlier_columns={} if keeps_outlier_weights(made) else None)
    state: dict[str, Tensor] = {}
    with disk_errors(folder):
        for file in sorted(folder.glob(f"{_STEM}*.safetensors")):
            state |= load_file(file)
    expected = set(model.state_dict()) - _tied_names(model)
    if state.keys() != expected:
        wrong = sorted(state.keys() ^ expected)[0]
        raise RecordError(
            f"{folder} has {len(state)} tensors where its config.json asks for {len(expected)}; '{wrong}' is one that differs.",
            "Export it again.",
        )
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    return cast("PreTrainedModel", model.eval())


def _loaded(folder: Path) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    with without_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
    return cast("PreTrainedModel", model.eval())


def _outlier_columns(model: nn.Module, folder: Path, compute: Compute, sequences: int) -> dict[str, list[int]]:
    """The columns that hold outliers in some held-out sequences of the run."""
    from narrowgauge.trainer.data.dataset import open_data

    length, data = open_run(folder).config.sequence_length, open_data(folder)

    def batches() -> Iterator[Tensor]:
        for batch in data.valid_batches(1, length, sequences):
            yield torch.from_numpy(batch)[:, :-1]

    return find_outlier_columns(model, batches(), compute)


def _write(model: PreTrainedModel, plain: Path, folder: Path, compute: Compute, max_file_bytes: int) -> None:
    """Write the weights and ``config.json``, and copy all else from the plain export."""
    shutil.copytree(plain, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*_WEIGHTS))
    tied, state = _tied_names(model), model.state_dict()
    tensors = {name: tensor.detach().contiguous() for name, tensor in state.items() if name not in tied}
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    for name, own in split_files(shapes, max_file_bytes).items():
        file = folder / name.replace("model", _STEM, 1)
        write_one_by_one(file, {key: shapes[key] for key in own}, tensors.__getitem__)
    config = json.loads((plain / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": QUANTIZED_BY, "compute": compute.name}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _drop_weights(model: nn.Module, compute: Compute) -> None:
    """Free the weights that will be replaced by codes: they were drawn at random and need not be quantized."""
    choose = chooser(compute, None)
    for name, module in model.named_modules():
        if is_linear(module) and choose(name) is not None:
            weight: Any = module.weight
            module.weight = nn.Parameter(weight.detach().to("meta"), requires_grad=False)


def _tied_names(model: nn.Module) -> set[str]:
    """The further names of tied parameters."""
    all_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return all_names - {name for name, _ in model.named_parameters()}
