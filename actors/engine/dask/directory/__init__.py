"""The directory's rules, without Dask: what a call of anybody's changes, and what agents have to do then.

From outside: `directory.Directory`, `page.page`. Stands on `records`.
"""
