"""What tasks of a cluster use: the connection of the process they run in, and stored tensors as Dask's arrays.

From outside: `connection.connected` and `disconnect`, `arrays.load_arrays`, `saving.save_arrays`. Stands on `client`.
Dask is imported when arrays are made.
"""
