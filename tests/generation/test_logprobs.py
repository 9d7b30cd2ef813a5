"""Logarithmic probabilities are the model's own, whatever chooses the tokens, and their texts are the tokens' bytes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import FusionEngine, Generation, LanguageModel, MemoryStore, Prompt, SamplingParams, make_method
from qcfuse_rag.engine.scheduler import Scheduler
from qcfuse_rag.generation.completion import (
    LOWEST,
    Detokenizer,
    TokenLogprob,
    content_logprobs,
    token_bytes,
    token_logprob,
)
from qcfuse_rag.store.key import BLIND, FRAMED
from tests.support import references
from tests.support.engines import make_engine, make_warmed_engine
from tests.support.families import byte_fallback_tokenizer
from tests.support.passages import PASSAGES, QUESTION

FULL = make_method("full")
COUNT = 4
PARAMS = SamplingParams(max_new_tokens=20, logprobs=COUNT)


@pytest.fixture
def engine(llama: LanguageModel) -> FusionEngine:
    return make_warmed_engine(llama, bases=(BLIND, FRAMED))


@pytest.fixture
def prompt(engine: FusionEngine) -> Prompt:
    return engine.prompt(QUESTION, PASSAGES)


def assert_models_own(engine: FusionEngine, prompt: Prompt, answer: Generation) -> None:
    """Compare with one forward of transformers over prompt and answer."""
    logits, _ = references.plain_forward(engine.lm, (*prompt.ids, *answer.ids))
    expected = logits[len(prompt) - 1 : -1].log_softmax(-1)
    assert answer.logprobs is not None
    assert [entry.token for entry in answer.logprobs] == list(answer.ids)
    for entry, row in zip(answer.logprobs, expected, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-3)
        best = row.topk(COUNT)
        assert [logprob for _, logprob in entry.top] == pytest.approx(best.values.tolist(), abs=1e-3)
        assert [token for token, _ in entry.top] == best.indices.tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 1.5, "top_k": 5, "seed": 3},
        {"presence_penalty": 2.0, "repetition_penalty": 1.5, "logit_bias": ((9, 3.0),)},
        {"grammar": 'start: /[a-m ]{4,9}/ "."'},
        {"fidelity": "exact"},
    ],
    ids=["greedy", "sampled", "penalties", "grammar", "exact"],
)
def test_they_are_the_models_own_before_all_that_chooses(
    engine: FusionEngine, prompt: Prompt, changes: dict[str, object]
) -> None:
    assert_models_own(engine, prompt, engine.generate(prompt, replace(PARAMS, **changes), method=FULL))


@pytest.mark.slow
def test_those_of_an_exact_answer_are_full_prefills_and_not_the_drafts(engine: FusionEngine, prompt: Prompt) -> None:
    method = make_method("reuse")
    answer = engine.generate(prompt, replace(PARAMS, fidelity="exact", max_new_tokens=60), method=method)
    assert answer.healing is not None
    assert answer.healing.drafted > 0
    assert_models_own(engine, prompt, answer)
    fast, other = engine.generate(prompt, PARAMS, method=method).logprobs, answer.logprobs
    assert fast is not None
    assert other is not None
    assert fast[0].logprob != pytest.approx(other[0].logprob, abs=1e-3), "over the fused cache they are others"


def test_no_request_pays_for_what_it_does_not_ask(engine: FusionEngine, prompt: Prompt) -> None:
    answer = engine.generate(prompt, replace(PARAMS, logprobs=None))
    assert answer.logprobs is None
    assert answer.ids == engine.generate(prompt, PARAMS).ids
    none_beside = engine.generate(prompt, replace(PARAMS, logprobs=0)).logprobs
    assert none_beside is not None
    assert {entry.top for entry in none_beside} == {()}


def test_a_reader_of_a_scheduled_answer_sees_them_grow(llama: LanguageModel) -> None:
    with make_engine(llama, MemoryStore()) as engine, Scheduler(engine) as scheduler:
        prompt = engine.prompt(QUESTION, PASSAGES)
        answers = [scheduler.submit(prompt, replace(PARAMS, fidelity=fidelity)) for fidelity in ("fast", "exact")]
        for answer in answers:
            for piece in answer:
                assert len(answer.logprobs) >= bool(piece)
            assert answer.generation is not None
            assert answer.logprobs == answer.generation.logprobs
            plain = json.loads(json.dumps(answer.generation.to_dict()))
            assert plain["logprobs"][0]["token"] == answer.generation.ids[0]


def test_impossible_tokens_have_openais_number() -> None:
    entry = token_logprob(torch.tensor([0.0, -torch.inf, 0.0]), 1, 5)
    assert entry.logprob == LOWEST
    assert entry.top[-1] == (1, LOWEST)
    assert len(entry.top) == 3


TEXT = "Grün  ist das Boot \u2013 船 🚀, und\nder Kapitän?"


@pytest.mark.parametrize("byte_level", [True, False])
def test_the_bytes_of_tokens_are_those_of_the_text(byte_level: bool, tokenizer: PreTrainedTokenizerFast) -> None:
    """Also where characters are parts of several tokens, and where decoders strip the first space."""
    used = tokenizer if byte_level else byte_fallback_tokenizer()
    ids = used.encode(TEXT, add_special_tokens=False)
    joined = b"".join(token_bytes(used, token) for token in ids).decode()
    assert joined.removeprefix(" ") == TEXT
    entries = content_logprobs([TokenLogprob(token, -0.5, ((token, -0.5),)) for token in ids], used)
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == joined
    assert any("\ufffd" in entry["token"] for entry in entries)
    assert {key for entry in entries for key in entry["top_logprobs"][0]} == {"token", "logprob", "bytes"}


def test_a_broken_character_among_byte_tokens_does_not_end_the_text() -> None:
    """Such tokenizers decode a run of bytes as a whole, also the line break in front of half a character."""
    tokenizer = byte_fallback_tokenizer()
    names = ["<0x0A>", "<0xF0>", "<0x9F>", "\u2581ist"]
    detokenizer = Detokenizer(tokenizer.backend_tokenizer, ())
    pieces = [detokenizer.push(tokenizer.convert_tokens_to_ids(name)) for name in names]
    assert "".join(pieces).startswith("\n")
    assert pieces[-1].endswith("ist")
