"""The version page: a client takes a counter only from the catalog that is alive, and only while its lease lasts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.actors.memory.counters import COUNTERS, CounterPage, CounterView, counter_of
from tensorvine.store.errors import ShardUnavailableError

from tests.support.waiting import eventually

SCENE = """
import time
from tensorvine.actors.memory.counters import CounterPage

page = CounterPage(first=7)
page.lease(time.monotonic() + 600.0)
page.raise_of("m")
print(page.fd, *page.file, flush=True)
input()
"""
NAMES = st.lists(
    st.sampled_from(["a", "b/c", next(f"x{n}" for n in count() if counter_of(f"x{n}") == counter_of("a"))])
)


def opened(page: CounterPage) -> CounterView:
    return CounterView(os.getpid(), page.fd, page.file)


@pytest.fixture
def page() -> CounterPage:
    made = CounterPage(first=7)
    made.lease(time.monotonic() + 600.0)
    return made


@given(NAMES)
def test_a_counter_says_how_often_the_names_that_share_it_changed(names: list[str]) -> None:
    page = CounterPage(first=1 << 63)
    page.lease(time.monotonic() + 600.0)
    view = opened(page)
    for name in names:
        page.raise_of(name)
    for name in {"other", *names}:
        expected = (1 << 63) + sum(counter_of(one) == counter_of(name) for one in names)
        assert page.value_of(name) == view.value_of(name) == expected


def test_two_names_may_share_a_counter_and_most_do_not() -> None:
    used = {counter_of(f"m{n}") for n in range(COUNTERS)}
    assert COUNTERS / 2 < len(used) < COUNTERS
    assert used <= set(range(COUNTERS))


def test_no_counter_holds_before_a_lease_is_shown_nor_after_it(page: CounterPage) -> None:
    view = opened(CounterPage(first=7))
    assert view.value_of("m") is None
    view = opened(page)
    assert view.value_of("m") == 7
    page.lease(time.monotonic())
    assert view.value_of("m") is None
    page.lease(time.monotonic() + 600.0)
    assert view.value_of("m") == 7


def test_none_holds_after_close(page: CounterPage) -> None:
    view = opened(page)
    view.close()
    assert view.value_of("m") is None


@pytest.fixture
def catalog() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", SCENE], stdin=-1, stdout=-1, text=True) as process:
        yield process
        process.kill()


def test_none_holds_once_the_process_has_ended(catalog: subprocess.Popen[str]) -> None:
    assert catalog.stdout is not None
    fd, device, inode = map(int, catalog.stdout.readline().split())
    view = CounterView(catalog.pid, fd, (device, inode))
    assert view.value_of("m") == 8
    catalog.kill()
    eventually(lambda: view.value_of("m") is None, "the process ends")


def test_a_page_of_another_file_is_refused(page: CounterPage) -> None:
    other = CounterPage(first=7)
    with pytest.raises(ShardUnavailableError, match=rf"expected descriptor {other.fd} of process {os.getpid()} to"):
        CounterView(os.getpid(), other.fd, page.file)


def test_nobody_cuts_the_page(page: CounterPage) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(page.fd, 0)
