"""`tensorvine ray-sizes`: the memory of a Ray that a script starts."""

from __future__ import annotations

import typer


def ray_sizes() -> None:
    """Print options for `ray start` that fit this machine's memory, or what this job or container has of it.

    A script has them as `ray start --head $(tensorvine ray-sizes)`. It is an error where there is too little.
    """
    from ...actors.engine.room import ray_start_options

    typer.echo(" ".join(ray_start_options()))
