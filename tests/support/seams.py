"""Every name in the package that tests replace, once, under a name that says what it is.

Call a seam with a `MonkeyPatch` and the replacement: `seams.ring_bytes(monkeypatch, 1 << 13)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import pytest


@dataclass(frozen=True)
class Seam:
    """A function, class or constant of the package, by the dotted name of every module that uses it."""

    names: tuple[str, ...]

    def __call__(self, patch: pytest.MonkeyPatch, replacement: Any) -> None:
        for name in self.names:
            patch.setattr(name, replacement)

    @property
    def original(self) -> Any:
        """What stands there until it is replaced; imported only now, as there may be no Triton."""
        module, _, attribute = self.names[0].rpartition(".")
        return resolve_name(f"{module}:{attribute}")


def _seam(*names: str) -> Seam:
    return Seam(names)


rotation_angles = _seam("qcfuse_rag.models.rope.angles")

mapped_file = _seam("qcfuse_rag.store.backends.disk.MappedFile")
opened_index = _seam("qcfuse_rag.store.backends.disk.open_index")
disk_index = _seam("qcfuse_rag.store.backends.index.Index")
template_trial_s = _seam("qcfuse_rag.prompts.chat_template.TRIAL_S")
remote_answer_s = _seam("qcfuse_rag.store.backends.remote.ANSWER_S")
redis_scan_batch = _seam("qcfuse_rag.store.backends.redis_blobs.SCAN_BATCH")
manifest_connection = _seam("qcfuse_rag.store.documents.sources.sqlite3.connect")
populate_flag = _seam("qcfuse_rag.store.entry.codec.MADV_POPULATE_READ")

measured_passes = _seam("qcfuse_rag.runtime.cost.measure_passes")
measured_loading = _seam("qcfuse_rag.runtime.cost.measure_loading")
timed_gpu_rows = _seam("qcfuse_rag.runtime.cost.GPU_ROWS")
overlaps = _seam("qcfuse_rag.runtime.cost.overlaps")
timed_pass = _seam("qcfuse_rag.runtime.cost.prefill_once")
fastest_run = _seam("qcfuse_rag.runtime.cost.fastest_s")
costs_have_kernels = _seam("qcfuse_rag.runtime.cost.kernels_available")
costs_of_attention = _seam("qcfuse_rag.runtime.cost.dense_attention_name")
reference_least_rows = _seam("qcfuse_rag.runtime.reference_attention.MIN_ROWS")
hooked_layer = _seam("qcfuse_rag.runtime.model_views.HookedLayer")
bytes_ahead = _seam("qcfuse_rag.runtime.loading.layer_loader.AHEAD_BYTES")
growth_of_transfers = _seam("qcfuse_rag.runtime.loading.layer_loader.GROWTH")
ring_bytes = _seam("qcfuse_rag.runtime.loading.host_to_device.RING_BYTES")
transfer = _seam("qcfuse_rag.runtime.language_model.LanguageModel.transfer")

steps_have_kernels = _seam("qcfuse_rag.runtime.forward.kernels_available")
engine_has_kernels = _seam(
    "qcfuse_rag.runtime.kernels.support.kernels_available",
    "qcfuse_rag.runtime.runner.kernels_available",
    *steps_have_kernels.names,
)
placement_support = _seam(
    "qcfuse_rag.runtime.loading.sources.supports_placement", "qcfuse_rag.runtime.loading.slab_source.supports_placement"
)
kernel_refusal = _seam("qcfuse_rag.runtime.kernels.support.unavailable_reason")
kernel_check_rows = _seam("qcfuse_rag.runtime.kernels.support.ROWS")
kernel_check_tokens = _seam("qcfuse_rag.runtime.kernels.support.TOKENS")
KERNELS = {
    "attention": _seam("qcfuse_rag.runtime.kernels.sparse_attention.sparse_attention"),
    "by table": _seam("qcfuse_rag.runtime.kernels.table_attention.table_attention"),
    "append": _seam("qcfuse_rag.runtime.kernels.table_attention.append_rows"),
    "score": _seam("qcfuse_rag.runtime.kernels.context_score.context_scores"),
    "place": _seam("qcfuse_rag.runtime.kernels.placement.launch_table"),
}
"""Functions that launch kernels, by what tests call them."""

recorder_has_kernels = _seam("qcfuse_rag.runtime.graphs.recorder.kernels_available")
recorder_refusal = _seam("qcfuse_rag.runtime.graphs.recorder.unavailable_reason")
fused_model = _seam("qcfuse_rag.runtime.language_model.fused_view")
decode_trial_lengths = _seam("qcfuse_rag.runtime.graphs.steps.CHECKED_POSITIONS")

batches_per_group = _seam("qcfuse_rag.ingestion.batches.BATCHES_PER_GROUP")
primer_prefill = _seam("qcfuse_rag.ingestion.prefill.prefill_chunk")
enrichment_prefill = _seam("qcfuse_rag.methods.fusionrag.prefill_chunks")

sampler = _seam("qcfuse_rag.engine.engine.Sampler")
verdict_check = _seam("qcfuse_rag.engine.engine.require_verdict")
kept_bytes = _seam("qcfuse_rag.verification.sweep.CACHED_BYTES")
verified_answers = _seam(
    "qcfuse_rag.verification.sweep.greedy_answers", "qcfuse_rag.verification.divergence.greedy_answers"
)
checked_segment_tokens = _seam("qcfuse_rag.verification.exactness._segment_tokens")
shadow_prefill = _seam("qcfuse_rag.verification.watch.fuse_prompt")
spare_connections = _seam("qcfuse_rag.server.serve.SPARE_CONNECTIONS")
demo_corpus = _seam("qcfuse_rag.cli.demo.corpus")
pause_between_sides = _seam("benchmarks.peer.WAIT_S")
measured_ceilings = _seam("benchmarks.speed.measure_ceilings")
nearest_passages = _seam("benchmarks.preparation.embedded_neighbours")


def large_blocks(patch: pytest.MonkeyPatch) -> None:
    """Have programs take as many rows, keys and tokens as tests have: the interpreter is slow by programs."""
    from qcfuse_rag.runtime.kernels.launch import Tile

    for module in ("sparse_attention", "context_score"):
        patch.setattr(f"qcfuse_rag.runtime.kernels.{module}.default_tile", lambda *_: Tile(64, 64))
    patch.setattr("qcfuse_rag.runtime.kernels.table_attention.ROWS_PER_PROGRAM", 64)
    patch.setattr("qcfuse_rag.runtime.kernels.placement.TOKENS_PER_PROGRAM", 64)


def passes_take(patch: pytest.MonkeyPatch, seconds: Callable[[int], float]) -> None:
    """Have measured passes take a time that follows from their rows, and compute nothing."""
    rows: list[int] = []

    def fastest_s(device: object, work: Callable[[], object], samples: int) -> float:
        rows.clear()
        work()
        return seconds(rows[0]) if rows else 1e-6

    timed_pass(patch, lambda lm, tokens: rows.append(tokens))
    fastest_run(patch, fastest_s)
