"""Who was promised what, and whether it was kept: a judgement of journals, without a repository.

Rules
- A promise is a save that returned; it is stronger when the save was durable, or a `flush` that began later, when
  nothing had died yet, returned.
- What may be lost follows from what died: without a death of a shard nothing; with replicas nothing but after deaths
  while copies were incomplete; with a path nothing that was durable; else by name, as `ModelLostError`. The catalog's
  journal survives the death of all processes, so nothing is lost without a name.
- A version that a client asked to retire, without an answer, may be there or not. One that was retired is not.
- A save that did not return may have left a version or not; but its version is never another save's, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tensorvine.store import ModelRef

from tests.soak.journal import Entry


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken rule."""

    rule: str
    expected: str
    found: str


@dataclass(slots=True)
class Promise:
    """What is known of one version that a save returned."""

    ref: ModelRef
    save: str
    at: float
    """When the save returned."""
    began: float
    durable: bool
    retiring: float | None = None
    """When somebody first asked to retire it."""
    retired: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """What came of loading a version at the end."""

    outcome: str
    """`read`, `ModelLostError`, `ModelNotFoundError`, or another error."""
    save: str = ""
    text: str = ""


class Ledger:
    """What journals say of versions.

    Args:
        entries: of all journals, by time.
        path: the repository keeps its history on disk.
        replicas: how many nodes have each version.
    """

    def __init__(self, entries: Sequence[Entry], path: bool, replicas: int) -> None:
        self._entries = entries
        self._path = path
        self._replicas = replicas
        self.promises: dict[ModelRef, Promise] = {}
        self._twice: list[Finding] = []
        self._losses = [
            (entry["at"], entry["until"])
            for entry in entries
            if entry["event"] == "died"
            and any("shard" in what or what == "node" for what in entry["what"])
            and (replicas == 1 or not entry["safe"])
        ]
        """Within which times a shard died whose memory nobody else had."""
        self._retiring: dict[str, float] = {}
        """Version -> when somebody first asked to retire it, which may be before its saver heard that it is there."""
        for entry in entries:
            if entry["event"] == "retiring":
                self._retiring.setdefault(entry["ref"], entry["at"])
        asked: dict[str, float] = {}
        self._retired = {entry["ref"] for entry in entries if entry["event"] == "retired"}
        for entry in entries:
            self._take(entry, asked)

    def _take(self, entry: Entry, asked: dict[str, float]) -> None:
        match entry["event"]:
            case "saving":
                asked[entry["save"]] = entry["at"]
            case "saved":
                ref = ModelRef.parse(entry["ref"])
                known = self.promises.get(ref)
                if known is not None and known.save != entry["save"]:
                    found = f"saves {known.save} and {entry['save']} were both told {ref}"
                    self._twice.append(Finding("a version is never used twice", f"one save for {ref}", found))
                    return
                self.promises[ref] = Promise(
                    ref,
                    entry["save"],
                    entry["at"],
                    asked.get(entry["save"], entry["at"]),
                    entry["durable"],
                    self._retiring.get(entry["ref"]),
                    entry["ref"] in self._retired,
                )
            case "flushed":
                for promise in self.promises.values():
                    there = promise.at < entry["began"] and not self.may_be_lost(promise, entry["began"])
                    promise.durable |= there
            case _:
                pass

    def may_be_lost(self, promise: Promise, until: float) -> bool:
        """Tell whether a version may have gone by a time."""
        if self._path and promise.durable:
            return False
        return any(promise.began < after and before < until for before, after in self._losses)

    def may_be_told(self, promise: Promise, error: str, until: float) -> bool:
        """Tell whether a version may have gone by a time, and this error may say so."""
        return error == "ModelLostError" and self.may_be_lost(promise, until)

    def judge(self, seen: Mapping[ModelRef, Seen]) -> list[Finding]:
        """Return what is not as it was promised.

        Args:
            seen: what came of loading each version that was promised, at the end.
        """
        findings = [*self._twice, *self._numbers(), *self._reads(), *self._missing()]
        for ref, promise in self.promises.items():
            found = seen.get(ref)
            if found is not None:
                findings += self._kept(promise, found)
        return [*findings, *self._told()]

    def _kept(self, promise: Promise, found: Seen) -> Iterable[Finding]:
        ref, durable = promise.ref, "durable" if promise.durable else "in memory"
        what = f"{ref} (save {promise.save}, {durable})"
        said = f"{found.outcome}: {found.text}".removesuffix(": ")
        if found.outcome == "read":
            if found.save != promise.save:
                yield Finding("a version is what was saved", what, f"save {found.save}")
            elif promise.retired:
                yield Finding("what was retired is gone", f"{what} retired", "it is there again")
        elif promise.retiring is not None and found.outcome in ("ModelNotFoundError", "ModelLostError"):
            return
        elif not self.may_be_told(promise, found.outcome, float("inf")):
            yield Finding("what was promised is there", what, said)

    def _numbers(self) -> Iterable[Finding]:
        """A later save of a name has a higher number."""
        highest: dict[str, list[Promise]] = {}
        for promise in sorted(self.promises.values(), key=lambda promise: promise.at):
            for earlier in highest.get(promise.ref.name, [])[-1:]:
                if earlier.at < promise.began and earlier.ref.version > promise.ref.version:
                    expected = f"a version above {earlier.ref}, which was there before"
                    yield Finding("versions count up", expected, f"{promise.ref} of save {promise.save}")
            line = highest.setdefault(promise.ref.name, [])
            if not line or promise.ref.version > line[-1].ref.version:
                line.append(promise)

    def _reads(self) -> Iterable[Finding]:
        """Who reads a version reads its save; who reads a name reads the latest."""
        of_save = {promise.save: promise for promise in self.promises.values()}
        first: dict[str, str] = {}
        for entry in self._entries:
            if entry["event"] != "read":
                continue
            model, save = entry["model"], entry["save"]
            name = model.partition("@")[0]
            if entry["name"] != name:
                yield Finding("a read is of its version", f"{model}", f"save {save} of {entry['name']}")
            elif "@" in model:
                known = self.promises.get(ModelRef.parse(model))
                expected = known.save if known is not None else first.setdefault(model, save)
                if expected != save:
                    yield Finding("a read is of its version", f"save {expected} for {model}", f"save {save}")
            elif save in of_save:
                found = of_save[save].ref
                latest = self._latest(name, entry["began"], entry["at"])
                lost = latest is not None and self.may_be_lost(latest, entry["at"])
                if latest is not None and latest.ref.version > found.version and not lost:
                    expected = f"{latest.ref} or later for {name!r}: it was there when the load began"
                    yield Finding("a name is its latest version", expected, f"{found} of save {save}")

    def _latest(self, name: str, began: float, ended: float) -> Promise | None:
        """Return the highest version of a name that was promised before a load and not asked to go before its end."""
        there = [
            promise
            for promise in self.promises.values()
            if promise.ref.name == name
            and promise.at < began
            and (promise.retiring is None or promise.retiring > ended)
        ]
        return max(there, key=lambda promise: promise.ref.version, default=None)

    def _missing(self) -> Iterable[Finding]:
        """What a client was refused while the round went on."""
        for entry in self._entries:
            if entry["event"] != "missing":
                continue
            model, error = entry["model"], entry["error"]
            if "@" in model:
                promise = self.promises.get(ModelRef.parse(model))
                if promise is None or promise.at > entry["began"]:
                    continue
                if promise.retiring is not None and promise.retiring < entry["at"]:
                    continue
            else:
                promise = self._latest(model, entry["began"], entry["at"])
                lost = error == "ModelLostError" and any(before < entry["at"] for before, _ in self._losses)
                if promise is None or lost:  # a later version, whose save did not return, may be what was lost
                    continue
            if not self.may_be_told(promise, error, entry["at"]):
                durable = "durable" if promise.durable else "in memory"
                expected = f"{model}: {promise.ref} (save {promise.save}, {durable})"
                yield Finding("what was promised is there", expected, f"{error}: {entry['text']}")

    def _told(self) -> Iterable[Finding]:
        """What clients themselves told as wrong."""
        for entry in self._entries:
            who, text = entry["who"], entry.get("text", "")
            match entry["event"]:
                case "wrong":
                    yield Finding("no wrong byte", f"{who}: {entry['where']}: the version's bytes", text)
                case "foreign":
                    yield Finding("no foreign exception", f"{who}: {entry['kind']}: an error of the one tree", text)
                case "child":
                    yield Finding("a forked child reads what it inherited", who, text)
                case "crashed":
                    yield Finding("nothing dies by itself", f"{entry['what']}, process {entry['pid']}", "it is gone")
                case "unpinned" if not self._troubled(entry["began"], entry["at"]):
                    yield Finding("what is pinned stays", f"{who}: {entry['ref']}", text)
                case _:
                    pass

    def _troubled(self, began: float, ended: float) -> bool:
        """Tell whether a shard or a client was killed or stopped near a time."""
        times = [entry["at"] for entry in self._entries if entry["event"] in ("died", "stopped")]
        return any(began - 30.0 < at < ended for at in times)


def summary(findings: Iterable[Finding]) -> dict[str, int]:
    """Count findings by rule.

    >>> summary([Finding("a", "b", "c"), Finding("a", "b", "d")])
    {'a': 2}
    """
    return dict(Counter(finding.rule for finding in findings))
