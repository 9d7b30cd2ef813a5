"""Build prompts with the warmed passages that are recognised in text that a framework or a conversation brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from qcfuse_rag.errors import InvalidTemplate, StoreError
from qcfuse_rag.fusion.report import UNSOUGHT
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.prompts.joined_text import prompt_from_joined_text, text_segments
from qcfuse_rag.prompts.length_limit import require_short
from qcfuse_rag.prompts.segments import Prompt, Segment
from qcfuse_rag.prompts.special_tokens import RenderedText
from qcfuse_rag.prompts.template import Tool, Turn
from qcfuse_rag.store.documents.passage_match import PassageMatch
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
    matches, note = _find(signatures, rendered)
    prompt = prompt_from_joined_text(builder, rendered, matches, begin=finished)
    return replace(prompt, note=note)


def build_among_turns(
    builder: PromptBuilder,
    signatures: PassageSignatures,
    question: str,
    passages: Sequence[str],
    history: Sequence[Turn],
    tools: Sequence[Tool],
    later: Sequence[Turn],
) -> Prompt:
    """Build a prompt from a question, its passages and other turns, in which warmed passages are recognised.

    Earlier questions may contain passages, and tools may have found some. They stay in their turns. See
    `PromptBuilder.build` for the arguments and `FusionEngine.prompt` for errors.
    """
    if not history and not later:
        return builder.build(question, passages, tools=tools)
    notes: list[str | None] = []

    def split_text(rendered: RenderedText) -> list[Segment]:
        matches, note = _find(signatures, rendered)
        notes.append(note)
        return text_segments(builder, rendered, matches)

    prompt = builder.build(question, passages, history, tools, later, split_text)
    return replace(prompt, note=next(filter(None, notes), None), joined=True)


def _find(signatures: PassageSignatures, rendered: RenderedText) -> tuple[list[PassageMatch], str | None]:
    """Return the warmed passages in a text, or none and the reason why it could not be searched."""
    try:
        return signatures.find(rendered.text), None
    except StoreError as error:
        return [], f"{UNSOUGHT}: {error}"
