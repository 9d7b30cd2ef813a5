"""Stores of chunks' keys and values.

In: a `ChunkKV` with its `ChunkKey`, and the documents it comes from.
Out: the same chunk, bit for bit or in a smaller format; or a miss with the reason.
"""
