"""Fork a DDP training while it runs, into other learning rates and perturbed data: which of them matters?

What it shows
1. Two ranks train a network with PyTorch DDP on scikit-learn's digits. `ForkableRank` makes their loop forkable.
2. The training is forked into several directions: its state goes from memory to memory into the ranks of new trainings,
   and it continues meanwhile. One direction changes nothing: its losses must be the original's, bit for bit. The others
   change the learning rate or the data.
3. Each direction is saved in a repository, with the step of the fork.
4. A table of the costs of the fork, a table of the directions, and a picture of their losses.

How to run it, after `pip install --group examples '.[ray,redis,search,torch,viz]'`
    python examples/fork_training/run.py --quick         2 directions, under a minute
    python examples/fork_training/run.py --out DIR       6 directions that train longer, the picture in DIR
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).parents[1]))  # for examples/shared, in the driver only

from shared.place import Address, Named, Place
from shared.starting import interruptible


def main(
    quick: Annotated[bool, typer.Option("--quick", help="fewer directions and steps")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="folder of the picture")] = Path(
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
