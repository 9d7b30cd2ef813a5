"""Every surface has the options that `EngineConfig` and `SamplingParams` declare, with the same defaults and texts."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import pytest
import typer
from annotated_types import Ge, Lt

from langchain_qcfuse import ChatQCFuse
from llama_index.llms.qcfuse import QCFuseLLM
from qcfuse_rag.cli.app import app
from qcfuse_rag.declared_options import check_limits, declared_options
from qcfuse_rag.engine.config import LOAD_SETTINGS, EngineConfig, ModelConfig
from qcfuse_rag.generation.sampling_params import SAMPLING_SETTINGS, SamplingParams
from qcfuse_rag.prompts.template import PromptTemplate
from qcfuse_rag.server.protocol.chat_request import ChatRequest

DECLARED = declared_options(EngineConfig) | declared_options(SamplingParams)


@pytest.mark.parametrize("settings", [EngineConfig, SamplingParams, ModelConfig])
def test_each_option_has_a_text(settings: type) -> None:
    assert {field.name for field in dataclasses.fields(settings)} == declared_options(settings).keys()
    assert all(option.text.endswith((".", "10 %.")) for option in declared_options(settings).values())


@pytest.mark.parametrize("framework", [QCFuseLLM, ChatQCFuse])
def test_the_frameworks_classes_have_the_declared_fields(framework: type[Any]) -> None:
    for name in (*LOAD_SETTINGS, *SAMPLING_SETTINGS):
        field, declared = framework.model_fields[name], DECLARED[name]
        assert (field.annotation, field.default, field.description) == (declared.type, declared.default, declared.text)


def test_requests_have_the_declared_sampling_settings_and_leave_each_to_the_server() -> None:
    fields = ChatRequest.model_fields
    assert {fields[name].default for name in SAMPLING_SETTINGS} == {None}
    request = ChatRequest(messages=[{"role": "user", "content": "Who?"}], max_tokens=7)
    assert request.sampling(100) == SamplingParams(max_new_tokens=7)
    assert request.sampling(100, "exact").fidelity == "exact"


@pytest.mark.parametrize("command", ["ask", "explain", "chat", "serve", "verify", "demo", "warm run", "warm prefix"])
def test_commands_show_the_declared_options(command: str) -> None:
    found: Any = typer.main.get_command(app)
    for part in command.split():
        found = found.commands[part]
    shown = {option.name: option for option in found.params}
    model = declared_options(ModelConfig).keys()
    assert model <= shown.keys()
    own = {"ratio"} if command == "verify" else {"store"}
    for name in (model | {"chat_template_kwargs", "method", "ratio", "base", "fidelity"}) & shown.keys() - own:
        assert shown[name].default == DECLARED[name].default, name
        assert shown[name].help == DECLARED[name].text, name


def test_numbers_outside_of_their_limits_are_refused_by_name() -> None:
    @dataclasses.dataclass
    class Settings:
        share: Annotated[float | None, Ge(0), Lt(1)] = None

    check_limits(Settings())
    check_limits(Settings(0.5))
    with pytest.raises(ValueError, match=r"share must be at least 0 and less than 1, got 1\.5"):
        check_limits(Settings(1.5))


def test_wording_is_the_templates_but_for_messages_and_variables_of_their_own() -> None:
    template, messages = PromptTemplate(chunk="{text}\n---\n"), [("user", "{context}{question}")]
    assert EngineConfig(template=template).wording == template
    changed = EngineConfig(template=template, rag_messages=messages, chat_template_kwargs={"brief": True}).wording
    assert changed == PromptTemplate(tuple(messages), template.chunk, {"brief": True})
