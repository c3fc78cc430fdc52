"""Chat templates, compared with transformers: text, ids, and which ids are the assistant's."""

from __future__ import annotations

import json
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from enum import Enum

import pytest

from fw.errors import UserError
from fw.tokenizer import TokenizedChat, Tokenizer, load_tokenizer
from tokenizer.directories import FAST, GEMMA, LLAMA3_CONFIG, byte_level, llama3, llama_config, metaspace, qwen, qwen_config, write

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, seen=0) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}
        {%- if message.content is defined %}{{- message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {%- set ns.seen = ns.seen + 1 %}
        {{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' }}
    {%- elif message.role != 'system' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date is defined %}{%- set date = "26 Jul 2024" %}{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception("Unknown role: " + message.role) }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if loop.first and message.role == 'system' %}{{- 'Today: ' + date + '\\n' }}{%- endif %}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message['content'] | trim }}{{- eos_token }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if tools is not none %}{{- tools | tojson(indent=4, sort_keys=true) }}{%- endif %}
{%- if documents %}{%- for d in documents %}{{- d.title }}: {{ d.text }}{%- endfor %}{%- endif %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}"
    "{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{% generation %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endgeneration %}"
    "{% endif %}{% endfor %}"
)

GEMMA_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' }}{% generation %}
{%- if message['content'] is string %}
{{ message['content'] | trim }}
{%- else %}
{% for item in message['content'] %}{% if item.type == 'image' %}{% continue %}{% endif %}{{ item.text }}{% endfor %}
{% endif %}
{% endgeneration %}{{ '<end_of_turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<start_of_turn>model\\n' }}{% endif %}
"""


def directories(tmp):
    gemma = {"tokenizer_class": "GemmaTokenizer", "mask_token": None, "chat_template": GEMMA_TEMPLATE}
    return {
        "chatml": write(tmp / "chatml", qwen(), qwen_config(), config={"model_type": "qwen3"}, template=CHATML),
        "llama3": write(tmp / "llama3", llama3(), {**LLAMA3_CONFIG, "tokenizer_class": FAST, "chat_template": LLAMA3}),
        "llama2": write(tmp / "llama2", metaspace("normalizer"), llama_config(chat_template=LLAMA2)),
        "llama2-fast": write(tmp / "llama2-fast", metaspace("normalizer"), llama_config(chat_template=LLAMA2, tokenizer_class=FAST)),
        "gemma": write(tmp / "gemma", metaspace("gemma", GEMMA, "<bos>"), gemma),
    }


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return directories(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module", params=["chatml", "llama3", "llama2", "llama2-fast", "gemma"])
def both(request, places):
    from transformers import AutoTokenizer

    return load_tokenizer(places[request.param]), AutoTokenizer.from_pretrained(places[request.param])


@pytest.fixture
def chatml(places) -> Tokenizer:
    return load_tokenizer(places["chatml"])


def message(role: str, content, **more):
    return {"role": role, "content": content, **more}


PLAIN = [
    message("user", "Hello, what's 2 + 2?"),
    message("assistant", "It is 4."),
    message("user", "  naïve 漢字 <html>&amp; 'quoted' \"twice\" "),
    message("assistant", "👩‍👩‍👧‍👦 مرحبا e\u0301."),
]
WITH_SYSTEM = [message("system", "You are the model.\nBe brief."), *PLAIN, message("user", "<|im_end|>[INST]</s><bos> again")]
CALLS = [
    message("user", "weather?"),
    message(
        "assistant", None, tool_calls=[{"type": "function", "function": {"name": "get", "arguments": {"city": "Zürich <1>", "n": 1.0}}}]
    ),
    message("tool", '{"t": 21}', tool_call_id=None),
    message("assistant", "21 °C", thinking="easy"),
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get",
            "description": "Get <b>weather</b> für 'hier' & dort",
            "parameters": {"type": "object", "a": [1, 2.5, None]},
        },
    }
]


def same(both, messages, **options):
    """The same text and ids; gives both texts' one."""
    ours, theirs = both
    text = theirs.apply_chat_template(messages, tokenize=False, **options)
    assert ours.apply_chat_template(messages, tokenize=False, **options) == text
    ids = theirs.apply_chat_template(messages, return_dict=True, **options)["input_ids"]
    assert ours.apply_chat_template(messages, **options) == ids
    assert len(ids) > 0
    return text


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("messages", [PLAIN, WITH_SYSTEM, PLAIN[:1], PLAIN[:3]], ids=["plain", "system", "one", "three"])
def test_text_and_ids(both, messages, prompt):
    text = same(both, messages, add_generation_prompt=prompt)
    assert messages[0]["content"].strip() in text


@pytest.mark.parametrize("messages", [PLAIN, WITH_SYSTEM, PLAIN[:1]], ids=["plain", "system", "one"])
def test_the_mask_of_the_assistant(both, messages):
    ours, theirs = both
    expected = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    chat = ours.apply_chat_template(messages, return_assistant_mask=True)
    assert isinstance(chat, TokenizedChat)
    assert chat.ids == expected["input_ids"] == ours.apply_chat_template(messages)
    assert chat.assistant_mask == expected["assistant_masks"]
    answered = any(m["role"] == "assistant" for m in messages) or ours.bos_token == "<bos>"
    assert (1 in chat.assistant_mask) == answered and 0 in chat.assistant_mask


def test_tools_calls_and_reasoning(both):
    ours, _ = both
    if ours.bos_token == "<|begin_of_text|>":
        same(both, PLAIN, tools=TOOLS, documents=[{"title": "A", "text": "b"}], date="1 Jan 2025")
    elif ours.token_to_id("<tool_call>"):
        text = same(both, CALLS, tools=TOOLS)
        assert '"Zürich <1>"' in text and "<think>easy</think>" in text and "None" not in text
        expected = both[1].apply_chat_template(CALLS, tools=TOOLS, return_dict=True, return_assistant_tokens_mask=True)
        assert ours.apply_chat_template(CALLS, tools=TOOLS, return_assistant_mask=True).assistant_mask == expected["assistant_masks"]


@pytest.mark.parametrize("content", ["It is", "It is  ", " It is\n", "It is [INST] "])
def test_the_last_message_is_left_open(both, content):
    text = same(both, [*PLAIN[:1], message("assistant", content)], continue_final_message=True)
    assert text.rstrip().endswith(content.strip())


def test_a_part_of_the_last_message_is_left_open(places):
    from transformers import AutoTokenizer

    both = load_tokenizer(places["chatml"]), AutoTokenizer.from_pretrained(places["chatml"])
    final = message("assistant", "", reasoning_content="so far ")
    assert same(both, [*PLAIN[:1], final], continue_final_message="reasoning_content").endswith("<think>so far ")
    assert same(both, [*PLAIN[:1], {**final, "thinking": "so far "}], continue_final_message="thinking").endswith("<think>so far ")
    both = load_tokenizer(places["gemma"]), AutoTokenizer.from_pretrained(places["gemma"])
    final = message("assistant", [{"type": "text", "text": "first "}, {"type": "text", "text": "then"}, {"type": "image"}])
    assert same(both, [*PLAIN[:1], final], continue_final_message=True).endswith("first then")


TEMPLATES = {
    "blocks": "a\n  {% if true %}\n  b\n  {% endif %}\nc {#- note -#}\n d\n",
    "tojson": "{{ messages[0] | tojson }}|{{ messages | tojson(indent=2) }}"
    "|{{ {'b': 1, 'a': 'é'} | tojson(ensure_ascii=true, sort_keys=true) }}|{{ [1, 2] | tojson(separators=(',', ':')) }}",
    "loops": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "names": "{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ dict(x=1).x }}{{ missing }}"
    "{{ eos_token }}{{ pad_token }}{{ bos_token }}",
    "extra": "{{ flag }}{{ number + 1 }}{{ deep.a[1] }}{{ colour }}{{ dict.fromkeys(['k'], 2) }}",
    "strings": "{{ messages[0].content.split(' ')[0] | upper }}{{ messages[0]['content'][:3] }}{{ messages[-1]['content'] | length }}",
    "macro": "{% macro turn(m) %}{{ '<' ~ m.role ~ '>' }}{{ m.content }}{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_dialect(places, name):
    from transformers import AutoTokenizer

    class Colour(str, Enum):
        RED = "red"

    both = load_tokenizer(places["chatml"]), AutoTokenizer.from_pretrained(places["chatml"])
    extra = {"flag": True, "number": 2, "deep": {"a": (1, 2)}, "colour": Colour.RED} if name == "extra" else {}
    same(both, PLAIN, chat_template=TEMPLATES[name], **extra)


def test_the_date(chatml):
    before = datetime.now().strftime("%d %b %Y")
    text = chatml.apply_chat_template(PLAIN, chat_template="{{ strftime_now('%d %b %Y') }}", tokenize=False)
    assert text in (before, datetime.now().strftime("%d %b %Y"))


def test_spans_are_right_also_in_a_macro_and_nested(chatml):
    template = (
        "{% macro said(m) %}{{ '<|im_start|>' }}{% generation %}{{ m.content }}{% generation %}{{ '<|im_end|>' }}{% endgeneration %}"
        "{% endgeneration %}{% generation %}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{{ 'before ' }}{{ said(m) }}{{ ' after\n' }}{% endfor %}"
    )
    chat = chatml.apply_chat_template(PLAIN, chat_template=template, return_assistant_mask=True)
    marked = chatml.decode([i for i, bit in zip(chat.ids, chat.assistant_mask, strict=True) if bit])
    assert marked == unicodedata.normalize("NFC", "".join(f"{m['content']}<|im_end|>" for m in PLAIN))
    assert chat.ids == chatml.apply_chat_template(PLAIN, chat_template=template)


def test_a_mask_ends_with_the_whole_last_character(chatml):
    """An emoji is several byte tokens; all of them are the assistant's, also at the end of the span."""
    template = "{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }}{% endgeneration %}{{ '\n' }}{% endfor %}"
    chat = chatml.apply_chat_template([message("user", "🫠")], chat_template=template, return_assistant_mask=True)
    assert sum(chat.assistant_mask) == len(chatml.encode("🫠")) > 1


@pytest.mark.parametrize("folder", [False, True])
def test_several_templates(tmp_path, folder):
    from transformers import AutoTokenizer

    named = {"default": "D{{ messages[0].content }}", "tool_use": "T{{ tools | length }}", "rag": "R{{ documents | length }}"}
    config = {"tokenizer_class": FAST}
    if folder:
        write(tmp_path, byte_level(), {**config, "chat_template": "not this one"}, template=named["default"])
        (tmp_path / "additional_chat_templates").mkdir()
        for name in ("tool_use", "rag"):
            (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_bytes(named[name].encode() + b"\r\n!")
    else:
        write(tmp_path, byte_level(), {**config, "chat_template": [{"name": n, "template": t} for n, t in named.items()]})
    both = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert same(both, PLAIN).startswith("DHello")
    assert same(both, PLAIN, tools=TOOLS).startswith("T1")
    assert same(both, PLAIN, tools=TOOLS, chat_template="default").startswith("DHello")
    assert same(both, PLAIN, documents=[{"title": "t"}], chat_template="rag").startswith("R1")
    with pytest.raises(UserError, match=r"no chat template 'tool_user'; did you mean 'tool_use'\? \(there are: "):
        both[0].apply_chat_template(PLAIN, chat_template="tool_user")
    both[0].save(tmp_path / "copy")
    copied = load_tokenizer(tmp_path / "copy")
    assert copied.apply_chat_template(PLAIN, chat_template="rag", documents=[], tokenize=False).startswith("R0")


def test_none_of_several_is_the_default(tmp_path):
    config = {"tokenizer_class": FAST, "chat_template": {"a": "{{ 1 }}", "b": "{{ 2 }}"}}
    tokenizer = load_tokenizer(write(tmp_path, byte_level(), config))
    with pytest.raises(UserError, match="none of its chat templates is the default; name one of a, b as chat_template"):
        tokenizer.apply_chat_template(PLAIN)
    assert tokenizer.apply_chat_template(PLAIN, chat_template="b", tokenize=False) == "2"


def test_the_callers_messages_stay_as_they_are(chatml):
    messages = json.loads(json.dumps([*PLAIN[:1], message("assistant", [{"type": "text", "text": "x"}], thinking="y")]))
    before = json.dumps(messages)
    template = "{% for m in messages %}{{ m.content }}{{ m.reasoning_content }}{% endfor %}"
    chatml.apply_chat_template(messages, chat_template="{{ messages[-1].content[0].text }}", continue_final_message=True)
    chatml.apply_chat_template(messages, chat_template=template)
    assert json.dumps(messages) == before


def test_threads_do_not_disturb_each_other(chatml):
    wanted = [(PLAIN[: 2 + i % 3], i % 2 == 0) for i in range(200)]

    def ask(what):
        return chatml.apply_chat_template(what[0], return_assistant_mask=what[1])

    expected = list(map(ask, wanted))
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, wanted)) == expected


def test_a_template_is_kept_in_its_sandbox(chatml):
    for attack in (
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ (1).__class__.__bases__[0].__subclasses__() }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ namespace(__x=1) }}",
        "{{ raise_exception.__globals__ }}{{ strftime_now.__globals__['json'] }}",
        "{{ '%s' | format(messages.__class__.__init__) }}{{ messages.__class__() }}",
    ):
        with pytest.raises(UserError, match="chat_template: "):
            chatml.apply_chat_template(PLAIN, chat_template=attack, tokenize=False)


class Opaque: ...


BROKEN = "{% generation %}{{ messages[0].content }}{% endgeneration %}"


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([], {}, "chat_template.jinja: the conversation is empty; give at least one message"),
        (["hi"], {}, r"messages\[0\]: it is a str, not an object"),
        ([message("user", Opaque())], {}, r"messages\[0\].content: a chat template takes JSON data, not a Opaque"),
        (PLAIN, {"tools": [print]}, r"tools\[0\]: a chat template takes JSON data, not a builtin_function_or_method"),
        (PLAIN, {"colour": {"a": Opaque()}}, "colour.a: a chat template takes JSON data"),
        ([message("user", 5)], {}, "chat_template.jinja: it cannot write these messages: "),
        ([{"role": "user"}], {}, "chat_template.jinja: 'dict object' has no attribute 'content'"),
        (PLAIN, {"chat_template": "a\n{% if %}"}, "chat_template, line 2: Expected an expression"),
        (PLAIN, {"chat_template": "{% generation %}x"}, "chat_template, line 1: Unexpected end of template"),
        (PLAIN, {"chat_template": "{{ raise_exception('no ' + messages[0].role) }}"}, "chat_template: no user$"),
        (PLAIN, {"chat_template": "{{ 1 }}", "return_assistant_mask": True}, "chat_template: it does not mark what the assistant writes"),
        (PLAIN, {"return_assistant_mask": True, "tokenize": False}, "there is none without tokenize=True"),
        (PLAIN, {"return_assistant_mask": True, "continue_final_message": True}, "continue_final_message and an assistant mask exclude"),
        (PLAIN, {"add_generation_prompt": True, "continue_final_message": True}, "and add_generation_prompt exclude each other"),
        ([message("user", None)], {"continue_final_message": True}, r"messages\[0\]: it has no 'content' to be continued"),
        (PLAIN, {"continue_final_message": "role", "chat_template": "{{ 1 }}"}, "it does not read 'role', so that cannot be continued"),
        (
            [message("user", [{"type": "image"}])],
            {"continue_final_message": True},
            r"messages\[0\].content: there is no text to be continued",
        ),
        (
            PLAIN,
            {"continue_final_message": True, "chat_template": "{{ messages[0].content }}"},
            "it does not write the last message as it is",
        ),
        (
            PLAIN,
            {"chat_template": f"{{% set x %}}{BROKEN}{{% endset %}}", "return_assistant_mask": True},
            "changes or drops what stands in",
        ),
        (
            [message("user", " x ")],
            {"chat_template": f"{{% set x %}}{BROKEN}{{% endset %}}{{{{ x | trim }}}}", "return_assistant_mask": True},
            "changes or drops what stands in",
        ),
        ([message("user", "\ufdd0")], {"return_assistant_mask": True, "chat_template": BROKEN}, "changes or drops what stands in"),
    ],
)
def test_wrong_use_says_what_is_wrong(chatml, messages, options, message):
    with pytest.raises(UserError, match=message):
        chatml.apply_chat_template(messages, **options)


def test_a_template_refuses_a_conversation(places):
    llama2 = load_tokenizer(places["llama2"])
    with pytest.raises(UserError, match=r"tokenizer_config.json: chat_template: Roles must alternate user/assistant$"):
        llama2.apply_chat_template([PLAIN[0], PLAIN[0]])


def test_there_is_no_template(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, byte_level(), {"tokenizer_class": FAST}))
    with pytest.raises(UserError, match=r"it has no chat template; give one as chat_template, or put it there as chat_template\.jinja"):
        tokenizer.apply_chat_template(PLAIN)
    with pytest.raises(UserError, match=r"there is no chat template 'default' \(there are: none\)"):
        tokenizer.apply_chat_template(PLAIN, chat_template="default")
