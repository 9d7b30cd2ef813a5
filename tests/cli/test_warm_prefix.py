"""`qcfuse warm prefix`: what an agent's conversations begin with, from the command line to a request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import FusionEngine, make_method
from qcfuse_rag.library.folder import open_library_store
from qcfuse_rag.prompts.segments import Role
from qcfuse_rag.server.protocol.chat_request import ChatRequest
from qcfuse_rag.store.key import FRAMED
from tests.support.cli import Run
from tests.support.families import build_model, build_tokenizer
from tests.support.passages import PASSAGES, QUESTION
from tests.support.tool_templates import LOOK_UP, MOOR, teach

SYSTEM = "You look after the boats of a small harbour."


@pytest.fixture(scope="module")
def agent_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model whose chat template shows tools."""
    folder = tmp_path_factory.mktemp("agent")
    tokenizer: PreTrainedTokenizerFast = teach(build_tokenizer(lambda: [*PASSAGES, QUESTION]), "hermes")
    build_model("llama", max_position_embeddings=2048).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def library(run: Run, agent_model: str, tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text(PASSAGES[0])
    options = ("--store", tmp_path / "library", "--model", agent_model, "--device", "cpu", "--base", "framed")
    run.json("warm", "run", tmp_path / "a.txt", *options)
    return tmp_path / "library"


def test_a_warmed_prefix_is_read_by_the_conversations_of_the_agent(
    run: Run, library: Path, agent_model: str, tmp_path: Path
) -> None:
    (tmp_path / "tools.json").write_text(json.dumps([LOOK_UP, MOOR]))
    options = ("--store", library, "--system", SYSTEM, "--tools", tmp_path / "tools.json")
    summary = run.json("warm", "prefix", *options)
    assert (summary["warmed"], summary["present"]) == (2, 0)
    assert "2 were there already" in run.text("warm", "prefix", *options)
    method = make_method("qcfuse", ratio=0.3, base=FRAMED)
    with open_library_store(library) as store, FusionEngine.load(agent_model, store=store, method=method) as engine:
        turns = [("system", SYSTEM), ("user", QUESTION)]
        report = engine.prefill(engine.prompt_from_text(turns, [LOOK_UP, MOOR])).report
        assert report.lookups[0].hit
        assert report.lookups[0].tokens > 0.8 * len(engine.prompt_from_text(turns, [LOOK_UP, MOOR]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ('{"type": "function"}', "has to be a list of tools"),
        ('[{"name": "look_up"}]', "has to be a list of tools"),
        (None, "cannot read"),
    ],
)
def test_a_bad_file_of_tools_is_one_clear_error(
    run: Run, library: Path, tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "tools.json").write_text(content)
    assert message in run("warm", "prefix", "--store", library, "--tools", tmp_path / "tools.json")[2]


@pytest.mark.parametrize("order", [("name", "description", "parameters"), ("parameters", "description", "name")])
def test_a_request_to_the_server_reads_what_was_warmed_from_the_same_file(
    run: Run, library: Path, agent_model: str, tmp_path: Path, order: tuple[str, ...]
) -> None:
    functions = [{key: tool["function"][key] for key in order} for tool in (LOOK_UP, MOOR)]  # type: ignore[index]
    tools = [{"function": function} for function in functions]
    (tmp_path / "tools.json").write_text(json.dumps(tools), "utf-8-sig")  # a byte order mark is no JSON
    run.json("warm", "prefix", "--store", library, "--system", SYSTEM, "--tools", tmp_path / "tools.json")
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    request = ChatRequest.model_validate({"messages": messages, "tools": tools})
    with open_library_store(library) as store, FusionEngine.load(agent_model, store=store) as engine:
        prefix = request.make_prompt(engine, None)[0].segments[0]
    assert prefix.role is Role.SYSTEM_PREFIX
    assert "look_up" in prefix.text
    assert "moor" in prefix.text


def test_nothing_to_prefill_and_no_library_are_errors(run: Run, library: Path, tmp_path: Path) -> None:
    assert "give --system, --tools or both" in run("warm", "prefix", "--store", library)[2]
    assert "there is no store" in run("warm", "prefix", "--store", tmp_path / "no", "--system", SYSTEM)[2]
