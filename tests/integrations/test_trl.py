"""TRL's trainers with a recipe, as they come: their own losses, the reference model untouched, PEFT inside."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="narrowgauge[huggingface] is not installed: ./dev test integrations installs it")

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import narrowgauge as ng
from integrations.huggingface_runs import history
from integrations.own_trainer import OwnRun, reference
from narrowgauge.errors import RecipeError
from narrowgauge.integrations.huggingface import NarrowgaugeTrainer
from narrowgauge.numerics.rounding import round_to_bfloat16


class MySFT(NarrowgaugeTrainer, SFTTrainer):
    """What a user writes."""


class MyDPO(NarrowgaugeTrainer, DPOTrainer):
    """What a user writes."""


QUIET: dict[str, Any] = {
    "report_to": "none", "disable_tqdm": True, "use_cpu": True, "logging_steps": 1, "save_strategy": "no", "max_steps": 4,
    "per_device_train_batch_size": 4, "learning_rate": 3e-3, "max_length": 32,
}  # fmt: skip
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.fixture
def words() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{k}": k for k in range(3, 128)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def texts(run: OwnRun, start: int = 0, stop: int = 31) -> list[str]:
    """The run's sequences in words."""
    return [" ".join(f"w{max(3, int(k))}" for k in row[start:stop]) for batch in run.batches for row in batch]


def sft(
    folder: Path, run: OwnRun, words: PreTrainedTokenizerFast, recipe: str, peft: Any = None, **changes: Any
) -> MySFT:
    args = SFTConfig(str(folder), dataset_text_field="text", **{**QUIET, **changes})
    data = Dataset.from_dict({"text": texts(run)})
    return MySFT(run.model(), args, train_dataset=data, processing_class=words, recipe=recipe, peft_config=peft)


def test_supervised_fine_tuning_computes_what_a_loop_over_prepare_does(
    tmp_path: Path, words: PreTrainedTokenizerFast
) -> None:
    """TRL projects the last hidden state in a head of its own, in float32; the rest of the step is ours, to the bit."""
    run = reference("bfloat16/word", steps=4)
    trainer = sft(tmp_path, run, words, run.recipe, packing=False, gradient_checkpointing=False)
    batches: list[Any] = []
    trainer.compute_loss = _noting(trainer.compute_loss, batches)
    trainer.train()
    args = trainer.args
    model, optimizer = ng.prepare(
        run.model(),
        run.recipe,
        lr=args.learning_rate,
        betas=(0.9, 0.999),
        weight_decay=args.weight_decay,
        seed=args.seed,
    )
    losses = []
    for batch, rate in zip(batches, history(trainer, "learning_rate"), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = _loss_of_trl(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == history(trainer, "loss") and losses[2] < losses[0]
    assert all(torch.equal(model.state_dict()[n], w) for n, w in trainer.model.state_dict().items())
    assert trainer.state.log_history[-2]["mean_token_accuracy"] > 0 and history(trainer, "num_skipped") == [0] * 4


def _noting(compute_loss: Any, batches: list[Any]) -> Any:
    def note(model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        batches.append(dict(inputs))
        return compute_loss(model, inputs, *given, **named)

    return note


def _loss_of_trl(model: Any, batch: Any) -> torch.Tensor:
    from trl.trainer.utils import add_fused_lm_head

    if "forward" not in vars(model):
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    found = model(**batch, use_cache=False, fused_lm_head=True)
    return -found.log_probs.sum() / found.label_mask.sum()


def test_adapters_alone_have_states(tmp_path: Path, words: PreTrainedTokenizerFast) -> None:
    run = reference("bfloat16/word", steps=4)
    trainer = sft(tmp_path, run, words, "int8-outlier/word", LORA)
    trainer.train()
    names = set(trainer.recipe_optimizer.parameter_names().values())
    assert len(names) == 8 and all("lora_" in name for name in names)
    before = {f"base_model.model.{name}": round_to_bfloat16(weight) for name, weight in run.initial.items()}
    found = {name.replace(".base_layer", ""): weight for name, weight in trainer.model.state_dict().items()}
    assert [name for name, weight in before.items() if not torch.equal(found[name], weight)] == []
    moved = [w for n, w in trainer.model.named_parameters() if "lora_B" in n and bool(w.any())]
    assert len(moved) == 4 and history(trainer, "loss")[-1] != history(trainer, "loss")[0]


def test_a_resumed_fine_tuning_continues_bit_for_bit(tmp_path: Path, words: PreTrainedTokenizerFast) -> None:
    run = reference("bfloat16/word", steps=4)
    whole = sft(tmp_path, run, words, "bfloat16/word", LORA, save_strategy="steps", save_steps=2)
    whole.train()
    again = sft(tmp_path / "again", run, words, "bfloat16/word", LORA)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert history(again, "loss") == history(whole, "loss")
    assert all(torch.equal(w, again.model.state_dict()[n]) for n, w in whole.model.state_dict().items())


@pytest.mark.parametrize("peft", [None, LORA], ids=["whole", "adapters"])
def test_preferences_are_learned_against_an_untouched_reference(
    tmp_path: Path, words: PreTrainedTokenizerFast, peft: Any
) -> None:
    run = reference("bfloat16/word", steps=4)
    parts = {"prompt": texts(run, 0, 8), "chosen": texts(run, 8, 16), "rejected": texts(run, 16, 24)}
    standard = None if peft else run.model()
    args = DPOConfig(str(tmp_path), **{**QUIET, "max_steps": 8, "learning_rate": 1e-2, "lr_scheduler_type": "constant"})
    trainer = MyDPO(
        run.model(), standard, args=args, train_dataset=Dataset.from_dict(parts), processing_class=words,
        recipe="bfloat16/word", peft_config=peft,
    )  # fmt: skip
    trainer.train()
    losses = history(trainer, "loss")
    assert losses[0] == pytest.approx(0.6931, abs=2e-3) and min(losses) < 0.69
    if standard is not None:
        assert all(torch.equal(run.initial[name], weight) for name, weight in standard.state_dict().items())
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.bfloat16}


def test_the_bf16_that_trl_sets_itself_is_refused_where_the_recipe_computes_otherwise(
    tmp_path: Path, words: PreTrainedTokenizerFast
) -> None:
    run = reference("bfloat16/word", steps=4)
    with pytest.raises(RecipeError, match="bf16=False"):
        sft(tmp_path, run, words, "float32/word")
    assert sft(tmp_path, run, words, "float32/word", bf16=False).recipe.name == "float32/word"


def test_the_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[2] / "examples" / "trl_sft.py"
    assert len(example.read_text().splitlines()) <= 60
    runpy.run_path(str(example), run_name="__main__")
    loss, states = capsys.readouterr().out.splitlines()[-2:]
    first, last = (float(loss.split()[place]) for place in (1, 3))
    assert last < first and states.startswith("28 adapters have states, 8.0 bytes")
