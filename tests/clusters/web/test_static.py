"""The files that browsers load: small, licensed, and none from elsewhere."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
import tensorvine.clusters.web

WEB = Path(tensorvine.clusters.web.__file__).parent
STATIC = WEB / "static"
OWN = sorted(path for path in STATIC.iterdir() if path.is_file())
VENDORED = {
    "dagre.min.js": "54a503e346f93ca0bb10abe7999587e037262935687aca45eb4e4b0f64bbb578",
    "uplot.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""File of `npm pack` -> its SHA-256: @dagrejs/dagre 3.1.3, uplot 1.6.32."""
MOST_BYTES = 400 << 10


def test_the_front_end_is_small() -> None:
    assert sum(path.stat().st_size for path in STATIC.rglob("*") if path.is_file()) < MOST_BYTES


@pytest.mark.parametrize("name", VENDORED)
def test_files_of_others_are_as_they_were_published(name: str) -> None:
    found = (STATIC / "vendor" / name).read_bytes()
    assert hashlib.sha256(found).hexdigest() == VENDORED[name]


def test_each_file_of_others_has_its_licence() -> None:
    licences = {path.name.partition(".")[0] for path in (STATIC / "vendor").glob("*.LICENSE")}
    assert {path.name.partition(".")[0] for path in (STATIC / "vendor").iterdir()} == licences
    for name in licences:
        assert "Permission is hereby granted" in (STATIC / "vendor" / f"{name}.LICENSE").read_text()


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_nothing_is_loaded_from_elsewhere_and_no_text_is_parsed_as_html(path: Path) -> None:
    text = path.read_text()
    assert set(re.findall(r"https?://[^\s\"'`]+", text)) <= {"http://www.w3.org/2000/svg"}
    for dangerous in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert dangerous not in text
    assert not re.search(r"@import|url\(", text)
