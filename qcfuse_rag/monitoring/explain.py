"""Explain a fused prefill, as plain data or as an HTML page: how each token was computed, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from typing import Any

from jinja2 import Environment
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qcfuse_rag.fusion.method import Choice
from qcfuse_rag.fusion.report import FusionReport, Lookup
from qcfuse_rag.methods import METHODS, make_method
from qcfuse_rag.prompts.segments import Prompt, Role, Span

REPLACEMENT = "\ufffd"
TEMPLATE_FILE = "explain.html.jinja"
MAX_STRETCHES = 8
"""Most recomputed stretches to list of a passage."""
MAX_STRETCH_CHARACTERS = 90

STAGE_MEANINGS = {
    "load": "bringing stored passages into place",
    "probe": "scoring the passages' tokens",
    "select": "choosing what to recompute",
    "recompute": "computing, up to the first token of the answer",
    "others": "answering other requests in between",
}
HEADINGS = {
    Role.SYSTEM_PREFIX: "Beginning: system message and tools",
    Role.QUESTION: "Question",
    Role.TEXT: "Other text of the prompt",
}


@dataclass(frozen=True, slots=True)
class PassageOrigin:
    """Where a passage is from: the name of its document, and the heading that it stands under, if any."""

    source: str
    title: str | None = None


def explain_html(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    report: FusionReport,
    scores: Tensor | None = None,
    *,
    answer: str | None = None,
    origins: Sequence[PassageOrigin | None] = (),
) -> str:
    """Draw on a page which tokens were reused, which were recomputed although stored, and which had no cache.

    `scores` are the method's, `[T]`, to show each passage's share; None for methods without scores. `origins` are the
    passages' documents, in the order of the prompt; passages without one are numbered only.

    The page is one of HTML, without scripts and external references. It contains the question.
    """
    explanation = explain_prefill(tokenizer, prompt, report, scores, origins=origins)
    environment = Environment(autoescape=True, trim_blocks=True, keep_trailing_newline=True)
    template = environment.from_string(files(__package__).joinpath(TEMPLATE_FILE).read_text("utf-8"))
    return template.render(answer=answer, **explanation)


def explain_prefill(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    report: FusionReport,
    scores: Tensor | None = None,
    *,
    origins: Sequence[PassageOrigin | None] = (),
) -> dict[str, Any]:
    """Return what `explain_html` shows as JSON-compatible data.

    `sections` has an entry for each segment: `heading`, `tokens`, `status`, the share of the scores (`probed`), and its
    text as `pieces` of `[outcome, text]`, where an outcome is `reused`, `recomputed` or `computed`. The other fields
    are about the whole prompt.
    """
    return _Explanation(tokenizer, prompt, report, scores, tuple(origins)).to_dict()


@dataclass(frozen=True, slots=True)
class _Explanation:
    tokenizer: PreTrainedTokenizerBase
    prompt: Prompt
    report: FusionReport
    scores: Tensor | None
    origins: tuple[PassageOrigin | None, ...]

    def to_dict(self) -> dict[str, Any]:
        report, choice = self.report, choice_of(self.report.method)
        ttft_s = max(report.timings.ttft_s, 1e-9)
        question = " ".join(span.segment.text for span in self.prompt.spans if span.segment.role is Role.QUESTION)
        return {
            "question": question.strip() or "What was recomputed",
            "summary": self._summary(),
            "fallback": report.fallback,
            "method": report.method,
            "reason": choice.reason,
            "score": None if self.scores is None or choice.score is None else choice.score.capitalize(),
            "stages": [
                {"name": name, "share": seconds / ttft_s, "seconds": seconds, "meaning": STAGE_MEANINGS[name]}
                for name, seconds in report.timings.stages.items()
            ],
            "sections": self._sections(),
        }

    def _sections(self) -> list[dict[str, Any]]:
        report = self.report
        lookups = {lookup.start: lookup for lookup in report.lookups}
        shares, selected = self._score_shares(), frozenset(report.selected)
        places = {span.start: index for index, span in enumerate(self.prompt.chunks)}
        sections = []
        for span in self.prompt.spans:
            lookup = lookups.get(span.start)
            in_memory = span.start < report.prefix_tokens
            stretches = self._stretches(span, selected) if lookup is not None and lookup.hit else []
            stored = in_memory or (lookup is not None and lookup.hit)
            sections.append(
                {
                    "role": span.segment.role.value,
                    "heading": self._heading(span, places.get(span.start)),
                    "tokens": len(span),
                    "missing": lookup is not None and not lookup.hit,
                    "status": self._status(span, lookup, selected),
                    "probed": shares.get(span.start),
                    "pieces": [list(piece) for piece in self._pieces(span, selected, stored=stored)],
                    "stretches": stretches[:MAX_STRETCHES],
                    "more_stretches": max(0, len(stretches) - MAX_STRETCHES),
                }
            )
        return sections

    def _summary(self) -> str:
        report = self.report
        earlier = f" ({report.prefix_tokens:,} from earlier requests)" if report.prefix_tokens else ""
        return (
            f"The prompt has {report.prompt_tokens:,} tokens: {report.reused_tokens:,} reused{earlier}, "
            f"{len(report.selected):,} recomputed, {report.rows - len(report.selected):,} computed "
            f"(method {report.method}, ratio {report.ratio:g}). "
            f"The first token of the answer came after {report.timings.ttft_s:.2f} s."
        )

    def _heading(self, span: Span, place: int | None) -> str:
        if place is None:
            return HEADINGS[span.segment.role]
        origin = self.origins[place] if place < len(self.origins) else None
        if origin is None:
            return f"Passage {place + 1}"
        return f"Passage {place + 1}: {origin.source}" + (f", “{origin.title}”" if origin.title else "")

    def _status(self, span: Span, lookup: Lookup | None, selected: frozenset[int]) -> str:
        if span.stop <= self.report.prefix_tokens:
            return "Reused from an earlier request that began with the same text."
        if lookup is None:
            return "Computed."
        if not lookup.hit:
            return f"Computed, because it could not be reused: {lookup.reason}."
        if lookup.exact:
            return "Exact: reused as stored, and nothing had to be recomputed."
        recomputed = sum(position in selected for position in range(span.start, span.stop))
        if recomputed:
            return f"{recomputed:,} tokens recomputed, because {choice_of(self.report.method).reason}."
        if selected:
            return "Reused as stored; the method chose tokens of other passages."
        return "Reused as stored; nothing was recomputed."

    def _score_shares(self) -> dict[int, float]:
        if self.scores is None:
            return {}
        hits = {lookup.start for lookup in self.report.lookups if lookup.hit}
        spans = [span for span in self.prompt.chunks if span.start in hits]
        sums = {span.start: float(self.scores[span.start : span.stop].sum()) for span in spans}
        total = sum(sums.values())
        return {start: score / total for start, score in sums.items()} if total > 0 else {}

    def _stretches(self, span: Span, selected: frozenset[int]) -> list[dict[str, str]]:
        """Return a passage's recomputed stretches, those with the highest score first, else in their order."""
        grouped = groupby(range(span.start, span.stop), key=selected.__contains__)
        runs = [list(run) for is_selected, run in grouped if is_selected]
        scores, choice = self.scores, choice_of(self.report.method)
        if scores is None or choice.score is None:
            return [{"text": self._excerpt(span, run), "why": _count(run)} for run in runs]
        average = float(scores[span.start : span.stop].mean())
        strength = {run[0]: float(scores[run].max()) / average if average > 0 else 0.0 for run in runs}
        runs.sort(key=lambda run: -strength[run[0]])
        why = f"{choice.score} up to {{:.1f}} times the average here"
        return [
            {"text": self._excerpt(span, run), "why": f"{_count(run)}; {why.format(strength[run[0]])}"} for run in runs
        ]

    def _excerpt(self, span: Span, run: list[int]) -> str:
        text = " ".join(self.tokenizer.decode([span.segment.ids[position - span.start] for position in run]).split())
        return text if len(text) <= MAX_STRETCH_CHARACTERS else f"{text[:MAX_STRETCH_CHARACTERS]}…"

    def _pieces(self, span: Span, selected: frozenset[int], *, stored: bool) -> Iterator[tuple[str, str]]:
        """Yield `(outcome, text)` of a span's longest runs of tokens with the same outcome."""

        def outcome(positions: range) -> str:
            if not stored or (span.start < self.report.prefix_tokens <= positions[0]):
                return "computed"
            return "recomputed" if any(position in selected for position in positions) else "reused"

        for name, ranges in groupby(_character_ranges(self.tokenizer, span), key=outcome):
            inside = [position - span.start for positions in ranges for position in positions]
            # Decoded behind the token before, since decoders strip a leading space.
            before = span.segment.ids[max(0, inside[0] - 1) : inside[0]]
            ids = [*before, *(span.segment.ids[index] for index in inside)]
            yield name, self.tokenizer.decode(ids)[len(self.tokenizer.decode(before)) :]


def _count(run: list[int]) -> str:
    return "1 token" if len(run) == 1 else f"{len(run):,} tokens"


def _character_ranges(tokenizer: PreTrainedTokenizerBase, span: Span) -> Iterator[range]:
    """Yield a span's positions in ranges whose tokens are whole characters; bytes outside ASCII may share one."""
    first = span.start
    for position in range(span.start, span.stop):
        ids = span.segment.ids[first - span.start : position + 1 - span.start]
        if position + 1 == span.stop or not tokenizer.decode(ids).endswith(REPLACEMENT):
            yield range(first, position + 1)
            first = position + 1


def choice_of(method: str) -> Choice:
    """Return how a method of a name chooses; for a method without one only that it does."""
    choice = make_method(method).choice if method in METHODS else None
    return choice or Choice(f"the method {method} chose them")
