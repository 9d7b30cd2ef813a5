"""The places that keep entries.

In: keys and chunks.
Out: the same chunks, or a `Miss` with the reason.
"""
