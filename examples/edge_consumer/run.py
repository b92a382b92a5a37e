"""A device outside the cluster answers with a model that is still being trained.

What it shows
1. A training in the cluster fits a curve and saves version after version in a repository that was started with a Redis
   server.
2. A device, a process of its own that never imports Ray, hears of each version through Redis, fetches its tensors from
   the shard, and answers with it; it says how long each took.
3. Redis is killed in between: the training goes on saving, the device goes on answering, and when Redis is back the
   device has the newest version.

How to run it, after `pip install --group examples '.[ray,redis,tensorflow,torch,viz]'`
    python examples/edge_consumer/run.py --quick                     fewer versions
    python examples/edge_consumer/run.py --redis redis://host:6379   a server that runs already, which is not killed

With --repository, one that runs must have been started with the server of --redis.
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
    redis: Annotated[str | None, typer.Option("--redis", metavar="URL", help="a server that runs already")] = None,
    address: Address = None,
    repository: Named = None,
) -> None:
    """Train in the cluster, and answer on a device outside it with each version that comes."""
    with interruptible():
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # NumPy reads it; the device wants a core, too
        from job import run

        run(quick=quick, redis=redis, place=Place("edge_consumer", address, repository))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
