"""Fork a training while it runs, into other learning rates and perturbed data: which of them matters how much?

What it shows
1. Two ranks, actors, train a network in PyTorch on scikit-learn's digits; their gradients are averaged.
2. At a step that was said beforehand, the training is forked into several directions: its state goes from memory to
   memory into the ranks of new trainings, and it goes on meanwhile. One direction changes nothing and has as many ranks
   as the original: it must give the same losses and weights, bit for bit, and that is checked. The others change the
   learning rate or the data, and have one rank each, which takes the whole batch.
3. Each direction is saved in a repository, as a child of the version that the original had saved before the fork.
4. What the fork cost, a table of the directions, and a picture of their losses and of their progress.

How to run it, after `pip install --group examples '.[ray,redis,tensorflow,torch,viz]'`
    python examples/fork_training/run.py --quick         2 directions, under a minute
    python examples/fork_training/run.py --out DIR       6 directions that go further, the picture in DIR
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).parents[1]))  # for what the examples share, in the driver only

from online.place import Address, Named, Place
from online.starting import interruptible


def main(
    quick: Annotated[bool, typer.Option("--quick", help="fewer directions and steps")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="where the picture goes")] = Path(
        "out/fork_training"
    ),
    address: Address = None,
    repository: Named = None,
) -> None:
    """Fork a training while it runs, into other learning rates and perturbed data."""
    with interruptible():
        from job import run

        run(quick=quick, out=out, place=Place("fork_training", address, repository))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
