from .writer import Record as Record
