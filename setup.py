"""What pyproject.toml cannot say: the packages of the folders at the top, under the name `tensorvine`."""

from setuptools import find_namespace_packages, setup

FOLDERS = ("store", "planner", "actors", "clusters")
FOUND = find_namespace_packages(
    include=[pattern for folder in FOLDERS for pattern in (folder, f"{folder}.*")],
    exclude=["*.__pycache__", "clusters.package"],  # the latter is `tensorvine` itself
)

setup(packages=["tensorvine", *(f"tensorvine.{name}" for name in FOUND)])
