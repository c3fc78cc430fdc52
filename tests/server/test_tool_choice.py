import json

import pytest

from fw.errors import UserError
from fw.server.tool_calls import check_tools, family_of, forced_calls, forced_schema
from fw.server.tool_formats import FORMATS
from server.tool_samples import TOOLS, tool

# Lines of chat templates, as far as they say how calls are written.
TEMPLATES = [
    (None, "", None),
    ("", "", None),
    ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}", "Qwen2ForCausalLM", None),
    (
        '{{- "in XML:\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>" }}',
        "",
        "hermes",
    ),
    ('{{- \'<tool_call>\\n{"name": "\' }}{{- call.name }}{{- \'", "arguments": \' }}', "Qwen3ForCausalLM", "hermes"),
    (
        "{{- 'Format:\\n<tool_call>\\n<function=example>\\n<parameter=p>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>' }}",
        "qwen3_moe",
        "qwen3_coder",
    ),
    (
        '{{- "<tool_call>\\n<function=example>\\n<parameter=p>" }}{%- set call = {"name": name, "arguments": given} %}',
        "Qwen3MoeForCausalLM",
        "qwen3_coder",
    ),
    ("{{- '<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>\\n' }}{{ tc.arguments }}", "glm4_moe", None),
    ("{{ '<seed:tool_call>\\n<function=' + name + '>\\n<parameter=' }}", "seed_oss", None),
    ("{{- '[TOOL_CALLS] [' }}{{- call.function | tojson }}{{- ']' }}", "MistralForCausalLM", "mistral"),
    ("{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", "ministral3", "mistral"),
    ('{{- \'<tool_call>\\n{"name": <name>, "arguments": <arguments>}\' }}', "MistralForCausalLM", "hermes"),
    ("{{- '<tool_call>\\n{\"arguments\": ' }} {{- '[TOOL_CALLS]' }}", "MistralForCausalLM", "mistral"),
    ("{{- '<tool_call>\\n{\"arguments\": ' }} {{- '[TOOL_CALLS]' }}", "Qwen3ForCausalLM", "hermes"),
    (
        '{{- \'Respond with {"name": function name, "parameters": dictionary of argument name and its value}.\' }}',
        "LlamaForCausalLM",
        "llama",
    ),
    ("{{ '<|python_tag|>' + code }}{{ '<function=' + name + '>' + arguments + '</function>' }}", "LlamaForCausalLM", None),
    (
        '{{- "in the form [func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]" }}',
        "LlamaForCausalLM",
        "pythonic",
    ),
    ('{{- "Use exact format: [func_name1(param1=value1), func_name2(...)]" }}', "Llama4ForConditionalGeneration", "pythonic"),
    ("{{ '[' }}{{- '{\"name\": \"' + call.name + '\", \"arguments\": ' }}", "LlamaForCausalLM", None),
    ("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type }}", "LlamaForCausalLM", None),
]


@pytest.mark.parametrize(("template", "architecture", "expected"), TEMPLATES)
def test_the_family_of_a_template(template, architecture, expected):
    assert family_of(template, architecture) == expected


def test_a_forced_call():
    check_tools(TOOLS, "required")
    one = forced_schema("hermes", TOOLS, "now")
    assert one == {
        "type": "object",
        "properties": {"name": {"const": "now"}, "arguments": {"type": "object", "properties": {}}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    any_ = forced_schema("llama", TOOLS)
    assert [each["properties"]["name"]["const"] for each in any_["anyOf"]] == [each["function"]["name"] for each in TOOLS]
    assert any_["anyOf"][0]["properties"]["parameters"] == TOOLS[0]["function"]["parameters"]
    assert forced_schema("hermes", TOOLS[2:3]) == one
    for format in FORMATS:
        key = FORMATS[format].key
        (call,) = forced_calls(f' {{"name": "get_weather",\n "{key}": {{"city": "Rome"}}}}\n', format, TOOLS)
        assert (call.index, call.name, call.arguments) == (0, "get_weather", '{"city": "Rome"}')
        assert call.id != forced_calls('{"name": "now"}', format, TOOLS)[0].id
        for text in [
            "",
            "so",
            '{"name": "get_weather", "argu',
            '{"name": "later", "arguments": {}}',
            '{"arguments": {}}',
            "[]",
            '{"name": "now"} {}',
        ]:
            assert forced_calls(text, format, TOOLS) == []


REFERRING = tool(
    "plan",
    {
        "first": {"$ref": "#/$defs/step"},
        "same": {"$ref": "#/properties/first"},
        "$ref": {"enum": ["#/a", {"$ref": "#/a"}]},
        "default": {"$ref": "#/$defs/step"},
    },
    required=["first"],
    additionalProperties=False,
    **{
        "$defs": {
            "step": {
                "type": "object",
                "properties": {"what": {"type": "string"}, "then": {"$ref": "#/$defs/step"}},
                "required": ["what"],
                "additionalProperties": False,
            }
        }
    },
)
GOOD = (
    '{"name": "plan", "arguments": {"first": {"what": "a", "then": {"what": "b"}}, "same": {"what": "c"}, "$ref": {"$ref": "#/a"},'
    ' "default": {"what": "d"}}}'
)
WRONG = [
    '{"name": "plan", "arguments": {"first": {"what": "a", "then": {"what": 1}}}}',
    '{"name": "plan", "arguments": {"first": {"what": "a"}, "same": 1}}',
    '{"name": "plan", "arguments": {"first": {"what": "a"}, "$ref": "b"}}',
    '{"name": "plan", "arguments": {"first": {"what": "a"}, "default": 1}}',
    '{"name": "plan", "arguments": {}}',
    '{"name": "plant", "arguments": {"first": {"what": "a"}}}',
    '{"name": "get_weather", "arguments": {"first": {"what": "a"}}}',
    '{"name": "plan"}',
]
FORCED = [([REFERRING], None), ([*TOOLS, REFERRING], None), ([*TOOLS, REFERRING], "plan")]


@pytest.mark.parametrize(("tools", "name"), FORCED)
def test_a_forced_call_by_jsonschema(tools, name):
    jsonschema = pytest.importorskip("jsonschema")
    schema = forced_schema("hermes", tools, name)
    before = json.dumps(tools)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid(json.loads(GOOD))
    assert not any(validator.is_valid(json.loads(text)) for text in WRONG)
    assert validator.is_valid({"name": "now", "arguments": {}}) == (len(tools) > 1 and name is None)
    assert json.dumps(tools) == before


@pytest.mark.parametrize(("tools", "name"), FORCED)
def test_a_forced_call_by_llguidance(tools, name):
    llguidance = pytest.importorskip("llguidance")
    tokens = llguidance.LLTokenizer("byte")
    schema = forced_schema("hermes", tools, name)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    wrong, why = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, tokens)
    assert not wrong, why

    def follows(text):
        matcher = llguidance.LLMatcher(tokens, grammar, log_level=0)
        return matcher.try_consume_tokens(tokens.tokenize_str(text)) == len(tokens.tokenize_str(text)) and matcher.is_accepting()

    assert follows(GOOD)
    assert not any(follows(text) for text in WRONG)
    (call,) = forced_calls(GOOD, "hermes", tools)
    assert json.loads(call.arguments) == json.loads(GOOD)["arguments"]


def function(**fields):
    return [{"type": "function", "function": {"name": "f", **fields}}]


DEEP = {"type": "object", "properties": {}}
for _ in range(60):
    DEEP = {"type": "object", "properties": {"x": DEEP}}


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ({}, None, "tools: it is a dict; give a list of tools"),
        (["f"], None, r"tools\[0\]: it is no function; write \{"),
        ([{"type": "web_search"}], None, r"tools\[0\]: it is no function; write \{"),
        ([{"type": "function", "name": "f"}], None, r"tools\[0\]: it is no function; write \{"),
        (function(name=None), None, r"tools\[0\]\.function\.name: None is no name; give 1 to 64 letters"),
        (function(name=""), None, r"tools\[0\]\.function\.name: '' is no name"),
        (function(name="a.b"), None, r"tools\[0\]\.function\.name: 'a.b' is no name"),
        (function(name="f\n"), None, r"is no name"),
        (function(name="a" * 65), None, r"is no name"),
        (function() * 129, None, "tools: 129 are more than the 128 that a request may have; give fewer"),
        (function() + function(), None, r"tools\[1\]\.function\.name: 'f' is the name of tools\[0\] too; rename one of them"),
        (function(parameters=[]), None, r"tools\[0\]\.function\.parameters: it is no JSON schema of an object; write \{"),
        (function(parameters={"type": "string"}), None, "it is no JSON schema of an object"),
        (function(parameters={"anyOf": []}), None, "it is no JSON schema of an object"),
        (function(parameters={"type": "object", "properties": []}), None, r"parameters\.properties: it is a list; give an object"),
        (function(parameters={"properties": {"x": "string"}}), None, r"parameters\.properties\.x: it is a str; give a JSON schema"),
        (function(parameters=DEEP), None, "it is nested more than 100 levels deep; give a flatter schema"),
        (function(), "any", "tool_choice: 'any' is neither none, auto, required nor a function; name one as"),
        (function(), {"type": "function"}, "is neither none, auto, required nor a function"),
        (function(), {"type": "allowed_tools", "allowed_tools": {}}, "is neither none, auto, required nor a function"),
        (function(), {"type": "function", "function": {"name": "ff"}}, "there is no function 'ff' in tools; did you mean 'f'"),
        (None, "auto", "tool_choice: there are no tools to choose from; give tools, or leave it out"),
        ([], "required", "there are no tools to choose from"),
        (None, {"type": "function", "function": {"name": "f"}}, "there are no tools to choose from"),
    ],
)
def test_tools_that_are_wrong(tools, choice, message):
    with pytest.raises(UserError, match=message):
        check_tools(tools, choice)


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        (None, None),
        ([], "none"),
        (None, "none"),
        (function(), None),
        (function(parameters=None, strict=True, description="d"), "auto"),
        (function(parameters={}), "required"),
        (function(parameters={"properties": {"x": True}}, name="a" * 64), "none"),
        (TOOLS, {"type": "function", "function": {"name": "get-time"}}),
        ([REFERRING], "required"),
        ([tool(f"f{n}") for n in range(128)], {"type": "function", "function": {"name": "f127"}}),
    ],
)
def test_tools_that_are_right(tools, choice):
    check_tools(tools, choice)
