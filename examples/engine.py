"""Use the engine by itself: warm passages, ask a question, and print the report."""

from qcfuse_rag import FusionEngine, SamplingParams, make_method
from qcfuse_rag.bundled import corpus, default_model

passages = [
    corpus()["23-merrin-hospital.md"],
    corpus()["05-thornskerry-lighthouse.md"],
    corpus()["09-tarrowin-school.md"],
]
with FusionEngine.load(default_model(), store="kv") as engine:
    print(engine.warm(passages))
    prompt = engine.prompt("What is the name of the ambulance boat of Merrin Hospital?", passages)

    stream = engine.stream(prompt, SamplingParams(max_new_tokens=32))
    for piece in stream:
        print(piece, end="", flush=True)
    print("\n", stream.report)

    full = engine.prefill(prompt, method=make_method("full"))
    print("full prefill would have taken", round(full.report.timings.ttft_s, 2), "s to the first token")
