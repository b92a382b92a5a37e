"""Classify tumours with a network that is being trained: `model.fit` with a callback that publishes.

What it shows
1. NT3, a network that tells tumours from normal tissue, is trained by plain `model.fit`, in this very process. The
   only thing added is `callbacks=[CheckpointCallback(repo, "nt3")]`.
2. Meanwhile consumers, processes of their own, classify samples that the training does not see, with the newest
   version they have.
3. This is done twice, with the same weights, batches and questions: first the planner decides when to publish, from
   the losses and from what an update costs; then there is one update at the end of each epoch.
4. A table of updates, stalls, latency and the cumulative inference loss of both schedules; a picture of the loss and
   its fits, of how far the consumers are behind, and of what their answers lost.

How to run it, after `pip install --group examples '.[ray,redis,tensorflow,torch,viz]'`
    python examples/online_cancer/run.py --quick         12 epochs and one consumer, under a minute
    python examples/online_cancer/run.py --out DIR       120 epochs that learn slower, the picture in DIR

Questions come at a fixed rate, because all of it runs on the same few cores: see `online.answering`.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).parents[1]))  # for examples/shared, in the driver only

from shared.place import Address, Named, Place
from shared.starting import interruptible, stderr_closed


def main(
    quick: Annotated[bool, typer.Option("--quick", help="fewer epochs, one consumer")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="where the picture goes")] = Path(
        "out/online_cancer"
    ),
    address: Address = None,
    repository: Named = None,
) -> None:
    """Classify tumours with a network that is being trained."""
    with interruptible():
        with stderr_closed():
            from job import run
        run(quick=quick, out=out, place=Place("online_cancer", address, repository))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
