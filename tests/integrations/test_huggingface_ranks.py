"""The Trainer on two ranks: FSDP2 has the bits of DDP, resumes with them, and micro-batches are summed as was asked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "accelerate", reason="narrowgauge[huggingface] is not installed: ./dev test integrations installs it"
)

import torch

import narrowgauge as ng
from narrowgauge.distributed.sharding import fingerprint_whole
from ranks import run_ranks

SHARDED: dict[str, Any] = {"fsdp": True}
SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "tie_word_embeddings": False,
}  # fmt: skip


def trained(rank: int, kind: str, folder: Path, resume: Path | None = None, sums: str | None = None) -> dict[str, Any]:
    """What three steps of two micro-batches came to, the stored weights of all ranks as a fingerprint."""
    # transformers starts a thread as it is imported, so it is imported by the ranks alone.
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer

    from integrations.huggingface_runs import MyTrainer, history, plain_arguments
    from narrowgauge.integrations.huggingface import optimizer_factory

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    args = plain_arguments(
        folder, max_steps=3, learning_rate=1e-2, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        ddp_backend="gloo", save_strategy="steps" if resume is None and sums is None else "no", save_steps=2,
        **(SHARDED if kind == "FSDP2" else {}), **({"max_grad_norm": 0} if kind == "factory" else {}),
    )  # fmt: skip
    if kind == "FSDP2":
        # Accelerate 1.15 looks at its plugin on accelerators only: these ranks of gloo say that they are some.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    torch.manual_seed(rank)  # ranks begin apart, and train the first one's weights
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    draw = torch.Generator().manual_seed(0)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (24, 16), generator=draw)]
    recipe = "float8-delayed/word"
    given: dict[str, Any] = {"recipe": recipe, "audit_every": 1, "accumulation_dtype": sums}
    trainer: Any
    if kind == "factory":
        trainer = Trainer(model, args, train_dataset=rows, optimizer_cls_and_kwargs=optimizer_factory(args, recipe))
    else:
        trainer = MyTrainer(model, args, train_dataset=rows, **given)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    optimizer = trainer.optimizer.optimizer if kind == "factory" else trainer.recipe_optimizer
    assert optimizer is not None
    if kind == "factory":
        scales = {name: history.tolist() for name, history in ng.matmul.linears_of(model).histories().items()}
        return {"weights": weights_of(optimizer), "scales": scales}
    logged = {name: history(trainer, name) for name in ("loss", "grad_norm", "edq")}
    is_sharded = hasattr(next(trainer.model.parameters()), "full_tensor")
    return {"weights": weights_of(optimizer), "is_sharded": is_sharded, **logged}


def weights_of(optimizer: ng.Optimizer) -> str:
    """The fingerprint of the stored weights."""
    return fingerprint_whole({name: optimizer.stored(p) for p, name in optimizer.parameter_names().items()})


def of_two(rank: int, folder: str) -> dict[str, Any]:
    placement = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ.update(placement, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # the group is there already
    place = Path(folder)
    found: dict[str, Any] = {"factory": trained(rank, "factory", place / "factory")}
    for kind in ("DDP", "FSDP2"):
        found[kind] = trained(rank, kind, place / kind)
        found[f"{kind} resumed"] = trained(rank, kind, place / "again" / kind, place / kind / "checkpoint-2")
        found[f"{kind} in float32"] = trained(rank, kind, place / "wide" / kind, sums="float32")
    return found


def test_fsdp2_and_ddp_have_the_same_bits_and_resume(tmp_path: Path) -> None:
    first, second = run_ranks(of_two, 2, tmp_path / "ranks", str(tmp_path / "out"))
    assert first == second and len(first["factory"]["scales"]) > 1
    for kind in ("DDP", "FSDP2"):
        assert first[kind]["is_sharded"] is (kind == "FSDP2")
        assert first[f"{kind} resumed"] == first[kind] and len(first[kind]["loss"]) == 3 == len(first[kind]["edq"])
        # Sums in float32 lose nothing of the second micro-batch: other bits from the second step on.
        assert first[f"{kind} in float32"]["weights"] != first[kind]["weights"]
    for way in ("", " resumed", " in float32"):
        one, other = ({**first[kind + way], "is_sharded": None} for kind in ("DDP", "FSDP2"))
        assert one == other
