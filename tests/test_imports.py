"""What importing costs: no framework in the core, nothing heavy until it is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import qcfuse_rag


def modules_after(statement: str) -> set[str]:
    program = f"{statement}\nimport sys; print(); print(' '.join({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert modules_after("import qcfuse_rag") & {"torch", "transformers", "numpy", "diskcache"} == set()


@pytest.mark.slow
def test_the_core_imports_no_framework() -> None:
    everything = "import qcfuse_rag, qcfuse_rag.integrations\nfor name in qcfuse_rag.__all__: getattr(qcfuse_rag, name)"
    loaded = modules_after(everything)
    assert "torch" in loaded
    others = {"llama_index", "langchain_core", "langchain", "sentence_transformers", "ray", "fastapi", "llguidance"}
    assert loaded & others == set()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["stats", "sources"])
def test_looking_after_a_store_does_not_wait_for_models_to_be_imported(command: str, tmp_path: Path) -> None:
    qcfuse_rag.DiskStore(tmp_path / "kv").close()
    arguments = ["store", command, "--store", str(tmp_path)]
    program = f"import sys; from qcfuse_rag.cli.app import app; sys.argv[1:] = {arguments}"
    loaded = modules_after(f"{program}\ntry: app()\nexcept SystemExit as end: assert not end.code")
    assert "typer" in loaded
    assert loaded & {"transformers", "sentence_transformers"} == set()


ASK = """
import gc, sys
from qcfuse_rag.cli.app import main
sys.argv[1:] = ["ask", "Who?", "--store", {folder!r}]
count = lambda: sum(each["collections"] for each in gc.get_stats())
before = count()
try: main()
except SystemExit as end: assert end.code == 1
print(count() - before, gc.isenabled(), gc.get_freeze_count())
"""


@pytest.mark.slow
def test_a_question_waits_neither_for_training_packages_nor_for_garbage_collection(tmp_path: Path) -> None:
    program = ASK.format(folder=str(tmp_path))  # a folder without passages: an error behind the imports
    done = subprocess.run(
        [sys.executable, "-c", f"{program}print(' '.join(sys.modules))"], capture_output=True, text=True, check=True
    )
    *_, counts, names = done.stdout.splitlines()
    loaded = {name.split(".")[0] for name in names.split()}
    assert "transformers" in loaded
    assert loaded & {"sklearn", "pandas", "sentence_transformers", "gguf", "matplotlib", "ray", "fastapi"} == set()
    collections, enabled, frozen = counts.split()
    assert int(collections) < 50, "the imports make a thousand"
    assert enabled == "True"
    assert int(frozen) > 100_000
    assert "nanobind" not in done.stderr


def test_every_public_name_exists_and_is_listed_once() -> None:
    assert all(getattr(qcfuse_rag, name) is not None for name in qcfuse_rag.__all__)
    assert len(set(qcfuse_rag.__all__)) == len(qcfuse_rag.__all__)


@pytest.mark.slow
def test_no_warning_of_a_library_reaches_users_of_the_readmes_program(model_folder: str, tmp_path: Path) -> None:
    """A library warns of what its next version takes away, which users can do nothing about."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    program = Path(__file__).parents[1] / "examples" / "llama_index_query_engine.py"
    code = (
        f"import runpy, qcfuse_rag.bundled as bundled; bundled.default_model = lambda: {str(tmp_path / 'adapter')!r}; "
        f"runpy.run_path({str(program)!r})"
    )
    command = [sys.executable, "-W", "error::FutureWarning", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, "FutureWarning" in done.stderr) == (0, False), done.stderr
