"""Load stored layers while a pass computes.

In: stored chunks and a buffer.
Out: the chunks placed layer by layer, within the time a request may wait.
"""
