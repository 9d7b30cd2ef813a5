"""What has to be known beside the numbers of a result, one sentence each; none if there is nothing to say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from qcfuse_rag.evaluation.quality.configurations import method_name
from qcfuse_rag.evaluation.quality.records import Record, RecordLog
from qcfuse_rag.fusion.guard import IN_FULL
from qcfuse_rag.verification.ruler import TASKS
from qcfuse_rag.verification.samples import Example


def on_distractors(examples: Sequence[Example]) -> list[str]:
    """Say how many questions keep all their passages though fewer were asked for."""
    silent = sum(not example.supporting and example.dataset not in TASKS for example in examples)
    return [f"{silent} questions do not say which passages hold the answer; they keep all"] if silent else []


def on_log(log: RecordLog, *, kept: bool) -> list[str]:
    """Say what of the records that were there could not be used.

    Args:
        log: after the run.
        kept: the store is one that earlier runs filled too.
    """
    notes = []
    if log.damaged:
        numbers = ", ".join(map(str, log.damaged))
        notes.append(f"{log.path}: damaged and left out: line {numbers}; records that were there are made anew")
    if log.outdated:
        old = "; passages that the --store had enriched or captured before are used as they are" if kept else ""
        notes.append(
            f"{log.outdated} records of enriched or captured passages were made anew: the earlier ones were made, or "
            f"may have been, beside the passages of other questions, as with another --size{old}"
        )
    return notes


def on_methods(records: Iterable[Record]) -> list[str]:
    """Say what a method was measured without, and where it was not what was measured."""
    asked, as_full_prefill = Counter[str](), Counter[str]()
    for record in records:
        asked[record["method"]] += 1
        as_full_prefill[record["method"]] += (record.get("fallback") or "").startswith(IN_FULL)
    notes = [
        f"{method}: {count} of {asked[method]} answers were computed in full, as its guard found that no slower; "
        "[guard=false] measures what it does otherwise"
        for method, count in as_full_prefill.items()
        if count
    ]
    if not any(method_name(method) == "relaycaching" for method in asked):
        return notes
    return [
        *notes,
        "relaycaching: no passage here is a text that was generated before, which is what it is made for; measured is "
        "how it repairs the stored caches of its base",
    ]
