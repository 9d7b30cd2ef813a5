"""Methods are imported when they are asked for by name, and other packages register theirs by entry points."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from qcfuse_rag import METHODS, FusionEngine, make_method
from qcfuse_rag.errors import UnknownMethod
from qcfuse_rag.methods import choose_method, find_base
from qcfuse_rag.store.key import FRAMED
from tests.support.passages import PASSAGES, QUESTION

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the package that CONTRIBUTING shows, as pip would, with a base of its own; and one that is broken."""
    [toml, method] = re.findall(
        r"```(?:toml|python)\n(.*?)```",
        CONTRIBUTING.read_text().partition("### In a package of your own")[2],
        re.DOTALL,
    )[:2]
    [(name, value)] = re.findall(r'^(\w+) = "(.+)"$', toml, re.MULTILINE)
    (tmp_path / "shortest_method.py").write_text(method)
    (tmp_path / "other_base.py").write_text(
        'from qcfuse_rag.store.key import Base\nQUOTED = Base("quoted", after_prefix=True)\n'
    )
    (tmp_path / "broken_method.py").write_text("import a_module_that_is_not_there\n")
    (tmp_path / "wrong_method.py").write_text("def wrong(): return 7\n")
    for package, points in {
        "shortest": f"[qcfuse_rag.methods]\n{name} = {value}\n[qcfuse_rag.bases]\nquoted = other_base:QUOTED\n",
        "broken": "[qcfuse_rag.methods]\nbroken = broken_method:broken\nwrong = wrong_method:wrong\nauto = x:y\n",
    }.items():
        folder = tmp_path / f"{package}_package-1.2.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}-package\nVersion: 1.2\n")
        (folder / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_an_installed_packages_method_is_found_by_its_name(installed: Path, engine: FusionEngine) -> None:
    assert "shortest" in METHODS
    assert next(iter(METHODS)) == "auto", "ours come first"
    engine.warm(PASSAGES, bases=(FRAMED,))
    prompt = engine.prompt(QUESTION, PASSAGES)
    report = engine.prefill(prompt, method=choose_method("shortest", ratio=0.3)).report
    shortest = min(prompt.chunks[1:], key=len)
    assert report.method == "shortest"
    assert set(report.selected) & set(range(shortest.start, shortest.stop))
    assert find_base("quoted").name == "quoted"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "broken",
            r"method 'broken' of package broken-package 1\.2 cannot be imported \(ModuleNotFoundError: .*uninstall",
        ),
        ("wrong", "the function of method 'wrong' in wrong_method returns no Method"),
        ("shorter", "there is no method 'shorter'; there are auto, .*, shortest"),
    ],
)
def test_a_broken_package_is_one_clear_error(installed: Path, name: str, message: str) -> None:
    with pytest.raises(UnknownMethod, match=message):
        make_method(name)
    assert make_method("auto").name == "auto", "no package replaces a method of ours"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("framd", "no base 'framd'; there are blind, framed, primed, begun, enriched"),
        ("blind+best", "no ranking 'best'"),
    ],
)
def test_an_unknown_base_is_one_clear_error(name: str, message: str) -> None:
    with pytest.raises(UnknownMethod, match=message):
        find_base(name)


@pytest.mark.slow
def test_auto_imports_no_other_method() -> None:
    code = (
        "import sys; from qcfuse_rag import FusionEngine, choose_method; choose_method(); "
        "print(*sorted(name for name in sys.modules if name.startswith('qcfuse_rag.methods.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["qcfuse_rag.methods.auto"]
