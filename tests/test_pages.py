"""The pages: what an example prints, and that each command, option, file and name in them exists.

- Python blocks of a page run in order in one namespace, next to a small Ray. A `text` block that follows is the output.
- Shell blocks of a page run in order in an empty folder. Figures of their output are not compared.
- A block behind `<!-- not run: REASON -->` is checked only: Python is compiled; commands, options and files must exist.
- A block behind `<!-- run: as a program -->` runs in a process of its own.

Links inside the site are checked by scripts/docs.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest
import tensorvine.actors
import tensorvine.planner
import tensorvine.store
from ray.scripts.scripts import cli as ray_cli
from tensorvine.clusters.cli.main import application
from typer.main import get_command

from tests.support.processes import folder_of_a_ray

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>not run: [^\n]+|run: as a program) -->\n)?"
    r"```(?P<kind>python|sh)\n(?P<code>.*?)^```$"
    r"(?:\n+(?:(?:It|This) prints:?\n+)?```text\n(?P<prints>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)
LINK = re.compile(r"\]\((?!https?:)(?P<path>[^)#\s]*)(?:#(?P<part>[^)\s]+))?\)")
CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
SITE = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", *SITE]
EXAMPLES_OF = {"README.md": 2, "docs/tutorials/first_repository.md": 2}
"""Pages and how many Python blocks with an output each has at least."""
OTHERS = {"bash", "cat", "cd", "cp", "curl", "docker", "export", "git", "helm", "kubectl", "mkdir"}
OTHERS |= {"base64", "dask", "qsub", "sbatch", "squeue", "srun", "umask"}
"""Programs that are not installed with the tests, or whose arguments are files and variables only."""
RUN = """
import contextlib, io, json, sys, traceback
from tensorvine.clusters import LocalCluster
from tests.support.warm import warm_workers
asked, answers = sys.argv[1:]
results = {}
with warm_workers(), LocalCluster(object_store_bytes=256 << 20, cpus=2):
    for page, codes in json.load(open(asked)).items():
        names, results[page] = {"__name__": "__main__"}, []
        for code in codes:
            printed = io.StringIO()
            try:
                with contextlib.redirect_stdout(printed):
                    exec(compile(code, page, "exec"), names)
            except Exception:
                printed.write(traceback.format_exc())
            results[page].append(printed.getvalue())
        names.clear()
json.dump(results, open(answers, "w"))
"""


class Block(NamedTuple):
    """A block of code on a page."""

    page: str
    line: int
    kind: str
    mark: str
    code: str
    prints: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(pages: Iterable[str], kind: str, *, marked: bool | None = None) -> list[Block]:
    """Return the blocks of a kind; with `marked`, those that have a mark, or those that have none."""
    found = [
        Block(page, text.count("\n", 0, each.start("code")), each["kind"], each["mark"] or "", each["code"],
              (each["prints"] or "").strip())
        for page in pages
        for text in [(ROOT / page).read_text()]
        for each in BLOCK.finditer(text)
    ]  # fmt: skip
    return [each for each in found if each.kind == kind and marked in (None, bool(each.mark))]


PYTHON = blocks(PAGES, "python", marked=False)
PROGRAMS = [each for each in blocks(PAGES, "python", marked=True) if each.mark.startswith("run")]
SHELL = blocks(PAGES, "sh", marked=False)


def of_pages(found: list[Block]) -> dict[str, list[Block]]:
    """Group blocks by their page."""
    groups: dict[str, list[Block]] = {}
    for each in found:
        groups.setdefault(each.page, []).append(each)
    return groups


# ---- what runs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Run the Python blocks of all pages in one process: page -> what each block printed."""
    folder = tmp_path_factory.mktemp("pages")
    asked, answers = folder / "asked.json", folder / "answers.json"
    asked.write_text(json.dumps({page: [each.code for each in found] for page, found in of_pages(PYTHON).items()}))
    ran = subprocess.run(
        [sys.executable, "-c", RUN, str(asked), str(answers)],
        cwd=folder,
        env={**os.environ, "RAY_ADDRESS": "local", "PYTHONPATH": str(ROOT), "RAY_raylet_start_wait_time_s": "120"},
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(answers.read_text())


@pytest.mark.own_cluster
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", of_pages(PYTHON))
def test_each_example_prints_what_the_page_says(page: str, printed: dict[str, list[str]]) -> None:
    found = of_pages(PYTHON)[page]
    assert len([each for each in found if each.prints]) >= EXAMPLES_OF.get(page, 0)
    for block, prints in zip(found, printed[page], strict=True):
        assert prints.strip() == block.prints, block.place


@pytest.mark.own_cluster
@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", PROGRAMS, ids=lambda block: block.place)
def test_each_program_prints_what_the_page_says(tmp_path: Path, block: Block) -> None:
    (tmp_path / "program.py").write_text(block.code)  # a file, as its workers import it
    ran = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=270, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.strip() == block.prints


@pytest.mark.own_cluster
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", of_pages(SHELL))
def test_the_shell_commands_of_a_page_run(tmp_path: Path, page: str) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with folder_of_a_ray() as folder:
        environment = {**kept, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}", "HOME": str(folder)}
        environment |= {"RAY_TMPDIR": str(folder), "RAY_raylet_start_wait_time_s": "120"}
        for block in of_pages(SHELL)[page]:
            ran = subprocess.run(
                ["/bin/bash", "-e", "-c", block.code],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=280,
                check=False,
            )
            assert ran.returncode == 0, f"{block.place}: {ran.stderr[-2000:]}"
            if block.prints:
                assert without_figures(ran.stdout) == without_figures(block.prints), block.place


def without_figures(text: str) -> str:
    """Return a command's output without figures, which differ from run to run: times, ports, sizes."""
    return re.sub(r"\d[\d.:]*", "#", " ".join(text.split()))


# ---- what is checked ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_no_block_is_overlooked(page: str) -> None:
    text = (ROOT / page).read_text()
    for kind in ("python", "sh"):
        assert len(blocks([page], kind)) == len(re.findall(rf"^```{kind}\b", text, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES)
def test_each_python_block_is_python(page: str) -> None:
    for block in blocks([page], "python"):
        compile(block.code, block.place, "exec")


@pytest.mark.parametrize("page", PAGES)
def test_each_command_and_its_options_exist(page: str) -> None:
    wrong = [
        f"{block.place}: {' '.join(words)}: {problem}"
        for block in blocks([page], "sh")
        for words in commands(block.code)
        for problem in problems(words)
    ]
    assert wrong == []


def test_a_command_that_does_not_exist_is_found() -> None:
    code = "tensorvine ls --adress auto  # comment\ntensorvine lst\nray start --haed && scripts/none\n"
    code += "X=1 python examples/nas/run.py --quik\npip install '.[rya]'\n"
    code += "kubectl apply -f clusters/none.yaml\nfoo \\\n --x\n"
    assert [list(problems(words)) for words in commands(code)] == [
        ["no option --adress"],
        ["no command lst"],
        ["no option --haed"],
        ["no file scripts/none"],
        ["no option --quik"],
        ["no extra rya"],
        ["no file clusters/none.yaml"],
        ["unknown program foo"],
    ]


@pytest.mark.parametrize("page", PAGES)
def test_each_file_and_name_in_a_page_exists(page: str) -> None:
    texts = CODE.findall(FENCE.sub("", (ROOT / page).read_text()))
    assert [text for text in texts if not is_there(text)] == []


@pytest.mark.parametrize("page", [path.name for path in ROOT.glob("*.md")])
def test_each_link_leads_somewhere(page: str) -> None:
    for link in LINK.finditer((ROOT / page).read_text()):
        target = ROOT / (link["path"] or page)
        assert target.exists(), f"{page}: nothing at {link['path']}"
        if link["part"]:
            assert link["part"] in parts_of(target), f"{page}: {link['path']} has no part #{link['part']}"


def test_every_name_of_actors_has_a_place_in_the_reference() -> None:
    text = "".join(path.read_text() for path in (ROOT / "docs/reference").glob("*.md"))
    listed = re.findall(r"^\.\. auto(?:class|function):: (\w+)(?:\(\))?$", text, re.MULTILINE)
    assert sorted(listed) == sorted(["connect", *tensorvine.actors._MODULES])


def commands(code: str) -> Iterator[list[str]]:
    """Yield the words of each command, without variables that are set before it."""
    code = re.sub(r" <<'(\w+)'\n.*?^\1$", "", code, flags=re.DOTALL | re.MULTILINE)  # files that are written
    code = re.sub(r"\$\([^()]*\)", "VALUE", code.replace("\\\n", " "))
    for line in code.splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = next((at for at, word in enumerate(words) if word in ("&&", "|", ";", "&")), len(words))
            command, words = words[:end], words[end + 1 :]
            while command and re.match(r"\w+=", command[0]):
                command = command[1:]
            if command:
                yield command


def problems(words: list[str]) -> Iterator[str]:
    """Yield what is wrong with a command."""
    program, *arguments = words
    options = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    if program == "tensorvine":
        yield from problems_of_click(get_command(application()), arguments)
    elif program == "ray":
        yield from problems_of_click(ray_cli, arguments)
    elif program == "python" and arguments[0] == "-m":
        yield from (f"no option {option}" for option in options if option not in help_of("-m", arguments[1]))
    elif program == "python" and arguments[0].startswith("examples/"):
        yield from (f"no option {option}" for option in options if option not in help_of(arguments[0]))
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        asked = {name for names in re.findall(r"\[([\w,-]+)\]", " ".join(words)) for name in names.split(",")}
        yield from (f"no extra {name}" for name in sorted(asked - extras.keys()))
    elif program not in OTHERS and not program.startswith("scripts/") and program != "python":
        yield f"unknown program {program}"
    for word in words:
        if re.match(r"(?:clusters|examples|scripts|tests|benchmarks)/[\w./-]+$", word) and not (ROOT / word).exists():
            yield f"no file {word}"


def problems_of_click(command: click.Command, arguments: list[str]) -> Iterator[str]:
    """Yield which command or option a program of click or typer does not have."""
    while hasattr(command, "commands") and arguments and not arguments[0].startswith("-"):
        name, *arguments = arguments
        if name not in command.commands:
            yield f"no command {name}"
            return
        command = command.commands[name]
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
    for word in arguments:
        if word == "--":
            return
        if word.startswith("--") and word.partition("=")[0] not in known:
            yield f"no option {word.partition('=')[0]}"


@functools.cache
def help_of(*words: str) -> str:
    """Return what a Python program prints about its options."""
    return subprocess.run(
        [sys.executable, *words, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=200, check=True
    ).stdout


def is_there(text: str) -> bool:
    """Return whether a file or a member of a public class exists, if the text names one."""
    if re.fullmatch(r"(?:store|planner|actors|clusters|examples|tests|scripts|benchmarks|docs)/[\w./-]+", text):
        return (ROOT / text).exists()
    if found := re.fullmatch(r"([A-Z]\w+)\.([a-z]\w*)(?:\(.*\))?", text):
        owner = public().get(found[1])
        return owner is None or hasattr(owner, found[2]) or found[2] in annotations(owner)
    return True


@functools.cache
def public() -> dict[str, object]:
    """Return the public classes and functions by name."""
    packages = (tensorvine.store, tensorvine.planner, tensorvine.actors, importlib.import_module("tensorvine.clusters"))
    search = importlib.import_module("tensorvine.actors.search")
    return {name: getattr(package, name) for package in (*packages, search) for name in package.__all__}


def annotations(owner: object) -> set[str]:
    """Return the annotated attributes of a class and its bases."""
    return {name for base in getattr(owner, "__mro__", ()) for name in vars(base).get("__annotations__", {})}


def parts_of(page: Path) -> set[str]:
    """Return the anchors of a page's titles, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
