"""`tensorvine export` and `import`: versions as files that other tools read and write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...store.sizes import size
from ..client import Address, AsJson, Name, Scheduler, connected, console, print_json
from .options import Timeout

if TYPE_CHECKING:
    from ...store.refs import ModelRef

IMPORT_S = 600.0


def export(
    model: Annotated[str, typer.Argument(help="NAME or NAME@VERSION.", show_default=False)],
    file: Annotated[
        str,
        typer.Argument(
            help="File to write: .safetensors, .arrow or, for a Keras model, .weights.h5, on this machine or at a URI "
            "(s3://, gs://). An existing file is replaced.",
            show_default=False,
        ),
    ],
    name: Name = None,
    address: Address = None,
    scheduler: Scheduler = None,
    as_json: AsJson = False,
) -> None:
    """Write the tensors of a version to a file that other tools can read."""
    from ...store.archive import interchange

    interchange.format_of(file)  # what is wrong with it is said before anybody is asked
    with connected(name, address, scheduler) as repository:
        info = repository.info(model)
        repository.export(info.ref, file)
    if as_json:
        print_json({"ref": str(info.ref), "file": interchange.shown(file), "bytes_total": info.bytes_total})
        return
    said = f"{info.ref}, {size(info.bytes_total)} of tensors, is in {interchange.shown(file)}"
    console().print(said, soft_wrap=True)


def import_(
    file: Annotated[
        str,
        typer.Argument(
            help="File from `export` or from another tool: .safetensors, .arrow or .weights.h5.", show_default=False
        ),
    ],
    model: Annotated[str, typer.Argument(metavar="NAME", help="Name of the model.", show_default=False)],
    parent: Annotated[
        str | None,
        typer.Option(help="Parent version, NAME or NAME@VERSION. Without it: the latest version of the model."),
    ] = None,
    quality: Annotated[
        float | None, typer.Option(help="Quality of the version. Without it: the quality in the file, if any.")
    ] = None,
    timeout: Timeout = IMPORT_S,
    name: Name = None,
    address: Address = None,
    scheduler: Scheduler = None,
    as_json: AsJson = False,
) -> None:
    """Save the tensors of a file as a new version. Tensors that the parent already contains are not stored again.

    The architecture, quality and metadata are read from the file, if the file contains them.
    """
    given: dict[str, Any] = {"parent": parent, "quality": quality}
    with connected(name, address, scheduler) as repository:
        said = {key: value for key, value in given.items() if value is not None}
        saved = repository.import_(file, model, timeout=timeout, **said)
    _tell(saved.ref, saved.bytes_written, saved.bytes_inherited, as_json)


def _tell(ref: ModelRef, written: int, inherited: int, as_json: bool) -> None:
    if as_json:
        print_json({"ref": str(ref), "bytes_written": written, "bytes_inherited": inherited})
    else:
        console().print(f"{ref} is saved: {size(written)} written, {size(inherited)} inherited")
