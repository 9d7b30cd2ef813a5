"""Shared models and stores. Nothing here or in the tests reaches for the network."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import PreTrainedTokenizerFast
from typer.main import get_command

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore
from tests.support.cases import cases
from tests.support.cli import Run
from tests.support.engines import make_engine
from tests.support.families import MAIN_FAMILIES, build_model, build_tokenizer, chosen_families
from tests.support.passages import PASSAGES, QUESTION

TESTS = Path(__file__).parent
MARKED_FOLDERS = {
    "interpreter": ("runtime/kernels", "runtime/graphs", "runtime/fused_layers", "simulated"),
    "stress": ("stress",),
    "real": ("real",),
    "gpu": ("gpu",),
}
"""Folders whose tests all have a marker; see `markers` in pyproject.toml."""

torch.set_num_threads(1)  # tiny models: threads would only wait for one another


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests that ask for `family` or `family_name` once for each family that `--families` chooses.

    Tests that ask for `main_family` run on the main ones of these alone: what they test hardly depends on the family.
    The short suite runs them on a Llama.
    """
    chosen = chosen_families(metafunc.config.getoption("families"))
    if "family_name" in metafunc.fixturenames:
        metafunc.parametrize("family_name", chosen, scope="session")
    if "main_family_name" in metafunc.fixturenames:
        main = [name for name in chosen if name in MAIN_FAMILIES]
        metafunc.parametrize("main_family_name", cases(main or chosen, "llama"), scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folder, and begin with the longest, so that no worker is left alone with it at the end."""
    items.sort(key=lambda item: item.path.name != "test_first_hour.py")
    for item in items:
        folder = item.path.parent
        for marker, folders in MARKED_FOLDERS.items():
            if any(folder.is_relative_to(TESTS / name) for name in folders):
                item.add_marker(marker)


@pytest.fixture(scope="session", autouse=True)
def made_once() -> Iterator[None]:
    """Have the embedding model of a folder and the parser of commands made once, and not by every command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.main.get_command", cache(get_command))
        for name in ("AutoModel", "AutoTokenizer"):
            load = cache(getattr(transformers, name).from_pretrained)
            patch.setattr(f"qcfuse_rag.library.embedder.{name}", SimpleNamespace(from_pretrained=load))
        yield


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Let a test's commands, which silence the logs of their process, not silence those of the tests after it."""
    before = logging.root.manager.disable
    yield
    logging.disable(before)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(lambda: [*PASSAGES, QUESTION])


@pytest.fixture(scope="session")
def family(family_name: str, tokenizer: PreTrainedTokenizerFast) -> LanguageModel:
    """Return a tiny model of each family in turn."""
    return LanguageModel.wrap(build_model(family_name), tokenizer, name=family_name)


@pytest.fixture(scope="session")
def main_family(main_family_name: str, tokenizer: PreTrainedTokenizerFast) -> LanguageModel:
    """Return a tiny model of each main family in turn."""
    return LanguageModel.wrap(build_model(main_family_name), tokenizer, name=main_family_name)


@pytest.fixture(scope="session")
def llama(tokenizer: PreTrainedTokenizerFast) -> LanguageModel:
    return LanguageModel.wrap(build_model("llama"), tokenizer, name="llama")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a folder with a tiny Llama, as a user has one."""
    folder = tmp_path_factory.mktemp("model")
    build_model("llama", max_position_embeddings=2048).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def folder(tmp_path: Path, model_folder: str) -> Path:
    """Return a copy of `model_folder`, for a test that changes it."""
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


@pytest.fixture
def assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of cached results, which is this test's own; files count as settled at once."""
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", tmp_path / "assets")
    monkeypatch.setattr("qcfuse_rag.models.result_cache.SETTLED_S", 0.0)
    return tmp_path / "assets" / "qcfuse-rag"


@pytest.fixture
def engine(llama: LanguageModel) -> FusionEngine:
    """Return an engine over a tiny Llama and an empty store."""
    return make_engine(llama, MemoryStore())


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `qcfuse ...` and return exit code, standard output and standard error."""
    return Run(monkeypatch, capsys)


@pytest.fixture(scope="session")
def smollm2() -> LanguageModel:
    """Return the real SmolLM2-135M-Instruct that the demo uses."""
    from qcfuse_rag.bundled import default_model

    return LanguageModel.load(default_model(), device="cpu")


@pytest.fixture
def loaded_once(smollm2: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have everybody who loads the default model get the one that is there, as taking its file apart takes long."""
    from qcfuse_rag.bundled import default_model

    load = LanguageModel.load
    quick = lambda name, **rest: smollm2 if name == default_model() else load(name, **rest)  # noqa: E731
    monkeypatch.setattr(LanguageModel, "load", quick)


@pytest.fixture
def corpus_file(tmp_path: Path) -> Path:
    path = tmp_path / "harbour.md"
    path.write_text("\n\n".join(PASSAGES))
    return path
