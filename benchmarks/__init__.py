"""Measurements of qcfuse-rag: quality, speed, peers, and studies of single questions. Not part of the package."""
