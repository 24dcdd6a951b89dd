"""Exports of a run load in Hugging Face with the same bits, and overwrite nothing."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from narrowgauge.errors import DataError
from narrowgauge.trainer import loop, session
from narrowgauge.trainer.data.tokens import (
    END_OF_TEXT,
    load_tokenizer,
    read_documents,
    write_tokens,
)
from narrowgauge.trainer.export import export
from trainer.tiny_runs import settings

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def run(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loop.train(
        settings(place, tmp_path_factory.mktemp("run") / "run", recipe="bfloat16/word", steps=2)
    )


def test_an_export_is_the_model_bit_for_bit(run: Path, tmp_path: Path) -> None:
    trained = session.load(run)
    visible = export(run, tmp_path / "deep" / "out")
    loaded = AutoModelForCausalLM.from_pretrained(visible)
    assert loaded.dtype == torch.bfloat16
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for name, value in trained.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert [path.name for path in visible.parent.iterdir()] == ["out"]
    config = json.loads((visible / "config.json").read_text())
    assert config["use_cache"] is True and config["dtype"] == "bfloat16"


def test_the_tokenizer_goes_along(run: Path, tmp_path: Path) -> None:
    out = export(run, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(out)
    reference = Tokenizer.from_file(str(out / "tokenizer.json"))
    text = "def one(two):\n\treturn  'ü' , 3\n"
    assert tokenizer(text)["input_ids"] == reference.encode(text).ids
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == END_OF_TEXT
    config, generation = (
        json.loads((out / f"{name}.json").read_text()) for name in ("config", "generation_config")
    )
    assert config["eos_token_id"] == generation["eos_token_id"] == tokenizer.eos_token_id
    inputs = tokenizer("def", return_tensors="pt")
    written = AutoModelForCausalLM.from_pretrained(out).generate(
        **inputs, max_new_tokens=3, do_sample=False
    )
    assert 1 < written.shape[1] <= inputs["input_ids"].shape[1] + 3


def test_the_end_of_text_is_that_of_the_training_whose_data_are_gone(
    place: Path, tmp_path: Path
) -> None:
    named = tmp_path / "named"
    named.mkdir()
    tokenizer = (place / "tokens" / "tokenizer.json").read_text().replace(END_OF_TEXT, "[DONE]")
    (named / "tokenizer.json").write_text(tokenizer)
    (named / "tokenizer_config.json").write_text('{"eos_token": "[DONE]"}')
    data = write_tokens(read_documents(place / "text"), *load_tokenizer(named), tmp_path / "tokens")
    folder = loop.train(settings(place, tmp_path / "run", data=str(data), steps=1))
    shutil.rmtree(data)
    assert AutoTokenizer.from_pretrained(export(folder, tmp_path / "out")).eos_token == "[DONE]"


def test_weights_need_tokens_of_their_tokenizer(run: Path, place: Path, tmp_path: Path) -> None:
    model = export(run, tmp_path / "model")
    config = settings(place, tmp_path / "run", model=str(model), steps=1)
    loop.train(config)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {
        letter: 255 - number for letter, number in tokenizer["model"]["vocab"].items()
    }
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(DataError, match="have another vocabulary"):
        loop.train(replace(config, out=str(tmp_path / "other")))
