"""The bytes of one stored entry.

In: a `ChunkKV`.
Out: a header and checked, optionally encrypted blocks, and the way back.
"""
