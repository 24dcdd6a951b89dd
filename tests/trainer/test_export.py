"""Exports are whole, load in Hugging Face with the same bits, and samples are a function of their arguments."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from narrowgauge.errors import RecordError
from narrowgauge.trainer import export as exporting
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.text import Document, Texts
from narrowgauge.trainer.data.tokens import END_OF_TEXT, train_tokenizer
from narrowgauge.trainer.export import export_session
from narrowgauge.trainer.language_model import build
from narrowgauge.trainer.session import Session

TEXT = "def add(one, two):\n    return one + two\n\n" * 20


@dataclass
class Optimizer:
    """Keeps every weight exactly, beside the bfloat16 that the model sees."""

    exact: dict[nn.Parameter, Tensor]

    def stored(self, parameter: nn.Parameter) -> Tensor:
        return self.exact[parameter]


@dataclass
class FakeRun:
    model: PreTrainedModel
    optimizer: Optimizer
    folder: Path
    config: TrainConfig = field(default_factory=TrainConfig)


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = Texts("here", lambda: iter([Document("a", TEXT)]))
    tokenizer, _ = train_tokenizer(texts, 280, len(TEXT))
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def make_run(tokenizer_path: Path | None, *, narrow: bool = True, model: str = "llama-1m") -> Session:
    made = build(model, vocab_size=300, seed=1)
    exact = {parameter: parameter.detach().clone() for parameter in made.parameters()}
    if narrow:
        for parameter in made.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    return cast(Session, FakeRun(made, Optimizer(exact), (tokenizer_path or Path("nowhere")).parent))


def test_the_visible_export_is_the_model_bit_for_bit(tmp_path: Path, tokenizer_path: Path) -> None:
    run = make_run(tokenizer_path)
    out = export_session(run, tmp_path / "deep" / "out")
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.bfloat16
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for name, value in run.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    config = json.loads((out / "config.json").read_text())
    assert config["use_cache"] is True
    assert config["dtype"] == "bfloat16"


def test_the_float32_export_is_what_the_optimizer_holds(tmp_path: Path, tokenizer_path: Path) -> None:
    run = make_run(tokenizer_path)
    out = export_session(run, tmp_path / "out", "float32")
    loaded = dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())
    for name, parameter in run.model.named_parameters():
        assert loaded[name].dtype == torch.float32
        assert torch.equal(loaded[name], run.optimizer.exact[parameter]), name
    assert any(not torch.equal(value, value.bfloat16().float()) for value in loaded.values())


def test_the_tokenizer_goes_along(tmp_path: Path, tokenizer_path: Path) -> None:
    out = export_session(make_run(tokenizer_path), tmp_path / "out")
    tokenizer, own = AutoTokenizer.from_pretrained(out), Tokenizer.from_file(str(tokenizer_path))
    text = "def one(two):\n\treturn  'ü' , 3\n"
    assert tokenizer(text)["input_ids"] == own.encode(text).ids
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == END_OF_TEXT
    config = json.loads((out / "config.json").read_text())
    generation = json.loads((out / "generation_config.json").read_text())
    assert config["eos_token_id"] == generation["eos_token_id"] == tokenizer.eos_token_id
    written = AutoModelForCausalLM.from_pretrained(out).generate(
        **tokenizer("def", return_tensors="pt"), max_new_tokens=3, do_sample=False
    )
    assert 1 < written.shape[1] <= 4


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    run, out = make_run(None), tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("1")
    with pytest.raises(RecordError, match="it exists and is not empty"):
        export_session(run, out)
    with pytest.raises(RecordError, match="it exists and is not empty"):
        exporting.export(tmp_path / "no run", out)
    assert (out / "precious").read_text() == "1"
    with pytest.raises(RecordError, match="it exists and is a file"):
        export_session(run, out / "precious")
    (out / "precious").unlink()
    assert (export_session(run, out) / "model.safetensors").is_file()
