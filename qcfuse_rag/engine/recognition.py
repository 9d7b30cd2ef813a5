"""Build a prompt from text that a framework has put together, with the warmed passages that are recognised in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from qcfuse_rag.errors import InvalidTemplate, StoreError
from qcfuse_rag.fusion.report import UNSOUGHT
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.prompts.joined_text import prompt_from_joined_text
from qcfuse_rag.prompts.length_limit import require_short
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.prompts.special_tokens import RenderedText
from qcfuse_rag.prompts.template import Tool, Turn
from qcfuse_rag.store.documents.passage_signatures import PassageSignatures


def recognise(
    builder: PromptBuilder,
    signatures: PassageSignatures,
    conversation: Sequence[Turn] | str,
    tools: Sequence[Tool],
    chat_template_kwargs: Mapping[str, Any] | None,
) -> Prompt:
    """Build a prompt from chat messages or finished text; see `FusionEngine.prompt_from_text`.

    Args:
        builder: builder of the prompts that passages are warmed for.
        signatures: of the warmed passages. If they cannot be read, the whole text is computed, and the prompt's note
            says why.
        conversation: chat messages, or finished text.
        tools: what the model may call, for chat messages.
        chat_template_kwargs: variables of the chat template, for chat messages.

    Raises:
        InvalidTemplate: if the tokenizer's chat template does not take the messages, tools or variables; or if finished
            text is given with variables.
        PromptTooLong: if it is far beyond the context window.
    """
    require_short(builder, conversation, *tools, chat_template_kwargs or "")
    finished = isinstance(conversation, str)
    if finished and chat_template_kwargs:
        raise InvalidTemplate("finished text has no chat template; give messages, or omit chat_template_kwargs")
    builder = builder.with_kwargs(chat_template_kwargs)
    rendered = RenderedText(conversation) if isinstance(conversation, str) else builder.render(conversation, tools)
    require_short(builder, rendered.text)  # the template has added to it
    note = None
    try:
        matches = signatures.find(rendered.text)
    except StoreError as error:
        matches, note = [], f"{UNSOUGHT}: {error}"
    prompt = prompt_from_joined_text(builder, rendered, matches, begin=finished)
    return replace(prompt, note=note)
