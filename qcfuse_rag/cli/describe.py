"""Describe the fusion methods and models, and whether a model is supported: `qcfuse methods` and `qcfuse models`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from rich.table import Column, Table

from qcfuse_rag.bundled import default_model
from qcfuse_rag.cli.console import OUT, print_note, size
from qcfuse_rag.cli.library import passage_bytes
from qcfuse_rag.engine.config import EngineConfig
from qcfuse_rag.errors import UnsupportedModel
from qcfuse_rag.library.documents import PASSAGE_TOKENS
from qcfuse_rag.methods import METHODS, choose_method
from qcfuse_rag.models.source import named_adapter
from qcfuse_rag.runtime.attention.dispatch import dense_attention_name
from qcfuse_rag.runtime.kernels.support import unavailable_reason
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.key import Base
from qcfuse_rag.verification.exactness import measure_exactness

MODELS = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
}
"""Models for a user's own documents and their parameters, the smallest first; their licence is Apache 2.0."""


def describe_models() -> list[dict[str, Any]]:
    """Return the models with the bytes to download, and of their weights in memory on a GPU and in float32 on a CPU."""
    return [
        {"model": model, "parameters": count, "file_bytes": 2 * count, "gpu_bytes": 2 * count, "cpu_bytes": 4 * count}
        for model, count in MODELS.items()
    ]


def models_table() -> Table:
    """Return a table of the models."""
    heads = ("parameters", "download", "on a GPU", "on a CPU")
    table = Table(Column("model", no_wrap=True), *heads, title="Models for your own documents, by size and memory")
    for model in describe_models():
        sizes = (size(model[f"{kind}_bytes"]) for kind in ("file", "gpu", "cpu"))
        table.add_row(model["model"], f"{model['parameters'] / 1e9:.1f} billion", *sizes)
    return table


def describe_methods() -> list[dict[str, Any]]:
    """Return the name, paper, summary and default parameters of every method."""
    described = []
    for name, make in METHODS.items():
        module = inspect.getmodule(make)
        source = (inspect.getdoc(module) or "").splitlines()[0]
        parameters = {
            key: value.default.name if isinstance(value.default, Base) else value.default
            for key, value in inspect.signature(make).parameters.items()
        }
        summary = (inspect.getdoc(make) or "").splitlines()[0]
        described.append({"name": name, "source": source, "does": summary, "parameters": parameters})
    return described


def methods_table() -> Table:
    """Return a table of the methods."""
    table = Table("method", "what it does", "parameters", "source", title="Methods")
    for method in describe_methods():
        parameters = ", ".join(f"{key}={value}" for key, value in method["parameters"].items())
        table.add_row(method["name"], method["does"], parameters, method["source"])
    return table


BLOCK_ATTENTION = re.compile(r"block[-_ ]?(ft|att)", re.IGNORECASE)
"""Matches the names of checkpoints that were trained to read blocks (Block-Attention, arXiv 2409.15355)."""


def check_model(config: EngineConfig) -> dict[str, Any]:
    """Return JSON data on a model's exactness of reuse; it has a `reason` if the model is not `supported`."""
    name = config.model or default_model()
    try:
        lm = LanguageModel.load(name, device=config.device, dtype=config.dtype, weights=config.weights or "model")
        check = measure_exactness(lm)
    except UnsupportedModel as error:
        return {"model": name, "supported": False, "reason": str(error)}
    adapter, base, _ = named_adapter(name)
    caches = len(choose_method().bases)
    stored = passage_bytes(lm, [PASSAGE_TOKENS], caches)
    report: dict[str, Any] = {
        "model": name,
        "supported": check.passed,
        "adapter_of": base if adapter else None,
        "block_attention": BLOCK_ATTENTION.search(name) is not None,
        "architecture": type(lm.model).__name__,
        "layers": lm.n_layers + lm.n_sharing,
        "stored_layers": lm.n_layers,
        "recurrent_layers": len(lm.recurrent),
        "latent_layers": sum(shape.latent for shape in lm.shapes),
        "dtype": lm.fingerprint.dtype,
        "weight_format": lm.weight_format,
        "rope": sorted({rope.describe() for rope in lm.ropes}),
        "context_window": lm.context_window.tokens,
        "context_window_reason": lm.context_window.reason,
        "kv_bytes_per_token": lm.kv_bytes_per_token,
        "caches": caches,
        "stored_bytes_per_token": {name: taken / PASSAGE_TOKENS for name, taken in stored.items()},
        "kernels": unavailable_reason(lm.device, lm.dtype, lm.widest_head) or "used",
        "full_prefill_attention": dense_attention_name(lm.device, lm.dtype),
        "fingerprint": lm.fingerprint.fields(),
        "check": check.to_dict(),
    }
    if not check.passed:
        report["reason"] = "the engine's logits differ from those of the model's forward by more than its dtype allows"
    return report


def print_model_check(report: Mapping[str, Any]) -> None:
    """Print what `check_model` returned."""
    if not report["supported"]:
        print_note("not supported:", report["reason"], "red")
        return
    check = report["check"]
    dtype = report["dtype"] + ("" if report["weight_format"] == "model" else f", {report['weight_format']} weights")
    layers, stored = f"{report['layers']} layers", report["stored_layers"]
    if stored < report["layers"]:
        layers += f", of which {stored} are stored and the others read theirs"
    if recurrent := report["recurrent_layers"]:
        layers += f", of which {recurrent} are recurrent: stored are the inputs of their recurrences"
    if latent := report["latent_layers"]:
        layers += f", of which {latent} have latent attention: stored are latents and the rotary part of keys"
    OUT.print(f"[green]supported[/green]: {report['architecture']}, {layers}, {dtype}")
    if report["adapter_of"]:
        OUT.print(f"  adapter: merged into the weights of {report['adapter_of']}")
    if report["block_attention"]:
        OUT.print("  reads passages that were computed alone, by its name: --method reuse --base blind")
    OUT.print(f"  positions: {'; '.join(report['rope'])}")
    OUT.print(f"  context window: {report['context_window']:,} tokens ({report['context_window_reason']})")
    sizes = (f"{size(taken)} as {name}" for name, taken in report["stored_bytes_per_token"].items())
    OUT.print(f"  stored size per token, in {report['caches']} caches of each passage: {', '.join(sizes)}")
    OUT.print(f"  kernels: {report['kernels']}; attention of full prefill: {report['full_prefill_attention']}")
    OUT.print(f"  all rows against the model's own forward: {check['all_rows']:.2g}")
    OUT.print(f"  reused rows against caches computed in place: {check['question_rows']:.2g}")
    OUT.print(f"  a decode step against the plain forward: {check['step']:.2g}")
    OUT.print(f"  (largest logit difference in standard deviations; allowed {check['tolerance']:g})")
