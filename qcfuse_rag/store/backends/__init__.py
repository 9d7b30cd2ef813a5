"""Stores in memory, on disk, on remotes, in tiers and for tenants.

In: keys and chunks.
Out: the same chunks, or a `Miss` with the reason.
"""
