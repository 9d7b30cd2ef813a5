"""Measure single questions about the engine, each by one command.

In: `python -m qcfuse_rag.evaluation.studies NAME [options] [--json FILE]`.
Out: a table, and JSON.
"""
