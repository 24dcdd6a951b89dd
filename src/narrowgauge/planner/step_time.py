"""Step time: the duration of an optimizer step, in seconds by group.

We follow one rank through its micro-batches: operations over the fraction of the chip's peak that
training reaches, elementwise bytes over its bandwidth, what exchanges show, and the bubble of a
pipeline. ``data/fitted.toml`` has the shares.

Source: Narayanan et al., arXiv 2104.04473 (schedules); Korthikanti et al., arXiv 2205.05198
(recomputation); Isaev et al., Calculon, SC 2023 (overlap).
"""

from functools import lru_cache

from narrowgauge.planner.job import FITTED, Job
from narrowgauge.planner.memory import Groups, saved_on_host
from narrowgauge.planner.program import LOSSES
from narrowgauge.planner.shapes import Architecture
from narrowgauge.spec.chips import Chip
from narrowgauge.spec.formats import bytes_per_number

_SHARES = FITTED["shares"]
_AGAIN = {"none": 0.0, "selective": 0.3, "full": 1.0}
_ATTENTION_PASSES = 3.5  # forward 1, backward 2.5: a flash kernel computes the scores again
_STREAMS = 22  # tensors of the stream that a layer moves: norms 10, residuals 4, rotary 8
_DISPATCHED = 8  # more for each expert of a token: sort and restore, in both directions
_HOST_SHARE = 0.85  # 55 of 63 GB/s over PCIe5 (ml-engineering)
_ALL_REDUCE_SHOWN = 0.3  # of a sum between replicas, after the last backward pass
_EXPERT_SHOWN = 0.3  # of the exchange of tokens between experts: mixtures in view
_TENSOR_SHOWN = 0.6  # of an exchange between tensor ranks: asynchronous ones hide a part


def step_of(job: Job) -> Groups:
    """Return the seconds of an optimizer step of the whole job."""
    layout = job.layout
    again = _AGAIN[layout.recompute]
    groups = _computing(job, again)
    computed = layout.micro_batches * sum(groups.values())
    groups["communication"] = exchanges_of_batch(job, again)
    bubble = (layout.pipeline - 1) / layout.interleave * sum(groups.values())
    groups = {name: seconds * layout.micro_batches for name, seconds in groups.items()}
    groups["communication"] += exchanges_of_state(job, computed)
    groups |= {"bubble": bubble, "optimizer": _update(job)}
    # Computing hides what layers read from the host, up to its own time.
    rate = 1e9 * job.chip.host_gb_per_second * _HOST_SHARE
    moved = 2 * layout.micro_batches * saved_on_host(job)
    if job.program.offload:
        passes = layout.micro_batches * (3 if layout.recompute == "full" else 2)
        moved += passes * job.on_rank("frozen", 3)
    groups["gaps"] += max(0.0, moved / rate - sum(groups.values()))
    return groups


@lru_cache
def _linear_share(chip: Chip) -> float:
    starts = FITTED["linear"]
    return next(starts[start] for start in starts if chip.architecture.startswith(start))


def _computing(job: Job, again: float) -> Groups:
    """Return the computing of a micro-batch on a rank."""
    a = job.architecture
    program = job.program
    compute = job.recipe.compute
    format = job.chip.rate_format(compute.output.left.format)
    is_narrow = not compute.is_wide and format in job.chip.peak_tflops
    once, repeated = _work_of(a, job.tuning.lora > 0, is_narrow)
    scores = a.attention_flops(job.sequence_length) / 3 * (_ATTENTION_PASSES + again)
    moved = _moved_bytes(a, job.stream_width, job.matmul_width) * (1 + again / 3)
    peak = job.chip.peak_flops * program.factor
    tokens = job.tokens / job.layout.tensor / job.layout.pipeline
    return {
        "matmuls": tokens * (once + again * repeated) / peak / _linear_share(job.chip),
        "attention": tokens * scores / peak / _SHARES["attention"],
        "elementwise": tokens * moved / _bandwidth(job),
        "loss": tokens * a.vocab_size * LOSSES[program.loss]["moved"] / _bandwidth(job),
        # Routers and launches.
        "gaps": a.num_mixture_layers / job.layout.pipeline * 2 * program.mixture_seconds,
    }


def _bandwidth(job: Job) -> float:
    """Return the bytes a second of the chip's memory that kernels reach."""
    return 1e9 * job.chip.bandwidth_gb_per_second * _SHARES["bandwidth"]


@lru_cache(maxsize=256)
def _work_of(a: Architecture, is_frozen: bool, is_narrow: bool) -> tuple[float, float]:
    """Return the operations of a token, as if all were as fast as large matmuls in 16 bits: of
    forward and backward, and of the layers' forward.
    """
    once = repeated = 0.0
    for matmul in a.matmuls:
        work = matmul.flops_per_token
        if matmul.is_expert:
            size = min(matmul.in_features, matmul.out_features)
            work *= 1 + _SHARES["experts"] / size
        if matmul.part != "head":
            work /= _SHARES["float8"] if is_narrow else 1.0
            repeated += work
        once += work * (2 if is_frozen else 3)
    return once, repeated


@lru_cache(maxsize=256)
def _moved_bytes(a: Architecture, stream_width: float, matmul_width: float) -> float:
    """Return the bytes of a token that norms, residuals, gates and sorting move in all layers."""
    moved = 0.0
    for layers in a.layers:
        streams = _STREAMS + _DISPATCHED * layers.chosen
        stream = streams * a.hidden_size * stream_width
        moved += layers.count * (stream + 8 * layers.inner_size * matmul_width)
    return moved


def _sending(job: Job, sent: float, ranks: int, stride: int = 1) -> float:
    """Return the seconds in which a chip sends bytes to a group of ranks at a distance of
    ``stride``; 0 for one rank.
    """
    cluster = job.cluster
    if ranks == 1:
        return 0.0
    if ranks * stride <= cluster.chips_per_node:
        return sent / _SHARES["link"] / cluster.link_bytes_per_second(ranks, stride)
    cards = min(ranks, max(1, cluster.chips_per_node // stride))
    return sent / _SHARES["network"] / cluster.network_bytes_per_second / cards


def exchanges_of_batch(job: Job, again: float) -> float:
    """Return the seconds that a micro-batch shows of its exchanges between tensor ranks, context
    ranks and experts.
    """
    a = job.architecture
    layout = job.layout
    tensor = layout.tensor
    token = job.tokens / layout.pipeline * job.matmul_width
    stream = (4 + 2 * again) * token * a.hidden_size
    of_tensor = a.num_layers * 2 * stream * (1 - 1 / tensor)
    heads = a.num_kv_heads * (a.query_dim + a.value_dim) / tensor
    of_context = a.num_layers * (3 + again) * token * heads * (layout.context - 1)
    copies = max(layers.chosen for layers in a.layers) * (1 - 1 / layout.expert) / tensor
    of_experts = a.num_mixture_layers * stream * copies
    distance = layout.context * layout.expert_tensor_ranks
    shown = _TENSOR_SHOWN * _sending(job, of_tensor, tensor)
    shown += _sending(job, of_context, layout.context, tensor)
    return shown + _EXPERT_SHOWN * _sending(job, of_experts, layout.expert, distance)


def exchanges_of_state(job: Job, computing: float) -> float:
    """Return the seconds that a step shows of gathers of weights and sums of gradients, between
    shards and between replicas.
    """
    layout = job.layout
    a = job.architecture
    of_experts = a.parameters["experts"]
    number = (a.num_parameters - of_experts) / layout.tensor + of_experts / layout.ranks_of_experts
    number /= layout.pipeline
    summed = job.recipe.reduction.bytes_per_element(job.weight_dtype) * job.trained_share
    sharing = layout.num_sharing
    sums = layout.micro_batches if layout.zero >= 2 else 1
    gathers = 2 * layout.micro_batches if layout.zero == 3 else 1
    sent = number * (gathers * job.weight_bytes + sums * summed)
    seconds = _sending(job, sent, sharing, layout.tensor)
    shown = seconds - min(seconds, computing) * _SHARES["hidden"]
    if layout.data > 1:
        reduced = _sending(job, 2 * number * summed / sharing, layout.num_ranks)
        shown += _ALL_REDUCE_SHOWN * reduced
    return shown


def _update(job: Job) -> float:
    """Return the seconds to read and write all stored tensors once, or to update them on the host."""
    number = job.on_rank("trained", 1)
    if job.program.offload:
        to_host = 4 * job.layout.micro_batches / (1e9 * job.chip.host_gb_per_second)
        updates = job.cluster.chips_per_node / job.chip.host_updates_per_second
        return number * (to_host + updates)
    weights = 2 * bytes_per_number(job.recipe.storage.visible)  # and gradients
    return 2 * (weights * number + job.on_rank("states", 1)) / _bandwidth(job)
