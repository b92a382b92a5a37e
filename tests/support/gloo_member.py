"""A member of a Gloo group in a process of its own, which a test ends at a moment of its choice.

It prints its endpoint, reads a line `{"name", "epoch", "rank", "endpoints", "timeout"}`, joins and prints `{}`; then it
carries out one line after the other, `["send", bytes, rank]`, `["recv", bytes, rank]`, `["barrier"]`, `["broadcast",
bytes]` or `["close"]`, and prints `{}` after each.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from tensorvine.actors.collective.gloo.backend import GlooBackend


def say(facts: dict[str, Any]) -> None:
    print(json.dumps(facts), flush=True)  # noqa: T201  to the test, through a pipe


def main() -> None:
    backend = GlooBackend("127.0.0.1")
    offer = backend.offer()
    say(offer.endpoint)
    told = json.loads(sys.stdin.readline())
    endpoints = told["endpoints"]
    group = backend.join(
        offer,
        told["name"],
        epoch=told["epoch"],
        rank=told["rank"],
        size=len(endpoints),
        endpoints=endpoints,
        timeout=told["timeout"],
    )
    say({})
    for line in sys.stdin:
        verb, *given = json.loads(line)
        if verb in ("send", "recv", "broadcast"):
            given[0] = np.zeros(given[0], np.uint8)
        getattr(group, verb)(*given)
        say({})


if __name__ == "__main__":
    main()
