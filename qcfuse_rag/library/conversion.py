"""Convert PDF, office documents, EPUB, HTML and notebooks to Markdown, in a process that may be ended.

Each file has a process of its own, which is forked from one that has loaded the converters. It has a limit of time,
memory and output, and may neither connect to anything nor start programs. Standard input brings a path and a kind on
each line as JSON; standard output gets `{"text": ...}` or `{"reason": ...}`.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, Self

from qcfuse_rag.library.plain_text import UnreadableFile

CONVERTED = {".pdf", ".docx", ".pptx", ".xlsx", ".epub", ".html", ".htm", ".xhtml", ".ipynb"}
"""Endings of files that are converted."""

LIMIT_S = 60
LIMIT_BYTES = 2 << 30
LIMIT_TEXT_BYTES = 32 << 20
"""Most seconds, memory and text of a file."""

MISSING = "need `pip install 'qcfuse-rag[documents]'`"
ENCRYPTED = "encrypted"
NO_TEXT_LAYER = "without text; if scanned, add a text layer by OCR"
DAMAGED = "damaged, or not what the name says"
TOO_LARGE = (
    f"need more than {LIMIT_S} s, {LIMIT_BYTES >> 30} GB of memory or {LIMIT_TEXT_BYTES >> 20} MB of text to read"
)

FORBIDDEN = ("socket.", "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.system", "urllib.", "http.")
OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
"""Begins encrypted office documents, and those of before 2007."""


def conversion_of(path: Path) -> str | None:
    """Return the ending of the format that a file has to be converted from; None for any other file.

    PDF is told by its content, other formats by their endings too: a text that is called `a.docx` is a text.

    Raises:
        UnreadableFile: if the file is encrypted.
        OSError: if it cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(1024)
    ending = path.suffix.lower()
    if b"%PDF-" in head:
        return ".pdf"
    if head.startswith(OLE) and ending in CONVERTED:
        raise UnreadableFile(f"{ENCRYPTED}, or of an old format")
    if ending not in CONVERTED or (ending in (".docx", ".pptx", ".xlsx", ".epub") and not head.startswith(b"PK")):
        return None
    return None if ending == ".pdf" else ending


class Converter:
    """Converts files one after the other; the process starts with the first and ends with the context."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def markdown(self, path: Path, kind: str) -> str:
        """Return a file as Markdown; the pages of PDF and slides have headings.

        Raises:
            UnreadableFile: if it cannot be converted, within the limits, or a package is missing.
        """
        if find_spec("markitdown") is None or find_spec("pypdfium2") is None:
            raise UnreadableFile(MISSING)
        if self._process is None or self._process.poll() is not None:
            kept = {name: value for name, value in os.environ.items() if not name.startswith("QCFUSE_")}
            threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=kept | threads,
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps([os.fspath(path.absolute()), kind]).encode() + b"\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
        except (OSError, ValueError) as error:  # the process has ended
            raise UnreadableFile(DAMAGED) from error
        if "text" not in answer:
            raise UnreadableFile(answer["reason"])
        return str(answer["text"])


def _serve() -> None:
    import markitdown.converters  # noqa: F401  # once, before the forks
    import pypdfium2  # noqa: F401

    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        path, kind = json.loads(line)
        with tempfile.TemporaryFile() as output:
            child = os.fork()
            if child == 0:
                _convert_and_exit(path, kind, output.fileno())
            _, status = os.waitpid(child, 0)
            output.seek(0)
            answer = (
                json.loads(output.read())
                if status == 0
                else {"reason": TOO_LARGE if os.WIFSIGNALED(status) else DAMAGED}
            )
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _convert_and_exit(path: str, kind: str, output: int) -> None:
    """Write what a file holds, within the limits, and end the process."""
    status = 1
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * LIMIT_TEXT_BYTES, 2 * LIMIT_TEXT_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)
        sys.addaudithook(_refuse)
        try:
            answer = {"text": _pdf(path) if kind == ".pdf" else _other(path, kind)}
        except UnreadableFile as error:
            answer = {"reason": str(error)}
        except (MemoryError, RecursionError):
            answer = {"reason": TOO_LARGE}
        with open(output, "wb", closefd=False) as file:
            file.write(json.dumps(answer).encode())
        status = 0
    finally:
        os._exit(status)


def _refuse(event: str, _: tuple[Any, ...]) -> None:
    if event.startswith(FORBIDDEN):
        raise PermissionError(f"documents may not cause {event}")


def _pdf(path: str) -> str:
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(path)
    except pypdfium2.PdfiumError as error:
        raise UnreadableFile(ENCRYPTED if "password" in str(error).lower() else DAMAGED) from error
    pages = [page.get_textpage().get_text_bounded().replace("\r\n", "\n") for page in document]
    if not any(page.strip() for page in pages):
        raise UnreadableFile(NO_TEXT_LAYER)
    joined = [re.sub(r"[\x02\ufffe]\n?", "", page) for page in pages]  # hyphens at the ends of lines
    return "\n\n".join(f"# Page {number}\n\n{page}" for number, page in enumerate(joined, start=1) if page.strip())


def _other(path: str, kind: str) -> str:
    from zipfile import BadZipFile, ZipFile

    from markitdown import StreamInfo, converters

    data = Path(path).read_bytes()
    if data.startswith(b"PK"):
        try:
            with ZipFile(BytesIO(data)) as archive:
                if (
                    any(entry.flag_bits & 1 for entry in archive.infolist())
                    or "META-INF/rights.xml" in archive.namelist()
                ):
                    raise UnreadableFile(ENCRYPTED)
        except BadZipFile as error:
            raise UnreadableFile(DAMAGED) from error
    name = {".htm": "Html", ".xhtml": "Html"}.get(kind, kind[1:].capitalize())
    converter = getattr(converters, f"{name}Converter")()
    text = str(converter.convert(BytesIO(data), StreamInfo(extension=kind)).markdown)
    return re.sub(r"<!-- Slide number: (\d+) -->", r"# Slide \1", text) if kind == ".pptx" else text


if __name__ == "__main__":
    _serve()
