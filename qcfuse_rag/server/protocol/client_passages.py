"""Find the passages that chat clients have put into messages, by the marks around them.

Clients with a retrieval of their own split files by themselves and send plain messages. The marks are those of Open
WebUI 0.12 (`<source id="1" ...>`), AnythingLLM (`[CONTEXT 0]:`) and LibreChat (`<![CDATA[`).
"""

from __future__ import annotations

import re

MARKS = (
    (re.compile(r"<source [^<>]*>"), "</source>"),
    (re.compile(r"\[CONTEXT \d{1,6}\]:\n"), "\n[END CONTEXT "),
    (re.compile(r"<!\[CDATA\["), "]]>"),
)
"""The text before and after a passage, for each client."""


def marked_passages(text: str) -> list[str]:
    """Return the passages between marks in a message, those of one client after another.

    A passage begins at the last opening mark before its closing mark, because Open WebUI explains its marks to the
    model. The time is linear in the length of the text, whatever marks it has.
    """
    passages = []
    for opening, closing in MARKS:
        begin = 0
        while (end := text.find(closing, begin)) >= 0:
            openings = list(opening.finditer(text, begin, end))
            if openings and (passage := text[openings[-1].end() : end].strip()):
                passages.append(passage)
            begin = end + len(closing)
    return passages
