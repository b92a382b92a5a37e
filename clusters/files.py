"""The files that start clusters, and what is to be filled in.

Rules
- The files lie in `batch`, `dask`, `kuberay` and `ray_up`, and are valid as they are. What differs from cluster to
  cluster stands in them as an example; a `Blank` says as which, and nothing else is ever replaced.
- All is replaced in one pass, so that no value is taken for an example of another blank.
- A value that a shell, YAML or Docker could read as more than a value is refused.
- Nothing is written before all values are known to be right.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..store.errors import CodecError, OptionError, StorageError

HERE = Path(__file__).parent
WHEEL = "tensorvine-0.1.0-py3-none-any.whl"
"""As it stands in the files."""
PLACE = r"/[\w./@%+=-]*"
NAME = r"[A-Za-z0-9][\w.-]*"


@dataclass(frozen=True)
class Blank:
    """One thing that differs from cluster to cluster."""

    stands: Mapping[str, str]
    """An example as it stands in the files -> what becomes of it; {value}, or what `_parts` makes of the value."""
    like: str = NAME
    """The pattern of right values."""
    needed: bool = True
    """Whether the files start nothing, or not what one wants, with the example."""


@dataclass(frozen=True)
class Kind:
    """The files of one way to start a cluster."""

    files: tuple[str, ...]
    """Those with blanks, from here on. Each goes into the folder by its name."""
    blanks: Mapping[str, Blank]
    shared: tuple[str, ...] = ()
    """Those beside them that are the same for all."""


_CODEC = Blank({"shuffle|zstd(3)": "{value}"}, r"[\w|(),.]+", needed=False)
_MOUNTED = Blank(
    {f"dist/{WHEEL}": "{value}", WHEEL: "{name}", "dist/constraints.txt": "{folder}/constraints.txt"}, PLACE
)
_INSTALLED = Blank({"${TENSORVINE_WHEEL:-}": "${{TENSORVINE_WHEEL:-{value}}}"}, PLACE, needed=False)
_COPIED = Blank({" dist/": " {folder}/"}, PLACE)
_EXTRAS = r"[a-z]+(,[a-z]+)*"
_USER = Blank({"ssh_user: ubuntu": "ssh_user: {value}"}, r"[a-z_][\w-]*", needed=False)
_ALL = "tensorflow,torch,search"


def _ray_up(file: str, **blanks: Blank) -> Kind:
    shared = {"wheel": _MOUNTED, "extras": Blank({_ALL: "{value}"}, _EXTRAS, needed=False), "codec": _CODEC}
    return Kind((f"ray_up/{file}",), {**blanks, **shared}, ("batch/install.sh",))


def _batch(file: str, nodes: str) -> Kind:
    path = Blank({"$HOME/tensorvine-models": "{value}"}, rf"({PLACE}|[a-z][a-z0-9+]*:/{PLACE})", needed=False)
    blanks = {
        "wheel": _INSTALLED,
        "extras": Blank({_ALL: "{value}"}, _EXTRAS, needed=False),
        "nodes": Blank({f"{nodes}=4": f"{nodes}={{value}}"}, r"[1-9]\d*", needed=False),
        "path": path,
        "codec": _CODEC,
    }
    return Kind((f"batch/{file}",), blanks, ("batch/install.sh", "batch/job.sh", "batch/node.sh"))


def _images(files: tuple[str, ...], image: str, extras: str) -> Kind:
    blanks = {
        "image": Blank({f"YOUR-REGISTRY/tensorvine:0.1.0-{image}": "{value}"}, r"[A-Za-z0-9][\w./:@-]*"),
        "wheel": _COPIED,
        "extras": Blank({f"EXTRAS={extras}": "EXTRAS={value}"}, _EXTRAS, needed=False),
        "codec": _CODEC,
    }
    return Kind(files, blanks)


_BUCKET = Blank({"YOUR-BUCKET": "{value}"})
KINDS: Mapping[str, Kind] = {
    "ray-up-hosts": _ray_up(
        "hosts.yaml",
        head_ip=Blank({"head_ip: 10.0.0.10": "head_ip: {value}"}),
        worker_ips=Blank(
            {
                "worker_ips: [10.0.0.11, 10.0.0.12, 10.0.0.13]": "worker_ips: [{listed}]",
                "min_workers: 3": "min_workers: {count}",
                "max_workers: 3": "max_workers: {count}",
            },
            rf"{NAME}(,{NAME})*",
        ),
        ssh_user=Blank(_USER.stands, _USER.like),
        path=Blank({"/shared/tensorvine/models": "{value}"}, rf"({PLACE}|[a-z][a-z0-9+]*:/{PLACE})"),
    ),
    "ray-up-aws": _ray_up("aws.yaml", bucket=_BUCKET, ami=Blank({"YOUR-AMI": "{value}"}), ssh_user=_USER),
    "ray-up-gcp": _ray_up("gcp.yaml", bucket=_BUCKET, project=Blank({"YOUR-PROJECT": "{value}"}), ssh_user=_USER),
    "slurm": _batch("slurm.sh", "#SBATCH --nodes"),
    "pbs": _batch("pbs.sh", "#PBS -l select"),
    "kuberay": _images(("kuberay/raycluster.yaml", "kuberay/Dockerfile"), "ray2.60.0", _ALL),
    "dask-kubernetes": _images(("dask/daskcluster.yaml", "dask/Dockerfile"), "dask2026.8.0", "tensorflow,torch"),
}


def fill(kind: Kind, values: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Fill the files of a kind in: name -> text.

    Args:
        kind: which files.
        values: blank -> value, for some of the kind's blanks.
        folder: where they will lie; they name one another by it.

    Raises:
        OptionError: a value is not one of its blank.
    """
    every = (*kind.files, *kind.shared)
    placed = {f"clusters/{file}": _checked("DIR", f"{folder}/{Path(file).name}", PLACE) for file in every}
    for name, value in values.items():
        parts = _parts(_checked(f"--{flag(name)}", value, kind.blanks[name].like))
        placed |= {example: text.format_map(parts) for example, text in kind.blanks[name].stands.items()}
        if name == "codec":
            _check_codec(value)
    longest_first = sorted(placed, key=len, reverse=True)
    examples = re.compile("|".join(map(re.escape, longest_first)))
    texts = {file: (HERE / file).read_text() for file in every}
    texts |= {file: examples.sub(lambda found: placed[found[0]], texts[file]) for file in kind.files}
    return {Path(file).name: text for file, text in texts.items()}


def left(kind: Kind, values: Mapping[str, str]) -> dict[str, str]:
    """Return what is still to be filled in: blank -> the example that stands for it, and in which files."""
    found: dict[str, str] = {}
    for name, blank in kind.blanks.items():
        if blank.needed and name not in values:
            example = next(iter(blank.stands)).strip()
            files = [Path(file).name for file in kind.files if example in (HERE / file).read_text()]
            found[name] = f"{example} in {', '.join(files)}"
    return found


def write(texts: Mapping[str, str], folder: Path, force: bool) -> list[Path]:
    """Write files into a folder, which is made where there is none.

    Raises:
        StorageError: one is there already, and not `force`; or the file system refuses.
    """
    there = [name for name in texts if (folder / name).exists()]
    if there and not force:
        raise StorageError(
            f"{folder}: expected that none of the files exists; found {', '.join(there)}: --force overwrites them"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            made = folder / f".{name}.new"
            made.write_text(text)
            made.chmod(0o755 if name.endswith(".sh") else 0o644)
            made.replace(folder / name)
    except OSError as exc:
        raise StorageError(f"{folder}: expected a writable folder; found {exc}") from exc
    return [folder / name for name in texts]


def flag(name: str) -> str:
    """Return a blank's name as a flag has it."""
    return name.replace("_", "-")


def _parts(value: str) -> dict[str, str]:
    """Return what may stand in a file for a value: as it is, as a list, its length, and a path's two ends."""
    words, path = value.split(","), Path(value)
    listed = {"listed": ", ".join(words), "count": str(len(words))}
    return {"value": value, **listed, "name": path.name, "folder": str(path.parent)}


def _checked(what: str, value: str, like: str) -> str:
    if not re.fullmatch(like, value, re.ASCII):
        raise OptionError(f"{what}: expected a value that matches {like}; found {value!r}")
    return value


def _check_codec(value: str) -> None:
    from ..store.codecs.codec import from_spec

    try:
        from_spec(value)
    except CodecError as exc:
        raise OptionError(f"--codec: {exc}") from exc
