from .hub import RunNotice as RunNotice
from .tensors import Gauges as Gauges
