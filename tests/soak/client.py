"""One client of a soak, as a process of its own.

    python -m tests.soak.client FOLDER REPOSITORY CLIENT LIFE

Rules
- It draws its operations from the round's plan (`FOLDER/round.pickle`), and says in its journal what it asked for,
  what it was promised, what it read and what it was refused. It judges bytes, and nothing else.
- Errors outside the one tree are told as foreign, those of its finalizers, threads and log included.
- It ends its work when `FOLDER/stop` is there; then it lets everything go, says what it still has, and leaves when
  `FOLDER/leave` is there.
- It joins the node that `TENSORVINE_SOAK_NODE` names.
- A forked child reads what it inherited, by memory only, and never calls Ray.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections import OrderedDict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from ray._private import services
from tensorvine.actors import PendingSave, Repository
from tensorvine.actors.client import session
from tensorvine.store import ModelRef
from tensorvine.store.errors import (
    ModelLostError,
    ModelNotFoundError,
    StoreFullError,
    TensorVineError,
)

from tests.soak import traces
from tests.soak.content import BACKBONE, LARGE_FROM, WHO, Card, content, graph_of, names_of
from tests.soak.journal import Journal
from tests.soak.modes import Round

NAMES = 6
FAMILIES = 3
HELD = 6
LIVE = 60
"""Versions of which there may be more than these only until somebody retires some."""
CHILD_S = 120
"""After so long a forked child has come to a standstill."""
PATIENCE_S = 60.0
FULL_S = 8.0
"""How long a save waits where memory is full on purpose."""
Arrays = dict[str, np.ndarray]
_inherited: list[tuple[Arrays, Card]] = []
"""What the children of a pool find in the memory that they inherit."""


class Client:
    """See the top."""

    def __init__(self, repo: Repository, plan: Round, folder: Path, client: int, life: int, journal: Journal) -> None:
        self._repo = repo
        self._plan = plan
        self._folder = folder
        self._who = f"{plan.number}.{client}.{life}"
        self._operations = plan.operations(client, life)
        self._save_s = FULL_S if "large" in plan.mode.extra else PATIENCE_S
        self._journal = journal
        self._serial = 0
        self._cards: OrderedDict[ModelRef, Card] = OrderedDict()
        self._held: list[tuple[Arrays, Card]] = []
        self._backbones: dict[int, dict[str, int]] = {}
        self._pending: list[tuple[PendingSave, Card]] = []
        self._children: list[int] = []

    def warm(self) -> None:
        """Do once what opens descriptors and starts threads."""
        rng = Random(0)
        for kind in ("save", "save_async", "hold", "ask", "pin"):
            self._try(kind, rng)
        self._await_pending()
        self._held.clear()
        self._journal.say("warm", **self._traces())

    def work(self) -> None:
        """Carry out operations until it is told to stop."""
        for kind, rng in self._operations:
            if (self._folder / "stop").exists():
                return
            self._try(kind, rng)
            self._reap(wait=False)

    def rest(self) -> None:
        """Let everything go."""
        self._await_pending()
        self._check_held("at the end")
        self._held.clear()
        self._reap(wait=True)
        gc.collect()
        self._try("touch", Random(0))
        self._journal.say("rested", **self._traces())

    def _try(self, kind: str, rng: Random) -> None:
        began = time.monotonic()
        try:
            getattr(self, f"_{kind}")(rng)
        except TensorVineError as exc:
            self._journal.say("refused", kind=kind, error=type(exc).__name__, text=str(exc)[:400], began=began)
            if isinstance(exc, StoreFullError):
                self._held.clear()
                self._make_room(rng)
        except Exception:  # noqa: BLE001  this is what a soak looks for
            self._journal.say("foreign", kind=kind, text=traceback.format_exc()[-3000:])
        else:
            self._journal.say("done", kind=kind, seconds=time.monotonic() - began)

    def _traces(self) -> dict[str, Any]:
        found = traces.descriptors(os.getpid(), self._folder / "path")
        shards = len(self._repo.shards)
        return {"pid": os.getpid(), "descriptors": found, "threads": traces.threads(), "shards": shards}

    # ---- saving -----------------------------------------------------------------------------------------

    def _save(self, rng: Random, durable: bool = False) -> None:
        card, family = self._card(rng, f"m/{rng.randrange(NAMES)}", rng.randrange(FAMILIES))
        arrays = card.arrays(card.numbers)
        self._promised(card, durable, arrays, graph=graph_of(family, card.save))

    def _durable(self, rng: Random) -> None:
        self._save(rng, durable=True)

    def _save_async(self, rng: Random) -> None:
        card, family = self._card(rng, f"m/{rng.randrange(NAMES)}", rng.randrange(FAMILIES))
        arrays = card.arrays(card.numbers)
        given = {name: array.copy() for name, array in arrays.items()}
        self._journal.say("saving", save=card.save, name=card.name, durable=False)
        options: dict[str, Any] = {"graph": graph_of(family, card.save), "timeout": self._save_s}
        pending = self._repo.save_async(card.name, given, metadata=_facts(card), **options)
        pending.staged(PATIENCE_S)
        for array in given.values():
            array[...] = 0  # from here on they are the caller's
        self._pending.append((pending, card))
        if len(self._pending) > 2 or rng.random() < 0.5:
            self._await_pending()

    def _await_pending(self) -> None:
        pending, self._pending = self._pending, []
        for save, card in pending:
            try:
                self._saved(save.committed(PATIENCE_S * 2).ref, card, durable=False)
            except TensorVineError as exc:
                self._journal.say("refused", kind="save_async", error=type(exc).__name__, text=str(exc)[:400])
            except Exception:  # noqa: BLE001  see `_try`
                self._journal.say("foreign", kind="save_async", text=traceback.format_exc()[-3000:])

    def _large(self, rng: Random) -> None:
        numbers = {f"big/{i}": LARGE_FROM + rng.getrandbits(36) for i in range(rng.randint(1, 3))}
        card = Card(self._next(), f"big/{rng.randrange(3)}", numbers)
        self._promised(card, False, card.arrays(numbers), inherit=None)

    def _derive(self, rng: Random) -> None:
        save = self._next()
        graph = graph_of(rng.randrange(FAMILIES), save)
        match = self._repo.longest_prefix(graph)
        if match is None:
            return
        with match:
            theirs = self._read(match.ref, tensors=[WHO])[1]
            numbers = {mine: theirs.numbers[its] for mine, its in match.tensors.items()}
            given = [name for name in names_of((*BACKBONE, "head")) if name not in numbers]
            numbers |= {name: rng.getrandbits(36) for name in given}
            card = Card(save, match.ref.name if rng.random() < 0.5 else f"d/{rng.randrange(NAMES)}", numbers)
            durable = bool(self._plan.mode.path) and rng.random() < 0.2
            inherit = match.layers
            self._promised(card, durable, card.arrays(given), graph=graph, parent=match.ref, inherit=inherit)

    def _promised(self, card: Card, durable: bool, arrays: Arrays, **options: Any) -> None:
        """Save, and write down what was promised."""
        self._journal.say("saving", save=card.save, name=card.name, durable=durable)
        if durable:
            options["durability"] = "disk"
        saved = self._repo.save(card.name, arrays, metadata=_facts(card), timeout=self._save_s, **options)
        self._saved(saved.ref, card, durable)

    def _saved(self, ref: ModelRef, card: Card, durable: bool) -> None:
        self._journal.say("saved", save=card.save, ref=str(ref), durable=durable)
        self._know(ref, card)

    def _card(self, rng: Random, name: str, family: int) -> tuple[Card, int]:
        """Make up a version: a backbone that is partly as it was last time, and a new head."""
        numbers = dict(self._backbones.get(family, {}))
        for tensor in names_of(BACKBONE):
            if tensor not in numbers or rng.random() < 0.3:
                numbers[tensor] = rng.getrandbits(36)
        self._backbones[family] = dict(numbers)
        return Card(self._next(), name, numbers | {name: rng.getrandbits(36) for name in names_of(["head"])}), family

    def _next(self) -> str:
        self._serial += 1
        return f"{self._who}.{self._serial}"

    # ---- loading ----------------------------------------------------------------------------------------

    def _load_name(self, rng: Random) -> None:
        self._read(f"m/{rng.randrange(NAMES)}")

    def _load_version(self, rng: Random) -> None:
        self._read(self._some(rng))

    def _load_part(self, rng: Random) -> None:
        ref = self._some(rng)
        card = self._cards.get(ref)
        if card is None:
            card = self._read(ref, tensors=[WHO])[1]
        if rng.random() < 0.5 and "head/w" in card.numbers:
            self._read(ref, card, layers=rng.sample((*BACKBONE, "head"), rng.randint(1, 3)))
        else:
            self._read(ref, card, tensors=rng.sample(sorted(card.numbers), rng.randint(1, len(card.numbers))))

    def _load_into(self, rng: Random) -> None:
        ref = self._some(rng)
        card = self._cards.get(ref)
        if card is not None:
            self._read(ref, card, into={name: np.empty_like(content(n)) for name, n in card.numbers.items()})

    def _hold(self, rng: Random) -> None:
        self._keep(rng, self._some(rng))

    def _hold_name(self, rng: Random) -> None:
        self._keep(rng, f"m/{rng.randrange(NAMES)}")

    def _keep(self, rng: Random, model: ModelRef | str) -> None:
        self._held.append(self._read(model))
        if len(self._held) > HELD:
            self._drop(rng)

    def _drop(self, rng: Random) -> None:
        self._check_held("held")
        if self._held:
            del self._held[rng.randrange(len(self._held))]

    def _read(self, model: ModelRef | str, card: Card | None = None, **options: Any) -> tuple[Arrays, Card]:
        """Load, check every byte, and write down which version it was; with `card`, it must be that one's."""
        began = time.monotonic()
        try:
            found = self._repo.load(model, timeout=PATIENCE_S, **options)
        except (ModelNotFoundError, ModelLostError) as exc:
            self._journal.say("missing", model=str(model), error=type(exc).__name__, text=str(exc)[:400], began=began)
            raise
        if card is None:
            try:
                card = Card.of(found[WHO])
            except (ValueError, KeyError) as exc:
                self._wrong(f"load of {model}", [str(exc)])
                raise ModelLostError(f"{model}: has no card") from exc
        if options.get("tensors") is None and "into" not in options and "layers" not in options:
            missing = [f"{name}: missing" for name in card.numbers.keys() - found.keys()]
            self._wrong(f"load of {model}", missing)
        self._wrong(f"load of {model}", card.wrong(found))
        self._journal.say("read", model=str(model), save=card.save, name=card.name, began=began)
        if isinstance(model, ModelRef):
            self._know(model, card)
        return found, card

    def _wrong(self, where: str, problems: list[str]) -> None:
        if problems:
            self._journal.say("wrong", where=where, text="; ".join(problems)[:1500])

    def _check_held(self, when: str) -> None:
        for arrays, card in self._held:
            self._wrong(f"{when}: arrays of save {card.save} of {card.name}", card.wrong(arrays))

    def _some(self, rng: Random) -> ModelRef:
        """Choose a version that lives, or that this client once saw."""
        if not self._cards or rng.random() < 0.3:
            listed = [ref for ref in self._repo.models() if not ref.name.startswith("big")]
            if listed:
                return rng.choice(listed)
        if not self._cards:
            raise ModelNotFoundError("this client knows no version yet")
        return rng.choice(list(self._cards))

    def _know(self, ref: ModelRef, card: Card) -> None:
        self._cards[ref] = card
        while len(self._cards) > 40:
            self._cards.popitem(last=False)

    # ---- pins, retirements, questions -------------------------------------------------------------------

    def _pin(self, rng: Random) -> None:
        match = self._repo.longest_prefix(graph_of(rng.randrange(FAMILIES), "asked"))
        if match is None:
            return
        began = time.monotonic()
        with match:
            if rng.random() < 0.5:
                self._retire_one(match.ref)
            for _ in range(rng.randint(1, 3)):
                try:
                    self._read(match.ref)
                except (ModelNotFoundError, ModelLostError) as exc:
                    if self._plan.mode.session_s is None:  # a busy machine may outlast a short session
                        self._journal.say("unpinned", ref=str(match.ref), text=str(exc)[:400], began=began)
                    raise

    def _retire(self, rng: Random) -> None:
        self._make_room(rng, 1)

    def _make_room(self, rng: Random, least: int = 2) -> None:
        listed = self._repo.models()
        for ref in rng.sample(listed, min(len(listed), max(least, len(listed) - LIVE))):
            self._retire_one(ref)

    def _retire_one(self, ref: ModelRef) -> None:
        self._journal.say("retiring", ref=str(ref))
        try:
            self._repo.retire(ref)
        except ModelNotFoundError:
            return  # somebody else did
        self._journal.say("retired", ref=str(ref))

    def _ask(self, rng: Random) -> None:
        ref = self._some(rng)
        facts, card = self._repo.info(ref).metadata, self._cards.get(ref)
        if card is not None and facts.get("save") != card.save:
            self._wrong(f"info of {ref}", [f"expected the metadata of save {card.save}; found {facts}"])
        self._repo.lineage(ref)
        self._repo.stats()

    def _touch(self, rng: Random) -> None:
        del rng
        self._repo.stats()

    def _flush(self, rng: Random) -> None:
        del rng
        began = time.monotonic()
        self._repo.flush(PATIENCE_S)
        self._journal.say("flushed", began=began)

    # ---- forks ------------------------------------------------------------------------------------------

    def _fork(self, rng: Random) -> None:
        """Fork a child that reads what is held here, while this process lets half of it go."""
        if not self._held:
            self._hold(rng)
        child = os.fork()
        if not child:
            self._be_child()
        self._children.append(child)
        del self._held[: len(self._held) // 2 + 1]

    def _be_child(self) -> None:
        """Look at what was inherited, let half of it go, look again, and end; never returns."""
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(CHILD_S)
        code = 1
        try:
            for turn in range(12):
                self._check_held("inherited by a forked child")
                if turn == 6:
                    del self._held[: len(self._held) // 2]
                time.sleep(0.02)
            code = 0
        except BaseException:  # noqa: BLE001  it must not run on as a second parent
            self._journal.say("foreign", kind="forked child", text=traceback.format_exc()[-3000:])
        finally:
            os._exit(code)

    def _reap(self, wait: bool) -> None:
        for child in list(self._children):
            pid, status = os.waitpid(child, 0 if wait else os.WNOHANG)
            if pid:
                self._children.remove(child)
                if status:
                    self._journal.say("child", text=f"expected a forked child that ends with 0; found status {status}")

    def _pool(self, rng: Random) -> None:
        """Let the workers of a pool look at what is held here."""
        if not self._held:
            self._hold(rng)
        _inherited[:] = self._held
        with multiprocessing.get_context("fork").Pool(2) as pool:
            asked = pool.map_async(_look, range(len(_inherited)))
            del self._held[:1]
            problems = asked.get(CHILD_S)
            pool.close()
            pool.join()
        _inherited.clear()
        self._wrong("inherited by a pool's worker", [text for found in problems for text in found])


def _look(index: int) -> list[str]:
    arrays, card = _inherited[index]
    return card.wrong(arrays)


def _facts(card: Card) -> dict[str, str]:
    return {"save": card.save}


def _tell_foreign(journal: Journal) -> None:
    """Have errors that nobody catches told: of finalizers, of threads, and those that the library logs."""

    def told(kind: str, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, TensorVineError):
            text = "".join(traceback.format_exception(error))
            journal.say("foreign", kind=kind, text=text[-3000:])

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told(f"log of {record.name}: {record.getMessage()}", record.exc_info[1] if record.exc_info else None)

    sys.unraisablehook = lambda facts: told(f"unraisable in {facts.object!r}", facts.exc_value)
    threading.excepthook = lambda facts: told(f"thread {facts.thread}", facts.exc_value)
    logging.getLogger("tensorvine").addHandler(Watch(logging.ERROR))


def main() -> None:
    """See the top."""
    folder, repository, client, life = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    plan: Round = pickle.loads((folder / "round.pickle").read_bytes())  # noqa: S301  our own
    stacks = open(folder / f"client-{client}.{life}.stacks", "w")  # noqa: SIM115  for as long as this process lives
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    journal = Journal(folder / f"client-{client}.{life}.jsonl", f"client {client}.{life}")
    _tell_foreign(journal)
    if plan.mode.session_s is not None:
        session.RENEW_S, session.TICK_S = plan.mode.session_s / 8, plan.mode.session_s / 16
    services.find_node_ids = lambda: {os.environ["TENSORVINE_SOAK_NODE"]}  # Ray would take its head for all of us
    repo = None
    while repo is None:
        try:
            repo = Repository.connect(repository)
        except TensorVineError as exc:
            journal.say("refused", kind="connect", error=type(exc).__name__, text=str(exc)[:400])
            if (folder / "stop").exists():
                return
            time.sleep(0.2)
    journal.say("born", pid=os.getpid())
    acting = Client(repo, plan, folder, client, life, journal)
    acting.warm()
    acting.work()
    acting.rest()
    while not (folder / "leave").exists():
        time.sleep(0.1)
    del acting
    repo.close()
    journal.say("left")


if __name__ == "__main__":
    main()
