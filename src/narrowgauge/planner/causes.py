"""What can keep twice the chips from halving the time: one table, read by every answer about scaling.

A cause is known by how it grows with the number of chips, which three measured sizes can tell, and by the measurement that shows
it alone, which one step of two sizes can tell. The group is that of :mod:`~narrowgauge.planner.attribution`, where run folders
were measured, and of :mod:`~narrowgauge.planner.step_time`, where a step is modelled.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason for time that more chips do not divide.

    Args:
        name: what it is called.
        shape: how its time depends on the number of chips, at the same batch: a key of the scaling's shapes; ``divided`` of
            what more chips do not make worse by themselves, so that times alone never show it.
        group: of a measured step, in which it is found.
        why: what happens.
        measure: what would show it alone.
        remedy: what helps.
    """

    name: str
    shape: str
    group: str
    why: str
    measure: str
    remedy: str


CAUSES: tuple[Cause, ...] = (
    Cause(
        "communication", "constant", "sending",
        "each chip sends the same bytes of gradients and weights, however many chips there are, and computes less beside them",
        "communication_seconds less wait_seconds of a run folder at both sizes",
        "overlap it with backward, shard within a node only (HSDP), a narrower reduction, larger batches",
    ),
    Cause(
        "latency of collectives", "logarithmic", "sending",
        "a message passes log2 N hops of a tree, or N of a ring, however short it is",
        "the time of an all-reduce of four bytes at both sizes",
        "fewer and larger collectives, trees, reductions within nodes first",
    ),
    Cause(
        "synchronization", "logarithmic", "waiting",
        "every collective waits for its last chip, and the slowest of many is slower than that of few",
        "wait_seconds of a run folder, and its table of ranks",
        "find the late rank; equal lengths of sequences; no other programs on the hosts",
    ),
    Cause(
        "pipeline bubble", "constant", "bubble",
        "with more replicas of the same batch each has fewer micro-batches to fill its stages with",
        "the idle time of the first stage in a trace of one step, or a step with twice the micro-batches",
        "fewer stages, interleaved ones, smaller micro-batches, larger batches",
    ),
    Cause(
        "smaller matmuls", "constant", "computing",
        "each chip's part of the batch, or of a matrix, gets too small to fill it",
        "one chip alone with the micro-batch of each size (narrowgauge profile)",
        "larger batches, fewer tensor ranks, fewer but larger micro-batches",
    ),
    Cause(
        "work that every rank repeats", "constant", "computing",
        "an optimizer step, a norm or a cast of weights that is not sharded takes as long on every chip",
        "the optimizer's time in a trace of one step",
        "shard the states (ZeRO-1 or more)",
    ),
    Cause(
        "data", "constant", "outside",
        "readers of text or a shared file system deliver the same tokens a second to any number of chips",
        "a run on random tokens from memory",
        "tokenize before the run, more readers, data on local disks",
    ),
    Cause(
        "checkpoints, evaluations and starts", "constant", "outside",
        "they stop all chips for as long as before",
        "wall_seconds less seconds in summary.json",
        "asynchronous and sharded checkpoints, fewer evaluations",
    ),
    Cause(
        "shared links", "linear", "sending",
        "the bytes of all chips together pass one switch, or one file system, that does not grow with them",
        "bytes over seconds of an all-reduce of 1 GB, at both sizes",
        "racks with full bandwidth between them, shards within a rack, a narrower reduction",
    ),
    Cause(
        "numerics", "divided", "void",
        "an overflow, a NaN or a spike makes the work of a step void: its update is not applied, and its tokens teach nothing",
        "skipped and spike of steps.jsonl",
        "narrowgauge diagnose RUN names the cause; compute bfloat16 needs no loss scale",
    ),
    Cause(
        "faults", "divided", "undone",
        "a rollback throws away the steps since a checkpoint, on all chips at once",
        "rollback in events.jsonl",
        "narrowgauge diagnose RUN names the cause; more frequent checkpoints undo fewer steps",
    ),
    Cause(
        "failures", "linear", "outside",
        "twice the chips fail twice as often, and all of them repeat the steps since the last checkpoint",
        "resumed steps in events.jsonl",
        "checkpoints every sqrt(2 × seconds of a checkpoint × seconds between failures)",
    ),
)  # fmt: skip
"""What can be behind time that does not shrink, the usual ones first."""


def causes_of(*groups: str) -> tuple[Cause, ...]:
    """The causes that are found in groups of a measured step.

    Args:
        groups: such as ``"waiting"``.
    Returns:
        Rows of :data:`CAUSES`.
    Example:
        >>> [cause.name for cause in causes_of("waiting")]
        ['synchronization']
    """
    return tuple(cause for cause in CAUSES if cause.group in groups)
