"""The table of ``two_runs.py``: pairs of runs with one known difference each, and what a diagnosis of both should say.

A row names the run that is changed, what is changed, and the reason, step, tensor and rank that follow from it. The rows were
written before any of them was diagnosed. Where a change may have no effect (threads, instruction sets, ranks), the truth is read
from the weights: runs that end with equal bits are the same run.

Claim: none of its own; ``two_runs.py`` measures. Baseline: the same run without the change. Run: ``./dev bench two_runs``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import faults
import torch
from faults import Strike, nothing, once
from torch import Tensor

from narrowgauge.trainer.micro_batches import SkippedBatches
from narrowgauge.trainer.session import Session

AT = 7
"""The first step that is struck."""
DOWN, QUERY, HEAD, EMBEDDING, NORM = (
    "model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight",
    "model.embed_tokens.weight", "model.layers.1.input_layernorm.weight",
)  # fmt: skip
Change = Callable[[Session], None]


@dataclass(frozen=True)
class Given:
    """One run: what it is given and what is done to it.

    Args:
        recipe: of the run.
        settings: the trainer's; ``model`` is a name of ``SHAPES`` in ``two_runs.py``.
        strike: what is done to it from step ``AT`` on.
        ranks: processes that train together.
        resumed: the run is stopped before that step, and resumed.
        environment: variables of a process of its own.
    """

    recipe: str = "bfloat16/word"
    settings: Mapping[str, Any] = field(default_factory=dict)
    strike: Strike = nothing
    ranks: int = 1
    resumed: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Pair:
    """Two runs with one difference.

    Args:
        kind: one of the ten of the table, or ``the same run``.
        name: of the variant.
        one, other: the runs.
        reason: that should be named; empty for the same run.
        steps: in which they may part.
        tensor: shell pattern of the tensor; empty for any.
        ranks: that should be named.
        may_be_same: the change may have no effect.
    """

    kind: str
    name: str
    one: Given
    other: Given
    reason: str = ""
    steps: tuple[int, ...] = (AT,)
    tensor: str = ""
    ranks: tuple[int, ...] = ()
    may_be_same: bool = False


# ── what is done ────────────────────────────────────────────────────────────────────────────────────────────────────────


def on_rank(rank: int, change: Change) -> Strike:
    """A change of one rank alone."""
    return once(lambda session: change(session) if session.here.rank == rank else None)


def detour(batches: int) -> Change:
    """Later batches than it is their turn, or earlier ones."""

    def change(session: Session) -> None:
        session.skipped_batches = [SkippedBatches(session.step, batches)]

    return change


def other_order_within(session: Session) -> None:
    """The sequences of each micro-batch in the opposite order, from here on."""
    true_batch = session.batch
    session.batch = lambda: [part.flip(0) for part in true_batch()]  # type: ignore[method-assign]


def scaled(parameter: str, factor: float) -> Change:
    """The gradient of one parameter times a factor, from here on."""

    def change(session: Session) -> None:
        session.model.get_parameter(parameter).register_hook(lambda gradient: gradient * factor)

    return change


def unclipped(session: Session) -> None:
    """Gradients are no longer clipped, and no setting says so."""
    session.optimizer.max_grad_norm = float("inf")


@torch.no_grad()
def flip(tensor: Tensor, place: int, bit: int) -> None:
    """One bit of one element, as damaged memory flips it: no operation writes the tensor."""
    kind = torch.int16 if tensor.element_size() == 2 else torch.int32
    tensor.data.view(-1).view(kind)[place] ^= 1 << bit


def weight_bit(parameter: str, place: int, bit: int) -> Change:
    """One bit of a weight."""

    def change(session: Session) -> None:
        weight = session.model.get_parameter(parameter)
        flip(weight.to_local() if hasattr(weight, "to_local") else weight, place, bit)

    return change


def state_bit(parameter: str, place: int, bit: int) -> Change:
    """One bit of what the optimizer keeps of a parameter."""

    def change(session: Session) -> None:
        store = session.optimizer._registry.states[session.model.get_parameter(parameter)]
        flip(store.tensors()[0], place, bit)

    return change


def _in_this_step(session: Session) -> Callable[[], bool]:
    """True once: for the first micro-batch of the present step."""
    left = [session.step]
    return lambda: bool(left) and left.pop() == session.step


def gradient_bit(parameter: str, place: int, bit: int) -> Change:
    """One bit of one gradient, in one step."""

    def change(session: Session) -> None:
        now = _in_this_step(session)

        def damaged(gradient: Tensor) -> Tensor:
            if now():
                gradient = gradient.clone()
                flip(gradient, place, bit)
            return gradient

        session.model.get_parameter(parameter).register_hook(damaged)

    return change


def activation_bit(module: str, place: int, bit: int) -> Change:
    """One bit of what a module gives, in one step."""

    def change(session: Session) -> None:
        now = _in_this_step(session)

        def damaged(output: Tensor) -> Tensor:
            if torch.is_grad_enabled() and now():
                noise = output.detach().clone()
                flip(noise, place, bit)
                output = output + (noise - output.detach())
            return output

        faults.wrap_forward(session.model.get_submodule(module), damaged)

    return change


# ── the table ───────────────────────────────────────────────────────────────────────────────────────────────────────────

W, F, E, M = "bfloat16/word", "float32/float32", "float8-row/word", "bfloat16/master"
TWO = {"gradient_accumulation_steps": 2, "shard": "none"}
FOUR = {"gradient_accumulation_steps": 4, "shard": "none"}
SHARDED = {"gradient_accumulation_steps": 2, "shard": "full"}
CLIPPED = {"max_grad_norm": 0.1}
WIDE = {"model": "wide", "batch_size": 16, "sequence_length": 64, "steps": 10}
THREADS = {"OMP_NUM_THREADS": "2"}


def _struck(kind: str, name: str, change: Change, expected: tuple[str, str], **given: Any) -> Pair:
    """A run, and the same one in which a change is made on every rank."""
    return _pair(kind, name, once(change), expected, **given)


def _pair(
    kind: str, name: str, strike: Strike, expected: tuple[str, str], *, odd: tuple[int, ...] = (), **given: Any
) -> Pair:
    reason, tensor = expected
    return Pair(kind, name, Given(**given), Given(strike=strike, **given), reason, (AT,), tensor, odd)


def _from_start(kind: str, name: str, one: Given, other: Given, reason: str, tensor: str = "", **more: Any) -> Pair:
    return Pair(kind, name, one, other, reason, **{"steps": (0, 1), "tensor": tensor, **more})


_TOKENS, _BUG, _DAMAGE = ("data-order", "tokens:batch"), "bug", "silent-corruption"
_CLIP = ("one-rank", "clip:factor")

PAIRS: tuple[Pair, ...] = (
    _struck("data order", "ten batches left out", detour(10), _TOKENS),
    _struck("data order", "a batch taken twice, float32", detour(-1), _TOKENS, recipe=F),
    _struck("data order", "sequences of a batch in another order", other_order_within, _TOKENS),
    _struck("data order", "a batch left out on two ranks", detour(1), _TOKENS, ranks=2, settings=TWO),
    _pair("data order", "one rank of two reads other batches", on_rank(1, detour(3)), _TOKENS, odd=(1,), ranks=2, settings=TWO),
    *(
        _from_start(
            "seed", f"1 for 0, {recipe}", Given(recipe), Given(recipe, {"seed": 1}), "random-numbers", "weight:*", steps=(0,)
        )
        for recipe in (W, F, E)
    ),
    _from_start(
        "seed", "7 for 0 on two ranks", Given(settings=TWO, ranks=2), Given(settings={**TWO, "seed": 7}, ranks=2),
        "random-numbers", "weight:*", steps=(0,),
    ),
    *(
        _from_start("dtype", f"{b} for {a}", Given(a), Given(b), "format")
        for a, b in (
            (W, "int8-row/word"), (W, E), (F, "bfloat16/float32"), (W, "bfloat16/compact"), ("bfloat16/naive", "bfloat16/kahan"),
        )
    ),
    _from_start(
        "dtype", "gradients of micro-batches summed in bfloat16", Given(settings=FOUR),
        Given(settings={**FOUR, "accumulation_dtype": "bfloat16"}), "format", "grad:*",
    ),
    *(
        _from_start(
            "reduction", f"{kind} for {base}{' on shards' if given is SHARDED else ''}",
            Given(f"{W}/{base}", given, ranks=2), Given(f"{W}/{kind}", given, ranks=2), "reduction", "grad:*", steps=(1,),
            may_be_same=True,
        )
        for base, kind, given in (
            ("native", "reproducible", FOUR), ("native", "reproducible", SHARDED), ("native", "float32", FOUR),
            ("native", "compressed8", FOUR), ("native", "compressed4", FOUR),
        )
    ),
    *(
        _from_start(
            "ranks", f"{b} for {a}, {recipe}", Given(recipe, FOUR, ranks=a), Given(recipe, FOUR, ranks=b), "order-of-sums",
            "grad:*", steps=(1,), may_be_same=True,
        )
        for recipe, a, b in ((W, 1, 2), (F, 1, 2), (W, 2, 4), (F, 2, 4), (W, 1, 3))
    ),
    *(
        _from_start(
            "kernel ISA", f"{name}={value}, {recipe}{' with gelu' if given else ''}", Given(recipe, given),
            Given(recipe, given, environment={name: value}), "hardware", may_be_same=True,  # a first weight is drawn by kernels
        )
        for name, value, recipe, given in (
            ("ATEN_CPU_CAPABILITY", "default", W, {}), ("ATEN_CPU_CAPABILITY", "default", F, {}),
            ("ATEN_CPU_CAPABILITY", "default", E, {}), ("ONEDNN_MAX_CPU_ISA", "SSE41", F, {"model": "gelu"}),
            ("ONEDNN_MAX_CPU_ISA", "SSE41", W, {}),
        )
    ),
    *(
        _from_start(
            "thread count", f"2 for 1, {recipe}{', wide' if given else ''}", Given(recipe, given),
            Given(recipe, {**given, "threads": 2}, environment=THREADS), "order-of-sums", steps=(1, 2, 3), may_be_same=True,
        )
        for recipe, given in ((W, {}), (F, {}), (W, WIDE), (F, WIDE))
    ),
    *(
        _struck(
            "bug × 1.01", f"{parameter}, {recipe}", scaled(parameter, 1.01), (_BUG, f"grad:{parameter}"), recipe=recipe
        )
        for parameter, recipe in ((DOWN, W), (QUERY, F), (HEAD, W), (EMBEDDING, F), (NORM, F), (DOWN, E), (NORM, W))
    ),
    _struck("bug × 1.01", "on both of two ranks", scaled(DOWN, 1.01), (_BUG, f"grad:{DOWN}"), ranks=2, settings=TWO),
    _pair(
        "bug × 1.01", "on one of two ranks", on_rank(1, scaled(DOWN, 1.01)), ("one-rank", f"grad:{DOWN}"), odd=(1,), ranks=2,
        settings=TWO,
    ),
    Pair(
        "bug × 1.01", "behind the rounding of other ranks", Given(F, FOUR), Given(F, FOUR, once(scaled(QUERY, 1.01)), ranks=2),
        _BUG, (AT,), f"grad:{QUERY}",
    ),
    *(
        _pair(
            "clip on one rank", f"rank {rank} of {ranks}, {recipe}, shard {shard}", on_rank(rank, unclipped), _CLIP, odd=(rank,),
            recipe=recipe, ranks=ranks,
            settings={"gradient_accumulation_steps": ranks, "batch_size": 4 * ranks, "shard": shard, **CLIPPED},
        )
        for rank, ranks, recipe, shard in (
            (1, 2, W, "none"), (1, 2, W, "full"), (0, 2, F, "none"), (2, 3, W, "none"), (1, 2, f"{W}/reproducible", "full"),
        )
    ),
    _struck("SDC bit", "an exponent of a weight", weight_bit(DOWN, 5, 9), (_DAMAGE, f"held:{DOWN}")),
    _struck("SDC bit", "the last bit of a weight, float32", weight_bit(QUERY, 17, 0), (_DAMAGE, f"held:{QUERY}"), recipe=F),
    _struck("SDC bit", "a moment, float32", state_bit(DOWN, 9, 24), (_DAMAGE, f"held:exp_avg:{DOWN}"), recipe=F),
    _struck("SDC bit", "a word of the optimizer", state_bit(HEAD, 9, 20), (_DAMAGE, f"held:*{HEAD}")),
    _struck("SDC bit", "an exponent of a gradient", gradient_bit(DOWN, 11, 9), (_DAMAGE, f"grad:{DOWN}")),
    _struck("SDC bit", "an exponent of a gradient, float32", gradient_bit(QUERY, 11, 25), (_DAMAGE, f"grad:{QUERY}"), recipe=F),
    _struck(
        "SDC bit", "an exponent of an output", activation_bit("model.layers.1.mlp.down_proj", 33, 9),
        (_DAMAGE, "output:model.layers.1.mlp.down_proj"),
    ),
    _pair(
        "SDC bit", "a weight of one replica", on_rank(1, weight_bit(DOWN, 5, 9)), (_DAMAGE, f"held:{DOWN}"), odd=(1,), ranks=2,
        settings=TWO,
    ),
    _pair(
        "SDC bit", "a weight of one shard", on_rank(1, weight_bit(QUERY, 5, 9)), (_DAMAGE, f"held:{QUERY}"), odd=(1,), ranks=2,
        settings=SHARDED,
    ),
    *(Pair("the same run", f"again, {recipe}", Given(recipe), Given(recipe, {"log_every": 7})) for recipe in (W, F, E, M)),
    Pair("the same run", "again on two ranks", Given(settings=TWO, ranks=2), Given(settings={**TWO, "log_every": 7}, ranks=2)),
    Pair("the same run", "resumed", Given(), Given(resumed=True)),
    Pair("the same run", "with gauges and checkpoints", Given(), Given(settings={"gauges_every": 5, "checkpoint_every": 4})),
    Pair("the same run", "every other step hashed", Given(), Given(settings={"fingerprints_every": 2})),
    Pair(
        "the same run", "two ranks for one, reproducible", Given(f"{W}/reproducible", FOUR),
        Given(f"{W}/reproducible", FOUR, ranks=2),
    ),
    Pair(
        "the same run", "shards for replicas, reproducible", Given(f"{W}/reproducible", TWO, ranks=2),
        Given(f"{W}/reproducible", SHARDED, ranks=2),
    ),
)  # fmt: skip
"""The pairs that were there first: rules were mended with what they showed."""

FOR_THREADS = {"model": "wide", "batch_size": 64, "sequence_length": 64, "steps": 8}
UP, OUT, KEY, LAST = (
    "model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.o_proj.weight", "model.layers.1.self_attn.k_proj.weight",
    "model.norm.weight",
)  # fmt: skip

LATER: tuple[Pair, ...] = (
    _struck("data order", "two batches left out, float8", detour(2), _TOKENS, recipe=E),
    _pair(
        "data order", "the first rank of two reads other batches, float32", on_rank(0, detour(5)), _TOKENS, odd=(0,), recipe=F,
        ranks=2, settings=TWO,
    ),
    _from_start("seed", f"3 for 0, {M}", Given(M), Given(M, {"seed": 3}), "random-numbers", "weight:*", steps=(0,)),
    *(_from_start("dtype", f"{b} for {W}", Given(W), Given(b), "format") for b in ("mxfp8/word", "bfloat16/states8")),
    _from_start(
        "reduction", "reproducible for native, one process", Given(f"{W}/native", FOUR), Given(f"{W}/reproducible", FOUR),
        "reduction", "grad:*", steps=(1,), may_be_same=True,
    ),
    _from_start(
        "reduction", "compressed8 for native on shards, float32", Given(f"{F}/native", SHARDED, ranks=2),
        Given(f"{F}/compressed8", SHARDED, ranks=2), "reduction", "grad:*", steps=(1,), may_be_same=True,
    ),
    *(
        _from_start(
            "ranks", f"{b} for {a}, {recipe}", Given(recipe, FOUR, ranks=a), Given(recipe, FOUR, ranks=b), "order-of-sums",
            "grad:*", steps=(1,), may_be_same=True,
        )
        for recipe, a, b in ((M, 1, 2), (E, 1, 2), (W, 1, 4))
    ),
    *(
        _from_start(
            "kernel ISA", f"{name}={value}, {recipe}{' with gelu' if given else ''}", Given(recipe, given),
            Given(recipe, given, environment={name: value}), "hardware", may_be_same=True,
        )
        for name, value, recipe, given in (
            ("ATEN_CPU_CAPABILITY", "default", M, {}), ("ATEN_CPU_CAPABILITY", "default", "int8-row/word", {}),
            ("ATEN_CPU_CAPABILITY", "default", F, {"model": "gelu"}), ("MKL_CBWR", "COMPATIBLE", F, {}),
        )
    ),
    _from_start(
        "thread count", "2 for 1, 4096 tokens", Given(F, FOR_THREADS),
        Given(F, {**FOR_THREADS, "threads": 2}, environment=THREADS), "order-of-sums", steps=(1, 2, 3), may_be_same=True,
    ),
    *(
        _struck("bug × 1.01", f"{parameter}, {recipe}", scaled(parameter, 1.01), (_BUG, f"grad:{parameter}"), recipe=recipe)
        for parameter, recipe in ((UP, M), (OUT, F), (KEY, E))
    ),
    _struck(
        "bug × 1.01", "of the last norm, on two ranks", scaled(LAST, 1.01), (_BUG, f"grad:{LAST}"), recipe=F, ranks=2,
        settings=TWO,
    ),
    _pair(
        "bug × 1.01", "on the first of two ranks", on_rank(0, scaled(KEY, 1.01)), ("one-rank", f"grad:{KEY}"), odd=(0,), recipe=F,
        ranks=2, settings=TWO,
    ),
    Pair(
        "bug × 1.01", "behind the rounding of other ranks, bfloat16", Given(W, FOUR),
        Given(W, FOUR, once(scaled(DOWN, 1.01)), ranks=2), _BUG, (AT,), f"grad:{DOWN}",
    ),
    *(
        _pair(
            "clip on one rank", f"rank {rank} of {ranks}, {recipe}, shard {shard}, verified every {every}",
            on_rank(rank, unclipped), _CLIP, odd=(rank,), recipe=recipe, ranks=ranks,
            settings={
                "gradient_accumulation_steps": ranks, "batch_size": 4 * ranks, "shard": shard, "verify_every": every, **CLIPPED,
            },
        )
        for rank, ranks, recipe, shard, every in ((1, 3, F, "full", 1000), (0, 2, E, "none", 1000), (1, 2, W, "none", 0))
    ),
    _struck("SDC bit", f"a high exponent of a weight, {M}", weight_bit(HEAD, 40, 11), (_DAMAGE, f"held:{HEAD}"), recipe=M),
    _struck("SDC bit", "an exponent of the head's gradient", gradient_bit(HEAD, 70, 10), (_DAMAGE, f"grad:{HEAD}")),
    _pair(
        "SDC bit", "a moment of one replica, float32", on_rank(1, state_bit(UP, 9, 24)), (_DAMAGE, f"held:exp_avg:{UP}"),
        odd=(1,), recipe=F, ranks=2, settings=TWO,
    ),
    _struck(
        "SDC bit", "an exponent of an output, float32", activation_bit("model.layers.0.mlp.up_proj", 33, 25),
        (_DAMAGE, "output:model.layers.0.mlp.up_proj"), recipe=F,
    ),
    Pair(
        "the same run", "four ranks for two, reproducible", Given(f"{W}/reproducible", FOUR, ranks=2),
        Given(f"{W}/reproducible", FOUR, ranks=4),
    ),
    Pair("the same run", "with gelu", Given(F, {"model": "gelu"}), Given(F, {"model": "gelu", "log_every": 7})),
    Pair(
        "the same run", "verified every third step", Given(settings=TWO, ranks=2),
        Given(settings={**TWO, "verify_every": 3}, ranks=2),
    ),
)  # fmt: skip
"""Pairs that were written when the rules were there, and diagnosed once."""
