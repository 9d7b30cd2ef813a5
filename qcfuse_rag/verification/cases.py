"""The prompts that a method is verified on: RULER-style tasks and the user's passages.

The tasks are those of RULER (Hsieh et al., arXiv 2404.06654): several numbers under one key (`mv`), several keys with
one number each (`mq`), and a chain of variables (`vt`), hidden in a context of a chosen length. Metric, wording and
number of needles are RULER's. There are four differences: the text around the needles comes from the dataset's passages
instead of essays, the context is split into passages, the beginning of the answer is at the end of the question instead
of in the model's turn, and the key words are this project's.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from qcfuse_rag.bundled import corpus
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.ingestion.similarity import nearest_chunks, token_vectors

if TYPE_CHECKING:
    from qcfuse_rag.engine.engine import FusionEngine

PASSAGES_PER_CASE = 4
"""Passages in a prompt of `passage_cases`."""
OPENING_WORDS = 8
PASSAGE_ANSWER_TOKENS = 24
"""Tokens of an answer to a prompt of `passage_cases` that are compared."""

ADJECTIVES = tuple(
    """
    amber ancient bitter blue bold brave brief bright brisk broad calm clever cold crisp curious dark deep dusty eager
    early faint fierce gentle golden grand green happy heavy hollow humble idle jolly keen kind late lazy light lively
    lonely loud lucky mellow merry mild modest narrow noble odd pale patient plain polite proud quick quiet rapid rare
    red rough round rusty shy silent silver simple sleepy slow smooth soft solid spare steady steep stern stout strange
    sunny sweet swift tall tame tender thin tidy tiny urban vast vivid warm weary wide wild wise witty young zesty
    """.split()  # noqa: SIM905
)

NOUNS = tuple(
    """
    acorn anchor apron arrow badge barrel basket beacon bell blanket boat bottle bridge broom bucket button cabin
    candle canoe carpet castle chimney clock cloud compass copper cradle curtain desk drum engine falcon feather fence
    ferry field flute forest fountain garden glove hammer harbor hedge helmet hinge island jacket jar kettle kite
    ladder lantern lemon letter lever lily magnet maple marble meadow mirror needle oar orchard otter oven paddle
    parcel pebble pencil piano pillow pocket quarry quilt rabbit ribbon river rope saddle sail shovel sparrow spoon
    stove table tent thimble ticket tower trumpet tunnel umbrella valley violin wagon walnut whistle window
    """.split()  # noqa: SIM905
)


TASKS = ("ruler_mv", "ruler_mq", "ruler_vt")
NEEDLES = 4
HOPS = 4
ANSWER_TOKENS = {"ruler_mv": 128, "ruler_mq": 128, "ruler_vt": 30}

NEEDLE = "One of the special magic numbers for {key} is: {value}."
NUMBERS_QUESTION = (
    "Some special magic numbers are hidden within the passages. What are all the special magic numbers for {query} "
    "mentioned in the provided text? The special magic numbers for {query} mentioned in the provided text are"
)
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
CHAIN_QUESTION = (
    "Memorize and track the chain(s) of variable assignment hidden in the text. Find all variables that are assigned "
    "the value {value} in the text above. According to the chain(s) of variable assignment in the text above, "
    "{count} variables are assigned the value {value}, they are:"
)

Count = Callable[[str], int]  # returns the number of tokens of a text


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt on which `max_new_tokens` of a method's answer are compared with full prefill's."""

    question: str
    passages: tuple[str, ...]
    max_new_tokens: int
    expected: tuple[str, ...] = ()  # strings that a right answer contains; empty if they are not known


def ruler_cases(
    engine: FusionEngine, task: str, size: int, tokens: int, texts: Sequence[str] = (), seed: int = 0
) -> list[Case]:
    """Build cases of a RULER-style task in prompts of `tokens` tokens with the answer.

    Numbers are hidden in `texts`, by default the demonstration's.
    """
    tokenizer = engine.lm.tokenizer.backend_tokenizer

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    haystack, overhead = list(texts) or list(corpus().values()), len(engine.prompt("", ()))
    return generate(task, size, tokens=tokens, count=count, haystack=haystack, seed=seed, overhead_tokens=overhead)


def passage_cases(engine: FusionEngine, texts: Sequence[str], size: int) -> list[Case]:
    """Build cases of passages that are likely to be retrieved together.

    The question is about the opening words of one of the passages. There is no known answer.
    """
    unique = list(dict.fromkeys(texts))
    vectors = token_vectors(engine.lm, [engine.prompts.chunk_ids(text) for text in unique])
    related = nearest_chunks(vectors, PASSAGES_PER_CASE - 1)
    step = max(1, len(unique) // size)
    cases = []
    for index in range(0, len(unique), step)[:size]:
        opening = " ".join(unique[index].split()[:OPENING_WORDS])
        passages = [unique[neighbour] for neighbour in reversed(related[index])] + [unique[index]]
        cases.append(Case(f"What do the passages say about this: {opening}?", tuple(passages), PASSAGE_ANSWER_TOKENS))
    return cases


def string_match(answer: str, gold: Sequence[str], *, needs_all: bool) -> float:
    """Score an answer by the gold answers that are its substrings, whatever their case.

    With `needs_all` it is the share of gold answers found, RULER's `string_match_all`; else 1 if any of them is found.
    """
    matches = [text.strip().lower() in answer.lower() for text in gold]
    return sum(matches) / len(matches) if needs_all else float(any(matches))


class _TooLongError(Exception):
    """Its argument is the length that the fixed parts of a question need."""


def generate(
    task: str, size: int, *, tokens: int, count: Count, haystack: Sequence[str], seed: int, overhead_tokens: int = 0
) -> list[Case]:
    """Generate questions of a task; the same arguments give the same questions.

    The target length is that of the prompt with its answer, in tokens as `count` counts them; `overhead_tokens` of it
    are neither passages nor question. Needles are hidden in the haystack; `vt` hides its chain in a repeated line
    instead.

    Raises:
        QCFuseError: if the needles alone exceed the target length; it names a length that fits every question.
    """
    sentences = [part for text in haystack for part in re.split(r"(?<=[.!?])\s+", " ".join(text.split())) if part]
    cases: list[Case] = []
    required_tokens = 0
    for number in range(size):
        draw = random.Random(f"{seed}/{task}/{number}")
        try:
            if task == "ruler_vt":
                cases.append(_chain(task, draw, tokens - overhead_tokens, count))
            else:
                cases.append(_numbers(task, draw, tokens - overhead_tokens, count, sentences))
        except _TooLongError as error:
            required_tokens = max(required_tokens, overhead_tokens + error.args[0])
    if required_tokens:
        raise QCFuseError(
            f"{task} does not fit {tokens} tokens: hidden texts, question, answer and the prompt's template need "
            f"{required_tokens}; give at least that length"
        )
    return cases


def _passages_of(units: Sequence[str], separator: str, most_tokens: int, count: Count) -> tuple[str, ...]:
    passages: list[list[str]] = [[]]
    used = 0
    for unit in units:
        needs = count(unit + separator)
        if passages[-1] and used + needs > most_tokens:
            passages.append([])
            used = 0
        passages[-1].append(unit)
        used += needs
    return tuple(separator.join(units) for units in passages if units)


def _chunk_tokens(tokens: int) -> int:
    return min(512, max(32, tokens // 8))


def _numbers(task: str, draw: random.Random, tokens: int, count: Count, sentences: Sequence[str]) -> Case:
    if not sentences:
        raise QCFuseError("there is no text to hide numbers in")
    keys = _distinct(1 if task == "ruler_mv" else NEEDLES, lambda: f"{draw.choice(ADJECTIVES)}-{draw.choice(NOUNS)}")
    values = _distinct(NEEDLES, lambda: str(draw.randint(1_000_000, 9_999_999)))
    needles = [NEEDLE.format(key=keys[i % len(keys)], value=value) for i, value in enumerate(values)]
    query = keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + f", and {keys[-1]}"
    question = NUMBERS_QUESTION.format(query=query)
    room = _room(task, tokens, count, [*needles, question])
    start = draw.randrange(len(sentences))
    text: list[str] = []
    while (room := room - count(sentences[(start + len(text)) % len(sentences)] + " ")) > 0:
        text.append(sentences[(start + len(text)) % len(sentences)])
    depths = sorted(draw.sample(range(40), NEEDLES))
    shuffled = draw.sample(needles, NEEDLES)
    cuts = [0, *(len(text) * depth // 39 for depth in depths), len(text)]
    units = [*text[: cuts[1]]]
    for needle, (begin, end) in zip(shuffled, pairwise(cuts[1:]), strict=True):
        units += [needle, *text[begin:end]]
    passages = _passages_of(units, " ", _chunk_tokens(tokens), count)
    return Case(question, passages, ANSWER_TOKENS[task], tuple(values))


def _chain(task: str, draw: random.Random, tokens: int, count: Count) -> Case:
    names = _distinct(HOPS + 1, lambda: "".join(draw.choices(string.ascii_uppercase, k=5)))
    value = str(draw.randint(10_000, 99_998))
    question = CHAIN_QUESTION.format(value=value, count=HOPS + 1)
    example = _solved_chain(draw)
    room = _room(task, tokens, count, [*_assignments(names, value), question, example])
    lines = [NOISE] * max(HOPS + 1, room // count(NOISE + "\n"))
    positions = sorted(draw.sample(range(len(lines)), HOPS + 1))
    for position, line in reversed(list(zip(positions, _assignments(names, value), strict=True))):
        lines.insert(position, line)
    passages = _passages_of(lines, "\n", _chunk_tokens(tokens), count)
    return Case(question, (example, *passages), ANSWER_TOKENS[task], tuple(names))


def _solved_chain(draw: random.Random) -> str:
    names = _distinct(HOPS + 1, lambda: "".join(draw.choices(string.ascii_uppercase, k=3)))
    value = str(draw.randint(10_000, 99_998))
    lines = [line for assignment in _assignments(names, value) for line in (NOISE, assignment)]
    question = CHAIN_QUESTION.format(value=value, count=HOPS + 1)
    return "\n".join(["Example:", *lines, f"Question: {question}", f"Answer: {' '.join(names)}"])


def _assignments(names: Sequence[str], value: str) -> list[str]:
    return [f"VAR {names[0]} = {value}", *(f"VAR {new} = VAR {old}" for old, new in pairwise(names))]


def _room(task: str, tokens: int, count: Count, fixed: Sequence[str]) -> int:
    fixed_tokens = ANSWER_TOKENS[task] + sum(count(text + "\n") for text in fixed)
    if tokens <= fixed_tokens:
        raise _TooLongError(fixed_tokens + 1)
    return tokens - fixed_tokens


def _distinct(wanted: int, draw: Callable[[], str]) -> list[str]:
    values: dict[str, None] = {}
    while len(values) < wanted:
        values[draw()] = None
    return list(values)
