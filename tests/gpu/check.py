"""The first minutes on a GPU, in one process: what fails most likely and is checked most cheaply comes first.

    python -m tests.gpu.check OUT.json [--shape qwen3-8b] [--model FILE] [--steps NAMES] [--seconds 385]

Each step prints figures and reasons, and what it found is written to the file before the next begins. A step that
fails does not end the others; a step for which too little time is left is not begun.
"""

from __future__ import annotations

import argparse
import json
import logging
import operator
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from benchmarks import speed as speed_measurement
from benchmarks.floors import random_model
from benchmarks.runner import Run, execute
from benchmarks.speed import fill, open_tiers, random_prompt
from qcfuse_rag import KVStore, LanguageModel, MemoryStore, make_method, open_store
from qcfuse_rag.atomic_write import write_atomically
from qcfuse_rag.bundled import corpus, default_model, questions
from qcfuse_rag.engine.first_passes import measure_passes
from qcfuse_rag.fusion.lookup import plan_lookups
from qcfuse_rag.fusion.method import BreakEven
from qcfuse_rag.fusion.pipeline import fuse_prompt
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.prompts.template import PromptTemplate
from qcfuse_rag.runtime.graphs.runners import DecodeRunner, PrefillRunner
from qcfuse_rag.runtime.kernels.support import kernel_errors
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.store.backends.disk import DiskStore
from qcfuse_rag.store.backends.memory import UNLIMITED
from tests.gpu import weights_check

METHODS = ("auto[ratio=.05]", "auto[ratio=.1]", "auto[ratio=.1,layers=third_quarter]")
PREFETCH_LIMIT_S = 20.0


@dataclass
class Check:
    """The state that all steps share.

    Attributes:
        shape: name of the shape of the model with random weights.
        out: file of the results; further files go beside it.
        model: a real model; None for the default one.
        contexts: tokens of the prompts of `speed`.
        device: of `answers`; all else needs a GPU.
        results: by step.
    """

    shape: str
    out: Path
    model: str | None = None
    contexts: tuple[int, ...] = (4096, 10240, 32768)
    device: str = "cuda"
    results: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def lm(self) -> LanguageModel:
        """The model, built at the first use."""
        return random_model(self.shape)

    @cached_property
    def runner(self) -> ModelRunner:
        """A runner of the model, with recorded passes."""
        runner = ModelRunner(self.lm, MemoryStore())
        runner.prefills.compile()
        return runner

    def measure_each(self, step: str, calls: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """Return what each call returns, or its error: the others may work. It is written before the next begins."""
        found: dict[str, Any] = {}
        self.results[step] = {"found": found}
        for name, call in calls.items():
            weights_check.collect()
            try:
                found[name] = call()
            except Exception as error:
                found[name] = {"failed": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-1500:]}
            print(name, json.dumps(found[name], default=str), flush=True)
            self.write()
        return found

    def write(self) -> None:
        """Write the results."""
        write_atomically(self.out, json.dumps(self.results, indent=1, default=str))

    def runner_over(self, store: KVStore) -> ModelRunner:
        """Return the runner over a store, with recorded passes timed as engines do."""
        runner = self.runner.with_store(store)
        prompts = PromptBuilder(self.lm.tokenizer, PromptTemplate(), self.lm.context_window.tokens)
        measure_passes(runner, prompts)
        return runner


def versions(check: Check) -> dict[str, Any]:
    """Name device and versions."""
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "capability": torch.cuda.get_device_capability(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def kernels(check: Check) -> dict[str, Any]:
    """Compare the kernels with their references."""
    in_bfloat16 = [(torch.bfloat16, dim) for dim in (128, 64, 256, 96)]
    cases = [*in_bfloat16, (torch.float16, 128), (torch.float32, 64)]
    found: dict[str, Any] = {}
    for dtype, dim in cases:
        errors = kernel_errors(torch.device("cuda", 0), dtype, dim)
        found[f"{dtype}, {dim} channels"] = {"largest": max(errors.values()), **errors}
    from qcfuse_rag.runtime.kernels.sparse_attention import supports_large_tile

    found["large tile"] = supports_large_tile(torch.device("cuda", 0), torch.bfloat16, 128)
    return found


def recorded_real(check: Check) -> dict[str, Any]:
    """Record passes and steps of a real model: random weights multiply rounding errors less."""
    return _recorded(LanguageModel.load(_real_model(check), device="cuda", dtype="bfloat16"), check)


def engine(check: Check) -> dict[str, Any]:
    """Answer questions with a real model, as users do."""
    from tests.gpu.engine_check import measure_engine

    measure = partial(measure_engine, _real_model(check), "cuda")
    return check.measure_each(
        "engine", {dtype: partial(measure, dtype) for dtype in ("bfloat16", "float32", "float16")}
    )


def answers(check: Check) -> dict[str, Any]:
    """Write the ids of a real model's answers beside the results, to be compared with another device's."""
    from tests.gpu.engine_check import answer_ids

    found = {}
    for dtype in ("float32", "bfloat16")[: 1 if check.device == "cpu" else 2]:
        ids = answer_ids(_real_model(check), check.device, dtype)
        write_atomically(check.out.parent / f"answers-{dtype}.json", json.dumps(ids))
        found[dtype] = {name: sum(map(operator.eq, ids[name], ids["full"])) for name in ids}
    return {"full prefill's answers": found}


def _real_model(check: Check) -> str:
    return check.model or default_model()


def recorded(check: Check) -> dict[str, Any]:
    """Record passes and steps of the shape."""
    return _recorded(check.lm, check)


def _recorded(lm: LanguageModel, check: Check) -> dict[str, Any]:
    """Record passes and decode steps; the log shows the largest error of each, and reasons."""
    passes, steps = PrefillRunner(lm), DecodeRunner(lm)
    return {
        "passes, s": _seconds(lambda: passes.compile((32, 640, 1024))),
        "passes, refusal": passes.refusal,
        "steps, s": _seconds(lambda: steps.compile((1, 8))),
        "steps, refusal": steps.refusal,
        "steps are fused": lm.fused_model is not lm.model,
    }


def loading(check: Check) -> dict[str, Any]:
    """Load from each tier, and compare the guard's predictions with what then happens."""
    lm, found = check.lm, dict[str, Any]()
    contexts, chunk = (1024, 4096, 10240, 32768), 512
    method = make_method("auto", ratio=0.1)
    with ExitStack() as stack:
        names, formats = ("pinned", "device"), ("model", "int8")
        tiers = open_tiers(lm, names, formats, stack, folder=None)
        generator = torch.Generator().manual_seed(0)
        prompts = [random_prompt(lm, context, chunk, generator) for context in contexts]
        for prompt in prompts:
            fill(lm, [tier.store for tier in tiers], prompt, [method])
        full = make_method("full")
        full_s = {
            len(prompt): min(fuse_prompt(check.runner, prompt, full).report.timings.ttft_s for _ in range(2))
            for prompt in prompts
        }
        for tier in tiers:
            here = check.runner_over(tier.store)
            costs = here.costs()
            rate = lm.kv_bytes_per_token / costs.load_s if costs.load_s else None
            name = f"{tier.name}, {tier.kv_dtype}"
            found[name] = {"bytes of the model's dtype a second": rate, "costs": asdict(costs)}
            for prompt in prompts:
                estimate = plan_lookups(lm, tier.store, prompt, method).estimate
                fuse_prompt(here, prompt, method.unguarded)  # a first pass compiles
                taken = median(fuse_prompt(here, prompt, method.unguarded).report.timings.ttft_s for _ in range(3))
                found[name][f"{len(prompt):,} tokens"] = {
                    "full, predicted s": costs.full_pass_s(len(prompt)),
                    "full, s": full_s[len(prompt)],
                    "fused, predicted s": costs.fused_s(estimate),
                    "fused, s": taken,
                    "guard": BreakEven().refusal(estimate, costs) or "fuses",
                }
    return found


def prefetching(check: Check) -> dict[str, Any]:
    """Fuse a prompt whose passages are in files alone, until the engine has copied them to page-locked memory."""
    lm, method = check.lm, make_method("auto", ratio=0.05)
    context, chunk = 10240, 512
    prompt, answers = random_prompt(lm, context, chunk, torch.Generator().manual_seed(2)), []
    with TemporaryDirectory() as folder:
        with DiskStore(folder, UNLIMITED, kv_dtype="int8") as disk:
            fill(lm, [disk], prompt, [method])
        with open_store(folder) as store:
            runner, began = check.runner_over(store), time.perf_counter()
            costs = asdict(runner.costs())
            while not answers or (answers[-1]["reason"] and time.perf_counter() - began < PREFETCH_LIMIT_S):
                asked_s = time.perf_counter() - began
                report = fuse_prompt(runner, prompt, method).report
                predicted_s, taken_s = report.predicted_s, report.timings.ttft_s
                answers.append(
                    {"asked, s": asked_s, "reason": report.fallback, "predicted, s": predicted_s, "took, s": taken_s}
                )
            answers.append({"once more, s": fuse_prompt(runner, prompt, method).report.timings.ttft_s})
    return {"costs": costs, "first answers": answers[:2], "last answers": answers[-2:], "answers": len(answers)}


def weights(check: Check) -> dict[str, Any]:
    """Measure the shape in each format of weights."""
    check.__dict__.pop("lm", None), check.__dict__.pop("runner", None)
    calls = {name: partial(weights_check.measure_shape, check.shape, name) for name in weights_check.FORMATS}
    return check.measure_each("weights", calls)


def weights_real(check: Check) -> dict[str, Any]:
    """Compare formats of weights with bfloat16 by a real model's answers to the demonstration's questions."""
    texts = corpus()
    asked = [(item.question, [texts[name] for name in item.documents]) for item in questions()[:16]]
    measure = partial(weights_check.measure_model, _real_model(check), asked)
    return check.measure_each("weights_real", {name: partial(measure, name) for name in weights_check.FORMATS[1:]})


def layers(check: Check) -> dict[str, Any]:
    """Measure models with recurrent layers or latents, with random weights."""
    sizes = weights_check.LAYERS.items()
    return check.measure_each("layers", {name: partial(weights_check.measure_layers, name, of) for name, of in sizes})


def checkpoints(check: Check) -> dict[str, Any]:
    """Load checkpoints that transformers has quantised."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    with TemporaryDirectory() as folder:
        weights_check.save_plain(_real_model(check), Path(folder))
        measure = partial(weights_check.measure_checkpoint, Path(folder))
        settings = weights_check.checkpoint_settings().items()
        return check.measure_each("checkpoints", {name: partial(measure, of) for name, of in settings})


def healing_real(check: Check) -> dict[str, Any]:
    """Count the answers of `fast` and `exact` that are full prefill's."""
    from tests.gpu.serving_check import healed_answers

    texts = corpus()
    others = list(texts.values())[:4]
    asked = [(item.question, [*(texts[name] for name in item.documents), *others]) for item in questions()]
    return healed_answers(_real_model(check), asked, "cuda", "bfloat16")


def arrivals(check: Check) -> dict[str, Any]:
    """Serve requests that arrive at random, beside transformers' continuous batching."""
    from tests.gpu.serving_check import measure_arrivals

    return measure_arrivals(check.lm, 4096, 16, 64, 8.0)


def speed(check: Check) -> dict[str, Any]:
    """Run `python -m benchmarks speed`; its result is written as it comes."""
    options = speed_measurement.Options(
        context=",".join(map(str, check.contexts)),
        methods=",".join(METHODS),
        tiers="pinned,device",
        kv_dtype="model,int8",
        repeats=3,
        requests="1,8",
    )
    run, out = Run("speed"), check.out.parent / "speed.json"
    measure = speed_measurement.measure_model
    execute(run, lambda run: measure(check.lm, options, run), speed_measurement.report, str(out))
    return dict(speed_measurement.report(run).summary)


@dataclass(frozen=True, slots=True)
class Step:
    """A step, and the seconds that it may need."""

    run: Callable[[Check], dict[str, Any]]
    seconds: float


STEPS = (
    Step(versions, 5),
    Step(kernels, 60),
    Step(recorded_real, 40),
    Step(weights, 150),
    Step(weights_real, 60),
    Step(layers, 70),
    Step(engine, 45),
    Step(answers, 40),
    Step(checkpoints, 60),
    Step(loading, 80),
    Step(prefetching, 15),
    Step(healing_real, 60),
    Step(recorded, 30),
    Step(arrivals, 60),
    Step(speed, 130),
)


def main() -> int:
    """Run the steps; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--model", help="a real model; the default model if none is named")
    parser.add_argument("--steps", default=",".join(step.run.__name__ for step in STEPS))
    parser.add_argument("--contexts", default="4096,10240,32768", help="tokens of the prompts of `speed`")
    parser.add_argument("--device", default="cuda", help="device of `answers`; all else needs a GPU")
    parser.add_argument("--seconds", type=float, default=385)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="  %(message)s")
    logging.getLogger("qcfuse_rag").setLevel(logging.INFO)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    contexts = tuple(map(int, options.contexts.split(",")))
    check = Check(options.shape, options.out, options.model, contexts, options.device)
    end = time.perf_counter() + options.seconds
    return _run_steps(check, options.steps.split(","), end)


def _run_steps(check: Check, names: Sequence[str], end: float) -> int:
    failed = 0
    for step in (step for step in STEPS if step.run.__name__ in names):
        name, left, began = step.run.__name__, end - time.perf_counter(), time.perf_counter()
        print(f"== {name}", flush=True)
        if left < step.seconds:
            result: dict[str, Any] = {"left out": f"it may take {step.seconds:.0f} s, and {left:.0f} s are left"}
        else:
            try:
                result = {"found": step.run(check), "took_s": time.perf_counter() - began}
            except Exception as error:  # the next steps may tell why
                failed = 1
                result = {"failed": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        check.results[name] = result
        print(json.dumps(result, indent=1, default=str), flush=True)
        check.write()
    return failed


def _seconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
