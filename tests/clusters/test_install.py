"""`install.sh`: one environment per wheel, made once, whoever wants it, and whole."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "clusters/batch/install.sh"
WAIT_S = 600.0


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel of that name which holds one module and needs nothing, with constraints."""
    return build(tmp_path, "print('one')")


def build(folder: Path, program: str) -> Path:
    described = "tensorvine-0.1.0.dist-info"
    wheel = folder / "tensorvine-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr("vine.py", program)
        made.writestr(f"{described}/METADATA", "Metadata-Version: 2.1\nName: tensorvine\nVersion: 0.1.0\n")
        made.writestr(f"{described}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr(f"{described}/RECORD", "")
    (folder / "constraints.txt").write_text("tensorvine==0.1.0\n")
    return wheel


def start(folder: Path, *words: str | Path, **settings: str) -> subprocess.Popen[str]:
    places = {"TENSORVINE_VENVS": str(folder / "venvs"), "TENSORVINE_PYTHON": sys.executable, "PIP_NO_INDEX": "1"}
    return subprocess.Popen(
        ["/bin/bash", str(SCRIPT), *map(str, words)],
        env={**os.environ, **places, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=WAIT_S)
    return process.returncode, out, err


def vine(venv: Path) -> str:
    return subprocess.check_output([venv / "bin/python", "-m", "vine"], text=True)


def test_what_was_left_half_made_is_made_anew_by_one_of_two(wheel: Path, tmp_path: Path) -> None:
    code, out, _ = ended(start(tmp_path, wheel, PIP_REQUIRE_HASHES="1"))
    assert (code, out) == (1, "")
    (venv,) = [path for path in (tmp_path / "venvs").iterdir() if path.is_dir()]
    (venv / "left").touch()
    both = [start(tmp_path, wheel), start(tmp_path, wheel)]
    (first, place, one), (second, same, other) = map(ended, both)
    assert (first, second, place, same) == (0, 0, f"{venv}\n", f"{venv}\n")
    assert [f": making {venv}\n" in said for said in (one, other)].count(True) == 1
    assert (vine(venv), (venv / "left").exists()) == ("one\n", False)

    build(tmp_path, "print('two')")  # of the same version
    newer = start(tmp_path, wheel)
    assert newer.stderr is not None
    making = newer.stderr.readline()
    newer.terminate()
    assert ended(newer)[0] != 0
    assert (tmp_path / "venvs").as_posix() in making
    assert str(venv) not in making
    assert vine(venv) == "one\n"


@pytest.mark.parametrize(
    ("settings", "missing", "said"),
    [
        ({}, "tensorvine-0.1.0-py3-none-any.whl", "expected a wheel of TensorVine"),
        ({}, "constraints.txt", "expected constraints.txt beside"),
        ({"TENSORVINE_PYTHON": "python-of-old"}, "nothing", "expected Python 3.11 or newer"),
    ],
)
def test_what_is_missing_is_said(
    settings: dict[str, str], missing: str, said: str, wheel: Path, tmp_path: Path
) -> None:
    (tmp_path / missing).unlink(missing_ok=True)
    code, out, err = ended(start(tmp_path, wheel, **settings))
    assert (code, out) == (1, "")
    assert said in err
    assert not (tmp_path / "venvs").exists()
