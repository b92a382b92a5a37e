"""References to models: `name@version`.

A name is 1 to 200 characters of `A-Z a-z 0-9 . _ - /`, does not start with `/` and has no `..` part.
Versions of one name count up from 1 and are never used twice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from .errors import InvalidNameError

_NAME = re.compile(r"[A-Za-z0-9._\-/]{1,200}", re.ASCII)
_VERSION = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)


def check_name(name: object) -> str:
    """Return `name` if it is a legal model name.

    Raises:
        InvalidNameError: naming the rule that it breaks.

    >>> check_name("nas/candidate-7")
    'nas/candidate-7'
    """
    rule = "1 to 200 characters of A-Z a-z 0-9 . _ - /, no leading '/', no '..' part"
    if not isinstance(name, str):
        raise InvalidNameError(f"model name: expected a string of {rule}; found {type(name).__name__}")
    if not _NAME.fullmatch(name) or name.startswith("/") or ".." in name.split("/"):
        raise InvalidNameError(f"model name: expected {rule}; found {name[:250]!r}")
    return name


@dataclass(frozen=True, order=True, slots=True)
class ModelRef:
    """A reference to one version of a model, such as `digits@3`. References sort by name, then by version.

    Raises:
        InvalidNameError: if the name is malformed, or the version is not an integer from 1 to 10**18 - 1.

    >>> ModelRef.parse("digits@3")
    ModelRef('digits@3')
    >>> str(ModelRef("digits", 3))
    'digits@3'
    """

    name: str
    """Name of the model."""
    version: int
    """Version number, counted from 1 for each model."""

    def __post_init__(self) -> None:
        check_name(self.name)
        if not _is_version(self.version):
            raise InvalidNameError(
                f"version of model {self.name!r}: expected an integer of at least 1; found {self.version!r}"
            )

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"

    def __repr__(self) -> str:
        return f"ModelRef('{self.name}@{self.version}')"

    @classmethod
    def parse(cls, text: str) -> ModelRef:
        """Create a reference from text of the form `name@version`.

        Raises:
            InvalidNameError: if the text is malformed or has no version.
        """
        name, version = split_ref(text)
        if version is None:
            raise InvalidNameError(f"model reference: expected 'name@version'; found {text[:250]!r}")
        return cls(name, version)


class HasRef(Protocol):
    """An answer about one version: `Saved`, `ModelInfo`, `PrefixMatch`, `Inference`."""

    @property
    def ref(self) -> ModelRef:
        """The version."""
        ...


Model: TypeAlias = ModelRef | HasRef | str
"""A version: a reference, an answer that has one as `.ref`, `"name@3"`, or `"name"` for the latest version."""


LAST_VERSION = 10**18 - 1


def _is_version(version: object) -> bool:
    return isinstance(version, int) and not isinstance(version, bool) and 1 <= version <= LAST_VERSION


def split_ref(model: Model) -> tuple[str, int | None]:
    """Return the name and the version of `model`; a version of None means the latest.

    Raises:
        InvalidNameError: `model` is none of the kinds of `Model`, or a malformed reference.

    >>> split_ref("digits"), split_ref("digits@2")
    (('digits', None), ('digits', 2))
    """
    if isinstance(model, ModelRef):
        return model.name, model.version
    if not isinstance(model, str):
        ref = getattr(model, "ref", None)
        if not isinstance(ref, ModelRef):
            raise InvalidNameError(
                "model: expected a ModelRef, an object with one as .ref, or a string 'name' or 'name@version'; "
                f"found {type(model).__name__}"
            )
        return ref.name, ref.version
    name, at, version = model.partition("@")
    check_name(name)
    if not at:
        return name, None
    if not _VERSION.fullmatch(version):
        raise InvalidNameError(f"model reference: expected 'name@version', version from 1; found {model[:250]!r}")
    return name, int(version)
