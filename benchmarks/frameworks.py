"""Our optimizer in everybody's loop: one changed line in each set-up, and the loss beside
torch.optim.AdamW's.

Claim: in each set-up of the table one line is changed, nothing raises, and the loss ends where
float32 master weights end. Each row trains a tiny model twice for each seed, with
``torch.optim.AdamW`` over float32 weights and with ``ng.AdamW``. The figure is the mean of the last
four losses. Rows named *resume* compare bits: a run that was stopped and continued with a run that
was not.

Baseline: torch.optim.AdamW in the same set-up. A set-up that torch cannot run says so.

Run: ``./dev bench frameworks [--only NAME] [--seeds 3] [--out FOLDER]``, with the packages of ``pip
install ".[integrations]"``. Rows whose framework is missing are left out by name. Each row is kept
under ``--out``, and an interrupted run goes on where it was. All rows take about twenty minutes on
two cores.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import random
import statistics
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _parts import Part, add_out, complete, out_folder
from timing import NOT_INSTALLED, Report, exit_by, parser
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import narrowgauge as ng

LR = 1e-3
STEPS = 16
BATCH = 8
VOCABULARY = 64
PACKAGES = ("transformers", "trl", "peft", "lightning", "accelerate", "datasets")
SIDES = ("torch", "ours")
PAGE = Path(__file__).parents[1] / "docs" / "frameworks.md"
MARKS = "<!-- frameworks: begin -->", "<!-- frameworks: end -->"


@dataclass(frozen=True)
class SetUp:
    """A set-up: how it is named, what it needs, and how it is run.

    Args:
        name: of the row.
        run: ``(side, seed) -> losses``, or a sentence where bits are compared. ``side`` is torch or
            ours.
        needs: packages.
    """

    name: str
    run: Callable[[str, int], Any]
    needs: tuple[str, ...] = ()


SET_UPS: list[SetUp] = []


def set_up(name: str, *needs: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Add a set-up to the table."""

    def add(run: Callable[..., Any]) -> Callable[..., Any]:
        SET_UPS.append(SetUp(name, functools.partial(run, **options), needs))
        return run

    return add


# ── a tiny model and its data ─────────────────────────────────────────────────────────────────────


def sequences(seed: int, count: int = STEPS * BATCH) -> Tensor:
    """Return walks over the vocabulary in small strides, int64 ``[count, 17]``."""
    strides = torch.randint(0, 3, (count, 17), generator=torch.Generator().manual_seed(seed))
    return strides.cumsum(1) % VOCABULARY


def llama(seed: int, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
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
    return AutoModelForCausalLM.from_config(LlamaConfig(**{**shape, **changes}), dtype=dtype)


def gpt2(seed: int) -> Any:
    from transformers import AutoModelForCausalLM, GPT2Config

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
    )
    return AutoModelForCausalLM.from_config(config)


def adamw(side: str, parameters: Any, **options: Any) -> Any:
    """Return the optimizer of a side: the one line that is changed."""
    options = {"lr": LR, **options}
    if side == "torch":
        return torch.optim.AdamW(parameters, **options)
    return ng.AdamW(parameters, **options)


def trained(
    model: Any,
    optimizer: Any,
    batches: Sequence[Tensor],
    *,
    autocast: torch.dtype | None = torch.bfloat16,
    forward: Any = None,
    schedule: Any = None,
    after_step: Callable[[], object] | None = None,
) -> list[float]:
    losses = []
    for tokens in batches:
        with torch.autocast("cpu", autocast) if autocast is not None else nullcontext():
            called = model if forward is None else forward
            loss = called(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if schedule is not None:
            schedule.step()
        if after_step is not None:
            after_step()
        losses.append(loss.item())
    return losses


def same(first: nn.Module, second: nn.Module) -> str:
    """Say whether two models have equal bits."""
    theirs = second.state_dict()
    equal = all(torch.equal(value, theirs[name]) for name, value in first.state_dict().items())
    return "same bits" if equal else "OTHER BITS"


# ── loops of one's own ────────────────────────────────────────────────────────────────────────────


@set_up("own loop, autocast", "transformers")
@set_up("own loop, fused=True", "transformers", fused=True)
@set_up("own loop, foreach=True", "transformers", foreach=True)
@set_up("own loop, rate as a tensor", "transformers", lr=torch.tensor(LR))
@set_up("own loop, tied weights", "transformers", tied=True)
def plain(side: str, seed: int, tied: bool = False, **options: Any) -> list[float]:
    model = llama(seed, tie_word_embeddings=tied)
    return trained(model, adamw(side, model.parameters(), **options), sequences(seed).split(BATCH))


@set_up("own loop, bfloat16 model", "transformers")
def bfloat16_model(side: str, seed: int) -> list[float]:
    """The model computes in bfloat16 on both sides; torch's holds float32 weights under autocast."""
    if side == "torch":
        model = llama(seed)
    else:
        model = ng.cast_parameters(llama(seed), torch.bfloat16)
    optimizer = adamw(side, model.parameters())
    return trained(
        model,
        optimizer,
        sequences(seed).split(BATCH),
        autocast=torch.bfloat16 if side == "torch" else None,
    )


@set_up("own loop, cosine with warm-up", "transformers")
def scheduled(side: str, seed: int) -> list[float]:
    model = llama(seed)
    optimizer = adamw(side, model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=STEPS)
    return trained(model, optimizer, sequences(seed).split(BATCH), schedule=schedule)


@set_up("own loop, GradScaler, float16 autocast", "transformers")
def scaled(side: str, seed: int) -> list[float]:
    model = llama(seed)
    losses = []
    optimizer = adamw(side, model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    for tokens in sequences(seed).split(BATCH):
        with torch.autocast("cpu", torch.float16):
            loss = model(input_ids=tokens, labels=tokens).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@set_up("own loop, 8 micro-batches", "transformers")
def micro_batches(side: str, seed: int) -> list[float]:
    model = llama(seed)
    losses = []
    optimizer = adamw(side, model.parameters())
    for tokens in sequences(seed).split(BATCH):
        total = 0.0
        for part in tokens.split(1):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=part, labels=part).loss / BATCH
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@set_up("nanochat's shape: meta, to_empty, compile, groups, rates by hand", "transformers")
def nanochat(side: str, seed: int) -> list[float]:
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
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(1.0, (step + 1) / 4)
        losses += trained(model, optimizer, [tokens], forward=compiled)
    return losses


@set_up("layers that thaw: add_param_group", "transformers")
def thawed(side: str, seed: int) -> list[float]:
    model = llama(seed)
    batches = sequences(seed).split(BATCH)
    model.model.requires_grad_(False)
    optimizer = adamw(side, model.lm_head.parameters())
    losses = trained(model, optimizer, batches[:4])
    model.model.requires_grad_(True)
    optimizer.add_param_group({"params": [*model.model.parameters()]})
    return losses + trained(model, optimizer, batches[4:])


@set_up("average of the weights (EMA): loss of the average", "transformers")
def averaged(side: str, seed: int) -> list[float]:
    model = llama(seed)
    batches = sequences(seed).split(BATCH)
    optimizer = adamw(side, model.parameters())
    average: Any
    if side == "torch":
        average_of = torch.optim.swa_utils.get_ema_multi_avg_fn(0.8)
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average_of)
    else:
        average = ng.AveragedModel(model, optimizer, decay=0.8)
    trained(model, optimizer, batches, after_step=lambda: average.update_parameters(model))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return [average(input_ids=batches[-1], labels=batches[-1]).loss.item()]


@set_up("resume: weights, states and schedule by torch.save", "transformers")
def resumed(side: str, seed: int) -> str:
    batches = sequences(seed).split(BATCH)

    def start(from_seed: int) -> tuple[Any, Any, Any]:
        model = llama(from_seed)
        optimizer = adamw(side, model.parameters())
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    uninterrupted, optimizer, schedule = start(seed)
    trained(uninterrupted, optimizer, batches, schedule=schedule)
    first, optimizer, schedule = start(seed)
    trained(first, optimizer, batches[:8], schedule=schedule)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "saved.pt")
        torch.save([part.state_dict() for part in (first, optimizer, schedule)], file)
        saved = torch.load(file)
    restored, optimizer, schedule = start(seed + 1)
    for part, state in zip((restored, optimizer, schedule), saved, strict=True):
        part.load_state_dict(state)
    trained(restored, optimizer, batches[8:], schedule=schedule)
    return same(uninterrupted, restored)


@set_up("convolutions with batch norm, autocast; ours keeps vectors in float32")
def convolutions(side: str, seed: int) -> list[float]:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 4)
    )
    if side == "ours":
        overrides = {"keep_float32": lambda _, p: p.ndim < 2}
    else:
        overrides = {}
    optimizer = adamw(side, model.named_parameters(), **overrides)
    losses = []
    images = torch.randn(64, 3, 8, 8)
    classes = torch.randint(0, 4, (64,))
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images).float(), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# ── several ranks ─────────────────────────────────────────────────────────────────────────────────


def on_ranks(work: Callable[..., Any], *arguments: Any) -> Any:
    """Run ``work(rank, *arguments)`` on two processes, and return what rank 0 returns."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder, work, arguments), nprocs=2)
        return torch.load(Path(folder, "result"))


def _rank(rank: int, folder: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    result = work(rank, *arguments)
    if rank == 0:
        torch.save(result, Path(folder, "result"))
    dist.destroy_process_group()


def _mean_over_ranks(losses: list[float]) -> list[float]:
    table = torch.tensor(losses)
    dist.all_reduce(table)
    return [loss / 2 for loss in table.tolist()]


def _ddp(rank: int, side: str, seed: int, first: str) -> list[float]:
    model: Any = llama(seed)
    if first == "optimizer":
        optimizer = adamw(side, model.parameters())
    wrapped = nn.parallel.DistributedDataParallel(model)
    if first == "DDP":
        optimizer = adamw(side, wrapped.parameters())
    batches = [tokens[rank::2] for tokens in sequences(seed).split(BATCH)]
    return _mean_over_ranks(trained(wrapped, optimizer, batches))


@set_up("DDP, then the optimizer, 2 ranks", "transformers", first="DDP")
@set_up("the optimizer, then DDP, 2 ranks", "transformers", first="optimizer")
def ddp(side: str, seed: int, first: str) -> Any:
    return on_ranks(_ddp, side, seed, first)


def _fsdp(rank: int, side: str, seed: int) -> list[float]:
    model = llama(seed)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = adamw(side, model.parameters())
    batches = [tokens[rank::2] for tokens in sequences(seed).split(BATCH)]
    return _mean_over_ranks(trained(model, optimizer, batches, autocast=None))


@set_up("FSDP2 of float32 weights with a policy, then the optimizer, 2 ranks", "transformers")
def fsdp(side: str, seed: int) -> Any:
    return on_ranks(_fsdp, side, seed)


# ── Hugging Face and TRL ──────────────────────────────────────────────────────────────────────────


HF_DEFAULTS: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": BATCH,
    "learning_rate": LR,
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
}


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def hf_trainer(side: str, model: Any, seed: int, folder: str, **changes: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    from narrowgauge.integrations.huggingface import use_adamw

    args = TrainingArguments(folder, seed=seed, **{**HF_DEFAULTS, **changes})
    rows = [{"input_ids": row, "labels": row} for row in sequences(seed)]
    trainer = Trainer(model, args, train_dataset=rows)
    if side == "ours":
        return use_adamw(trainer, storage="word")
    return trainer


@set_up("HF Trainer, bf16=True, Llama", "transformers", "accelerate")
@set_up("HF Trainer, bf16=True, GPT-2", "transformers", "accelerate", make=gpt2)
@set_up(
    "HF Trainer, accumulation and gradient checkpointing", "transformers", "accelerate",
    gradient_accumulation_steps=2, per_device_train_batch_size=BATCH // 2, gradient_checkpointing=True,
)  # fmt: skip
@set_up(
    "HF Trainer, cosine, warm-up, label smoothing", "transformers", "accelerate",
    lr_scheduler_type="cosine", warmup_steps=4, label_smoothing_factor=0.1,
)  # fmt: skip
def hugging_face(
    side: str, seed: int, make: Callable[[int], Any] = llama, **changes: Any
) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        trainer = hf_trainer(side, make(seed), seed, folder, bf16=True, **changes)
        trainer.train()
        return losses_of(trainer)


@set_up("resume: HF Trainer", "transformers", "accelerate", first=None)
@set_up(
    "HF Trainer, continued from torch's checkpoint", "transformers", "accelerate", first="torch"
)
def hf_resumed(side: str, seed: int, first: str | None) -> Any:
    """Continue at step 8; ``first`` is who trained until there, or the same side, whose bits are
    compared.
    """
    saves = {"bf16": True, "save_strategy": "steps", "save_steps": 8}
    with tempfile.TemporaryDirectory() as folder:
        begins = hf_trainer(first or side, llama(seed), seed, f"{folder}/one", **saves)
        begins.train()
        checkpoint = f"{folder}/one/checkpoint-8"
        resumed_trainer = hf_trainer(side, llama(seed + 1), seed, f"{folder}/two", **saves)
        resumed_trainer.train(resume_from_checkpoint=checkpoint)
        if first is None:
            return same(begins.model, resumed_trainer.model)
        return losses_of(resumed_trainer)


@set_up("HF Trainer, our checkpoint continued by torch", "transformers", "accelerate")
def handed_over(side: str, seed: int) -> list[float]:
    """Train 8 steps on one side, and the rest with torch's optimizer."""
    from narrowgauge.integrations.huggingface import save_for_torch

    options = {
        "bf16": True,
        "save_strategy": "steps",
        "save_steps": 8,
        "lr_scheduler_type": "constant",
    }
    with tempfile.TemporaryDirectory() as folder:
        begins = hf_trainer(side, llama(seed), seed, f"{folder}/one", max_steps=8, **options)
        begins.train()
        if side == "ours":
            save_for_torch(begins, f"{folder}/one/checkpoint-8")
        torch_trainer = hf_trainer("torch", llama(seed + 1), seed, f"{folder}/two", **options)
        torch_trainer.train(resume_from_checkpoint=f"{folder}/one/checkpoint-8")
        return losses_of(torch_trainer)


TEXT = "the quick brown fox jumps over a lazy dog and then sleeps well today"
WORDS = TEXT.split()


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    numbers = {word: number for number, word in enumerate(("<pad>", "<eos>", *WORDS))}
    words = Tokenizer(models.WordLevel(numbers, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def texts(seed: int) -> dict[str, list[Any]]:
    """Return columns for every trainer of TRL: prompts, answers that are liked, and answers that
    are not.
    """
    draw = random.Random(seed)

    def spoken(count: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(count))

    count = STEPS * 4
    return {
        "text": [" ".join((WORDS * 3)[i % 13 : i % 13 + 20]) for i in range(count)],
        "prompt": [spoken(4) for _ in range(count)],
        "chosen": [" " + " ".join(WORDS[:5])] * count,
        "rejected": [" " + spoken(5) for _ in range(count)],
        "completion": [" " + " ".join(WORDS[i % 5 : i % 5 + 5]) for i in range(count)],
        "label": [bool(i % 2) for i in range(count)],
    }


def different_words(completions: Sequence[str], **_: Any) -> list[float]:
    """Reward answers for the number of their different words."""
    return [float(len(set(text.split()))) for text in completions]


ONLINE = {"num_generations": 4, "max_completion_length": 8}
TRL: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "SFT": (("text",), {"max_length": 24}),
    "DPO": (("prompt", "chosen", "rejected"), {"max_length": 24}),
    "KTO": (("prompt", "completion", "label"), {"max_length": 24}),
    "Reward": (("prompt", "chosen", "rejected"), {"max_length": 24}),
    "GRPO": (("prompt",), ONLINE),
    "RLOO": (("prompt",), ONLINE),
}
"""By trainer of TRL: the columns that it reads, and its settings."""


def of_trl(side: str, seed: int, kind: str, lora: bool = False) -> list[float]:
    import datasets
    import trl
    from peft import LoraConfig
    from transformers import AutoModelForSequenceClassification, LlamaConfig

    from narrowgauge.integrations.huggingface import use_adamw

    columns, settings = TRL[kind]
    small = {"vocab_size": 16, "pad_token_id": 0, "eos_token_id": 1}
    if kind == "Reward":
        torch.manual_seed(seed)
        config = LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_labels=1, **small
        )  # fmt: skip
        model = AutoModelForSequenceClassification.from_config(config)
    else:
        model = llama(seed, **small)
    rows = texts(seed)
    options: dict[str, Any] = {
        "train_dataset": datasets.Dataset.from_dict({name: rows[name] for name in columns}),
        "processing_class": tokenizer(),
    }
    if kind in ("GRPO", "RLOO"):
        options["reward_funcs"] = different_words
    if lora:
        options["peft_config"] = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as folder:
        # The trainers of preferences and rewards read models from folders.
        model.save_pretrained(f"{folder}/model")
        options["processing_class"].save_pretrained(f"{folder}/model")
        args = getattr(trl, f"{kind}Config")(
            f"{folder}/out",
            bf16=True,
            seed=seed,
            **{**HF_DEFAULTS, "per_device_train_batch_size": 4},
            **settings,
        )
        is_read = kind in ("GRPO", "RLOO", "DPO", "KTO")
        if is_read:
            name = f"{folder}/model"
        else:
            name = model
        trainer = getattr(trl, f"{kind}Trainer")(name, args=args, **options)
        if side == "ours":
            if getattr(trainer, "ref_model", None) is not None:
                ng.cast_parameters(trainer.ref_model, torch.bfloat16)
            use_adamw(trainer, storage="word")
        trainer.train()
        # What answers to one's own samples earn says more than their loss, which is 0 on the
        # average.
        name = "reward" if "reward_funcs" in options else "loss"
        return [entry[name] for entry in trainer.state.log_history if name in entry]


for _kind in TRL:
    _figure = ", reward" if TRL[_kind][1] is ONLINE else ""
    set_up(f"TRL {_kind}{_figure}", "transformers", "trl", "peft", "datasets", kind=_kind)(of_trl)
for _kind in ("SFT", "DPO"):
    set_up(f"TRL {_kind}, LoRA", "trl", "peft", "datasets", kind=_kind, lora=True)(of_trl)


# ── Lightning and Accelerate ──────────────────────────────────────────────────────────────────────


def of_lightning(
    side: str, seed: int, precision: str, clip: float | None = None, resumes: bool = False
) -> Any:
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel("ERROR")

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama(seed)
            self.losses: list[float] = []

        def training_step(self, tokens: Tensor, _: int) -> Tensor:
            loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return adamw(side, self.parameters())

    def fitted(epochs: int, checkpoint: str | None = None) -> tuple[Any, Any]:
        model = Model()
        trainer = pl.Trainer(
            max_epochs=epochs, accelerator="cpu", precision=precision, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=clip,
        )  # fmt: skip
        rows = torch.utils.data.DataLoader(sequences(seed), batch_size=BATCH)
        trainer.fit(model, rows, ckpt_path=checkpoint)
        return model, trainer

    if not resumes:
        return fitted(1)[0].losses
    with tempfile.TemporaryDirectory() as folder:
        uninterrupted, _ = fitted(2)
        _, trainer = fitted(1)
        trainer.save_checkpoint(f"{folder}/one.ckpt")
        restored, _ = fitted(2, f"{folder}/one.ckpt")
        return same(uninterrupted, restored)


for _precision in ("bf16-mixed", "bf16-true", "16-mixed"):
    set_up(f"Lightning {_precision}", "lightning", "transformers", precision=_precision)(
        of_lightning
    )
set_up(
    "Lightning bf16-mixed, clipped", "lightning", "transformers", precision="bf16-mixed", clip=0.5
)(of_lightning)
set_up("resume: Lightning", "lightning", "transformers", precision="bf16-mixed", resumes=True)(
    of_lightning
)


def of_fabric(side: str, seed: int, precision: str) -> list[float]:
    import lightning as L

    fabric = L.Fabric(accelerator="cpu", precision=precision)
    fabric.launch()
    model: Any = llama(seed)
    model, optimizer = fabric.setup(model, adamw(side, model.parameters()))
    losses = []
    for tokens in sequences(seed).split(BATCH):
        loss = model(input_ids=tokens, labels=tokens).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


for _precision in ("bf16-mixed", "bf16-true"):
    set_up(f"Fabric {_precision}", "lightning", "transformers", precision=_precision)(of_fabric)


@set_up("Accelerate bf16, accumulation, clipping, schedule", "accelerate", "transformers")
def of_accelerate(side: str, seed: int) -> list[float]:
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


# ── the table ─────────────────────────────────────────────────────────────────────────────────────


def outcome(row: SetUp, side: str, seeds: int) -> Any:
    """Return the mean over seeds of the last losses, a sentence about bits, or the first line of
    what was raised.
    """
    ends = []
    for seed in range(1, seeds + 1):
        try:
            result = row.run(side, seed)
        except Exception as error:
            first = str(error).strip().splitlines() or [""]
            return f"raised {type(error).__name__}: {first[0][:160]}"
        if isinstance(result, str):
            return result
        ends.append(statistics.fmean(result[-4:]))
    return ends


def measured(row: SetUp, seeds: int) -> dict[str, Any]:
    """Run both sides of a set-up."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sides = {side: outcome(row, side, seeds) for side in SIDES}
    line: dict[str, Any] = {"set-up": row.name}
    for side, losses in sides.items():
        line[side] = losses if isinstance(losses, str) else statistics.fmean(losses)
    ours = sides["ours"]
    torchs = sides["torch"]
    if not isinstance(ours, str) and not isinstance(torchs, str):
        differences = []
        for our_loss, torch_loss in zip(ours, torchs, strict=True):
            differences.append(our_loss - torch_loss)
        line["ours less torch"] = statistics.fmean(differences)
        line["largest of a seed"] = max(differences, key=abs)
    return line


def write_page(lines: Sequence[dict[str, Any]]) -> None:
    """Write the table into the page of frameworks, between its marks."""
    table = [
        "| set-up | torch | ours | ours less torch, largest of a seed |",
        "|---|---:|---:|---:|",
    ]
    for line in lines:
        cells = [line["set-up"]]
        for side in SIDES:
            loss = line[side]
            cells.append(loss if isinstance(loss, str) else f"{loss:.4f}")
        largest = line.get("largest of a seed")
        cells.append("–" if largest is None else f"{largest:+.4f}".replace("-", "−"))
        table.append(f"| {' | '.join(cells)} |")
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    body = "\n".join(table)
    PAGE.write_text(f"{before}{MARKS[0]}\n\n{body}\n\n{MARKS[1]}{after}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    flags = parser(__doc__, rounds=1)
    flags.add_argument("--only", default="", help="set-ups whose name holds this text")
    flags.add_argument("--seeds", type=int, default=3)
    flags.add_argument("--page", action="store_true", help=f"write the table into {PAGE.name}")
    add_out(flags, "frameworks")
    options = flags.parse_args(arguments)
    report = Report("frameworks", options, peers=PACKAGES)
    seeds = 1 if options.quick else options.seeds
    rows = [row for row in SET_UPS if options.only in row.name]
    if not rows:
        raise ng.errors.DataError(f"No set-up's name holds '{options.only}'.")
    for row in list(rows):
        missing = [name for name in row.needs if importlib.util.find_spec(name) is None]
        if missing:
            report.note(f"{row.name}: {', '.join(missing)} {NOT_INSTALLED}")
            rows.remove(row)
    parts = []
    for row in rows:
        parts.append(
            Part(row.name, {"seeds": seeds}, functools.partial(measured, row, seeds), 8.0 * seeds)
        )
    with out_folder(options, "frameworks") as out:
        lines = list(complete(parts, out, report).values())
    if options.page:
        write_page(lines)
    report.add(f"mean of the last four losses, {STEPS} steps, {seeds} seeds", lines)
    return report.end()


if __name__ == "__main__":
    exit_by(main)
