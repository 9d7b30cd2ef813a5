"""`python -m benchmarks profile`: find the critical layers of a model and save them where the engine reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rich.table import Table

from benchmarks.options import ProfileOptions
from benchmarks.profile.layer_profile import LayerProfile
from benchmarks.profile.measure import profile_layers
from benchmarks.quality.tables import new_figure
from benchmarks.questions import demo_samples, read_samples
from benchmarks.samples import Sample
from qcfuse_rag.cli.console import ERR, OUT, print_json, print_line, progress_bar, status
from qcfuse_rag.cli.library import with_settings
from qcfuse_rag.engine.config import EngineConfig
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.library.folder import existing_store_folder
from qcfuse_rag.library.settings import LibrarySettings
from qcfuse_rag.methods.qcfuse.layers import PROFILE_FILE, layers_by_depth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEMO_DISTRACTORS = 3
BAR = 24


def run_profile(options: ProfileOptions, *, as_json: bool) -> None:
    """Profile a model, print its layers, and write the profile to the requested files."""
    config = EngineConfig(model=options.model, device=options.device, dtype=options.dtype, weights=options.weights)
    if options.store is not None:
        config = with_settings(config, LibrarySettings.load(options.store))
    samples = _samples(options)
    figure = (
        None if options.plot is None else new_figure(7, 3)
    )  # before the work, so that a missing library fails early
    in_store = None if options.store is None else existing_store_folder(options.store) / PROFILE_FILE
    written = [path for path in (options.out, in_store) if path is not None]
    with status("loading the model"):
        engine = FusionEngine.load(replace(config, method=None, base=None))
    with engine, engine.store, progress_bar("profiling layers", "questions") as advance:
        profile = profile_layers(
            engine,
            samples,
            layers=options.layers,
            depth_penalty=options.depth_penalty,
            labelled=not options.unlabelled,
            progress=advance,
        )
    for path in written:
        profile.save(path)
    if options.plot is not None and figure is not None:
        _draw(profile, *figure).savefig(options.plot)
    if as_json:
        print_json({**profile.to_dict(), "written": [str(path) for path in written]})
        return
    OUT.print(to_table(profile))
    for reason, count in profile.skipped.items():
        ERR.print(f"[yellow]{count} questions skipped[/yellow]: {reason}")
    if not written:
        ERR.print(
            "the profile was not saved; --store FOLDER saves it in a store for the engine, --out FILE in any file"
        )
    for path in written:
        print_line(f"wrote {path}")


def to_table(profile: LayerProfile) -> Table:
    """Return a table of the recall of each layer; a star marks chosen layers, a dot the default layers by depth."""
    by_depth = layers_by_depth(len(profile.recall))
    highest = max(profile.recall) or 1.0
    chosen, default = (_describe_layers(profile, layers) for layers in (profile.layers, by_depth))
    table = Table(
        "layer",
        "recall",
        "",
        "",
        title=f"Recall@10 % of {'the answers' if profile.labels == 'answers' else 'the decisive passages'}, "
        f"{profile.samples} questions",
        caption=f"* chosen: {chosen}\n· by depth: {default}",
    )
    for layer, value in enumerate(profile.recall):
        mark = ("*" if layer in profile.layers else " ") + ("·" if layer in by_depth else " ")
        table.add_row(str(layer), f"{value:.3f}", "█" * round(BAR * value / highest), mark)
    return table


def _describe_layers(profile: LayerProfile, layers: tuple[int, ...]) -> str:
    mean = sum(profile.recall[layer] for layer in layers) / len(layers)
    return f"{', '.join(map(str, layers))}; mean recall {mean:.3f}"


def _samples(options: ProfileOptions) -> list[Sample]:
    """Return the selected questions, with the selected number of distractor passages."""
    if options.data is None:
        distractors = DEMO_DISTRACTORS if options.distractors is None else options.distractors
        return demo_samples(distractors)[: options.size]
    samples = read_samples(options.data)[: options.size]
    if options.distractors is None:
        return samples
    if options.unlabelled and not all(sample.supporting for sample in samples):
        raise QCFuseError(
            "with --unlabelled, --distractors needs questions that say which passages are `supporting`; leave it out"
        )
    return [sample.with_distractors(options.distractors) for sample in samples]


def _draw(profile: LayerProfile, figure: Figure, axes: Axes) -> Figure:
    colours = ["C1" if layer in profile.layers else "C0" for layer in range(len(profile.recall))]
    axes.bar(range(len(profile.recall)), profile.recall, color=colours)
    axes.set(xlabel="layer", ylabel="Recall@10 %", title=f"critical layers: {', '.join(map(str, profile.layers))}")
    return figure
