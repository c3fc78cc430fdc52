import pytest

from server.tool_samples import pushed, told, tool


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('"{\\"city\\": \\"Köln\\"}"', '{"city": "Köln"}'),
        ('" {} "', "{}"),
        ('"hello"', '"hello"'),
        ('"[1]"', '"[1]"'),
        ('"{\\"a\\": NaN}"', '"{\\"a\\": NaN}"'),
        ('"{\\"a\\": 1e999}"', '"{\\"a\\": 1e999}"'),
        ("[1, 2]", "[1, 2]"),
        ("null", "{}"),
        ('{"a": "\\ud83d\\ude42 \\u00e9"}', '{"a": "🙂 é"}'),
        ('{"a": "\\ud83d"}', '{"a": "\\ud83d"}'),
        ('{"a": 12345678901234567890, "a": 1.0}', '{"a": 1.0}'),
    ],
)
def test_arguments_are_json_that_can_be_sent(arguments, expected):
    (call,) = pushed("hermes", [f'<tool_call>{{"name": "now", "arguments": {arguments}}}</tool_call>'])
    assert call.arguments == expected
    call.arguments.encode()


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"type": "string"}, "42", "42"),
        ({"type": "string"}, " 42\n", " 42\n"),
        ({"type": "string"}, "null", "null"),
        ({"type": "integer"}, " 42 ", 42),
        ({"type": "integer"}, "42.0", 42),
        ({"type": "integer"}, "42.5", "42.5"),
        ({"type": "integer"}, "many", "many"),
        ({"type": "integer"}, "null", None),
        ({"type": "integer"}, "9" * 6000, "9" * 6000),
        ({"type": "number"}, "42", 42),
        ({"type": "number"}, "-1.5e3", -1500.0),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "null"}, "None", None),
        ({"type": "array"}, '["a", 1]', ["a", 1]),
        ({"type": "array"}, "['a', True, None]", ["a", True, None]),
        ({"type": "array"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "object"}, '{"a": {"b": []}}', {"a": {"b": []}}),
        ({"type": "object"}, "{'a': 1}", {"a": 1}),
        ({"type": "object"}, "{broken", "{broken"),
        ({"type": "object"}, "{} {}", "{} {}"),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": ["integer", "null"]}, "7", 7),
        ({"type": ["integer", "string"]}, "seven", "seven"),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "true", True),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "7", "7"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "7", 7),
        ({"$ref": "#/$defs/count"}, "7", 7),
        ({"allOf": [{"$ref": "#/$defs/count"}]}, "7", 7),
        ({"$ref": "#/$defs/nowhere"}, "7", "7"),
        ({"$ref": "#/$defs/itself"}, "7", "7"),
        ({"enum": ["a", "b"]}, "a", "a"),
        ({}, "7", "7"),
        (True, "7", "7"),
    ],
)
def test_values_become_what_the_schema_says(schema, value, expected):
    definitions = {"count": {"type": "integer"}, "itself": {"anyOf": [{"$ref": "#/$defs/itself"}] * 3}}
    tools = [tool("f", {"x": schema}, **{"$defs": definitions})]
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call>"
    _, ((_, arguments),) = told(pushed("qwen3_coder", [text], tools))
    assert arguments == {"x": expected} and type(arguments["x"]) is type(expected)


def test_values_of_parameters_that_the_schema_does_not_name():
    text = "<function=f>\n<parameter=x>\n7\n</parameter>\n</function>"
    for tools, expected in [([tool("f")], "7"), ([tool("f", {}, additionalProperties={"type": "integer"})], 7)]:
        assert told(pushed("qwen3_coder", [text], tools)) == ("", [("f", {"x": expected})])
