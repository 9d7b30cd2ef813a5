"""Whole answers beside llama.cpp: the same weights, token ids, numbers of tokens and threads, in turns.

llama.cpp runs with its quickest settings on the machine: of the given file and the same weights in other formats, with
flash attention and without, those are compared whose prompt is computed soonest. It reuses the beginning that a prompt
shares with the request before, and with cache reuse also shifted parts of it (`n_cache_reuse` of its server).

It is used by its package xllamacpp, or by programs that were built for this processor: `llama-server`, and
`llama-bench`, whose own figures stand beside the others then.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize
from torch import Tensor
from typer import Option

from benchmarks.configurations import FULL, Configuration, configurations, split_names
from benchmarks.options import Methods, Ratios, Repeats, counts, shares
from benchmarks.runner import Record, Report, Run, Table, about_model, machine_conditions
from qcfuse_rag.bundled import corpus, default_model, questions
from qcfuse_rag.cli.console import ERR, print_line
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.generation.completion import end_tokens
from qcfuse_rag.generation.decoding import TextStream
from qcfuse_rag.generation.sampling import Sampler
from qcfuse_rag.generation.sampling_params import SamplingParams
from qcfuse_rag.runtime.language_model import LanguageModel

SPARE_TOKENS = 64  # context of llama.cpp beyond the prompt and the longest answer
REUSE_TOKENS = 64  # smallest shifted part that llama.cpp reuses, where it does
BATCHES = (512, 2048)  # tokens of llama.cpp's passes; the first is its default
QUANTIZED = {name: GGMLQuantizationType[name.upper()] for name in ("q8_0", "q4_0", "bf16")}
WAIT_S = 1.0  # pause after a side, in which its worker threads come to rest
PORT = 8917  # of `llama-server`
START_S = 60.0

Ids = Sequence[int]
Complete = Callable[[dict[str, Any]], Record]
"""Answers a request in the form of OpenAI's completions."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the measurement."""

    model: Annotated[Path | None, Option(help="GGUF file of the model; by default SmolLM2-135M.")] = None
    context: Annotated[
        int, Option(min=64, help="Tokens of the passages, which are documents of the demonstration.")
    ] = 1024
    methods: Methods = "auto"
    ratios: Ratios = "0.05"
    answers: Annotated[str, Option(help="Lengths of the answers in tokens, with commas.")] = "32,128"
    formats: Annotated[str, Option(help="Formats of llama.cpp's weights, with commas: file is the given one.")] = (
        "file,q8_0,q4_0,bf16"
    )
    llama_cpp: Annotated[
        Path | None, Option(help="Folder of llama-server and llama-bench, built for this processor; else xllamacpp.")
    ] = None
    weights: Annotated[str, Option(help="Format of this engine's weights.")] = "auto"
    repeats: Repeats = 2

    def sides(self) -> list[Configuration]:
        """Return full prefill and the methods at their ratios."""
        return configurations(split_names(self.methods), shares(self.ratios))


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids of the prompt to measure, and of other questions over its passages that llama.cpp answered before."""

    measured: Ids
    same_order: Ids
    other_order: Ids


def measure(options: Options, run: Run) -> None:
    """Time answers of each length on every side in turns.

    Answers do not end before their length: end tokens are not chosen. A first token's time is that of an answer of one
    token.
    """
    gguf, lengths, methods = options.model or Path(default_model()), counts(options.answers), options.sides()
    if gguf.suffix != ".gguf":
        raise QCFuseError(f"llama.cpp needs a GGUF file, and {gguf} is none")
    if not lengths or min(lengths) < 2:
        raise QCFuseError("answers need at least 2 tokens, or there is no step to time")
    formats = split_names(options.formats)
    if unknown := set(formats) - {"file", *QUANTIZED}:
        raise QCFuseError(f"no format of weights: {', '.join(unknown)}; file, {', '.join(QUANTIZED)} are known")
    if options.llama_cpp is None:
        _xllamacpp()
    elif not (options.llama_cpp / "llama-server").exists():
        raise QCFuseError(f"{options.llama_cpp} holds no llama-server; see benchmarks/README.md")
    with FusionEngine.load(str(gguf), device="cpu", weights=options.weights, prefix_bytes=0) as engine:
        texts, prompts = _prompts(engine, options.context)
        about = {**about_model(engine.lm), "prompt_tokens": len(prompts.measured)}
        about["llama.cpp"] = _system_info(options.llama_cpp, gguf)
        conditions = {"context": options.context, "llama.cpp": about["llama.cpp"]}
        run.begin(about, {**machine_conditions(engine.lm), **conditions})
        engine.warm(texts, bases=tuple(dict.fromkeys(base for side in methods for base in side.method.bases)))
        room = len(prompts.measured) + max(lengths) + SPARE_TOKENS
        with TemporaryDirectory() as folder:
            files = {name: gguf if name == "file" else requantized(gguf, name, Path(folder)) for name in formats}
            server_of = _server_here if options.llama_cpp is None else partial(_server_program, options.llama_cpp)
            start = partial(server_of, context=room)
            name, flash, batch = _quickest(run, files, prompts.measured, start)
            with start(files[name], flash=flash, batch=batch) as server:
                for done, length in enumerate(sorted({1, *lengths}), 1):
                    sides = _engine_sides(engine, texts, methods, length) | _peer_sides(server, prompts, length)
                    if options.llama_cpp is not None:
                        bench = options.llama_cpp / "llama-bench"
                        sides["llama-bench"] = partial(
                            _llama_bench, bench, files[name], len(prompts.measured), length, flash=flash, batch=batch
                        )
                    run.take_turns(("answer", length), {(side,): call for side, call in sides.items()}, options.repeats)
                    found = {side: each["seconds"] for (n, side, _), each in run.of("answer") if n == length}
                    print_line(f"{length} tokens: " + "; ".join(f"{side} {s:.2f} s" for side, s in found.items()), ERR)
                    run.progress(done, len(lengths) + 1)


def requantized(gguf: Path, name: str, folder: Path) -> Path:
    """Write a GGUF file's weights in another format; vectors and rows that no block divides keep theirs.

    Returns:
        The new file, in the folder.
    """
    target, wanted = folder / f"{name}.gguf", QUANTIZED[name]
    reader = GGUFReader(gguf)
    writer = GGUFWriter(target, reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
            sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub_type)
    for tensor in reader.tensors:
        data, kind = tensor.data, tensor.tensor_type
        if len(tensor.shape) == 2 and tensor.shape[0] % GGML_QUANT_SIZES[wanted][0] == 0:
            data, kind = quantize(dequantize(data, kind), wanted), wanted
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _quickest(run: Run, files: Mapping[str, Path], ids: Ids, start: Callable[..., Any]) -> tuple[str, bool, int]:
    """Return the format, the use of flash attention and the batch with which llama.cpp's first token comes soonest."""
    for name, file in files.items():
        for flash, batch in product((False, True), BATCHES):
            if (key := ("settings", name, flash, batch)) not in run.records:
                with start(file, flash=flash, batch=batch) as server:
                    _complete(server, ids, 1, keep=False, reuse=0)  # reads the weights
                    time.sleep(WAIT_S)
                    started = time.perf_counter()
                    _complete(server, ids, 1, keep=False, reuse=0)
                    run.add(key, {"seconds": time.perf_counter() - started})
                del server  # ends xllamacpp's
    tried = [(key, record) for key, record in run.of("settings") if key[0] in files]
    quickest = min(tried, key=lambda pair: pair[1]["seconds"])[0]
    return str(quickest[0]), bool(quickest[1]), int(str(quickest[2]))


def report(run: Run) -> Report:
    """Return the median seconds of each side; a step's time is that between the longest answer and the first token."""
    times: dict[str, dict[int, list[float]]] = {}
    for (length, side, _), record in run.of("answer"):
        times.setdefault(str(side), {}).setdefault(int(str(length)), []).append(record["seconds"])
    lengths = sorted({length for by_length in times.values() for length in by_length} - {1})
    rows: list[Record] = []
    for side, by_length in times.items():
        middle = {length: median(values) for length, values in by_length.items()}
        longest, first_s = max(middle), middle.get(1)
        step_s = (middle[longest] - first_s) / (longest - 1) if first_s is not None and longest > 1 else None
        answer_s = {str(length): seconds for length, seconds in middle.items() if length > 1}
        rows.append({"side": side, "first_token_s": first_s, "step_s": step_s, "answer_s": answer_s})
    about = run.about
    title = f"{about['model']}, {about['prompt_tokens']:,} tokens, {about['threads']} threads, ours in {about['dtype']}"
    cells = [
        [
            row["side"],
            "" if row["first_token_s"] is None else f"{row['first_token_s']:.2f} s",
            "" if row["step_s"] is None else f"{1000 * row['step_s']:.1f} ms",
            *(f"{row['answer_s'][str(n)]:.2f} s" if str(n) in row["answer_s"] else "" for n in lengths),
        ]
        for row in rows
    ]
    names = ["side", "first token", "a token after", *(f"{length} tokens" for length in lengths)]
    settings = [
        [str(name), "on" if flash else "off", str(batch), f"{record['seconds']:.2f} s"]
        for (name, flash, batch), record in run.of("settings")
    ]
    tables = [Table("llama.cpp's settings", ["weights", "flash attention", "batch", "first token"], settings)]
    return Report({"rows": rows}, [*(tables if settings else []), Table(title, names, cells)])


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
) -> dict[str, Callable[[], Record]]:
    prompt = engine.prompt(questions()[0].question, texts)
    # Answers beyond their end repeat themselves, and candidates of prompt lookup would be right too often.
    params = SamplingParams(max_new_tokens=length, prompt_lookup_num_tokens=0)

    def answer(configuration: Configuration) -> Record:
        time.sleep(WAIT_S)
        started = time.perf_counter()
        prefilled = engine.prefill(prompt, method=configuration.method.unguarded, answer_tokens=length)
        generation = TextStream(engine.runner, prefilled, params, sampler=_EndlessSampler(params, engine.lm)).result()
        assert len(generation.ids) == length
        return {"seconds": time.perf_counter() - started}

    return {_side_name(side): partial(answer, side) for side in methods}


def _side_name(side: Configuration) -> str:
    return side.label if side.label == FULL or side.ratio is None else f"{side.label}, {100 * side.ratio:g} %"


def _peer_sides(server: Complete, prompts: Prompts, length: int) -> dict[str, Callable[[], Record]]:
    def answer(before: Ids | None, reuse: int) -> Record:
        if before is not None:
            _complete(server, before, 1, keep=True, reuse=reuse)
        time.sleep(WAIT_S)
        started = time.perf_counter()
        _complete(server, prompts.measured, length, keep=before is not None, reuse=reuse)
        return {"seconds": time.perf_counter() - started}

    return {
        "llama.cpp, nothing kept": partial(answer, None, 0),
        "llama.cpp, after the same order": partial(answer, prompts.same_order, 0),
        "llama.cpp, after another order": partial(answer, prompts.other_order, 0),
        "llama.cpp, after another order, cache reuse": partial(answer, prompts.other_order, REUSE_TOKENS),
    }


def _complete(complete: Complete, ids: Ids, length: int, *, keep: bool, reuse: int) -> None:
    answer = complete(
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
        raise QCFuseError("a comparison with llama.cpp needs xllamacpp: pip install 'qcfuse-rag[bench]'") from error


def _system_info(programs: Path | None, gguf: Path) -> str:
    """Return the processor's instructions that llama.cpp uses."""
    if programs is None:
        return str(_xllamacpp().get_system_info()).strip()
    command = [str(programs / "llama-server"), "-m", str(gguf), "--verbosity", "4", "--port", str(PORT)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = next((line for line in process.stderr if "system_info" in line), "")
        process.terminate()
    return line.partition("system_info: ")[2].strip()


@contextmanager
def _server_here(gguf: Path, *, context: int, flash: bool, batch: int) -> Iterator[Complete]:
    """Start xllamacpp's server in this process; yield what answers requests."""
    xllamacpp = _xllamacpp()
    params, attention = xllamacpp.CommonParams(), xllamacpp.llama_flash_attn_type
    params.model.path = str(gguf)
    params.n_ctx = context
    params.n_batch = params.n_ubatch = batch
    params.flash_attn_type = (
        attention.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else attention.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    params.n_parallel = 1
    params.cache_ram_mib = 0  # it would keep the caches of earlier requests, and so those that must not be kept
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
    params.verbosity = 0
    yield xllamacpp.Server(params).handle_completions


@contextmanager
def _server_program(programs: Path, gguf: Path, *, context: int, flash: bool, batch: int) -> Iterator[Complete]:
    """Start `llama-server`; yield what answers requests."""
    threads = torch.get_num_threads()
    values = {"-m": gguf, "-c": context, "-b": batch, "-ub": batch, "-t": threads, "-fa": "on" if flash else "off"}
    fixed = ["-np", "1", "--cache-ram", "0", "--log-disable", "--port", str(PORT)]
    command = [str(programs / "llama-server"), *(str(part) for pair in values.items() for part in pair), *fixed]
    with subprocess.Popen(command) as process, httpx.Client(base_url=f"http://127.0.0.1:{PORT}") as client:
        try:
            _await_health(process, client)
            yield lambda request: dict(client.post("/v1/completions", json=request, timeout=None).json())
        finally:
            process.terminate()


def _await_health(process: subprocess.Popen[bytes], client: httpx.Client) -> None:
    for _ in range(int(START_S / 0.1)):
        time.sleep(0.1)
        if process.poll() is not None:
            break
        try:
            if client.get("/health").is_success:
                return
        except httpx.TransportError:
            continue  # it does not listen yet
    raise QCFuseError("llama-server does not start; run it by hand to see why")


def _llama_bench(program: Path, gguf: Path, tokens: int, length: int, *, flash: bool, batch: int) -> Record:
    """Return llama-bench's own seconds for a prompt of so many tokens and an answer."""
    what = ["-p", tokens, "-n", 0] if length == 1 else ["-p", 0, "-n", 0, "-pg", f"{tokens},{length - 1}"]
    settings = ["-b", batch, "-ub", batch, "-t", torch.get_num_threads(), "-fa", int(flash)]
    command = [program, "-m", gguf, "-r", 1, "-o", "json", *what, *settings]
    time.sleep(WAIT_S)
    output = subprocess.run([str(part) for part in command], check=True, capture_output=True).stdout
    return {"seconds": json.loads(output)[0]["avg_ns"] / 1e9}


class _EndlessSampler(Sampler):
    """Never chooses an end token, so that answers have the length asked for."""

    def __init__(self, params: SamplingParams, lm: LanguageModel) -> None:
        super().__init__(params, lm)
        self._excluded = torch.tensor(sorted(end_tokens(lm)), dtype=torch.int64)

    def __call__(self, logits: Tensor, prompt: Ids = (), answer: Ids = ()) -> int:
        """Choose another token than an end token; see `Sampler`."""
        return super().__call__(logits.index_fill(0, self._excluded, float("-inf")), prompt, answer)
