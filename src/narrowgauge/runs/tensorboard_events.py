"""TensorBoard's event files, read by the tensorboard package, without TensorFlow.

The files of one folder are one run, the later ones of its resumes. Steps are those that were logged; a log of losses that begins
at step 0, as Lightning's does, is counted from 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from narrowgauge.errors import RecordError
from narrowgauge.runs.foreign_names import Log, named

_PATTERN = "*.tfevents.*"


def find(path: Path) -> list[Path]:
    """The file itself, or those of the folder, the oldest first."""
    if path.is_file() and path.match(_PATTERN):
        return [path]
    return sorted(place for place in path.glob(_PATTERN) if place.is_file()) if path.is_dir() else []


def read(files: list[Path]) -> Log:
    """The scalars; a last record that is cut short, as of a run in progress, is left out.

    Raises:
        RecordError: the tensorboard package is not installed.
        ValueError: a file is damaged.
    """
    log = Log()
    for file in files:
        for event in _events(file):
            for value in event.summary.value:
                if (number := _scalar(value)) is not None:
                    log.add(value.tag, event.step, number)
    first = named(log.values, "loss")
    if first is not None and min(log.values[first]) == 0:
        log.values = {name: {step + 1: value for step, value in series.items()} for name, series in log.values.items()}
    return log


def _events(file: Path) -> Iterator[Any]:
    try:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.compat.tensorflow_stub import errors
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
    except ImportError as error:
        raise RecordError(
            f"Cannot read {file}: the package tensorboard is not installed.", "pip install tensorboard."
        ) from error
    records = PyRecordReader_New(str(file))
    try:
        while True:
            try:
                records.GetNext()
            except errors.OutOfRangeError:
                return
            except errors.DataLossError as error:
                if "runcated" in str(error):
                    return
                raise ValueError(str(error.message).removeprefix(f"{file} ")) from error
            yield event_pb2.Event.FromString(records.record())
    finally:
        records.file_handle.close()


def _scalar(value: Any) -> float | None:
    """A scalar of either kind: ``simple_value`` of PyTorch's writer, or a tensor of TensorFlow's."""
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not value.HasField("tensor") or value.tensor.tensor_shape.dim:
        return None
    from tensorboard.util.tensor_util import make_ndarray

    array = make_ndarray(value.tensor)
    return float(array) if array.dtype.kind in "fiu" else None
