"""The command line's own small retriever.

In: passages and their embeddings.
Out: the nearest passages, and a log of what was retrieved together.
"""
