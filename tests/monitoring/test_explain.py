"""The page of a prefill shows every token once, by its outcome, and says in words why."""

from __future__ import annotations

import re
from html import unescape

import pytest

from qcfuse_rag import METHODS, FusionEngine, LanguageModel, MemoryStore, make_method
from qcfuse_rag.monitoring.explain import PassageOrigin, explain_html, explain_prefill
from qcfuse_rag.store.key import BLIND, FRAMED
from tests.support.engines import make_engine
from tests.support.families import build_model, byte_fallback_tokenizer
from tests.support.passages import PASSAGES

WCAG_AA = 4.5
"""Least contrast of text and background (WCAG 2.2, 1.4.3)."""
ORIGINS = [PassageOrigin("boats.md", "Who paints"), PassageOrigin("mills.md"), PassageOrigin("council.md")]


def shown_text(page: str) -> list[tuple[str, str]]:
    return re.findall(r'<span class="(\w+)">(.*?)</span>', page[page.index("<section") :], re.DOTALL)


def words(page: str) -> str:
    """Return the page's text without tags and styles."""
    return " ".join(unescape(re.sub(r"<style>.*?</style>|<[^>]+>", " ", page, flags=re.DOTALL)).split())


def test_every_token_is_shown_with_its_outcome(engine: FusionEngine) -> None:
    engine.warm(PASSAGES[:2], bases=(BLIND,))
    prompt = engine.prompt("Is 1 < 2 & why?", PASSAGES)
    report = engine.prefill(prompt, method=make_method("qcfuse", ratio=0.3)).report
    page = explain_html(engine.lm.tokenizer, prompt, report)
    shown = shown_text(page)
    assert unescape("".join(text for _, text in shown)) == engine.lm.tokenizer.decode(prompt.ids)
    recomputed = unescape("".join(text for outcome, text in shown if outcome == "recomputed"))
    decode = engine.lm.tokenizer.decode
    assert len(recomputed) == sum(len(decode([prompt.ids[position]])) for position in report.selected)
    assert page.count('<section class="missing"') == 1
    assert "Computed, because it could not be reused: absent." in words(page)
    assert "1 &lt; 2 &amp; why?" in page
    assert "script" not in page
    assert "http" not in page


def test_characters_of_several_tokens_are_shown_whole(engine: FusionEngine) -> None:
    text = "Déjà vu \U0001f6a2 auf der Fähre, 港口 at seven, ängstlich und müde. " * 3
    engine.warm([text], bases=(BLIND,))
    prompt = engine.prompt("Où est l'été?", [text])
    report = engine.prefill(prompt, method=make_method("random", ratio=0.4, base=BLIND)).report
    assert report.selected
    shown = shown_text(explain_html(engine.lm.tokenizer, prompt, report))
    assert {"reused", "recomputed"} <= {outcome for outcome, _ in shown}
    assert unescape("".join(written for _, written in shown)) == engine.lm.tokenizer.decode(prompt.ids)


def explained(engine: FusionEngine, name: str = "qcfuse") -> str:
    engine.warm(PASSAGES, bases=(BLIND, FRAMED))
    prompt = engine.prompt("Who keeps the paint?", PASSAGES)
    ratio = None if name in ("full", "reuse") else 0.3
    done = engine.prefill(prompt, method=make_method(name, ratio=ratio, base=BLIND if ratio else None))
    scores = None if done.scores is None else done.scores.mean
    return explain_html(
        engine.lm.tokenizer, prompt, done.report, scores, answer="Ann keeps <it>.", origins=ORIGINS[: len(PASSAGES)]
    )


def test_question_and_answer_come_first_and_passages_have_source_and_title(engine: FusionEngine) -> None:
    page = explained(engine)
    assert page.index("<h1>Who keeps the paint?</h1>") < page.index("Ann keeps &lt;it&gt;.") < page.index("<section")
    assert "Passage 1: boats.md, “Who paints”" in words(page)
    assert "Passage 2: mills.md" in words(page)


def test_every_recomputed_stretch_says_why(engine: FusionEngine) -> None:
    page = explained(engine)
    stretches = re.findall(r"<li><q>(.+?)</q> <small>(.+?)</small>", page)
    assert stretches
    assert all("attention of the question up to" in why and "the average here" in why for _, why in stretches)
    assert "tokens recomputed, because the question pays them the most attention" in words(page)


def test_methods_that_do_not_look_at_the_question_are_explained_too(engine: FusionEngine) -> None:
    page = explained(engine, "epic")
    stretches = re.findall(r"<li><q>(.+?)</q> <small>(.+?)</small>", page)
    assert [re.fullmatch(r"1 token|\d+ tokens", why) is not None for _, why in stretches] == [True] * len(PASSAGES)
    assert "because they are the first of their passage" in words(page)
    assert "this passage's share" not in page
    assert "nothing was recomputed" in words(explained(engine, "reuse"))
    assert set(re.findall(r'<span class="(\w+)">', explained(engine, "full").split("<section", 1)[1])) == {"computed"}


def test_a_passage_that_is_exact_says_so_and_the_legend_says_what_that_means(engine: FusionEngine) -> None:
    """The first passage behind the beginning it was warmed behind is what full prefill computes."""
    engine.warm(PASSAGES, bases=(FRAMED,))
    prompt = engine.prompt("Who keeps the paint?", PASSAGES)
    report = engine.prefill(prompt, method=make_method("random", ratio=0.3, base=FRAMED)).report
    assert [lookup.exact for lookup in report.lookups if lookup.role == "chunk"] == [True, False, False]
    page = words(explain_html(engine.lm.tokenizer, prompt, report))
    assert page.count("Exact: reused as stored, and nothing had to be recomputed.") == page.count("Exact: ") >= 1
    assert "what the model would compute here anyway" in page


def test_every_method_has_a_reason() -> None:
    assert all(make_method(name).choice for name in METHODS)


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    dark, light = sorted([luminance(first), luminance(second)])
    return (light + 0.05) / (dark + 0.05)


def test_all_text_has_readable_contrast(engine: FusionEngine) -> None:
    [style] = re.findall(r"<style>(.*?)</style>", explained(engine), re.DOTALL)
    coloured = [dict(re.findall(r"([\w-]+): (#\w{6})", rule)) for rule in re.findall(r"{(.*?)}", style)]
    coloured = [rule for rule in coloured if "color" in rule]
    assert len(coloured) >= 9
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    for rule in coloured:
        assert contrast(rule["color"], rule["background"]) >= WCAG_AA, rule
    assert "opacity" not in style


def test_stages_and_the_probes_shares_are_drawn(engine: FusionEngine) -> None:
    page = explained(engine)
    widths = [float(width) for width in re.findall(r'class="\w+" style="width:([\d.]+)%"', page)]
    assert len(widths) == 4
    assert sum(widths) == pytest.approx(100, abs=0.1)
    shares = [float(width) / 6 for width in re.findall(r'class="score-bar" style="width:([\d.]+)rem"', page)]
    assert len(shares) == 3
    assert sum(shares) == pytest.approx(1, abs=0.01)


def test_decoders_that_strip_spaces_lose_none_between_outcomes() -> None:
    tokenizer = byte_fallback_tokenizer()
    lm = LanguageModel.wrap(build_model("llama"), tokenizer)
    texts = ["ist da ein rest und ein tier da", "ein rest ist da und ein tier ist da"]
    engine = make_engine(lm, MemoryStore(), method=make_method("random", ratio=0.4, base=FRAMED))
    engine.warm(texts)
    prompt = engine.prompt("ist da ein tier", texts)
    explanation = explain_prefill(tokenizer, prompt, engine.prefill(prompt).report)
    shown = ["".join(text for _, text in section["pieces"]).strip() for section in explanation["sections"]]
    outcomes = [{outcome for outcome, _ in section["pieces"]} for section in explanation["sections"]]
    assert {"reused", "recomputed"} in outcomes
    assert all(text in shown for text in texts), shown
