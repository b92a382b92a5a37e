"""`scripts/audit`: what it says of answers, of none, and of a service that knows nothing. No network is needed."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader = SourceFileLoader("tensorvine_audit", str(ROOT / "scripts/audit"))
    spec = importlib.util.spec_from_loader("tensorvine_audit", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def nobody_writes(pipe: int) -> bool:
    try:
        return os.read(pipe, 1) == b""
    except BlockingIOError:
        return False


PACKAGE = {"name": "six", "version": "1.17.0", "vulns": []}
BAD = {"name": "idna", "version": "3.20", "vulns": [{"id": "CVE-1", "fix_versions": ["3.21"], "aliases": []}]}
UNKNOWN = {"name": "idna", "skip_reason": "Dependency not found on PyPI and could not be audited: idna (3.20)"}


class TestAudit:
    """With a stand-in for pip-audit, a program that writes what pip-audit was seen to write."""

    def tool(self, folder: Path, answers: list[dict[str, Any]] | None) -> Path:
        """Make it; without answers it fails as where PyPI cannot be reached."""
        program = folder / "python"
        told = json.dumps({"dependencies": answers, "fixes": []})
        program.write_text(
            f"#!{sys.executable}\nimport sys, pathlib\n"
            "asked = pathlib.Path(sys.argv[sys.argv.index('-r') + 1]).read_text().split()\n"
            "answers = pathlib.Path(sys.argv[sys.argv.index('-o') + 1])\n"
            + ("sys.exit('ConnectionError: no way')" if answers is None else f"answers.write_text({told!r})")
        )
        program.chmod(0o755)
        return program

    @pytest.mark.parametrize(
        ("answers", "status", "said"),
        [
            ([PACKAGE], 0, "audited: 1 of 2 packages, 0 of them vulnerable"),
            ([PACKAGE, UNKNOWN], 0, "audited: 1 of 2 packages, 0 of them vulnerable"),
            ([PACKAGE, BAD], 1, "vulnerable: idna==3.20: CVE-1, fixed in 3.21"),
            ([UNKNOWN], 0, "not audited: PyPI tells nothing of six==1.17.0"),
            (None, 0, "not audited: ConnectionError: no way"),
        ],
        ids=["sound", "one unknown", "vulnerable", "nothing known", "no network"],
    )
    def test_what_it_says(
        self,
        audit: ModuleType,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        answers: list[dict[str, Any]] | None,
        status: int,
        said: str,
    ) -> None:
        tool = self.tool(tmp_path, answers)
        monkeypatch.setattr(audit, "tool", lambda ends: tool)
        monkeypatch.setattr(audit, "pins", lambda: ["six==1.17.0", "idna==3.20"])
        assert audit.main() == status
        assert said in capsys.readouterr().out.splitlines()

    def test_it_does_not_wait_longer_than_its_limit_and_leaves_no_process(
        self, audit: ModuleType, tmp_path: Path
    ) -> None:
        """What it runs has started another process, as `python -m venv` does."""
        ends = tmp_path / "ends"
        os.mkfifo(ends)
        alive = os.open(ends, os.O_RDONLY | os.O_NONBLOCK)
        try:
            with pytest.raises(audit.NotAuditedError, match=r"not done within 60 s: sh -c"):
                audit.run(["sh", "-c", f"exec 3>{ends}; sleep 600 & wait"], time.monotonic() + 1.0)
            deadline = time.monotonic() + 60.0
            while not nobody_writes(alive):
                assert time.monotonic() < deadline, "what it started still runs"
                threading.Event().wait(0.01)
        finally:
            os.close(alive)

    def test_it_asks_for_all_that_is_installed(self, audit: ModuleType) -> None:
        wanted = audit.pins()
        for name in ("ray", "keras", "pytest", "pip-audit", "torch"):
            assert any(pin.startswith(f"{name}==") for pin in wanted)
