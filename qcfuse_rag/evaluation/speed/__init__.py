"""Time to first token, decode rate and memory.

In: a model, methods and storage tiers.
Out: times beside transformers' own and beside the machine's limits.
"""
