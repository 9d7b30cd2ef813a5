"""Campaigns: a store under kill -9, changed bytes, fuzzed headers, crowds and failing disks.

Small by default; `QCFUSE_STRESS=full pytest tests/stress -s` runs them as docs/notes/reliability.md reports them.
"""
