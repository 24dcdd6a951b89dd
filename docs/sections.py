"""Let a docstring's sections follow each other without empty lines between them.

The reader that turns docstrings into pages takes ``Returns:`` for a section only after an empty
line. In the source the sections stand close together, so the empty lines are put in here, where the
pages are made.
"""

from __future__ import annotations

import re

import griffe

SECTION = re.compile(r"(?<=[^\n])\n(?=(?:Args|Attributes|Returns|Yields|Raises|Example|Examples):)")


class SpacedSections(griffe.Extension):
    """Put an empty line before every section of every docstring."""

    def on_instance(self, *, obj: griffe.Object, **_context) -> None:
        """Called for each module, class, function and attribute as it is read."""
        if obj.docstring is not None:
            obj.docstring.value = SECTION.sub("\n\n", obj.docstring.value)
