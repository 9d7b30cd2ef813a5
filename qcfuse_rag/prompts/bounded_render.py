"""Render a chat template in bounded time: it comes with a model's files, and Jinja's sandbox lets it loop for ever."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

from qcfuse_rag.errors import InvalidTemplate

RENDER_S = 10.0
"""Most seconds of one rendering; templates take milliseconds."""


class _Stopped(BaseException):
    """Ends a thread; no handler in a template's way catches it."""


def render_bounded(render: Callable[[], str]) -> str:
    """Return the text that a function renders, in a thread that is stopped if it takes longer than `RENDER_S`.

    A single operation that does not return, such as a huge power, is not stopped.

    Raises:
        InvalidTemplate: if it takes longer.
        Exception: whatever the function raises.
    """
    texts, errors = list[str](), list[BaseException]()

    def run() -> None:
        try:
            texts.append(render())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="qcfuse-render", daemon=True)
    thread.start()
    thread.join(RENDER_S)
    if thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Stopped))
        raise InvalidTemplate(f"the tokenizer's chat template did not end in {RENDER_S:g} s; take another model")
    if errors:
        raise errors[0]
    return texts[0]
