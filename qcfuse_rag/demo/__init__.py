"""The demonstration behind `qcfuse demo`: a small invented corpus and a run over it."""
