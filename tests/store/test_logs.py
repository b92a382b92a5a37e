"""Log lines: one per record, with time, level and fields, in which names are escaped."""

from __future__ import annotations

import asyncio
import io
import logging
import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.store import logs
from tensorvine.store.logs import Fields, OneLine, calling, to_stderr
from tensorvine.store.refs import ModelRef

HEAD = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING "


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What an actor's process writes: its loggers are those of another tree here, which no handler has yet."""
    text, root = io.StringIO(), logging.getLogger("tensorvine-test")
    monkeypatch.setattr(logs, "ROOT", root.name)
    monkeypatch.setattr("sys.stderr", text)
    root.propagate = False
    to_stderr("default/shard-0")
    to_stderr("again")  # a handler is there
    yield text
    root.propagate = True  # pytest has its handlers at each logger that does not
    for handler in list(root.handlers):
        root.removeHandler(handler)


log = logging.getLogger("tensorvine-test.module")


def test_a_line_has_time_level_and_fields(written: io.StringIO) -> None:
    async def work() -> None:
        log.warning("it is %s", "full")

    asyncio.run(calling("retire", ("x", ModelRef("net", 3)), work()))
    log.warning("outside of a call")
    log.info("not shown")
    first, second = written.getvalue().splitlines()
    fields = "repository=default actor=shard-0"
    assert re.fullmatch(HEAD + f"{fields} call=retire version=net@3 tensorvine-test.module: it is full", first)
    assert re.fullmatch(HEAD + f"{fields} tensorvine-test.module: outside of a call", second)


def test_calls_at_the_same_time_have_their_own_fields(written: io.StringIO) -> None:
    async def work(turn: asyncio.Barrier) -> None:
        await turn.wait()
        log.warning("now")

    async def both() -> None:
        turn = asyncio.Barrier(2)
        await asyncio.gather(*(calling(name, (), work(turn)) for name in ("load", "save")))

    asyncio.run(both())
    assert sorted(re.findall(r"call=(\w+)", written.getvalue())) == ["load", "save"]


@given(st.text())
def test_a_name_can_neither_end_a_line_nor_move_the_cursor(name: str) -> None:
    record = logging.makeLogRecord({"msg": "no file %s", "args": (name,), "name": "tensorvine.x"})
    Fields(name).filter(record)
    line = OneLine().format(record)
    assert line.isprintable()


def test_a_traceback_stands_below_its_line_and_is_escaped(written: io.StringIO) -> None:
    try:
        raise ValueError("a\x1b[2J\nb")
    except ValueError:
        log.exception("failed")
    first, *trace = written.getvalue().splitlines()
    assert first.endswith("failed")
    assert all(line.startswith("    ") and line.isprintable() for line in trace)
    assert r"    ValueError: a\x1b[2J" in trace


def test_a_process_whose_log_has_handlers_keeps_these(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger("tensorvine-test-handled")
    monkeypatch.setattr(logs, "ROOT", root.name)
    root.addHandler(logging.NullHandler())
    to_stderr("default/shard-0")
    assert len(root.handlers) == 1
