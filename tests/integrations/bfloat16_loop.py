"""A loop of one's own over a tiny bfloat16 Llama: what a framework that leaves the arithmetic to
the optimizer must repeat.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import narrowgauge as ng

STEPS = 6
VOCABULARY = 64
LR = 1e-2
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def llama(compute: str | None = None, dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ng.cast_parameters(LlamaForCausalLM(LlamaConfig(**SHAPE)), dtype).train()
    if compute is not None:
        ng.swap_linears(model, compute)
    return model


def sequences(count: int, length: int = 17) -> Tensor:
    """Walks over the vocabulary in small strides, int64 ``[count, length]``."""
    strides = torch.randint(0, 3, (count, length), generator=torch.Generator().manual_seed(1))
    return strides.cumsum(1) % VOCABULARY


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Tensor],
    rates: Sequence[float] = (),
    parts: int = 1,
) -> list[float]:
    """The loss of each step; the loss of a micro-batch is its part of the step's."""
    losses = []
    for step, tokens in enumerate(batches):
        for group in optimizer.param_groups if rates else ():
            group["lr"] = rates[step]
        total = torch.zeros(())
        for rows in tokens.chunk(parts):
            loss = model(input_ids=rows, labels=rows).loss / parts
            loss.backward()
            total += loss.detach().float()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


def same_weights(first: nn.Module, second: nn.Module) -> bool:
    theirs = second.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in first.state_dict().items())
