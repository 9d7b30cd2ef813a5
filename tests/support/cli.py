"""Run `qcfuse ...` or `python -m benchmarks ...` in this process."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest

from qcfuse_rag.cli.app import main


class Run:
    """Runs a command; call it for exit code, standard output and standard error."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], main: Callable[[], None] = main
    ) -> None:
        self._monkeypatch, self._capsys, self._main = monkeypatch, capsys, main

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["qcfuse", *map(str, arguments)])
        self._capsys.readouterr()
        try:
            self._main()
            code: Any = 0
        except SystemExit as stop:
            code = stop.code
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        out = self._capsys.readouterr()
        return int(code or 0), out.out, out.err

    def json(self, *arguments: object) -> dict[str, Any]:
        """Run with `--json`, which must succeed, and return what was printed."""
        code, out, err = self(*arguments, "--json")
        assert code == 0, err
        data: dict[str, Any] = json.loads(out)
        return data

    def text(self, *arguments: object) -> str:
        """Run, which must succeed, and return what was printed, with single spaces."""
        code, out, err = self(*arguments)
        assert code == 0, err
        return " ".join(out.split())
