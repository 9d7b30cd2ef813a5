"""The options of the commands, and their translation to those of the measurements."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from qcfuse_rag.bundled import default_model
from qcfuse_rag.engine.config import ModelConfig
from qcfuse_rag.models.source import WeightFormat

if TYPE_CHECKING:  # these take seconds to import
    from benchmarks.quality.measure import QualityOptions
    from benchmarks.speed.measure import SpeedOptions
    from benchmarks.speed.peer import PeerOptions

Repeats = Annotated[int, Option(min=1, help="Rounds of each measurement.")]
DiskFolder = Annotated[Path | None, Option(help="Folder on the disk to measure; by default that of temporary files.")]


@dataclass(frozen=True, kw_only=True)
class BenchSpeedOptions(ModelConfig):
    """Options of `python -m benchmarks speed`."""

    shape: Annotated[
        str | None, Option(help="Model shape with random weights, instead of a model: qwen3-8b, llama-3.1-8b, ...")
    ] = None
    context: Annotated[str, Option(help="Numbers of passage tokens, with commas.")] = "4096"
    methods: Annotated[str, Option(help=r"Methods, with commas; parameters as epic\[n_tokens=16].")] = "auto"
    ratios: Annotated[str, Option(help="Shares to recompute, with commas.")] = "0.05,0.1,0.2"
    tiers: Annotated[
        str,
        Option(
            help="Storage tiers: memory, device, pinned, disk, throttled; "
            "by default memory,disk and on a GPU pinned,device,disk."
        ),
    ] = ""
    numbers: Annotated[str, Option(help="Number formats of stored passages: model, int8, fp8; with commas.")] = "model"
    chunk: Annotated[int, Option(min=1, help="Tokens of a passage.")] = 512
    requests: Annotated[str, Option(help="Batch sizes to decode, with commas.")] = "1,4,8"
    throttle_mb: Annotated[float, Option(min=0.001, help="Megabytes a second of the throttled tier.")] = 1000
    folder: DiskFolder = None
    repeats: Repeats = 5
    out: Annotated[Path | None, Option(help="JSON file to write; Markdown and a picture go beside it.")] = None

    def to_speed_options(self) -> SpeedOptions:
        """Return the options of the measurement, with lists read from their texts."""
        from benchmarks.quality.configurations import configurations, split_names
        from benchmarks.speed.measure import SpeedOptions

        return SpeedOptions(
            contexts=_parse_counts(self.context, "--context"),
            methods=tuple(configurations(split_names(self.methods), _parse_shares(self.ratios))[1:]),
            tiers=tuple(split_names(self.tiers)),
            numbers=tuple(split_names(self.numbers)) or ("model",),
            chunk=self.chunk,
            repeats=self.repeats,
            requests=_parse_counts(self.requests, "--requests"),
            throttle=1e6 * self.throttle_mb,
            folder=self.folder,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPeerOptions:
    """Options of `python -m benchmarks peer`."""

    model: Annotated[Path | None, Option(help="GGUF file of the model; by default SmolLM2-135M.")] = None
    context: Annotated[
        int, Option(min=64, help="Tokens of the passages, which are documents of the demonstration.")
    ] = 2048
    methods: Annotated[str, Option(help="Methods beside full prefill, with commas.")] = "auto"
    ratios: Annotated[str, Option(help="Shares to recompute, with commas.")] = "0.05"
    answers: Annotated[str, Option(help="Lengths of the answers in tokens, with commas.")] = "32,128,512"
    weights: Annotated[WeightFormat, Option(help="Format of this engine's weights.")] = "auto"
    repeats: Repeats = 3

    def to_peer_options(self) -> PeerOptions:
        """Return the options of the measurement, with lists read from their texts."""
        from benchmarks.quality.configurations import configurations, split_names
        from benchmarks.speed.peer import PeerOptions

        return PeerOptions(
            gguf=self.model or Path(default_model()),
            methods=tuple(configurations(split_names(self.methods), _parse_shares(self.ratios))),
            context=self.context,
            answers=_parse_counts(self.answers, "--answers"),
            repeats=self.repeats,
            weights=self.weights,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchQualityOptions(ModelConfig):
    """Options of `python -m benchmarks quality`."""

    data_dir: Annotated[
        Path,
        Option(
            help="Folder of files DATASET.jsonl; each line is an object with `question`, `passages` (texts, or objects "
            "with `title` and `text`) and `answers` (texts), and perhaps `supporting` (indices of the passages with "
            "the answer) and `id`. The layouts of LongBench and of the QCFuse release are read too."
        ),
    ]
    dataset: Annotated[
        list[str], Option(help="Dataset, or several with commas; ruler_mv, ruler_mq and ruler_vt are generated.")
    ]
    out: Annotated[Path, Option("--json", help="JSON file to write; table, plots and records go beside it.")]
    methods: Annotated[
        list[str] | None,
        Option(help=r"Methods beside full prefill, with commas; parameters as epic\[n_tokens=16]; auto by default."),
    ] = None
    baseline: Annotated[list[str] | None, Option(help="Methods by their names in the QCFuse release.")] = None
    ratios: Annotated[str | None, Option(help="Shares to recompute, with commas; by default each method's own.")] = None
    bases: Annotated[
        str | None, Option(help="Stored caches: blind, framed, primed, begun, enriched; by default each method's own.")
    ] = None
    size: Annotated[int, Option(min=1, help="Questions of each dataset.")] = 100
    distractors: Annotated[
        int | None,
        Option(min=0, help="Passages beside those with the answer; all by default."),
    ] = None
    top_k: Annotated[int | None, Option(min=1, help="Number of first passages to keep; all by default.")] = None
    seed: Annotated[int, Option(help="Seed of generated tasks and of intervals.")] = 0
    max_new_tokens: Annotated[
        int | None, Option(min=1, help="Maximum tokens of an answer; by default 32, in RULER tasks their own.")
    ] = None
    ruler_tokens: Annotated[int, Option(min=64, help="Length of generated tasks.")] = 2048
    group: Annotated[int, Option(min=1, help="Number of questions whose passages are in memory together.")] = 20
    pool: Annotated[
        list[Path] | None, Option(help="JSON lines file to search the neighbours of enriched passages in.")
    ] = None
    neighbours: Annotated[int, Option(min=1, help="Neighbours of an enriched passage.")] = 10
    store: Annotated[Path | None, Option(help="Folder to keep passages in; memory by default.")] = None
    plots: Annotated[Path | None, Option(help="Folder of the plots; by default that of the result.")] = None

    def to_quality_options(self) -> QualityOptions:
        """Return the options of the measurement, with lists read from their texts."""
        from benchmarks.quality.configurations import split_names
        from benchmarks.quality.measure import QualityOptions
        from qcfuse_rag.library.folder import store_folder

        return QualityOptions(
            model=self.model or default_model(),
            data_dir=self.data_dir,
            datasets=tuple(split_names(",".join(self.dataset))),
            methods=tuple(split_names(",".join([*(self.methods or ()), *(self.baseline or ())]))) or ("auto",),
            out=self.out,
            ratios=_parse_shares(self.ratios or ""),
            bases=tuple(split_names(self.bases or "")),
            size=self.size,
            distractors=self.distractors,
            top_k=self.top_k,
            seed=self.seed,
            max_new_tokens=self.max_new_tokens,
            ruler_tokens=self.ruler_tokens,
            group=self.group,
            pool=tuple(self.pool or ()),
            neighbours=self.neighbours,
            store=None if self.store is None else store_folder(self.store),
            device=self.device,
            dtype=self.dtype,
            weights=self.weights or "model",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions(ModelConfig):
    """Options of `python -m benchmarks profile`."""

    data: Annotated[
        Path | None,
        Option(
            help="JSON lines file of questions, in the format of `python -m benchmarks quality --data-dir`; "
            "by default those of the demo."
        ),
    ] = None
    size: Annotated[int | None, Option(min=1, help="Number of questions to use; all by default.")] = None
    layers: Annotated[int, Option(min=1, help="Number of layers to choose.")] = 3
    depth_penalty: Annotated[float, Option(min=0.0, help="Penalty on the recall of deep layers.")] = 0.0
    unlabelled: Annotated[
        bool, Option("--unlabelled", help="Use questions without answers: leave passages out one by one.")
    ] = False
    distractors: Annotated[
        int | None, Option(min=0, help="Passages beside the needed passages; all of a file by default.")
    ] = None
    out: Annotated[Path | None, Option(help="File to write the profile to.")] = None
    store: Annotated[
        Path | None,
        Option(help="Folder of a library or of a store; the profile is kept in it for methods that read it."),
    ] = None
    plot: Annotated[Path | None, Option(help="Image file of the layers to draw.")] = None


def _parse_counts(text: str, option: str) -> tuple[int, ...]:
    """Read whole numbers with commas between them."""
    from benchmarks.quality.configurations import split_names

    try:
        return tuple(int(count) for count in split_names(text))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of whole numbers such as 1,4", param_hint=option) from None


def _parse_shares(text: str) -> tuple[float, ...]:
    """Read ratios with commas between them."""
    from benchmarks.quality.configurations import split_names

    try:
        return tuple(float(share) for share in split_names(text))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of numbers such as 0.05,0.2", param_hint="--ratios") from None
