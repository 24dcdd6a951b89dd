"""One answer does not contradict itself: the best is the best, a row says what its recipe says alone, layouts are in order."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.planner.inputs.layouts import Layout
from narrowgauge.planner.plan import plan
from narrowgauge.planner.plan_report import Plan
from narrowgauge.planner.question import OURS, Option
from narrowgauge.planner.search import LEAST_TOKENS_PER_STEP, MOST_TOKENS_PER_STEP, NOISE

MODELS = ("llama-8b", "llama-33b", "llama-70b", "mixtral-8x7b")
GRID = [
    *itertools.product(MODELS, ("A100-SXM4-80GB", "H100-SXM"), (8, 64)),
    *itertools.product(MODELS, ("B200",), (1, 512)),
    *itertools.product(("llama-8b", "llama-70b"), ("RTX-4090",), (8, 64)),
    *itertools.product(("llama-8b",), ("H100-SXM",), (24_000, 1_000_000)),
]


def safety(option: Option) -> tuple[bool, bool]:
    """What comes before speed: whether it surely fits, and whether its storage keeps updates."""
    return bool(option.is_certain), option.recipe.storage.keeps_updates


def rate(option: Option) -> float:
    assert option.tokens_per_second is not None
    return option.tokens_per_second


def is_better(option: Option, best: Option) -> bool:
    return bool(option.fits) and safety(option) >= safety(best) and rate(option) > rate(best)


def offered(found: Plan) -> list[Option]:
    """Every option that an answer names with a rate."""
    ours = [found.trainable] if isinstance(found.trainable, Option) else []
    said = [option for option in ours if f"{rate(option):,.0f} tokens/s" in "\n".join(found.sentences())]
    return [*found.options, *found.shared, *said]


@pytest.mark.parametrize(("model", "chip", "chips"), GRID)
def test_nothing_that_an_answer_offers_is_faster_than_its_best(model: str, chip: str, chips: int) -> None:
    for recipes in ([], ["bfloat16/master"]):
        found = plan(model, recipes=recipes, chip=chip, chips=chips)
        assert not [option for option in offered(found) if is_better(option, found.best)]
        rates = [rate(option) for option in found.options if option.fits and safety(option) == safety(found.best)]
        assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize(("model", "chips"), [("llama-70b", 64), ("llama-8b", 8), ("mixtral-8x7b", 1024)])
def test_a_row_of_the_table_is_what_its_recipe_gets_alone(model: str, chips: int) -> None:
    """Each recipe has a search of its own: 9 of 27 rows once had the layout that suits another, and were up to 21 % slower."""
    table = plan(model, chip="H100-SXM", chips=chips)
    for row in table.options:
        assert plan(model, recipes=[row.recipe], chip="H100-SXM", chips=chips).best == row


def test_master_keeps_its_rate_in_the_table() -> None:
    rows = {option.recipe.name: rate(option) for option in plan("llama-70b", chip="H100-SXM", chips=64).options}
    assert rows["bfloat16/master"] > 65_000


@pytest.mark.parametrize("chips", [8, 64, 512, 1024, 2048])
@pytest.mark.parametrize(
    "asked",
    [
        {"zero": 1}, {"zero": 1, "tensor": 1, "pipeline": 1}, {"zero": 2}, {"zero": 3}, {"tensor": 2}, {"tensor": 8},
        {"recompute": "full"}, {"micro_batch": 1}, {"micro_batch": 4}, {"zero": 3, "tensor": 1, "pipeline": 1, "context": 1},
    ],
)  # fmt: skip
def test_what_is_asked_of_a_layout_never_makes_it_faster(asked: dict[str, Any], chips: int) -> None:
    """Of all layouts the best is as fast as of some of them, but for what counts as equal."""
    free = plan("llama-8b", recipes=["bfloat16/word"], chip="H100-SXM", chips=chips).best
    found = plan("llama-8b", recipes=["bfloat16/word"], chip="H100-SXM", chips=chips, layout=asked).best
    if found.fits and safety(found) >= safety(free):
        assert rate(found) <= rate(free) * (1 + NOISE)


@pytest.mark.parametrize("chips", [512, 1024, 2048, 4096])
def test_sharing_less_is_as_fast_where_it_fits(chips: int) -> None:
    """ZeRO-1 sends less than ZeRO-2, and that less than ZeRO-3; on 2,048 chips it was once 23 % slower than either.

    Layouts without any sharing fit barely, so no others were looked at; and its once-a-step reduction, layer by layer, waited for
    messages to go round all chips.
    """
    asked = {"tensor": 1, "pipeline": 1}
    given: dict[str, Any] = {"recipes": ["bfloat16/word"], "chip": "H100-SXM", "chips": chips}
    rates = [rate(plan("llama-8b", **given, layout={**asked, "zero": zero}).best) for zero in (1, 2, 3)]
    assert rates == sorted(rates, reverse=True)


def test_what_this_trainer_runs_is_taken_where_it_is_as_fast() -> None:
    for model, chips in (("llama-8b", 8), ("llama-8b", 64), ("llama-8b", 512)):
        assert plan(model, recipes=["bfloat16/word"], chip="H100-SXM", chips=chips).best.runs_with == OURS


@pytest.mark.parametrize(
    ("model", "chip", "chips", "given"),
    [
        ("llama-70b", "RTX-4090", 64, {}),
        ("llama-33b", "H100-SXM", 8, {}),
        ("llama-70b", "H100-SXM", 8, {}),
        ("llama-70b", "H100-SXM", 64, {"layout": {"tensor": 4, "pipeline": 4, "shard": 4}}),
        ("llama-405b", "H100-SXM", 16_384, {"tokens_per_step": 1 << 24, "sequence_length": 8192}),
    ],
)
def test_why_this_trainer_does_not_run_a_layout_is_true(
    model: str, chip: str, chips: int, given: dict[str, Any]
) -> None:
    found = plan(
        model, recipes=["bfloat16/master" if model == "llama-33b" else "bfloat16/word"], chip=chip, chips=chips, **given
    )
    (sentence,) = [line for line in found.sentences() if line.startswith("This layout is more than FSDP2")]
    alone = {
        **{name: value for name, value in given.items() if name != "layout"},
        "layout": {"tensor": 1, "pipeline": 1, "context": 1, "zero": 3},
    }
    try:
        ours = plan(model, recipes=[found.best.recipe], chip=chip, chips=chips, **alone).best
    except NarrowgaugeError as error:
        assert str(error).removesuffix(".") in sentence
        return
    if not ours.fits:
        assert ours.reason in sentence
    elif ours.tokens_per_step < LEAST_TOKENS_PER_STEP <= found.best.tokens_per_step:
        assert f"fit for certain in steps of {ours.tokens_per_step:,} tokens at most" in sentence
    elif not ours.is_certain:
        assert "barely fit at most" in sentence
    else:
        assert f"reaches {rate(ours):,.0f} tokens/s" in sentence


def test_steps_do_not_grow_with_the_chips_without_end() -> None:
    """A million chips once planned steps of two billion tokens without a word."""
    found = plan("llama-8b", recipes=["bfloat16/word"], chip="H100-SXM", chips=1_000_000)
    assert found.best.tokens_per_step <= 2 * MOST_TOKENS_PER_STEP
    whole = plan(
        "llama-8b", recipes=["bfloat16/word"], chip="H100-SXM", chips=1_000_000, layout={"tensor": 1, "pipeline": 1}
    )
    assert whole.best.tokens_per_step > 2 * MOST_TOKENS_PER_STEP
    assert "more than the 67.1M of the largest published steps" in "\n".join(whole.sentences())


def test_of_one_number_of_chips_the_fastest_is_best_whatever_is_minimized() -> None:
    for minimize in ("days", "cost", "chips"):
        found = plan("llama-8b", recipes=["bfloat16/word"], chip="H100-SXM", chips=8, minimize=minimize)
        [least] = {option.num_chips for option in found.options[:1]}
        rates = [rate(option) for option in found.options if option.num_chips == least and option.is_certain]
        assert rates[0] == max(rates)
        assert isinstance(found.best.layout, Layout)
