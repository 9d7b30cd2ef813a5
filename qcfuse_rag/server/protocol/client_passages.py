"""Find the passages that chat clients have put into messages, by the delimiters around them.

Clients with a retrieval of their own split files by themselves and send plain messages. The delimiters are those of
Open WebUI 0.12 (`<source id="1" ...>`), AnythingLLM (`[CONTEXT 0]:`) and LibreChat (`<![CDATA[`).
"""

from __future__ import annotations

import re

DELIMITERS = (
    (re.compile(r"<source [^<>]*>"), "</source>"),
    (re.compile(r"\[CONTEXT \d{1,6}\]:\n"), "\n[END CONTEXT "),
    (re.compile(r"<!\[CDATA\["), "]]>"),
)
"""The text before and after a passage, for each client."""


def delimited_passages(text: str) -> list[str]:
    """Return the passages between delimiters in a message, those of one client after another.

    A passage begins at the last opening delimiter before its closing delimiter, because Open WebUI explains its
    delimiters to the model. The time is linear in the length of the text, whatever delimiters it has.
    """
    passages = []
    for opening, closing in DELIMITERS:
        begin = 0
        while (end := text.find(closing, begin)) >= 0:
            openings = list(opening.finditer(text, begin, end))
            if openings and (passage := text[openings[-1].end() : end].strip()):
                passages.append(passage)
            begin = end + len(closing)
    return passages
