"""Verify a method on a model.

In: an engine.
Out: a verdict; hidden numbers, chains of variables and the user's passages are the cases.
"""
