"""DeepSpeed's ZeRO checkpoints: every rank saves its piece of one flat float32 vector per parameter group.

::

    latest                                          the name of the newest folder
    global_step3/mp_rank_00_model_states.pt         stages 1 and 2: the model, and names and shapes of each group
    global_step3/zero_pp_rank_0_mp_rank_00_…        stage 3: one such file per rank
    global_step3/*zero_pp_rank_R_mp_rank_00_optim_states.pt

Stages 1 and 2 concatenate the ranks' vectors, with padding only at the end; stage 3 divides every parameter by the number of
ranks, each piece rounded up.

Source: deepspeed 0.19.8, ``utils/zero_to_fp32.py``, ``runtime/zero/stage_1_and_2.py``, ``stage3.py``, ``bf16_optimizer.py``;
checked against ``zero_to_fp32`` on files that DeepSpeed wrote.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from narrowgauge.checkpoints.conversion.sharded import SEEN, WEIGHT, Fragment, Sharded, pickled
from narrowgauge.errors import DataError
from narrowgauge.spec.storages import STATE_NAMES

_OPTIMIZER = "_optim_states.pt"
_MODEL = "_model_states.pt"
_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)")


def is_zero(path: Path) -> bool:
    """Whether a folder is a ZeRO checkpoint, or contains one that ``latest`` names."""
    return path.is_dir() and any(True for _ in _tagged(path).glob(f"*{_OPTIMIZER}"))


def _tagged(path: Path) -> Path:
    latest = path / "latest"
    if not latest.is_file():
        return path
    return path / latest.read_text(encoding="utf-8").strip()


def open_zero(path: Path, *, writable: bool = False) -> Sharded:
    """The fragments of a ZeRO checkpoint of any stage and number of ranks.

    Raises:
        DataError: a file is missing or unreadable; tensor parallelism, experts, or an optimizer other than Adam.
    """
    folder = _tagged(path)
    files = sorted(folder.glob(f"*{_OPTIMIZER}"), key=_rank)
    models = sorted(folder.glob(f"*{_MODEL}"), key=_rank)
    _require_data_parallel(folder, files, models)
    ranks = [pickled(file, writable=writable)["optimizer_state_dict"] for file in files]
    states = [pickled(file, writable=writable) for file in models]
    model, stage = states[0], _stage(ranks[0])
    _require_all_ranks(folder, ranks)
    read = _partitioned if stage == 3 else _concatenated
    fragments = list(read(ranks, _shapes(model["param_shapes"]), folder))
    trained = {fragment.name for fragment in fragments}
    module = model["module"]
    if stage < 3:
        fragments += [
            Fragment(name, SEEN, module[name], tuple(module[name].shape)) for name in trained if name in module
        ]
    if frozen := sorted(model.get("frozen_param_shapes") or ()):
        raise DataError(
            f"'{frozen[0]}' in {folder} is not trained, and has no state.",
            "Convert the file that DeepSpeed's zero_to_fp32.py writes: its weights alone.",
        )
    buffers = {name: module[name] for name in model.get("buffer_names", ()) if name in module}
    whole = {name: value for name, value in buffers.items() if not value.is_floating_point()}
    left = [f"buffer {name}" for name in buffers if name not in whole]
    options = (
        "lr, betas, eps, weight_decay of the optimizer",
        "lr_scheduler",
        "loss scaler",
        "settings and random states",
    )
    return Sharded("DeepSpeed ZeRO", folder, fragments, list(_steps(ranks)), whole, (*left, *options))


def _rank(file: Path) -> tuple[int, str]:
    found = _RANK.search(file.name)
    return (int(found.group(1)) if found else 0, file.name)


def _stage(state: Mapping[str, Any]) -> int:
    # The optimizer of bfloat16 without ZeRO does not say, and has the layout of stage 1.
    stage = state.get("zero_stage", 1)
    return int(getattr(stage, "args", (stage,))[0])


def _require_data_parallel(folder: Path, files: Sequence[Path], models: Sequence[Path]) -> None:
    """Refuse a checkpoint that is not divided over data-parallel ranks alone."""
    if not models:
        raise DataError(f"{folder} contains no *{_MODEL}.", "Give a folder that DeepSpeed's save_checkpoint wrote.")
    parallel = {found.group(1) for file in (*files, *models) if (found := re.search(r"mp_rank_(\d+)", file.name))}
    experts = list(folder.glob("*expert_*")) or list(folder.glob("layer_*"))
    if len(parallel) > 1 or experts:
        what = "tensor-parallel ranks" if len(parallel) > 1 else "experts or pipeline layers in files of their own"
        raise DataError(
            f"{folder} contains {what}, whose parts only the model knows how to join.",
            "Convert the weights that DeepSpeed's ds_to_universal.py or your model's export joins.",
        )


def _require_all_ranks(folder: Path, ranks: Sequence[Mapping[str, Any]]) -> None:
    count = ranks[0].get("partition_count", len(ranks))
    expected = max(count) if isinstance(count, (list, tuple)) else int(count)
    if expected != len(ranks):
        raise DataError(
            f"{folder} contains {len(ranks)} *{_OPTIMIZER}, and {expected} ranks wrote it.",
            "Copy the files of all ranks.",
        )


def _shapes(groups: Any) -> list[dict[str, tuple[int, ...]]]:
    listed = groups if isinstance(groups, (list, tuple)) else [groups]
    return [{name: tuple(shape) for name, shape in group.items()} for group in listed]


def _vectors(state: Mapping[str, Any], where: object) -> list[dict[str, Tensor]]:
    """The float32 vectors of one rank: weight and moments of each group, or of each sub-group in stage 3."""
    is_third = _stage(state) == 3
    weights = state["fp32_flat_groups" if is_third else "single_partition_of_fp32_groups"]
    saved = state["optimizer_state_dict" if is_third else "base_optimizer_state"]
    if isinstance(saved, Mapping):
        keys = [key for group in saved["param_groups"] for key in group["params"]]
        entries = [saved["state"].get(key, {}) for key in keys]
    else:  # elastic checkpoints: a list without padding
        entries = list(saved)
    vectors = []
    for weight, entry in zip(weights, entries, strict=True):
        if entry and not set(STATE_NAMES) <= set(entry):
            raise DataError(
                f"the optimizer in {where} keeps {', '.join(map(str, entry))}.",
                "Only states of Adam and AdamW can be converted.",
            )
        vectors.append({WEIGHT: weight, **{kind: entry[kind] for kind in STATE_NAMES if kind in entry}})
    return vectors


def _steps(ranks: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    for state in ranks:
        saved = state["optimizer_state_dict" if _stage(state) == 3 else "base_optimizer_state"]
        entries = saved["state"].values() if isinstance(saved, Mapping) else saved
        yield from (entry["step"] for entry in entries if "step" in entry)
        groups = saved["param_groups"] if isinstance(saved, Mapping) else ()
        yield from (group["step"] for group in groups if "step" in group)


def _concatenated(
    ranks: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, tuple[int, ...]]], where: object
) -> Iterator[Fragment]:
    """Stages 1 and 2: the ranks' vectors one after the other, without their padding, are the parameters one after the other."""
    vectors = [_vectors(state, where) for state in ranks]
    for number, shapes in enumerate(groups):
        begins = 0
        bounds = []
        for own in vectors:
            bounds.append((begins, begins + own[number][WEIGHT].numel()))
            begins = bounds[-1][1]
        offset = 0
        for name, shape in shapes.items():
            size = math.prod(shape)
            for own, (first, last) in zip(vectors, bounds, strict=True):
                low, high = max(offset, first), min(offset + size, last)
                if low < high:
                    for kind, vector in own[number].items():
                        yield Fragment(name, kind, vector[low - first : high - first], shape, start=low - offset)
            offset += size


def _partitioned(
    ranks: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, tuple[int, ...]]], where: object
) -> Iterator[Fragment]:
    """Stage 3: each rank has an equal piece of every parameter, the last one padded; a sub-group ends between parameters."""
    shapes = {name: shape for group in groups for name, shape in group.items()}
    for rank, state in enumerate(ranks):
        vectors = _vectors(state, where)
        number, offset = 0, 0
        for name, shape in shapes.items():
            part = -(-math.prod(shape) // len(ranks))
            if number < len(vectors) and offset == vectors[number][WEIGHT].numel():
                number, offset = number + 1, 0
            if number == len(vectors) or offset + part > vectors[number][WEIGHT].numel():
                raise DataError(
                    f"the vectors of rank {rank} in {where} do not fit the shapes of '{name}'.",
                    "Give a checkpoint whose parameters are all divided over all ranks.",
                )
            size = min(part, math.prod(shape) - rank * part)
            if size > 0:
                for kind, vector in vectors[number].items():
                    yield Fragment(name, kind, vector[offset : offset + size], shape, start=rank * part)
            offset += part
