"""Compute the keys and values of passages once, and store them.

In: token ids of passages.
Out: entries in a store, with a ranking of their tokens.
"""
