"""Reconstruct diffraction patterns with a network that is trained while the patterns are measured.

What it shows
1. A simulated instrument scans an object with light, and exchanges the object now and then. PtychoNN, a network,
   replaces the slow reconstruction: it maps each diffraction pattern to the object's amplitude and phase.
2. A producer warms up on the first scan, then learns from every batch of patterns. Two consumers reconstruct each
   batch before the producer learns from it, with the newest version that they have.
3. This is done twice with the same data at the same times: with a schedule that the planner computes from the losses
   and from the costs of updates, and with one update after each scan.
4. A table of updates, stalls, latency and loss of the answers; a picture with the reconstructions.

How to run it, after `pip install --group examples '.[ray,redis,search,torch,viz]'`
    python examples/online_ptychography/run.py --quick         PtychoNN of width 8, under a minute
    python examples/online_ptychography/run.py --out DIR       width 16 and more scans, minutes, the picture in DIR
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).parents[1]))  # for examples/shared, in the driver only

from shared.place import Address, Named, Place
from shared.starting import interruptible


def main(
    quick: Annotated[bool, typer.Option("--quick", help="a smaller network and fewer scans")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="folder of the picture")] = Path(
        "out/online_ptychography"
    ),
    address: Address = None,
    repository: Named = None,
) -> None:
    """Reconstruct diffraction patterns with a network that is trained while they are measured."""
    with interruptible():
        from job import run

        run(quick=quick, out=out, place=Place("online_ptychography", address, repository))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
