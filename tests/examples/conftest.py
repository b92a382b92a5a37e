"""What tests of examples share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.marked import marked


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    """A mark for the processes of one test; what still runs with it at the end is killed."""
    yield str(tmp_path)
    for process in marked(str(tmp_path)):
        process.kill()
