"""What is stored to build a version's model again: a recipe, or a note of why there is none.

Rules
- It is JSON text. A recipe is read by the adapter of the framework that wrote it; which one that is, the text says, so
  that the other framework is not imported.
- A model that no recipe can be written of has a note in its place.
"""

from __future__ import annotations

import json
from typing import Literal

from .bounds import jsontext
from .errors import CorruptDataError, GraphError

TORCH = "torch"
"""The key under which PyTorch's recipes stand."""
_NOTE = "without_recipe"


def note_of(reason: str) -> str:
    """Write what stands in the place of a recipe: why there is none.

    >>> note_of("its class is defined in a function")
    '{"without_recipe":"its class is defined in a function"}'
    """
    return json.dumps({_NOTE: reason}, separators=(",", ":"))


def is_note(recipe: str) -> bool:
    """Tell whether a text stands in the place of a recipe.

    >>> is_note(note_of("it holds a lambda")), is_note('{"torch": {}}')
    (True, False)
    """
    return recipe.startswith(f'{{"{_NOTE}":')


def framework_of(recipe: str) -> Literal["keras", "torch"]:
    """Return whose recipe it is.

    Raises:
        GraphError: the text is a note, or neither.

    >>> framework_of('{"torch": {}}')
    'torch'
    >>> framework_of(note_of("it holds a lambda"))
    Traceback (most recent call last):
    tensorvine.store.errors.GraphError: expected a model that can be built again; it was saved without a recipe, ...
    """
    try:
        entries = jsontext.mapping(recipe, "recipe")
    except CorruptDataError as exc:
        raise GraphError(f"recipe: expected what recipe_of writes; found {exc}") from exc
    if _NOTE in entries:
        raise GraphError(f"expected a model that can be built again; it was saved without a recipe, {entries[_NOTE]}")
    return "torch" if TORCH in entries else "keras"
