"""A program in the place that it is told, ADDRESS and NAME (`-`: none): saves one version after the other until it is
stopped, and prints each. `test_place` runs it."""

from __future__ import annotations

import sys
from itertools import count

import numpy as np
import typer

from examples.shared.place import Place
from examples.shared.starting import interruptible


def main(address: str, named: str) -> None:
    """Save until a signal comes."""
    place = Place("placed", address, None if named == "-" else named)
    with interruptible(), place.ray(), place.open({"shards": 1, "preallocate_bytes": 0}) as repository:
        print("in", repository.name, flush=True)  # noqa: T201
        for number in count():
            print(repository.save(f"{place.prefix}m", {"w": np.full(1 << 18, number)}).ref, flush=True)  # noqa: T201


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app(sys.argv[1:])
