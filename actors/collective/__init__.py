"""Collective groups: processes that exchange arrays over shared memory, Gloo or NCCL."""

from .connect import connect, renew
from .group import Group, Work
from .rendezvous import LocalRendezvous

__all__ = ["Group", "LocalRendezvous", "Work", "connect", "renew"]
