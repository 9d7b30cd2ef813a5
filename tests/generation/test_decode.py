"""Decoding: greedy and sampled, streamed, stopped, cancelled."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, PromptTemplate, SamplingParams, make_method
from qcfuse_rag.generation.completion import Detokenizer, end_tokens
from qcfuse_rag.generation.sampling import Sampler
from qcfuse_rag.generation.sampling_params import Fidelity
from tests.support.families import build_tokenizer
from tests.support.passages import PASSAGES, QUESTION

TOKENIZER = build_tokenizer(lambda: PASSAGES)


@pytest.fixture
def engine(engine: FusionEngine) -> FusionEngine:
    engine.warm(PASSAGES)
    return engine


def test_the_pieces_of_a_stream_are_the_answer(engine: FusionEngine) -> None:
    prompt, params = engine.prompt(QUESTION, PASSAGES), SamplingParams(max_new_tokens=24)
    stream = engine.stream(prompt, params)
    assert stream.report.rows > 0, "the report is there before the first piece"
    assert stream.generation is None
    pieces = list(stream)
    assert stream.generation is not None
    assert "".join(pieces) == stream.generation.text == engine.generate(prompt, params).text
    assert len(pieces) > 1


@pytest.mark.parametrize(("configured", "ends"), [(None, {7}), (3, {3, 7}), ([3, 4], {3, 4, 7})])
def test_the_models_and_the_tokenizers_end_tokens_end_an_answer(configured: object, ends: set[int]) -> None:
    config = SimpleNamespace(eos_token_id=configured)
    lm = SimpleNamespace(model=SimpleNamespace(generation_config=config), tokenizer=SimpleNamespace(eos_token_id=7))
    assert end_tokens(lm) == ends  # type: ignore[arg-type]


def test_decoding_over_a_fused_cache_equals_feeding_the_answer_as_rows(engine: FusionEngine) -> None:
    """Decoding over the request's buffer gives the logits of a new prefill with the answer so far in the prompt."""
    prompt = engine.prompt(QUESTION, PASSAGES)
    method = make_method("reuse")
    answer = engine.generate(prompt, SamplingParams(max_new_tokens=10), method=method)
    for count in range(1, 10):
        tail = prompt.segments[-1]
        longer = replace(prompt, segments=(*prompt.segments[:-1], replace(tail, ids=tail.ids + answer.ids[:count])))
        assert int(engine.prefill(longer, method=method).logits.argmax()) == answer.ids[count]


def test_the_end_token_ends_and_is_not_shown(engine: FusionEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES)
    free = engine.generate(prompt, SamplingParams(max_new_tokens=8))
    assert engine.lm.model.generation_config is not None
    monkeypatch.setattr(engine.lm.model.generation_config, "eos_token_id", [free.ids[3], 2])
    ended = engine.generate(prompt, SamplingParams(max_new_tokens=8))
    at = free.ids.index(free.ids[3])
    assert ended.finish_reason == "end"
    assert ended.ids == free.ids[: at + 1]
    assert ended.text == engine.lm.tokenizer.decode(free.ids[:at], skip_special_tokens=True)


def test_a_stop_string_ends_and_is_cut_off(engine: FusionEngine) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES)
    free = engine.generate(prompt, SamplingParams(max_new_tokens=24)).text
    stop = free[5:8]
    stopped = engine.generate(prompt, SamplingParams(max_new_tokens=24, stop=(stop,)))
    assert stopped.finish_reason == "stop"
    assert stopped.text == free[: free.index(stop)]


@pytest.mark.parametrize("fidelity", ["fast", "exact"])
@pytest.mark.parametrize(
    ("wording", "written", "shown"),
    [
        (None, "a boat\n\nQuestion: who? Answer: me", "a boat"),
        (None, "a boat\n\n Question: who?", "a boat"),
        (None, "a boat\n Question: who?", "a boat"),
        (None, "Question: who?\nAnswer: me\nQuestion: why?", "Question: who?\nAnswer: me"),
        (None, "a boat\nPassages:\nthe boat", "a boat"),
        (None, "a Question: who?\nQuestions", None),
        ("{context}Q: {question}", "a boat\nQ: who?", "a boat"),
        ("{context}\n{question}", "a boat\n\nQuestion: who?", None),
        ("{context}and {question}", "a boat\nand a sail", None),
    ],
)
def test_an_answer_ends_where_the_wording_begins_again(
    llama: LanguageModel, wording: str | None, written: str, shown: str | None, fidelity: Fidelity
) -> None:
    template = PromptTemplate() if wording is None else PromptTemplate(messages=(("user", wording),))
    engine = FusionEngine(llama, MemoryStore(), template=template)
    params = SamplingParams(max_new_tokens=99, grammar=f"start: {json.dumps(written)}", fidelity=fidelity)
    stream = engine.stream(engine.prompt(QUESTION, PASSAGES), params)
    answer = "".join(stream)
    assert (answer, stream.result().text) == (written if shown is None else shown,) * 2
    assert stream.result().finish_reason == ("end" if shown is None else "stop")
    free = engine.generate(engine.prompt_from_text([{"role": "user", "content": QUESTION}]), params)
    assert free.text == written, "a text that others word ends where the model ends it"


@pytest.mark.parametrize(
    ("end", "written", "shown"),
    [
        ("Query: Who?\nAnswer: ", "a boat\nQuery: why?", "a boat"),
        ("Question: Who?\n\nAnswer:", "a boat\n\nQuestion: why?", "a boat"),
        ("Query: Who?\nAnswer: ", "a Query: why?\nQuestion: why?", None),
        ("Note: be brief.\nAnswer:", "a boat\nNote: why?", None),
        ("Query: Who?\nSay who.", "a boat\nQuery: why?", None),
        ("Query:\nAnswer:", "a boat\nQuery: why?", None),
    ],
)
def test_an_answer_ends_where_a_frameworks_wording_begins_again(
    engine: FusionEngine, end: str, written: str, shown: str | None
) -> None:
    """As LlamaIndex and LangChain word their prompts, in a message or as a finished text."""
    text = f"Context information is below.\n{PASSAGES[0]}\n{end}"
    params = SamplingParams(max_new_tokens=99, grammar=f"start: {json.dumps(written)}")
    for conversation in (text, [{"role": "user", "content": text}]):
        answer = engine.generate(engine.prompt_from_text(conversation), params)
        assert answer.text == (written if shown is None else shown)
        assert answer.finish_reason == ("end" if shown is None else "stop")


def test_cancelling_from_another_thread(engine: FusionEngine) -> None:
    cancel = threading.Event()
    stream = engine.stream(engine.prompt(QUESTION, PASSAGES), SamplingParams(max_new_tokens=100), cancel=cancel)
    next(stream)
    cancel.set()
    answer = stream.result()
    assert answer.finish_reason == "cancelled"
    assert len(answer.ids) < 100


def test_sampling_follows_its_seed(engine: FusionEngine) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES)
    drawn = [
        engine.generate(prompt, SamplingParams(max_new_tokens=12, temperature=1.5, top_p=0.95, top_k=50, seed=seed)).ids
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_sampling_draws_by_the_tempered_distribution(llama: LanguageModel) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    sampler = Sampler(SamplingParams(temperature=2.0, seed=0), llama)
    counts = torch.bincount(torch.tensor([sampler(logits) for _ in range(4000)]), minlength=4) / 4000
    assert torch.allclose(counts, (logits / 2).softmax(-1), atol=0.03)
    narrow = Sampler(SamplingParams(temperature=2.0, top_k=2, seed=0), llama)
    assert {narrow(logits) for _ in range(200)} == {0, 1}


@given(
    text=st.text(alphabet="abcñ😀 ", max_size=40),
    stops=st.lists(st.text(alphabet="abcñ😀 ", min_size=1, max_size=4), max_size=3),
)
@settings(deadline=None)
def test_whatever_the_tokens_the_text_is_cut_at_the_first_stop(text: str, stops: list[str]) -> None:
    assembler = Detokenizer(TOKENIZER.backend_tokenizer, tuple(stops))
    pieces = []
    for token in TOKENIZER(text, add_special_tokens=False)["input_ids"]:
        pieces.append(assembler.push(token))
        assert "\ufffd" not in pieces[-1], "never half a character"
        if assembler.stopped:
            break
    pieces.append(assembler.flush())
    first = min((text.find(stop) for stop in stops if stop in text), default=len(text))
    generated = "".join(pieces)
    if assembler.stopped:
        # A stop string is noticed as soon as it is complete, so another that began earlier may still be incomplete.
        assert text.startswith(generated)
        assert not any(stop in generated for stop in stops)
        assert any(text[len(generated) :].startswith(stop) for stop in stops)
    else:
        assert generated == text
        assert first == len(text)
