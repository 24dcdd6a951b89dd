"""Our optimizer in the loops of others: one changed line in each set-up, and the loss beside
torch.optim.AdamW's.

Claim: in each set-up one line is changed, nothing raises, and the loss ends where float32 master
weights end. A set-up trains a tiny model twice for each seed, with ``torch.optim.AdamW`` over
float32 weights and with ``ng.AdamW``. The figure is the mean of the last four losses. *resume*
compares bits: a run that was stopped and continued with one that was not.

Baseline: torch.optim.AdamW in the same set-up.

Run: ``./dev bench frameworks [--only NAME] [--seeds 3]``, with the packages of ``pip install
".[integrations]"``. Set-ups whose package is missing are left out by name. Without ``--only`` the
lines are kept in ``benchmarks/frameworks.jsonl``, for docs/frameworks.md.
"""

from __future__ import annotations

import json
import logging
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _forked import group, in_processes
from _timing import NOT_INSTALLED, Report, exit_by, parser, peer_version
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import narrowgauge as ng

FILE = Path(__file__).with_name("frameworks.jsonl")
LR = 1e-3
STEPS = 16
BATCH = 8
VOCABULARY = 64
PACKAGES = ("transformers", "trl", "peft", "lightning", "accelerate", "datasets")
SIDES = ("torch", "ours")

# ── a tiny model and its data ─────────────────────────────────────────────────────────────────────


def sequences(seed: int) -> Tensor:
    """Return walks over the vocabulary in small strides, int64 ``[STEPS * BATCH, 17]``."""
    generator = torch.Generator().manual_seed(seed)
    strides = torch.randint(0, 3, (STEPS * BATCH, 17), generator=generator)
    return strides.cumsum(1) % VOCABULARY


def llama(seed: int, **changes: Any) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(seed)
    config = LlamaConfig(**{**shape, **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def adamw(side: str, parameters: Any) -> Any:
    """Return the optimizer of a side: the one line that is changed."""
    if side == "torch":
        return torch.optim.AdamW(parameters, lr=LR)
    return ng.AdamW(parameters, lr=LR)


def trained(model: Any, optimizer: Any, batches: Iterable[Tensor], autocast: bool) -> list[float]:
    losses = []
    for tokens in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


# ── loops of one's own ────────────────────────────────────────────────────────────────────────────


def own_loop(side: str, seed: int) -> list[float]:
    model = llama(seed)
    batches = sequences(seed).split(BATCH)
    return trained(model, adamw(side, model.parameters()), batches, autocast=True)


def nanochat(side: str, seed: int) -> list[float]:
    """Train a model that was made on the meta device, compiled, with rates that are set by hand."""
    initial = llama(seed)
    with torch.device("meta"):
        model = llama(seed)
    model.to_empty(device="cpu")
    model.load_state_dict(initial.state_dict())
    model.model.rotary_emb = initial.model.rotary_emb
    compiled = torch.compile(model, backend="eager")
    embeddings = [p for name, p in model.named_parameters() if "embed" in name]
    rest = [p for name, p in model.named_parameters() if "embed" not in name]
    groups = [
        {"params": embeddings, "lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.0},
        {"params": rest, "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    ]
    optimizer = adamw(side, groups)
    rates = [group["lr"] for group in optimizer.param_groups]
    losses = []
    for step, tokens in enumerate(sequences(seed).split(BATCH)):
        for options, rate in zip(optimizer.param_groups, rates, strict=True):
            options["lr"] = rate * min(1.0, (step + 1) / 4)
        losses += trained(compiled, optimizer, [tokens], autocast=True)
    return losses


def on_rank(rank: int, folder: Path, side: str, seed: int) -> list[float]:
    torch.set_num_threads(1)
    with group(rank, folder, 2):
        model = llama(seed)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = adamw(side, model.parameters())
        batches = [tokens[rank::2] for tokens in sequences(seed).split(BATCH)]
        losses = torch.tensor(trained(model, optimizer, batches, autocast=False))
        dist.all_reduce(losses)
    return (losses / 2).tolist()


def fsdp(side: str, seed: int) -> Any:
    return in_processes(on_rank, 2, side, seed)


# ── frameworks ────────────────────────────────────────────────────────────────────────────────────

HF_DEFAULTS: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": BATCH,
    "learning_rate": LR,
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
    "bf16": True,
}


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def hf_trainer(side: str, seed: int, first: int, folder: str, **changes: Any) -> Any:
    """Return a trainer of a model with the first weights of a seed."""
    from transformers import Trainer, TrainingArguments

    from narrowgauge.integrations.huggingface import use_adamw

    args = TrainingArguments(folder, seed=seed, **{**HF_DEFAULTS, **changes})
    rows = [{"input_ids": row, "labels": row} for row in sequences(seed)]
    trainer = Trainer(llama(first), args, train_dataset=rows)
    return use_adamw(trainer, storage="word") if side == "ours" else trainer


def hugging_face(side: str, seed: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        trainer = hf_trainer(side, seed, seed, folder)
        trainer.train()
        return losses_of(trainer)


def resumed(side: str, seed: int) -> str:
    """Continue another model at step 8, and compare it with the run that was not stopped."""
    saves = {"save_strategy": "steps", "save_steps": 8}
    with tempfile.TemporaryDirectory() as folder:
        whole = hf_trainer(side, seed, seed, f"{folder}/one", **saves)
        whole.train()
        rest = hf_trainer(side, seed, seed + 1, f"{folder}/two", **saves)
        rest.train(resume_from_checkpoint=f"{folder}/one/checkpoint-8")
        weights = rest.model.state_dict()
        equal = [torch.equal(w, weights[name]) for name, w in whole.model.state_dict().items()]
        return "same bits" if all(equal) else "OTHER BITS"


def trl_lora(side: str, seed: int) -> list[float]:
    import datasets
    import trl
    from peft import LoraConfig

    from narrowgauge.integrations.huggingface import use_adamw

    rows = {"input_ids": sequences(seed).tolist()}
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.SFTTrainer(
            llama(seed),
            args=trl.SFTConfig(folder, seed=seed, max_length=17, **HF_DEFAULTS),
            train_dataset=datasets.Dataset.from_dict(rows),
            peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        if side == "ours":
            use_adamw(trainer, storage="word")
        trainer.train()
        return losses_of(trainer)


def lightning(side: str, seed: int) -> list[float]:
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel("ERROR")
    losses: list[float] = []

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama(seed)

        def training_step(self, tokens: Tensor, _: int) -> Tensor:
            loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return adamw(side, self.parameters())

    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", precision="bf16-mixed", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), torch.utils.data.DataLoader(sequences(seed), batch_size=BATCH))
    return losses


def accelerate(side: str, seed: int) -> list[float]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model: Any = llama(seed)
    optimizer = adamw(side, model.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    rows = torch.utils.data.DataLoader(sequences(seed), batch_size=BATCH)
    model, optimizer, rows, schedule = accelerator.prepare(model, optimizer, rows, schedule)
    losses = []
    for tokens in rows:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


SET_UPS: dict[str, tuple[Callable[[str, int], Any], tuple[str, ...]]] = {
    "own loop, autocast": (own_loop, ()),
    "nanochat's shape: meta, to_empty, compile, groups, rates by hand": (nanochat, ()),
    "FSDP2 of float32 weights with a policy, then the optimizer, 2 ranks": (fsdp, ()),
    "HF Trainer, bf16=True, Llama": (hugging_face, ("accelerate",)),
    "resume: HF Trainer": (resumed, ("accelerate",)),
    "TRL SFT, LoRA": (trl_lora, ("trl", "peft", "datasets")),
    "Lightning bf16-mixed": (lightning, ("lightning",)),
    "Accelerate bf16, accumulation, clipping, schedule": (accelerate, ("accelerate",)),
}
"""A run of a side with a seed returns its losses, or a sentence about bits; and what it needs."""


def line_of(name: str, seeds: int) -> dict[str, str]:
    """Return the record of a set-up: the losses of both sides, and the seed that is furthest off."""
    ends: dict[str, list[float]] = {side: [] for side in SIDES}
    for side in SIDES:
        for seed in range(1, seeds + 1):
            result = SET_UPS[name][0](side, seed)
            if isinstance(result, str):
                return {"row": name, "torch": result, "ours": result, "apart": "–"}
            ends[side].append(statistics.fmean(result[-4:]))
    apart = [ours - theirs for theirs, ours in zip(*ends.values(), strict=True)]
    means = {side: f"{statistics.fmean(losses):.4f}" for side, losses in ends.items()}
    return {"row": name, **means, "apart": f"{max(apart, key=abs):+.4f}".replace("-", "−")}


def main() -> int:
    """Run the benchmark."""
    flags = parser(__doc__, rounds=1)
    flags.add_argument("--only", default="", help="set-ups whose name holds this text")
    flags.add_argument("--seeds", type=int, default=3)
    options = flags.parse_args()
    report = Report("frameworks", options, peers=PACKAGES)
    warnings.simplefilter("ignore")
    lines = []
    for name, (_, needs) in SET_UPS.items():
        missing = [package for package in needs if peer_version(package) == NOT_INSTALLED]
        if missing:
            report.note(f"{name}: {', '.join(missing)} {NOT_INSTALLED}")
        elif options.only in name:
            lines.append(line_of(name, 1 if options.quick else options.seeds))
    report.add(f"mean of the last four losses of {STEPS} steps", lines)
    if len(lines) == len(SET_UPS) and not options.quick:
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        FILE.write_text(text, encoding="utf-8")
    return report.end()


if __name__ == "__main__":
    exit_by(main)
