from .checking import CheckWarning as CheckWarning
