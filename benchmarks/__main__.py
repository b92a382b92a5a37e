"""The command line: `python -m benchmarks NAME [--quick | --full] [--json]`."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Annotated

import typer
from rich.console import Console

from .measure import Effort, Report

NAMES = {
    "save_load": "saves and loads of whole models and of parts, beside five file formats",
    "incremental": "saves that change 25 to 100% of the tensors, beside h5py",
    "prefix_query": "longest-common-prefix queries over 60,000 graphs, beside Redis-Queries",
    "staging": "cold against preallocated shared memory",
    "pages": "saves that find pages made and mapped, beside cold ones; and how retired memory goes back to the system",
    "checkpoint": "checkpoints of a training that goes on, beside Check-QZP's variants, Keras and torch.save",
    "codec": "bytes and speed of each codec on trained weights and on fine-tuned versions, beside gzip and Zstandard",
    "persist": "writes to disk, reads of one tensor, codecs and recovery, beside plain write + fsync and file formats",
    "start": "from nothing running to the first load, on a history of 1,000,000 tensors, beside safetensors",
    "update_latency": "a new version from training to answering: ours by each way, beside Keras' and h5py's files",
    "notify": "from a commit until a waiting consumer knows, beside polling at 1 ms and 1 s",
    "consumers": "1 to 64 consumers: delivery, answers during updates, and what publishing costs the training",
    "schedule": "predicted and measured cumulative inference loss of five schedules for NT3, TC1 and PtychoNN",
    "collective": "messages and collectives of each back end, beside ray.util.collective and a raw loopback socket",
    "fork": "cloning a training that runs: ours beside an HDF5 file and the object store; overhead, standby, readiness",
    "elastic": "shards 2 -> 4 -> 3 under reads and saves: what moves, and what is served; beside copying all anew",
    "query_scaling": "10,000 prefix queries over 60,000 graphs, 1 to 16 callers, 1 to 8 shards, beside Redis-Queries",
    "nas": "a search of 1000 candidates without transfer, with HDF5 files and Redis, and with the repository",
    "calls": "short calls within a node and between two nodes: by socket, and by a Ray handle beside it",
    "engines": "Dask as the engine beside Ray: saves, loads, queries, updates, calls, a killed shard, and the start",
    "weak_scaling": "1 to 16 clients on 1 to 4 hosts that save and load at once, beside h5py files in a shared folder",
    "links": "between two hosts, at any rate and at 1 Gbit/s: save, load, update, fork, search; beside a raw socket",
    "growth": "save, load and query times at 1,000 to 100,000 models",
}


def run(name: str, effort: Effort) -> Report:
    """Run one benchmark by its name."""
    return import_module(f"{__package__}.{name}").run(effort)


def main(
    name: Annotated[str, typer.Argument(help="list, or a benchmark: " + ", ".join(NAMES))],
    quick: Annotated[bool, typer.Option("--quick", help="small sizes, for a first look")] = False,
    full: Annotated[bool, typer.Option("--full", help="also the largest models")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")] = False,
) -> None:
    """Measure TensorVine beside what a user would pick instead, and beside the floor."""
    if name == "list":
        for known, about in NAMES.items():
            print(f"{known:16}{about}")
        return
    if name not in NAMES:
        raise typer.BadParameter(f"expected list or one of {', '.join(NAMES)}; found {name!r}", param_hint="NAME")
    if quick and full:
        raise typer.BadParameter("expected one of the two; found both", param_hint="--quick, --full")
    report = run(name, Effort.QUICK if quick else Effort.FULL if full else Effort.NORMAL)
    # A table of many columns is cut to 80 characters where there is no terminal.
    report.print(Console() if Console().is_terminal else Console(width=200))
    if as_json:
        print(json.dumps(report.as_dict()))


def application() -> typer.Typer:
    """Make the command-line application."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    return app


if __name__ == "__main__":
    application()()
