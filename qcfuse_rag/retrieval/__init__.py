"""A small retriever for the command line.

In: passages and their embeddings.
Out: the nearest passages, and a log of past retrievals.
"""
