"""For tasks of a cluster: the connection of their process, and stored tensors as Dask arrays.

Other packages use `connection.connected` and `disconnect`, `arrays.load_arrays` and `saving.save_arrays`. Dask is
imported only when arrays are made.
"""
