from .laws import Laws as Laws
from .reading import Readings as Readings
