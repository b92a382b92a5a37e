"""A device outside the cluster answers with a model that is still being trained.

What it shows
1. A training in the cluster fits a curve, and saves its versions in a repository with a Redis server.
2. A device, a process that never imports Ray, is notified of each version through Redis, fetches its tensors from the
   shard, and answers with it. It prints how long both took.
3. Redis is killed meanwhile. The training continues to save, and the device to answer. When Redis runs again, the
   device gets the newest version.

How to run it, after `pip install --group examples '.[ray,redis,search,torch,viz]'`
    python examples/edge_consumer/run.py --quick                     fewer versions
    python examples/edge_consumer/run.py --redis redis://host:6379   a running server, which is not killed

With --repository, a running one must have been started with the server of --redis.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).parents[1]))  # for examples/shared, in the driver only

from shared.place import Address, Named, Place
from shared.starting import interruptible


def main(
    quick: Annotated[bool, typer.Option("--quick", help="fewer versions")] = False,
    redis: Annotated[str | None, typer.Option("--redis", metavar="URL", help="a running server")] = None,
    address: Address = None,
    repository: Named = None,
) -> None:
    """Train in the cluster, and answer on a device outside it with each new version."""
    with interruptible():
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by NumPy; the device needs a core, too
        from job import run

        run(quick=quick, redis=redis, place=Place("edge_consumer", address, repository))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
