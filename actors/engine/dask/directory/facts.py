"""What is kept by name. Agents have copies, from which a scheduler that was started anew has it again.

Rules
- Each change has a number. An agent applies changes in their order, so its copy is the whole state as of one of them.
- A directory in which nothing was kept yet takes, of the copies of an earlier one, that with the highest number.
- One in which a program kept something before any agent came back adds what the first copy tells that it did not know.
"""

from __future__ import annotations

import uuid
from dataclasses import replace

from ..records import Copy, Keep


class Facts:
    """The facts of one directory.

    >>> facts = Facts()
    >>> copy = facts.copy.after(facts.keep("a", b"1"))
    >>> anew = Facts()
    >>> anew.learn(copy), anew.kept("")
    (True, {'a': b'1'})
    """

    def __init__(self) -> None:
        self.copy = Copy(origin=uuid.uuid4().hex)
        self._is_changed = self._has_learned = False

    def keep(self, name: str, value: bytes | None) -> Keep:
        """Keep some bytes, or let go of them with None; gives what agents are to be told."""
        change = Keep(self.copy.number + 1, name, value)
        self.copy, self._is_changed = self.copy.after(change), True
        return change

    def kept(self, prefix: str) -> dict[str, bytes]:
        """Return what is kept under names that begin so."""
        return {name: value for name, value in self.copy.facts.items() if name.startswith(prefix)}

    def learn(self, copy: Copy) -> bool:
        """Take in the copy of an agent that joins; tells whether something has changed."""
        if copy.origin in ("", self.copy.origin):
            return False
        first, self._has_learned = not self._has_learned, True
        if not self._is_changed and copy.number > self.copy.number:
            self.copy = replace(copy, origin=self.copy.origin)
        elif self._is_changed and first:
            number = max(copy.number, self.copy.number) + 1
            self.copy = replace(self.copy, number=number, facts={**copy.facts, **self.copy.facts})
        else:
            return False
        return True
