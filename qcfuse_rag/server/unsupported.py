"""What other servers do when it is asked for, and this one does not.

https://platform.openai.com/docs/api-reference/chat, https://docs.vllm.ai/en/latest/serving/openai_compatible_server
"""

from __future__ import annotations

from typing import Any

OFF: tuple[Any, ...] = (None, 0, "", [], {})
"""Values by which most fields do nothing; False is 0 too."""

WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    # OpenAI's, the retired ones among them
    **dict.fromkeys(("logprobs", "top_logprobs", "logit_bias", "presence_penalty", "frequency_penalty"), OFF),
    "functions": OFF,
    "function_call": (*OFF, "none", "auto"),  # auto calls none where there are none
    "modalities": (*OFF, ["text"]),
    "audio": OFF,
    "reasoning_effort": (None, "medium"),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    # vLLM's: what may follow
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), OFF),
    **dict.fromkeys(("bad_words", "allowed_token_ids", "logits_processors"), OFF),
    # how a token is chosen
    "top_k": (*OFF, -1),
    "min_p": OFF,
    "repetition_penalty": (None, 1),
    "use_beam_search": OFF,
    "best_of": (*OFF, 1),
    "length_penalty": (None, 1),
    # where an answer ends, and what is shown of it
    **dict.fromkeys(("min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output"), OFF),
    "skip_special_tokens": (None, True),
    **dict.fromkeys(("echo", "prompt_logprobs"), OFF),
    # and what the prompt is
    **dict.fromkeys(("chat_template", "chat_template_kwargs", "continue_final_message", "add_special_tokens"), OFF),
    "add_generation_prompt": (None, True),
    "truncate_prompt_tokens": (None, -1),
}
"""Fields that would change the answer, as this server does not, and the values by which they do not."""
