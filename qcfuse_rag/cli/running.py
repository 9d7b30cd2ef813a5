"""Questions to the server that already runs over a library; this module imports no model code."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import fields
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from qcfuse_rag.cli.console import ERR, OUT, print_note, size
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.fusion.report import FusionReport, Timings
from qcfuse_rag.library.local_socket import connect

SILENCE_S = 60.0
"""Seconds without a byte after which a server is not waited for; while it works, it sends a comment every few."""


def ask_server(question: str, library: Path, *, max_new_tokens: int) -> bool:
    """Print the answer of the server that runs over a library; return whether there is one that answers.

    Raises:
        QCFuseError: if the server fails after the answer's beginning.
    """
    if (connected := connect(library)) is None:
        return False
    connected.settimeout(SILENCE_S)
    connection = HTTPConnection("localhost")
    connection.sock = connected
    body = {
        "messages": [{"role": "user", "content": question}],
        "documents": "library",
        "temperature": 0,
        "max_tokens": max_new_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    token = os.environ.get("QCFUSE_TOKEN")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    began = False
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            return False
        sources, lines = list[str](), list[str]()

        def pieces() -> Iterator[tuple[str, str]]:
            nonlocal began
            for event in read_events(response):
                if "error" in event:
                    raise ValueError(event["error"]["message"])
                if not began:
                    print_note("note:", "the server that runs over this library answers, with its own settings")
                began = True
                for document in event.get("documents", ()):
                    title = f" ({document['title']})" if document["title"] else ""
                    sources.append(f"{Path(document['source']).name}{title}")
                for choice in event["choices"]:
                    yield choice["delta"].get("reasoning_content") or "", choice["delta"].get("content") or ""
                if "fusion" in event:
                    if counts := event["fusion"].get("reranking"):
                        lines.append(f"reranked: {counts['reused']} of {counts['passages']} passages reused")
                    lines.append(summary_line(read_report(event["fusion"])))

        print_pieces(pieces())
    except (OSError, HTTPException, ValueError) as error:
        if began:
            raise QCFuseError(f"the running server does not go on: {error}") from error
        return False
    finally:
        connection.close()
    print_details([sources_line(dict.fromkeys(sources)), *lines])
    return True


def read_events(response: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the server-sent events of an answer up to its end."""
    for line in response:
        if line.strip() == b"data: [DONE]":
            return
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))
    raise ValueError("the connection was closed")


def read_report(data: dict[str, Any]) -> FusionReport:
    """Return a report from plain data, without the lookups."""
    known = {field.name: data[field.name] for field in fields(FusionReport) if field.name in data}
    stages = {field.name: data["timings"][field.name] for field in fields(Timings)}
    return FusionReport(**{**known, "lookups": (), "timings": Timings(**stages)})


def print_pieces(pieces: Iterable[tuple[str, str]]) -> None:
    """Print reasoning to standard error and text to standard output, as they come."""
    reasons = False
    for reasoning, text in pieces:
        if reasoning:
            ERR.print(reasoning, end="", style="dim", highlight=False, markup=False, soft_wrap=True)
            reasons = True
        if text:
            if reasons:
                ERR.print("\n")
                reasons = False
            OUT.print(text, end="", highlight=False, markup=False, soft_wrap=True)
    OUT.print()


def print_details(lines: Iterable[str]) -> None:
    """Print sources and counts behind an answer to standard error."""
    for line in lines:
        ERR.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)


def sources_line(sources: Iterable[str]) -> str:
    """Return one line on an answer's documents."""
    return f"sources: {', '.join(sources) or 'none'}"


def summary_line(report: FusionReport) -> str:
    """Return one line on a fused prefill: method, tokens computed, bytes loaded, time to the first token, and reuse."""
    label = f"{report.method}, ratio {report.ratio:g}: " if report.base else f"{report.method}: "
    line = (
        f"{label}computed {report.rows:,} of {report.prompt_tokens:,} tokens ({report.work:.0%} over all layers), "
        f"loaded {size(report.bytes_loaded)}, first token after {report.timings.ttft_s:.2f} s"
    )
    return f"{line}; {report.reuse}"
