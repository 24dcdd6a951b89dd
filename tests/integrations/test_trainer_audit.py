"""Steps of Hugging Face's Trainer computed again: a standard training names nothing, and a planted fault is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback

from few_objects import few_objects as few_objects
from integrations.huggingface_runs import plain_arguments
from narrowgauge.integrations.huggingface import audit_steps
from narrowgauge.integrations.huggingface.trainer_audit import declared_by


def rows(count: int = 32, length: int = 24) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 64, (count, length), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def trainer_of(
    folder: Path, *, model: Any = None, optimizers: Any = (None, None), data: Any = None, **changes: Any
) -> Trainer:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    given: dict[str, Any] = {
        "max_steps": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-3,
        "weight_decay": 0.1, "max_grad_norm": 0.5, "seed": 1,
    }  # fmt: skip
    arguments = plain_arguments(folder, **{**given, **changes})
    return Trainer(LlamaForCausalLM(config), arguments, train_dataset=data or rows(), optimizers=optimizers)


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


HEALTHY: dict[str, dict[str, Any]] = {
    "as it is": {},
    "labels smoothed": {"label_smoothing_factor": 0.1},
    "SGD without clipping": {"optim": "sgd", "max_grad_norm": 0.0, "learning_rate": 0.1},
    "bfloat16 autocast": {"bf16": True, "gradient_accumulation_steps": 1},
    "no decay, one epoch": {"weight_decay": 0.0, "max_steps": -1, "num_train_epochs": 1, "adam_beta2": 0.95},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_standard_training_names_nothing_and_keeps_its_bits(name: str, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "audited", **HEALTHY[name])
    audited = audit_steps(trainer, every=2)
    trainer.train()
    assert not audited.findings, audited.findings
    pieces = {"forward", "gradient", "update", "between", "" if name == "bfloat16 autocast" else "loss"}
    assert not pieces & set(audited.unchecked), (
        audited.unchecked
    )  # under autocast logits are cast after the loss was computed
    if name == "as it is":
        alone = trainer_of(tmp_path / "alone")
        alone.train()
        assert torch.equal(weights(trainer), weights(alone))
        assert not trainer.model._forward_hooks and not trainer.model._forward_pre_hooks


class Edit(TrainerCallback):
    def __init__(self, edit: Callable[[Any], object]) -> None:
        self.edit = edit

    def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.edit(named["optimizer"])


def in_groups(**values: Any) -> Callable[[Trainer], None]:
    """What changes the groups after the Trainer made them."""
    return lambda trainer: trainer.add_callback(Edit(lambda o: [group.update(values) for group in o.param_groups]))


def without_clipping(trainer: Trainer) -> None:
    trainer.accelerator.clip_grad_norm_ = lambda parameters, *_, **__: torch.nn.utils.get_total_norm(  # type: ignore[method-assign]
        [p.grad for p in parameters]
    )


def without_smoothing(trainer: Trainer) -> None:
    trainer.label_smoother = None


FAULTS: dict[str, tuple[Callable[[Trainer], None], dict[str, Any], set[str]]] = {
    "norms decayed": (in_groups(weight_decay=0.1), {}, {"decay-unwanted"}),
    "another beta": (in_groups(betas=(0.9, 0.95)), {}, {"setting-other"}),
    "another rate": (in_groups(initial_lr=3e-3), {}, {"setting-other"}),
    "not clipped": (without_clipping, {"max_grad_norm": 0.05}, {"clip-missing"}),
    "not smoothed": (without_smoothing, {"label_smoothing_factor": 0.1}, {"label-smoothing-other"}),
    "labels shifted twice": (
        lambda trainer: None, {"data": [{**row, "labels": row["labels"].roll(-1)} for row in rows()]}, {"labels-shifted"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_trainer_is_named(fault: str, tmp_path: Path) -> None:
    plant, changes, names = FAULTS[fault]
    trainer = trainer_of(tmp_path, **changes)
    audited = audit_steps(trainer, every=2)
    plant(trainer)
    with pytest.warns(UserWarning, match=next(iter(names))):
        trainer.train()
    assert {each.name for each in audited.findings} == names, audited.findings


def test_what_the_trainer_does_not_do_itself_is_not_declared(tmp_path: Path) -> None:
    declared = declared_by(trainer_of(tmp_path, label_smoothing_factor=0.1))
    assert (declared.max_grad_norm, declared.micro_batches, declared.label_smoothing) == (0.5, 2, 0.1)
    assert declared.optimizer == "adamw" and declared.settings["betas"] == (0.9, 0.999)
    assert "lm_head.weight" in declared.decay_groups and "model.norm.weight" not in declared.decay_groups

    trainer = trainer_of(tmp_path)
    own = torch.optim.AdamW(trainer.model.parameters(), lr=1.0, weight_decay=0.3)
    trainer = trainer_of(tmp_path, optimizers=(own, None))
    declared = declared_by(trainer)
    assert declared.max_grad_norm == 0.5 and not declared.settings and declared.decay_groups == ""
