"""Models are a function of shape and seed, and every way of computing the loss gives the same loss
and gradients.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from narrowgauge.cli.main import main
from narrowgauge.errors import DataError
from narrowgauge.trainer.language_model import build, loss_sum
from tensors import random_tokens

SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "attention_dropout": 0.5,
}  # fmt: skip
TOKENS = random_tokens(3, 17, 96)


def small(seed: int = 0, **changes: object) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(
            LlamaConfig(**{**SMALL, "attention_dropout": 0.0, **changes})
        ).train()


def narrowed(model: PreTrainedModel) -> PreTrainedModel:
    """What ``prepare`` does to a parameter: other data under the same ``Parameter``."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def write_config(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        **SMALL,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_weights_are_a_function_of_the_seed_alone() -> None:
    first = build("llama-1m", vocab_size=300, seed=5).state_dict()
    torch.manual_seed(1234)
    torch.rand(7)
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        second = build(" Llama-1M", vocab_size=300, seed=5).state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    reseeded = build("llama-1m", vocab_size=300, seed=6).state_dict()
    assert not torch.equal(
        first["model.embed_tokens.weight"], reseeded["model.embed_tokens.weight"]
    )


def test_a_folder_with_a_config_alone_is_drawn_from_the_seed(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "shape")
    from_folder = build(str(folder), seed=1)
    from_file = build(str(folder / "config.json"), seed=1)
    assert torch.equal(from_folder.lm_head.weight, from_file.lm_head.weight)
    assert from_folder.lm_head.weight.dtype == torch.float32
    assert from_folder.config.attention_dropout == 0
    assert build(str(folder), vocab_size=50, seed=1).lm_head.weight.shape == (50, 32)


def test_a_folder_with_weights_keeps_them_in_float32(tmp_path: Path) -> None:
    saved = narrowed(small(seed=3))
    saved.save_pretrained(tmp_path)
    model = build(str(tmp_path), vocab_size=96, seed=0)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    for name, value in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], value.float()), name
    with pytest.raises(DataError, match="96 token embeddings; the text has 97"):
        build(str(tmp_path), vocab_size=97, seed=0)


OWN_CODE = """
from pathlib import Path
Path({mark!r}).touch()
from transformers import LlamaConfig
class Own(LlamaConfig):
    model_type = "own"
"""


@pytest.mark.parametrize(("command", "model_type"), [("train", "own"), ("build", "own")])
def test_model_code_never_runs(
    model_type: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where somebody answers yes to whatever is asked."""
    folder = tmp_path / "model"
    mark = tmp_path / "was run"
    folder.mkdir()
    (folder / "own.py").write_text(OWN_CODE.format(mark=str(mark)))
    settings = {
        "model_type": model_type,
        "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"},
    }
    (folder / "config.json").write_text(json.dumps({**SMALL, **settings}))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    if command == "build":
        with pytest.raises(
            DataError, match=r"has code of its own \(auto_map in config\.json: own\.Own"
        ):
            build(str(folder), seed=0)
    else:
        given_words = ["--out", str(tmp_path / "run")]
        refused = CliRunner().invoke(
            main, [command, "--model", str(folder), *given_words], input="y\n"
        )
        assert (refused.exit_code, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
        assert "has code of its own" in refused.stderr
    assert not mark.exists() and not (tmp_path / "run").exists()


def test_damaged_weights_say_so(tmp_path: Path) -> None:
    small().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(DataError, match="Cannot build a causal language model from the folder"):
        build(str(tmp_path), seed=0)


def pickled(
    model: PreTrainedModel, folder: Path, *, sharded: bool = False, prefix: str = ""
) -> Path:
    """A folder as transformers wrote it before safetensors; ``sharded`` in two files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    weights = {}
    for name, value in model.state_dict().items():
        weights[name.removeprefix(prefix)] = value
    if not sharded:
        torch.save(weights, folder / "pytorch_model.bin")
        return folder
    parts = [f"pytorch_model-0000{k}-of-00002.bin" for k in (1, 2)]
    places = {name: parts[k % 2] for k, name in enumerate(weights)}
    for part in parts:
        torch.save(
            {name: weights[name] for name, place in places.items() if place == part}, folder / part
        )
    index = {"metadata": {}, "weight_map": places}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(("sharded", "prefix"), [(False, ""), (True, "transformer.")])
def test_pickled_weights_are_loaded(sharded: bool, prefix: str, tmp_path: Path) -> None:
    """Also those of a base model, whose names lack the prefix, and of a tied head."""
    config = GPT2Config(
        vocab_size=96,
        n_embd=32,
        n_layer=1,
        n_head=2,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    saved = narrowed(GPT2LMHeadModel(config))
    model = build(str(pickled(saved, tmp_path, sharded=sharded, prefix=prefix)), seed=0)
    for name, value in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], value.float()), name


@pytest.mark.parametrize(
    "name", ["tf_model.h5", "model-00001-of-00002.safetensors", "model.fp16.safetensors"]
)
def test_weights_that_are_not_read_are_refused(name: str, tmp_path: Path) -> None:
    """They are the user's model; random weights in their place would train without a word."""
    folder = write_config(tmp_path / "model")
    (folder / name).write_bytes(b"weights")
    with pytest.raises(
        DataError, match=rf"not read here: {name}\. Weights are read from model\.safetensors or "
    ):
        build(str(folder), seed=0)
    (folder / name).unlink()
    for beside in (
        "training_args.bin",
        "optimizer.pt",
        "rng_state.pth",
        "tokenizer.json",
        "scheduler.pt",
    ):
        (folder / beside).write_bytes(b"no weights")
    build(str(folder), seed=0)


def test_weights_of_another_model_and_missing_ones_are_refused(tmp_path: Path) -> None:
    folder = pickled(small(), tmp_path / "other")
    torch.save({"a.weight": torch.zeros(2, 2)}, folder / "pytorch_model.bin")
    with pytest.raises(DataError, match="lack 21 of the LlamaForCausalLM"):
        build(str(folder), seed=0)
    weights = small(seed=3).state_dict()
    del weights["lm_head.weight"]
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"lack 1 of .* such as 'lm_head\.weight'"):
        build(str(folder), seed=0)


@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_is_the_sum_of_the_models_own_mean(tied: bool) -> None:
    model = small(tie_word_embeddings=tied)
    tokens = TOKENS
    model_loss = model(input_ids=tokens, labels=tokens).loss * 3 * 16
    assert loss_sum(model, tokens).item() == pytest.approx(model_loss.item(), rel=1e-6)


@pytest.mark.parametrize("name", ["BertLMHeadModel", "CohereForCausalLM"])
def test_layers_beside_body_and_head_train(name: str) -> None:
    """One has layers between body and head, one scales the logits."""
    names = ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size")
    shape = {name: SMALL[name] for name in names} | {"num_hidden_layers": 1}
    kind = getattr(transformers, name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(kind.config_class(**shape, is_decoder=True, pad_token_id=0)).eval()
    tokens = TOKENS[TOKENS.ne(0).all(1)]
    loss_sum(model, tokens).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
