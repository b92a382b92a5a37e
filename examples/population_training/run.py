"""Population-based training with Ray Tune, whose checkpoints are versions in a repository, beside files.

What it shows
1. Four members train the same PyTorch network on scikit-learn's digits, with learning rates from far too small to far
   too large. After each interval Ray Tune replaces the worst member by a copy of the best one, with another learning
   rate (Jaderberg et al. 2017).
2. A checkpoint is the name of a version: `report(metrics, ref)` and `resumed()` of `tensorvine.actors.search.tune`. The
   callback `Retirement` retires versions from which no member can continue.
3. The same with checkpoints in files. A table compares the costs.
4. Pictures of the learning rates, of the accuracy, and of the lineage of the best member.

How to run it, after `pip install --group examples '.[ray,redis,search,torch,viz]'`
    python examples/population_training/run.py --quick         under a minute
    python examples/population_training/run.py --out DIR       a larger network, the pictures in DIR
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).parents[1]))  # for examples/shared, in the driver only

from shared.place import Address, Named, Place
from shared.starting import interruptible


def main(
    quick: Annotated[bool, typer.Option("--quick", help="a smaller network and fewer steps")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="folder of the pictures")] = Path(
        "out/population_training"
    ),
    address: Address = None,
    repository: Named = None,
) -> None:
    """Train a population with Ray Tune, with checkpoints in a repository and in files."""
    with interruptible():
        from job import run

        run(quick=quick, out=out, place=Place("population_training", address, repository))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
