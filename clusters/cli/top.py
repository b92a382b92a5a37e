"""`tensorvine top`: what goes on in a repository, now and again.

Rules
- On a terminal it has the screen to itself and gives it back, as htop does; Ctrl-C ends it, and it has done well then.
  Elsewhere it writes one table below the other.
- A shard that does not answer for a moment is shown so; what it carries is not guessed.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from ...store.sizes import size
from ...store.waiting import LONGEST_S
from .. import words
from ..client import Address, AsJson, Name, Scheduler, connected, console, print_json, table
from .options import check_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.console import Console
    from rich.table import Table

    from ...actors.client.repository import Repository
    from ..pulse import Beat, Pulse

INTERVAL_S, SHORTEST_S = 2.0, 0.1
ANSWER_S = 2.0
"""How long shards may take to answer."""
COLUMNS = ("used", "capacity", "full", "req/s", "saved/s", "sent/s", "waiting", "unwritten")
WIDTH = 100
"""Characters that the table needs."""
NOT_IF_NARROW = ("capacity",)
"""Columns that are left out with fewer: `status` tells what they would."""
SAID = 100
"""Characters of why one does not that are shown."""


def _interval(value: float) -> float:
    return check_seconds(value, SHORTEST_S)


def top(
    interval: Annotated[
        float,
        typer.Option("--interval", "-i", help="Seconds between two updates.", callback=_interval, metavar="SECONDS"),
    ] = INTERVAL_S,
    once: Annotated[
        bool,
        typer.Option("--once", help="Measure for one interval, print one table, and exit."),
    ] = False,
    name: Name = None,
    address: Address = None,
    scheduler: Scheduler = None,
    as_json: AsJson = False,
) -> None:
    """Show memory, requests, traffic and unwritten tensors of each shard until Ctrl-C is pressed.

    The column "req/s" shows requests per second. "saved/s" shows the tensor bytes per second
    that the shard receives from saves. "sent/s" shows the tensor bytes per second that the shard sends to readers and
    to other shards. "waiting" shows how many requests wait for memory (mem) or for the disk. "unwritten" shows how many
    bytes of tensors are not yet on disk. --json requires --once.
    """
    if as_json and not once:
        raise typer.BadParameter("expected it only with --once", param_hint="--json")
    try:
        with connected(name, address, scheduler) as repository:
            pulse, known = _pulse_of(repository), repository.name
            if not once:
                follow(console(), known, pulse, interval)
                return
            pulse.look()
            time.sleep(min(interval, LONGEST_S))
            beats = pulse.look()
    except KeyboardInterrupt:
        if once:
            raise  # the table that was asked for has not been printed
        return
    if as_json:
        shards = [beat.as_dict() for beat in beats]
        print_json({"repository": known, "time": pulse.when.isoformat(), "shards": shards})
    else:
        out = console()
        out.print(drawn(known, pulse, beats, out.width))


def follow(out: Console, name: str, pulse: Pulse, interval: float) -> None:
    """Show a repository until somebody presses Ctrl-C."""
    from rich.live import Live

    if not out.is_terminal:
        _repeat(lambda: out.print(drawn(name, pulse, pulse.look(), out.width)), interval)
        return
    with Live(console=out, screen=True, auto_refresh=False) as live:
        _repeat(lambda: live.update(drawn(name, pulse, pulse.look(), out.width), refresh=True), interval)


def drawn(name: str, pulse: Pulse, beats: Sequence[Beat], width: int) -> Table:
    """Draw one look as a table for so many characters in a line."""
    shown = [column for column in COLUMNS if width >= WIDTH or column not in NOT_IF_NARROW]
    title = f"repository {name}, {words.moment(pulse.when)} UTC"
    rows = table(title, "shard", "node", right=tuple(shown))
    rows.collapse_padding, rows.pad_edge, rows.show_edge = True, False, False
    rows.columns[0].min_width, rows.columns[1].min_width = 5, 8
    for beat in beats:
        rows.add_row(
            str(beat.shard), beat.node, *_cells(shown, [beat]), style=None if beat.stats is not None else "red"
        )
    if len(beats) > 1:
        rows.add_section()
        rows.add_row("all", "", *_cells(shown, [beat for beat in beats if beat.stats is not None]))
    silent = [f"shard {beat.shard} does not answer: {beat.trouble:.{SAID}}" for beat in beats if beat.stats is None]
    rows.caption, rows.caption_justify = "\n".join(silent) or None, "left"
    return rows


def _repeat(show: Callable[[], None], interval: float) -> None:
    try:
        while True:
            show()
            sys.stdout.flush()
            time.sleep(min(interval, LONGEST_S))
    except KeyboardInterrupt:
        return


def _cells(shown: Sequence[str], beats: Sequence[Beat]) -> list[str]:
    """Sum up what some shards carry, column by column; dashes, where none of them answered."""
    answered = [(beat, beat.stats) for beat in beats if beat.stats is not None]
    if not answered:
        return ["-"] * len(shown)
    used, room = sum(beat.bytes_used for beat, _ in answered), sum(stats.capacity for _, stats in answered)
    requests = _sum(beat.requests_per_s for beat, _ in answered)
    behind = sum(stats.bytes_unwritten for _, stats in answered)
    memory = sum(stats.waiting_for_memory for _, stats in answered)
    disk = sum(stats.waiting_for_disk for _, stats in answered)
    cells = {
        "used": size(used),
        "capacity": size(room),
        "full": f"{used / room:.0%}" if room else "-",
        "req/s": f"{requests:,.1f}" if requests is not None else "-",
        "saved/s": _traffic(beat.saved_per_s for beat, _ in answered),
        "sent/s": _traffic(beat.sent_per_s for beat, _ in answered),
        "waiting": ", ".join(f"{what} {count}" for what, count in (("mem", memory), ("disk", disk)) if count) or "0",
        "unwritten": size(behind) if behind else "0",
    }
    return [cells[column] for column in shown]


def _traffic(rates: Iterable[float | None]) -> str:
    known = _sum(rates)
    return size(round(known) if known is not None else None)


def _sum(rates: Iterable[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None


def _pulse_of(repository: Repository) -> Pulse:
    from ..nodes import check_there, machines
    from ..pulse import Pulse

    known, engine = f"{repository.name}/shard-", repository.engine

    def where() -> dict[int, str]:
        addresses = {machine.id: machine.address for machine in machines(engine)}
        return {
            int(actor.removeprefix(known)): addresses.get(node or "", "-")
            for actor, node in engine.actors().items()
            if actor.startswith(known)
        }

    def check() -> None:
        check_there(engine, repository.name)

    return Pulse(lambda: repository.stats_by_shard(ANSWER_S), where, check)
