"""`tensorvine repos`, `status`, `ls` and `show`: which repositories run, and what one holds."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from ...store.errors import ModelNotFoundError, TensorVineError
from ...store.facts import Json
from ...store.sizes import size
from .. import words
from ..client import Address, AsJson, Name, Scheduler, connected, console, joined, print_json, running_at, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from ...actors.client.repository import Repository
    from ...actors.client.stats import RepositoryStats
    from ...store.refs import ModelRef
    from ...store.shard import ShardStats
    from ...store.versions.manifest import ModelInfo
    from ..nodes import Machine

PATIENCE_S = 10.0
"""For all shards to say what they hold."""
SAID = 200
"""Characters of why one does not."""
CONFIG_WIDTH = 48
"""Characters for a layer's config in a line."""


class _Layer(TypedDict):
    """A layer, as JSON shows it."""

    name: str
    config: dict[str, object]
    inputs: list[str]
    tensors: dict[str, str]
    """Tensor -> the version that wrote it."""


def repos(address: Address = None, scheduler: Scheduler = None, as_json: AsJson = False) -> None:
    """List the repositories that run on a cluster, and the number of shards of each repository."""
    from ...actors.rpc.messages import repositories

    place = running_at(address, scheduler)
    with joined(place) as engine:
        found = repositories(engine.actors())
    if as_json:
        print_json([{"repository": known, "shards": shards} for known, shards in found.items()])
        return
    rows = table(f"repositories on {place}", "repository", right=("shards",))
    for known, shards in found.items():
        rows.add_row(known, str(shards))
    console().print(rows)


def status(name: Name = None, address: Address = None, scheduler: Scheduler = None, as_json: AsJson = False) -> None:
    """Show the nodes of the cluster, and the contents and memory use of each shard of a repository.

    The exit code is 1 if a shard does not answer.
    """
    from ...actors.client.stats import RepositoryStats
    from ..nodes import machines

    with connected(name, address, scheduler) as repository:
        catalog, told = repository.catalog_stats(PATIENCE_S), repository.stats_by_shard(PATIENCE_S)
        known = repository.name
        found, where = machines(repository.engine), repository.engine.actors()
    silent = {shard: " ".join(str(why).split()) for shard, why in told.items() if isinstance(why, TensorVineError)}
    stats = RepositoryStats.of(catalog, [holds for holds in told.values() if not isinstance(holds, TensorVineError)])
    here = {shard: where.get(f"{known}/shard-{shard}") or "" for shard in told}
    if as_json:
        nodes = [
            {**asdict(machine), "shards": [s for s, node in here.items() if node == machine.id]} for machine in found
        ]
        print_json({"repository": known, "nodes": nodes, **asdict(stats), "silent": silent})
    else:
        _print_status(known, stats, found, here, silent)
    if silent:
        raise typer.Exit(1)


def _print_status(
    name: str, stats: RepositoryStats, found: list[Machine], here: dict[int, str], silent: dict[int, str]
) -> None:
    out = console()
    out.print(_nodes(found, here))
    out.print(_shards(name, stats, {machine.id: machine.address for machine in found}, here))
    for shard, why in silent.items():
        out.print(f"shard {shard} does not answer: {why:.{SAID}}", style="red", soft_wrap=True)
    catalog = stats.catalog
    metadata = f"{size(catalog.bytes_metadata)} of {size(catalog.capacity)} of metadata"
    unwritten = words.count(catalog.versions_unwritten, "version")
    out.print(f"catalog: {metadata}, {words.count(catalog.pins, 'pin')}, {unwritten} not yet on disk", soft_wrap=True)
    if catalog.manifests_unread or catalog.files_orphaned:
        unread = words.count(catalog.manifests_unread, "manifest")
        orphans = words.count(catalog.files_orphaned, "unused file")
        out.print(f"the path: cannot read {unread} at present; found {orphans}")


def ls(
    prefix: Annotated[str, typer.Argument(help="Show only names with this prefix.", show_default=False)] = "",
    name: Name = None,
    address: Address = None,
    scheduler: Scheduler = None,
    as_json: AsJson = False,
) -> None:
    """List live versions with parent, creation time, quality, bytes written, total bytes and percentage inherited."""
    with connected(name, address, scheduler) as repository:
        found, aliases = _infos(repository, prefix), _aliases(repository, prefix)
    if as_json:
        print_json([_info_dict(info, aliases) for info in found])
        return
    title = words.count(len(found), "version") + (f" of {prefix}*" if prefix else "")
    columns = ("version", *(["aliases"] if aliases else []), "parent", "created (UTC)")
    rows = table(title, *columns, right=("quality", "written", "total", "inherited"))
    for info in found:
        parent = str(info.parent) if info.parent else "-"
        sizes = size(info.bytes_owned), size(info.bytes_total), _inherited(info)
        names = [", ".join(aliases.get(info.ref, ()))] if aliases else []
        rows.add_row(str(info.ref), *names, parent, words.moment(info.created), words.quality(info.quality), *sizes)
    console().print(rows)


def show(
    model: Annotated[str, typer.Argument(help="NAME, NAME@VERSION or NAME@ALIAS.", show_default=False)],
    name: Name = None,
    address: Address = None,
    scheduler: Scheduler = None,
    as_json: AsJson = False,
) -> None:
    """Show the metadata and the layers of a version. For each layer, show the versions that wrote its tensors."""
    with connected(name, address, scheduler) as repository:
        info = repository.info(model)
        graph, owners = repository.graph(info.ref), repository.owners(info.ref)
        aliases = _aliases(repository, info.ref.name)
    layers: list[_Layer] = [
        {
            "name": layer.name,
            "config": dict(layer.config),
            "inputs": list(layer.inputs),
            "tensors": {tensor: str(owners[tensor]) for tensor in layer.tensors if tensor in owners},
        }
        for layer in graph.layers
    ]
    others = {tensor: str(owners[tensor]) for tensor in owners.keys() - {t for row in layers for t in row["tensors"]}}
    if as_json:
        print_json({**_info_dict(info, aliases), "layers": layers, "other_tensors": others})
        return
    _print_model(info, aliases.get(info.ref, []), layers, others)


def _nodes(found: list[Machine], here: dict[int, str]) -> Table:
    stores = ("object store",) if any(machine.store_bytes for machine in found) else ()
    numbers = ("CPUs", "GPUs", "memory", *stores)
    rows = table(words.count(len(found), "node"), "address", "shards", right=numbers)
    for machine in found:
        shards = ", ".join(str(shard) for shard, node in here.items() if node == machine.id)
        sizes = size(machine.memory_bytes), *([size(machine.store_bytes)] if stores else [])
        rows.add_row(machine.address, shards or "-", f"{machine.cpus:g}", f"{machine.gpus:g}", *sizes)
    return rows


def _shards(name: str, stats: RepositoryStats, addresses: dict[str, str], here: dict[int, str]) -> Table:
    numbers = ("models", "tensors", "in memory", "resident", "capacity", "free", "on disk", "unwritten")
    rows = table(f"repository {name}", "shard", "node", right=numbers)
    known = {s.shard: s for s in stats.shards}
    for shard in sorted(here):
        node = addresses.get(here[shard], "-")
        if (s := known.get(shard)) is None:
            rows.add_row(str(shard), node, *["-"] * len(numbers), style="red")
            continue
        sizes = s.bytes_memory, s.bytes_resident, s.capacity, _free(s), s.bytes_disk, s.bytes_unwritten
        rows.add_row(str(shard), node, "", f"{s.tensors:,}", *map(size, sizes))
    shards = stats.shards
    taken, reserved = sum(s.bytes_resident for s in shards), sum(s.capacity for s in shards)
    behind = sum(s.bytes_unwritten for s in shards)
    sizes = stats.bytes_memory, taken, reserved, sum(map(_free, shards)), stats.bytes_disk, behind
    rows.add_section()
    rows.add_row("all", "", f"{stats.models:,}", f"{stats.tensors:,}", *map(size, sizes))
    return rows


def _free(shard: ShardStats) -> int:
    """Return the bytes that nobody has of what a shard may fill."""
    return max(0, shard.capacity - shard.bytes_allocated - shard.bytes_staged - shard.bytes_replicated)


def _infos(repository: Repository, prefix: str) -> list[ModelInfo]:
    found: list[ModelInfo] = []
    for ref in repository.models(prefix):
        try:
            found.append(repository.info(ref))
        except ModelNotFoundError:  # retired just now
            continue
    return found


def _aliases(repository: Repository, prefix: str) -> dict[ModelRef, list[str]]:
    """Return the aliases by version."""
    found: dict[ModelRef, list[str]] = {}
    for text, ref in repository.aliases(prefix).items():
        found.setdefault(ref, []).append(text.partition("@")[2])
    return found


def _print_model(info: ModelInfo, aliases: list[str], layers: list[_Layer], others: dict[str, str]) -> None:
    out = console()
    out.print(str(info.ref), style="bold")
    wrote = f"{size(info.bytes_owned)} of {size(info.bytes_total)}, {_inherited(info)} inherited"
    facts = {
        "aliases": ", ".join(aliases) or "-",
        "parent": str(info.parent) if info.parent else "-",
        "quality": words.quality(info.quality),
        "created": f"{words.moment(info.created)} UTC",
        "written": wrote,
        "codec": info.codec or "-",
        "metadata": json.dumps(dict(info.metadata)) if info.metadata else "-",
    }
    for fact, value in facts.items():
        out.print(f"  {fact:9} {value}", soft_wrap=True)
    rows = table(
        words.count(len(layers), "layer"), "layer", "class", "config", "inputs", "written by", right=("tensors",)
    )
    for layer in layers:
        config = {key: value for key, value in layer["config"].items() if key != "class"}
        text = ", ".join(f"{key}={value}" for key, value in config.items() if value is not None)
        writers = ", ".join(dict.fromkeys(layer["tensors"].values()))
        kind, inputs = str(layer["config"].get("class", "-")), ", ".join(layer["inputs"])
        rows.add_row(layer["name"], kind, _cut(text), inputs, writers, str(len(layer["tensors"])))
    for tensor, writer in sorted(others.items()):
        rows.add_row(tensor, "(a tensor)", "", "", writer, "1")
    out.print(rows)


def _cut(text: str) -> str:
    return text if len(text) <= CONFIG_WIDTH else text[: CONFIG_WIDTH - 1] + "…"


def _inherited(info: ModelInfo) -> str:
    return f"{1 - info.bytes_owned / info.bytes_total:.0%}" if info.bytes_total else "-"


def _info_dict(info: ModelInfo, aliases: Mapping[ModelRef, Sequence[str]]) -> dict[str, Json]:
    return {
        "ref": str(info.ref),
        "aliases": list(aliases.get(info.ref, ())),
        "parent": str(info.parent) if info.parent else None,
        "quality": info.quality,
        "created": info.created.isoformat(),
        "bytes_owned": info.bytes_owned,
        "bytes_total": info.bytes_total,
        "codec": info.codec,
        "metadata": dict(info.metadata),
    }
