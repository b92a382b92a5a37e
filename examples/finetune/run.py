"""Fine-tune a small vision transformer in branches, and see which layers the versions share.

What it shows
1. A ViT of the library transformers, made from a random configuration, learns scikit-learn's digits 0 to 5. It is the
   root.
2. Other networks learn the digits 6 to 9 from 48 images. Their trunk is the root's, their last layer is not. The
   repository finds the stored model with the longest common prefix. Its tensors are loaded; each branch trains some
   layers, and its version inherits the others.
3. A deeper network finds a branch, not the root. A network without transfer is the comparison.
4. The worst versions and the root are retired. Their descendants keep the tensors that they inherited.
5. Every live version is loaded again and must predict the same, bit for bit. The lineage is drawn as a picture.

How to run it, after `pip install --group examples '.[ray,redis,search,torch,viz]'`, for Dask with `dask`
    python examples/finetune/run.py --quick         fewer branches, under a minute
    python examples/finetune/run.py --out DIR       all branches, the picture in DIR
    python examples/finetune/run.py --engine dask   on Dask, without Ray; --scheduler joins a running Dask
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).parents[1]))  # for examples/shared, in the driver only

from shared.place import RAY, Address, EngineName, Named, Place, Scheduler
from shared.starting import interruptible


def main(
    quick: Annotated[bool, typer.Option("--quick", help="fewer branches and epochs")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="folder of the picture")] = Path("out/finetune"),
    engine: EngineName = RAY,
    address: Address = None,
    scheduler: Scheduler = None,
    repository: Named = None,
) -> None:
    """Fine-tune a stored transformer in branches, and draw what the versions share."""
    place = Place.chosen("finetune", engine, address, scheduler, repository)
    with interruptible():
        from job import run

        run(quick=quick, out=out, place=place)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
