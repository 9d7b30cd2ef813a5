"""Whole answers beside llama.cpp: the same GGUF file, token ids, numbers of tokens and threads, in turns.

llama.cpp reuses the beginning that a prompt shares with the request before, and with cache reuse also shifted parts of
it (`n_cache_reuse` of its server). It is used by its package xllamacpp, without HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.environment import about_run
from benchmarks.quality.configurations import FULL, Configuration
from benchmarks.quality.tables import figures
from benchmarks.speed.ceilings import take_turns
from qcfuse_rag.bundled import corpus, questions
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.generation.completion import end_tokens
from qcfuse_rag.generation.decoding import TextStream
from qcfuse_rag.generation.sampling import Sampler
from qcfuse_rag.generation.sampling_params import SamplingParams
from qcfuse_rag.runtime.language_model import LanguageModel

SPARE_TOKENS = 64
"""Context of llama.cpp beyond the prompt and the longest answer."""
REUSE_TOKENS = 64
"""Smallest shifted part that llama.cpp reuses, where it does."""
WAIT_S = 1.0
"""Pause after a side, in which its worker threads come to rest."""

Ids = Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """The options of `python -m benchmarks peer`; its help describes them."""

    gguf: Path
    methods: tuple[Configuration, ...]
    context: int = 2048
    answers: tuple[int, ...] = (32, 128, 512)
    repeats: int = 3
    weights: str = "auto"

    def __post_init__(self) -> None:
        if min(self.context, self.repeats) < 1:
            raise ValueError("context and repeats must be more than 0")
        if not self.answers or min(self.answers) < 2:
            raise ValueError("answers need at least 2 tokens, or there is no step to time")


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids of the prompt to measure, and of requests that llama.cpp has answered before.

    Attributes:
        measured: the prompt.
        same_order: the same passages in the same order, another question.
        other_order: the same passages in another order, another question.
    """

    measured: Ids
    same_order: Ids
    other_order: Ids


def compare_peer(options: PeerOptions, progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """Time answers of each length on every side in turns; return medians of the rounds after a first one.

    Answers do not end before their length: end tokens are not chosen. A first token's time is that of an answer of one
    token.

    Raises:
        QCFuseError: if xllamacpp is not installed or the model is no GGUF file.
    """
    if options.gguf.suffix != ".gguf":
        raise QCFuseError(f"llama.cpp needs a GGUF file, and {options.gguf} is none")
    _xllamacpp()
    lengths = sorted({1, *options.answers})
    with FusionEngine.load(str(options.gguf), device="cpu", weights=options.weights, prefix_bytes=0) as engine:
        texts, prompts = _prompts(engine, options.context)
        engine.warm(texts, bases=tuple(dict.fromkeys(base for side in options.methods for base in side.method.bases)))
        seconds: dict[str, dict[int, float]] = {}
        with _llama_server(options.gguf, len(prompts.measured) + lengths[-1] + SPARE_TOKENS) as server:
            for done, length in enumerate(lengths):
                sides = _engine_sides(engine, texts, options.methods, length) | _peer_sides(server, prompts, length)
                for name, times in take_turns(sides, options.repeats).items():
                    seconds.setdefault(name, {})[length] = median(times)
                if progress is not None:
                    progress(done + 1, len(lengths))
        rows = [_row(name, by_length, lengths) for name, by_length in seconds.items()]
        about = about_run(engine.lm, options.gguf.name)
    return {"about": about, "prompt_tokens": len(prompts.measured), "answers": lengths[1:], "rows": rows}


def _row(name: str, seconds: dict[int, float], lengths: Sequence[int]) -> dict[str, Any]:
    step_s = (seconds[lengths[-1]] - seconds[1]) / (lengths[-1] - 1)
    return {
        "side": name,
        "first_token_s": seconds[1],
        "step_s": step_s,
        "answer_s": {str(length): seconds[length] for length in lengths[1:]},
    }


def _prompts(engine: FusionEngine, context: int) -> tuple[list[str], Prompts]:
    """Return documents of the demonstration with as many tokens in all, and prompts over them."""
    texts: list[str] = []
    for text in corpus().values():
        missing = context - sum(len(engine.lm.tokenizer(kept)["input_ids"]) for kept in texts)
        if missing <= 0:
            break
        ids = engine.lm.tokenizer(text, add_special_tokens=False)["input_ids"]
        texts.append(text if len(ids) <= missing else engine.lm.tokenizer.decode(ids[:missing]))
    first, second = (question.question for question in questions()[:2])
    rotated = [*texts[1:], texts[0]]
    return texts, Prompts(
        engine.prompt(first, texts).ids, engine.prompt(second, texts).ids, engine.prompt(second, rotated).ids
    )


def _engine_sides(
    engine: FusionEngine, texts: Sequence[str], methods: Sequence[Configuration], length: int
) -> dict[str, Callable[[], float]]:
    prompt = engine.prompt(questions()[0].question, texts)
    # Answers beyond their end repeat themselves, and candidates of prompt lookup would be right too often.
    params = SamplingParams(max_new_tokens=length, prompt_lookup_num_tokens=0)

    def answer(configuration: Configuration) -> float:
        time.sleep(WAIT_S)
        started = time.perf_counter()
        prefilled = engine.prefill(prompt, method=configuration.method.unguarded, answer_tokens=length)
        generation = TextStream(engine.runner, prefilled, params, sampler=_EndlessSampler(params, engine.lm)).result()
        assert len(generation.ids) == length
        return time.perf_counter() - started

    return {_side_name(side): partial(answer, side) for side in methods}


def _side_name(side: Configuration) -> str:
    return side.label if side.label == FULL or side.ratio is None else f"{side.label}, {100 * side.ratio:g} %"


def _peer_sides(server: Any, prompts: Prompts, length: int) -> dict[str, Callable[[], float]]:
    def answer(before: Ids | None, reuse: int) -> float:
        if before is not None:
            _complete(server, before, 1, keep=True, reuse=reuse)
        time.sleep(WAIT_S)
        started = time.perf_counter()
        _complete(server, prompts.measured, length, keep=before is not None, reuse=reuse)
        return time.perf_counter() - started

    return {
        "llama.cpp, nothing kept": partial(answer, None, 0),
        "llama.cpp, after the same order": partial(answer, prompts.same_order, 0),
        "llama.cpp, after another order": partial(answer, prompts.other_order, 0),
        "llama.cpp, after another order, cache reuse": partial(answer, prompts.other_order, REUSE_TOKENS),
    }


def _complete(server: Any, ids: Ids, length: int, *, keep: bool, reuse: int) -> None:
    answer = server.handle_completions(
        {
            "prompt": list(ids),
            "n_predict": length,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": keep,
            "n_cache_reuse": reuse,
        }
    )
    usage = answer.get("usage") or {}
    if (usage.get("prompt_tokens"), usage.get("completion_tokens")) != (len(ids), length):
        raise QCFuseError(f"llama.cpp has not answered {len(ids)} tokens with {length}: {answer}")


def _xllamacpp() -> Any:
    try:
        return import_module("xllamacpp")
    except ImportError as error:
        raise QCFuseError("a comparison with llama.cpp needs xllamacpp: pip install 'qcfuse-rag[llamacpp]'") from error


@contextmanager
def _llama_server(gguf: Path, context: int) -> Iterator[Any]:
    xllamacpp = _xllamacpp()
    params = xllamacpp.CommonParams()
    params.model.path = str(gguf)
    params.n_ctx = context
    params.n_parallel = 1
    params.cache_ram_mib = 0  # it would keep the caches of earlier requests, and so those that must not be kept
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
    params.verbosity = 0
    yield xllamacpp.Server(params)


def peer_table(result: Mapping[str, Any]) -> Table:
    """Return the seconds of all sides as a table."""
    about = result["about"]
    title = (
        f"{about['model']}, {result['prompt_tokens']:,} tokens, {about['threads']} threads, ours in {about['dtype']}"
    )
    names = ["method", "first token", "a token after", *(f"{length} tokens" for length in result["answers"])]
    rows = (
        [
            row["side"],
            f"{row['first_token_s']:.2f} s",
            f"{1000 * row['step_s']:.1f} ms",
            *(f"{seconds:.2f} s" for seconds in row["answer_s"].values()),
        ]
        for row in result["rows"]
    )
    return figures(title, names, rows)


class _EndlessSampler(Sampler):
    """Never chooses an end token, so that answers have the length asked for."""

    def __init__(self, params: SamplingParams, lm: LanguageModel) -> None:
        super().__init__(params, lm)
        self._excluded = torch.tensor(sorted(end_tokens(lm)), dtype=torch.int64)

    def __call__(self, logits: Tensor, prompt: Ids = (), answer: Ids = ()) -> int:
        """Choose another token than an end token; see `Sampler`."""
        return super().__call__(logits.index_fill(0, self._excluded, float("-inf")), prompt, answer)
