"""The command line: `python -m benchmarks NAME [--quick] [--json]`."""

from __future__ import annotations

import ast
import json
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

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


def main(
    name: Annotated[str, typer.Argument(help="list, or a benchmark: " + ", ".join(names()))],
    quick: Annotated[bool, typer.Option("--quick", help="small sizes, for a first look and for tests")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")] = False,
    out: Annotated[Path, typer.Option(help="folder of the result file")] = ROOT / "build/benchmarks",
) -> None:
    """Compare TensorVine with other tools and with the floor, and write the result to a JSON file."""
    known = names()
    if name == "list":
        for each, about in known.items():
            print(f"{each:16}{about}")
        return
    if name not in known:
        raise typer.BadParameter(f"expected list or one of {', '.join(known)}; found {name!r}", param_hint="NAME")
    report = run(name, Effort.QUICK if quick else Effort.NORMAL)
    # A table of many columns is cut to 80 characters if there is no terminal.
    console = Console() if Console().is_terminal else Console(width=200)
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
