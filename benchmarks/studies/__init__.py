"""Measure single questions about the engine: `python -m benchmarks.studies NAME [options] [--json FILE]`."""
