"""How the blocks that a load asks for come to the client: mapped, by sockets, by groups, by files.

From outside: `fetcher.Fetcher`, and `transports` for its names. Stands on `transport` and `memory`.
"""
