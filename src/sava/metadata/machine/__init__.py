"""The replicated state, and nothing else: deterministic, without clock, chance or I/O.

``state_machine`` applies proposals; the other files are what it is made of.
"""
