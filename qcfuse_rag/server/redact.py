"""What clients are told of a prefill."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from qcfuse_rag.fusion.report import UNSOUGHT, FusionReport, Lookup, describe_misses

PLAIN = ("absent:", "anchors disagree:", "fix overhead")
"""How reasons begin that are this library's words to their end."""

LOG = logging.getLogger(__name__)


def told(report: FusionReport) -> dict[str, Any]:
    """Return a report as plain data, its reasons without what others say behind a colon; that goes to the log.

    There a file system names its folders and a remote its hosts, which are no client's business.
    """
    lookups = [brief(one) for one in report.lookups]
    fallback = report.fallback
    if fallback == describe_misses(list(report.lookups)):
        fallback = describe_misses(lookups)
    elif fallback is not None and fallback.startswith(UNSOUGHT):
        fallback = UNSOUGHT
    withheld = {one.reason for one in report.lookups} - {one.reason for one in lookups}
    withheld |= {report.fallback} - {fallback} if fallback == UNSOUGHT else set()
    if withheld:
        LOG.error("passages were not read: %s", "; ".join(sorted(map(str, withheld))))
    return replace(report, lookups=tuple(lookups), fallback=fallback).to_dict()


def brief(lookup: Lookup) -> Lookup:
    """Return a lookup with so much of its reason as clients are told."""
    if lookup.reason is None or lookup.reason.startswith(PLAIN):
        return lookup
    return replace(lookup, reason=lookup.reason.partition(":")[0])
