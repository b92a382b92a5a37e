"""Population-based training whose exploit is a fork in memory, beside Ray Tune's, whose exploit goes through files.

What it shows
1. A population of four trainings of the same network, in NumPy on scikit-learn's digits, begins with learning rates
   from far too small to far too large. After each interval the worst member is replaced by a copy of the best one,
   with another learning rate (Jaderberg et al. 2017). The copy is `fork(winner, at_step=None, options=...)`: the
   winner goes on training meanwhile.
2. Ray Tune's PopulationBasedTraining does the same with the same training, beginning and number of steps: the winner
   writes a checkpoint, and the member to be replaced reads it.
3. A table of what the exploits of both cost, and a picture of learning rates and accuracy.

How to run it, after `pip install --group examples '.[ray,redis,tensorflow,torch,viz]'`
    python examples/population_training/run.py --quick         under a minute
    python examples/population_training/run.py --out DIR       a larger network and more steps, the picture in DIR
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).parents[1]))  # for examples/shared, in the driver only

from shared.place import Address, Place
from shared.starting import interruptible

THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Of NumPy in each member, as four share few cores; its libraries read them when they are imported."""


def main(
    quick: Annotated[bool, typer.Option("--quick", help="a smaller network and fewer steps")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="where the picture goes")] = Path(
        "out/population_training"
    ),
    address: Address = None,
    repository: Annotated[
        str | None,
        typer.Option(
            "--repository",
            metavar="NAME",
            help="save the best member of the forks there, as population_training-RUN/best: join this repository, or "
            "start it under this name for as long as the example runs. Without it nothing is saved",
        ),
    ] = None,
) -> None:
    """Train a population by forks in memory, and by Ray Tune's checkpoints."""
    with interruptible():
        os.environ |= THREADS
        from job import run

        run(quick=quick, out=out, place=Place("population_training", address, repository))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
