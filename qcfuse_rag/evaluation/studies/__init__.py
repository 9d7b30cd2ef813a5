"""Measure single questions about the engine: `python -m qcfuse_rag.evaluation.studies NAME [options] [--json FILE]`."""
