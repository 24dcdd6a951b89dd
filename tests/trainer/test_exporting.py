"""Exports are whole, load in Hugging Face with the same bits, and samples are a function of their arguments."""

from __future__ import annotations

import errno
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from narrowgauge.errors import DataError, RecordError
from narrowgauge.trainer import exporting
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.corpus import Document, Texts
from narrowgauge.trainer.data.tokens import END_OF_TEXT, train_tokenizer
from narrowgauge.trainer.exporting import write_folder
from narrowgauge.trainer.language_model import build
from narrowgauge.trainer.session import Session
from narrowgauge.trainer.text_sampling import continue_text

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
    tokenizer_path: Path | None
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
    return cast(Session, FakeRun(made, Optimizer(exact), tokenizer_path))


def test_the_visible_export_is_the_model_bit_for_bit(tmp_path: Path, tokenizer_path: Path) -> None:
    run = make_run(tokenizer_path)
    out = write_folder(run, tmp_path / "deep" / "out")
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
    out = write_folder(run, tmp_path / "out", "float32")
    loaded = dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())
    for name, parameter in run.model.named_parameters():
        assert loaded[name].dtype == torch.float32
        assert torch.equal(loaded[name], run.optimizer.exact[parameter]), name
    assert any(not torch.equal(value, value.bfloat16().float()) for value in loaded.values())


def test_weights_of_two_dtypes_lose_nothing(tmp_path: Path) -> None:
    run = make_run(None)
    norm = run.model.model.norm.weight
    norm.data = torch.full((128,), 1 + 2**-20)
    loaded = AutoModelForCausalLM.from_pretrained(write_folder(run, tmp_path / "out"))
    assert torch.equal(loaded.model.norm.weight, norm)
    assert torch.equal(loaded.lm_head.weight, run.model.lm_head.weight.float())


def test_an_export_is_a_model_to_train_on(tmp_path: Path) -> None:
    run = make_run(None)
    again = build(str(write_folder(run, tmp_path / "out")), seed=0)
    assert torch.equal(again.lm_head.weight, run.model.lm_head.weight.float())


def test_gpt2_exports_too(tmp_path: Path) -> None:
    folder = tmp_path / "shape"
    folder.mkdir()
    shape = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": 300}
    (folder / "config.json").write_text(json.dumps(shape))
    run = make_run(None, model=str(folder))
    loaded = AutoModelForCausalLM.from_pretrained(write_folder(run, tmp_path / "out"))
    for name, value in run.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_the_tokenizer_goes_along(tmp_path: Path, tokenizer_path: Path) -> None:
    out = write_folder(make_run(tokenizer_path), tmp_path / "out")
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
        write_folder(run, out)
    with pytest.raises(RecordError, match="it exists and is not empty"):
        exporting.export(tmp_path / "no run", out)
    assert (out / "precious").read_text() == "1"
    with pytest.raises(RecordError, match="it exists and is a file"):
        write_folder(run, out / "precious")
    (out / "precious").unlink()
    assert (write_folder(run, out) / "model.safetensors").is_file()


def test_an_export_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(exporting, "_write_generation", full)
    with pytest.raises(RecordError, match=r"Cannot write .*out: the disk is full"):
        write_folder(make_run(None), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="Use 'visible' or 'float32'"):
        write_folder(make_run(None), tmp_path / "out", cast(Any, "float16"))


def test_a_sample_is_a_function_of_its_arguments(tokenizer_path: Path) -> None:
    run = make_run(tokenizer_path, narrow=False)
    before = torch.get_rng_state()
    first = continue_text(run, "def add", 5, 1.0, seed=3)
    torch.rand(5)
    assert first == continue_text(run, "def add", 5, 1.0, seed=3)
    assert first.startswith("def add")
    assert len({continue_text(run, "def add", 5, 1.0, seed=seed) for seed in range(3)}) > 1
    torch.set_rng_state(before)
    continue_text(run, "def add", 1, 1.0, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert run.model.training


def test_temperature_zero_is_the_likeliest_token_each_time(tokenizer_path: Path) -> None:
    run, tokenizer = make_run(tokenizer_path, narrow=False), Tokenizer.from_file(str(tokenizer_path))
    ids = tokenizer.encode("def add").ids
    wanted = list(ids)
    with torch.no_grad():
        for _ in range(6):
            logits = run.model(input_ids=torch.tensor([wanted]), use_cache=False).logits[0, -1]
            wanted.append(int(logits[: tokenizer.get_vocab_size()].argmax()))
    found = continue_text(run, "def add", 6, 0.0, seed=0)
    assert found == "def add" + tokenizer.decode(wanted[len(ids) :])
    assert found == continue_text(run, "def add", 6, 0.0, seed=9)
    assert found == continue_text(run, "def add", 6, 1e-9, seed=9)


def test_an_empty_text_begins_a_document_and_the_end_ends_it(tokenizer_path: Path) -> None:
    run = make_run(tokenizer_path)
    assert continue_text(run, "", 5, 1.0, seed=0) != ""
    assert continue_text(run, "def", 0, 1.0, seed=0) == "def"
    end = Tokenizer.from_file(str(tokenizer_path)).token_to_id(END_OF_TEXT)
    head = torch.zeros(300, 128)
    head[end] = 100
    # A model that always says the end of text: constant hidden states under a head with one row.
    run.model.lm_head.weight = nn.Parameter(head.bfloat16())
    run.model.model.norm.register_forward_hook(lambda _m, _i, out: torch.ones_like(out))
    assert continue_text(run, "def", 5, 1.0, seed=0) == "def"


def test_what_cannot_be_sampled_says_why(tokenizer_path: Path) -> None:
    run = make_run(tokenizer_path)
    with pytest.raises(DataError, match="neither may be negative"):
        continue_text(run, "a", -1, 1.0, seed=0)
    with pytest.raises(DataError, match="neither may be negative"):
        continue_text(run, "a", 1, float("nan"), seed=0)
    with pytest.raises(DataError, match="2,048 more were requested; the model has 2,048 positions"):
        continue_text(run, "a", 2048, 1.0, seed=0)
    with pytest.raises(RecordError, match="This run has no tokenizer"):
        continue_text(make_run(None), "a", 1, 1.0, seed=0)
