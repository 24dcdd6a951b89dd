from .reading import Readings as Readings
from .row_laws import RowLaws as RowLaws
