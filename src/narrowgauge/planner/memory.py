"""Memory of the worst rank at the worst moment of a step, in bytes by group.

Three moments can be the worst. At the start of backward, all activations, the logits and their
gradient exist. In the last layer's backward, its temporary gradients replace the logits. At the end
of backward, all gradients exist.

Source: Korthikanti et al., arXiv 2205.05198, section 4 (activations); Rajbhandari et al., ZeRO,
arXiv 1910.02054, section 5 (state).
"""

from functools import lru_cache

from narrowgauge.planner.job import Job
from narrowgauge.planner.program import LOSSES
from narrowgauge.planner.shapes import Architecture
from narrowgauge.spec.computes import Compute
from narrowgauge.spec.formats import bytes_per_number

CONTEXT = 0.8e9
COMMUNICATION = 1.0e9
"""Bytes without a formula: driver and libraries, and the channels of collectives."""
FRAGMENTATION = 0.08
"""Fraction of all memory that changes during a step."""
_EXACT_SUM_BYTES = 16  # of two float64 words that sum gradients exactly
Groups = dict[str, float]
"""Bytes or seconds by group."""


def memory_of(job: Job) -> Groups:
    """Return the memory of the worst rank at its worst moment."""
    a = job.architecture
    layout = job.layout
    visible = bytes_per_number(job.recipe.storage.visible)
    # The largest layer on one of the ranks that shard it, and the bytes of its gradient.
    largest = a.largest_layer / layout.tensor
    largest += a.parameters["experts"] / (a.num_mixture_layers or 1) / layout.ranks_of_experts
    of_gradient = job.trained_share * job.stream_width
    frozen = job.on_rank("frozen", 3)
    states = job.on_rank("states", 1)
    gradients = visible * job.on_rank("trained", 2)
    sums = _sums(job)
    if job.program.offload:  # frozen weights are on the chip by two layers
        states = 0.0
        frozen = min(frozen, 2 * largest * job.weight_bytes)
    if sums and not layout.is_fsdp:
        gradients = 0.0  # added to the sum as soon as it is made
    elif job.program.offload or job.program.release:
        gradients = min(gradients, largest * of_gradient)
    changing = _worst_moment(job, gradients, sums)
    changing["gradients"] += sums
    buffers = 0.0
    if layout.zero == 3 and layout.num_sharing > 1:
        outer = (a.parameters["first"] + a.parameters["last"]) / layout.tensor
        count = 2 * largest
        if layout.pipeline > 1:
            # FSDP2 gathers a stage once, and sums its whole gradients in reduce_dtype: float32.
            count = largest * a.num_layers / layout.pipeline
            of_gradient = 4 * job.trained_share
        buffers = count * (job.weight_bytes + of_gradient) + outer * job.stream_width
    if job.tuning.base != "bfloat16":  # a matrix, dequantized
        widest = max(matmul.in_features * matmul.out_features for matmul in a.layer_matmuls)
        buffers += 2 * widest / layout.tensor
    if job.stream_width > job.matmul_width and layout.recompute != "full":  # autocast's weights
        buffers += job.matmul_width * a.num_parameters / layout.tensor / layout.pipeline
    changing["buffers"] = buffers
    return {
        "weights": visible * job.on_rank("trained", 3) + frozen,
        "optimizer": states + job.on_rank("whole"),
        **changing,
        "overhead": FRAGMENTATION * sum(changing.values()) + outside_bytes(layout.num_ranks),
    }


def outside_bytes(chips: int) -> float:
    """Return what no framework's allocator reserves: driver, libraries, collectives."""
    return CONTEXT + COMMUNICATION * (chips > 1)


def host_bytes(job: Job) -> float:
    """Return the memory that the ranks of a node need on their host for what the program offloads."""
    gradients = bytes_per_number(job.recipe.storage.visible) * job.on_rank("trained", 2)
    on_host = job.on_rank("states", 1) + job.on_rank("frozen", 3) + gradients
    on_host *= job.program.offload
    return (on_host + saved_on_host(job)) * job.cluster.chips_per_node


def saved_on_host(job: Job) -> float:
    """Return the inputs of recomputed layers that a rank keeps on its host."""
    if job.program.saves == "chip" or job.layout.recompute != "full":
        return 0.0
    stream = job.stream_width * job.architecture.hidden_size / job.layout.tensor
    return job.tokens * stream * job.architecture.num_layers * _batches_in_flight(job)


def _sums(job: Job) -> float:
    """Return the bytes of the buffers that sum the gradients of micro-batches."""
    width = bytes_per_number(job.layout.accumulation_dtype)
    if job.recipe.storage.visible == "float16":  # its range is too short for sums
        width = 4
    if job.recipe.reduction.order_invariant:
        width = _EXACT_SUM_BYTES
    if job.layout.micro_batches == 1 or width <= bytes_per_number(job.recipe.storage.visible):
        return 0.0
    return width * job.on_rank("trained", 2)


def _worst_moment(job: Job, gradients: float, sums: float) -> Groups:
    """Return activations, logits and gradients at the moment at which they are the most."""
    a = job.architecture
    layout = job.layout
    stream = job.stream_width * a.hidden_size / layout.tensor
    inner = job.matmul_width * a.widest / layout.tensor
    layer = layer_bytes(job)
    saved = _kept_bytes(job, layer, stream)
    again = 0.0 if layout.recompute == "none" else layer
    logits = 0.0
    if layout.pipeline <= 2:  # in a longer pipeline the first stage holds more
        logits = a.vocab_size * LOSSES[job.program.loss]["kept"] / layout.tensor
        logits += 4 * a.hidden_size / layout.tensor + 2 * stream
    is_late = layout.is_fsdp and (layout.micro_batches == 1 or sums > 0)
    early = 0.0 if is_late else gradients
    moments = (
        (saved, logits, early),
        (saved + again + stream + inner, 0.0, early),
        (layer + stream + inner, 0.0, gradients),
    )
    tokens = job.tokens
    activations, of_loss, of_gradients = max(
        moments, key=lambda sizes: tokens * (sizes[0] + sizes[1]) + sizes[2]
    )
    return {
        "activations": tokens * activations,
        "logits": tokens * of_loss,
        "gradients": of_gradients,
    }


def _kept_bytes(job: Job, layer: float, stream: float) -> float:
    """Return the bytes of a token that all layers in flight keep until their backward pass.

    Source: Korthikanti et al., arXiv 2205.05198, section 4.2.3; Narayanan et al., arXiv 2104.04473,
    figure 4, for interleaving.
    """
    a = job.architecture
    layout = job.layout
    saved = layer
    if layout.recompute == "full":
        if job.program.saves == "host":  # two layers are on the chip
            return 2 * stream
        saved = stream
    elif layout.recompute == "selective":
        numbers = a.num_heads * a.value_dim + a.mean_outputs / 2
        saved = stream + job.matmul_width * numbers / layout.tensor
    return saved * _batches_in_flight(job) * a.num_layers


def _batches_in_flight(job: Job) -> float:
    """Return the micro-batches whose activations a stage keeps, of all layers."""
    layout = job.layout
    batches = min(layout.pipeline, layout.micro_batches) / layout.pipeline
    if layout.interleave > 1:
        batches *= 1 + (layout.pipeline - 1) / layout.pipeline / layout.interleave
    return batches


def layer_bytes(job: Job) -> float:
    """Return the bytes that a mean layer keeps of a token on a rank."""
    is_eager = job.program.kernels == "eager"
    widths = job.stream_width, job.matmul_width
    return _layer_bytes(job.architecture, job.recipe.compute, *widths, is_eager) / job.layout.tensor


@lru_cache(maxsize=256)
def _layer_bytes(
    a: Architecture, compute: Compute, stream: float, width: float, is_eager: bool
) -> float:
    """Return the bytes that a mean layer keeps of a token: of norms, inputs of matmuls, attention,
    and the MLP or the chosen experts. A number of the stream has ``stream`` bytes, of a matmul
    ``width``.
    """
    codes = compute.kept_bytes if compute.keeps_codes else width
    # Each matmul under autocast keeps its own cast.
    inputs = a.hidden_size * codes * (3 if stream > width else 1)
    norms = 2 * a.hidden_size * (stream + 4 * is_eager)
    queries = a.num_heads * a.query_dim
    keys = 2 * queries if a.is_latent else 2 * a.num_kv_heads * a.value_dim
    attention = width * (queries + keys + a.num_heads * a.value_dim)
    total = 0.0
    for layers in a.layers:
        gates = 5 * layers.inner_size - layers.wide_size if is_eager else layers.wide_size
        rest = (layers.mixer_width + gates) * width + codes * layers.inner_size
        if layers.has_attention:
            rest += attention
        of_stream = norms + inputs * (1 + (layers.inner_size > 0))
        of_stream += 2 * layers.chosen * a.hidden_size * width
        total += (of_stream + rest) * layers.count
    return total / a.num_layers
