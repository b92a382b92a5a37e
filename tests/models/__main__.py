"""The table of docs/explanation/models.md.

    scripts/models [--only TEXT] [--write docs/explanation/models.md]

The exit status is 1 when anything is not restored completely.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tensorvine.actors import Repository

from tests.models.row import HEAD, Failed, Row, line

_TABLE = re.compile(r"(<!-- table -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> int:
    """Measure, print, and write the table where it was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="architectures whose names have this in them")
    parser.add_argument("--write", type=Path, help="a page, whose table is replaced")
    asked = parser.parse_args()
    os.environ.setdefault("RAY_ADDRESS", "local")
    logging.basicConfig(format="%(message)s")
    logging.getLogger("tests.models").setLevel(logging.INFO)
    print(HEAD, flush=True)
    rows: list[Row | Failed] = []
    with Repository.start("architectures", shards=1, store_bytes=3 << 30, preallocate_bytes=0) as repo:
        for row in _rows(repo, asked.only):
            rows.append(row)
            print(line(row), flush=True)
    whole = sum(isinstance(row, Row) and row.whole for row in rows)
    control = sum(isinstance(row, Row) and row.control for row in rows)
    summary = f"{whole} of {len(rows)} were restored completely; by the frameworks' own formats, {control}."
    print(summary)
    if asked.write is not None:
        table = "\n".join([HEAD, *map(line, rows), "", summary, ""])
        text = asked.write.read_text()
        asked.write.write_text(_TABLE.sub(lambda found: f"{found[1]}{table}{found[2]}", text))
    return 0 if whole == len(rows) else 1


def _rows(repo: Repository, only: str) -> Iterator[Row | Failed]:
    from tests.models import keras_models, torch_models

    for architecture in torch_models.architectures():
        if only in architecture.name:
            yield torch_models.measure(repo, architecture)
    for name in keras_models.APPLICATIONS:
        if only in f"keras {name}":
            yield keras_models.measure(repo, name)


if __name__ == "__main__":
    sys.exit(main())
