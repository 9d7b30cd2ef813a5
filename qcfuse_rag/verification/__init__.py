"""Verify a method on a model.

In: an engine.
Out: a verdict, from cases with hidden numbers, chains of variables and the user's passages.
"""
