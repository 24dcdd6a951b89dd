from .reading import Readings as Readings
