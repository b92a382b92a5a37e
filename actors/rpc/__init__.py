"""Channels, which carry calls to actors over sockets, declarations of calls, and their messages.

From outside: all of it. Stands on `memory` and `engine`.
"""
