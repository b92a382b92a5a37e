"""Calls between two processes, of one machine or of two: format, connections of threads and event loops, and servers.

From outside: `framing.SocketAddress`, `hosting.Host`, `lines.Lines`, `packing.pack`, and `refusals` for other
listeners. Stands on `engine.engine`.
"""
