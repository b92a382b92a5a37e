"""How much memory what is read may take: sizes that a file or another machine states are believed only so far.

Sizes that people write are read here.
"""
