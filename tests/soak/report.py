"""What a soak prints: a line per round, a table at the end, each finding whole.

Rules
- A finding names seed, round and mode, what was expected and what was found; findings of one rule in one round that
  say much the same are printed once, with their number.
- Pure: outcomes in, text out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

SHOWN = 3
"""How many findings of one rule in one round are printed."""
LONG = 1200
"""Characters of what was found that are printed, the last ones: of a traceback they say most."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a round."""

    where: str
    """Seed, round and mode."""
    seconds: float
    operations: Mapping[str, int]
    faults: Mapping[str, int]
    refused: Mapping[str, int]
    findings: tuple[Mapping[str, str], ...]
    """Rule, expected, found."""
    error: str = ""
    """Why the round did not come to its end; a finding of its own."""

    @classmethod
    def of(cls, where: str, found: Mapping[str, Any]) -> Outcome:
        """Read what a round wrote."""
        kinds = {kind: found[kind] for kind in ("seconds", "operations", "faults", "refused", "error")}
        return cls(where, findings=tuple(found["findings"]), **kinds)

    @property
    def wrong(self) -> int:
        """How many findings there are."""
        return len(self.findings) + bool(self.error)


def line(outcome: Outcome) -> str:
    """Say how a round went."""
    done, faults = sum(outcome.operations.values()), sum(outcome.faults.values())
    return f"{outcome.where}: {done} operations, {faults} faults, {outcome.wrong} findings, {outcome.seconds:.0f} s"


def table(outcomes: Iterable[Outcome]) -> str:
    """Sum up: operations, faults and refusals by kind, findings by rule.

    >>> print(table([Outcome("seed 1", 2.0, {"save": 3}, {"kill shard": 1}, {}, ())]))
    operations      3  save 3
    faults          1  kill shard 1
    refused         0
    findings        0
    """
    outcomes = list(outcomes)
    rows = {
        "operations": _sum(outcome.operations for outcome in outcomes),
        "faults": _sum(outcome.faults for outcome in outcomes),
        "refused": _sum(outcome.refused for outcome in outcomes),
        "findings": _sum([Counter(rule for outcome in outcomes for rule in _rules(outcome))]),
    }
    return "\n".join(
        f"{name:<12}{sum(kinds.values()):>5}  {', '.join(f'{kind} {n}' for kind, n in sorted(kinds.items()))}".rstrip()
        for name, kinds in rows.items()
    )


def findings(outcome: Outcome) -> str:
    """Tell a round's findings."""
    texts: list[str] = []
    shown: Counter[str] = Counter()
    for finding in outcome.findings:
        shown[finding["rule"]] += 1
        if shown[finding["rule"]] <= SHOWN:
            texts.append(
                f"{outcome.where}\n  rule: {finding['rule']}\n  expected: {finding['expected']}\n"
                f"  found: {finding['found'][-LONG:]}"
            )
    texts += [f"{outcome.where}\n  rule: {rule}: {n - SHOWN} more" for rule, n in shown.items() if n > SHOWN]
    if outcome.error:
        texts.append(f"{outcome.where}\n  expected: the round comes to its end\n  found: {outcome.error}")
    return "\n".join(texts)


def _rules(outcome: Outcome) -> list[str]:
    return [finding["rule"] for finding in outcome.findings] + ["the round comes to its end"] * bool(outcome.error)


def _sum(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return total
