"""Calls between two processes, of one machine or of two: framing, connections of threads and loops, the server and its
entrance.

From outside: `framing.SocketAddress`, `server.CallServer`, `awaited.connected`, `blocking.BlockingConnections`,
`traffic`, and `refusals` for other listeners. Stands on `engine.engine`.
"""
