"""`python -m tests.simulation --seeds N [--first S] [--seed [THEME:]S[-S] ... --trace]`: run worlds and say what they
broke."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter

from .kinds import BY_NAME, THEMES
from .runner import run, simulator

ALL_THEMES = sorted({*THEMES, *BY_NAME})


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def worlds_of(text: str) -> list[tuple[str | None, int]]:
    """Read what `--seed` takes: a seed, or the first and the last of several, after a theme or none.

    >>> worlds_of("5"), worlds_of("change:7-8")
    ([(None, 5)], [('change', 7), ('change', 8)])
    """
    theme, _, seeds = text.rpartition(":")
    first, _, last = seeds.partition("-")
    if theme and theme not in ALL_THEMES:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a theme of {', '.join(ALL_THEMES)}; found {theme!r}")
    return [(theme or None, seed) for seed in range(int(first), int(last or first) + 1)]


def main() -> int:
    """Run seeds; 1 when a rule was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after so long")
    parser.add_argument("--seed", type=worlds_of, nargs="+", help="only these: 5, 0-99, change:27")
    parser.add_argument("--theme", choices=ALL_THEMES, help="worlds of this theme, where --seed names none")
    parser.add_argument("--trace", action="store_true", help="print what happened, step by step")
    parser.add_argument("--brief", action="store_true", help="one line per failing seed, without its trace")
    options = parser.parse_args()
    drawn = [(None, seed) for seed in range(options.first, options.first + options.seeds)]
    worlds = [world for some in options.seed for world in some] if options.seed else drawn
    began, steps, count, failed = time.perf_counter(), 0, 0, Counter[str]()
    with simulator():
        for named, seed in worlds:
            theme = named or options.theme
            if time.perf_counter() - began > options.seconds:
                break
            count += 1
            outcome = run(seed, options.trace, theme)
            steps += outcome.steps
            if options.trace:
                say("\n".join(outcome.trace))
            if outcome.broken:
                rule, what = outcome.broken[0]
                failed[rule] += 1
                say(f"seed {f'{theme}:' if theme else ''}{seed}: {rule} {what[:400]}")
                if not (options.brief or options.trace):
                    again = run(seed, True, theme)
                    say("\n".join(again.trace[-200:]))
    seconds, busy = time.perf_counter() - began, time.process_time()
    say(
        f"{count} seeds, {sum(failed.values())} of them broke a rule {dict(failed)}; {steps} steps in {seconds:.1f} s, "
        f"{busy:.1f} s of the processor: {steps / busy:.0f} steps/s, {1000 * busy / max(count, 1):.1f} ms a seed"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])  # noqa: S606  itself
    sys.exit(main())
