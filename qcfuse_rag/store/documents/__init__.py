"""The documents that stored passages come from.

In: document names, access tags and passage texts.
Out: which entries a document owns, who may read them, and where passages occur in a text.
"""
