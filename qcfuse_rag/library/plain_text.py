"""Tell text from other files by its content, and decode it: by its mark, as UTF-8, or by what a detector finds."""

from __future__ import annotations

import codecs
import re

from qcfuse_rag.errors import QCFuseError

MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",  # begins with the mark of UTF-16
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
SAMPLE = 200_000
"""Most bytes that the detector looks at."""

EAST_ASIAN = re.compile(r"[\t\n\r -~\u2010-\u2027\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\uff00-\uffef]")
"""Matches most characters of Chinese, Japanese and Korean text; about half of all pairs of bytes are none of them."""

UNDECODABLE = "not in an encoding that can be told; save as UTF-8"


class UnreadableFile(QCFuseError):
    """A file that cannot be read as a document; the message is the reason, without the file's name."""


def decode_text(data: bytes) -> str:
    """Return the text of a file; raise `UnreadableFile` if it is not text, or its encoding cannot be told."""
    for mark, encoding in MARKS.items():
        if data.startswith(mark):
            return _without_nul(_decode(data[len(mark) :], encoding))
    if b"\0" in data:
        return _without_nul(_decode(data, _detect(data[:SAMPLE]), "not text"))
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        good, first = data[: error.start], error.start
    text = data.decode(errors="replace")
    # Few characters beyond ASCII are no UTF-8, such as the last one of a file that was cut.
    if not good.isascii() and sum(not c.isascii() for c in text) > 10 * (text.count("\ufffd") - 1):
        return text
    return _without_nul(_decode(data, _detect(data[max(0, first - SAMPLE // 2) :][:SAMPLE])))


def is_unicode_text(text: str) -> bool:
    """Return whether a text has neither lone surrogates, from undecodable bytes or escapes, nor NUL characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def _detect(sample: bytes) -> str | None:
    """Return the encoding of bytes that are not UTF-8; None if they are not text."""
    from chardet import EncodingEra, detect

    encoding = detect(sample, encoding_era=EncodingEra.MODERN_WEB, prefer_superset=True)["encoding"]
    if encoding is not None:
        return encoding
    scores = {wide: _usual(sample.decode(wide, "replace")) for wide in ("utf-16-le", "utf-16-be")}
    best = max(scores, key=lambda wide: scores[wide])
    return best if scores[best] else None


def _usual(text: str) -> float:
    """Return how usual the characters of what may be text in UTF-16 are, 0 if it is no text.

    The detector takes short texts, and East Asian ones without spaces, for binary data.
    """
    usual = len(EAST_ASIAN.findall(text)) / len(text)
    return usual + sum(map(str.isascii, text)) / len(text) if usual > 0.9 else 0.0


def _decode(data: bytes, encoding: str | None, if_wrong: str = UNDECODABLE) -> str:
    if encoding is None:
        raise UnreadableFile("not text")
    try:
        return data.decode(encoding)
    except (UnicodeDecodeError, LookupError) as error:
        raise UnreadableFile(if_wrong) from error


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise UnreadableFile("not text")
    return text
