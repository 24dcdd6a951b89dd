from .tensors import Gauges as Gauges
