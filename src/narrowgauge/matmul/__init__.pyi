from .swapping import NarrowLayers as NarrowLayers
