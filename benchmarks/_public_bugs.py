"""Bugs that others had, each from a public thread, put into a plain PyTorch loop: the loss, the model, the data, evaluations.

Each row does the same thing as the bug in the thread that it cites, to the loop of ``_public_loop.py``; the other rows, of
gradients and updates, are in ``_public_bugs_of_steps.py``. There is one process: what ranks did wrong is done to micro-batches,
or to a factor. The words that count as right were written beside each row before anything was diagnosed; where there is none, any
word is wrong.

Claim: none of its own; ``public_bugs.py`` measures. Baseline: the loop without a bug. Run: ``./dev bench public_bugs``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from _public_loop import AT, EPOCH, IGNORED, MICRO, PAD, Bug, PublicLoop, Setting
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

EOS = 83
"""A token that is 2.6 % of the text, where a tokenizer has one that ends it."""
GITHUB = "https://github.com/"


def bug(name: str, thread: str, wrong: str, plant: Callable[[PublicLoop], object], **given: Any) -> Bug:
    """A row; words are given as one text."""
    words = {key: frozenset(given.pop(key).split()) for key in ("audit", "pair", "rows") if key in given}
    return Bug(name, GITHUB + thread, wrong, plant, **words, **given)


# ── the loss ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _cross_entropy(shift: int) -> Callable[[PublicLoop], None]:
    def plant(loop: PublicLoop) -> None:
        loop.summed = (
            lambda logits, labels: functional.cross_entropy(  # type: ignore[method-assign]
                logits[:, : logits.shape[1] - shift].float().flatten(0, 1), labels[:, shift:].flatten(), reduction="sum"
            )
        )

    return plant


def _shifted_twice_across_rows(loop: PublicLoop) -> None:
    def summed(logits: Tensor, labels: Tensor) -> Tensor:
        flat = functional.pad(labels[:, 1:].flatten(), (0, 1), value=IGNORED)[1:]  # a second shift, over the rows' ends
        return functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), flat, reduction="sum", ignore_index=IGNORED
        )

    loop.summed = summed  # type: ignore[method-assign]


def _counts_first_tokens(loop: PublicLoop) -> None:
    loop.count = lambda labels: int((labels != IGNORED).sum())  # type: ignore[method-assign]


def _own_means(loop: PublicLoop) -> None:
    loop.loss = lambda logits, labels, total: (  # type: ignore[method-assign]
        loop.summed(logits, labels) / loop.count(labels) / MICRO
    )


def _divided_again(loop: PublicLoop) -> None:
    loop.loss = lambda logits, labels, total: loop.summed(logits, labels) / total / MICRO  # type: ignore[method-assign]


def _short_window(loop: PublicLoop) -> None:
    """The last window of an epoch has two of four micro-batches, and the mean is taken over four."""
    split = loop.split

    def some(tokens: Tensor) -> list[Tensor]:
        return split(tokens)[: MICRO // 2 if loop.step % EPOCH == 0 else MICRO]

    loop.split = some  # type: ignore[method-assign]
    _own_means(loop)


def _end_ignored(loop: PublicLoop) -> None:
    labels = loop.labels

    def without_end(tokens: Tensor) -> Tensor:
        found = labels(tokens)
        found[tokens == EOS] = IGNORED
        return found

    loop.labels = without_end  # type: ignore[method-assign]


def _first_answer_ignored(loop: PublicLoop) -> None:
    labels = loop.labels

    def later(tokens: Tensor) -> Tensor:
        found = labels(tokens)
        found[:, found.shape[1] // 2] = IGNORED
        return found

    loop.labels = later  # type: ignore[method-assign]


def _nothing_ignored(loop: PublicLoop) -> None:
    loop.labels = lambda tokens: tokens.clone()  # type: ignore[method-assign]


def _smoothed_too_much(loop: PublicLoop) -> None:
    """Every token is given 1/n, not smoothing/n, beside 0.9 for the target."""

    def summed(logits: Tensor, labels: Tensor) -> Tensor:
        log_p = logits[:, :-1].float().log_softmax(-1)
        target = log_p.gather(-1, labels[:, 1:, None])[..., 0]
        return -(0.9 * target + log_p.mean(-1)).sum()

    loop.summed = summed  # type: ignore[method-assign]


class _Narrow(torch.autograd.Function):
    """The gradient of the logits is kept in bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.bfloat16().to(gradient.dtype)


def _narrow_logit_gradients(loop: PublicLoop) -> None:
    summed = loop.summed
    loop.summed = lambda logits, labels: summed(_Narrow.apply(logits), labels)  # type: ignore[method-assign]


OF_THE_LOSS: tuple[Bug, ...] = (
    bug(
        "sum-of-micro-batches", "karpathy/nanoGPT/issues/206",
        "The losses of the micro-batches were not divided by their number.",
        lambda loop: setattr(loop, "loss", lambda logits, labels, total: loop.summed(logits, labels) / total * MICRO),
        audit="loss-scaled gradient-scaled", part="seen",
    ),
    bug(
        "next-next-token", "huggingface/transformers/pull/37830", "Labels were shifted in the model and again in the loss.",
        _cross_entropy(2), audit="labels-shifted", part="seen",
    ),
    bug(
        "labels-not-shifted", "huggingface/transformers/issues/27517", "The loss compared each output with its own input.",
        _cross_entropy(0), audit="labels-shifted", part="seen",
    ),
    bug(
        "shifted-across-rows", "huggingface/transformers/issues/47394",
        "Flattened labels were shifted a second time, so that a row's last target came from the next row.",
        _shifted_twice_across_rows, audit="labels-shifted labels-other",
    ),
    bug(
        "first-tokens-counted", "huggingface/transformers/pull/46204",
        "The denominator counted the first token of each row, which nothing predicts.",
        _counts_first_tokens, audit="loss-scaled gradient-scaled",
    ),
    bug(
        "mean-of-means", "meta-pytorch/torchtune/pull/1875",
        "Each micro-batch took its own mean over unpadded tokens, and these were averaged.",
        _own_means, setting=Setting(lengths=True), audit="micro-batches-uneven", rows="micro-batch-normalization",
    ),
    bug(
        "divided-by-accumulation-too", "unslothai/unsloth-zoo/pull/1023",
        "The loss was divided by the step's tokens and by the number of micro-batches.",
        _divided_again, audit="loss-scaled gradient-scaled",
    ),
    bug(
        "short-window", "modelscope/ms-swift/pull/10084",
        "The last window of an epoch has fewer micro-batches, and its loss was divided by the usual number.",
        _short_window, audit="loss-scaled gradient-scaled",
    ),
    bug(
        "end-of-text-ignored", "huggingface/trl/pull/6357",
        "Padding and end of text are one token, so that every end of text was ignored, too.", _end_ignored,
        audit="tokens-weighted labels-other token-ignored",
    ),
    bug(
        "first-answer-ignored", "verl-project/verl/pull/3287",
        "The mask of the prompt was one token too long: the first token of the answer was not trained on.",
        _first_answer_ignored, setting=Setting(prompts=True), audit="tokens-weighted",
    ),
    bug(
        "prompt-trained-on", "huggingface/open-r1/issues/517", "Labels were the input: the instruction was not masked.",
        _nothing_ignored, setting=Setting(prompts=True), audit="tokens-weighted ignored-counted",
    ),
    bug(
        "padding-counted", "EleutherAI/gpt-neo/pull/45", "Padding tokens were counted in the loss.", _nothing_ignored,
        setting=Setting(lengths=True, declared=(("ignore", PAD),)), audit="ignored-counted",
    ),
    bug(
        "padding-in-the-loss", "01-ai/Yi/issues/110", "Padding tokens were counted in the loss; nothing was declared.",
        _nothing_ignored, setting=Setting(lengths=True), part="seen",
    ),
    bug(
        "smoothing-by-one", "TimDettmers/ConvE/issues/55",
        "Smoothing spread 1 over all tokens, where 0.1 had been taken from the target.", _smoothed_too_much,
        setting=Setting(smoothing=0.1), audit="label-smoothing loss-departs",
    ),
    bug(
        "logit-gradient-in-bfloat16", "NVIDIA/TransformerEngine/pull/3193",
        "The fused loss kept the gradient of the logits in the bfloat16 buffer of its input.", _narrow_logit_gradients,
        audit="gradient-narrow loss-departs",
    ),
)  # fmt: skip


# ── the model ─────────────────────────────────────────────────────────────────────────────────────────────────────────


Turn = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def attention(
    loop: PublicLoop, mix: Callable[[Tensor, Tensor, Tensor], Tensor], turn: Turn = apply_rotary_pos_emb
) -> None:
    """Attention whose heads are mixed or turned otherwise, in every layer."""

    def forward(self: Any, hidden_states: Tensor, position_embeddings: Any, *_: Any, **__: Any) -> tuple[Tensor, None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (each(hidden_states).view(shape).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj))
        q, k = turn(q, k, *position_embeddings)
        return self.o_proj(mix(q, k, v).transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)), None

    for layer in loop.model.model.layers:
        layer.self_attn.forward = forward.__get__(layer.self_attn)


def _over_the_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (each.transpose(0, 2) for each in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v).transpose(0, 2)


def _sees_the_future(loop: PublicLoop) -> None:
    attention(loop, lambda q, k, v: functional.scaled_dot_product_attention(q, k, v))


def _sees_other_documents(loop: PublicLoop) -> None:
    def mask(tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        lower = torch.ones(length, length, dtype=torch.bool).tril()
        sees = torch.where(lower, 0.0, torch.finfo(torch.float32).min)
        return sees[None, None].expand(len(tokens), 1, -1, -1)

    loop.mask = mask  # type: ignore[method-assign]


def _narrow_frequencies(loop: PublicLoop) -> None:
    rotary = loop.model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.bfloat16().float()


def _untied(loop: PublicLoop) -> None:
    head = loop.model.lm_head
    head.weight = nn.Parameter(head.weight.detach().clone())
    loop.optimizer.param_groups[0]["params"].append(head.weight)


def _scale_of_zero(loop: PublicLoop) -> None:
    """A scale that was kept in a buffer and lost when the model was made anew: each block's norms give nothing."""
    for layer in loop.model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.register_forward_hook(lambda module, args, output: output * 0.0)


def _detached(loop: PublicLoop) -> None:
    loop.model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output.detach())


def _no_input_gradient(loop: PublicLoop) -> None:
    """Reentrant checkpoints give no gradient where none of their inputs has one."""
    from torch.utils.checkpoint import checkpoint

    for layer in loop.model.model.layers[:1]:
        mlp = layer.mlp
        forward = mlp.forward
        mlp.forward = lambda x, forward=forward: checkpoint(forward, x.detach(), use_reentrant=True)


OF_THE_MODEL: tuple[Bug, ...] = (
    bug(
        "sees-the-future", "huggingface/transformers/issues/48745", "Attention had no causal mask.", _sees_the_future,
        audit="sees-future", part="seen",
    ),
    bug(
        "sees-other-documents", "huggingface/transformers/pull/46634",
        "With a mask of two dims, packed documents were no longer told apart: each attended to those before it.",
        _sees_other_documents, setting=Setting(packed=True),
    ),
    bug(
        "attends-over-the-batch", "IBM/TabFormer/pull/14",
        "The encoder took the first dim for the sequence, so that attention mixed the rows of the batch.",
        lambda loop: attention(loop, _over_the_batch), audit="rows-mixed past-unseen",
    ),
    bug(
        "attention-not-scaled", "PAIR-code/tiny-transformers/issues/71", "Scores were not divided by the root of the head's dim.",
        lambda loop: [setattr(layer.self_attn, "scaling", 1.0) for layer in loop.model.model.layers],
    ),
    bug(
        "frequencies-in-bfloat16", "huggingface/transformers/pull/29285",
        "A cast of the whole model rounded the rotary frequencies to bfloat16.", _narrow_frequencies,
        audit="module-cast frequencies-narrow", pair="bug format",
    ),
    bug(
        "untied", "facebookresearch/lingua/pull/75",
        "Tied weights became two tensors without a word when the model was wrapped.", _untied,
        setting=Setting(tied=True), audit="tie-cut", pair="missing-part bug other-model",
    ),
    bug(
        "start-not-scaled", "huggingface/transformers/pull/47478",
        "The smaller start of residual projections asked for a name that never matched.",
        lambda loop: setattr(loop, "start", lambda: loop.scale_start(lambda name: name == "o_proj.weight")),
        setting=Setting(small_start=True), pair="other-start bug",
    ),
    bug(
        "scale-lost", "allenai/OLMo-core/pull/698",
        "A scale kept in a buffer was erased when the model was made on another device.", _scale_of_zero,
        audit="past-unseen gradient-zero unused", rows="dead-layer frozen-parameter", pair="bug other-start missing-part",
    ),
    bug(
        "part-detached", "Cadene/murel.bootstrap.pytorch/issues/7", "The output of a part was detached.", _detached,
        audit="unused gradient-missing", rows="frozen-parameter dead-layer", pair="missing-part bug",
    ),
    bug(
        "checkpoint-without-gradient", "ai2cm/ace/pull/1493",
        "Reentrant checkpointing of a part whose input needs no gradient left its parameters without one.",
        _no_input_gradient, audit="unused gradient-missing", rows="frozen-parameter dead-layer", pair="missing-part bug",
    ),
    bug(
        "part-never-updated", "pytorch/pytorch/issues/176076", "The optimizer did not have a part of the model.",
        lambda loop: [
            group.update(params=[p for p in group["params"] if p is not loop.model.lm_head.weight])
            for group in loop.optimizer.param_groups
        ],
        audit="no-group", rows="frozen-parameter", pair="missing-part bug", part="seen",
    ),
)  # fmt: skip


# ── the data, and evaluations ─────────────────────────────────────────────────────────────────────────────────────────


def _same_on_every_rank(loop: PublicLoop) -> None:
    loop.split = lambda tokens: [tokens.chunk(MICRO)[0]] * MICRO  # type: ignore[method-assign]


def _never_shuffled_anew(loop: PublicLoop) -> None:
    place = loop.place
    loop.place = lambda step: place((step - 1) % EPOCH + 1)  # type: ignore[method-assign]


def _order_of_the_first_epoch(loop: PublicLoop) -> None:
    place = loop.place

    def resumed(step: int) -> int:
        end = (AT - 1) // EPOCH * EPOCH + EPOCH
        return place((step - 1) % EPOCH + 1) if AT <= step <= end else place(step)

    loop.place = resumed  # type: ignore[method-assign]


def _begins_anew(loop: PublicLoop) -> None:
    place = loop.place
    loop.place = lambda step: place(step if step < AT else step - AT + 1)  # type: ignore[method-assign]


def _divided_within_the_loop(found: list[tuple[float, int]]) -> float:
    mean = 0.0
    for number, (total, count) in enumerate(found, 1):
        mean = (mean + total / count) / number
    return mean


EPOCHS, EVALUATED = Setting(epochs=True), Setting(evaluates=True)
DROPPED = Setting(evaluates=True, dropout=0.2)
OF_THE_DATA: tuple[Bug, ...] = (
    bug(
        "one-seed-on-all-ranks", "pixeli99/SVD_Xtend/issues/75", "Every rank drew the same batch, as all had one seed.",
        _same_on_every_rank, audit="rows-twice", rows="repeated-data", pair="data data-order bug",
    ),
    bug(
        "epochs-in-one-order", "pytorch/pytorch/issues/31771", "Without set_epoch each epoch has the same order.",
        _never_shuffled_anew, setting=EPOCHS, rows="repeated-data", pair="data-order data",
    ),
    bug(
        "resumed-in-the-first-epochs-order", "huggingface/accelerate/issues/2016",
        "A resume in a later epoch skipped batches of the first epoch's order.", _order_of_the_first_epoch,
        setting=Setting(epochs=True, restarts=True), rows="repeated-data resume-changed", pair="data-order data",
    ),
    bug(
        "reader-begins-anew", "kyutai-labs/pocket-tts/pull/287", "After a resume the reader began with the first batch.",
        _begins_anew, setting=Setting(restarts=True), rows="repeated-data resume-changed", pair="data-order data", part="seen",
    ),
    bug(
        "evaluated-with-dropout", "wolny/pytorch-3dunet/issues/53", "Validation ran in training mode.",
        lambda loop: setattr(loop, "before_evaluation", lambda: None),
        setting=DROPPED, audit="evaluated-in-training", pair="evaluation bug",
    ),
    bug(
        "dropout-off-after-evaluation", "shubhamagarwal92/mmd/issues/14",
        "After the first evaluation the model stayed in evaluation mode.",
        lambda loop: setattr(loop, "after_evaluation", lambda: None), setting=DROPPED,
    ),
    bug(
        "evaluation-mean-of-means", "huggingface/transformers/issues/39241",
        "The evaluation's loss was a mean of batch means, whatever tokens a batch has.",
        lambda loop: setattr(loop, "mean", lambda found: sum(s / n for s, n in found) / len(found)),
        setting=EVALUATED, audit="evaluation-mean-of-means", pair="evaluation",
    ),
    bug(
        "evaluation-divided-each-time", "lucidrains/reformer-pytorch/issues/147",
        "The running sum was divided at each turn of the loop.",
        lambda loop: setattr(loop, "mean", _divided_within_the_loop), setting=EVALUATED,
        pair="evaluation",
    ),
)  # fmt: skip
