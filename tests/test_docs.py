"""Documentation that stays true: examples run, tables are current, links lead somewhere."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import runpy
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from qcfuse_rag import METHODS
from qcfuse_rag import bundled as assets

ROOT = Path(__file__).parent.parent
PROJECTS = [ROOT, ROOT / "integrations" / "llama-index-llms-qcfuse", ROOT / "integrations" / "langchain-qcfuse"]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += [*sorted((ROOT / "integrations").glob("*/README.md")), ROOT / "notebooks" / "README.md"]
PAGES += sorted((ROOT / "integrations").glob("*/CHANGELOG.md")) + sorted((ROOT / "integrations").glob("*/docs/*.mdx"))
PAGES += sorted((ROOT / "benchmarks").rglob("*.md"))


def test_the_readme_shows_the_example_as_it_is() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert blocks == [(ROOT / "examples" / "llama_index_query_engine.py").read_text("utf-8")], "run `make docs`"


@pytest.fixture
def few_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the demonstration a few of its documents, with what the examples look for: prefilling takes the time."""
    wanted = ("23-merrin-hospital.md", "05-thornskerry-lighthouse.md", "09-tarrowin-school.md", "24-weather.md")
    few = {name: text for name, text in assets.corpus().items() if name in wanted}
    monkeypatch.setattr(assets, "corpus", lambda: few)


@pytest.fixture
def short_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the demonstration two questions and the beginnings of its documents, where nobody looks at answers."""
    short, two = {name: text[:400] for name, text in assets.corpus().items()}, assets.questions()[:2]
    monkeypatch.setattr(assets, "corpus", lambda: short)
    monkeypatch.setattr(assets, "questions", lambda: two)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_examples_run(
    example: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    loaded_once: None,
    few_documents: None,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
    assert "Quick Mercy" in capsys.readouterr().out


def test_generated_pages_are_current() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from generate import cli_page, methods_page
    finally:
        sys.path.pop(0)
    reference = ROOT / "docs" / "reference"
    methods = (reference / "methods.md").read_text("utf-8")
    assert methods_page(methods) == methods, "run `make docs`"
    assert all(f"| `{name}` |" in methods for name in METHODS)
    assert cli_page() == (reference / "cli.md").read_text("utf-8"), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text("utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("page", ["langchain-qcfuse/docs/qcfuse.mdx", "llama-index-llms-qcfuse/docs/qcfuse.ipynb"])
def test_the_pages_for_the_frameworks_sites_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], loaded_once: None
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "integrations" / page).read_text("utf-8")
    if page.endswith(".mdx"):
        blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    else:
        blocks = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    names: dict[str, object] = {}
    for block in blocks:
        exec(re.sub(r"^%pip .*", "", block), names)
    assert "Quick Mercy" in capsys.readouterr().out


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_links_of_a_published_readme_lead_to_the_repository(project: Path) -> None:
    settings = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))
    text = (project / "README.md").read_text("utf-8")
    for rule in settings["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    home, places = settings["project"]["urls"]["Homepage"], re.compile(r"/(?:blob|raw)/main/(.+)")
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("#")]
    assert links
    for link in links:
        found = places.fullmatch(link.removeprefix(home).partition("#")[0])
        assert found, link
        assert (ROOT / found[1]).exists(), link


def test_every_class_for_llama_index_is_named_for_its_hub() -> None:
    settings = tomllib.loads((PROJECTS[1] / "pyproject.toml").read_text("utf-8"))
    package = import_module(settings["tool"]["llamahub"]["import_path"])
    classes = {name for name in package.__all__ if isinstance(getattr(package, name), type)} - {"FusionEndEvent"}
    assert settings["tool"]["llamahub"]["class_authors"].keys() == classes


def test_the_readmes_commands_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    named = set(re.findall(r"\bmake ([\w-]+)", (ROOT / "README.md").read_text("utf-8")))
    assert {"demo", "test"} <= named
    assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in named)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("notebook", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_run_and_carry_their_outputs(
    notebook: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    loaded_once: None,
) -> None:
    if os.environ.get("QCFUSE_STRESS") != "full":
        if notebook.stem not in ("what_is_recomputed", "your_own_method"):
            pytest.skip("takes minutes, and the examples do the same: make drop-in")
        request.getfixturevalue("short_documents")
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = [cell for cell in json.loads(notebook.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in cells)
    assert not any(output["output_type"] == "error" for cell in cells for output in cell["outputs"])
    names: dict[str, object] = {}
    for cell in cells:
        code = compile("".join(cell["source"]), notebook.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if asyncio.iscoroutine(cell_with_await := eval(code, names)):
            asyncio.run(cell_with_await)
