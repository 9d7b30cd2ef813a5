"""Measure methods, speed and capacity.

In: models, methods, questions and stores.
Out: records, tables and plots.
"""
