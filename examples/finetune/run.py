"""Fine-tune a stored model along several branches, and see what the versions share.

What it shows
1. A small Keras network learns scikit-learn's digits 0 to 4 and is saved.
2. A candidate for the digits 5 to 9 has the same trunk and another head. The repository finds the stored model by
   the candidate's architecture; the matching tensors are loaded, frozen, and inherited by the new versions.
3. Branches differ in their learning rate, in what goes on learning and in their depth. The deeper candidates
   find a branch, not the root, as the stored model most like them. The same network trained from scratch, on the same
   images for as many epochs, is there to compare with.
4. The worst versions retire, and so does the root: its descendants keep the tensors that they share with it.
5. Tables of accuracy, bytes (beside real `.weights.h5` files), owners and queries; every version that is left
   is loaded again and must predict the same, bit for bit. The root's lineage is drawn as a picture.

How to run it, after `pip install --group examples '.[ray,redis,tensorflow,torch,viz]'`, for Dask with `dask`
    python examples/finetune/run.py --quick         fewer branches, under a minute
    python examples/finetune/run.py --out DIR       all branches, the picture in DIR
    python examples/finetune/run.py --engine dask   the same on Dask, without Ray; --scheduler joins one that runs
    python examples/finetune/run.py --data nt3      CANDLE's NT3, 60,483 features, with small networks
    python examples/finetune/run.py --data nt3 --full-size --quick     its own network, 620 MB: takes 10 GB
In the place of the digits, NT3's first samples make the root, and its branches learn from those that come later.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).parents[1]))  # for what the examples share, in the driver only

from online.place import RAY, Address, EngineName, Named, Place, Scheduler
from online.starting import interruptible, stderr_closed

DATA = ("digits", "nt3")


def main(
    quick: Annotated[bool, typer.Option("--quick", help="fewer branches and epochs")] = False,
    data: Annotated[str, typer.Option(help="digits or nt3")] = "digits",
    data_folder: Annotated[
        Path | None,
        typer.Option(
            "--data-folder",
            metavar="DIR",
            help="with CANDLE's nt_train2.csv and nt_test2.csv, for --data nt3. Without it: generated data",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=20, help="of nt3's data that are generated")] = 1_400,
    full_size: Annotated[bool, typer.Option("--full-size", help="NT3's own network, for --data nt3")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="where the picture goes")] = Path("out/finetune"),
    engine: EngineName = RAY,
    address: Address = None,
    scheduler: Scheduler = None,
    repository: Named = None,
) -> None:
    """Fine-tune a stored model along several branches, and draw what the versions share."""
    if data not in DATA:
        raise typer.BadParameter(f"expected one of {', '.join(DATA)}; found {data!r}", param_hint="--data")
    place = Place.chosen("finetune", engine, address, scheduler, repository)
    with interruptible():
        with stderr_closed():
            from digits import digits
            from job import run
            from nt3 import FULL, SMALL, nt3
        subject = digits() if data == "digits" else nt3(FULL if full_size else SMALL, data_folder, samples)
        run(subject, quick=quick, out=out, place=place)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
