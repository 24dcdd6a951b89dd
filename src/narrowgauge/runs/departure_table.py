"""The table of departures: what a piece of a step that was computed again and departs is called, and the words for it.

:mod:`narrowgauge.recompute` fills the words with what it measured; what it writes down names its row of this table, which the
diagnosis reads without PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass

PIECES: dict[str, str] = {
    "loss": "the loss: which tokens are predicted, and what they count",
    "forward": "the forward pass: what each output depends on",
    "gradient": "the gradient: its way back through the model, and until the update",
    "clip": "the factor of clipping",
    "update": "states and weights after the optimizer's step",
    "between": "weights and states between two steps",
    "data": "the batches",
    "evaluation": "passes without gradients",
}
"""What is computed again, in the order of a step."""


@dataclass(frozen=True)
class Departure:
    """One way in which a piece departs, with the alternative under which it agrees again.

    Args:
        name: the id that results carry.
        pieces: that may depart so.
        severity: a key of ``narrowgauge.runs.finding.SEVERITIES``.
        message, advice: templates, filled with the result's values, ``where`` and ``difference``.
    """

    name: str
    pieces: tuple[str, ...]
    severity: str
    message: str
    advice: str


NORMS: dict[str, str] = {
    "sum-of-norms": "the sum of the parameters' norms",
    "largest": "that of the largest parameter",
    "matrices": "that of the matrices",
    "vectors": "that of the vectors",
    "without-largest": "that of all but the largest parameter",
    "squares": "the squared norm",
    "mean": "the root mean square",
    "first": "that of the first parameter",
    "last": "that of the last parameter",
    "scaled": "that of gradients before their scale is taken off",
    "parts": "that of each of several parts",
    "shard": "that of this rank's shard",
}
"""Norms that are taken by mistake, each in words."""
_LOOP = "Look at what the loop does between backward() and optimizer.step()."
_STEP = "Look at the optimizer's step and at what wraps it."
_SCHEDULE = 'Call scheduler.step() once after optimizer.step(); ng.task(schedule="own") if its length is counted so.'
DEPARTURES: dict[str, Departure] = {
    row.name: row
    for row in (
        # loss
        Departure(
            "labels-shifted", ("loss",), "error",
            "each position predicts the token {shift} places later, where the next is 1 place later.",
            "Shift the labels once: logits[:, :-1] with tokens[:, 1:]; ng.task(loss=\"own\") if other tokens are meant.",
        ),
        Departure(
            "labels-other", ("loss",), "error", "{share:.1%} of the counted positions do not predict the next token.",
            "Look at how labels are made; ng.task(loss=\"own\") if they are meant.",
        ),
        Departure(
            "ignored-counted", ("loss",), "error",
            "{share:.1%} of the counted positions predict token {token}, which is ignored.",
            "Set these labels to -100, or give cross_entropy ignore_index.",
        ),
        Departure(
            "padding-counted", ("loss",), "warning",
            "{share:.1%} of the counted positions predict padding: tokens that the attention mask leaves out.",
            "Set these labels to -100; ng.task(loss=\"own\") if they are meant.",
        ),
        Departure(
            "label-smoothing", ("loss",), "note", "targets are smoothed by {value:.3g}.",
            "Remove label_smoothing, or declare the loss as its own.",
        ),
        Departure(
            "label-smoothing-other", ("loss",), "error", "targets are smoothed by {value:.3g}, and {wanted:.3g} was declared.",
            "Look at what computes the loss: the model itself may do so without the trainer's smoothing.",
        ),
        Departure(
            "z-loss", ("loss",), "note", "the loss looks like one with a penalty of {value:.3g} × log² Z.",
            "Remove it, or declare the loss as its own.",
        ),
        Departure(
            "token-ignored", ("loss",), "note",
            "token {token} is never predicted: all positions that it follows do not count ({share:.1%}), also inside of rows.",
            "If it ends a text and pads it, it is never learnt: mask padding alone, or declare it: ng.task(ignore=…).",
        ),
        Departure("loss-zero", ("loss",), "error", "no position counts: the logits have no gradient.", "Look at the labels."),
        Departure("loss-sign", ("loss",), "error", "the loss is maximized: its sign is wrong.",
            "Look for a minus; ng.task(loss=\"own\") if it is meant.",
        ),
        Departure(
            "loss-scaled", ("loss",), "warning",
            "all tokens of the step count {factor:.4g} together, where a mean counts 1{equal_to}.",
            "Divide each micro-batch's sum by the number of tokens of the whole step.",
        ),
        Departure(
            "micro-batches-uneven", ("loss",), "warning",
            "a token of one micro-batch counts {least:.0%} of a token of another: each has its own mean.",
            "Divide each micro-batch's sum by the number of tokens of the whole step.",
        ),
        Departure(
            "tokens-weighted", ("loss",), "note", "{share:.0%} of the tokens count otherwise than the others.",
            "Declare the loss as its own if that is meant.",
        ),
        # update
        Departure(
            "optimizer-other", ("update",), "error", "the optimizer's rule is {rule}, and {declared} was declared.",
            "Look at what made the optimizer.",
        ),
        Departure(
            "setting-other", ("update",), "error", "a group has {setting} = {value}, and {declared} was declared.",
            "Look at what made the optimizer's groups.",
        ),
        Departure("frozen", ("update",), "error", "the step left these weights as they were, and its rule moves them.", _STEP),
        Departure(
            "frozen-moves", ("update",), "error", "these parameters do not require a gradient, and the step changed them.",
            "Leave them out of the optimizer: weight decay and momentum act on a gradient of zeros, too.",
        ),
        Departure(
            "step-lost", ("update",), "error",
            "only weight decay moved these weights; the gradient's part of the step is missing.", _STEP,
        ),
        Departure(
            "no-group", ("update",), "error", "these parameters are trained, and no group of the optimizer has them.",
            "Pass them to the optimizer, or freeze them with requires_grad_(False).",
        ),
        Departure(
            "listed-often", ("update",), "error",
            "the optimizer's groups list these parameters {times} times, and step them as often.",
            "Take each parameter once: a tied weight has two names.",
        ),
        Departure(
            "rate", ("update",), "error", "these weights moved {factor:.4g} times as far as lr = {rate:.3g} moves them.",
            "Look for a second factor on the learning rate, or a rate that was changed after the group was read.",
        ),
        Departure(
            "rate-of-other-step", ("update",), "error",
            "step {step} was taken with the rate of step {of}: {factor:.4g} times its own.",
            "Look for a rate that is read or compiled before the schedule sets it.",
        ),
        Departure(
            "rate-of-other-group", ("update",), "error",
            "these weights moved as lr = {other:.3g} of group {of} moves them, and lr of their group {group} is {rate:.3g}.",
            "Look for a rate or a step size that is kept from one group to the next.",
        ),
        Departure(
            "step-scaled", ("update",), "error",
            "the gradient's part of the step is {factor:.4g} times the rule's; weight decay is as given.", _STEP,
        ),
        Departure(
            "rate-and-decay", ("update",), "error",
            "the step is {factor:.4g} times the rule's, and its weight decay is {value:.4g}.", _STEP,
        ),
        Departure(
            "decay", ("update",), "error", "the step decayed these weights by {value:.4g}, where their group says {wanted:.4g}.",
            "Compare weight_decay of each group with what the step uses.",
        ),
        Departure(
            "decay-of-other", ("update",), "error",
            "weight decay took {value:.4g} × lr × {term} of each weight, where their group says {wanted:.4g} × lr × weight.",
            _STEP,
        ),
        Departure(
            "decay-lost", ("update",), "error", "the step did not decay these weights, and their group says it should.", _STEP,
        ),
        Departure(
            "decay-unwanted", ("update",), "error", "these parameters are decayed, and '{declared}' was declared.",
            "Give them a group with weight_decay=0.",
        ),
        Departure(
            "decay-wanted", ("update",), "error", "these parameters are not decayed, and '{declared}' was declared.",
            "Give them the weight_decay of the others.",
        ),
        Departure(
            "decay-in-gradient", ("update", "gradient"), "error",
            "the gradient holds {value:.4g} times the weight: decay that passes through the moments, or a penalty in the loss.",
            "Use decoupled weight decay, or declare the term: ng.task(auxiliary=True).",
        ),
        Departure("sign", ("update",), "error", "the step goes up the gradient.", "Look for maximize=True or a sign."),
        Departure(
            "eps", ("update",), "error", "the step was taken with eps = {value:.0e}, where the group says {wanted:.0e}.", _STEP,
        ),
        Departure(
            "eps-inside-root", ("update",), "error",
            "{added} was added under the root of the second moment, not after it.", _STEP,
        ),
        Departure(
            "eps-before-correction", ("update",), "error",
            "{what} the second moment before its bias was corrected, which multiplies eps.",
            "sqrt(second / correction) + eps",
        ),
        Departure("no-bias-correction", ("update",), "error", "the bias of {of} was not corrected.", _STEP),
        Departure(
            "correction-other", ("update",), "error",
            "the step was taken with moment {by}, and the rule takes moment / (1 - beta**step).", _STEP,
        ),
        Departure(
            "step-count", ("update",), "error", "the step was taken as number {count}, and it is number {wanted}.",
            "Look at the states' step count after loading a checkpoint.",
        ),
        Departure(
            "count-shared", ("update",), "error",
            "bias is corrected by a count of steps that each {by} raises, so that it is that of a later step.",
            "Keep a count for each parameter, or raise it once a step.",
        ),
        Departure(
            "count-moved", ("update",), "error",
            "the optimizer's count of steps went from {before} to {after} in one step.", _STEP,
        ),
        Departure(
            "count-anew", ("update",), "error",
            "the optimizer's count of steps is {count}, and its moments hold gradients of more steps: their bias is corrected as "
            "if they had just begun.",
            "Keep the step count with the moments in checkpoints.",
        ),
        Departure("no-momentum", ("update",), "error", "the step used the gradient itself, not its running mean.", _STEP),
        Departure("nesterov", ("update",), "error", "nesterov = {given} is given, and the step is that of the opposite.", _STEP),
        Departure("stale-moment", ("update",), "error", "the step used {state} of before the update.", _STEP),
        Departure(
            "not-orthogonal", ("update",), "error",
            "the step is the momentum itself: its singular values were not brought to 1.", _STEP,
        ),
        Departure(
            "scale-of-shape", ("update",), "error",
            "the rate of each matrix was multiplied by {by}, where the group says {wanted}.", _STEP,
        ),
        Departure("sign-of-state", ("update",), "error", "the step is the sign of {state} after its update.", _STEP),
        Departure(
            "sign-beta", ("update",), "error",
            "the step is the sign of a mean with beta1 = {value:.6g}, where the group says {wanted:.6g}.", _STEP,
        ),
        Departure(
            "weight-narrow", ("update", "between"), "error",
            "the weights were rounded to {format} after the step, in a wider tensor.",
            "Look for a cast of weights after optimizer.step().",
        ),
        Departure("state-frozen", ("update",), "error", "{state} was not updated.", _STEP),
        Departure("state-zero", ("update",), "error", "{state} is zero after the step.", _STEP),
        Departure("state-lost", ("update",), "error", "{state} began anew: what it held before the step is gone.", _STEP),
        Departure("state-narrow", ("update",), "error", "{state} was rounded to {format} in a wider tensor.", _STEP),
        Departure(
            "beta", ("update",), "error", "{state} was averaged with beta = {value:.6g}, where the group says {wanted:.6g}.",
            _STEP,
        ),
        Departure(
            "state-other-factors", ("update",), "error",
            "{state} kept {kept:.4g} of itself and took {taken:.4g} of the gradient's term.", _STEP,
        ),
        Departure(
            "lost-in-format", ("update",), "note",
            "the step is the rule's, and up to {difference:.0%} of its change of {what} is lost in the format: storage "
            "'{storage}' rounds it away.",
            "'{fallback}' keeps it.",
        ),
        Departure(
            "lost-in-dtype", ("update",), "note",
            "the step is the rule's, and up to {difference:.0%} of its change of these weights is lost: {format} rounds it away.",
            "Keep float32 copies of the weights, or use an optimizer of narrowgauge with storage='word'.",
        ),
        # forward
        Departure(
            "sees-future", ("forward",), "error", "outputs change with later tokens.",
            "Look at the causal mask, and at sums or shifts along the rows; ng.task(loss=\"own\") if later tokens may be seen.",
        ),
        Departure(
            "rows-mixed", ("forward",), "error", "the outputs of one sequence change with the others of its batch.",
            "Look for a sum, norm or softmax over the batch.",
        ),
        Departure(
            "past-unseen", ("forward",), "warning", "outputs do not change with the token before.",
            "Look at the mask and at what attention returns.",
        ),
        Departure(
            "order-unseen", ("forward",), "warning", "outputs do not change with the order of earlier tokens.",
            "Look at the positions.",
        ),
        Departure(
            "border-ignored", ("forward",), "warning",
            "outputs change with the sequence before in the same row, and positions begin anew between the two.",
            "Give attention the borders of packed sequences, or let positions go on if one is to see the other.",
        ),
        Departure(
            "positions-absolute", ("forward",), "warning",
            "the same tokens at later positions have other outputs, and the model has relative positions.",
            "Look at where positions enter: queries and keys must turn alike.",
        ),
        Departure(
            "padding-seen", ("forward",), "warning",
            "outputs change with tokens that the mask leaves out, or with their number before the sequence.",
            "Look at what attention does with the mask, and at positions that are counted from the padding.",
        ),
        Departure(
            "random-in-evaluation", ("forward",), "warning", "in evaluation mode outputs change with the random state.",
            "Look for dropout that does not ask for the mode: dropout_p of attention is a number, 0 if not self.training.",
        ),
        Departure(
            "tie-cut", ("forward",), "warning", "the configuration ties these weights, and they are two parameters.",
            "Call model.tie_weights() after what replaced one of them, before the optimizer is made.",
        ),
        Departure(
            "frequencies-zero", ("forward",), "error", "the rotary frequencies are all zero: every position is turned alike.",
            "Compute these buffers again after a model that was made without memory (device 'meta') is given its own.",
        ),
        Departure(
            "frequencies-narrow", ("forward",), "note",
            "the rotary frequencies are rounded to {format}: at position 1,000 angles are off by a radian or more.",
            "Keep these buffers in float32: cast parameters one by one, or pass the dtype to from_pretrained().",
        ),
        Departure(
            "module-cast", ("forward",), "note", "these modules compute in a narrower format inside than their float32 weights.",
            "Look for a cast in their forward; declare it if it is meant.",
        ),
        Departure(
            "weights-cached", ("forward",), "error",
            "the output of these modules does not change with their weights, which receive gradients: it is made of a copy.",
            "Look for a cast, merged or quantized copy of the weights that is not made again after each step.",
        ),
        # gradient
        Departure(
            "gradient-scaled", ("gradient", "update"), "error",
            "the gradient is {factor:.6g} times what it should be{equal_to}.",
            "Look for a factor on the loss or the gradient: accumulation, ranks, loss scale.",
        ),
        Departure(
            "gradient-kept", ("gradient",), "error", "{share:.3g} of the last step's gradient is in this one.",
            "Call zero_grad() after each step.",
        ),
        Departure(
            "gradient-stale", ("gradient", "update"), "error", "the gradient is that of the step before (share {share:.3g}).",
            _LOOP,
        ),
        Departure(
            "gradient-zero", ("gradient",), "error", "the gradient is zero, and computed again it is not.", _LOOP,
        ),
        Departure(
            "gradient-removed", ("gradient",), "warning",
            "the backward passes computed a gradient, and the optimizer received none.",
            "Look for p.grad = None before the step, or a zero_grad of a part; ng.task(gradient=\"own\") if it is meant.",
        ),
        Departure(
            "gradient-missing", ("gradient",), "error", "there is no gradient, and computed again there is one.",
            "Look for detach() or no_grad() around these parameters.",
        ),
        Departure(
            "unused", ("gradient",), "note", "the optimizer has these parameters, and no output of the model depends on them.",
            "Look for cached or copied weights, detach() and no_grad(); leave them out if they are not used.",
        ),
        Departure(
            "not-in-graph", ("gradient",), "error",
            "these parameters have a gradient, and the model's output does not depend on them: it may use a copy made earlier.",
            "Look for cached or copied weights.",
        ),
        Departure(
            "micro-batch-missing", ("gradient",), "error", "of {of} micro-batches, the gradients of {missing} are missing.",
            "Call zero_grad() only after optimizer.step().",
        ),
        Departure(
            "micro-batches-many", ("gradient",), "error",
            "{number} micro-batches were accumulated in the step, and {declared} were declared.",
            "Call optimizer.step() and zero_grad() after as many as were declared.",
        ),
        Departure(
            "micro-batches-weighted", ("gradient",), "error", "micro-batches count {factors} times.",
            "Divide every micro-batch's loss by the same number.",
        ),
        Departure(
            "ranks-not-summed", ("gradient",), "error",
            "the gradient is what one rank alone computed, not the mean over ranks: on {ranks} of {of}.",
            "Look for no_sync() around the last micro-batch, for a communication hook, and for passes that do not go through "
            "DistributedDataParallel.",
        ),
        Departure(
            "rank-missing", ("gradient",), "error", "what {missing} computed is missing from the mean over {of} ranks.",
            "Look at what a rank sends: its communication hook, and what it does to its gradients before.",
        ),
        Departure(
            "gradient-narrow", ("gradient",), "error", "the gradient was rounded to {format} in a wider tensor.", _LOOP,
        ),
        Departure(
            "gradient-underflow", ("gradient",), "error", "{share:.0%} of the gradient is zero: all values under {below:.2g}.",
            "Scale the loss, or keep gradients in a wider format.",
        ),
        Departure(
            "part", ("gradient", "update"), "error",
            "{share:.0%} of the elements are others than computed again; the rest agree.",
            "Look for a mask, an index or an axis; ng.task(gradient=\"own\") if it is meant.",
        ),
        # clip
        Departure(
            "clip-missing", ("clip",), "error", "a gradient of norm {norm:.4g} was not clipped to {limit:.4g}.",
            "Clip after the last backward() and before the step.",
        ),
        Departure(
            "clip-norm", ("clip",), "error",
            "gradients were clipped to {limit:.4g} by another norm than that of all together: {over}.",
            "Unscale first, and give clip_grad_norm_ all parameters at once.",
        ),
        Departure(
            "clip-limit", ("clip",), "error", "clipping left a norm of {left:.4g}, where the limit is {limit:.4g}.",
            "Compare max_norm with what was declared.",
        ),
        Departure(
            "clip-each", ("clip",), "error", "each parameter was clipped by its own norm, to {limit:.4g}.",
            "Give clip_grad_norm_ all parameters at once.",
        ),
        Departure(
            "clip-values", ("clip",), "error", "values were cut at {limit:.4g}, where a limit of the norm is declared.",
            "clip_grad_norm_, not clip_grad_value_",
        ),
        # between
        Departure(
            "weights-written", ("between",), "warning", "{share:.0%} of the elements were changed between two steps.",
            "Look at what the loop does after optimizer.step(): averages, clipping, loading; ng.task(weights=\"own\") if meant.",
        ),
        Departure(
            "weights-scaled", ("update", "between"), "warning", "the weights were multiplied by {factor:.6g} after the step.",
            "Look at what the loop does after optimizer.step(), and at what wraps it.",
        ),
        Departure("step-undone", ("between",), "error", "the weights are those of before the step again.", "Look for a copy."),
        Departure(
            "states-lost", ("between",), "error", "{state} was lost between two steps.",
            "Keep the optimizer, or load its state dict too.",
        ),
        Departure(
            "states-written", ("between",), "warning", "{state} was changed between two steps.",
            "Look at what the loop does after optimizer.step().",
        ),
        Departure(
            "states-of-other-step", ("between",), "error",
            "the loop goes on from step {step}, and the optimizer's states are those of step {at}.",
            "Load weights and states of one checkpoint.",
        ),
        Departure(
            "schedule-per-micro-batch", ("between",), "warning",
            "the schedule of the learning rate moves with each micro-batch, {times} times a step.",
            _SCHEDULE,
        ),
        Departure(
            "schedule-many", ("between",), "warning", "the schedule of the learning rate moves {times} times in each step.",
            _SCHEDULE,
        ),
        Departure(
            "schedule-still", ("between",), "warning",
            "the schedule of the learning rate does not move, and once a step was declared.",
            "Call scheduler.step() after optimizer.step().",
        ),
        Departure(
            "schedule-anew", ("between",), "warning",
            "the schedule of the learning rate began anew: it is at step {now}, and the loop at {was}.",
            "Load the schedule's state dict with the checkpoint; ng.task(schedule=\"own\") if it is meant.",
        ),
        Departure(
            "schedule-beside", ("between",), "warning",
            "step {step} has the learning rate that the schedule gives step {of}.",
            "Call scheduler.step() after optimizer.step(), and load its state from the same step.",
        ),
        Departure(
            "average-still", ("between",), "error", "the average of the weights stands still.",
            "Update it after each step, with a decay below 1, in float32.",
        ),
        Departure(
            "average-other", ("between",), "error", "the average of the weights is no mean of itself and the weights.",
            "avg = decay × avg + (1 - decay) × weight",
        ),
        # data
        Departure(
            "rows-twice", ("data",), "warning",
            "since step {since} {share:.0%} of the rows of a step are in it more than once; few rows come again otherwise.",
            "Look for one batch that all micro-batches or workers take; ng.task(data=\"own\") if it is meant.",
        ),
        Departure(
            "rows-again", ("data",), "warning",
            "since step {since} {share:.0%} of a step's rows repeat those at a lag of {lag}, and {seen:,} rows were seen: "
            "it is no new pass.",
            "Look for a loader that does not move on, or overlapping rows; ng.task(data=\"own\") if it is meant.",
        ),
        Departure(
            "rows-few", ("data",), "warning",
            "since step {since} the same {rows:,} of {seen:,} rows come again and again.",
            "Look for one shard that is read again; ng.task(data=\"own\") if it is meant.",
        ),
        Departure(
            "rows-anew", ("data",), "note",
            "steps {since} to {until} had rows that had come before, and later steps have new ones: the data were not at their "
            "end.",
            "Look at where a reader begins after a restart.",
        ),
        Departure(
            "rows-sorted", ("data",), "warning", "since step {since} {what} are sorted by the {key} of their tokens.",
            "Shuffle the rows; ng.task(data=\"curriculum\") if the order is meant.",
        ),
        Departure(
            "tokens-change", ("data",), "warning",
            "from step {since} on tokens come in other frequencies, {ratio:.0f} times what they vary by itself.",
            "Look at what the loader reads from there on; ng.task(data=\"curriculum\") if it is meant.",
        ),
        Departure(
            "ranks-same-rows", ("data",), "error", "ranks {ranks} have the same weights and were given the same rows.",
            "Give each rank its part: DistributedSampler, or a seed with its rank.",
        ),
        Departure(
            "rows-evaluated", ("data",), "warning",
            "{share:.1%} of the evaluated rows were trained on before; of the rows of a training step {own:.1%} were.",
            "Split the text before it is cut into rows, and by documents.",
        ),
        Departure(
            "evaluated-on-training", ("data",), "note", "every evaluated row was trained on before.",
            "Evaluate on text that is not trained on, too.",
        ),
        # evaluation
        Departure(
            "evaluated-stale", ("evaluation",), "error", "the evaluated weights are those of step {at}.",
            "Copy the weights anew before each evaluation, and update an average after each step.",
        ),
        Departure(
            "evaluated-scaled", ("evaluation",), "error", "the evaluated weights are {factor:.4g} times the trained ones.",
            "An average is decay × average + (1 - decay) × weight, and starts from the weights or is divided by 1 - decay^steps.",
        ),
        Departure(
            "evaluated-narrow", ("evaluation",), "note", "the evaluated weights are the trained ones rounded to {format}.",
            "Evaluate in the format of training, or keep in mind that the loss is that of narrower weights.",
        ),
        Departure(
            "evaluation-mean-of-means", ("evaluation",), "warning",
            "the loss {loss:.6g} is the mean of the means of {passes} uneven batches; over all tokens it is {wanted:.6g}.",
            "Sum the loss of all tokens, and divide by their number.",
        ),
        Departure(
            "evaluation-of-one-batch", ("evaluation",), "warning",
            "the loss {loss:.6g} is that of the last of {passes} batches alone; over all tokens it is {wanted:.6g}.",
            "Sum the loss over all batches, and divide by their tokens.",
        ),
        Departure(
            "evaluation-not-cleared", ("evaluation",), "error",
            "the loss {loss:.6g} is the mean of this evaluation and the {number} before it; that of this one is {wanted:.6g}.",
            "Clear what is summed before each evaluation.",
        ),
        Departure(
            "evaluation-count", ("evaluation",), "error",
            "the loss {loss:.6g} is the sum divided by {more:+d} tokens {per}; over all tokens it is {wanted:.6g}.",
            "Divide by the number of tokens that are predicted: one less a row than a row has.",
        ),
        Departure(
            "evaluation-scaled", ("evaluation",), "error",
            "the loss {loss:.6g} is {factor:.6g} times the mean over all tokens{equal_to}.",
            "Divide the sum over all batches by all their tokens, and give it in nats.",
        ),
        Departure(
            "evaluation-data-changed", ("evaluation",), "warning",
            "{share:.0%} of the rows of the evaluation before are not in this one, which has {rows:,}.",
            "Keep the rows of an evaluation, or its losses are of other data.",
        ),
        Departure(
            "evaluated-in-training", ("evaluation",), "warning",
            "without gradients the model was called in training mode, which changes these modules.",
            "Call model.eval() before and model.train() after an evaluation.",
        ),
    )
}  # fmt: skip
_UNEXPLAINED = "-departs"


def unexplained(piece: str) -> str:
    """The name of a departure of a piece that no row of the table explains: a note."""
    return f"{piece}{_UNEXPLAINED}"


def severity_of(name: str) -> str:
    """How serious the departure with this name is; empty where the name is none's.

    Example:
        >>> severity_of("sees-future"), severity_of("z-loss"), severity_of(unexplained("gradient")), severity_of("loss-spike")
        ('error', 'note', 'note', '')
    """
    if name in DEPARTURES:
        return DEPARTURES[name].severity
    piece = name.removesuffix(_UNEXPLAINED)
    return "note" if piece != name and piece in PIECES else ""
