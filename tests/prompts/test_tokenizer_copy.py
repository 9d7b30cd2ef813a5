"""The copies of a tokenizer have its rules, but not its settings, and share its vocabulary."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, processors
from transformers import PreTrainedTokenizerFast

from qcfuse_rag.prompts import builder
from qcfuse_rag.prompts.builder import tokenizer_copy
from tests.support.families import build_tokenizer
from tests.support.passages import PASSAGES, QUESTION

TEXT = f"<s>{PASSAGES[0]}<tool>  {QUESTION}</s> <late>"


@pytest.fixture
def own() -> PreTrainedTokenizerFast:
    """Return a tokenizer with all parts, and added tokens of both kinds in turns."""
    tokenizer = build_tokenizer(lambda: [*PASSAGES, QUESTION])
    core = tokenizer.backend_tokenizer
    core.normalizer = normalizers.NFC()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    core.add_tokens([AddedToken("<tool>", lstrip=True, rstrip=True, normalized=False)])
    core.add_special_tokens([AddedToken("<end>", single_word=True)])
    core.add_tokens(["<late>"])
    return tokenizer


@pytest.mark.parametrize("split", [(), ("<s>",)])
def test_a_copy_has_the_rules_of_the_tokenizer(own: PreTrainedTokenizerFast, split: tuple[str, ...]) -> None:
    copy = tokenizer_copy(own, split=split)
    assert json.loads(copy.to_str()) == json.loads(own.backend_tokenizer.to_str())
    whole = Tokenizer.from_str(own.backend_tokenizer.to_str())
    whole.encode_special_tokens = bool(split)
    assert copy.encode(TEXT).ids == whole.encode(TEXT).ids
    assert copy.decode(whole.encode(TEXT).ids) == whole.decode(whole.encode(TEXT).ids)


def test_the_vocabulary_is_shared(own: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "Tokenizer", lambda model: Tokenizer(model))  # without `from_str`
    assert tokenizer_copy(own, split=["<s>"]).get_vocab() == own.get_vocab()


def test_settings_of_the_tokenizer_are_its_own(own: PreTrainedTokenizerFast) -> None:
    own.backend_tokenizer.enable_truncation(2)
    own.backend_tokenizer.enable_padding(length=9)
    copies = [tokenizer_copy(own, split=split) for split in ((), ("<s>",))]
    with_special, without = (copy.encode("<s>word</s>", add_special_tokens=False).ids for copy in copies)
    assert (with_special[0], with_special[-1]) == (1, 2)
    assert {1, 2} & set(without) == set()
    assert len(without) > 2
    assert len(own.backend_tokenizer.encode("<s>word</s>").ids) == 9
