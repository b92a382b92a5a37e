"""Whole files of a `Directory`, as tests write and read them."""

from __future__ import annotations

from tensorvine.store.archive.directory import Directory


def put(directory: Directory, name: str, content: bytes) -> int:
    return directory.write(name, lambda sink: sink.write(content))


def content_of(directory: Directory, name: str) -> bytes:
    return directory.read(name).to_pybytes()
