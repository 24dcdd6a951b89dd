"""Exports of a run load in Hugging Face with the same bits, and overwrite nothing."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from narrowgauge.trainer import loop
from narrowgauge.trainer.export import export
from narrowgauge.trainer.tokens import END_OF_TEXT
from trainer.tiny_runs import call, settings

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def run(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    return loop.train(settings(place, out, recipe="bfloat16/word", steps=2))


def test_an_export_is_the_model_bit_for_bit(run: Path, tmp_path: Path) -> None:
    trained = loop.load(run)
    visible = export(run, tmp_path / "deep" / "out")
    loaded = AutoModelForCausalLM.from_pretrained(visible)
    assert loaded.dtype == torch.bfloat16
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for name, value in trained.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert [path.name for path in visible.parent.iterdir()] == ["out"]
    config = json.loads((visible / "config.json").read_text())
    assert config["use_cache"] is True and config["dtype"] == "bfloat16"


def test_the_tokenizer_goes_along_and_the_folder_is_a_model_to_train(
    run: Path, place: Path, tmp_path: Path
) -> None:
    out = export(run, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(out)
    reference = Tokenizer.from_file(str(out / "tokenizer.json"))
    text = "def one(two):\n\treturn  'ü' , 3\n"
    assert tokenizer(text)["input_ids"] == reference.encode(text).ids
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == END_OF_TEXT
    for name in ("config", "generation_config"):
        table = json.loads((out / f"{name}.json").read_text())
        assert table["eos_token_id"] == tokenizer.eos_token_id
    loop.train(settings(place, tmp_path / "run", model=str(out), steps=1))


def test_a_full_disk_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("narrowgauge.trainer.export._name_the_end", full)
    refused = call("export", str(run), str(tmp_path / "out"))
    assert (refused.exit_code, refused.stderr.count("\n")) == (1, 1)
    assert "the disk is full" in refused.stderr and not any(tmp_path.iterdir())
