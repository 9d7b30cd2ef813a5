"""The page of a prefill shows every token once, in the colour of its fate."""

from __future__ import annotations

import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from qcfuse_rag import FusionEngine, make_method
from qcfuse_rag.monitoring.explain import explain_html
from qcfuse_rag.store.prefill_base import BLIND
from tests.support.passages import PASSAGES


def test_every_token_is_shown_with_its_fate(engine: FusionEngine) -> None:
    engine.warm(PASSAGES[:2], bases=(BLIND,))
    prompt = engine.prompt("Is 1 < 2 & why?", PASSAGES)
    report = engine.prefill(prompt, method=make_method("qcfuse", ratio=0.3)).report
    page = explain_html(engine.lm.tokenizer, prompt, report)
    body = page[page.index("<section") :]
    shown = re.findall(r'<span class="(\w+)">(.*?)</span>', body, re.DOTALL)
    assert unescape("".join(text for _, text in shown)) == engine.lm.tokenizer.decode(prompt.ids)
    recomputed = unescape("".join(text for fate, text in shown if fate == "recomputed"))
    decode = engine.lm.tokenizer.decode
    assert len(recomputed) == sum(len(decode([prompt.ids[position]])) for position in report.selected)
    assert body.count('class="missing"') == 1
    assert "absent" in body
    assert "1 &lt; 2 &amp; why?" in body
    assert "script" not in page
    assert "http" not in page


def test_characters_of_several_tokens_are_shown_whole(engine: FusionEngine) -> None:
    text = "Déjà vu \U0001f6a2 auf der Fähre, 港口 at seven, ängstlich und müde. " * 3
    engine.warm([text], bases=(BLIND,))
    prompt = engine.prompt("Où est l'été?", [text])
    report = engine.prefill(prompt, method=make_method("random", ratio=0.4, base=BLIND)).report
    assert report.selected
    page = explain_html(engine.lm.tokenizer, prompt, report)
    shown = re.findall(r'<span class="(\w+)">(.*?)</span>', page[page.index("<section") :], re.DOTALL)
    assert {"reused", "recomputed"} <= {fate for fate, _ in shown}
    assert unescape("".join(written for _, written in shown)) == engine.lm.tokenizer.decode(prompt.ids)


def explained(engine: FusionEngine) -> str:
    engine.warm(PASSAGES, bases=(BLIND,))
    prompt = engine.prompt("Who keeps the paint?", PASSAGES)
    done = engine.prefill(prompt, method=make_method("qcfuse", ratio=0.3))
    assert done.scores is not None
    return explain_html(engine.lm.tokenizer, prompt, done.report, done.scores.mean)


def test_stages_and_the_probes_shares_are_drawn(engine: FusionEngine) -> None:
    page = explained(engine)
    widths = [float(width) for width in re.findall(r'class="\w+" style="width:([\d.]+)%"', page)]
    assert len(widths) == 4
    assert sum(widths) == pytest.approx(100, abs=0.1)
    shares = [float(width) / 12 for width in re.findall(r'class="heat" style="width:([\d.]+)rem"', page)]
    assert len(shares) == 3
    assert sum(shares) == pytest.approx(1, abs=0.01)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_a_browser_shows_it(engine: FusionEngine, tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "page.html").write_text(explained(engine), "utf-8")
    shot = tmp_path / "shot.png"
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--force-color-profile=srgb", "--window-size=1000,1400")
    address = (tmp_path / "page.html").as_uri()
    subprocess.run(
        ["chromium", *options, f"--screenshot={shot}", address], check=True, capture_output=True, timeout=120
    )
    with Image.open(shot) as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24) or []}
    assert {(0xFF, 0xD5, 0x4A), (0xB5, 0x65, 0x1D), (0xD6, 0x4A, 0x4A)} <= colours  # recomputed, its stage, heat
