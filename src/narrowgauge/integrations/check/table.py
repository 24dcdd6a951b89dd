"""The table of checks: what each reads and reports. ``narrowgauge.check`` runs the rows in this order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from narrowgauge.integrations.check import numbers, parameters, process
from narrowgauge.integrations.check import training_loop as loop
from narrowgauge.integrations.check.set_up import SetUp
from narrowgauge.runs.finding import Finding


@dataclass(frozen=True)
class Check:
    """One check.

    Args:
        severity: a key of ``SEVERITIES``; a finding may have its own.
        find: yields the values of each finding, with ``where``; they fill the sentences ``message`` and ``advice``.
        watched: whether it needs watched steps.
    """

    name: str
    looks_at: str
    severity: str
    find: Callable[[SetUp], Iterable[dict[str, Any]]]
    message: str
    advice: str
    watched: bool = False

    def run(self, set_up: SetUp) -> list[Finding]:
        return [
            Finding.filled(
                self.name, self.message, self.advice, values,
                where=values["where"], severity=values.get("severity", self.severity),
            )
            for values in self.find(set_up)
        ]  # fmt: skip


CHECKS: dict[str, Check] = {
    row.name: row
    for row in (
        Check(
            "missing-parameters", "model, optimizer", "error", parameters.missing,
            "{count} trainable parameters of the model are in no optimizer and never change.",
            "Pass them too: {first}, or freeze them with requires_grad_(False); check takes a list of optimizers.",
        ),
        Check(
            "replaced-parameters", "model, optimizer", "error", parameters.replaced,
            "{count} parameters of the model were replaced after the optimizer was made; it steps tensors that the model no "
            "longer uses.",
            "Change the model first (fully_shard, resize_token_embeddings, a new head) and then call optimizer = AdamW("
            "model.parameters(), …).",
        ),
        Check(
            "recast-parameters", "model, optimizer", "error", parameters.recast,
            "{count} parameters of the model were replaced by {now} copies of the {then} ones that the optimizer steps: nothing "
            "of the model learns by it.",
            "PEFT's load_adapter does so: pass autocast_adapter_dtype=False, or load before the optimizer is made; "
            'storage="float32-states8" steps float32 adapters as they are.',
        ),
        Check(
            "parameters-twice", "optimizer", "error", parameters.twice,
            "these parameters are listed twice, as tied weights are when modules are listed one by one: each step moves them "
            "twice.",
            "Pass model.parameters(), which names each tensor once.",
        ),
        Check(
            "frozen-parameters", "optimizer", "note", parameters.frozen,
            "{count} parameters of the optimizer are frozen; it passes over them as long as they have no gradient.",
            "Pass (p for p in model.parameters() if p.requires_grad), or unfreeze them if they are to be trained.",
        ),
        Check(
            "cast-weights", "weights, states", "error", parameters.cast_later,
            "the optimizer was made for {then} weights, and they are {now} now.",
            "Cast first and make the optimizer after; ng.prepare(model, …) does both and keeps the bits that are cut.",
        ),
        Check(
            "lost-updates", "weights, learning rate", "error", numbers.lost_updates,
            "{optimizer} keeps nothing of a {format} weight but itself: at lr {rate:g} {some} rounded away{then}.",
            'ng.AdamW(…, storage="{fallback}") keeps them in {fallback_bytes:g} bytes per parameter, where this takes {bytes:g}; '
            "ng.prepare(float32_model, …) keeps the weights' own low bits too.",
        ),
        Check(
            "rate-below-spacing", "weights, learning rate", "error", numbers.rate_below_spacing,
            "lr {rate:g} is below half of the spacing {spacing:.2g} that {format} has at {typical:.2g}: these tensors stand "
            "still.",
            'Raise the learning rate, or keep their low bits with storage="{fallback}".',
        ),
        Check(
            "frozen-second-moment", "betas, states", "error", numbers.frozen_second_moment,
            "beta2 = {beta:g} moves a second moment of {bits} mantissa bits by less than half a spacing: {then}.",
            'Take beta2 below {highest:.4g}, or storage="{fallback}", whose second moments do not freeze.',
        ),
        Check(
            "eps-underflow", "eps, weights", "error", numbers.eps_underflow,
            "eps = {eps:g} is zero in {dtype}, whose smallest number is {smallest:.2g}: where the second moment is zero too, the "
            "step divides by zero.",
            "Take eps=1e-4, or an optimizer that computes in float32.",
        ),
        Check(
            "swallowed-decay", "weight decay, weights", "warning", numbers.swallowed_decay,
            "lr × weight decay = {step:.2g} is below 2^-{bits}: {format} weights are not decayed at all.",
            'Keep their low bits with storage="{fallback}"; a larger decay than {decay:g} only hides it.',
        ),
        Check(
            "sensitive-modules", "norms, routers, embeddings", "warning", numbers.sensitive_modules,
            "the weights of this {kind} are {format} and nothing else is kept: {why}.",
            'Leave them in float32, or use ng.prepare(model, …), which keeps them whole; keep = ["{first}"] in a recipe leaves a '
            "module in float32.",
        ),
        Check(
            "gradient-format", "gradients", "error", parameters.other_gradients,
            "gradients are {dtype} where their parameters are {wanted}.",
            "Leave p.grad_dtype and p.grad in the parameter's format; ng.GradientAccumulator sums in a wider one.", watched=True,
        ),
        Check(
            "narrow-average", "averages of weights", "error", parameters.narrow_average,
            "an average of the weights is kept in {dtype}: it stands still as soon as (1 - decay) × the distance is below "
            "2^-{bits} of a weight.",
            "Keep it in float32: AveragedModel(model, avg_fn=get_ema_avg_fn(0.999)).float().",
        ),
        Check(
            "written-weights", "weights between steps", "warning", parameters.written,
            "{count} parameters were changed between steps by something else than their optimizer; what it kept below their "
            "16 bits belonged to the old values.",
            "Change optimizer.stored(p) and hand it back with optimizer.adopt({{p: values}}), in float32.", watched=True,
        ),
        Check(
            "unnoticed-writes", "weights between steps", "error", parameters.written_silently,
            "parameters were changed through .data, which the optimizer cannot notice: it adds its low bits to values that are "
            "gone.",
            "Call optimizer.refresh() after it, or write with p.copy_(…) under torch.no_grad().", watched=True,
        ),
        Check(
            "autocast-over-narrow", "autocast, weights", "warning", loop.autocast_over_narrow,
            "autocast to {autocast} is on over {format} weights: it brings no bits back, and computes norms and losses otherwise "
            "than the recipe says.",
            'Remove torch.autocast (bf16=True, mixed_precision="bf16", precision="bf16-mixed"), or keep float32 weights: '
            '"bfloat16/float32".', watched=True,
        ),
        Check(
            "second-clipping", "gradients", "warning", loop.second_clipping,
            "the loop multiplied the gradients by {factor:.3g}, to a norm of {norm:.3g}, and the optimizer clips to "
            "{own:g} itself: the first rounds 16-bit gradients once more.",
            "Clip once: remove clip_grad_norm_ (max_grad_norm=0, gradient_clip_val=None), or pass max_grad_norm=None here.",
            watched=True,
        ),
        Check(
            "schedule-on-skip", "schedule, skipped steps", "warning", loop.moved_on_skip,
            "the learning rate moved after {count} steps that were skipped for gradients that were not finite.",
            "Step the schedule only if optimizer.num_skipped (with GradScaler: a smaller get_scale()) did not change.",
            watched=True,
        ),
        Check(
            "compiled-twice", "optimizer.step", "warning", loop.compiled_twice,
            "torch.compile was put around the step of an optimizer whose kernels are compiled already; it only adds guards.",
            "Call optimizer.step() as it is; compile=True in its options compiles the kernels of small models too.",
        ),
        Check(
            "needless-scaler", "loss scaler", "warning", loop.needless_scaler,
            "a loss scaler is used, and nothing is computed in float16: it skips steps and rounds nothing better.",
            "Remove it (GradScaler(enabled=False)): bfloat16 has float32's range.",
        ),
        Check(
            "two-scalers", "loss scalers", "error", loop.two_scalers,
            "two loss scalers scale one step.",
            "Keep one: remove GradScaler and call optimizer.loss_scaler.scale(loss).backward().",
        ),
        Check(
            "unscaled-loss", "loss scaler", "error", loop.unscaled_loss,
            "the optimizer divides gradients by its loss scale, and no loss was multiplied by it before the step.",
            "optimizer.loss_scaler.scale(loss).backward()", watched=True,
        ),
        Check(
            "missing-scaler", "loss scaler", "error", loop.missing_scaler,
            "float16 gradients are not scaled: those under 6e-8 are zero.",
            'Use ng.prepare(model, "float16/split") and optimizer.loss_scaler.scale(loss).backward(), or torch.amp.GradScaler.',
            watched=True,
        ),
        Check(
            "narrow-loss", "loss", "warning", loop.narrow_loss,
            "the loss is reduced in {dtype}.",
            "Compute it from float32 logits: cross_entropy(logits.float(), targets).", watched=True,
        ),
        Check(
            "narrow-accumulation", "gradients", "warning", loop.narrow_accumulation,
            "{count} micro-batches are added in {dtype}: their sum loses more than a storage does.",
            "accumulator = ng.GradientAccumulator(model.parameters()), accumulate() after each backward() and finish() before "
            "the step.", watched=True,
        ),
        Check(
            "stale-gradients", "gradients", "error", loop.stale_gradients,
            "{count} steps used gradients that still held those of the step before.",
            "Call optimizer.zero_grad() after each optimizer.step().", watched=True,
        ),
        Check(
            "zeroed-gradients", "gradients", "note", loop.zeroed_gradients,
            "gradients are filled with zeros instead of dropped: they keep their memory, and parameters that a batch does not "
            "use are decayed and moved by their momentum.",
            "Call zero_grad() without set_to_none=False.", watched=True,
        ),
        Check(
            "default-dtype", "process", "warning", process.default_dtype,
            "the default dtype is {dtype}: buffers, losses and scalars that name no format are rounded to it.",
            "torch.set_default_dtype(torch.float32), and cast the model alone.",
        ),
        Check(
            "fast-float32", "process", "note", process.fast_float32,
            "float32 matmuls may be computed in fewer bits ('{precision}').",
            'torch.set_float32_matmul_precision("highest"), if float32 is the baseline of a comparison.',
        ),
        Check(
            "narrow-matmul-sums", "process", "note", process.half_accumulation,
            "CUDA matmuls of {dtype} may add partial sums in {dtype}.",
            "{where} = False",
        ),
        Check(
            "flushed-subnormals", "process", "note", process.flushed,
            "this thread flushes subnormal numbers to zero, also those of moments and of float16 gradients.",
            "torch.set_flush_denormal(False)",
        ),
        Check(
            "tuned-kernels", "process", "note", process.tuned_kernels,
            "cuDNN chooses kernels by their time, so that bits differ between runs, and the reduction was to keep them.",
            "torch.backends.cudnn.benchmark = False",
        ),
        Check(
            "cut-by-policy", "DDP, FSDP", "error", process.cut_again,
            "the policy casts weights to {dtype}, and their storage holds {format}.",
            "Leave param_dtype out of the policy: the recipe's weights are in the format that they are computed in.",
        ),
        Check(
            "narrow-rank-sums", "DDP, FSDP", "warning", process.narrow_sums,
            "gradients are summed over {many} ranks in {dtype}.",
            'reduce_dtype=torch.float32, or a recipe with a reduction: "bfloat16/word/float32".',
        ),
        Check(
            "replicas-apart", "DDP, stored weights", "error", process.replicas_apart,
            "{count} of {many} ranks store other bits beside the same weights: DDP copies those of the first rank, not what "
            "optimizers keep below them, and the replicas drift apart.",
            "Call torch.manual_seed with one seed on every rank before the model is built, or load one checkpoint on all.",
        ),
        Check(
            "order-bound-modules", "dropout, batch norm", "error", process.order_bound,
            "reduction '{reduction}' gives the same bits on any number of ranks, and this is a module {reason}.",
            "{replacement}, or take another reduction.",
        ),
    )
}  # fmt: skip


def found_in(set_up: SetUp) -> list[Finding]:
    """All findings of all checks."""
    now = replace(set_up)  # one whose `stepped` is looked up anew: the first steps have made states
    return [finding for row in CHECKS.values() for finding in row.run(now)]
