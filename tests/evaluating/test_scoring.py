"""Log-probabilities of continuations and of whole texts, beside transformers and the evaluation harness's own cutting."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

import fw
import serving
from fw.errors import UserError
from fw.evaluating.held_out import TextSet, held_out_loss
from fw.evaluating.scoring import Continuation, scores, windows
from fw.inference.openai import prompt_tokens

CONTEXT = 64


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model"
    serving.make_model(path)
    return path


@pytest.fixture(scope="module")
def theirs(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@pytest.fixture(scope="module")
def llm(directory):
    return fw.LLM(directory, dtype="fp32", device="cpu", max_context=CONTEXT, max_sequences=4)


def expected(model, before, own):
    ids = [*before, *own][-CONTEXT:]
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)[len(ids) - len(own) - 1 : -1]
    chosen = rows.gather(1, torch.tensor(own)[:, None]).sum().item()
    return chosen, rows.argmax(-1).tolist() == list(own)


def test_scores_are_those_of_transformers_whatever_comes_together(llm, theirs):
    chance = random.Random(0)

    def ids(count):
        return [chance.randrange(3, 250) for _ in range(count)]

    asked = []
    for length in (1, 5, 20, 33, 70):  # the last one is too long together: its beginning is left out
        before = ids(length)
        asked += [Continuation(before, ids(count)) for count in (1, 2, 9, 3)]
        greedy = theirs.generate(torch.tensor([before[-40:]]), do_sample=False, max_new_tokens=3, min_new_tokens=3, eos_token_id=None)
        asked.append(Continuation(before[-40:], greedy[0, -3:].tolist()))
    asked.append(Continuation([5], []))
    chance.shuffle(asked)
    told = []
    found = scores(llm, asked, lambda: told.append(1))
    assert len(told) == len(asked) - 1 and sum(score.likeliest for score in found) >= 5
    for each, score in zip(asked, found, strict=True):
        logprob, likeliest = expected(theirs, each.before, each.own) if each.own else (0.0, True)
        assert score.logprob == pytest.approx(logprob, abs=1e-4) and score.likeliest == likeliest


def test_what_several_begin_with_is_computed_once(directory):
    llm = fw.LLM(directory, dtype="fp32", device="cpu", max_context=CONTEXT, max_sequences=2)
    before = list(range(3, 51))
    computed = []
    run = llm.engine.runner.run
    llm.engine.runner.run = lambda pieces: (computed.append(list(pieces)), run(pieces))[1]
    scores(llm, [Continuation(before, [100 + n, 7]) for n in range(4)])
    taken = [piece for step in computed for piece in step]
    assert [len(piece.tokens) for piece in taken] == [50, 18, 18, 18]  # the third block of 16 has the token whose next one is scored
    rows = [(len(piece.scored), len(piece.wanted)) for piece in taken]
    assert rows == [(2, 1)] * 4, "of the head: the continuation's two, and the last, which is always there"


@pytest.mark.parametrize(
    ("before", "own", "sentence"), [([], [5], "has nothing before it"), ([5], [6] * CONTEXT, "the model takes 64 together")]
)
def test_what_cannot_be_scored_is_said(llm, before, own, sentence):
    with pytest.raises(UserError, match=sentence):
        scores(llm, [Continuation([5], [6]), Continuation(before, own)])


@pytest.mark.parametrize("length", [1, 2, 62, 63, 64, 65, 126, 127, 128, 200])
def test_windows_are_those_of_the_harness(length):
    utils = pytest.importorskip("lm_eval.utils")
    ids = list(range(1000, 1000 + length))
    cut = utils.get_rolling_token_windows(token_list=ids, prefix_token=1, max_seq_len=CONTEXT - 1, context_len=1)
    theirs = [(list(before), list(own)) for before, own in map(utils.make_disjoint_window, cut)]
    assert [(list(each.before), list(each.own)) for each in windows(ids, 1, CONTEXT)] == theirs


def test_without_a_token_that_begins_texts_the_first_is_not_scored():
    parts = list(windows(list(range(100)), None, 16))
    assert [token for part in parts for token in part.own] == list(range(1, 100)) and all(part.before for part in parts)


def test_the_loss_of_a_set_is_that_by_hand(llm, theirs, tmp_path):
    texts = ["the model reads", "é漢 and so on, and on", "x" * 150]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts[:2]))
    (tmp_path / "b.txt").write_text(texts[2])
    found = held_out_loss(llm, TextSet.of(f"both={tmp_path}/*"))
    total = count = 0
    for text in texts:
        ids = llm.tokenizer.encode(text, add_special_tokens=False)
        for part in windows(ids, llm.tokenizer.bos_id or llm.tokenizer.eos_id, CONTEXT):
            total -= expected(theirs, part.before, part.own)[0]
        count += len(ids)
    assert (found.documents, found.tokens, found.bytes) == (3, count, sum(len(text.encode()) for text in texts))
    assert found.loss == pytest.approx(total / count, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(total / count), rel=1e-4)
    assert found.bits_per_byte == pytest.approx(total / math.log(2) / found.bytes, rel=1e-5)


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        (None, b"", "no file is called"),
        ("a.jsonl", b'{"text": "x"}\n{"words": "y"}\n', "a.jsonl:2 is no JSON object with a 'text'"),
        ("a.txt", b"\xff\xfe\x00", "cannot be read as text"),
        ("a.txt", b"", "has no text"),
    ],
)
def test_bad_text_is_said_with_its_place(llm, tmp_path, file, content, sentence):
    if file:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        held_out_loss(llm, TextSet.of(f"{tmp_path}/a.*"))


def test_log_probabilities_may_begin_later(directory):
    llm = fw.LLM(directory, dtype="fp32", device="cpu", max_context=CONTEXT, max_sequences=4)
    ids = list(range(3, 53))
    (whole,) = llm.generate(ids, prompt_logprobs=2, max_tokens=3, temperature=0)
    for first in (1, 16, 17, 40, 49, 50, 80):
        (part,) = llm.generate(ids, prompt_logprobs=2, prompt_logprobs_from=first, max_tokens=3, temperature=0)
        assert part.prompt_logprobs == pytest.approx(whole.prompt_logprobs[first - 1 :], abs=1e-5)
        assert [list(top) for top in part.prompt_top_logprobs] == [list(top) for top in whole.prompt_top_logprobs[first - 1 :]]
        assert [logprob for _, logprob, _ in prompt_tokens(part)] == [None] * min(first, 50) + part.prompt_logprobs
        assert part.token_ids == whole.token_ids and part.cached_tokens == (min(first, 50) - 1) // 16 * 16
    with pytest.raises(UserError, match="prompt_logprobs_from: 0 is not at least 1"):
        llm.sampling(prompt_logprobs_from=0)
