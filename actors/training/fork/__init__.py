"""What a rank does when it is forked, and what a clone does: orders, capture, sending, receiving (DeepClone).

From outside: `calls.ForkCalls` and `fork_hooks.ForkHooks`, by the ranks of `training`; `forks` directs them.
"""
