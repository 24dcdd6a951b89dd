"""Every way to train gives the bits of the plain loop: its visible weights, and all that its
optimizer keeps.

One table of ways by recipes. What must not change a training (a checkpoint, a copy, a measurement,
another number of ranks) is a function in ``ways.py`` or ``ranks.py``.
"""

import functools
import itertools
from pathlib import Path

import pytest

from equivalence import ranks, ways
from equivalence.ranks import Fingerprints
from equivalence.ways import ALONE, MORE, RECIPES
from ranks import run_ranks

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

plain = functools.cache(ways.plain)
on_one_rank = functools.cache(ranks.on_one_rank)


CASES = [*itertools.product(ALONE, RECIPES), *(("resumed", recipe) for recipe in MORE)]


@pytest.mark.parametrize(("way", "recipe"), CASES)
def test_one_process(way, recipe):
    assert ALONE[way](recipe) == plain(recipe)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the ranks meet and save."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[Fingerprints]:
    """Return the fingerprints of each rank; all ways and recipes run in one start of the ranks."""
    return run_ranks(ranks.on_a_rank, ranks.NUM_RANKS, folder / "ranks", folder)


@pytest.mark.parametrize(
    ("way", "recipe"),
    [(way, recipe) for way, recipes in ranks.RECIPES_OF.items() for recipe in recipes],
)
def test_ranks(way, recipe, results):
    on_each_rank = []
    for result in results:
        if (way, recipe) in result:
            on_each_rank.append(result[way, recipe])
    assert on_each_rank == [on_one_rank(recipe)] * ranks.WAYS[way]


@pytest.mark.parametrize("recipe", ranks.BY_CALLER)
def test_shards_of_the_caller(recipe, results):
    for result in results[:2]:
        assert result["by_caller", recipe] == ranks.by_caller(recipe)


@pytest.mark.parametrize("recipe", ranks.SAVED)
@pytest.mark.usefixtures("results")
def test_resumed_on_one_rank(recipe, folder):
    assert ranks.resumed_on_one(recipe, folder) == on_one_rank(recipe)
