"""`tensorvine ray-sizes`: the memory of a Ray that a script starts."""

from __future__ import annotations

import typer


def ray_sizes() -> None:
    """Print the memory options of `ray start` that fit the available memory of this machine, job or container.

    Example: `ray start --head $(tensorvine ray-sizes)`. The command fails if there is too little memory for Ray.
    """
    from ...actors.engine.room import ray_start_options

    typer.echo(" ".join(ray_start_options()))
