"""One call steps all tensors, with the bits of the definition: in C++, and in Triton, which is
interpreted here.
"""

import importlib.util
import re
import weakref
from collections.abc import Iterator
from dataclasses import astuple
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.numerics.exact_sums import exact_squares
from narrowgauge.optim.roster import Roster
from narrowgauge.optim.rules.elementwise import Rule
from narrowgauge.optim.step import kernel_proof, launch, norm_kernel, step_cpp
from narrowgauge.optim.step import step as stepping
from narrowgauge.spec.storages import STORAGES
from narrowgauge.torch_support import cpp, triton
from narrowgauge.torch_support import proof as proofs
from optim.pairs import PAIRS, RULES, everything, kernel_of, over, parameters, step_along
from optim.scenarios import REPRESENTATIVES
from tensors import assert_same_bits, gaussian, take_steps

# NumPy's, of infinities in the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CPU = torch.device("cpu")
# Nesterov's momentum is a scalar of "sgd". Matrix rules but Muon have states of their own shapes,
# and only the decay is left.
FEW_OF = ("word", "compact", "float16/split")
KERNELS = [
    (rule, storage)
    for rule, storage in PAIRS
    if STORAGES[storage].arithmetic != "float64"
    if rule not in ("nesterov", "own") and (rule != "galore" or storage in FEW_OF)
]
FEW = [("adamw", "word"), ("adam", "compact"), ("muon", "word"), ("galore", "compact")]
"""Flat and by row, elementwise and of matrices: by which a table lies."""


@pytest.fixture(scope="module", autouse=True)
def small_programs() -> Iterator[None]:
    """Let tensors have several programs. A kernel is proved once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("triton"):
            kernels = triton.load(launch.TRITON_MODULE, True)
            patch.setattr(kernels.BLOCKS, "value", 2)
            patch.setattr(launch, "BLOCKS_ON_GPU", 2)
        patch.setattr(step_cpp, "TILE", 32)
        patch.setattr(proofs, "_reasons", {})
        yield


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run steps of compiled optimizers as on a GPU."""
    pytest.importorskip("triton", reason="the kernels of a GPU are in Triton")
    monkeypatch.setattr(triton, "INTERPRET", True)


@pytest.fixture
def unproved(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let kernels be built and proved anew, and forget them."""
    monkeypatch.setattr(proofs, "_reasons", {})
    step_cpp.functions.cache_clear()
    yield
    step_cpp.functions.cache_clear()


@pytest.fixture(params=["C++", "Triton"])
def language(request: pytest.FixtureRequest) -> str:
    """Run them in the language of a CPU or of a GPU."""
    if request.param == "Triton":
        request.getfixturevalue("interpreted")
    return request.param


# The interpreter takes a hundred times as long as a compiler.
OF_EACH_KIND = []
for pair in KERNELS:
    if pair[1] in REPRESENTATIVES and step_cpp.has_kernel(*kernel_of(*pair), proofs.TRITON):
        OF_EACH_KIND.append(pair)
LAWS = [("C++", *pair) for pair in KERNELS if pair[0] in ("adamw", "muon")]
LAWS += [("C++", *pair) for pair in over(KERNELS).args[1] if ("C++", *pair) not in LAWS]
LAWS += [("Triton", *pair) for pair in over(OF_EACH_KIND).args[1]]


@pytest.mark.parametrize(("language", "rule", "storage"), LAWS, indirect=["language"])
def test_a_kernel_has_the_bits_of_the_definition(language, rule, storage):
    """Ordinary and edge values, infinities, NaNs, odd ends, float32 gradients."""
    assert kernel_proof.why_no_kernel(*kernel_of(rule, storage), CPU) == ""


def unaligned(shape: tuple[int, ...], values: Tensor) -> Tensor:
    """A copy that begins 2 (or 4) bytes after an aligned address."""
    copy = torch.empty(values.numel() + 1, dtype=values.dtype)[1:].view(shape)
    return copy.copy_(values)


def train(
    rule: str, storage: str, lengths: range, *, compiled: bool, **options: Any
) -> ng.Optimizer:
    """Steps of two groups, with unequal counts, an infinity, a NaN, odd ends and addresses, no
    elements, other strides; and vectors of any length, of which kernels read 16 bytes at once.
    """
    dtype = getattr(torch, STORAGES[storage].visible)
    shapes = [(3, 24), (6, 64), (3, 7), (9,), (0, 4), (4, 16), (6, 8)]
    shapes += [(5, 3, 2, 2), (2, 520), *((length,) for length in lengths)]
    params = []
    for k, shape in enumerate(shapes):
        values = gaussian(*shape, seed=k, dtype=dtype)
        params.append(nn.Parameter(unaligned(shape, values) if k == 5 else values))
    params[6].data = params[6].detach().t().contiguous().t()
    params[7].data = params[7].detach().to(memory_format=torch.channels_last)
    groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.02}]
    options = {**RULES[rule].options, "lr": 0.01, **options}
    optimizer = RULES[rule].make(groups, storage=storage, compile=compiled, **options)
    for step in range(5):
        for k, param in enumerate(params):
            param.grad = gradient_of(param, k, step)
        optimizer.step()
    return optimizer


def gradient_of(param: Tensor, k: int, step: int) -> Tensor | None:
    """The gradient of parameter ``k`` of :func:`train`: in the parameter's order or another, or a
    negative view.
    """
    if step == 1 and k in (0, 3):
        return None
    scale = 2.0 ** (k % 9 - 3)
    gradient = gaussian(*param.shape, seed=100 * step + k, scale=scale, dtype=param.dtype)
    if step in (2, 3) and k == 0:
        gradient[0, 3] = torch.inf if step == 2 else torch.nan
    if k == 1:
        return unaligned(tuple(param.shape), gradient)
    if k == 6 and step == 4:
        return gradient.t().contiguous().t()
    if k == 7 and step % 2:
        return gradient.to(memory_format=torch.channels_last)
    if k == 8:
        return torch._neg_view(-gradient)
    return gradient


@pytest.mark.parametrize(("rule", "storage"), FEW)
def test_steps_of_an_optimizer_are_the_same(language, rule, storage):
    """However a step runs, its audit is the definition of a sample."""
    lengths = range(14, 36, 1 if language == "C++" else 7)  # an interpreter masks each alike
    ours, theirs = (
        train(rule, storage, lengths, compiled=compiled, max_grad_norm=1.0, audit_every=2)
        for compiled in (True, False)
    )
    assert set(ours.ran_compiled().values()) == {language}
    assert set(theirs.ran_compiled().values()) == {"definition: compile=False"}
    assert ours.num_skipped == theirs.num_skipped == 2
    assert_same_bits(everything(ours), everything(theirs))
    for name, reading in ng.audit(theirs).items():
        assert astuple(ng.audit(ours)[name]) == pytest.approx(astuple(reading), nan_ok=True), name


def test_a_version_is_raised_by_a_launch():
    """A backward pass that saved the weight refuses it, as after torch's own step."""
    params = parameters("word", [(8, 8)])
    optimizer = ng.AdamW(params, storage="word", compile=True)
    loss = (params[0] * params[0]).sum()
    step_along(optimizer, 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_norm_has_the_bits_of_the_definition(dtype):
    tensors = [
        gaussian(5, 7),
        gaussian(0, 3, dtype=dtype),
        gaussian(80, 64, scale=1e3, dtype=dtype).t(),
    ]
    assert norm_kernel.sums_on(CPU)
    for value in (1.0, -torch.inf, torch.nan):
        tensors[0][2, 2] = value
        assert_same_bits({"": norm_kernel.squares_by_kernel(tensors)}, {"": exact_squares(tensors)})


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("storage", ["word", "compact"])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_step_that_a_device_skips_changes_nothing(storage, compiled):
    """A host asks before it steps."""
    params = parameters(storage, [(12, 10), (7, 9)])
    optimizer = ng.AdamW(params, storage=storage, compile=compiled, audit_every=0)
    take_steps(optimizer, range(1))
    before = everything(optimizer)
    (batch,) = Roster(optimizer).batches
    batch.prepare(optimizer.param_groups[0], torch.tensor([1.0, 1.0]))
    stepping._write(optimizer, batch)
    assert_same_bits(before, everything(optimizer))


def test_a_step_is_one_launch(monkeypatch):
    """Of a param group. One more finds the norm, whatever the number of tensors."""
    calls = []
    call = launch.KernelLaunch.call

    def counted(rows, *arguments, **constants):
        calls.append(len(rows.rows))
        call(rows, *arguments, **constants)

    monkeypatch.setattr(launch.KernelLaunch, "call", counted)
    params = parameters("word", [(64, 64)] * 9)
    optimizer = ng.AdamW(params, storage="word", compile=True, max_grad_norm=1.0)
    take_steps(optimizer, range(2))
    assert calls.count(9) == 4  # besides, the first step proves its kernels


@pytest.mark.usefixtures("unproved")
def test_where_no_library_is_the_definition_steps(monkeypatch, tmp_path):
    cpp.build.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path))  # a library that is there is loaded
    left_alone = ng.SGD(parameters("word", [(80, 80)] * 3), storage="word")
    with pytest.warns(UserWarning, match=r"no C\+\+ compiler"):
        take_steps(left_alone, range(2))
    definition = ng.SGD(parameters("word", [(80, 80)] * 3), storage="word", compile=False)
    take_steps(definition, range(2))
    assert_same_bits(everything(left_alone), everything(definition))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_step_keeps_no_gradient_and_no_state(max_grad_norm):
    """The next forward pass needs their memory. A parameter may be replaced.

    Without a norm, ``found_inf`` asks which were finite.
    """
    params = parameters("word", [(4, 8)])
    optimizer = ng.AdamW(params, storage="word", compile=True, max_grad_norm=max_grad_norm)
    optimizer.found_inf = torch.zeros(())
    step_along(optimizer, 1.0)
    gradient = weakref.ref(params[0].grad.untyped_storage())
    optimizer.zero_grad()
    assert gradient() is None
    state = weakref.ref(optimizer.state.pop(params[0]))
    assert state() is None


ODD = Rule(
    "odd",
    ("average",),
    ("lr",),
    lambda group, step: (group["lr"],),
    lambda w, g, m, s: (s["lr"] * (g - m) / (w * w + 1.0), m + (g - m) * 0.25),
)
# Under 2^-24 the nearest float16 may be half an ulp of an odd weight. No proof draws that.
HALF_AN_ULP = torch.full((80, 80), 2.0**-13 * (1 + 2.0**-10)).half()
BESIDE = {
    "a rule of the user's own": (
        "torch.compile",
        "definition: N elements, and no kernel is written for the rule or storage",
        [gaussian(4, 6).bfloat16(), gaussian(30).bfloat16()],
        partial(ng.Optimizer, rule=ODD, defaults={"lr": 0.1}, storage="word"),
    ),
    "a second part of Collage that belongs to its weight": (
        "C++",
        "C++",
        [HALF_AN_ULP],
        partial(ng.AdamW, lr=2.0**-24, storage="float16/collage-light", low_bits="zero"),
    ),
}
"""How it steps compiled and by default, weights, and an optimizer."""


@pytest.mark.parametrize("name", BESIDE)
def test_a_compiled_step_has_the_bits_of_its_definition(name):
    way, default, values, make = BESIDE[name]
    results = []
    for compiled, expected in ((True, way), (None, default), (False, "definition: compile=False")):
        optimizer = make([nn.Parameter(value.clone()) for value in values], compile=compiled)
        take_steps(optimizer, range(3))
        results.append(everything(optimizer))
        how = {re.sub(r"\d+", "N", way) for way in optimizer.ran_compiled().values()}
        assert how == {expected}
        assert_same_bits(results[0], results[-1])


FAULTS = {
    "a NaN keeps its payload": ("where(x != x, 0x7FC00000, int_of(x))", "int_of(x)", "exact"),
    "a second moment is not held": ("held(code, int_of(x), 1 << DROP)", "code", "word"),
    "the sign of a NaN": (
        "larger(smaller(inside, last), -last)",
        "smaller(larger(inside, -last), last)",
        "compact",
    ),
    "the hash of random bits": ("h ^ shifted_down(h, 15)", "h ^ (h >> 15)", "word"),
    "a low part that belongs": (
        "is_own ? nearest : Low::toward_zero(rest)",
        "nearest",
        "kahan",
    ),
    "the sign of a zero": (
        "V::value(((seen + tail) ^ seen) < 0 ? seen : seen + tail)",
        "V::value(seen + tail)",
        "exact",
    ),
    "an infinite weight": ("IS_SAFE ? finite_or_zero(x.weight) : x.weight", "x.weight", "word"),
    "a frozen weight": ("where(old < INFINITE, next, old)", "next", "exact"),
    "the least scale of a block": ("larger(exponent, -112)", "larger(exponent, 0)", "compact"),
    "a root of another scale": (
        "return root(next.second)",
        "return 2.0f * root(next.second)",
        "word",
    ),
    "a product of Collage that is not rounded": (
        "narrow(old * (1.0f - share))",
        "(old * (1.0f - share))",
        "collage-light",
    ),
    "a sum of Collage that is not rounded": (
        "narrow<DROP>(x.low + error)",
        "x.low + error",
        "float16/collage-plus",
    ),
    "a last bit of a division": (
        "return m / (root_v * s.inverse_root_correction2 + s.eps) *",
        "return m * (1.0f / (root_v * s.inverse_root_correction2 + s.eps)) *",
        "compact",
    ),
}


@pytest.mark.usefixtures("unproved")
@pytest.mark.parametrize("fault", FAULTS)
def test_other_bits_are_noticed(monkeypatch, fault):
    """Also a last bit, which shows in one of a thousand weights of 16 bits."""
    right, wrong, storage = FAULTS[fault]
    text = step_cpp.joined_files()
    assert right in text
    monkeypatch.setattr(step_cpp, "joined_files", lambda: text.replace(right, wrong))
    with pytest.warns(UserWarning, match=r"differ in .*\[\d+, \d+\] is .* of \d+ differ"):
        reason = kernel_proof.why_no_kernel(*kernel_of("adamw", storage), CPU)
    assert "the definition's" in reason and "compil" not in reason


@pytest.mark.usefixtures("unproved")
def test_an_error_that_passes_is_not_remembered(monkeypatch):
    """Such as a full disk."""
    kernel = kernel_of("adamw", "exact")

    def full(*args):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(step_cpp, "build", full)
        with pytest.warns(UserWarning, match="no space left"):
            assert "no space left" in kernel_proof.why_no_kernel(*kernel, CPU)
    assert kernel_proof.why_no_kernel(*kernel, CPU) == ""
