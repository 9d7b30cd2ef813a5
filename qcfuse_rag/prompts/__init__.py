"""Prompts as segments of token ids.

In: a question, passages, earlier turns, or finished text.
Out: a `Prompt` whose segment boundaries are known.
"""
