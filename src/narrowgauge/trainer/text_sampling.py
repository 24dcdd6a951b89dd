"""Text that a trained model continues: sampling from a run's newest checkpoint, or from a quantized export."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.errors import DataError
from narrowgauge.trainer.data.tokens import tokenizer_of_run
from narrowgauge.trainer.resume_checks import quantization_of
from narrowgauge.trainer.session import Session, load

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class QuantizedRun:
    """What of a run is needed to continue a text: a model and where its tokenizer is."""

    model: PreTrainedModel
    tokenizer_path: Path | None


def sample(folder: Path, text: str, tokens: int = 100, temperature: float = 0.8, seed: int = 0) -> str:
    """Continue a text with the newest good checkpoint of a run, or with a quantized export; returns text and continuation.

    Invariant: a function of the run, the text and the arguments; the global random state is not used.

    Args:
        text: the prompt; if empty, the model starts a document.
        tokens: maximum number of new tokens; the model may end the document before.
        temperature: 0 is greedy decoding, 1 samples from the model's distribution.

    Raises:
        RecordError: the run has no good checkpoint, or no tokenizer.
        DataError: text and tokens together are longer than the model's positions, or a number is out of range.

    Cost: a forward pass for the text and one for each token.
    """
    if quantization_of(folder) is not None:
        from narrowgauge.trainer.quantized_export import load_quantized

        return continue_text(QuantizedRun(load_quantized(folder), folder), text, tokens, temperature, seed)
    return continue_text(load(folder), text, tokens, temperature, seed)


def continue_text(run: Session | QuantizedRun, text: str, tokens: int, temperature: float, seed: int) -> str:
    """:func:`sample` for a run in memory."""
    if tokens < 0 or not 0 <= temperature < float("inf"):
        raise DataError(
            f"{tokens} tokens at temperature {temperature} were requested; neither may be negative or infinite."
        )
    tokenizer, end = tokenizer_of_run(run.tokenizer_path)
    # As in training, text that spells a special token is encoded as plain text.
    tokenizer.encode_special_tokens = True
    prompt = tokenizer.encode(text, add_special_tokens=False).ids or [end]
    positions = getattr(run.model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and len(prompt) + tokens > positions:
        raise DataError(
            f"The text has {len(prompt):,} tokens and {tokens:,} more were requested; the model has {positions:,} "
            "positions.",
            "Request fewer tokens or use a shorter prompt.",
        )
    added = _continue(run.model, prompt, tokens, temperature, seed, end, tokenizer.get_vocab_size())
    return text + tokenizer.decode(added, skip_special_tokens=True)


@torch.no_grad()
def _continue(
    model: PreTrainedModel, prompt: list[int], tokens: int, temperature: float, seed: int, end: int, vocab_size: int
) -> list[int]:
    """Generate tokens, without the end-of-text token."""
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    added: list[int] = []
    new, cache = torch.tensor([prompt], dtype=torch.int64, device=model.device), None
    try:
        while len(added) < tokens:
            output = model(input_ids=new, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            # A model may have more embeddings than the tokenizer has tokens.
            token = _choose(output.logits[0, -1, :vocab_size].float().cpu(), temperature, generator)
            if token == end:
                break
            added.append(token)
            new = torch.tensor([[token]], dtype=torch.int64, device=model.device)
    finally:
        model.train(was_training)
    return added


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    # Shift first: a tiny temperature must not overflow.
    shares = torch.softmax((logits - logits.max()) / temperature, dim=-1)
    return int(torch.multinomial(shares, 1, generator=generator))
