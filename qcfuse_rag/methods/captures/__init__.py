"""Captures, which Cache-Craft, Kamera and KVCOMM share: passages computed exactly behind others, and stored.

In: groups of passages that are retrieved together.
Out: entries in numbered slots, found again by the context that each names.
"""
