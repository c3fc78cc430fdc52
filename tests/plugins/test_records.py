"""Records of JSONL and Parquet: what is learnt of them, against transformers; what is wrong with them, by file and line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import fw
from chats import MARKED, PLAIN, opened, plugin, write, write_tokenizer
from fw.cli import colour, main
from fw.errors import UserError
from fw.kinds.data import CUT_OFF, IGNORED

transformers = pytest.importorskip("transformers")

CHATS = [
    [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}],
    [
        {"role": "system", "content": "Be brief. ✓"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi — how are you?\n"},
        {"role": "user", "content": "Fine"},
        {"role": "assistant", "content": "Good 🙂"},
    ],
]


def learnt(samples) -> list[list[int]]:
    return sorted(sample["labels"][sample["labels"] != IGNORED].tolist() for sample in (samples[n] for n in range(len(samples))))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FW_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "not marked"])
def test_the_assistants_words_are_learnt_as_transformers_masks_them(here: Path, template: str) -> None:
    """Where a template marks nothing, what is found is what transformers finds with the same template marked."""
    tokenizer = write_tokenizer(here / "tokenizer", template)
    theirs = transformers.AutoTokenizer.from_pretrained(write_tokenizer(here / "marked", MARKED))
    train = write(here / "train.jsonl", *({"messages": chat} for chat in CHATS))
    val = write(here / "val.jsonl", {"messages": CHATS[0]})
    corpus = opened(plugin("chat", files=[train], val_files=[val], tokenizer=str(tokenizer)))
    assert len(corpus.train) == len(CHATS) and len(corpus.val) == 1
    for number, chat in enumerate(CHATS):
        expected = theirs.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
        ids, mask = torch.tensor(expected["input_ids"]).flatten(), torch.tensor(expected["assistant_masks"]).flatten()
        sample = corpus.train[number]
        assert torch.equal(sample["input_ids"], ids[:-1])
        assert torch.equal(sample["labels"], torch.where(mask[1:].bool(), ids[1:], IGNORED))
        assert mask.sum() > 0
    assert corpus.val_bytes == len("Four.") and corpus.val_text() == ["Four."]
    assert corpus.train_tokens - 1 == sum(map(len, learnt(corpus.train)))


FIRST = [
    [{"role": "assistant", "content": "Hello. How can I help?"}],
    [
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Two and two?"},
        {"role": "assistant", "content": "Four."},
    ],
    [{"role": "assistant", "content": "You see <|im_start|>assistant\nhere."}, {"role": "user", "content": "Yes"}],
]
INJECTED = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
"""As Qwen 2.5's template begins."""


@pytest.mark.parametrize("before", ["", INJECTED], ids=["as it is", "system prompt injected"])
@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "not marked"])
def test_an_assistant_that_begins_is_learnt_by_its_words_alone(here: Path, template: str, before: str) -> None:
    """Neither its header nor what the template puts before that."""
    tokenizer = write_tokenizer(here / "tokenizer", before + template)
    theirs = transformers.AutoTokenizer.from_pretrained(write_tokenizer(here / "marked", before + MARKED))
    file = write(here / "chats.jsonl", *({"messages": chat} for chat in FIRST))
    corpus = opened(plugin("chat", files=[file], val_files=[file], tokenizer=str(tokenizer)))
    for number, chat in enumerate(FIRST[:2]):  # the third one's words are marks to transformers, which are text here
        expected = theirs.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
        ids, mask = torch.tensor(expected["input_ids"]).flatten(), torch.tensor(expected["assistant_masks"]).flatten()
        assert torch.equal(corpus.train[number]["input_ids"], ids[:-1])
        assert torch.equal(corpus.train[number]["labels"], torch.where(mask[1:].bool(), ids[1:], IGNORED))
    labels = [corpus.train[number]["labels"] for number in range(3)]
    said = [corpus.tokenizer.decode(each[each != IGNORED].tolist()) for each in labels]
    assert said[0] == "Hello. How can I help?<|im_end|>" and said[1] == "Hello<|im_end|>Four.<|im_end|>"
    assert said[2] == "You see <|im_start|>assistant\nhere.<|im_end|>"


def test_an_assistant_that_begins_where_nothing_asks_is_refused(here: Path) -> None:
    """A template without a generation prompt, of which nobody can tell where the header ends."""
    tokenizer = write_tokenizer(here / "tokenizer", "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}")
    file = write(here / "chats.jsonl", {"messages": FIRST[0]})
    with pytest.raises(UserError, match=r"chats.jsonl:1: the assistant begins, and .*\{% generation %\}.*data.on_bad=skip"):
        opened(plugin("chat", files=[file], val_files=[file], tokenizer=str(tokenizer)))


@pytest.mark.parametrize(("learn", "words"), [("last", ["Four.<|im_end|>", "Good 🙂<|im_end|>"]), ("assistant", None), ("all", None)])
def test_what_of_a_conversation_is_learnt(here: Path, learn: str, words: list[str] | None) -> None:
    tokenizer = write_tokenizer(here / "tokenizer", PLAIN)
    file = write(here / "chats.jsonl", *({"messages": chat} for chat in CHATS))
    corpus = opened(plugin("chat", files=[file], val_files=[file], tokenizer=str(tokenizer), learn=learn))
    found = [corpus.tokenizer.decode(ids) for ids in learnt(corpus.train)]
    if words is not None:
        assert sorted(found) == sorted(words)
    if learn == "all":
        whole = [corpus.tokenizer.apply_chat_template(chat, tokenize=False) for chat in CHATS]
        assert sorted(found) == sorted(text.removeprefix("<|im_start|>") for text in whole), "the first token follows nothing"


def test_other_forms_of_conversations(here: Path) -> None:
    tokenizer = write_tokenizer(here / "tokenizer", PLAIN)
    same = [
        {"conversations": [{"from": "human", "value": "Two and two?"}, {"from": "gpt", "value": "Four."}]},
        {"prompt": "Two and two?", "completion": "Four."},
        {"prompt": CHATS[0][:1], "completion": CHATS[0][1:]},
    ]
    file = write(here / "chats.jsonl", {"messages": CHATS[0]})
    expected = opened(plugin("chat", files=[file], val_files=[file], tokenizer=str(tokenizer))).train[0]
    for number, record in enumerate(same):
        other = write(here / f"{number}.jsonl", record)
        messages = "conversations" if "conversations" in record else "messages"
        found = opened(plugin("chat", files=[other], val_files=[other], tokenizer=str(tokenizer), messages=messages)).train[0]
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_texts_and_prompts(here: Path) -> None:
    tokenizer = write_tokenizer(here / "tokenizer", None)
    file = write(here / "records.jsonl.gz", {"text": "abc"}, {"prompt": "2+2=", "completion": "4", "text": None}, "")
    for learn, expected in (("completion", ["4<|im_end|>", "bc<|im_end|>"]), ("all", ["+2=4<|im_end|>", "bc<|im_end|>"])):
        corpus = opened(plugin("jsonl", files=[file], val_files=[file], tokenizer=str(tokenizer), learn=learn))
        assert sorted(corpus.tokenizer.decode(ids) for ids in learnt(corpus.train)) == expected
    assert list(corpus.train.lengths) == [3, 5]
    cut = corpus.train.__class__(next(path for path in (here / "cache").glob("records-*") if path.is_dir()), "train", "uint16", 2)
    assert list(cut.lengths) == [2, 2] and cut[1]["input_ids"].tolist() == corpus.train[1]["input_ids"].tolist()[:2]


def test_parquet_holds_the_same(here: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    tokenizer = write_tokenizer(here / "tokenizer", PLAIN)
    values = [{"messages": chat} for chat in CHATS]
    lines = write(here / "chats.jsonl", *values)
    parquet.write_table(pyarrow.Table.from_pylist(values), here / "chats.parquet")
    one, other = (
        opened(plugin("chat", files=[file], val_files=[file], tokenizer=str(tokenizer))).train for file in (lines, "chats.parquet")
    )
    assert len(one) == len(other) == 2
    for number in range(2):
        assert all(torch.equal(one[number][key], other[number][key]) for key in ("input_ids", "labels"))


BAD = {
    "{": r"it is no JSON",
    "[1, 2]": r"it is a list, not an object",
    '{"other": 1}': r"it has neither messages nor prompt and completion, but other",
    '{"messages": "hello"}': r"it has no list of messages",
    '{"messages": [{"content": "x"}]}': r"message 0 has no role",
    '{"messages": [{"role": "user", "content": "x"}]}': r"no message of it is an assistant's",
    '{"messages": [{"role": "user", "content": 5}, 7]}': r"message 1 is a int, not an object",
}


@pytest.mark.parametrize("line", BAD, ids=range(len(BAD)))
def test_a_bad_line_is_named_or_left_out(here: Path, line: str) -> None:
    tokenizer = write_tokenizer(here / "tokenizer", PLAIN)
    good = {"messages": CHATS[0]}
    file = write(here / "chats.jsonl", good, "", line, good)
    with pytest.raises(UserError, match=rf"chats.jsonl:3: {BAD[line]}.*data.on_bad=skip"):
        opened(plugin("chat", files=[file], val_files=[file], tokenizer=str(tokenizer)))
    said: list[str] = []
    val = write(here / "val.jsonl", good)
    corpus = opened(plugin("chat", files=[file], val_files=[val], tokenizer=str(tokenizer), on_bad="skip"), said=said)
    assert len(corpus.train) == 2
    assert any(text.startswith("data: 1 bad records skipped, the first:") and "chats.jsonl:3:" in text for text in said)


DEEP = 100_000
UNREADABLE = {
    "a number of 5,000 digits": ('{"text": "a", "n": ' + "9" * 5000 + "}", "it is no JSON that can be read: Exceeds the limit"),
    "lists in lists": ('{"text": "a", "n": ' + "[" * DEEP + "]" * DEEP + "}", "lists and objects in it are nested too deeply"),
    "half of a character": ('{"text": "\\ud83d"}', "text: character 0 is "),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_line_that_json_chokes_on_is_a_bad_record(here: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    line, sentence = UNREADABLE[what]
    tokenizer = write_tokenizer(here / "tokenizer", None)
    file = write(here / "records.jsonl", {"text": "good"}, line, {"text": "good too"})
    with pytest.raises(UserError, match=rf"records.jsonl:2: {sentence}.*data.on_bad=skip"):
        opened(plugin("jsonl", files=[file], val_files=[file], tokenizer=str(tokenizer)))
    said: list[str] = []
    corpus = opened(plugin("jsonl", files=[file], val_files=[file], tokenizer=str(tokenizer), on_bad="skip"), said=said)
    assert len(corpus.train) == 2 and corpus.facts["bad"] == 2
    assert any(text.startswith("data: 2 bad records skipped, the first:") and "records.jsonl:2:" in text for text in said)


def test_a_depth_that_json_reads_and_nothing_else_does(here: Path) -> None:
    """Whatever the depth at which one of reading, hashing and sending to another process gives up, the line is said."""
    tokenizer = write_tokenizer(here / "tokenizer", None)
    file = write(here / "records.jsonl", *('{"text": "a", "n": ' + "[" * n + "]" * n + "}" for n in range(100, 1100, 20)))
    said: list[str] = []
    corpus = opened(plugin("jsonl", files=[file], val_files=[file], tokenizer=str(tokenizer), on_bad="skip"), said=said)
    assert len(corpus.train) + corpus.facts["bad"] // 2 == 50


@pytest.mark.parametrize("on_bad", ["stop", "skip"])
@pytest.mark.parametrize("broken", ["bytes", "end", "checksum"])
def test_a_gzip_stream_that_breaks_off_cannot_be_skipped(here: Path, broken: str, on_bad: str) -> None:
    tokenizer = write_tokenizer(here / "tokenizer", None)
    file = here / "records.jsonl.gz"
    write(file, *({"text": f"number {n * n * 7919}"} for n in range(900)))
    content = bytearray(file.read_bytes())
    if broken == "bytes":
        content[10] = 0x07  # a block of a kind that there is none of
    elif broken == "checksum":
        content[-8] ^= 1
    file.write_bytes(content[: len(content) // 2] if broken == "end" else content)
    sentence = r"^data.files: \S+records.jsonl.gz:\d+: the gzip stream is broken .* write the file again$"
    with pytest.raises(UserError, match=sentence) as found:
        opened(plugin("jsonl", files=[str(file)], val_files=[str(file)], tokenizer=str(tokenizer), on_bad=on_bad))
    line = int(str(found.value).split("jsonl.gz:")[1].split(":")[0])
    assert {"bytes": line == 1, "end": 200 < line < 900, "checksum": line == 901}[broken]


def test_bytes_that_are_no_text(here: Path) -> None:
    tokenizer = write_tokenizer(here / "tokenizer", None)
    (here / "records.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(UserError, match=r"records.jsonl:2: it is not UTF-8: byte 10 is 0xff"):
        opened(plugin("jsonl", files=["records.jsonl"], tokenizer=str(tokenizer)))


def test_a_template_that_writes_a_beginning_otherwise_is_refused(here: Path) -> None:
    tokenizer = write_tokenizer(here / "tokenizer", "{{ messages | length }}" + PLAIN)
    file = write(here / "chats.jsonl", {"messages": CHATS[1]})
    with pytest.raises(UserError, match=r"writes the beginning of a conversation otherwise.*\{% generation %\}"):
        opened(plugin("chat", files=[file], val_files=[file], tokenizer=str(tokenizer)))


def test_a_share_is_held_out_by_content(here: Path) -> None:
    tokenizer = write_tokenizer(here / "tokenizer", None)
    values = [{"text": f"number {n}"} for n in range(400)]
    one = opened(plugin("jsonl", files=[write(here / "a.jsonl", *values)], tokenizer=str(tokenizer), val_fraction=0.2))
    other = opened(plugin("jsonl", files=[write(here / "b.jsonl", *values[::-1])], tokenizer=str(tokenizer), val_fraction=0.2))
    assert 50 < len(one.val) < 110 and len(one.train) + len(one.val) == 400
    assert learnt(one.val) == learnt(other.val), "whatever their order"
    assert one.fingerprint != other.fingerprint


def test_the_preview_shows_what_is_learnt(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(here / "tokenizer", PLAIN)
    write(here / "chats.jsonl", *({"messages": chat} for chat in CHATS))
    (here / "chat.yaml").write_text(
        json.dumps(
            {
                "model": {"name": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2},
                "data": {"name": "chat", "files": ["chats.jsonl"], "val_files": ["chats.jsonl"], "tokenizer": "tokenizer"},
                "train": {"sequence_length": 128, "global_batch_size": 2, "max_steps": 2, "save_every": 0, "packing": True},
                "launch": {"accelerator": "cpu"},
            }
        )
    )
    assert main(["data", "preview", "chat.yaml"]) == 0
    said = capsys.readouterr().out
    assert "chat, train: 2 samples, 37 tokens learnt" in said
    assert "<|im_start|>assistant\n⟦Four.<|im_end|>⟧\n" in said
    assert "⟦Hi — how are you?\n<|im_end|>⟧" in said and "⟦Good 🙂<|im_end|>⟧" in said and "⟦Two" not in said

    with monkeypatch.context() as patch:
        patch.setattr(colour, "wanted", lambda: True)
        assert main(["data", "preview", "chat.yaml"]) == 0
    painted = capsys.readouterr().out
    assert re.sub(r"\x1b\[\d+m", "", painted) == re.sub("[⟦⟧]", "", said), "colours add nothing and hide nothing"
    first, second = re.split(r"sample \d: .*\n", painted)[1:]
    # By line, so that a pager that begins in the middle has it right; 32 is green, 2 dim.
    assert re.findall(r"\x1b\[32m(.*?)\x1b\[0m", first) == ["Four.<|im_end|>"]
    assert re.findall(r"\x1b\[32m(.*?)\x1b\[0m", second) == ["Hi — how are you?", "<|im_end|>", "Good 🙂<|im_end|>"]
    assert re.findall(r"\x1b\[2m(.*?)\x1b\[0m", first) == ["<|im_start|>user", "Two and two?<|im_end|>", "<|im_start|>assistant"]
    assert not re.sub(r"\x1b\[(2|32)m.*?\x1b\[0m", "", first + second).strip(), "and every word is one of the two"

    assert main(["data", "preview", "chat.yaml", "--html", "page.html", "--split", "val", "--samples", "1"]) == 0
    page = (here / "page.html").read_text()
    assert "<b>Four.&lt;|im_end|&gt;</b>" in page and page.count("<h2>") == 1
    assert main(["data", "preview", "chat.yaml", "--samples", "0"]) == 2

    assert main(["train", "chat.yaml", "train.run_dir=run"]) == 0
    assert fw.load_tokenizer("run" if (here / "run/tokenizer.json").exists() else "tokenizer").eos_token == "<|im_end|>"
    assert json.loads((here / "run/summary.json").read_text())["val_bits_per_byte"] > 0


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}}
WITH_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + PLAIN


def test_tools_may_be_json_in_a_text(here: Path) -> None:
    tokenizer = str(write_tokenizer(here / "tokenizer", WITH_TOOLS))
    values = ({"messages": CHATS[0], "tools": tools} for tools in ([TOOL], json.dumps([TOOL]), "", None))
    listed, text, empty, none = (
        opened(plugin("chat", files=[file], val_files=[file], tokenizer=tokenizer)).train[0]
        for file in [write(here / f"{number}.jsonl", value) for number, value in enumerate(values)]
    )
    assert torch.equal(listed["input_ids"], text["input_ids"]) and torch.equal(empty["input_ids"], none["input_ids"])
    assert len(listed["input_ids"]) > len(none["input_ids"]) + 50
    for number, wrong in enumerate(("{", '"add"', {"add": 1}, [1])):
        file = write(here / f"wrong{number}.jsonl", {"messages": CHATS[0], "tools": wrong})
        with pytest.raises(UserError, match="its tools are"):
            opened(plugin("chat", files=[file], val_files=[file], tokenizer=tokenizer))


def test_fields_that_a_table_gives_all_objects_are_not_in_them(here: Path) -> None:
    """Parquet has one type for all rows: an object without a field comes back with nothing in it."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    other = json.loads(json.dumps(TOOL).replace('"a"', '"b"').replace("add", "neg"))
    values = [{"messages": CHATS[0], "tools": [TOOL]}, {"messages": CHATS[1], "tools": [other]}]
    lines = write(here / "chats.jsonl", *values)
    parquet.write_table(pyarrow.Table.from_pylist(values), here / "chats.parquet")
    tokenizer = str(write_tokenizer(here / "tokenizer", WITH_TOOLS))
    one, table = (opened(plugin("chat", files=[file], val_files=[file], tokenizer=tokenizer)).train for file in (lines, "chats.parquet"))
    assert [one[n]["labels"].tolist() for n in range(2)] == [table[n]["labels"].tolist() for n in range(2)]
    assert [len(one[n]["input_ids"]) for n in range(2)] == [len(table[n]["input_ids"]) for n in range(2)]


def test_answers_behind_the_cut_are_counted_and_none_at_all_is_refused(here: Path) -> None:
    tokenizer = str(write_tokenizer(here / "tokenizer", None))
    long, short = {"prompt": "p" * 100, "completion": "never"}, {"prompt": "p", "completion": "seen"}
    data = plugin(
        "jsonl", files=[write(here / "a.jsonl", long, short, long)], val_files=[write(here / "b.jsonl", short)], tokenizer=tokenizer
    )
    corpus = opened(data, 50)
    assert corpus.facts[CUT_OFF] == 2 and corpus.train_tokens - 1 == sum(map(len, learnt(corpus.train))) == len("seen") + 1
    assert CUT_OFF not in data.open(200).facts
    none = plugin("jsonl", files=[write(here / "c.jsonl", long)], val_files=[write(here / "d.jsonl", short)], tokenizer=tokenizer)
    with pytest.raises(UserError, match=r"train.sequence_length: 50 cuts off all that is learnt of every record to train on"):
        opened(none, 50)


def run_of(here: Path, **data: object) -> None:
    """Leaves a config of a small run with these records."""
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    train = {"max_steps": 2, "global_batch_size": 2, "sequence_length": 16, "val_every": 0, "save_every": 1, "sample_tokens": 0}
    tokenizer = str(write_tokenizer(here / "tokenizer", None))
    tree = {
        "model": {"name": "llama", **shape},
        "data": {"name": "jsonl", "tokenizer": tokenizer, **data},
        "train": {**train, "run_dir": "run"},
    }
    (here / "run.yaml").write_text(json.dumps(tree))


def test_another_division_into_samples_is_other_data(here: Path) -> None:
    """Its fingerprint is of what was read; which part of that is held out decides the order of the rest."""
    values = [{"text": f"number {n}"} for n in range(60)]
    write(here / "a.jsonl", *values)
    run_of(here, files=["a.jsonl"])
    assert main(["train", "run.yaml"]) == 0
    with pytest.raises(UserError, match=r"was trained on \d+ samples with \d+ held out, the config gives \d+ and \d+: the order"):
        fw.train("run.yaml", "resume=auto", "train.max_steps=3", "data.val_fraction=0.3")
    assert main(["train", "run.yaml", "resume=auto", "train.max_steps=3"]) == 0


def test_answers_that_are_no_text_have_no_bits_per_byte(here: Path) -> None:
    """Of an end alone nothing is left without special tokens."""
    records = [{"prompt": f"p{n}", "completion": ""} for n in range(8)]
    write(here / "a.jsonl", *records)
    run_of(here, files=["a.jsonl"], val_files=["a.jsonl"])
    summary = fw.train("run.yaml", "train.val_every=1", "train.save_every=0").summary
    assert summary["val_loss"] > 0 and summary["val_bits_per_byte"] is None
