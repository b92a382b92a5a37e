"""Search for an architecture by aged evolution: candidates inherit layers from the best ancestor, or do not.

What it shows
1. DeepHyper draws candidates. Each finds the stored candidate with the longest common prefix, loads its tensors,
   freezes these layers, trains the others for one epoch, and saves what is new. What leaves the population is retired.
   The candidates run as Ray tasks, or as trials of Ray Tune.
2. The same without transfer. A table and a picture compare quality over time; a picture shows the best lineage.
3. A dead worker costs one candidate. A stopped search continues with `--resume`.

How to run it, after `pip install --group examples '.[ray,redis,search,torch,viz]'`
    python examples/nas/run.py --quick                        24 candidates in each mode, under a minute
    python examples/nas/run.py --out DIR                      1000 candidates in each mode, the pictures in DIR
    python examples/nas/run.py --mode repository --resume     continue a search that was stopped
    python examples/nas/run.py --mode repository --elastic    on nodes that Ray's autoscaler adds and removes
    python examples/nas/run.py --runner tune                  with Ray Tune
    python examples/nas/run.py --address auto                 on a running Ray: one worker for each CPU slot
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the examples' packages, in the driver only

from examples.shared.place import Address, Named, Place
from examples.shared.starting import interruptible

MODES, RUNNERS = ("none", "repository"), ("deephyper", "tune")


def main(
    quick: Annotated[bool, typer.Option("--quick", help="few candidates, one worker")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="folder of results and pictures")] = Path("out/nas"),
    mode: Annotated[str, typer.Option(help="all, none or repository")] = "all",
    runner: Annotated[str, typer.Option(help="deephyper or tune: what runs the candidates")] = "deephyper",
    resume: Annotated[bool, typer.Option("--resume", help="continue the search that is in DIR")] = False,
    workers: Annotated[int, typer.Option(min=0, help="0: one for each CPU slot of --address, else 2")] = 0,
    elastic: Annotated[bool, typer.Option("--elastic", help="on nodes that an autoscaler adds")] = False,
    candidates: Annotated[int, typer.Option(min=0, help="0: 24 with --quick, else 1000")] = 0,
    data: Annotated[str, typer.Option(help="digits, breast_cancer or wine")] = "digits",
    seed: Annotated[int, typer.Option(help="of the search, the weights and the data")] = 0,
    address: Address = None,
    repository: Named = None,
) -> None:
    """Search for an architecture by aged evolution."""
    for option, value, known in (("--mode", mode, ("all", *MODES)), ("--runner", runner, RUNNERS)):
        if value not in known:
            raise typer.BadParameter(f"expected one of {', '.join(known)}; found {value!r}", param_hint=option)
    modes = MODES if mode == "all" else (mode,)
    for path in (out / each / "results.jsonl" for each in modes):
        if path.exists() and not resume:
            raise typer.BadParameter(f"expected no search in {path}: use --resume to continue it", param_hint="--out")
    with interruptible():
        os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # workers share few cores
        from examples.nas.job import Job, compare
        from examples.nas.search import Plan

        plan = Plan(data, *((8, 4) if quick else (50, 5)), seed)
        workers = workers or (0 if address and not elastic else 1 if quick else 2)
        candidates = candidates or (24 if quick else 1000)
        place, searches = Place("nas", address, repository), {}
        with place.workers(workers, elastic=elastic) as count:
            for each in modes:
                job = Job(plan, place, out / each, candidates, count, transfer=each == "repository")
                searches[each] = job.run(runner)
        compare(searches, out / "searches.png")


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
