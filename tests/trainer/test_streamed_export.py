"""Exports tensor by tensor: the bytes of an export of the whole model, from one process or ranks, by any number of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM

import narrowgauge as ng
from narrowgauge.checkpoints.saving import Saver, latest_checkpoint
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.errors import RecordError
from narrowgauge.trainer import exporting, loop, session, text_sampling
from ranks import run_ranks
from tensors import assert_same_bits
from trainer.tiny_runs import settings

pytestmark = pytest.mark.usefixtures("one_thread")
LIMIT = 4000
"""Bytes of a file; the embeddings alone have more."""


@pytest.fixture(scope="module")
def run(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose weights have tails, scaled by row."""
    folder = tmp_path_factory.mktemp("export") / "run"
    return loop.train(settings(place, folder, recipe="bfloat16/compact", steps=4))


def save_by_rows(rank: int, source: Path, target: Path) -> None:
    """The newest checkpoint of a run as ranks would have written it, each its own rows."""
    ranks, found = all_ranks().apart(), latest_checkpoint(source, lambda path, why: None)
    assert found is not None
    mesh, (tensors, state) = init_device_mesh("cpu", (ranks.size,)), found.load()
    placed: dict[str, Any] = {
        name: value if value.ndim == 0 else distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)
        for name, value in tensors.items()
    }
    saver = Saver(target, ranks)
    saver.save(found.step, placed, state)
    saver.wait()


def export_together(rank: int, folder: Path, out: Path, dtype: Any) -> None:
    exporting.export(folder, out, dtype, max_file_bytes=LIMIT, ranks=all_ranks().apart())


def export_what_must_be_whole(rank: int, folder: Path, out: Path) -> str:
    exporting.can_stream = lambda *_: False
    with pytest.raises(RecordError) as caught:
        exporting.export(folder, out, ranks=all_ranks().apart())
    return str(caught.value)


@pytest.fixture(scope="module")
def sharded(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, with the checkpoint of three ranks."""
    place = tmp_path_factory.mktemp("sharded")
    shutil.copytree(run, place / "run", ignore=lambda folder, names: {"checkpoints"} & set(names))
    run_ranks(save_by_rows, 3, place / "ranks", run, place / "run")
    return place / "run"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("dtype", ["visible", "float32"])
def test_the_bytes_are_those_of_an_export_of_the_whole_model(
    dtype: Any, run: Path, sharded: Path, tmp_path: Path
) -> None:
    whole = exporting.write_folder(session.load(run), tmp_path / "whole", dtype)
    run_ranks(export_together, 2, tmp_path / "ranks", sharded, tmp_path / "together", dtype)
    found = {
        "one file": exporting.export(run, tmp_path / "one", dtype),
        "several": exporting.export(sharded, tmp_path / "several", dtype, max_file_bytes=LIMIT),
        "by two": tmp_path / "together",
    }
    expected = dict(AutoModelForCausalLM.from_pretrained(whole).state_dict())
    for folder in found.values():
        assert_same_bits(weights(folder), weights(whole))
        assert_same_bits(dict(AutoModelForCausalLM.from_pretrained(folder).state_dict()), expected)
        for name in ("config.json", "generation_config.json", "tokenizer.json"):
            assert (folder / name).read_bytes() == (whole / name).read_bytes(), name
    assert [path.name for path in found["one file"].glob("*.safetensors*")] == ["model.safetensors"]
    names = sorted(path.name for path in found["several"].iterdir())
    assert names == sorted(path.name for path in found["by two"].iterdir()) and len(names) > 8
    index = json.loads((found["several"] / "model.safetensors.index.json").read_text())
    for file in found["several"].glob("*.safetensors"):
        held = [name for name, where in index["weight_map"].items() if where == file.name]
        assert held and (file.stat().st_size < LIMIT + 1000 or len(held) == 1)


@pytest.fixture(scope="module", params=["bfloat16/master64", "float64/float64"])
def wide_run(request: pytest.FixtureRequest, place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose optimizer stores float64."""
    folder = tmp_path_factory.mktemp("wide") / "run"
    return loop.train(settings(place, folder, recipe=request.param, steps=2))


def test_stored_float64_is_rounded_for_a_float32_export(wide_run: Path, tmp_path: Path) -> None:
    held = session.load(wide_run)
    expected = {name: held.optimizer.stored(p).float() for name, p in held.model.named_parameters()}
    one = exporting.export(wide_run, tmp_path / "one", "float32", max_file_bytes=LIMIT)
    for folder in (one, exporting.write_folder(held, tmp_path / "whole", "float32")):
        assert_same_bits(weights(folder), expected)
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert_same_bits(dict(loaded.named_parameters()), expected)


def test_a_visible_export_is_loaded_in_the_dtype_of_its_weights(wide_run: Path, tmp_path: Path) -> None:
    held = session.load(wide_run)
    expected = {name: p.detach() for name, p in held.model.named_parameters()}
    for folder in (exporting.export(wide_run, tmp_path / "one"), exporting.write_folder(held, tmp_path / "whole")):
        assert_same_bits(dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters()), expected)


def test_a_model_that_must_be_whole_is_refused_on_ranks(run: Path, tmp_path: Path) -> None:
    for said in run_ranks(export_what_must_be_whole, 2, tmp_path / "ranks", run, tmp_path / "out"):
        assert "was to be exported by 2 ranks" in said and "one process" in said
    assert not (tmp_path / "out").exists()


def test_one_tensor_is_in_memory_at_a_time(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[str]] = []
    true_load: Callable[..., Any] = exporting.load_whole

    def load(path: Path, names: list[str]) -> Any:
        read.append(names)
        return true_load(path, names)

    monkeypatch.setattr(exporting, "load_whole", load)
    exporting.export(sharded, tmp_path / "out")
    assert all(len(names) == 1 for names in read) and len(read) == len(weights(tmp_path / "out"))


def test_a_sharded_run_is_converted_and_sampled_by_one_process(run: Path, sharded: Path, tmp_path: Path) -> None:
    for source, out in ((run, "from one"), (sharded, "from three")):
        report = ng.convert(source, "bfloat16/exact", tmp_path / out)
        assert report.step == 4
    one, three = (
        load_file(tmp_path / out / "checkpoints" / "step-00000004" / "tensors.safetensors")
        for out in ("from one", "from three")
    )
    assert_same_bits(one, three)
    assert text_sampling.sample(sharded, "the", 5) == text_sampling.sample(run, "the", 5)


def test_other_exact_weights_than_those_saved_are_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_weight = exporting.WeightSource.weight
    monkeypatch.setattr(exporting.WeightSource, "weight", lambda self, name: true_weight(self, name) + 1)
    with pytest.raises(RecordError, match="the code of the storage has changed"):
        exporting.export(run, tmp_path / "out", "float32")
    assert not (tmp_path / "out").exists() and list(tmp_path.iterdir()) == []
