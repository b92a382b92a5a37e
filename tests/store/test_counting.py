"""Counts: what is added up, by several threads, and how sums of counts behave."""

from __future__ import annotations

import json
import re
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.store.counting import Counted, Counts, merge
from tensorvine.store.errors import StoreFullError
from tensorvine.store.metrics import METRICS, SAVE, SAVED_BYTES, SHORT_S, SHOWN, SUPERSEDED, Kind, Source
from tensorvine.store.shard import ShardStats

VALUES = st.floats(0, 1e6)
BATCHES = st.lists(st.lists(VALUES, max_size=5), max_size=5)


def counted(values: list[float]) -> Counts:
    counts = Counts()
    for value in values:
        counts.observe(SAVE, value)
        counts.add(SAVED_BYTES, value, "written")
    return counts


@given(BATCHES)
def test_sums_of_counts_are_counts_of_all(batches: list[list[float]]) -> None:
    total: Counted = {}
    for batch in batches:
        merge(total, counted(batch).take())
    whole = counted([value for batch in batches for value in batch]).copy()
    assert total.keys() == whole.keys()
    for key, values in whole.items():
        assert total[key] == pytest.approx(values)


@given(st.lists(VALUES, min_size=1))
def test_each_value_is_in_the_first_bucket_that_is_not_below_it(values: list[float]) -> None:
    *cells, total = counted(values).copy()["save_seconds"]
    assert total == pytest.approx(sum(values))
    for bound, count in zip(SHORT_S, [sum(cells[: place + 1]) for place in range(len(SHORT_S))], strict=True):
        assert count == sum(value <= bound for value in values)
    assert sum(cells) == len(values)


@given(BATCHES)
def test_what_is_taken_is_not_taken_again(batches: list[list[float]]) -> None:
    counts, total = Counts(), dict[str, list[float]]()
    for batch in batches:
        for value in batch:
            counts.add(SUPERSEDED, value)
        merge(total, counts.take())
        assert not counts.copy()
    assert sum(total.get("versions_superseded", [0.0])) == pytest.approx(sum(map(sum, batches)))


def test_several_threads_lose_no_count() -> None:
    counts = Counts()
    threads = [threading.Thread(target=lambda: [counts.add(SUPERSEDED) for _ in range(5_000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counts.copy() == {"versions_superseded": [20_000.0]}


def test_errors_are_counted_by_their_class() -> None:
    counts = Counts()
    counts.failed("save", StoreFullError("no room"))
    counts.failed("save", StoreFullError("no room"))
    counts.failed("load", KeyError())
    assert counts.copy() == {"errors|save|StoreFullError": [2.0], "errors|load|KeyError": [1.0]}


def test_clocks_that_differ_give_no_negative_duration() -> None:
    counts = Counts()
    counts.observe(SAVE, -3.0)
    assert counts.copy()["save_seconds"][0] == 1.0
    assert counts.copy()["save_seconds"][-1] == 0.0


def test_counts_are_json_as_they_are() -> None:
    told = counted([0.5]).copy()
    assert json.loads(json.dumps(told)) == told


class TestNames:
    def test_each_name_is_there_once_and_well_formed(self) -> None:
        names = [metric.name for metric in METRICS]
        assert len(set(names)) == len(names)
        for metric in METRICS:
            assert re.fullmatch(r"tensorvine_[a-z_]*[a-z]", metric.name)
            assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
            assert metric.about.endswith(".")

    def test_units_are_base_units(self) -> None:
        for metric in METRICS:
            assert not re.search(r"_(ms|us|milliseconds|kb|mb|kib|mib|percent)(_|$)", metric.name)
            if metric.kind is Kind.HISTOGRAM:
                assert metric.name.endswith("_seconds")

    def test_no_label_holds_a_model_or_a_version(self) -> None:
        labels = {label for metric in METRICS if metric.kind is not Kind.INFO for label in metric.all_labels}
        assert labels == {"actor", "shard", "kind", "transport", "result", "operation", "source"}

    def test_fields_of_shards_exist_and_all_numbers_are_exported(self) -> None:
        fields = {metric.field for metric in METRICS if metric.source is Source.SHARD and metric.field}
        assert fields == ShardStats.__dataclass_fields__.keys() - {"shard", "counted"}

    def test_at_most_ten_gauges_are_shown_by_the_engine(self) -> None:
        assert len(SHOWN) <= 10
        gauges = {metric.field for metric in METRICS if metric.kind is Kind.GAUGE and metric.source is Source.SHARD}
        assert set(SHOWN) <= gauges
