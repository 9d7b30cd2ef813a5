"""Response formats: tool calls and JSON by a schema, from a model that was not trained on either."""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from qcfuse_rag import FusionEngine, Generation, LanguageModel, MemoryStore, QCFuseError, SamplingParams, Scheduler
from qcfuse_rag.errors import InvalidGrammar, InvalidSetting, InvalidTemplate, UnsupportedModel
from qcfuse_rag.generation.response_format import ResponseFormat, ResponseReader
from qcfuse_rag.generation.sampling import close_objects, json_grammar
from qcfuse_rag.generation.tool_parsers import (
    TOOL_CALL_PARSERS,
    ParsedResponse,
    ToolCall,
    ToolCallParser,
    can_call_tools,
    tool_call_parser,
)
from tests.support.cases import cases
from tests.support.engines import make_engine
from tests.support.families import build_model, build_tokenizer
from tests.support.passages import PASSAGES, QUESTION
from tests.support.tool_templates import LOOK_UP, MOOR, TEMPLATES, teach


class Boat(BaseModel):
    name: str


TOOLS = [LOOK_UP, MOOR]
PARAMETERS: dict[str, Any] = LOOK_UP["function"]["parameters"]  # type: ignore[index]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["green", "blue"]},
        "leaves": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "maxItems": 3},
        "captain": {"type": "object", "properties": {"known": {"type": "boolean"}}, "required": ["known"]},
    },
    "required": ["colour", "leaves", "captain"],
}


NO_CALLS = ("", "Words.", '{"colour": "green"}', "[1] says so.", "```\nx\n```", "[1, 2]", "null", '{"name": "moor"}')


def write_calls(parser: ToolCallParser, calls: list[ToolCall]) -> str:
    entries = [json.dumps({"name": call.name, parser.arguments_key: call.arguments}) for call in calls]
    if parser.is_list:
        return f"{parser.start_tag}[{', '.join(entries)}]"
    return "\n".join(f"{parser.start_tag}\n{entry}\n{parser.end_tag}" for entry in entries)


def answer(engine: FusionEngine, form: ResponseFormat, **params: Any) -> tuple[Generation, ParsedResponse]:
    """Return an answer in a format, and what is read of it."""
    prompt = engine.prompt_from_text([("user", QUESTION)], form.visible_tools)
    settings = form.sampling(SamplingParams(**{"max_new_tokens": 200, **params}), engine.lm.tokenizer)
    generation = engine.generate(prompt, settings)
    return generation, ResponseReader(engine.lm.tokenizer, form).finish(generation)[1]


@pytest.fixture(scope="module", params=cases(TEMPLATES.keys(), "hermes"))
def tool_engine(request: pytest.FixtureRequest) -> FusionEngine:
    """Return an engine whose chat template shows tools."""
    tokenizer = teach(build_tokenizer(lambda: [*PASSAGES, QUESTION]), request.param)
    lm = LanguageModel.wrap(build_model("llama", max_position_embeddings=4096), tokenizer)
    return make_engine(lm, MemoryStore())


START_TAGS = [parser.start_tag for parser in TOOL_CALL_PARSERS]  # which begin a call wherever they stand


class TestReading:
    @given(
        parser=st.sampled_from(TOOL_CALL_PARSERS),
        content=st.text("abc \n", max_size=9),
        boats=st.lists(
            st.text(max_size=12).filter(lambda text: not any(tag in text for tag in START_TAGS)), min_size=1
        ),
    )
    def test_what_was_written_is_read(self, parser: ToolCallParser, content: str, boats: list[str]) -> None:
        calls = [ToolCall("look_up", {"boat": boat}) for boat in boats]
        reply = parser.parse(content + write_calls(parser, calls), TOOLS)
        assert list(reply.calls) == calls
        assert reply.content == content.rstrip()
        assert not reply.broken

    @pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
    @pytest.mark.parametrize("text", NO_CALLS)
    def test_what_calls_nothing_is_the_answer(self, parser: ToolCallParser, text: str) -> None:
        reply = parser.parse(text, TOOLS)
        assert (reply.content, reply.calls, reply.broken) == (text, (), ())

    @pytest.mark.parametrize("fence", ["{}", "```json\n{}\n```", "```\n{}\n```\n"])
    def test_a_call_without_its_tags_is_one_if_it_is_all_there_is(self, fence: str) -> None:
        bare = fence.replace("{}", '{"name": "moor", "arguments": {}}')
        assert TOOL_CALL_PARSERS[0].parse(bare, TOOLS).calls == (ToolCall("moor", {}),)
        assert TOOL_CALL_PARSERS[0].parse(f"I would write {bare}", TOOLS).calls == ()

    def test_what_was_meant_as_a_call_is_not_lost(self) -> None:
        cut, unknown = '{"name": "look_up", "argum', '{"name": "sink", "arguments": {}}'
        reply = TOOL_CALL_PARSERS[0].parse(f"<tool_call>{unknown}</tool_call><tool_call>{cut}", TOOLS)
        assert reply.calls == ()
        assert [call.text for call in reply.broken] == [unknown, cut]
        (broken,) = (
            TOOL_CALL_PARSERS[0].parse('<tool_call>{"name": "moor", "arguments": [1]}</tool_call>', TOOLS).broken
        )
        assert broken.reason == "its arguments are not an object"
        assert "look_up, moor" in reply.broken[0].reason
        assert "not JSON" in reply.broken[1].reason

    @pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
    @pytest.mark.parametrize("text", ["[" * 100_000, '{"name": "boats", "arguments": ' + "9" * 5000 + "}"])
    def test_json_that_cannot_be_parsed_is_no_error(self, parser: ToolCallParser, text: str) -> None:
        assert parser.parse(text, TOOLS).calls == ()
        assert parser.parse(f"{parser.start_tag}{text}", TOOLS).calls == ()

    @pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
    def test_the_other_key_for_arguments_is_read_and_none_is_not_made_up(self, parser: ToolCallParser) -> None:
        other = "parameters" if parser.arguments_key == "arguments" else "arguments"
        boat = {"boat": "tug", "year": 1990}
        said = json.dumps({"name": "look_up", other: boat})
        assert parser.parse(f"{parser.start_tag}{said}", TOOLS).calls == (ToolCall("look_up", boat),)
        (broken,) = parser.parse(f'{parser.start_tag}{{"name": "look_up", "args": {{}}}}', TOOLS).broken
        assert broken.reason == "it has no arguments"

    def test_what_is_said_after_a_call_is_kept(self) -> None:
        reply = TOOL_CALL_PARSERS[0].parse('So: <tool_call>{"name": "moor", "arguments": {}}</tool_call> Done.', TOOLS)
        assert (reply.content, len(reply.calls)) == ("So: Done.", 1)

    def test_a_special_token_may_open_calls(self) -> None:
        tokenizer = teach(build_tokenizer(lambda: PASSAGES), "mistral")
        tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
        assert ResponseFormat(TOOLS).sampling(SamplingParams(), tokenizer).special_tokens
        call = '[{"name": "moor", "arguments": {}}]'
        reader = ResponseReader(tokenizer, ResponseFormat(TOOLS))
        shown = [reader.push(piece).text for piece in ("Sure.", "[TOOL_CALLS]", call)]
        text = f"Sure.[TOOL_CALLS]{call}"
        rest, reply = reader.finish(Generation(text, (), "length", None, 0.0))  # type: ignore[arg-type]
        assert (shown, rest.text, len(reply.calls)) == (["Sure.", "", ""], "", 1)

    @given(cuts=st.lists(st.integers(0, 60), max_size=6), called=st.booleans())
    def test_a_stream_shows_all_but_the_calls(self, cuts: list[int], called: bool) -> None:
        tokenizer = teach(build_tokenizer(lambda: PASSAGES), "hermes")
        call = '<tool_call>\n{"name": "moor", "arguments": {}}\n</tool_call>' if called else "<tool_cal is no tag"
        text = f"I shall see to it. {call}"
        reader = ResponseReader(tokenizer, ResponseFormat(TOOLS))
        edges = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
        shown = "".join(reader.push(text[a:b]).text for a, b in itertools.pairwise(edges))
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        rest, reply = reader.finish(Generation(text, ids, "length", None, 0.0))  # type: ignore[arg-type]
        assert (shown + rest.text).rstrip() == reply.content.rstrip() == ("I shall see to it." if called else text)
        assert len(reply.calls) == called


class TestDemanding:
    @pytest.mark.parametrize(
        ("seed", "choice"), enumerate(["required", "any", True, "look_up", {"function": {"name": "look_up"}}])
    )
    def test_a_demanded_call_is_made_rightly(self, tool_engine: FusionEngine, seed: int, choice: Any) -> None:
        generation, reply = answer(tool_engine, ResponseFormat([LOOK_UP], choice), temperature=1.5, seed=seed)
        assert generation.finish_reason == "end"
        assert reply.content == ""
        (call,) = reply.calls
        jsonschema.validate(call.arguments, PARAMETERS)
        assert set(call.arguments) == {"boat", "year"}

    def test_of_several_tools_one_is_called(self, tool_engine: FusionEngine) -> None:
        assert len(answer(tool_engine, ResponseFormat(TOOLS, "any"))[1].calls) == 1

    @pytest.mark.parametrize("called", [True, False])
    def test_with_a_schema_and_tools_an_answer_is_a_call_or_follows_the_schema(
        self, tool_engine: FusionEngine, called: bool
    ) -> None:
        tokenizer = tool_engine.lm.tokenizer
        form = ResponseFormat(TOOLS, None, {"type": "json_schema", "json_schema": {"schema": SCHEMA}})
        first = tool_call_parser(tokenizer, TOOLS).start_tag[0] if called else "{"
        generation, reply = answer(tool_engine, form, logit_bias=((tokenizer.convert_tokens_to_ids(first), 5.0),))
        assert generation.finish_reason == "end"
        if reply.calls:
            assert (reply.content, len(reply.calls)) == ("", 1)
        else:
            jsonschema.validate(json.loads(reply.content), close_objects(SCHEMA))
        if not tool_call_parser(tokenizer, TOOLS).is_bare:
            assert bool(reply.calls) == called

    @pytest.mark.parametrize("choice", [None, False, "auto", "none"])
    def test_what_is_not_demanded_changes_no_answer(self, tool_engine: FusionEngine, choice: Any) -> None:
        params = SamplingParams(max_new_tokens=8)
        assert ResponseFormat(TOOLS, choice).sampling(params, tool_engine.lm.tokenizer) is params
        assert bool(ResponseFormat(TOOLS, choice).visible_tools) == (choice != "none")

    def test_tools_may_define_types_and_several_the_same_name(self, tool_engine: FusionEngine) -> None:
        def tool(name: str, values: list[str]) -> dict[str, Any]:
            kind = {"$defs": {"Kind": {"enum": values}}, "properties": {"kind": {"$ref": "#/$defs/Kind"}}}
            shape = {"type": "object", **kind, "required": ["kind"]}
            return {"type": "function", "function": {"name": name, "parameters": shape}}

        tools = [tool("a", ["x"]), tool("b", ["y"])]
        for name, value in (("a", "x"), ("b", "y")):
            assert answer(tool_engine, ResponseFormat(tools, name))[1].calls[0].arguments == {"kind": value}

    def test_a_schema_may_refer_to_itself(self, tool_engine: FusionEngine) -> None:
        """The whole schema, `#`, is that of the arguments, and not that of the call."""
        shape = {"type": "object", "properties": {"inner": {"$ref": "#"}}, "required": []}
        form = ResponseFormat([{"type": "function", "function": {"name": "nest", "parameters": shape}}], "nest")
        _, reply = answer(tool_engine, form)
        assert [call.name for call in reply.calls] == ["nest"]
        inner = reply.calls[0].arguments
        while inner:
            assert inner.keys() == {"inner"}
            inner = inner["inner"]

    @pytest.mark.parametrize("choice", ["required", "any", True, "sink"])
    def test_a_demand_that_no_tool_meets_is_refused(self, choice: Any) -> None:
        with pytest.raises(QCFuseError, match=r"there are no tools to call|names 'sink', which is not among the given"):
            ResponseFormat(TOOLS if choice == "sink" else (), choice)


class TestPrompting:
    def test_tools_and_their_answers_are_shown_where_the_template_shows_them(self, tool_engine: FusionEngine) -> None:
        call = {
            "type": "function",
            "id": "1",
            "function": {"name": "look_up", "arguments": {"boat": "tug", "year": 1991}},
        }
        turns: list[Any] = [
            ("user", QUESTION),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": PASSAGES[0], "tool_call_id": "1", "name": "look_up"},
        ]
        text = tool_engine.prompts.render(turns, TOOLS).text
        assert "Look a boat up." in text
        assert '"boat": "tug"' in text
        assert PASSAGES[0] in text
        tool_engine.warm(PASSAGES)
        report = tool_engine.generate(
            tool_engine.prompt_from_text(turns, TOOLS), SamplingParams(max_new_tokens=1)
        ).report
        assert report.reused_tokens > 0, "the tool result is found in the store"

    def test_tools_move_the_passages_and_nothing_else(self, tool_engine: FusionEngine) -> None:
        plain, shown = tool_engine.prompt(QUESTION, PASSAGES), tool_engine.prompt(QUESTION, PASSAGES, tools=TOOLS)
        assert [span.segment.ids for span in plain.chunks] == [span.segment.ids for span in shown.chunks]
        assert len(shown) > len(plain)

    def test_a_template_without_tools_says_so(self, engine: FusionEngine) -> None:
        with pytest.raises(
            InvalidTemplate, match="has no place for tools: take a model that was trained to call tools"
        ):
            engine.prompt_from_text([("user", QUESTION)], TOOLS)

    def test_a_template_whose_calls_are_not_known_says_so(self) -> None:
        tokenizer = build_tokenizer(lambda: PASSAGES)
        tokenizer.chat_template = "{{ tools }}{% for message in messages %}{{ message.content }}{% endfor %}"
        with pytest.raises(UnsupportedModel, match="not known how this model writes tool calls"):
            tool_call_parser(tokenizer, TOOLS)
        assert not can_call_tools(tokenizer)
        assert can_call_tools(teach(tokenizer, "mistral"))


class TestSchemas:
    def test_an_answer_follows_its_schema_whatever_the_model(self, family: LanguageModel) -> None:
        engine = make_engine(family, MemoryStore())
        form = ResponseFormat(response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}})
        for temperature in (0.0, 2.0):
            params = SamplingParams(max_new_tokens=150, temperature=temperature, seed=1)
            generation = engine.generate(engine.prompt(QUESTION), form.sampling(params, family.tokenizer))
            assert generation.finish_reason == "end"
            jsonschema.validate(json.loads(generation.text), close_objects(SCHEMA))

    async def test_requests_that_are_decoded_together_keep_to_their_own(self, engine: FusionEngine) -> None:
        schemas = [{"type": "integer", "minimum": low, "maximum": low + 9} for low in (100, 200, 300)]
        free = engine.generate(engine.prompt(QUESTION), SamplingParams(max_new_tokens=12)).text
        with Scheduler(engine) as scheduler:
            settings = [SamplingParams(max_new_tokens=12, grammar=json_grammar(schema)) for schema in schemas]
            asked = [scheduler.submit(engine.prompt(QUESTION), params) for params in settings]
            unbound = scheduler.submit(engine.prompt(QUESTION), SamplingParams(max_new_tokens=12))
            numbers = [int(handle.result().text) for handle in asked]
            assert unbound.result().text == free
        assert [number // 100 for number in numbers] == [1, 2, 3]

    def test_only_named_properties_unless_the_schema_says_so(self) -> None:
        odd: dict[str, Any] = {
            "type": "object",
            "properties": {"properties": {"type": "object", "properties": {"x": {"type": "null"}}}},
            "$defs": {"open": {"type": "object", "properties": {}, "additionalProperties": True}},
            "default": {"properties": 1},
            "items": {"anyOf": [{"properties": {"y": True}}, True]},
            "not": {"properties": {}, "allOf": [{"properties": {"z": True}}]},
        }
        assert close_objects(odd) == {
            "additionalProperties": False,
            "type": "object",
            "properties": {"properties": {"additionalProperties": False, **odd["properties"]["properties"]}},
            "$defs": {"open": {"type": "object", "properties": {}, "additionalProperties": True}},
            "default": {"properties": 1},
            "items": {"anyOf": [{"additionalProperties": False, "properties": {"y": True}}, True]},
            "not": {"properties": {}, "allOf": [{"properties": {"z": True}}]},
        }

    @pytest.mark.parametrize(
        "form",
        [
            Boat,
            {"type": "json_schema", "json_schema": {"name": "boat", "schema": Boat.model_json_schema()}},
            {"type": "json_schema", "json_schema": Boat.model_json_schema()},
            {"type": "json_schema", "schema": Boat.model_json_schema()},
            {"type": "json_object", "schema": Boat.model_json_schema()},
            Boat.model_json_schema(),
            {key: value for key, value in Boat.model_json_schema().items() if key != "type"},
        ],
    )
    def test_a_schema_is_taken_in_every_place_that_clients_put_it(self, form: Any) -> None:
        schema = ResponseFormat([LOOK_UP], response_format=form).schema
        assert schema is not None
        assert schema["properties"] == {"name": {"title": "Name", "type": "string"}}

    @pytest.mark.parametrize(
        "form", ["json_object", {"type": "json_schema"}, {"type": "json_object", "schema": 5}, Scheduler]
    )
    def test_what_is_no_schema_is_refused_by_a_sentence(self, form: Any) -> None:
        with pytest.raises(InvalidSetting, match="response_format"):
            ResponseFormat(response_format=form)
        assert ResponseFormat(response_format={}).schema is None

    @pytest.mark.parametrize("nested", [True, False])
    @pytest.mark.parametrize(("mode", "required"), [("auto", []), ("required", [MOOR])])
    def test_allowed_tools_leave_out_the_others(self, nested: bool, mode: str, required: list[Any]) -> None:
        name = {"name": "moor"}
        allowed = {"mode": mode, "tools": [{"type": "function", "function": name} if nested else name]}
        choice = {"type": "allowed_tools", **({"allowed_tools": allowed} if nested else allowed)}
        chosen = ResponseFormat([LOOK_UP, MOOR], choice)
        assert (list(chosen.visible_tools), list(chosen.required_tools)) == ([MOOR], required)
        with pytest.raises(InvalidSetting, match="'moor', which is not among the given tools: look_up"):
            ResponseFormat([LOOK_UP], choice)

    def test_a_schema_that_cannot_be_followed_is_said_before_anything_is_computed(self, engine: FusionEngine) -> None:
        params = SamplingParams(grammar=json_grammar({"type": "no such type"}))
        with Scheduler(engine) as scheduler, pytest.raises(InvalidGrammar, match="cannot answer by this grammar"):
            scheduler.submit(engine.prompt(QUESTION), params)
        with pytest.raises(InvalidGrammar):
            engine.stream(engine.prompt(QUESTION), params)

    def test_without_llguidance_the_fix_is_named(self, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = make_engine(LanguageModel.wrap(build_model("llama"), tokenizer), MemoryStore())
        monkeypatch.setitem(sys.modules, "llguidance", None)
        with pytest.raises(QCFuseError, match=r"pip install 'qcfuse-rag\[structured\]'"):
            engine.generate(engine.prompt(QUESTION), SamplingParams(grammar=json_grammar({"type": "null"})))
