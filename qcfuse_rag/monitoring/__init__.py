"""Observe an engine in production.

In: reports of fused prefills.
Out: pictures, metrics, traces and comparisons with full prefill.
"""
