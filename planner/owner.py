"""Who started a repository: a user of an operating system.

Rules
- It is asked of the kernel and not of the environment, which says what it likes.
- The same name and number mean the same user on each node of a cluster; the host is there to tell people.
- It keeps users from getting into one another's repositories by mistake, not on purpose: who is on a Ray may do
  whatever they like there.
"""

from __future__ import annotations

import os
import pwd
import socket
from dataclasses import dataclass
from typing import Self

from ..store.errors import ForeignRepositoryError


@dataclass(frozen=True, slots=True)
class Owner:
    """A user who started a repository.

    >>> str(Owner("ada", 1000, "node-7"))
    'ada (user 1000) on node-7'
    """

    name: str
    uid: int
    host: str

    @classmethod
    def here(cls) -> Self:
        """Return the user that this process runs as."""
        uid = os.geteuid()
        try:
            name = pwd.getpwuid(uid).pw_name
        except KeyError:  # such as in a container that was started with a number
            name = str(uid)
        return cls(name, uid, socket.gethostname())

    def is_same(self, other: Owner) -> bool:
        """Tell whether both are one user, on whatever hosts."""
        return (self.name, self.uid) == (other.name, other.uid)

    def __str__(self) -> str:
        return f"{self.name} (user {self.uid}) on {self.host}"


def check_own(repository: str, owner: Owner | None, user: Owner) -> None:
    """Refuse a repository of another user to who did not ask for it by name.

    Args:
        repository: its name.
        owner: who started it; None: an earlier version did, which did not write it down.
        user: who wants to use it.

    Raises:
        ForeignRepositoryError: it is another user's.

    >>> check_own("default", Owner("ada", 1000, "node-7"), Owner("bob", 1001, "node-8"))
    Traceback (most recent call last):
    tensorvine.store.errors.ForeignRepositoryError: repository 'default': expected owner bob (user 1001) on node-8; ...
    """
    if owner is not None and not owner.is_same(user):
        raise ForeignRepositoryError(
            f"repository {repository!r}: expected owner {user}; found owner {owner}: pass its name to use it, as in "
            f"Repository.connect({repository!r}) or --name {repository}, or start a repository with another name"
        )
