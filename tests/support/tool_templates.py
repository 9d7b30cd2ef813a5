"""Chat templates that show tools, in the three ways models write calls; and a tool."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from qcfuse_rag import LanguageModel
from tests.support.families import build_model, build_tokenizer
from tests.support.passages import PASSAGES, QUESTION

HEAD = (
    "{{- bos_token }}"
    "{%- if tools %}<system>You may call:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}"
    "\nWrite a call as {{ 'CALL' }}.\n{%- endif %}"
    "{%- for message in messages %}"
    "<{{ message.role }}>{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}\n"
)
TAIL = "{%- endfor %}\n{%- endfor %}<assistant>"
HERMES = HEAD.replace("CALL", '<tool_call>{"name": ..., "arguments": {...}}</tool_call>') + (
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>" + TAIL
)
MISTRAL = HEAD.replace("CALL", '[TOOL_CALLS][{"name": ..., "arguments": {...}}]') + (
    '[TOOL_CALLS][{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}]' + TAIL
)
LLAMA = HEAD.replace("CALL", '<|python_tag|> or {"name": ..., "parameters": {...}}') + (
    '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}' + TAIL
)
TEMPLATES = {"hermes": HERMES, "mistral": MISTRAL, "llama": LLAMA}

# An untrained model goes on for ever where it may, so nothing in here may.
LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a boat up.",
        "parameters": {
            "type": "object",
            "properties": {
                "boat": {"type": "string", "enum": ["ferry", "tug"]},
                "year": {"type": "integer", "minimum": 1990, "maximum": 1999},
            },
            "required": ["boat", "year"],
        },
    },
}
MOOR = {
    "type": "function",
    "function": {"name": "moor", "description": "Moor.", "parameters": {"type": "object", "properties": {}}},
}


def teach(tokenizer: PreTrainedTokenizerFast, way: str) -> PreTrainedTokenizerFast:
    """Give a tokenizer a template that shows tools, and the special tokens it has; the model need not be wider."""
    tokenizer.chat_template = TEMPLATES[way]
    return tokenizer


def tool_model(way: str = "hermes", *, window: int = 4096) -> LanguageModel:
    """Return a tiny model whose chat template shows tools."""
    tokenizer = teach(build_tokenizer(lambda: [*PASSAGES, QUESTION]), way)
    return LanguageModel.wrap(build_model("llama", max_position_embeddings=window), tokenizer)
