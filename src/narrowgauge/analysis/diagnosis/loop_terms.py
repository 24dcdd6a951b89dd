"""Advice in the terms of the loop at hand: ``narrowgauge train`` has flags, a loop of one's own calls, another's log columns.

The texts of causes, reasons and signs are templates. A name in braces that :data:`TERMS` holds is said in the way of the loop;
other names (a module, a storage) are left for whoever knows them.
"""

from __future__ import annotations

from typing import NamedTuple

from narrowgauge.runs.record import Run

LOOPS: dict[str, str] = {
    "trainer": "a run of narrowgauge train",
    "recorder": "a loop of one's own with ng.RunRecorder",
    "log": "the log of another framework",
}
"""How a record may have come about."""


class Term(NamedTuple):
    """What one thing is called in each loop of :data:`LOOPS`; empty where there is no such thing, or nothing to do."""

    trainer: str
    recorder: str
    log: str


_OWN_OPTIMIZER = "an optimizer of Narrowgauge's"
_OWN_GAUGES = "ng.RunRecorder(…, gauges_every=20)"
_RANKS = "a comparison of what the ranks hold"
_KEEP_WIDE = "keep '{module}' in float32 (keep = [\"{module}\"] in a recipe file)"
_MAY_LEAVE_OUT = "the loop may leave"
_SAME = "the same data, batch size and sequence length"

TERMS: dict[str, Term] = {
    # Settings.
    "lr": Term("--lr", "the learning rate", "the learning rate"),
    "warmup": Term("--warmup-steps", "warm-up", "warm-up"),
    "eps": Term("--eps", "epsilon", "epsilon"),
    "seed": Term("--seed", "seed", "seed"),
    "same_data": Term("the same --data, --batch-size and --sequence-length", _SAME, _SAME),
    # Things to do.
    "use_bfloat16": Term("take compute 'bfloat16'", "prepare it with compute 'bfloat16'", "train in bfloat16"),
    "keep_wide": Term(_KEEP_WIDE, _KEEP_WIDE, "keep the layer in which it begins in float32"),
    "sum_wide": Term(
        "--accumulation-dtype float32, or kahan for the same bytes",
        "Sum them in float32, as ng.GradientAccumulator does",
        "Sum them in float32",
    ),
    "leave_out": Term("--on-spike skip leaves", _MAY_LEAVE_OUT, _MAY_LEAVE_OUT),
    "refuse_changes": Term("; resume without --accept-changes", "", ""),
    # What records something.
    "gauges": Term("--gauges-every 20", _OWN_GAUGES, f"{_OWN_GAUGES} in the loop"),
    "audit": Term("--audit-every 10", _OWN_OPTIMIZER, _OWN_OPTIMIZER),
    "verification": Term("--verify-every 100", _RANKS, _RANKS),
    "evaluations": Term("--eval-every 100", "recorder.evaluate(loss)", "a column val_loss"),
    "batches": Term(
        "a run of narrowgauge train of this version, which records batch_crc",
        "recorder.step(loss, batch=tokens)",
        "recorder.step(loss, batch=tokens) of ng.RunRecorder",
    ),
    **{
        name: Term(
            f"a run of narrowgauge train of this version, which records {name}",
            f"recorder.step(loss, {name}=…)",
            f"a column {name}",
        )
        for name in ("unigram_loss", "embedding_grad_norm", "data_seconds", "cpu_seconds")
    },
}
"""The terms by their name in a template."""


class _Terms(dict[str, str]):
    """Terms of one loop; a name that is none stays in its braces."""

    def __missing__(self, name: str) -> str:
        return f"{{{name}}}"


_OF_LOOP = {loop: _Terms({name: getattr(term, loop) for name, term in TERMS.items()}) for loop in LOOPS}


def loop_of(run: Run) -> str:
    """How a run's record came about, a key of :data:`LOOPS`."""
    return "log" if run.is_foreign else "recorder" if "recorder" in run.run else "trainer"


def in_terms_of(loop: str, template: str) -> str:
    """A template with the terms of a loop of :data:`LOOPS`; a sentence begins with a capital letter whatever term it begins with.

    Example:
        >>> in_terms_of("recorder", "Lower {lr} in '{module}'."), in_terms_of("log", "{use_bfloat16}, or raise {eps}.")
        ("Lower the learning rate in '{module}'.", 'Train in bfloat16, or raise epsilon.')
    """
    said = template.format_map(_OF_LOOP[loop])
    return said[:1].upper() + said[1:] if said.endswith(".") else said
