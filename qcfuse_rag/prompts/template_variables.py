"""Find the variables that a tokenizer's chat template reads, besides those that every prompt sets."""

from __future__ import annotations

import inspect
import re

from jinja2 import Environment, TemplateError, meta
from transformers import PreTrainedTokenizerBase

GENERATION_TAG = re.compile(r"{%[-+]?\s*(?:end)?generation\s*[-+]?%}")
"""Matches the tags by which transformers marks answers in a chat template for training; Jinja does not know them."""

SET_BY_THE_BUILDER = {"messages", "date_string", "strftime_now", "raise_exception"}
"""Variables and functions that a prompt's builder and transformers set, besides the arguments of the rendering."""


def template_variables(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Return the names of the variables that a user may set, such as Qwen3's `enable_thinking`.

    Messages, tools, the date, the start of the answer and special tokens are the builder's and the tokenizer's.

    Args:
        tokenizer: one without a chat template reads none; of several templates, each counts.
    """
    templates = tokenizer.chat_template or ""
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    names = set[str]()
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        try:
            names |= meta.find_undeclared_variables(environment.parse(GENERATION_TAG.sub("", template)))
        except TemplateError:
            continue  # rendering says what is wrong with it
    arguments = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return frozenset(names - SET_BY_THE_BUILDER - arguments.keys() - tokenizer.special_tokens_map.keys())
