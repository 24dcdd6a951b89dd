"""The fixtures of tests that train."""

from trainer.fixtures import place as place
from trainer.fixtures import uninterrupted as uninterrupted
