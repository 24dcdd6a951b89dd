"""What was asked for is what runs: the compute's dtype, whatever format the weights lie in."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

import narrowgauge as ng
from narrowgauge.spec.recipes import Override


class Net(nn.Module):
    """A module of every kind that has parameters of its own, one of them outside any layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.inner, self.gain = nn.Linear(8, 16), nn.Parameter(torch.randn(16))
        self.rms, self.head = nn.RMSNorm(16), nn.Linear(16, 5, bias=False)

    def forward(self, places: Tensor) -> Tensor:
        x = self.inner(self.norm(self.table(places)))
        result: Tensor = self.head(self.rms(torch.relu(x) * self.gain))
        return result


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    )


def wide_twin(model: nn.Module, made: nn.Module) -> nn.Module:
    """A plain float32 model with the weights that ``model`` shows."""
    made.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    return made


def logits(model: Any, places: Tensor) -> Tensor:
    found = model(places)
    return found if isinstance(found, Tensor) else found.logits


@pytest.mark.parametrize("make", [Net, llama])
@pytest.mark.parametrize("storage", ["word", "exact"])
def test_float32_over_narrow_weights_is_the_float32_model_of_those_weights(make: Any, storage: str) -> None:
    places = torch.tensor([[1, 2, 3, 1]])
    model, optimizer = ng.prepare(make(), f"float32/{storage}", lr=0.01)
    twin = wide_twin(model, make())
    found, wanted = logits(model, places), logits(twin, places)
    assert found.dtype is torch.float32 and torch.equal(found, wanted)
    found.square().sum().backward(), wanted.square().sum().backward()
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert one.dtype is one.grad.dtype is torch.bfloat16, name
        assert torch.equal(one.grad, other.grad.bfloat16()), name
    optimizer.step()
    assert torch.isfinite(logits(model, places)).all()


def test_float16_over_bfloat16_weights_computes_in_float16() -> None:
    model, _ = ng.prepare(Net(), "float16/word")
    seen: list[torch.dtype] = []
    for module in model.children():
        module.register_forward_hook(lambda *given: seen.append(given[2].dtype))
    assert model(torch.tensor([1, 2])).dtype is torch.float16 and set(seen) == {torch.float16}


def test_overrides_of_float32_are_obeyed_over_narrow_weights() -> None:
    """One layer of another compute: its products are those of the row, not of the weights' format."""
    recipe = ng.Recipe(
        ng.parse("bfloat16/word").compute, ng.parse("bfloat16/word").storage,
        overrides=(Override("0", compute=ng.parse("float32/word").compute),),
    )  # fmt: skip
    torch.manual_seed(1)
    model, _ = ng.prepare(nn.Sequential(nn.Linear(64, 64, bias=False)), recipe)
    x = torch.randn(8, 64)
    wanted = x @ model[0].weight.float().t()
    assert torch.equal(model[0](x), wanted)


def test_inputs_come_in_any_format() -> None:
    torch.manual_seed(0)
    model, _ = ng.prepare(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "float32/word")
    assert model(torch.ones(2, 4, dtype=torch.bfloat16)).dtype is torch.float32


def test_batch_norms_compute_in_float32_over_narrow_weights() -> None:
    model, _ = ng.prepare(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "float32/word")
    model(torch.randn(3, 4)).sum().backward()
    assert model[1].weight.dtype is torch.bfloat16 and model[1].running_mean.dtype is torch.float32


def test_copies_and_pickles_compute_with_their_own_weights() -> None:
    places = torch.tensor([1, 2])
    model, _ = ng.prepare(Net(), "float32/word")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    wanted = model(places)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(other(places), wanted)
        with torch.no_grad():
            other.table.weight.zero_()
        assert not torch.equal(other(places), wanted) and torch.equal(model(places), wanted)


def test_a_second_prepare_replaces_the_first() -> None:
    model, _ = ng.prepare(Net(), "float32/word")
    model, _ = ng.prepare(model, "bfloat16/word")
    assert model(torch.tensor([1, 2])).dtype is torch.bfloat16


def test_compiled_it_gives_the_same_bits() -> None:
    places = torch.tensor([1, 2, 1])
    model, _ = ng.prepare(Net(), "float32/word")
    other = copy.deepcopy(model)
    other.compile(fullgraph=True, backend="aot_eager")
    one, two = model(places), other(places)
    assert torch.equal(one, two)
    one.sum().backward(), two.sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True))


# ── the losses that Hugging Face's models compute ─────────────────────────────────────────────────────────────────────

BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 32}
TOKENS = torch.arange(24).view(4, 6) % 32
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CLASSES = torch.tensor([0, 1, 2, 1])
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 32, "dropout_rate": 0.0}
BART = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": 32, "dropout": 0.0, "max_position_embeddings": 16,
}  # fmt: skip
LABELLED: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "one label": (BertForSequenceClassification, BertConfig(**BERT, **NO_DROPOUT, num_labels=3), {"labels": CLASSES}),
    "regression": (
        BertForSequenceClassification, BertConfig(**BERT, **NO_DROPOUT, num_labels=1),
        {"labels": torch.tensor([0.1, 0.7, 0.3, 1.0])},
    ),
    "several labels": (
        BertForSequenceClassification, BertConfig(**BERT, **NO_DROPOUT, num_labels=3), {"labels": torch.eye(4, 3)}
    ),
    "tokens": (BertForTokenClassification, BertConfig(**BERT, **NO_DROPOUT, num_labels=32), {"labels": TOKENS}),
    "masked": (BertForMaskedLM, BertConfig(**BERT, **NO_DROPOUT), {"labels": TOKENS}),
    "answers": (
        BertForQuestionAnswering, BertConfig(**BERT, **NO_DROPOUT),
        {"start_positions": CLASSES, "end_positions": CLASSES + 2},
    ),
    "roberta": (
        RobertaForSequenceClassification, RobertaConfig(**BERT, **NO_DROPOUT, num_labels=3, pad_token_id=31), {"labels": CLASSES}
    ),
    "distilbert": (
        DistilBertForSequenceClassification,
        DistilBertConfig(dim=16, n_layers=1, n_heads=2, hidden_dim=24, vocab_size=32, num_labels=3, dropout=0.0,
                         attention_dropout=0.0, seq_classif_dropout=0.0), {"labels": CLASSES},
    ),
    "gpt2": (
        GPT2ForSequenceClassification,
        GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, num_labels=3, pad_token_id=31, resid_pdrop=0.0,
                   embd_pdrop=0.0, attn_pdrop=0.0), {"labels": CLASSES},
    ),
    "t5": (T5ForConditionalGeneration, T5Config(**T5, decoder_start_token_id=0), {"labels": TOKENS}),
    "bart": (BartForConditionalGeneration, BartConfig(**BART), {"labels": TOKENS}),
    "llama": (LlamaForCausalLM, LlamaConfig(**BERT, num_key_value_heads=2), {"labels": TOKENS}),
}  # fmt: skip


def labelled(kind: str) -> tuple[Any, dict[str, Any]]:
    made, config, given = LABELLED[kind]
    torch.manual_seed(0)
    return made(copy.deepcopy(config)), {"input_ids": TOKENS, **given}


@pytest.mark.parametrize("kind", LABELLED)
@pytest.mark.parametrize("recipe", ["bfloat16/word", "float16/word", "bfloat16/naive"])
def test_a_model_that_is_given_labels_computes_its_loss_in_float32(kind: str, recipe: str) -> None:
    wide, given = labelled(kind)
    wanted = wide(**given).loss
    model, optimizer = ng.prepare(labelled(kind)[0], recipe)
    loss = model(**given).loss
    assert loss.dtype is torch.float32
    # Losses in bfloat16 are off by up to 2^-9 of themselves; this one by what the weights are.
    assert abs(loss.item() - wanted.item()) < 2.0**-9 * abs(wanted.item())
    assert loss.item() != loss.bfloat16().item()
    (loss if optimizer.loss_scaler is None else optimizer.loss_scaler.scale(loss)).backward()
    optimizer.step()


def test_the_loss_is_that_of_the_rounded_logits() -> None:
    model, given = labelled("one label")
    model, _ = ng.prepare(model, "bfloat16/word")
    out = model(**given)
    assert torch.equal(out.logits, out.logits.bfloat16().float())
    assert torch.equal(out.loss, nn.functional.cross_entropy(out.logits, CLASSES))


def test_only_heads_of_narrow_losses_are_widened_and_once() -> None:
    model, _ = labelled("one label")
    for _ in range(2):
        model, _ = ng.prepare(model, "bfloat16/word")
    assert [name for name, module in model.named_modules() if module._forward_hooks] == ["classifier"]
    assert len(model.classifier._forward_hooks) == 1
    for kind, recipe in (("llama", "bfloat16/word"), ("one label", "bfloat16-mixed"), ("one label", "float32/word")):
        model, _ = ng.prepare(labelled(kind)[0], recipe)
        assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("recipe", ["bfloat16-mixed", "bfloat16/word", "float16/word"])
def test_a_prepared_classifier_is_copied_pickled_and_compiled(recipe: str) -> None:
    model, given = labelled("one label")
    model, _ = ng.prepare(model, recipe)
    wanted = model(**given).loss
    assert torch.equal(copy.deepcopy(model)(**given).loss, wanted)
    assert torch.equal(pickle.loads(pickle.dumps(model))(**given).loss, wanted)
    compiled = torch.compile(model, backend="eager")(**given).loss
    assert compiled.dtype is torch.float32 and torch.equal(compiled, wanted)


# ── what libraries look up of a forward ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("recipe", ["bfloat16-mixed", "float32/word", "float16/word"])
def test_a_replaced_forward_looks_like_its_function(recipe: str) -> None:
    model, own = ng.prepare(Net(), recipe)[0], Net.forward
    assert "forward" in vars(model)
    for name in (
        "__code__",
        "__defaults__",
        "__kwdefaults__",
        "__globals__",
        "__name__",
        "__qualname__",
        "__annotations__",
    ):
        assert getattr(model.forward, name) == getattr(own, name)
    assert inspect.signature(model.forward) == inspect.signature(Net().forward)
    for path in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert path.forward.__code__ is own.__code__
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = model.forward.nothing
    # By these a caller would call the function and pass the casts by.
    assert not hasattr(model.forward, "__func__") and not hasattr(model.forward, "__wrapped__")


def test_a_forward_of_the_objects_own_is_looked_up_through() -> None:
    model = Net()
    plain = model.forward
    model.forward = lambda places: plain(places)
    code = model.forward.__code__
    assert ng.prepare(model, "bfloat16-mixed")[0].forward.__code__ is code
