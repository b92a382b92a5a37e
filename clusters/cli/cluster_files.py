"""`tensorvine cluster-files`: the files that start clusters, filled in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...store.errors import OptionError
from .. import files
from ..client import console

Text = str | None


def cluster_files(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"One of {', '.join(files.KINDS)}.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to write the files to.", file_okay=False)],
    wheel: Annotated[
        Path | None,
        typer.Option(
            help="Wheel from scripts/wheel, with constraints.txt in the same directory.", exists=True, dir_okay=False
        ),
    ] = None,
    extras: Annotated[Text, typer.Option(help="Extras to install with the wheel, such as torch,search.")] = None,
    head_ip: Annotated[Text, typer.Option(help="Address of the head node.")] = None,
    worker_ips: Annotated[Text, typer.Option(help="Addresses of the other nodes, separated by commas.")] = None,
    ssh_user: Annotated[Text, typer.Option(help="User on all nodes.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Number of nodes of the job.", min=1)] = None,
    image: Annotated[Text, typer.Option(help="Container image, as REGISTRY/NAME:TAG.")] = None,
    bucket: Annotated[Text, typer.Option(help="Bucket for the history.")] = None,
    project: Annotated[Text, typer.Option(help="Project on Google Cloud.")] = None,
    ami: Annotated[Text, typer.Option(help="Machine image (AMI) on AWS.")] = None,
    path: Annotated[
        Text, typer.Option(help="Directory or URI for the history. Every node must be able to access it.")
    ] = None,
    codec: Annotated[Text, typer.Option(help="Codec of the tensors on disk, such as 'shuffle|zstd(3)'.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """Write configuration files or scripts for TensorVine on a cluster, and list the values that are still missing.

    The accepted options depend on KIND.
    """
    given = {
        "wheel": _beside_constraints(wheel),
        "extras": extras,
        "head_ip": head_ip,
        "worker_ips": worker_ips,
        "ssh_user": ssh_user,
        "nodes": None if nodes is None else str(nodes),
        "image": image,
        "bucket": bucket,
        "project": project,
        "ami": ami,
        "path": path,
        "codec": codec,
    }
    values = {name: value for name, value in given.items() if value is not None}
    chosen, folder = _kind(kind), folder.absolute()
    _refuse_unknown(kind, chosen, values)
    try:
        texts = files.fill(chosen, values, folder)
    except OptionError as exc:
        raise typer.BadParameter(str(exc)) from exc
    out = console()
    for written in files.write(texts, folder, force):
        out.print(str(written), soft_wrap=True)
    for name, example in files.left(chosen, values).items():
        out.print(f"still to be filled in: --{files.flag(name)}, at present {example}", soft_wrap=True)


def _kind(name: str) -> files.Kind:
    if name not in files.KINDS:
        raise typer.BadParameter(f"expected one of {', '.join(files.KINDS)}; found {name!r}", param_hint="KIND")
    return files.KINDS[name]


def _beside_constraints(wheel: Path | None) -> str | None:
    if wheel is None:
        return None
    if wheel.suffix != ".whl" or not (wheel.parent / "constraints.txt").is_file():
        raise typer.BadParameter(
            f"expected a wheel with constraints.txt in the same directory; found {wheel}", param_hint="--wheel"
        )
    return str(wheel.absolute())


def _refuse_unknown(name: str, kind: files.Kind, values: dict[str, str]) -> None:
    unknown = [f"--{files.flag(value)}" for value in values if value not in kind.blanks]
    if unknown:
        known = ", ".join(f"--{files.flag(blank)}" for blank in kind.blanks)
        raise typer.BadParameter(f"{name} does not accept {', '.join(unknown)}; expected some of {known}")
