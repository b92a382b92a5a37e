"""Architecture search by aged evolution, with and without inheriting from the most similar candidate seen so far.

What it shows
1. A controller draws candidates, workers evaluate them: each asks for the stored candidate with the longest common
   prefix, takes its tensors over, freezes these layers, trains the others for one epoch, and saves what is new.
   What leaves the population is retired.
2. Three modes, one after the other: no transfer; HDF5 files with a catalogue in Redis (the baseline of the EvoStore
   paper); the repository. A table and a picture compare quality over time, time and space.
3. What dies: a worker costs its candidate, which is evaluated again; a controller costs nothing: `--resume` goes on.

How to run it, after `pip install --group examples '.[ray,files,redis,tensorflow,torch,viz]'`, for Dask with `dask`
    python examples/nas/run.py --quick                        24 candidates per mode by one worker, under a minute
    python examples/nas/run.py --out DIR                      1000 candidates per mode, the picture in DIR
    python examples/nas/run.py --mode repository --resume     go on with a search that was stopped
    python examples/nas/run.py --mode repository --elastic    on nodes that Ray's autoscaler makes and removes
    python examples/nas/run.py --search deephyper             DeepHyper's own search, with our hooks
    python examples/nas/run.py --space nt3 --data nt3 --candidates 8    NT3 at its true shape; GBs of memory
    python examples/nas/run.py --address auto                 on the Ray that runs: one worker for each CPU slot
    python examples/nas/run.py --engine dask                  on Dask, without Ray; --scheduler joins one that runs
"""

import os
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from tensorvine.store.lazy import to_install

sys.path.insert(0, str(Path(__file__).parents[2]))  # for what the examples share, in the driver only

from examples.online.place import DASK, RAY, Address, EngineName, Named, Place, Scheduler
from examples.online.starting import interruptible

THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Of PyTorch and NumPy in each worker, as workers share few cores; they are read when these are imported."""
QUICK = {"candidates": 24, "population": 8, "sample": 4, "data": "digits"}
WORKERS, WORKERS_QUICK = 2, 1


def main(
    quick: Annotated[bool, typer.Option("--quick", help="few candidates, one worker")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="where journals and the picture go")] = Path(
        "out/nas"
    ),
    mode: Annotated[
        str | None,
        typer.Option(
            help="all, or one of: none, hdf5 (not on several nodes), repository. Without it all, or repository on a "
            "cluster that runs already, or with --search deephyper",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the search that is in DIR")] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="how many evaluate candidates. Without it 2, or 1 with --quick; on a cluster that runs already one "
            "for each CPU slot of it, but 2 with --elastic",
            show_default=False,
        ),
    ] = None,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic",
            help="on nodes that Ray's autoscaler makes: one on this machine, or that of the cluster of --address, whom "
            "workers that wait for a CPU slot ask for nodes",
        ),
    ] = False,
    memory: Annotated[
        bool | None,
        typer.Option(
            "--memory/--disk",
            help="keep a repository that is started here in memory alone (nothing to resume; so on a cluster that "
            "runs already), or in DIR too, which all nodes must reach then (so on one of its own)",
            show_default=False,
        ),
    ] = None,
    engine: EngineName = RAY,
    address: Address = None,
    scheduler: Scheduler = None,
    repository: Named = None,
    keep: Annotated[bool, typer.Option("--keep", help="retire nothing")] = False,
    candidates: Annotated[int | None, typer.Option(min=1, help="how many are evaluated")] = None,
    population: Annotated[int | None, typer.Option(min=2, help="how many live at once", show_default=False)] = None,
    search: Annotated[
        str,
        typer.Option(
            help="evolution, or deephyper: DeepHyper's regularised evolution, which needs Ray and the extra search, "
            "here and on all nodes; in mode repository, and it cannot be resumed"
        ),
    ] = "evolution",
    space: Annotated[str, typer.Option(help="attn, attn-6, attn-full or nt3")] = "attn",
    data: Annotated[str | None, typer.Option(help="digits, digits-shifted, breast_cancer, wine, attn or nt3")] = None,
    samples: Annotated[int | None, typer.Option(min=10, help="of data that are generated", show_default=False)] = None,
    data_folder: Annotated[
        Path | None,
        typer.Option(
            "--data-folder",
            metavar="DIR",
            help="with CANDLE's nt_train2.csv and nt_test2.csv, for --data nt3; all nodes must reach it",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="of the search, of the weights and of the data")] = 0,
) -> None:
    """Search for an architecture by aged evolution."""
    with interruptible():
        os.environ |= THREADS
        from examples.nas.job import Means, run
        from examples.nas.plan import Mode, Plan, Search

        place = Place.chosen("nas", engine, address, scheduler, repository)
        joins = place.address is not None
        if engine == DASK:
            check_dask(search, elastic)
        if search not in list(Search):
            raise typer.BadParameter(f"expected one of {', '.join(Search)}; found {search!r}", param_hint="--search")
        if search == Search.DEEPHYPER:
            check_deephyper(mode, resume, elastic)
        mode = mode or ("repository" if joins or search == Search.DEEPHYPER else "all")
        if mode != "all" and mode not in list(Mode):
            raise typer.BadParameter(f"expected all or one of {', '.join(Mode)}; found {mode!r}", param_hint="--mode")
        folder = None if data_folder is None else str(data_folder.resolve())
        given = {"candidates": candidates, "data": data, "population": population, "samples": samples, "files": folder}
        chosen = (QUICK if quick else {}) | {name: value for name, value in given.items() if value is not None}
        plan = Plan(space=space, seed=seed, keep=keep, search=Search(search), **chosen)
        plan = replace(plan, sample=min(plan.sample, plan.population - 1))
        modes = tuple(Mode) if mode == "all" else (Mode(mode),)
        few = WORKERS_QUICK if quick else WORKERS
        count = workers or (few if elastic or not joins else 0)
        run(plan, modes, Means(place, count, elastic, joins if memory is None else memory, resume), out)


def check_dask(search: str, elastic: bool) -> None:
    """See that what was asked for can be done on Dask.

    Raises:
        BadParameter: it cannot.
    """
    if search == "deephyper":
        raise typer.BadParameter(
            "expected evolution with --engine dask: candidates of DeepHyper are evaluated by Ray; found 'deephyper'",
            param_hint="--search",
        )
    if elastic:
        raise typer.BadParameter("expected --engine ray: Ray's autoscaler makes the nodes", param_hint="--elastic")


def check_deephyper(mode: str | None, resume: bool, elastic: bool) -> None:
    """See that DeepHyper can do what was asked for.

    Raises:
        BadParameter: it cannot, or is not installed.
    """
    if find_spec("deephyper") is None:
        raise typer.BadParameter(
            f"expected DeepHyper to be installed; found none: {to_install('search')}", param_hint="--search"
        )
    for wrong, hint, found in (
        (mode not in (None, "repository"), "--mode", f"expected repository with --search deephyper; found {mode!r}"),
        (resume, "--resume", "expected a search by evolution: DeepHyper's own cannot be resumed"),
        (elastic, "--elastic", "expected a search by evolution: DeepHyper's own is not known to wait for new nodes"),
    ):
        if wrong:
            raise typer.BadParameter(found, param_hint=hint)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
