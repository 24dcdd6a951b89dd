"""Write figures and layouts of a plan as text; 1 GB is 10^9 bytes."""

from __future__ import annotations

from narrowgauge.planner.layouts import AXES, Layout

# 480 GB is easier to compare with a chip's memory than 0.48 TB. So terabytes begin at ten.
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def bytes_text(num_bytes: float) -> str:
    """Write bytes in a suitable unit.

    Example:
        >>> bytes_text(26.25e9), bytes_text(480e9), bytes_text(-3.2e6)
        ('26.3 GB', '480 GB', '-3.2 MB')
    """
    scale, unit = unit_of(num_bytes, "bytes")
    # Round halves up, as people do.
    number = num_bytes / scale * (1 + 1e-12)
    if abs(number) >= 100:
        return f"{number:,.0f} {unit}"
    return f"{f'{number:.1f}'.removesuffix('.0')} {unit}"


def duration_text(seconds: float) -> str:
    """Write a time in the largest unit with a value of at least two, to three digits.

    Example:
        >>> duration_text(864000), duration_text(93600), duration_text(5.5 * 86400), duration_text(0.0123)
        ('10 d', '26 h', '5.5 d', '12.3 ms')
    """
    for unit, size, least in (("d", 86400.0, 1.75), ("h", 3600.0, 2.0), ("min", 60.0, 2.0)):
        value = seconds / size
        if abs(value) >= 100:
            return f"{value:,.0f} {unit}"
        if abs(value) >= least:
            return f"{value:.3g} {unit}"
    if abs(seconds) >= 1 or seconds == 0:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms"


def count_text(number: float) -> str:
    """Write a count of parameters or tokens.

    Example:
        >>> count_text(32.5e9), count_text(10e9), count_text(1_331_200_000), count_text(128)
        ('32.5B', '10B', '1.33B', '128')
    """
    for scale, unit in _COUNTS:
        if abs(number) >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:.3g}"


def unit_of(value: float, quantity: str) -> tuple[float, str]:
    """Return the size and name of the largest unit of ``"bytes"`` or ``"s"`` that makes a value at
    least one.
    """
    units = _SECONDS if quantity == "s" else _BYTES
    for scale, unit in units:
        least = 10 * scale if unit == "TB" else scale
        if abs(value) >= least:
            return scale, unit
    return units[-1]


def layout_text(layout: Layout) -> str:
    """Write a layout and its batch in a few words.

    Example:
        >>> layout_text(Layout(shard=8, micro_batch=2, micro_batches=4, recompute="full"))
        'shard 8, micro-batch 2 × 4, recompute full'
    """
    parts = [axes_text(layout), f"micro-batch {layout.micro_batch} × {layout.micro_batches}"]
    if layout.recompute != "none":
        parts.append(f"recompute {layout.recompute}")
    if layout.accumulation_dtype != "float32":
        parts.append(f"gradients summed in {layout.accumulation_dtype}")
    return ", ".join(parts)


def axes_text(layout: Layout) -> str:
    """Write the division of a model and its state among chips.

    Example:
        >>> axes_text(Layout(shard=4, zero=1, tensor=2, pipeline=4)), axes_text(Layout())
        ('shard 4 (ZeRO-1), tensor 2, pipeline 4', 'one chip')
    """
    parts = []
    for name in (*AXES, "expert"):
        size = getattr(layout, name)
        if size > 1:
            parts.append(f"{name} {size}")
            if name == "shard" and layout.zero != 3:
                parts[-1] += f" (ZeRO-{layout.zero})"
    if layout.interleave > 1:
        parts.append(f"interleaved {layout.interleave}")
    return ", ".join(parts) or "one chip"
