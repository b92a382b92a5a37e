"""How calls travel: sockets within a node, the engine between nodes, and the messages that they carry.

From outside: all of it. Stands on `memory` and `engine`.
"""
