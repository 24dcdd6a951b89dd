"""The public checks of the optimizer: what each storage loses, and what it must not."""

import pytest
import torch

import expectations
import narrowgauge as ng
from narrowgauge.optim import UpdateLossWarning
from narrowgauge.spec.storages import STORAGES
from optim.pairs import parameters, step_along
from optim.scenarios import OPTIMIZERS, arrived, stall
from tensors import gaussian, parameters_of

# Of the stored displacement, relative; no storage of weights without a tail can hold more, see
# below.
LIMITS = {
    name: row.stall for name, row in expectations.STORAGES.items() if isinstance(row.stall, float)
}
AT_RANDOM = [name for name, row in expectations.STORAGES.items() if row.stall == "noisy"]
STALLED = [name for name, row in expectations.STORAGES.items() if row.stall == "lost"]


# Or the first optimizer of a process warns of slow matmuls.
@pytest.mark.usefixtures("native_formats")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("storage", LIMITS)
def test_stall_case_is_survived(storage):
    error, reading = stall(storage, side=256 if storage == "word" else 64)
    assert error <= LIMITS[storage]
    assert abs(reading.edq - 1) < 0.05


@pytest.mark.usefixtures("native_formats")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("storage", AT_RANDOM)
def test_stall_case_is_survived_on_average_where_weights_are_cut_at_random(storage):
    """Updates are 2^-9 of a bfloat16's spacing: hardly one in 200 is seen, and those that are
    arrive whole.
    """
    error, reading = stall(storage, side=128, seed=2)
    # Of spacings n times as wide one nth as many steps are taken, n times as long: sqrt(n) times
    # the noise.
    coarser = 2.0 ** ((7 - STORAGES[storage].weight.mantissa_bits) / 2)
    assert coarser < error < 2.0 * coarser and reading.noise > 10 * coarser
    # An audit reads a 64th of the tensor, so its error is eight times that of the whole.
    assert abs(reading.edq - 1) < 4 * reading.edq_error < 3.2 * coarser


MIXED = {"elements": (32, 32), "rows": (32, 1)}


def late_slope(storage: str, sizes: torch.Tensor | float, rule: str = "adamw") -> float:
    """Return the slope of ten late steps against those of float32."""
    options = {"lr": 1e-2, "weight_decay": 0.0, "compile": False, "low_bits": "zero"}
    if rule == "sgd":
        options |= {"lr": 1e-2 / float(torch.as_tensor(sizes).max()), "momentum": 0.9}
    pair = []
    for name in (storage, "float32"):
        weights = parameters(name, [(32, 32)], scale=0.0)
        pair.append(OPTIMIZERS[rule](weights, storage=name, audit_every=0, **options))
    (ours,), (plain,) = map(parameters_of, pair)
    generator = torch.Generator().manual_seed(0)
    for step in range(30):
        if step == 20:
            start = pair[0].stored(ours), plain.detach().double()
        gradient = (0.5 + torch.randn(32, 32, generator=generator)) * sizes
        ours.grad = gradient.to(ours.dtype)
        plain.grad = ours.grad.float()
        for optimizer in pair:
            optimizer.step()
    exact = plain.detach().double() - start[1]
    return arrived(start[0], pair[0].stored(ours), exact)


def held(storage: str) -> list[float]:
    """Return the sizes of gradients that a storage says it takes, and that their format holds."""
    least, most = STORAGES[storage].gradients
    if STORAGES[storage].visible == "float16":
        least, most = max(least, 1e-3), min(most, 1e3)
    return [size for size in (1e-10, 1e-3, 1e2, 1e6, 1e10) if 2 * least < size < most]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("storage", STORAGES)
def test_a_storage_takes_the_rules_step_wherever_it_says_so(storage):
    """A window has two ends."""
    slopes = {}
    for size in held(storage):
        slopes[size] = late_slope(storage, size)
    spread = 10.0 ** torch.arange(-6, 6).repeat(100)[:1024]
    ends = torch.tensor(STORAGES[storage].gradients)
    if STORAGES[storage].visible != "float16":
        for name, shape in MIXED.items():
            if name == "elements" and STORAGES[storage].scaled:
                continue  # `loses` says that small elements of a row are lost
            if ends[0] == 0 or storage == "word":
                count = shape[0] * shape[1]
                slopes[name] = late_slope(storage, spread[:count].view(shape))
    assert slopes
    assert {name: slope for name, slope in slopes.items() if not 0.97 < slope < 1.03} == {}


SCALED = [name for name in STORAGES if STORAGES[name].scaled]


@pytest.mark.parametrize("storage", SCALED)
def test_a_gradient_that_is_ten_thousand_times_larger_arrives_at_once(storage):
    (weight,) = parameters(storage, [(2, 256)])
    optimizer = ng.AdamW([weight], storage=storage, compile=False)
    for size in (1e-4, 1e-4, 1.0):
        step_along(optimizer, size)
    assert float(optimizer.stored(weight, "exp_avg").mean()) == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("storage", SCALED)
def test_a_glitch_costs_at_most_its_block(storage):
    """In other blocks of 256, of its row too, each bit is that of a run without it."""
    row = STORAGES[storage]
    stored = []
    for glitch in (1.0, 1e10 if row.visible != "float16" else 6e4):
        (weight,) = parameters(storage, [(2, 600)])
        optimizer = ng.AdamW([weight], lr=1e-2, storage=storage, low_bits="zero", compile=False)
        for step in range(4):
            weight.grad = gaussian(2, 600, seed=step, dtype=weight.dtype)
            if step == 1:
                weight.grad[0, 300] = glitch
            optimizer.step()
        stored.append([optimizer.stored(weight, name) for name in ("weight", *dict(row.states))])
    for plain, hit in zip(*stored, strict=True):
        is_changed = plain != hit
        assert is_changed[0, 300] and is_changed.sum() == is_changed[0, 256:512].sum()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rule", ["adam", "sgd", "lion", "muon", "galore"])
def test_every_rule_takes_its_step_at_both_ends(rule):
    slopes = {}
    for storage in ("word", "split", *(["compact"] if rule != "muon" else [])):
        for size in (1e-10, 1e6) if storage == "word" else (1e-10, 1e10):
            slopes[storage, size] = late_slope(storage, size, rule)
    assert {name: slope for name, slope in slopes.items() if not 0.97 < slope < 1.03} == {}


@pytest.mark.parametrize("storage", STALLED)
def test_storages_that_stall_warn_and_name_one_that_does_not(storage):
    fallback = STORAGES[storage].fallback
    with pytest.warns(
        UpdateLossWarning, match=rf"'weight' stores \d+% .* '{fallback}' would keep it"
    ):
        error, reading = stall(storage, side=64)
    # Float16 has room for the updates of its smallest weights.
    is_bare = storage in ("naive", "no-master")
    assert error > (0.9 if is_bare else 0.5)
    assert reading.lost_fraction > (0.99 if is_bare else 0.5)
    assert error > 4 * LIMITS[fallback]
