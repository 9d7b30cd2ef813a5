"""The engine by itself: warm passages, ask, and look at what was done."""

from qcfuse_rag import FusionEngine, SamplingParams, make_method
from qcfuse_rag.demo.assets import corpus, default_model

passages = list(corpus().values())[:8]
with FusionEngine.load(default_model(), store="kv") as engine:
    print(engine.warm(passages))
    prompt = engine.prompt("Who founded Brinemoor Salt Works?", passages)

    stream = engine.stream(prompt, SamplingParams(max_new_tokens=32))
    for piece in stream:
        print(piece, end="", flush=True)
    print("\n", stream.report)

    full = engine.prefill(prompt, method=make_method("full"))
    print("full prefill would have taken", round(full.report.timings.ttft_s, 2), "s to the first token")
