"""The command line, as a user runs it: a model in a folder, documents in a folder, a store that lasts."""

from __future__ import annotations

import dataclasses
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from transformers import PreTrainedTokenizerFast
from typer.main import get_command
from typer.testing import CliRunner

from qcfuse_rag import METHODS, FusionEngine, LanguageModel
from qcfuse_rag.cli.app import app
from qcfuse_rag.cli.options import expand_options
from qcfuse_rag.library.folder import open_library_store
from qcfuse_rag.library.jobs import RECORD_NAME
from tests.support.cases import cases
from tests.support.cli import Run
from tests.support.engines import METHOD_OPTIONS
from tests.support.families import build_model
from tests.support.passages import PASSAGES

PICTURE = str(Path(__file__).parents[2] / "docs" / "guide" / "playground.png")


def test_warm_then_ask(run: Run, documents: Path, model_folder: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    options = ("--store", store, "--model", model_folder, "--device", "cpu")
    warming = ("warm", "run", documents, *options, "--base", "framed")
    code, out, _ = run(*warming, "--json")
    summary = json.loads(out)
    assert (code, summary["documents"], summary["warmed"], summary["present"]) == (0, 3, 3, 0)

    code, out, _ = run(*warming)
    assert code == 0
    assert "0 caches prefilled" in out
    assert "3 were there already" in out

    page = tmp_path / "page.html"
    asking = ("ask", "Who keeps the paint?", *options, "--explain", page)
    code, out, _ = run(*asking, *METHOD_OPTIONS, "--max-new-tokens", 8, "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["report"]["fallback"] is None
    assert answer["report"]["method"] == "qcfuse"
    assert answer["report"]["reused_tokens"] > 0
    assert "recomputed" in page.read_text()
    assert len({document["source"] for document in answer["documents"]}) == 3

    drawn = tmp_path / "drawn.html"
    code, _, _ = run("explain", *asking[1:-2], *METHOD_OPTIONS, "--out", drawn, "--top-k", 2)
    assert code == 0
    assert drawn.read_text().count("this passage's share:") == 2
    assert drawn.read_text().count("<h2>Passage ") == 2
    assert "<h1>Who keeps the paint?</h1>" in drawn.read_text()
    assert drawn.stat().st_mode & 0o077 == 0, "it holds the question"
    code, out, err = run(*asking, "--max-new-tokens", 8, "--method", "reuse", "--base", "framed")
    assert code == 0
    assert out.strip() != ""
    assert "reuse, ratio 0: computed" in " ".join(err.split())


def test_ask_warms_the_documents_that_it_is_given(
    run: Run, documents: Path, model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the library is there unless another folder is named
    asking = ("ask", "Who keeps the paint?", "--documents", documents, "--model", model_folder, "--device", "cpu")
    for warmed in (6, 0):  # nothing is left to warm the second time
        code, out, _ = run(*asking, *METHOD_OPTIONS, "--max-new-tokens", 1, "--json")
        answer = json.loads(out)
        assert (code, answer["report"]["fallback"], len(answer["documents"])) == (0, None, 3)
        status = json.loads(run("warm", "status", "--json")[1])
        assert (status["state"], status["summary"]["warmed"]) == ("finished", warmed)


def test_ask_loads_the_model_once_and_leaves_an_unfinished_job_to_be_resumed(
    run: Run, documents: Path, model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "4.txt").write_text("A fourth document, about lanterns.")
    options = ("--model", model_folder, "--device", "cpu")
    run.json("warm", "run", tmp_path / "more", *options, "--base", "framed")
    loads, load = list[str](), LanguageModel.load
    monkeypatch.setattr(LanguageModel, "load", lambda name, **options: loads.append(name) or load(name, **options))
    record = tmp_path / "library" / RECORD_NAME
    for state, now in (("finished", documents), ("interrupted", "more"), ("failed", "more"), ("running", "more")):
        about = json.loads(record.read_text())
        about |= {
            "state": state,
            "pid": 2**22 + 1,
            "arguments": about["arguments"] | {"paths": [str(tmp_path / "more")]},
        }
        record.write_text(json.dumps(about))
        assert len(run.json("ask", "Who?", "--documents", documents, "--max-new-tokens", 1)["documents"]) == 4
        assert json.loads(record.read_text())["arguments"]["paths"] == [str(tmp_path / now)], state
    assert len(loads) == 4
    assert run.json("warm", "status")["state"] == "killed"
    assert run.json("warm", "resume")["present"] == 1


def test_methods_lists_all_with_their_papers(run: Run) -> None:
    code, out, _ = run("methods", "--json")
    methods = {m["name"]: m for m in json.loads(out)["methods"]}
    assert code == 0
    assert list(methods) == list(METHODS)
    assert methods["qcfuse"]["parameters"] == {
        "ratio": 0.5,
        "base": "blind",
        "anchor_ratio": 0.15,
        "layers": "critical",
        "anchors": "instruction",
        "reduce": "mean",
    }
    assert "2606.05875" in methods["qcfuse"]["source"]
    assert "qcfuse" in run("methods")[1]


def test_models_list_names_models_by_size_with_a_command(run: Run) -> None:
    models = run.json("models", "list")["models"]
    assert [model["parameters"] for model in models] == sorted(model["parameters"] for model in models)
    assert all(model["cpu_bytes"] == 2 * model["gpu_bytes"] == 4 * model["parameters"] for model in models)
    code, out, _ = run("models", "list")
    assert (code, f"warm run FOLDER --store library --model {models[0]['model']}\n" in out) == (0, True)
    assert all(model["model"] in out for model in models)


def test_the_bundled_model_is_said_to_be_for_the_demonstration(
    run: Run, documents: Path, model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qcfuse_rag.engine.engine.default_model", lambda: model_folder)
    for folder, options, count in (("own", (), 1), ("named", ("--model", model_folder), 0)):
        options = (*options, "--store", tmp_path / folder, "--device", "cpu")
        monkeypatch.setattr("sys.stdin", io.StringIO("Who keeps the paint?\n"))
        for command in (
            ("warm", "run", documents, *options, "--base", "framed"),
            ("ask", "Who keeps the paint?", *options, *METHOD_OPTIONS, "--max-new-tokens", 1, "--json"),
            ("chat", *options, *METHOD_OPTIONS, "--max-new-tokens", 1),
        ):
            code, out, err = run(*command)
            assert (code, err.count("`qcfuse models list`"), "models list" in out) == (0, count, False)


def test_models_check_proves_a_model(run: Run, model_folder: str) -> None:
    code, out, _ = run("models", "check", model_folder, "--device", "cpu", "--json")
    report = json.loads(out)
    assert (code, report["supported"], report["rope"]) == (0, True, ["half-split, 16 channels"])
    assert report["check"]["all_rows"] < 1e-4
    stored = report["stored_bytes_per_token"]
    assert stored["model"] > report["caches"] * report["kv_bytes_per_token"] == 2 * report["kv_bytes_per_token"]
    assert stored["int8"] < stored["model"]
    shown = run.text("models", "check", model_folder, "--device", "cpu")
    assert "supported" in shown
    assert "stored size per token, in 2 caches of each passage: " in shown


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("gemma4-shared-keys", "7 layers, of which 4 are stored and the others read theirs,"),
        (
            "minicpm3-latent",
            "4 layers, of which 4 have latent attention: stored are latents and the rotary part of keys,",
        ),
    ],
)
def test_models_check_says_what_is_stored(
    family: str, layers: str, run: Run, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    build_model(family).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    code, out, _ = run("models", "check", tmp_path, "--device", "cpu")
    assert code == 0
    assert layers in " ".join(out.split())


def test_models_check_refuses_with_the_reason(run: Run, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    build_model("llama", rope_parameters=rope).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    code, out, _ = run("models", "check", tmp_path, "--device", "cpu", "--json")
    assert code == 1
    assert "dynamic RoPE" in json.loads(out)["reason"]
    code, _, err = run("models", "check", tmp_path, "--device", "cpu")
    assert code == 1
    assert "not supported" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ask", "Who?", "--store", "nowhere"], "there are no passages in nowhere/passages; run `qcfuse warm run`"),
        (["warm", "run", "nothing-here", "--store", "s"], "no file or folder at nothing-here"),
        (["warm", "run", PICTURE, "--store", "s"], f"cannot read {PICTURE}: not text"),
        (["store", "stats", "--store", "nowhere"], "there is no store in nowhere; `qcfuse warm run` makes one"),
        (["models", "check", "/no/such/model"], "no model folder at /no/such/model"),
        (["ask", "Who?", "--store", "s", "--method", "qcfuze"], "there is no method 'qcfuze'"),
        (["ask", "Who?", "--store", "s", "--ratio", "1.5"], "ratio must be a fraction in [0, 1], got 1.5"),
        (["ask", "Who?", "--store", "s", "--method", "full", "--ratio", "0.5"], "'full' does not take ratio"),
        (["warm", "status", "--store", "nowhere"], "no warming job in nowhere"),
        (["warm", "resume", "--store", "nowhere"], "no warming job in nowhere"),
        (["models", "check", "MODEL", "--device", "cuda:99"], "no device 'cuda:99' here"),
        (["models", "check", "MODEL", "--device", "abacus"], "no device 'abacus' here"),
    ],
)
def test_errors_are_one_line_and_exit_code_1(
    run: Run, arguments: list[str], message: str, model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s").mkdir()
    code, out, err = run(*(model_folder if argument == "MODEL" else argument for argument in arguments))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("error: ")
    assert message in err
    assert err.endswith(".\n"), "a sentence"


def test_debug_shows_the_traceback(run: Run, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no store in"):
        run("store", "stats", "--store", tmp_path, "--debug")


def test_a_library_that_is_not_there_is_not_served(run: Run, tmp_path: Path) -> None:
    code, _, err = run("serve", "--store", tmp_path / "misspelt")
    assert (code, "no store in" in err, (tmp_path / "misspelt").exists()) == (1, True, False)


@pytest.fixture
def made_in_python(model_folder: str, tmp_path: Path) -> Path:
    """Return a store in a folder of its own, as `FusionEngine.load(..., store=FOLDER)` makes it."""
    folder = tmp_path / "st"
    with FusionEngine.load(model_folder, store=folder, device="cpu", verdict="ignore") as engine:
        engine.warm(PASSAGES)
    return folder


@pytest.mark.parametrize(
    "command",
    cases([("ask", "Who?"), ("explain", "Who?"), ("warm", "run", "."), ("warm", "plan", ".")], ("ask", "Who?")),
    ids=lambda command: " ".join(command[:2]),
)
def test_what_takes_passages_names_the_library_to_give_instead_of_a_store(
    run: Run, made_in_python: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(made_in_python.rglob("*"))
    library = made_in_python.parent / "LIBRARY" / "kv"
    code, _, err = run(*command, "--store", made_in_python)
    assert (code, f"move it to {library}" in err, err.count("\n")) == (1, True, 1)
    assert sorted(made_in_python.rglob("*")) == before
    library.parent.mkdir()
    made_in_python.rename(library)
    monkeypatch.chdir(library)
    code, _, err = run(*command, "--store", ".")
    assert (code, f"say --store {library.parent}" in err) == (1, True)


@pytest.mark.slow
def test_a_verdict_is_kept_where_an_engine_over_the_store_looks(
    run: Run, made_in_python: Path, model_folder: str
) -> None:
    loose = ("--kl", 100, "--agreement", 0, "--loss", 1, "--size", 1, "--tokens", 1200, "--device", "cpu")
    assert run("verify", "--store", made_in_python, "--model", model_folder, *loose, "--json")[0] == 0
    assert not (made_in_python / "kv").exists()
    with FusionEngine.load(model_folder, store=made_in_python, device="cpu", verdict="require") as engine:
        assert engine.verdict is not None
    code, _, err = run("verify", "--store", made_in_python.parent, "--model", model_folder, *loose)
    assert (code, "no store in" in err, (made_in_python.parent / "kv").exists()) == (1, True, False)


def test_a_store_by_itself_is_opened_as_a_librarys_is(made_in_python: Path) -> None:
    with open_library_store(made_in_python) as store:
        assert store.folder == made_in_python
        assert list(store.entries())
    with open_library_store(made_in_python.parent) as store:
        assert store.folder == made_in_python.parent / "kv"


def commands(group: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *path, name)
        else:
            yield (*path, name), command


@dataclasses.dataclass(frozen=True)
class Bracketed:
    """Options of a command.

    Attributes:
        method: Name and parameters, such as auto[ratio=0.2].
    """

    method: str = "auto"


def show(options: Bracketed) -> None:
    """Show them."""


def test_help_shows_what_stands_in_brackets(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """In help, words in brackets are styles unless they are escaped."""
    monkeypatch.setenv("COLUMNS", "400")
    for path, command in commands(get_command(app)):
        texts = [command.help or "", *(getattr(parameter, "help", None) or "" for parameter in command.params)]
        shown = " ".join(run(*path, "--help")[1].split())
        for text in (" ".join(text.replace("\\[", "[").split()) for text in texts if "[" in text):
            assert text in shown, path

    made_up = typer.Typer()
    made_up.command()(expand_options(show))
    assert "such as auto[ratio=0.2]." in CliRunner().invoke(made_up, ["--help"]).stdout


def test_every_command_names_a_store_by_the_same_option() -> None:
    """Nothing but `--store` names a store or a library, and no command takes one as an argument."""
    for path, command in commands(get_command(app)):
        names = {name: parameter for parameter in command.params for name in (*parameter.opts, parameter.name)}
        assert not {"folder", "library"} & {p.name for p in command.params if p.param_type_name == "argument"}, path
        if path[0] == "store":
            assert names["--store"].required, path


@pytest.mark.parametrize(("ends", "code"), [("pass", 0), ("sys.exit(3)", 3), ("sys.exit()", 0), ("sys.exit('no')", 1)])
def test_a_program_ends_with_the_commands_code_after_threads_and_exit_functions(ends: str, code: int) -> None:
    program = (
        "import atexit, sys, threading, time; from qcfuse_rag.cli import app\n"
        "atexit.register(lambda: print('exit function'))\n"
        "def main():\n"
        "    threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\n"
        f"    {ends}\n"
        "app.main = main; app.run()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split("\n")) == (code, ["thread", "exit function", ""])


@pytest.mark.parametrize("command", [["--help"], ["warm", "status", "--store", "nowhere"]], ids=["success", "error"])
def test_ctrl_c_while_threads_wind_down_ends_without_a_traceback(command: list[str], tmp_path: Path) -> None:
    program = (
        "import sys, threading, time; from qcfuse_rag.cli import app\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        f"sys.argv, main = ['qcfuse', *{command}], app.main\n"
        "def said_to_end():\n"
        "    try: main()\n"
        "    finally: print('main has ended', flush=True)\n"
        "app.main = said_to_end; app.run()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert any("main has ended" in line for line in process.stdout)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert (process.returncode, "Traceback" in said) == (-signal.SIGINT, False), said
