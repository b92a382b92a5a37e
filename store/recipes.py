"""What is stored to build a version's model again: a recipe, or a note of why there is none.

Rules
- It is JSON text. A recipe is read by the adapter of the framework that wrote it; which one that is, the text says, so
  that the other framework is not imported.
- A model that no recipe can be written of has a note in its place.
- Anyone who can write to the path can write a recipe. Names in it are checked before a framework reads it: a recipe may
  name parts of models and functions of tensors. The code of these may raise anything, and all of it is a GraphError.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
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
    tensorvine.store.errors.GraphError: expected a model with a recipe to build it; it was saved without one: ...
    """
    try:
        entries = jsontext.mapping(recipe, "recipe")
    except CorruptDataError as exc:
        raise GraphError(f"recipe: expected a text from recipe_of; found {exc}") from exc
    if _NOTE in entries:
        raise GraphError(f"expected a model with a recipe to build it; it was saved without one: {entries[_NOTE]}")
    return "torch" if TORCH in entries else "keras"


def check_module(name: str) -> None:
    """Refuse a module that is a program, which would run when it is imported; the running one is imported already.

    Raises:
        GraphError: it is one.

    >>> check_module("torch.nn")
    >>> check_module("json.__main__")
    Traceback (most recent call last):
    tensorvine.store.errors.GraphError: recipe: expected modules that can be imported; found the program 'json.__main__'
    """
    if "__main__" in name.split(".") and name not in sys.modules:
        raise GraphError(f"recipe: expected modules that can be imported; found the program {name!r}")


@contextmanager
def building(expected: str, found: Callable[[BaseException], str] = repr) -> Generator[None]:
    """Turn all that the code of a recipe raises into a GraphError, SystemExit too. Ctrl-C stays KeyboardInterrupt.

    Args:
        expected: begins the message.
        found: describes what was raised.
    """
    try:
        yield
    except (GraphError, KeyboardInterrupt):
        raise
    except BaseException as exc:
        raise GraphError(f"{expected}; found {found(exc):.600}") from exc
