"""Memory of the head and the loss: logits, whole or a chunk of tokens at a time."""

from __future__ import annotations

from narrowgauge.planner.memory_figures import Request
from narrowgauge.planner.pipeline_stages import Stage
from narrowgauge.planner.terms import Term

CHUNK_LOGITS = 1 << 24
"""Logits of one chunk of the trainer's loss, 64 MiB in float32: smaller ones make thin matmuls, larger ones gain little."""
LARGE_VOCABULARY = 16_384
"""Vocabulary size from which the trainer uses the chunked loss."""
_LOSS = "log-softmax in float32: its result, its gradient, and the gradient of the logits"


def loss_terms(request: Request, stage: Stage) -> tuple[list[Term], list[Term]]:
    """What the head and the loss keep at the end of forward, and at the start of backward."""
    a, layout, tokens = request.architecture, request.layout, request.tokens
    if stage.number != layout.pipeline - 1:
        return [], []
    widths = request.figures.widths
    norm = tokens * (4 + 2 * widths.stream) * a.hidden_size
    each = f"{tokens:g} tokens × {norm / tokens:g} B"
    hidden = Term("logits", "input of the head", norm / layout.stream_ranks, each)
    if request.is_loss_chunked and layout.model_ranks == 1:
        both = [hidden, *_chunked(request, widths.matmul)]
        return both, both
    # A compiled or fused loss keeps the logits and their gradient alone, in the matmuls' dtype.
    fused = 2 * tokens * widths.matmul * a.vocab_size / layout.tensor
    sizes = bytes_per_logit(widths.matmul)
    texts = ("logits, as float32, log-softmax", _LOSS)
    forward, backward = (
        [hidden, Term("logits", "logits", tokens * size * a.vocab_size / layout.tensor,
                      f"{tokens:g} tokens × {a.vocab_size:,} × {size:g} B / {layout.tensor}: {text}", _LOSS, low=fused)]
        for size, text in zip(sizes, texts, strict=True)
    )  # fmt: skip
    return forward, backward


def bytes_per_logit(width: float) -> tuple[float, float]:
    """Bytes per logit of an unchunked loss at the end of forward and at the start of backward, of logits of ``width`` bytes.

    Example:
        >>> bytes_per_logit(2.0), bytes_per_logit(4.0)
        ((10.0, 12.0), (8.0, 12.0))
    """
    return (width if width < 4 else 0.0) + 8.0, 12.0


def _chunked(request: Request, width: float) -> list[Term]:
    """A chunk of logits, and for narrow weights the head in float32 with its gradient."""
    a = request.architecture
    count = min(CHUNK_LOGITS, request.tokens * a.vocab_size)
    head = a.vocab_size * a.hidden_size
    if width == 4:
        # PyTorch's own chunked loss works in place.
        chunk = Term("logits", "a chunk of logits", 4.0 * count, f"{count:,.0f} logits × 4 B", "torch 2.13, counted")
        return [chunk, Term("logits", "gradient of the head", 4.0 * head, f"{head:,} × 4 B, made in forward")]
    # The larger of two moments: the chunk's log-softmax backward, and its part of the head's gradient, in both dtypes.
    earlier = 4 * (count < request.tokens * a.vocab_size)
    softmax = (4 + width + earlier) * head + 12.0 * count
    weight = (8 + 2 * width + earlier) * head + width * count
    sizes = f"{4 + width + earlier:g} h + 12 c and {8 + 2 * width + earlier:g} h + {width:g} c B"
    formula = (
        f"the larger of {sizes}: h = {head:,} of the head, in float32 and with its gradient, c = {count:,.0f} logits"
    )
    return [
        Term("logits", "a chunk of logits, head in float32", max(softmax, weight), formula, "trainer/language_model.py")
    ]
