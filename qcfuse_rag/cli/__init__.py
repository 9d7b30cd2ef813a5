"""The `qcfuse` command."""
