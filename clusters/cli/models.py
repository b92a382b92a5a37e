"""`tensorvine retire` and `wait`: versions that go, and versions to come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ...store.errors import InvalidNameError, ModelNotFoundError, OperationTimeoutError, OptionError
from ...store.refs import ModelRef, Which, split_ref, text_of
from ..client import Address, AsJson, Name, Scheduler, connected, console, print_json, say_error
from .options import Timeout

if TYPE_CHECKING:
    from ...actors.client.repository import Repository

WAIT_S = 600.0


def retire(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...", help="NAME@VERSION, NAME@ALIAS, or NAME for its latest version.", show_default=False
        ),
    ],
    name: Name = None,
    address: Address = None,
    scheduler: Scheduler = None,
    as_json: AsJson = False,
) -> None:
    """Retire one or more versions. Tensors that are shared with live descendants are kept.

    If a version does not exist, or an alias names it, an error is printed, the other versions are still retired, and
    the exit code is 1. If an argument is not a valid reference, no version is retired.
    """
    gone: list[ModelRef] = []
    missing: list[str] = []
    asked = [split_ref(model) for model in models]
    with connected(name, address, scheduler) as repository:
        try:
            for ref in _found(repository, asked, missing):
                try:
                    repository.retire(ref)
                except (ModelNotFoundError, OptionError) as exc:  # somebody else was faster, or an alias names it
                    missing.append(str(ref))
                    say_error(exc)
                    continue
                gone.append(ref)
                if not as_json:
                    console().print(f"{ref} is retired")
        finally:  # also when a shard dies half way
            if as_json:
                print_json({"retired": [str(ref) for ref in gone], "missing": missing})
    if missing:
        raise typer.Exit(1)


def wait(
    model: Annotated[str, typer.Argument(help="NAME or NAME@VERSION.", show_default=False)],
    timeout: Timeout = WAIT_S,
    name: Name = None,
    address: Address = None,
    scheduler: Scheduler = None,
    as_json: AsJson = False,
) -> None:
    """Wait for a version of a model, and print the newest version.

    With NAME@VERSION, wait until this version or a newer version exists: NAME@1 waits for any version. With NAME, wait
    for a version that is newer than all existing versions. After a timeout, the exit code is 1.
    """
    known, version = split_ref(model)
    if isinstance(version, str):
        raise InvalidNameError(f"wait: expected NAME or NAME@VERSION; found the alias {model}")
    with connected(name, address, scheduler) as repository:
        after = version - 1 if version is not None else _latest(repository, known)
        with console(stderr=True).status(f"waiting for a version of {known} above {after}"):
            ref = repository.wait_newer(known, after, timeout)
    if ref is None:
        raise OperationTimeoutError(f"{known}: expected a version above {after} within {timeout:g} s; found none")
    if as_json:
        print_json({"ref": str(ref)})
    else:
        console().print(str(ref))


def _found(repository: Repository, asked: list[tuple[str, Which]], missing: list[str]) -> list[ModelRef]:
    """Return the versions that are there, each once, before any of them goes; name the others in `missing`."""
    found: dict[ModelRef, None] = {}
    for model in (text_of(*each) for each in asked):
        try:
            found[repository.info(model).ref] = None
        except ModelNotFoundError as exc:
            missing.append(model)
            say_error(exc)
    return list(found)


def _latest(repository: Repository, name: str) -> int:
    try:
        return repository.info(name).ref.version
    except ModelNotFoundError:
        return 0
