"""Attention of the rows of a pass.

In: queries, keys and values of one layer and the plan of the pass.
Out: attention outputs, or the attention that each key receives.
"""
