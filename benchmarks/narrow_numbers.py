"""Quality against bytes: what int8 and fp8 caches cost, question by question on the same token ids.

    python benchmarks/narrow_numbers.py [--model M] [--data FILE] [--questions N] [--passages P] [--json]

Without `--data`, the questions and documents are the demonstration's. A data file has one JSON object a line:
`{"question": ..., "answers": [...], "passages": [{"title": ..., "text": ...}], "supporting": [indices]}`; of its
passages the supporting ones and then the others are taken, up to P, in the order of the file.

`KL to full` is of the first answer token, to full prefill. `KL to model` is to the same method on caches in the model's
own dtype: what the narrow numbers alone change. F1 is over the answer's words.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections import Counter
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from qcfuse_rag import FusionEngine, MemoryStore, Method, SamplingParams, TextStream, make_method
from qcfuse_rag.bundled import corpus, default_embedder, default_model, questions
from qcfuse_rag.cli.console import quiet_libraries
from qcfuse_rag.monitoring.divergence import divergence
from qcfuse_rag.store.prefill_base import FRAMED
from qcfuse_rag.store.quantization import STORE_FORMATS

METHODS = [make_method("reuse", base=FRAMED), make_method("qcfuse", ratio=0.15, base=FRAMED)]
PARAMS = SamplingParams(max_new_tokens=24)
Asked = tuple[str, list[str], list[str]]
"""Question, answers, passages."""


def words(text: str) -> list[str]:
    return [word for word in re.findall(r"\w+", text.lower()) if word not in {"a", "an", "the"}]


def f1(answer: str, expected: list[str]) -> float:
    """Return the best F1 of an answer's words."""
    best = 0.0
    for one in expected:
        ours, theirs = words(answer), words(one)
        shared = sum((Counter(ours) & Counter(theirs)).values())
        if shared:
            best = max(best, 2 * shared / (len(ours) + len(theirs)))
    return best


def demonstration(count: int, passages: int) -> list[Asked]:
    from qcfuse_rag.retrieval.embedder import Embedder

    texts = list(corpus().values())
    embed = Embedder(default_embedder())
    vectors = embed(texts)
    asked = []
    for question in questions()[:count]:
        order = np.argsort(-(vectors @ embed([question.question])[0]), kind="stable")[:passages]
        asked.append((question.question, list(question.answers), [texts[i] for i in order]))
    return asked


def from_file(path: Path, count: int, passages: int) -> list[Asked]:
    asked = []
    for line in path.read_text("utf-8").splitlines()[:count]:
        data = json.loads(line)
        gold = list(data.get("supporting") or ())
        chosen = sorted([*gold, *(i for i in range(len(data["passages"])) if i not in gold)][:passages])
        texts = [f"{data['passages'][i]['title']}\n{data['passages'][i]['text']}" for i in chosen]
        asked.append((data["question"], data["answers"], texts))
    return asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--passages", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    quiet_libraries()
    if options.data is None:
        asked = demonstration(options.questions, options.passages)
    else:
        asked = from_file(options.data, options.questions, options.passages)

    first = FusionEngine.load(options.model or default_model())
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    token_bytes: dict[str, float] = {}
    for question, answers, passages in track(asked, "asking", console=Console(stderr=True)):
        prompt = first.prompt(question, passages)
        engines = {numbers: FusionEngine(first.lm, MemoryStore(4 << 30, numbers=numbers)) for numbers in STORE_FORMATS}
        for numbers, engine in engines.items():
            engine.warm(passages)
            held = engine.store.stats()[0].size_bytes
            token_bytes[numbers] = held / (len(prompt.prefix_ids) + sum(len(span) for span in prompt.chunks))
        oracle = first.prefill(prompt, method=make_method("full"), answer_tokens=PARAMS.max_new_tokens)
        full = oracle.logits
        answer = TextStream(first.lm, oracle, PARAMS).result().text
        found.setdefault(("full", "-"), []).append({"kl": 0.0, "narrow": 0.0, "same": 1.0, "f1": f1(answer, answers)})
        for method in METHODS:
            exact = None
            for numbers, engine in engines.items():
                prefilled = engine.prefill(prompt, method=method, answer_tokens=PARAMS.max_new_tokens)
                logits = prefilled.logits
                exact = logits if exact is None else exact
                text = TextStream(engine.lm, prefilled, PARAMS).result().text
                row = {
                    "kl": divergence(full, logits),
                    "narrow": divergence(exact, logits),
                    "same": float(logits.argmax() == full.argmax()),
                    "f1": f1(text, answers),
                }
                found.setdefault((label(method), numbers), []).append(row)

    rows = [
        {
            "method": method,
            "numbers": numbers,
            "bytes_per_token": token_bytes.get(numbers),
            **{name: statistics.fmean(row[name] for row in measured) for name in ("kl", "narrow", "same", "f1")},
        }
        for (method, numbers), measured in found.items()
    ]
    if options.json:
        print(json.dumps({"model": first.lm.name, "questions": len(asked), "rows": rows}, indent=2))
        return
    table = Table("method", "numbers", "bytes a token", "KL to full", "KL to model", "same first token", "F1")
    for one in rows:
        size = "-" if one["bytes_per_token"] is None else f"{one['bytes_per_token']:,.0f}"
        figures = (f"{one['kl']:.4f}", f"{one['narrow']:.5f}", f"{one['same']:.0%}", f"{one['f1']:.3f}")
        table.add_row(one["method"], one["numbers"], size, *figures)
    Console(width=120).print(table)


def label(method: Method) -> str:
    return f"{method.name} {method.ratio:g}"


if __name__ == "__main__":
    main()
