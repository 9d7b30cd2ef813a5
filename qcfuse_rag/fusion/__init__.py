"""Decide what to recompute and bring a prompt to its first token.

In: a `Prompt`, a store and a `Method`.
Out: logits of the first token, the request's buffer and a `FusionReport`.
"""
