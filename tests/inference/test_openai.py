"""What bodies of OpenAI's requests come to; over HTTP and in lines of a file it is the same."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer as Backend, decoders, models

from fw.errors import UserError
from fw.inference.openai import CHAT, TEXT, Asked, asked, choice
from fw.inference.options import Sampling
from fw.inference.results import Completion, Result
from fw.tokenizer import TextStream, Tokenizer

MESSAGES = [{"role": "user", "content": "who"}]


@pytest.mark.parametrize("more", [{}, {"temperature": 2}, {"n": 3, "seed": 5}, {"temperature": 1e-39}])
def test_a_top_p_of_nothing_takes_the_likeliest(llm, more):
    wanted = asked(llm, TEXT, {"prompt": "the fox", "max_tokens": 9, "ignore_eos": True, "top_p": 0, **more}).sampling
    (result,), (greedy,) = llm.generate("the fox", wanted), llm.generate("the fox", temperature=0, max_tokens=9, ignore_eos=True)
    assert [each.token_ids for each in result.completions] == [greedy.token_ids] * wanted.n


def test_log_probabilities_of_others_beside_the_tokens(llm):
    for body, found in (
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
        ({"top_logprobs": 0}, None),
        ({"top_logprobs": None}, None),
    ):
        assert asked(llm, CHAT, {"messages": MESSAGES, **body}).sampling.logprobs == found
    for body in ({}, {"logprobs": False}, {"logprobs": None}):
        with pytest.raises(UserError, match="top_logprobs: they stand beside those of the tokens; set logprobs: true"):
            asked(llm, CHAT, {"messages": MESSAGES, "top_logprobs": 3, **body})


def test_an_answer_has_one_form(llm):
    schema = {"type": "integer"}
    for form in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": schema}}):
        for more in ({"json_schema": schema}, {"regex": "a"}):
            with pytest.raises(UserError, match=r"response_format and json_schema|json_schema and regex"):
                asked(llm, TEXT, {"prompt": "x", "response_format": form, **more})
    body = {"prompt": "x", "response_format": {"type": "text"}, "json_schema": schema}
    assert asked(llm, TEXT, body).sampling.json_schema == schema


def _tokenizer(words, decoder):
    """Of these tokens, some of which are special."""
    backend = Backend(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    backend.decoder = decoder
    backend.add_special_tokens([word for word in words if word.startswith("<")])
    return Tokenizer.from_backend(backend)


PIECES = _tokenizer(
    ["<unk>", "<s>", "</s>", "▁Hello", "▁big", "▁world", "Hello", "▁"],
    decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
)
BYTES = _tokenizer(["<unk>", "<|im_start|>", "<|im_end|>", "ĠHello", "Ġbig", "Ċ", "Hello", "Ã", "©"], decoders.ByteLevel())


def _offsets(tokenizer, tokens, skip=True, prompt=(), given=None):
    """Of an answer, after a prompt of other tokens; the text that is returned, and where each token stands."""
    ids, before = ([tokenizer.token_to_id(word) for word in words] for words in (tokens, prompt))
    stream = TextStream(tokenizer, skip_special_tokens=skip, after=before)
    text = "".join([*map(stream.push, ids), stream.finish()])
    completion = Completion(0, text, ids, [0.0] * len(ids), [], "stop")
    result = Result("key", before, [completion], [0.0] * (len(before) - 1), [], 0)
    of = Asked(before if given is None else given, Sampling(logprobs=0, skip_special_tokens=skip), False, echo=bool(before))
    found = choice(SimpleNamespace(tokenizer=tokenizer, adapters=[]), of, result, completion)
    return found["text"], found["logprobs"]["text_offset"]


@pytest.mark.parametrize(
    ("tokenizer", "asked_for", "text", "offsets"),
    [
        (PIECES, {"tokens": ["▁Hello", "▁big", "▁world"]}, "Hello big world", [0, 5, 9]),
        (PIECES, {"tokens": ["▁Hello", "</s>", "▁big"], "skip": False}, "Hello</s> big", [0, 5, 9]),
        (PIECES, {"tokens": ["▁Hello", "</s>", "▁big"]}, "Hello big", [0, 5, 5]),
        (PIECES, {"tokens": ["▁big"], "prompt": ["<s>", "▁Hello", "▁big"]}, "Hello big big", [0, 0, 5, 9]),
        (PIECES, {"tokens": ["▁big"], "prompt": ["<s>", "▁Hello", "▁big"], "given": "Hello big"}, "Hello big big", [0, 0, 5, 9]),
        (PIECES, {"tokens": ["▁big"], "prompt": ["<s>", "▁Hello", "▁big"], "given": "<s>Hello big"}, "<s>Hello big big", [0, 3, 8, 12]),
        (PIECES, {"tokens": ["▁big"], "prompt": ["<s>", "▁", "▁Hello"], "given": " Hello"}, " Hello big", [0, 0, 0, 6]),
        (BYTES, {"tokens": ["<|im_start|>", "ĠHello", "Ġbig"], "skip": False}, "<|im_start|> Hello big", [0, 12, 18]),
        (BYTES, {"tokens": ["<|im_start|>", "ĠHello", "Ġbig"]}, " Hello big", [0, 0, 6]),
        (BYTES, {"tokens": ["Ã", "©", "Ġbig"], "prompt": ["Hello", "Ã"]}, "Hello\ufffdé big", [0, 5, 6, 6, 7]),
        (
            BYTES,
            {"tokens": ["Ġbig"], "prompt": ["<|im_start|>", "Hello", "<|im_end|>", "Ġbig"], "given": "<|im_start|>\nHello<|im_end|> big"},
            "<|im_start|>\nHello<|im_end|> big big",
            [0, 13, 18, 28, 32],
        ),
        (BYTES, {"tokens": ["Ġbig"], "prompt": ["Hello", "<|im_end|>"], "given": "Hello"}, "Hello big", [0, 5, 5]),
    ],
)
def test_offsets_are_those_of_the_text_that_is_returned(tokenizer, asked_for, text, offsets):
    assert _offsets(tokenizer, **asked_for) == (text, offsets)
