"""`qcfuse warm prefix`: prefill a system message and an agent's tools into the store of a library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from qcfuse_rag.cli.console import print_json, print_line, print_note, size, status
from qcfuse_rag.cli.library import open_engine, with_settings
from qcfuse_rag.cli.options import PrefixOptions
from qcfuse_rag.engine.config import EngineConfig
from qcfuse_rag.engine.system_prefixes import MIN_TOKENS
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.library.folder import existing_store_folder, open_library_store
from qcfuse_rag.library.settings import LibrarySettings
from qcfuse_rag.methods import choose_method
from qcfuse_rag.server.protocol.chat_request import ToolSpec


def warm_prefix(library: Path, config: EngineConfig, options: PrefixOptions, *, as_json: bool) -> None:
    """Prefill the system prefix of the conversations that have this system message and these tools."""
    tools = [] if options.tools is None else read_tools(options.tools)
    if options.system is None and not tools:
        raise QCFuseError("there is nothing to prefill: give --system, --tools or both")
    existing_store_folder(library)
    settings = LibrarySettings.load(library)
    config = with_settings(config, settings)
    with open_library_store(library, tenant=options.tenant) as store:
        engine = open_engine(store, config, settings, method=choose_method())
        with status("prefilling"):
            summary = engine.warm_prefix(options.system, tools)
        engine.corpus.close()
    if not summary.chunks:
        raise QCFuseError(
            f"nothing is prefilled: conversations begin with fewer than {MIN_TOKENS} tokens, or the chat template "
            "writes their beginning anew for each"
        )
    if as_json:
        print_json(summary.to_dict())
        return
    print_line(
        f"{summary.warmed} beginnings of conversations prefilled ({summary.tokens:,} tokens, "
        f"{size(summary.size_bytes)}), {summary.present} were there already"
    )
    for _, reason in summary.failed:
        print_note("not stored:", reason)


def read_tools(path: Path) -> list[dict[str, Any]]:
    """Read tools in OpenAI's form from a JSON file, and return them as the server gives them to the chat template.

    Raises:
        QCFuseError: if the file cannot be read or is no list of tools.
    """
    try:
        tools = json.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise QCFuseError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise QCFuseError(f"{path} is not JSON: {error}") from error
    try:
        specs = TypeAdapter(list[ToolSpec]).validate_python(tools)
    except ValidationError as error:
        raise QCFuseError(
            f"{path} has to be a list of tools, as requests give them: "
            '[{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}]'
        ) from error
    return [spec.model_dump(exclude_none=True) for spec in specs]
