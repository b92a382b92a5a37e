"""All targets."""

from __future__ import annotations

from tests.fuzz.frameworks import FRAMEWORKS
from tests.fuzz.imported import IMPORTED
from tests.fuzz.lines import LINES
from tests.fuzz.stored import STORED
from tests.fuzz.wire import WIRE

TARGETS = (*STORED, *IMPORTED, *WIRE, *LINES, *FRAMEWORKS)
