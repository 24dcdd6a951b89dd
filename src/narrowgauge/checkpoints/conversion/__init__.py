"""Conversion of a training state from one storage, or from another library, to any storage.

Every stored value can be read as float32 (an expansion loses only bits below float32's last). A conversion reads float32
values and rounds them once: exactly where the new code holds the value, else weights to nearest and moments as their code
rounds. Every loss is counted. A parameter whose storage does not change keeps its bits. ``source`` is the state as read by
``foreign`` and ``folders``, ``states`` converts it, and ``conversion_report`` describes the losses.
"""
