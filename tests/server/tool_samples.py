"""Answers of models, with calls of functions and without."""

import json

from fw.server.tool_calls import Call, Content, ToolCalls


def tool(name, properties=None, **rest):
    parameters = {} if properties is None else {"parameters": {"type": "object", "properties": properties, **rest}}
    return {"type": "function", "function": {"name": name, "description": f"it does {name}", **parameters}}


WEATHER = {"city": {"type": "string"}, "metric": {"type": "string"}, "days": {"type": "integer"}}
TOOLS = [
    tool("get_weather", WEATHER, required=["city"]),
    tool("get_weather_now", {"city": {"type": "string"}}),
    tool("now"),
    tool("get-time", {"zone": {"type": "string"}}),
    tool("add", {"a": {"type": "number"}, "b": {"type": "number"}}),
    tool("write", {"file": {"type": "string"}, "text": {"type": "string"}, "options": {"type": "object"}, "tags": {"type": "array"}}),
]
SF = ("get_weather", {"city": "San Francisco", "metric": "celsius"})
SEATTLE = ("get_weather", {"city": "Seattle", "metric": "celsius"})
NOW = ("now", {})

# Answers as the models write them; the places that say so are named in the formats' docstrings. (format, answer, content, calls)
SAMPLES = [
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "", [NOW]),
    (
        "hermes",
        'Let me look.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "San Francisco", "metric": "celsius"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Seattle", "metric": "celsius"}}\n</tool_call>',
        "Let me look.",
        [SF, SEATTLE],
    ),
    # arguments first and spaces around, as in Hermes' own template
    ("hermes", '\n<tool_call>\n{ "arguments": {"zone": "CET"}, "name": "get-time"}\n</tool_call> ', "", [("get-time", {"zone": "CET"})]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call> and then?', " and then?", [NOW]),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": -2.5e-3}}', "", [("add", {"a": 1, "b": -0.0025})]),  # until the end
    ("hermes", '<tool_call>\n{"name": "now", "arguments": "{}"}\n</tool_call>', "", [NOW]),
    (
        "hermes",
        '<tool_call>\n{"name": "write", "arguments": {"text": "as in <tool_call>{\\"name\\": 1}</tool_call> \\\\", '
        '"tags": []}}\n</tool_call>',
        "",
        [("write", {"text": 'as in <tool_call>{"name": 1}</tool_call> \\', "tags": []})],
    ),
    ("hermes", '<tool_call>{"name": "no</tool_call><tool_call>{"name": "now"}</tool_call>', '<tool_call>{"name": "no</tool_call>', [NOW]),
    ("hermes", '<tool_call><tool_call>{"name": "now"}</tool_call>', "<tool_call>", [NOW]),
    ("llama", '{"name": "get_weather", "parameters": {"city": "San Francisco", "metric": "celsius"}}', "", [SF]),
    ("llama", '<|python_tag|>{\n    "type": "function",\n    "name": "now",\n    "parameters": {}\n}', "", [NOW]),
    ("llama", '{"name": "now", "parameters": {}}; {"name": "now", "arguments": {}}\n{"name": "now", "parameters": null}', "", [NOW] * 3),
    ("llama", '{"name": "now", "parameters": {}}{"name": "add", "parameters": {"a": 1}} ;\n', " ;\n", [NOW, ("add", {"a": 1})]),
    ("llama", 'I look.<|python_tag|>{"name": "now", "parameters": {}}; that was it', "I look.; that was it", [NOW]),
    ("llama", '<|python_start|>{"name": "now", "parameters": {}};{"name": "now", "parameters": {}}<|python_end|>', "", [NOW, NOW]),
    (
        "llama",
        '<|python_start|>{"name": "now", "parameters": {}} and<|python_tag|>{"name": "now", "parameters": {}}<|python_end|>',
        " and<|python_end|>",
        [NOW, NOW],
    ),
    ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "San Francisco", "metric": "celsius"}}]', "", [SF]),
    (
        "mistral",
        'Hello[TOOL_CALLS][{"arguments": {"a": 3.5, "b": 4}, "name": "add", "id": "vAHMlFC9r"}, {"name": "now", "arguments": ""}]\nmore',
        "Hello\nmore",
        [("add", {"a": 3.5, "b": 4}), NOW],
    ),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "San Francisco", "metric": "celsius"}', "", [SF]),
    ("mistral", 'so[TOOL_CALLS]add[CALL_ID]vAHMlFC9r[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}', "so", [("add", {"a": 1}), NOW]),
    ("mistral", '[TOOL_CALLS]add{"a": 3.5, "b": 4}[TOOL_CALLS]now{}', "", [("add", {"a": 3.5, "b": 4}), NOW]),
    (
        "qwen3_coder",
        "Sure!\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nSan Francisco\n</parameter>\n<parameter=metric>\ncelsius\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "Sure!",
        [SF, NOW],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=write>\n<parameter=text>\n\nif a < b:\n    c = '</function>'\n\n</parameter>\n"
        '<parameter=options>\n{"mode": "a",\n "deep": {"x": [1, null]}}\n</parameter>\n<parameter=tags>\n[]\n</parameter>\n'
        "</function>\n</tool_call>\n",
        "",
        [("write", {"text": "\nif a < b:\n    c = '</function>'\n", "options": {"mode": "a", "deep": {"x": [1, None]}}, "tags": []})],
    ),
    ("qwen3_coder", "I do it.\n<function=add>\n<parameter=a>2</parameter>\n</function>\n</tool_call>", "I do it.", [("add", {"a": 2})]),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</function>", "", [NOW]),
    (
        "pythonic",
        "[get_weather(city='San Francisco', metric='celsius'), get_weather(city=\"Seattle\", metric=\"celsius\")]",
        "",
        [SF, SEATTLE],
    ),
    ("pythonic", '<|python_tag|>[get_weather(city="San Francisco", metric="celsius")]', "", [SF]),
    ("pythonic", "<|python_start|>[now(),add(a=-1,b=+.5)]<|python_end|>", "", [NOW, ("add", {"a": -1, "b": 0.5})]),
    (
        "pythonic",
        "[write(text='it\\'s \"so\"\\n', options={'a': [True, None, (1, 2)], 'b': {}}, tags=[false, null, true,])] Done.",
        " Done.",
        [("write", {"text": 'it\'s "so"\n', "options": {"a": [True, None, [1, 2]], "b": {}}, "tags": [False, None, True]})],
    ),
    ("pythonic", r"[write(text='\d+\x41\\')]", "", [("write", {"text": "\\d+A\\"})]),
    ("pythonic", "[ get-time ( zone = '''C'E\nT''', ) ]", "", [("get-time", {"zone": "C'E\nT"})]),
]

BROKEN = [
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call>\n</tool_call>"),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {"a": 1 "b": 2}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {"a", "b"}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {"a": 1e999}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {"a": NaN}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {"a": 007}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {"a": ' + "9" * 6000 + "}}\n</tool_call>"),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": ' + "[" * 3000 + "]" * 3000 + "}\n</tool_call>"),
    ("hermes", '<tool_call>\n{"name": "later", "arguments": {}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": ' + "[" * 150 + "]" * 150 + "}\n</tool_call>"),
    ("hermes", '<tool_call>\n{"name": ["now"], "arguments": {}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"arguments": {}}\n</tool_call>'),
    ("hermes", '<tool_call>\n[{"name": "now", "arguments": {}}]\n</tool_call>'),
    ("hermes", ' <tool_call>\n{"name": "now", "arguments": {}} or so </tool_call> '),
    ("hermes", '{"name": "now", "arguments": {}}'),
    ("llama", '{"name": "now", "parameters": {}'),
    ("llama", '{"name": "now"}'),
    ("llama", '{"name": "later", "parameters": {}}'),
    ("llama", '{"answer": {"name": "now", "parameters": {}}}'),
    ("llama", 'It is {"name": "now", "parameters": {}}'),
    ("llama", '<|python_tag|>brave_search.call(query="now")'),
    ("llama", '<|python_tag|>; {"name": "now", "parameters": {}}'),
    ("llama", '; {"name": "now", "parameters": {}}'),
    ("llama", "{}"),
    ("llama", '{{"name": "now", "parameters": {}}'),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}}'),
    ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "later", "arguments": {}}]'),
    ("mistral", "[TOOL_CALLS] [now]"),
    ("mistral", "[TOOL_CALLS]now"),
    ("mistral", "[TOOL_CALLS]now[ARGS]"),
    ("mistral", "[TOOL_CALLS]now[ARGS][]"),
    ("mistral", "[TOOL_CALLS]later[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]now[CALL_ID]123456789{}"[:-1]),
    ("mistral", 'now[ARGS]{"a": 1}'),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=later>\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=>\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=now>\n<parameter=a>\n1\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=now>\n<parameter=>\n1\n</parameter>\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=now>\nso\n</function>\n</tool_call>"),
    ("qwen3_coder", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
    ("pythonic", "[]"),
    ("pythonic", "[now]"),
    ("pythonic", "[now()"),
    ("pythonic", "[now(), later()]"),
    ("pythonic", "[now(),]"),
    ("pythonic", "[now() now()]"),
    ("pythonic", "now()"),
    ("pythonic", "So: [now()]"),
    ("pythonic", "[add(1, 2)]"),
    ("pythonic", "[add(a=1+1)]"),
    ("pythonic", "[add(a=b)]"),
    ("pythonic", "[add(a=now())]"),
    ("pythonic", "[add(a=b'c')]"),
    ("pythonic", "[add(a=1j)]"),
    ("pythonic", "[add(a={1, 2})]"),
    ("pythonic", "[add(a={1: 2})]"),
    ("pythonic", "[add(a=1e999)]"),
    ("pythonic", "[add(a=...)]"),
    ("pythonic", "[add(a='x\ny')]"),
    ("pythonic", "[add(**{'a': 1})]"),
    ("pythonic", "[add(a=(1])]"),
    ("pythonic", "[add(a=" + "[" * 3000 + "]" * 3000 + ")]"),
    ("pythonic", "[Paris](https://example.org)"),
    ("pythonic", "[add(a=" + "[" * 150 + "]" * 150 + ")]"),
    ("pythonic", "[[now()]]"),
    ("pythonic", '[add(a="\\N{NO SUCH CHARACTER}")]'),
    ("pythonic", "[add(a='\0')]"),
]


def pushed(format, pieces, tools=TOOLS):
    calls = ToolCalls(format, tools)
    return [piece for text in pieces for piece in calls.push(text)] + calls.finish()


def told(pieces):
    """Content as a whole, and the calls."""
    calls = [piece for piece in pieces if isinstance(piece, Call)]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert all(piece.text for piece in pieces if isinstance(piece, Content))
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    return content, [(call.name, json.loads(call.arguments)) for call in calls]
