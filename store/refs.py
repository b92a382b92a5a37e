"""References to models: `name@version`.

A name is 1 to 200 characters of `A-Z a-z 0-9 . _ - /`, does not start with `/` and has no `..` part.
Versions of one name count up from 1 and are never used twice. An alias of a version, as in `name@prod`, is 1 to 64
characters of `A-Z a-z 0-9 . _ -` and starts with a letter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from .errors import InvalidNameError

_NAME = re.compile(r"[A-Za-z0-9._\-/]{1,200}", re.ASCII)
_VERSION = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)
_ALIAS = re.compile(r"[A-Za-z][A-Za-z0-9._\-]{0,63}", re.ASCII)


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
        if not isinstance(version, int):
            raise InvalidNameError(f"model reference: expected 'name@version'; found {text[:250]!r}")
        return cls(name, version)


class HasRef(Protocol):
    """An answer about one version: `Saved`, `ModelInfo`, `PrefixMatch`, `Inference`."""

    @property
    def ref(self) -> ModelRef:
        """The version."""
        ...


Model: TypeAlias = ModelRef | HasRef | str
"""A version: a reference, an answer that has one as `.ref`, `"name@3"`, `"name@prod"` for the version that an alias
names, or `"name"` for the latest version."""
Which: TypeAlias = int | str | None
"""Which version of a name: its number, an alias, or None for the latest version."""


LAST_VERSION = 10**18 - 1


def _is_version(version: object) -> bool:
    return isinstance(version, int) and not isinstance(version, bool) and 1 <= version <= LAST_VERSION


def check_alias(alias: object) -> str:
    """Return `alias` if it is a legal alias.

    Raises:
        InvalidNameError: naming the rule that it breaks.

    >>> check_alias("prod")
    'prod'
    """
    if not isinstance(alias, str) or not _ALIAS.fullmatch(alias):
        found = repr(alias[:250]) if isinstance(alias, str) else type(alias).__name__
        raise InvalidNameError(
            f"alias: expected 1 to 64 characters of A-Z a-z 0-9 . _ -, the first one a letter; found {found}"
        )
    return alias


def check_followed(name: str) -> str:
    """Return `name` if it can be followed: a model's name, or `name@alias`.

    Raises:
        InvalidNameError: it is neither.
    """
    which = split_ref(name)[1]
    if isinstance(which, int):
        raise InvalidNameError(f"model: expected 'name' or 'name@alias'; found {name!r}, which is one version")
    return name


def text_of(name: str, which: Which) -> str:
    """Return the reference as text.

    >>> text_of("digits", "prod"), text_of("digits", None)
    ('digits@prod', 'digits')
    """
    return name if which is None else f"{name}@{which}"


def split_ref(model: Model) -> tuple[str, Which]:
    """Return the name of `model`, and which version it is.

    Raises:
        InvalidNameError: `model` is none of the kinds of `Model`, or a malformed reference.

    >>> split_ref("digits"), split_ref("digits@2"), split_ref("digits@prod")
    (('digits', None), ('digits', 2), ('digits', 'prod'))
    """
    if isinstance(model, ModelRef):
        return model.name, model.version
    if not isinstance(model, str):
        ref = getattr(model, "ref", None)
        if not isinstance(ref, ModelRef):
            raise InvalidNameError(
                "model: expected a ModelRef, an object with one as .ref, or a string 'name', 'name@version' or "
                f"'name@alias'; found {type(model).__name__}"
            )
        return ref.name, ref.version
    name, at, version = model.partition("@")
    check_name(name)
    if not at:
        return name, None
    if _ALIAS.fullmatch(version):
        return name, version
    if not _VERSION.fullmatch(version):
        raise InvalidNameError(
            f"model reference: expected 'name@version', version from 1, or 'name@alias'; found {model[:250]!r}"
        )
    return name, int(version)
