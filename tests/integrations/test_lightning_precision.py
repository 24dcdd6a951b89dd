"""A recipe in Lightning's Trainer computes what the trainer here computes, bit for bit, and does each thing once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip(
    "lightning.pytorch", reason="narrowgauge[lightning] is not installed: ./dev test integrations installs it"
)

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler

import narrowgauge as ng
from integrations.lightning_runs import LitReference, fit, loader, plugin_of, same, stored, trainer_of
from integrations.own_trainer import reference
from narrowgauge.distributed.ranks import Ranks
from narrowgauge.integrations.lightning import precision
from narrowgauge.integrations.lightning.precision import MicroBatchSums, NarrowgaugePrecision, RankSums
from narrowgauge.spec.notation import parse, parse_table
from narrowgauge.spec.sums import REDUCTIONS

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*num_workers.*"),
    pytest.mark.filterwarnings("ignore:.*treespec.*"),
]

# One for each thing a plugin does beside others: delayed scales, stochastic casts, autocast with a scaled loss, pairs, factors.
RECIPES = ["float8-delayed/compact", "int8-row/states8", "float16-mixed", "bfloat16/collage-plus", "unit/word"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_trainer_computes_what_ours_computes(recipe: str) -> None:
    run = reference(recipe, 4)
    module, trainer = fit(run)
    assert module.losses == run.losses
    assert same(module.model.state_dict(), run.state) and same(stored(trainer, module), run.stored)


OPTIMIZERS = {
    "AdamW": lambda m: ng.AdamW(m.parameters(), lr=1e-3, max_grad_norm=1.0, audit_every=2),
    "Muon": lambda m: ng.Muon(m.parameters(), lr=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_ones_own_starts_from_the_float32_weights(name: str) -> None:
    run = reference("bfloat16/split", 4)
    module, trainer = fit(run, OPTIMIZERS[name], steps=1)
    optimizer = trainer.optimizers[0]
    assert {group["storage"] for group in optimizer.param_groups} == {"split"}
    model = run.model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ng.prepare(model, "bfloat16/split")
    beside = OPTIMIZERS[name](model)
    beside.param_groups[0]["storage"] = "split"
    beside.rows["split"] = ng.spec.STORAGES["split"]
    beside.adopt({p: before[n] for n, p in model.named_parameters()})
    beside.param_groups[0]["lr"] = run.rates[0]
    run.loss(model, run.batches[0]).backward()
    beside.step()
    assert all(
        torch.equal(beside.stored(p), q)
        for p, q in zip(model.parameters(), stored(trainer, module).values(), strict=True)
    )


@pytest.mark.parametrize(
    ("recipe", "make"),
    [
        ("float8-delayed/compact", None),
        ("bfloat16/collage-plus", OPTIMIZERS["AdamW"]),
        ("float16/word", OPTIMIZERS["AdamW"]),
    ],
    ids=["scales-of-no-optimizer", "pairs-of-ones-own", "scaled-loss-of-ones-own"],
)
def test_a_resumed_fit_goes_on_with_the_same_bits(recipe: str, make: Any, tmp_path: Path) -> None:
    run = reference(recipe, 4)
    whole, trainer = fit(run, make)
    first, stopped = fit(run, make, steps=2)
    stopped.save_checkpoint(tmp_path / "two.ckpt")
    rest, resumed = fit(run, make, resume=tmp_path / "two.ckpt")
    assert first.losses + rest.losses == whole.losses
    assert same(stored(trainer, whole), stored(resumed, rest))
    audits = [{n: r.edq for n, r in ng.audit(t.optimizers[0]).items()} for t in (trainer, resumed)]
    assert audits[0] == audits[1] and audits[0]


def test_a_checkpoint_of_micro_batches_resumes_with_the_same_random_bits(tmp_path: Path) -> None:
    run = reference("int8-row/word", 4, gradient_accumulation_steps=2, accumulation_dtype="bfloat16-stochastic")
    halves = {"accumulate_grad_batches": 2}
    _, stopped = fit(run, plugin=plugin_of(run, accumulation_dtype="bfloat16-stochastic"), steps=2, **halves)
    stopped.save_checkpoint(tmp_path / "two.ckpt")
    plugin = plugin_of(run, accumulation_dtype="bfloat16-stochastic")
    rest, _ = fit(run, plugin=plugin, resume=tmp_path / "two.ckpt", **halves)
    assert same(rest.model.state_dict(), run.state)


# ── clipping ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_trainers_norm_is_clipped_once_and_by_the_kernel() -> None:
    run = reference("float16/word", 4, max_grad_norm=0.25)
    settings = {key: value for key, value in run.prepare_settings.items() if key != "max_grad_norm"}
    module, trainer = fit(run, plugin=NarrowgaugePrecision(run.recipe, **settings), gradient_clip_val=0.25)
    assert max(run.grad_norms) > 0.25
    assert module.losses == run.losses and same(stored(trainer, module), run.stored)
    assert trainer.optimizers[0].max_grad_norm is None  # only while it steps


def test_what_is_said_twice_in_the_same_words_is_done_once() -> None:
    run = reference("bfloat16/word", 4, max_grad_norm=0.25)
    module, _ = fit(run, gradient_clip_val=0.25)
    assert module.losses == run.losses


@pytest.mark.parametrize(
    "options", [{"gradient_clip_val": 0.5}, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}]
)
def test_two_clippings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ng.errors.RecipeError, match=r"clips gradients to max_grad_norm = 1\.0 itself"):
        fit(reference("bfloat16/word", 4), steps=1, **options)


def test_values_are_clipped_once_where_the_loss_is_scaled() -> None:
    run, found = reference("float16/word", 4, max_grad_norm=0.25), []

    class Watching(LitReference):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            scale = float(optimizer.loss_scaler.scale_tensor)
            found.extend(float(p.grad.abs().max()) / scale for p in self.parameters() if p.grad is not None)

    plugin = NarrowgaugePrecision("float16/word", lr=3e-3)
    fit(run, steps=2, plugin=plugin, module=Watching(run), gradient_clip_val=2**-8, gradient_clip_algorithm="value")
    assert max(found) == 2**-8


# ── loss scaling and manual optimization ────────────────────────────────────────────────────────────────────────────────


def test_an_overflow_skips_the_step_and_lowers_the_scale_once() -> None:
    run = reference("float16/word", 4, max_grad_norm=0.25)
    scaler = ng.LossScaler(2.0**22, hysteresis=1)
    module, trainer = fit(run, plugin=plugin_of(run, loss_scaler=scaler))
    optimizer = trainer.optimizers[0]
    assert 0 < optimizer.num_skipped < 4
    assert float(scaler.scale_tensor) == 2.0 ** (22 - optimizer.num_skipped)
    assert len(module.losses) == 4


class Manual(LitReference):
    """Two micro-batches a step, by hand, and clipping by hand."""

    def __init__(self, run: Any, make: Any = None, clip: float | None = None) -> None:
        super().__init__(run, make)
        self.automatic_optimization, self.clip = False, clip

    def training_step(self, batch: torch.Tensor, index: int) -> None:
        optimizer, tokens = self.optimizers(), self.run.batches[self.global_step]
        optimizer.zero_grad()
        for part in tokens.chunk(2):
            self.manual_backward(self.run.loss(self.model, part))
        if self.clip:
            self.clip_gradients(optimizer, gradient_clip_val=self.clip, gradient_clip_algorithm="norm")
        optimizer.step()


def test_manual_optimization_is_the_same_arithmetic() -> None:
    # Autograd sums float32 gradients in both.
    run = reference("bfloat16-mixed", 3, gradient_accumulation_steps=2, max_grad_norm=0.25)
    plugin = plugin_of(run, max_grad_norm=None)
    module, _ = fit(run, plugin=plugin, module=Manual(run, clip=0.25))
    assert same(module.model.state_dict(), run.state)
    with pytest.raises(ng.errors.RecipeError, match="accumulation_dtype='kahan' was requested for manual optimization"):
        fit(run, plugin=plugin_of(run, accumulation_dtype="kahan"), module=Manual(run))


class Two(Manual):
    """Two optimizers, each of half the model."""

    def configure_optimizers(self) -> Any:
        body, head = self.model.model.parameters(), self.model.lm_head.parameters()
        return ng.AdamW(body, lr=1e-3), ng.SGD(head, lr=1e-2)

    def on_train_batch_start(self, *_: Any) -> None:
        pass

    def training_step(self, batch: torch.Tensor, index: int) -> None:
        loss = self.run.loss(self.model, self.run.batches[index])
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        self.losses.append(float(loss))


def test_several_optimizers_share_a_model() -> None:
    run = reference("bfloat16/word", 4)
    module, trainer = fit(run, module=Two(run))
    assert module.losses[-1] < module.losses[0]
    assert len(trainer.optimizers) == 2 and all(o.num_steps(o.param_groups[0]["params"][0]) for o in trainer.optimizers)


def test_several_optimizers_of_a_scaled_loss_are_refused() -> None:
    run = reference("float16-mixed", 4)

    class Wide(Two):
        def configure_optimizers(self) -> Any:
            halves = self.model.model.parameters(), self.model.lm_head.parameters()
            return tuple(ng.AdamW(half, storage="float32") for half in halves)

    with pytest.raises(ng.errors.RecipeError, match="2 optimizers were given, and the loss"):
        fit(run, module=Wide(run))


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("recipe", "make", "says"),
    [
        ("bfloat16/word", lambda m: torch.optim.AdamW(m.parameters()), "was given torch.optim.adamw.AdamW"),
        ("float16-mixed", lambda m: torch.optim.AdamW(m.parameters()), "unscales no loss"),
        ("bfloat16/word", lambda m: ng.AdamW(m.parameters(), storage="compact"), "built with storage 'compact'"),
        ("unit/word", lambda m: ng.AdamW(m.parameters()), "by a factor"),
    ],
)
def test_an_optimizer_that_cannot_do_what_the_recipe_says_is_refused(recipe: str, make: Any, says: str) -> None:
    with pytest.raises(ng.errors.RecipeError, match=says):
        fit(reference(recipe, 4), make, steps=1)


def half_of_its_own(storage: str) -> Any:
    """An optimizer of two groups, of which one names a storage."""
    return lambda m: ng.AdamW(
        [{"params": m.model.model.parameters()}, {"params": m.model.lm_head.parameters(), "storage": storage}]
    )


@pytest.mark.parametrize(
    ("recipe", "named"),
    [
        ("bfloat16/exact", "word"), ("bfloat16/word", "exact"), ("bfloat16/naive", "word"), ("float16/word", "split"),
        ("bfloat16-mixed", "word"), ("float32", "word"), ("bfloat16/word", "float32"), ("float16/split", "word"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("make", [lambda s: lambda m: ng.AdamW(m.parameters(), storage=s), half_of_its_own])
def test_a_storage_that_is_named_runs_or_nothing_does(recipe: str, named: str, make: Any) -> None:
    """``word`` is what an optimizer stores by itself; named, it is asked for like any other."""
    with pytest.raises(
        ng.errors.RecipeError, match=f"built with storage '{named}', and .* stores '.*Leave storage out"
    ):
        fit(untied(recipe), make(named), steps=1)


@pytest.mark.parametrize("recipe", ["bfloat16/exact", "bfloat16/word", "bfloat16-mixed", "float16/master"])
@pytest.mark.parametrize("make", [lambda s: lambda m: ng.AdamW(m.parameters(), storage=s), half_of_its_own])
def test_the_recipes_own_storage_may_be_named(recipe: str, make: Any) -> None:
    name = parse(recipe).storage.name
    _, trainer = fit(untied(recipe), make(name), steps=1)
    assert {group["storage"] for group in trainer.optimizers[0].param_groups} == {name}


def untied(recipe: str) -> Any:
    return reference(recipe, 4, shape={"tie_word_embeddings": False})


def test_a_storage_beside_the_plugins_recipe_is_refused() -> None:
    with pytest.raises(ng.errors.RecipeError, match=r"storage 'word' was requested beside recipe 'bfloat16/exact'"):
        fit(reference("bfloat16/exact", 4), plugin=NarrowgaugePrecision("bfloat16/exact", storage="word"), steps=1)


def test_a_group_that_a_recipe_splits_is_told_to_take_the_recipes_groups() -> None:
    recipe = parse_table({"recipe": "bfloat16/word", "keep": ["lm_head"]})
    with pytest.raises(ng.errors.RecipeError, match=r"stores as 'float32' and 'word'\. Take the groups of the recipe"):
        fit(untied("bfloat16/word"), lambda m: ng.AdamW(m.parameters()), plugin=NarrowgaugePrecision(recipe), steps=1)


def test_after_its_fit_a_model_is_anyones() -> None:
    """What a recipe expects of an optimizer ends with the optimizer that it got."""
    module, _ = fit(reference("bfloat16/exact", 4), steps=1)
    assert ng.AdamW(module.parameters()).param_groups[0]["storage"] == "word"
    assert ng.AdamW(module.parameters(), storage="split").param_groups[0]["storage"] == "split"


def test_an_optimizer_of_torch_steps_float32_weights() -> None:
    run = reference("bfloat16-mixed", 4)
    module, _ = fit(run, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3))
    assert module.losses[-1] < module.losses[0] and module.losses[0] == run.losses[0]


def test_phases_of_a_training_without_a_known_end_are_refused(tmp_path: Path) -> None:
    run, plugin = reference("bfloat16/word", 4), NarrowgaugePrecision(changing(tmp_path))
    with pytest.raises(ng.errors.RecipeError, match=r"has no end\. Give the Trainer max_steps or max_epochs"):
        fit(run, steps=-1, plugin=plugin)
    with pytest.raises(ng.errors.RecipeError, match="is manual, so that steps are yours to count"):
        fit(run, plugin=plugin, module=Manual(run))


def test_sums_that_are_made_elsewhere_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = reference("bfloat16/word/reproducible", 4)
    with pytest.raises(ng.errors.RecipeError, match=r"reduction 'reproducible' .* accumulate_grad_batches = 2"):
        fit(run, callbacks=[GradientAccumulationScheduler({0: 2})])
    sums = MicroBatchSums("kahan", 0)
    sums.index = 1
    sums.free()
    assert sums.index == 0
    monkeypatch.setattr(precision, "all_ranks", lambda: Ranks(0, 2))
    MicroBatchSums(None, 0).take_in([])
    with pytest.raises(ng.errors.RecipeError, match="accumulation_dtype='kahan' was requested on several ranks"):
        sums.take_in([])


def test_a_resume_of_compressed_gradients_under_ddp_is_said_to_have_other_bits() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        sums = RankSums(REDUCTIONS["compressed8"], 0)
        sums.install(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4)), SimpleNamespace(), 1)
        with pytest.warns(UserWarning, match="'compressed8' is resumed under DDP"):
            sums.steps = 2
        sums.close()
    finally:
        torch.distributed.destroy_process_group()


class Begun(LitReference):
    """Notes the stored weights that a fit begins with."""

    begun: dict[str, torch.Tensor]

    def on_train_start(self) -> None:
        self.begun = stored(self.trainer, self)


def test_a_second_fit_begins_with_the_stored_weights_of_the_first_or_says_that_they_are_gone(
    recwarn: pytest.WarningsRecorder,
) -> None:
    run = reference("bfloat16/split", 4)
    plugin, module = plugin_of(run), Begun(run)
    _, first = fit(run, plugin=plugin, module=module, steps=1)
    held = stored(first, module)
    trainer_of(plugin, 1).validate(module, loader(1), verbose=False)
    fit(run, plugin=plugin, module=module, steps=1)
    assert same(module.begun, held) and not any("are gone" in str(each.message) for each in recwarn)
    with pytest.warns(UserWarning, match="fitted from its bfloat16 weights: .* are gone"):
        fit(run, module=module, steps=1)


def test_a_second_recipe_is_refused() -> None:
    run = reference("bfloat16/word", 4)
    module, _ = fit(run, steps=1)
    with pytest.raises(ng.errors.RecipeError, match="was converted for 'bfloat16/word' before"):
        trainer_of(NarrowgaugePrecision("bfloat16/compact"), 1).fit(module, loader())


# ── recipes that change ─────────────────────────────────────────────────────────────────────────────────────────────────


def changing(folder: Path) -> str:
    """A recipe that begins in bfloat16, goes on with delayed float8 and is evaluated in float32."""
    path = folder / "changing.toml"
    path.write_text(
        'recipe = "float8-delayed/word"\nevaluation = "float32"\n[[phase]]\nuntil = 0.3\ncompute = "bfloat16"\n'
    )
    return str(path)


def test_the_compute_changes_where_ours_does_and_after_a_resume(tmp_path: Path) -> None:
    run, shown = reference(changing(tmp_path), 6), []

    class Shown(LitReference):
        def validation_step(self, batch: torch.Tensor, index: int) -> None:
            shown.append(float(run.loss(self.model, run.batches[0])))

    module = Shown(run)
    trainer_of(plugin_of(run), 6, val_check_interval=2).fit(module, loader(), loader(1))
    assert module.losses == run.losses and same(module.model.state_dict(), run.state)
    found = []
    for compute in ("float32", "float8-delayed"):
        ng.matmul.linears_of(module).set_compute(lambda name, row=ng.spec.COMPUTES[compute]: row)
        found.append(float(run.loss(module.model, run.batches[0])))
    assert shown[-1] == found[0] != found[1]
    _, stopped = fit(run, callbacks=[Until(3)])
    stopped.save_checkpoint(tmp_path / "three.ckpt")
    rest, _ = fit(run, resume=tmp_path / "three.ckpt")
    assert rest.losses == run.losses[3:] and same(rest.model.state_dict(), run.state)


class Until(pl.Callback):
    """Stops a fit in the middle, with the same end in sight."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop |= trainer.global_step >= self.step
