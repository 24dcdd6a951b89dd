"""A tiny Llama trained for four steps, and the ways that must leave the bits of the plain loop.

A *way* takes the name of a recipe, trains, and returns a :func:`fingerprint`. The ways here run in
one process; those on several ranks are in ``ranks.py``.
"""

import hashlib
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import narrowgauge as ng
from narrowgauge.spec.parse import parse
from tensors import random_tokens

RECIPES = (
    "bfloat16/word", "bfloat16/exact", "bfloat16/compact", "bfloat16/states8",
    "float8-row/word", "int8-row/states8", "float16/split", "bfloat16/collage-plus",
)  # fmt: skip
MORE = (
    "float8-tensor/split",
    "mxfp8/states8",
    "scalify/split",
    "float32/float64",
    "float16/collage-plus",
)
"""Recipes whose scales or factors could depend on how a model is shared out, or be forgotten when
it is resumed; words of 64 bits, and parts of float16.
"""
STEPS = 4
HALF = 3
"""After how many steps a training is moved: an odd number, so that a subspace of two steps goes on."""
MICRO_BATCHES = 4
SHAPE = {
    "vocab_size": 48, "max_position_embeddings": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip


class Training(NamedTuple):
    """A model and its optimizer."""

    model: nn.Module
    optimizer: ng.AdamW


def llama(seed: int = 0, **changes: Any) -> nn.Module:
    """Return a float32 Llama of 25,000 weights, drawn from the seed."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes}))


def start(
    recipe: str, model: nn.Module | None = None, *, compile: bool = False, **options: Any
) -> Training:
    """Prepare a model, by default a new one, for a recipe."""
    options = {
        "lr": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "seed": 7,
        "audit_every": 0,
        **options,
    }
    return Training(
        *ng.prepare(model or llama(), recipe, betas=(0.9, 0.95), compile=compile, **options)
    )


def tokens(step: int, micro_batch: int = 0) -> Tensor:
    """Draw the tokens of a micro-batch: two sequences of twelve."""
    return random_tokens(2, 12, SHAPE["vocab_size"], seed=100 * step + micro_batch)


def differentiate(training: Training, inputs: Tensor, share: float = 1.0) -> Tensor:
    """Run forward and backward on ``share`` of the loss, scaled if the recipe scales it."""
    loss = training.model(input_ids=inputs, labels=inputs).loss * share
    scaler_of(training).scale(loss).backward()
    return loss.detach()


def update(training: Training) -> None:
    """Take an optimizer step along the gradients, and drop them."""
    scaler = scaler_of(training)
    scaler.scale(torch.zeros(()))  # which makes its scale
    scaler.step(training.optimizer)
    training.optimizer.zero_grad()


def scaler_of(training: Training) -> GradScaler:
    """Return the scaler of a step. A scale lasts longer than these trainings."""
    return GradScaler("cpu", enabled=training.optimizer.scales_loss)


def train(training: Training, steps: Iterable[int] = range(STEPS)) -> Training:
    """Take optimizer steps, each on one batch."""
    for step in steps:
        differentiate(training, tokens(step))
        update(training)
    return training


# ── fingerprints ──────────────────────────────────────────────────────────────────────────────────


def fingerprint(training: Training) -> dict[str, str]:
    """Hash each visible weight and each entry of the optimizer's state, by name; ranks gather whole
    tensors first.
    """
    model, optimizer = training
    values = {
        **flat(get_model_state_dict(model), "model"),
        **flat(optimizer.state_dict(), "optimizer"),
    }
    return {name: digest(value) for name, value in values.items()}


def flat(value: Any, name: str):
    """Flatten nested mappings and lists to leaves."""
    if isinstance(value, Mapping):
        flattened = {}
        for key, part in value.items():
            flattened.update(flat(part, f"{name}.{key}"))
        return flattened
    if isinstance(value, (list, tuple)):
        return flat(dict(enumerate(value)), name)
    return {name: value}


def digest(value: Any) -> str:
    """Hash a tensor's shape and bits, and show anything else; 16-bit integers of shards travel as
    int32, so count as such.
    """
    if not isinstance(value, Tensor):
        return repr(value)
    value = value.full_tensor() if isinstance(value, DTensor) else value
    value = value.int() if value.dtype is torch.int16 else value
    content = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(
        content, digest_size=8, key=f"{value.dtype} {tuple(value.shape)}".encode()
    ).hexdigest()


# ── ways in one process ───────────────────────────────────────────────────────────────────────────


def plain(recipe: str) -> dict[str, str]:
    """Train eagerly; every other way is compared with this one."""
    return fingerprint(train(start(recipe)))


def compiled(recipe: str) -> dict[str, str]:
    """Compile the optimizer's kernels."""
    return fingerprint(train(start(recipe, compile=True)))


def moved(recipe: str, move: Callable[[Training], Training]) -> dict[str, str]:
    """Go on with what ``move`` makes of a training before its last step."""
    return fingerprint(train(move(train(start(recipe), range(HALF))), range(HALF, STEPS)))


def different_training(recipe: str, **options: Any) -> Training:
    """Start a training as far as it can be from the one that it takes over: other weights and
    options.
    """
    training = start(recipe, llama(seed=1), lr=1.0, weight_decay=0.0, **options)
    return train(training, range(50, 51))


def resumed(recipe: str) -> dict[str, str]:
    """Load both state dicts into another model and optimizer, for which another seed was asked: that
    of the state counts. Layers have no state: their seed is an argument.
    """
    is_stochastic = parse(recipe).compute.is_stochastic
    seed = 7 if is_stochastic else 3

    def move(training: Training) -> Training:
        loaded = different_training(recipe, seed=seed)
        loaded.model.load_state_dict(training.model.state_dict())
        loaded.optimizer.load_state_dict(training.optimizer.state_dict())
        return loaded

    return moved(recipe, move)


def save_dcp(training: Training, folder: Path, **options: Any) -> None:
    """Save a checkpoint."""
    dcp.save(dcp_state(training), checkpoint_id=folder, **options)


def load_dcp(training: Training, folder: Path, **options: Any) -> Training:
    """Load a checkpoint into a training, sharded in whatever way."""
    state = dcp_state(training)
    dcp.load(state, checkpoint_id=folder, **options)
    set_model_state_dict(training.model, state["model"])
    set_optimizer_state_dict(training.model, training.optimizer, state["optimizer"])
    return training


def dcp_state(training: Training) -> dict[str, Any]:
    """Return what a checkpoint holds."""
    model, optimizer = training
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def recorded(recipe: str) -> dict[str, str]:
    """Record a run: fingerprints, an audit and a check of every step."""
    training = start(recipe, audit_every=1)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ng.RunRecorder(f"{folder}/run", *training, fingerprints_every=1) as recorder:
            for step in range(STEPS):
                loss = differentiate(training, tokens(step))
                update(training)
                recorder.step(loss=loss)
        run = ng.read_run(f"{folder}/run")
        assert len(run.steps) == STEPS and all("edq" in row for row in run.steps)
    return fingerprint(training)


def checked(recipe: str) -> dict[str, str]:
    """Check the set-up before the first step and before the last."""
    training = start(recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ng.check(*training)
        train(training, range(HALF))
        ng.check(*training)
    train(training, range(HALF, STEPS))
    return fingerprint(training)


def checkpointed(recipe: str) -> dict[str, str]:
    """Compute activations again in the backward pass."""
    training = start(recipe)
    training.model.gradient_checkpointing_enable({"use_reentrant": False})
    return fingerprint(train(training))


# ── micro-batches ─────────────────────────────────────────────────────────────────────────────────


ALONE = {
    way.__name__: way
    for way in (
        compiled, resumed, recorded, checked, checkpointed,
    )
}  # fmt: skip
