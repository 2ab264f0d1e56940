"""Tools in conversations whose template does not support them."""

from __future__ import annotations

import pytest

from fd_core.errors import BadRequest
from fd_core.text.chat_template import ChatTemplate, shown_tool
from fd_core.text.parsing.events import CallBegun
from fd_core.text.parsing.formats.json_calls import HermesTools

PLAIN = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "é"}'}}


def test_template_with_tool_support_gets_tools_unchanged() -> None:
    template = ChatTemplate("{{ tools[0].function.name }}{{ messages | length }}")
    assert template.supports_tools
    assert template.render([{"role": "user", "content": "x"}], [TOOL]) == "now1"


def test_other_templates_get_tools_in_the_system_message() -> None:
    assert not PLAIN.supports_tools
    text = PLAIN.render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}], [TOOL])
    assert text.startswith("[system]Be brief.\n\n# Tools")
    assert '\n{"type": "function", "function": {"name": "now"' in text
    assert text.endswith("</tool_call>[user]x")
    assert PLAIN.render([{"role": "user", "content": "x"}], [TOOL]).startswith("[system]# Tools")
    assert PLAIN.render([{"role": "user", "content": "x"}], []) == "[user]x"


@pytest.mark.parametrize(
    "refusal", ["{{ raise_exception('System role not supported') }}", "{% continue %}"], ids=["refused", "dropped"]
)
def test_templates_without_a_system_role_get_tools_from_the_user(refusal: str) -> None:
    no_system = f"{{% for m in messages %}}{{% if m.role == 'system' %}}{refusal}{{% endif %}}[{{{{ m.role }}}}]"
    template = ChatTemplate(no_system + "{{ m.content }}{% endfor %}")
    text = template.render([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [CALL]}], [TOOL])
    assert text.startswith("[user]# Tools") and "</tool_call>\n\nx[assistant]<tool_call>" in text


def test_calls_are_written_as_the_hermes_parser_reads_them() -> None:
    turns = [{"role": "assistant", "content": "I look.", "tool_calls": [CALL]}]
    text = PLAIN.render(turns)
    assert text == '[assistant]I look.\n<tool_call>\n{"name": "now", "arguments": {"zone": "é"}}\n</tool_call>'
    assert CallBegun(0, "now") in HermesTools({}).push(text)


def test_tool_results_are_one_user_message() -> None:
    turns = [{"role": "tool", "tool_call_id": each, "content": each} for each in ("1", "2")]
    assert PLAIN.render(turns) == ("[user]<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>")


def test_call_without_a_name_is_rejected() -> None:
    with pytest.raises(BadRequest, match="must have a name"):
        PLAIN.render([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}])


def test_templates_see_only_descriptive_fields_of_a_tool() -> None:
    assert shown_tool({"function": {"name": "a", "strict": True, "description": None}, "x": 1}) == {
        "type": "function",
        "function": {"name": "a"},
    }
    with pytest.raises(TypeError):
        shown_tool("tool")


def test_template_that_fails_on_a_tool_message_is_a_bad_request() -> None:
    picky = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no ' ~ tools) }}{% endif %}{% endfor %}"
    )
    with pytest.raises(BadRequest, match="rejected the messages: no None"):
        picky.render([{"role": "tool", "content": "x"}])
    broken = ChatTemplate("{{ tools }}{{ messages[0].tool_calls[0].function.arguments.city.name.x }}")
    call = {"function": {"name": "now", "arguments": "[1]"}}
    with pytest.raises(BadRequest, match="cannot render"):
        broken.render([{"role": "assistant", "tool_calls": [call]}])
