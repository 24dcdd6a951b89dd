from .swapping import NarrowLayers as NarrowLayers
from .swapping import linears_of as linears_of
