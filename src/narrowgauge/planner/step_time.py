"""Step time: the duration of an optimizer step, term by term.

We follow one rank of the slowest stage through its micro-batches: matmuls, casts, attention,
element-wise work, the loss. Then come exchanges that computing does not hide, and the optimizer. A
pipeline adds the bubble: the stage waits while the others fill and drain. Many chips wait for the
slowest of them. Checkpoints add time.

Source: Narayanan et al., arXiv 2104.04473 (schedules, exchanges); Korthikanti et al., arXiv
2205.05198 (recomputation).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from narrowgauge.errors import ChipError, RecipeError
from narrowgauge.planner.ask import Ask
from narrowgauge.planner.exchanges import layer_exchanges, parameters_of, state_exchanges
from narrowgauge.planner.layer_times import (
    Seconds,
    attention_seconds,
    elementwise_seconds,
    linear_seconds,
    loss_seconds,
    mixture_seconds,
    optimizer_seconds,
)
from narrowgauge.planner.layouts import unsuited
from narrowgauge.planner.terms import Term, Terms, term

UNSTEADY_GROUP = "checkpoints"
"""Group that published throughputs of short runs omit."""
CHECKPOINT_SECONDS = 3600.0
"""Seconds between checkpoints: an assumption."""
_AGAIN = {
    "attention": {"attention": 1.0},
    "operations": {"matmuls": 0.5, "casts": 0.5, "elementwise": 1.0, "attention": 0.0},
    "modules": {"matmuls": 0.1, "elementwise": 0.5, "attention": 0.0},
}
"""Fraction of forward's work that selective recomputation repeats, by group."""
_GROUPS = {
    "matmuls": "linear layers and head",
    "casts": "casts to narrow formats",
    "attention": "attention",
    "elementwise": "norms, residuals, gates",
    "loss": "softmax and cross entropy",
    "gaps": "routers, sorting and launches of mixtures",
}


def step_terms(ask: Ask) -> Terms:
    """Return the seconds of an optimizer step of the whole job, by group.

    Raises:
        ChipError: the chip does not multiply the recipe's dtype, or the layout has more ranks than
            the cluster has chips.
        RecipeError: the layout does not suit the model.
    """
    check_ask(ask)
    layers, has_head = stage_layers(ask.architecture.num_layers, ask.layout.pipeline)
    # Expert ranks are among the ranks that shard a replica's state. So fewer ranks shard each
    # expert's state.
    dense, experts = parameters_of(ask, layers)
    sharing = ask.layout.sharing(1)
    number = dense / sharing + experts / ask.layout.sharing_experts(sharing)
    if not ask.program.trains_all:
        number = ask.trained_parameters * layers / ask.architecture.num_layers / sharing
    seconds = optimizer_seconds(ask, number)
    text = "{:.3g} parameters × {:g} B read and written"
    name = "states read and written"
    optimizer = term("optimizer", name, seconds, text, number, ask.bytes_per_param)
    terms = [*_stage_terms(ask, layers, has_head), optimizer]
    terms += _waiting_terms(ask, number, sum(term.value for term in terms))
    if ask.correction != 1:
        # All terms share the error of the plan.
        for place, part in enumerate(terms):
            value = part.value * ask.correction
            text = "{} × {:.3g} (--like)"
            terms[place] = term(part.group, part.name, value, text, part.text, ask.correction)
    return Terms(tuple(terms))


def check_ask(ask: Ask) -> None:
    """Raise if a job cannot run."""
    architecture = ask.architecture
    layout = ask.layout
    chip = ask.chip
    if chip.rate_format(ask.recipe.dtype) not in chip.peak_tflops:
        raise ChipError(
            f"Cannot run {ask.recipe.name} on {chip.name} because it does not multiply "
            f"{ask.recipe.dtype}.",
            f"It multiplies {', '.join(chip.peak_tflops)}.",
        )
    if layout.num_ranks > ask.cluster.chips:
        raise ChipError(
            f"Cannot place a layout of {layout.num_ranks} ranks on {ask.cluster.chips} chips.",
            "Shard less, or add chips.",
        )
    if not ask.trained_parameters:
        raise RecipeError(
            f"Cannot plan {architecture.name} because nothing of it trains.",
            "Leave a part trained, or name --lora.",
        )
    why = unsuited(architecture, layout, ask.sequence_length)
    if why:
        raise RecipeError(
            f"{architecture.name} cannot run in this layout: {why}.", "Choose a divisor."
        )


def stage_layers(num_layers: int, stages: int) -> tuple[int, bool]:
    """Return the layers of the slowest stage, and whether it is the last stage, which has the head.

    Stages are equal if possible. Else the first and the last have one layer less, for embedding and
    head; of two stages the last.

    Example:
        >>> stage_layers(32, 4), stage_layers(126, 16), stage_layers(61, 2)
        ((8, True), (8, False), (31, False))
    """
    if num_layers % stages == 0:
        return num_layers // stages, True
    if num_layers <= stages:
        return 1, False
    shorter = min(2, stages - 1)
    return math.ceil((num_layers + shorter) / stages), False


def _micro_batch_seconds(ask: Ask) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of a micro-batch by group: for all layers, and for head and loss."""
    layout = ask.layout
    program = ask.program
    again = dict.fromkeys(_GROUPS, float(layout.recompute == "full"))
    if layout.recompute == "selective":
        again |= _AGAIN[program.selective]
        # Fused attention always recomputes its scores, unfused attention only on request.
        again["attention"] *= program.attention == "eager"
    # Weights are cast once a step while they stay gathered.
    once_share = 1.0
    if layout.zero < 3 or layout.num_sharing == 1:
        once_share /= layout.micro_batches

    def total(seconds: Seconds, repeated: float = 0.0) -> float:
        return seconds.forward * (1 + repeated) + seconds.backward + seconds.once * once_share

    ranks = layout.tensor, layout.expert, layout.expert_tensor_ranks
    question = ask.architecture, ask.recipe, ranks, ask.tokens, ask.chip, ask.efficiency, program
    matmuls, casts = linear_seconds(*question, is_head=False)
    head, head_casts = linear_seconds(*question, is_head=True)
    of_layers = {
        "matmuls": matmuls,
        "casts": casts,
        "attention": attention_seconds(ask),
        "elementwise": elementwise_seconds(ask),
        "gaps": mixture_seconds(ask),
    }
    has_reference = program.reference is not None  # whose forward pass runs, too
    body = {}
    for group, seconds in of_layers.items():
        body[group] = total(seconds, again[group]) + has_reference * seconds.forward
    if program.saved == "host" and layout.recompute == "full":
        # Each layer's input leaves in forward and comes back in backward; computing hides it up to
        # the link's rate.
        stream = ask.tokens * ask.architecture.hidden_size * ask.width * ask.architecture.num_layers
        rate = 1e9 * ask.chip.host_gb_per_second * ask.efficiency["host"]
        body["gaps"] += max(0.0, 2 * stream / rate - sum(body.values()))
    return body, {
        "matmuls": total(head) + has_reference * head.forward,
        "casts": total(head_casts),
        "loss": total(loss_seconds(ask)),
    }


def _stage_terms(ask: Ask, layers: int, has_head: bool) -> Iterator[Term]:
    """Yield a stage's computing and exchanges for all micro-batches, and its wait for other stages."""
    layout = ask.layout
    library = ask.efficiency["library"]
    batches = layout.micro_batches
    body, tail = _micro_batch_seconds(ask)
    share = layers / ask.architecture.num_layers
    groups = {group: seconds * share for group, seconds in body.items()}
    for group, seconds in tail.items():
        groups[group] = groups.get(group, 0.0) + seconds * has_head
    busy = sum(groups.values())
    for group, seconds in groups.items():
        if seconds:
            text = "{} × {:.3g} s, {} layers on {}"
            numbers = batches, seconds, layers, ask.chip.name
            yield term(group, _GROUPS[group], batches * seconds, text, *numbers)
    text = "{} × {:.3g} s × (1 / {:.3g} - 1)"
    waiting = batches * busy * (1 / library - 1)
    yield term("gaps", "between kernels", waiting, text, batches, busy, library)
    yield from layer_exchanges(ask, layers, busy, groups["attention"])
    yield from state_exchanges(ask, layers, busy)
    if layout.pipeline > 1:
        waiting = max(sum(body.values()) + sum(tail.values()) - busy, 0.0)
        text = "{} other stages, {:.3g} s a micro-batch, / {}"
        name = "filling and draining the pipeline"
        depth = layout.interleave
        stages = layout.pipeline - 1
        yield term("bubble", name, waiting / depth / library, text, stages, waiting, depth)


def _waiting_terms(ask: Ask, number: float, seconds: float) -> Iterator[Term]:
    """Yield waiting times, in proportion to the ``seconds`` of a step; a rank has the states of
    ``number`` parameters.
    """
    chips = ask.layout.num_ranks
    shares = ask.efficiency
    spread = shares["spread"]
    if chips > 1:
        # The expected excess of the slowest chip over the mean.
        late = spread * math.sqrt(2 * math.log(chips))
        text = "{:.3g} s × {:.3g} × √(2 ln {})"
        yield term("waiting", "for the slowest chip", seconds * late, text, seconds, spread, chips)
        seconds *= 1 + late
    saved = number * ask.bytes_per_param / (1e9 * ask.chip.host_gb_per_second * shares["host"])
    text = "{:.3g} s to the host's memory every {:,.0f} s"
    copying = seconds * saved / CHECKPOINT_SECONDS
    yield term(UNSTEADY_GROUP, "copying states", copying, text, saved, CHECKPOINT_SECONDS)
