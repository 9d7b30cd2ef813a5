"""Documents of people's folders: each kind is read with its headings or pages, hostile ones are named and end alone."""

from __future__ import annotations

import io
import json
import subprocess
import threading
import zipfile
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from qcfuse_rag.library import conversion
from qcfuse_rag.library.conversion import (
    DAMAGED,
    ENCRYPTED,
    MISSING,
    NO_TEXT_LAYER,
    TOO_LARGE,
    Converter,
    conversion_of,
)
from qcfuse_rag.library.files import Unread
from qcfuse_rag.library.readers import read_passages

TEXT = "Orla keeps the paint in the green shed."


def pdf(*pages: str, encrypted: bool = False) -> bytes:
    """Write a PDF by hand, with one line of Helvetica a page."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", "", "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    for page in pages:
        content = f"BT /F1 12 Tf 50 700 Td ({page}) Tj ET" if page else ""
        objects.append(f"<< /Length {len(content)} >>\nstream\n{content}\nendstream")
        contents = f"/Contents {len(objects)} 0 R /Resources << /Font << /F1 3 0 R >> >>"
        objects.append(f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 600 800] {contents} >>")
    kids = " ".join(f"{number} 0 R" for number in range(5, len(objects) + 1, 2))
    objects[1] = f"<< /Type /Pages /Count {len(pages)} /Kids [{kids}] >>"
    trailer = "/Root 1 0 R"
    if encrypted:
        key = "<" + "41" * 32 + ">"
        objects.append(f"<< /Filter /Standard /V 1 /R 2 /O {key} /U {key} /P -4 >>")
        trailer += f" /Encrypt {len(objects)} 0 R /ID [<41> <41>]"
    data, offsets = "%PDF-1.4\n", []
    for number, text in enumerate(objects, start=1):
        offsets.append(len(data))
        data += f"{number} 0 obj\n{text}\nendobj\n"
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    count = len(objects) + 1
    end = f"trailer << /Size {count} {trailer} >>\nstartxref\n{len(data)}\n%%EOF"
    return f"{data}xref\n0 {count}\n0000000000 65535 f \n{table}{end}".encode()


def docx(*paragraphs: str, extra: str = "") -> bytes:
    body = "".join(
        f"<w:p><w:pPr><w:pStyle w:val='Heading1'/></w:pPr><w:r><w:t>{text}</w:t></w:r></w:p>" for text in paragraphs[:1]
    )
    body += "".join(f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>" for text in paragraphs[1:])
    types = "http://schemas.openxmlformats.org/package/2006/content-types"
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"
    word = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    main = "application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"
    style = "<w:style w:type='paragraph' w:styleId='Heading1'><w:name w:val='heading 1'/></w:style>"
    return archive(
        {
            "[Content_Types].xml": f"<Types xmlns='{types}'><Default Extension='xml' ContentType='{main}'/></Types>",
            "_rels/.rels": "<Relationships xmlns='http://schemas.openxmlformats.org/package/2006/relationships'>"
            f"<Relationship Id='r1' Type='{office}' Target='word/document.xml'/></Relationships>",
            "word/styles.xml": f"<w:styles xmlns:w='{word}'>{style}</w:styles>",
            "word/document.xml": f"<w:document xmlns:w='{word}'><w:body>{body}{extra}</w:body></w:document>",
        }
    )


def pptx() -> bytes:
    from pptx import Presentation

    show, out = Presentation(), io.BytesIO()
    for title, text in (("Ferry", "It leaves at nine."), ("Paint", TEXT)):
        slide = show.slides.add_slide(show.slide_layouts[1])
        slide.shapes.title.text, slide.placeholders[1].text = title, text
    show.save(out)
    return out.getvalue()


def xlsx() -> bytes:
    from openpyxl import Workbook

    book, out = Workbook(), io.BytesIO()
    book.active.title = "Stores"
    book.active.append(["who", "what"])
    book.active.append(["Orla", TEXT])
    book.save(out)
    return out.getvalue()


def epub(chapter: str) -> bytes:
    return archive(
        {
            "mimetype": "application/epub+zip",
            "META-INF/container.xml": "<container><rootfiles><rootfile full-path='b.opf'/></rootfiles></container>",
            "b.opf": "<package><metadata/><manifest><item id='c' href='c.xhtml'/></manifest>"
            "<spine><itemref idref='c'/></spine></package>",
            "c.xhtml": chapter,
        }
    )


def archive(files: dict[str, str]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        for name, text in files.items():
            made.writestr(name, text)
    return out.getvalue()


PAGE = f"<html><head><style>p {{}}</style><script>let x</script></head><body><h2>Paint</h2><p>{TEXT}</p></body></html>"
NOTEBOOK = json.dumps(
    {"cells": [{"cell_type": "markdown", "source": ["# Paint\n", TEXT]}], "metadata": {}, "nbformat": 4}
)
KINDS: dict[str, tuple[Callable[[], bytes], str]] = {
    "a.pdf": (lambda: pdf("The ferry leaves at nine.", TEXT), "Page 2"),
    "no-ending": (lambda: pdf(TEXT), "Page 1"),
    "a.docx": (lambda: docx("Paint", TEXT), "Paint"),
    "a.pptx": (pptx, "Slide 2"),
    "a.xlsx": (xlsx, "Stores"),
    "a.epub": (lambda: epub(PAGE), "Paint"),
    "a.html": (PAGE.encode, "Paint"),
    "a.ipynb": (NOTEBOOK.encode, "Paint"),
}
UNREAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "scan.pdf": (lambda: pdf("", ""), NO_TEXT_LAYER),
    "locked.pdf": (lambda: pdf(TEXT, encrypted=True), ENCRYPTED),
    "half.pdf": (lambda: b"%PDF-1.4\n" + bytes(500), DAMAGED),
    "locked.docx": (lambda: conversion.OLE + bytes(600), f"{ENCRYPTED}, or of an old format"),
    "half.xlsx": (lambda: xlsx()[:2000], DAMAGED),
    "other.pptx": (lambda: archive({"a": "b"}), DAMAGED),
}


def test_each_kind_is_read_with_its_headings_and_the_rest_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, (make, _) in (KINDS | UNREAD).items():
        (tmp_path / name).write_bytes(make())
    (tmp_path / "text.docx").write_text(TEXT)  # what it is counts, not what it is called
    unread: Unread = {}
    passages = read_passages([tmp_path], tokenizer, max_tokens=60, unread=unread)
    read = {Path(source).name: "\n".join(texts) for source, texts in passages.items()}
    assert read.pop("text.docx") == TEXT
    assert read.keys() == KINDS.keys(), unread
    for name, (_, heading) in KINDS.items():
        before, found, _ = read[name].partition(TEXT)
        assert found, read[name]
        assert [line for line in before.splitlines() if line.startswith("#") and heading in line], read[name]
    assert "let x" not in read["a.html"]
    assert {path: reason for reason, paths in unread.items() for path in paths} == {
        name: reason for name, (_, reason) in UNREAD.items()
    }
    monkeypatch.setattr(conversion, "find_spec", lambda name: None)
    unread = {}
    assert list(read_passages([tmp_path], tokenizer, max_tokens=60, unread=unread)) == [str(tmp_path / "text.docx")]
    assert KINDS.keys() - set(unread[MISSING]) == set()


@pytest.mark.slow
@pytest.mark.enable_socket
def test_bombs_and_what_documents_name_harm_nothing(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    asked: list[str] = []

    class Recorder(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)

    server = HTTPServer(("127.0.0.1", 0), Recorder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address, secret = f"http://127.0.0.1:{server.server_port}/x", tmp_path / "secret.txt"
    secret.write_text("The key is under the mat.")
    fetch = f"<img src='{address}'/><link rel='stylesheet' href='{address}'/><iframe src='{secret.as_uri()}'/>"
    entity = f"<!DOCTYPE a [<!ENTITY e SYSTEM '{secret.as_uri()}'>]>"
    lol = "".join(f"<!ENTITY l{n} '{f'&l{n - 1};' * 10 if n else 'lol'}'>" for n in range(10))
    folder = tmp_path / "documents"
    folder.mkdir()
    files = {
        "fetch.html": f"<html><body>{fetch}<p>{TEXT}</p></body></html>".encode(),
        "entity.epub": epub(f"{entity}<html><body>{fetch}<p>{TEXT} &e;</p></body></html>"),
        "bomb.docx": docx("Paint", "a" * (200 << 20)),
        "good.docx": docx("Paint", TEXT),
    }
    files["laughs.docx"] = archive(
        {
            **{name: text.decode() for name, text in _parts(files["good.docx"]).items()},
            "word/document.xml": f"<!DOCTYPE a [{lol}]><a>&l9;</a>",
        }
    )
    for name, data in files.items():
        (folder / name).write_bytes(data)
    unread: Unread = {}
    passages = read_passages([folder], tokenizer, max_tokens=60, unread=unread)
    server.shutdown()
    assert {Path(source).name for source, texts in passages.items() if TEXT in " ".join(texts)} >= {
        "fetch.html",
        "entity.epub",
        "good.docx",
    }
    assert "key" not in str(passages)
    assert asked == []
    assert "bomb.docx" in unread[TOO_LARGE]


def _parts(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as found:
        return {name: found.read(name) for name in found.namelist()}


def test_the_next_file_is_read_after_the_process_was_killed(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(pdf(TEXT))
    kind = conversion_of(tmp_path / "a.pdf")
    assert kind == ".pdf"
    with Converter() as convert:
        convert._process = subprocess.Popen(["sleep", "60"])
        convert._process.kill()
        convert._process.wait()
        assert TEXT in convert.markdown(tmp_path / "a.pdf", kind)
