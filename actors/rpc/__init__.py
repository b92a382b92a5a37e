"""How calls travel: short ones by sockets, the others by the engine, and the messages that they carry.

From outside: all of it. Stands on `memory` and `engine`.
"""
