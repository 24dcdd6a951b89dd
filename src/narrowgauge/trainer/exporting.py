"""Export of a run as a Hugging Face folder.

A run stores each weight as the bits that the model sees and a tail that the optimizer adds. An export in the *visible* format
is the model exactly as it was trained and evaluated. An export in *float32* includes the tails, so that training can continue
elsewhere without losing small updates.

A checkpoint of many ranks may be larger than the memory of the process that exports it, so weights are streamed: each tensor is
put together from the ranks' files, decoded if its tail is wanted, and written. Several processes share the files of the export
among them, and none holds more than one tensor.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Collection, Mapping, Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from narrowgauge.assembly.preparation import class_of
from narrowgauge.checkpoints.checkpoint_files import SavedTensor, load_whole, saved_tensors, write_one_by_one
from narrowgauge.checkpoints.conversion.folders import new_folder
from narrowgauge.checkpoints.saving import Checkpoint
from narrowgauge.distributed.ranks import ALONE, Ranks
from narrowgauge.errors import RecordError
from narrowgauge.numerics.checksums import fingerprint, fingerprint_all
from narrowgauge.runs.atomic_io import AGAIN, disk_errors
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.tokens import tokenizer_of_run
from narrowgauge.trainer.language_model import without_progress_bars
from narrowgauge.trainer.resume_checks import refuse_occupied
from narrowgauge.trainer.session import SavedRun, Session, load, open_run, stepped_by_adamw

if TYPE_CHECKING:
    from transformers import PreTrainedModel


MAX_FILE_BYTES = 5_000_000_000
"""The largest file of an export, unless a single tensor is larger."""


@dataclass(frozen=True)
class WeightSource:
    """The weights in a checkpoint whose checksums were verified.

    Args:
        names: of the parameters, in the model's order.
        config: the run's settings: its recipe and update rule.
        is_exact: export the stored weights in float32, tails included, and not the visible ones; float64 ones are rounded.
        outer: names of matrices that AdamW steps, whatever the rule.
    """

    checkpoint: Checkpoint
    saved: Mapping[str, SavedTensor]
    names: tuple[str, ...]
    config: TrainConfig
    is_exact: bool
    outer: Collection[str] = ()

    def shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each weight as exported."""
        return {name: self._shape(self.saved[f"model.{name}"]) for name in self.names}

    def _shape(self, saved: SavedTensor) -> tuple[torch.dtype, tuple[int, ...]]:
        return torch.float32 if self.is_exact else saved.dtype, saved.shape

    def weight(self, name: str) -> Tensor:
        """A weight as the model sees it or, with ``is_exact``, as the optimizer stores it: float32 or float64; on the CPU."""
        path, key, prefix = self.checkpoint.path, f"model.{name}", f"optimizer.{name}."
        if not self.is_exact:
            return load_whole(path, [key])[key]
        states = [state for state in self.saved if state.startswith(prefix)]
        tensors = load_whole(path, [key, *states])
        entry = {state.removeprefix(prefix): tensors[state] for state in states}
        parameter = nn.Parameter(tensors[key], requires_grad=tensors[key].is_floating_point())
        storage = self.config.recipe.storage_of(name, parameter.ndim)
        group = {"params": [(name, parameter)], "storage": storage} | ({"rule": "adamw"} if name in self.outer else {})
        made_by, options = class_of(self.config.rule), self.config.optimizer_options
        optimizer = made_by([group], **options, audit_every=0, compile=False)
        optimizer.load_states({parameter: entry} if entry else {})
        stored: Tensor = optimizer.stored(parameter)
        return stored


def can_stream(model: PreTrainedModel, saved: Mapping[str, SavedTensor]) -> bool:
    """Whether the export of a model is its parameters, one by one.

    It is not where the model's state has buffers, which a checkpoint does not hold, or where ``save_pretrained`` joins or
    renames tensors; the whole model is then built.
    """
    own = {f"model.{name}": tuple(parameter.shape) for name, parameter in model.named_parameters()}
    theirs = {name: tensor.shape for name, tensor in saved.items() if name.startswith("model.")}
    all_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return own == theirs and model.state_dict().keys() <= all_names and not _is_renamed(model)


def _is_renamed(model: PreTrainedModel) -> bool:
    try:
        # Not in transformers' documentation. Without it the model is built, which takes memory and nothing else.
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return True
    return bool(get_model_conversion_mapping(model, add_legacy=False))


def write_weights(
    source: WeightSource, folder: Path, max_file_bytes: int = MAX_FILE_BYTES, ranks: Ranks = ALONE
) -> None:
    """Write ``model.safetensors``, or several files and ``model.safetensors.index.json``, as ``save_pretrained`` does.

    All ranks call it with the same empty folder, and share the files among them.

    Raises:
        RecordError: the exact weights are not those that were saved.

    Cost: one read of the weights, with ``is_exact`` of the whole checkpoint; one write; memory for one tensor, with ``is_exact``
        for some copies of it.
    """
    shapes = source.shapes()
    files = split_files(shapes, max_file_bytes)
    numbers: dict[str, int] = {}

    def tensor_of(name: str) -> Tensor:
        weight = source.weight(name)
        # The record has the number of the stored weight, before a float64 one is rounded to the declared dtype.
        numbers[name] = fingerprint(weight)
        return weight.to(shapes[name][0])

    def write_mine() -> None:
        for name in list(files)[ranks.rank :: ranks.size]:
            write_one_by_one(folder / name, {key: shapes[key] for key in files[name]}, tensor_of)
        if ranks.rank == 0 and len(files) > 1:
            _write_index(folder, shapes, files)

    ranks.together(write_mine)
    if source.is_exact:
        _require_saved(source, {name: number for part in ranks.gather(numbers) for name, number in part.items()})


def split_files(shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], max_file_bytes: int) -> dict[str, list[str]]:
    """Which tensors go to which file, in order.

    Example:
        >>> of = (torch.float32, (2,))
        >>> split_files({"a": of, "b": of, "c": of}, 16)
        {'model-00001-of-00002.safetensors': ['a', 'b'], 'model-00002-of-00002.safetensors': ['c']}
    """
    groups: list[list[str]] = [[]]
    room = max_file_bytes
    for name, (dtype, shape) in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        if size > room and groups[-1]:
            groups.append([])
            room = max_file_bytes
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{k:05d}-of-{len(groups):05d}.safetensors": names for k, names in enumerate(groups, 1)}


def _write_index(
    folder: Path, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], files: Mapping[str, list[str]]
) -> None:
    total = sum(math.prod(shape) * dtype.itemsize for dtype, shape in shapes.values())
    weight_map = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _require_saved(source: WeightSource, numbers: Mapping[str, int]) -> None:
    expected, found = source.checkpoint.state()["fingerprint"], fingerprint_all(numbers)
    if found != expected:
        raise RecordError(
            f"checkpoint {source.checkpoint.path.name} gives weights {found}, and {expected} was saved.",
            "The checkpoint is intact, so the code of the storage has changed: export with the version that wrote it.",
        )


# ── the folder ──────────────────────────────────────────────────────────────────────────────────────────────────────

Dtype = Literal["visible", "float32"]


def export(
    folder: Path,
    out: Path,
    dtype: Dtype = "visible",
    max_file_bytes: int = MAX_FILE_BYTES,
    ranks: Ranks = ALONE,
) -> Path:
    """Export a run's newest good checkpoint as a Hugging Face folder.

    Invariant: ``out`` is complete or absent. Loading it gives the same bits: with ``"visible"`` those of the weights that
    the model sees, with ``"float32"`` those of the weights that the optimizer stores, rounded to nearest if it stores float64.

    Args:
        out: the folder to make: ``config.json``, ``model.safetensors`` and the tokenizer, so that
            ``AutoModelForCausalLM`` and ``AutoTokenizer.from_pretrained(out)`` work. Missing parents are made. A run
            on a token map without a tokenizer exports the model alone.
        max_file_bytes: weights that need more are written to several files with an index, as ``save_pretrained`` does.
        ranks: which share the files among them; all call this.

    Raises:
        RecordError: the run has no good checkpoint, ``out`` exists and is not an empty folder, the disk is full, or several ranks
            were to export a model that must be whole (see Cost).

    Cost: reads the checkpoint once to verify it and its weights again, writes 2, 4 or 8 bytes per parameter. Memory for one
        tensor; for the whole model and its optimizer where the recipe has unit scaling or transformers joins tensors.
    """
    ranks.together(lambda: refuse_occupied(Path(out)))
    _require_dtype(dtype)
    run = open_run(folder, ranks)
    saved = saved_tensors(run.checkpoint.path)
    if run.config.recipe.compute.transform == "unit" or not can_stream(run.model, saved):
        if ranks.size > 1:
            raise RecordError(
                f"{folder} was to be exported by {ranks.size} ranks, and this model's export needs all of it in one process.",
                "Give the command to one process.",
            )
        return write_folder(load(folder), Path(out), dtype, max_file_bytes)
    names = tuple(name for name, _ in run.model.named_parameters())
    outer = stepped_by_adamw(run.config, run.model)
    source = WeightSource(run.checkpoint, saved, names, run.config, dtype == "float32", outer)
    return _stream(run, source, Path(out), max_file_bytes, ranks)


def _stream(run: SavedRun, source: WeightSource, out: Path, max_file_bytes: int, ranks: Ranks) -> Path:
    """Write the folder of an export, tensor by tensor."""
    dtypes = {dtype for dtype, _ in source.shapes().values()}
    with ExitStack() as stack:
        temporary = Path(ranks.of_first(lambda: str(stack.enter_context(new_folder(out)))))
        with disk_errors(out, AGAIN):
            write_weights(source, temporary, max_file_bytes, ranks)
        ranks.of_first(lambda: _finish(run, temporary, _holding(dtypes), stack))
    return out


def _finish(run: SavedRun, folder: Path, dtype: torch.dtype, stack: ExitStack) -> None:
    run.model.config.architectures = [type(run.model).__name__]
    _write_all_but_weights(run, folder, dtype)
    stack.close()


def _holding(dtypes: Set[torch.dtype]) -> torch.dtype:
    """The dtype that ``config.json`` declares, to which loading casts all weights: one that changes no value of these dtypes."""
    if torch.float64 in dtypes:
        return torch.float64
    return torch.bfloat16 if dtypes <= {torch.bfloat16} else torch.float32


def write_folder(run: Session, out: Path, dtype: Dtype = "visible", max_file_bytes: int = MAX_FILE_BYTES) -> Path:
    """:func:`export` for a run in memory."""
    _require_dtype(dtype)
    refuse_occupied(out)
    with new_folder(out) as temporary:
        _write(run, temporary, dtype, max_file_bytes)
    return out


def _require_dtype(dtype: str) -> None:
    if dtype not in ("visible", "float32"):
        raise RecordError(f"Cannot export as {dtype!r}.", "Use 'visible' or 'float32'.")


def _write(run: Session, folder: Path, dtype: Dtype, max_file_bytes: int) -> None:
    weights = _weights(run, dtype)
    dtypes = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    with without_progress_bars():
        run.model.save_pretrained(folder, state_dict=weights, max_shard_size=max_file_bytes)
    _write_all_but_weights(run, folder, _holding(dtypes))


def _write_all_but_weights(run: Session | SavedRun, folder: Path, dtype: torch.dtype) -> None:
    config = copy.deepcopy(run.model.config)
    config.dtype = dtype
    config.use_cache = True
    if run.tokenizer_path is not None:
        end = _write_tokenizer(run, folder, getattr(config, "max_position_embeddings", None))
        config.bos_token_id = config.eos_token_id = end
    config.save_pretrained(folder)
    _write_generation(run.model, folder, config.eos_token_id)


def _weights(run: Session, dtype: Dtype) -> dict[str, Tensor]:
    """The entries of the model's state_dict; a tied parameter appears once, under its first name."""
    if run.config.recipe.compute.transform == "unit":
        return _plain_weights(run, dtype)
    kept = run.model.state_dict().keys()
    weights = {name: buffer for name, buffer in run.model.named_buffers() if name in kept}
    for name, parameter in run.model.named_parameters():
        weights[name] = run.optimizer.stored(parameter).float() if dtype == "float32" else parameter
    return {name: tensor.detach().contiguous() for name, tensor in weights.items()}


def _plain_weights(run: Session, dtype: Dtype) -> dict[str, Tensor]:
    """Float32 weights with which the plain class computes the same as the unit-scaled model."""
    # Imported here: it loads the model classes, which takes seconds.
    from narrowgauge.transforms.unit_scaling import plain_state_dict

    visible = {parameter: parameter.data for parameter in run.model.parameters()}
    try:
        if dtype == "float32":
            for parameter in visible:
                parameter.data = run.optimizer.stored(parameter).float()
        plain = plain_state_dict(run.model)
    finally:
        for parameter, data in visible.items():
            parameter.data = data
    names = {name for name, _ in run.model.named_parameters()} | {name for name, _ in run.model.named_buffers()}
    return {name: tensor.contiguous() for name, tensor in plain.items() if name in names}


def _write_tokenizer(run: Session | SavedRun, folder: Path, positions: int | None) -> int:
    from transformers import PreTrainedTokenizerFast

    tokenizer, end = tokenizer_of_run(run.tokenizer_path)
    name = tokenizer.id_to_token(end)
    length = {} if positions is None else {"model_max_length": positions}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=name, eos_token=name, clean_up_tokenization_spaces=False, **length
    )
    fast.save_pretrained(folder)
    return end


def _write_generation(model: PreTrainedModel, folder: Path, end: int | None) -> None:
    if model.can_generate():
        generation = copy.deepcopy(model.generation_config)
        generation.bos_token_id = generation.eos_token_id = end
        generation.use_cache = True
        generation.save_pretrained(folder)
