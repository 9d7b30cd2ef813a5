"""Build prompts as segments of token ids.

In: a question with passages and earlier turns, or finished text.
Out: a `Prompt` with known segment boundaries.
"""
