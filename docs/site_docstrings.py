"""Turn the doctests at the end of docstrings into examples on the site."""

import textwrap
from typing import Any

import griffe


class Doctests(griffe.Extension):
    """An extension of the reader of docstrings, which `mkdocs.yml` names."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Put the doctests of an object's docstring under a title."""
        if obj.docstring is not None:
            obj.docstring.value = titled(obj.docstring.value)


def titled(docstring: str) -> str:
    """Return a docstring whose doctests are a section."""
    words, mark, doctests = docstring.partition("\n>>> ")
    if not mark:
        return docstring
    return f"{words}\nExamples:\n{textwrap.indent('>>> ' + doctests, '    ')}"
