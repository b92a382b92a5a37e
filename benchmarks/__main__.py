"""The command line: `python -m benchmarks NAME [--quick] [--json]`, and `python -m benchmarks compare A B`."""

from __future__ import annotations

import ast
import json
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .core.comparing import show
from .core.report import ROOT, Effort, Report

FOLDER = Path(__file__).parent


def names() -> dict[str, str]:
    """Map each benchmark to the first line of its docstring."""
    files = sorted(file for file in FOLDER.glob("*.py") if not file.name.startswith("_"))
    return {file.stem: (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0] for file in files}


def run(name: str, effort: Effort) -> Report:
    """Run a benchmark."""
    report = Report(name, effort)
    import_module(f"{__package__}.{name}").run(report)
    return report


def compare(console: Console, before: Path, after: Path) -> None:
    """Print what differs between two runs."""
    try:
        show(console, before, after)
    except ValueError as exc:
        raise typer.BadParameter(str(exc), param_hint="RESULTS") from exc


def main(
    name: Annotated[str, typer.Argument(help="list, compare, or a benchmark: " + ", ".join(names()))],
    results: Annotated[
        list[Path] | None, typer.Argument(help="for compare: result files of two runs, or folders of them", exists=True)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="small sizes, for a first look and for tests")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")] = False,
    out: Annotated[Path, typer.Option(help="folder of the result file")] = ROOT / "build/benchmarks",
) -> None:
    """Compare TensorVine with other tools and with the floor, and write the result to a JSON file."""
    known, paths = names(), results or []
    # A table of many columns is cut to 80 characters if there is no terminal.
    console = Console() if Console().is_terminal else Console(width=200)
    if len(paths) != 2 * (name == "compare"):
        raise typer.BadParameter(f"expected two for compare, else none; found {len(paths)}", param_hint="RESULTS")
    if name == "list":
        for each, about in known.items():
            print(f"{each:16}{about}")
        return
    if name == "compare":
        compare(console, *paths)
        return
    if name not in known:
        raise typer.BadParameter(
            f"expected list, compare or one of {', '.join(known)}; found {name!r}", param_hint="NAME"
        )
    report = run(name, Effort.QUICK if quick else Effort.NORMAL)
    report.print(console)
    console.print(f"result: {report.write(out)}", highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps(report.as_dict()))


def application() -> typer.Typer:
    """Make the command-line application."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    return app


if __name__ == "__main__":
    application()()
