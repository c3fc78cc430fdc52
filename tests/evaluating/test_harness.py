"""Tasks on fw's engine: the figures that the harness's own model of transformers gets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import serving
from conftest import environment, fw

pytest.importorskip("lm_eval")

CONTEXT = 96
QUESTIONS = [
    {"question": "one and one", "choices": [" two", " three", " é"], "answer": 0},
    {"question": "red and blue", "choices": [" green", " violet"], "answer": 1},
    {"question": "up", "choices": [" down", " left", " right", " upper"], "answer": 0},
    {"question": "", "choices": ["a", "bc"], "answer": 1},
]
TEXTS = ["the model reads", "é漢 and so on", "a much longer text that fills more than a single window of this model's context. " * 3]
_COMMON = {"dataset_path": "json", "test_split": "test"}
_CHOICES = {"doc_to_text": "question", "doc_to_target": "answer", "doc_to_choice": "choices", "target_delimiter": ""}
TASKS = {
    "choices": (
        QUESTIONS,
        {
            **_CHOICES,
            "output_type": "multiple_choice",
            "fewshot_split": "test",
            "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
        },
    ),
    "texts": (
        [{"text": text} for text in TEXTS],
        {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "text",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
    ),
    "answers": (
        [{"question": each["question"] or "x", "answer": "y"} for each in QUESTIONS],
        {
            "output_type": "generate_until",
            "doc_to_text": "question",
            "doc_to_target": "answer",
            "generation_kwargs": {"until": ["z", "q"], "max_gen_toks": 12, "do_sample": False},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        },
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, and tasks whose questions are files."""
    place = tmp_path_factory.mktemp("harness")
    serving.make_model(place / "model")
    (place / "tasks").mkdir()
    for name, (records, task) in TASKS.items():
        (place / f"{name}.json").write_text("\n".join(map(json.dumps, records)))
        tree = {"task": name, **_COMMON, **task, "dataset_kwargs": {"data_files": {"test": str(place / f"{name}.json")}}}
        (place / "tasks" / f"{name}.yaml").write_text(yaml.safe_dump(tree))
    return place


@pytest.fixture(scope="module")
def theirs(place):
    """By the harness's own model, in a process of its own: accelerate would take what other tests of this one have left for ranks."""
    program = place / "theirs.py"
    program.write_text(f"""
import json, sys
import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
model = HFLM({str(place / "model")!r}, device="cpu", dtype="float32", batch_size=1, max_length={CONTEXT - 1})
manager = TaskManager(include_path={str(place / "tasks")!r}, include_defaults=False)
found = {{}}
for shots, tasks in ((0, {list(TASKS)!r}), (2, ["choices"])):
    some = lm_eval.simple_evaluate(model, tasks=tasks, task_manager=manager, num_fewshot=shots, bootstrap_iters=10)
    found[shots] = {{key: some[key] for key in ("results", "samples")}}
open({str(place / "theirs.json")!r}, "w").write(json.dumps(found, default=str))
""")
    subprocess.run([sys.executable, str(program)], env=environment(), check=True, capture_output=True, timeout=300)
    return {int(shots): found for shots, found in json.loads((place / "theirs.json").read_text()).items()}


def ours(place, *words):
    command = ["eval", str(place / "model"), "--include-path", str(place / "tasks"), *words]
    return fw(*command, "inference.dtype=fp32", "inference.device=cpu", f"inference.max_context={CONTEXT}")


def values(found, task):
    return {name: value for name, value in found["results"][task].items() if isinstance(value, float) and "stderr" not in name}


def test_figures_are_those_of_the_harness(place, theirs, tmp_path):
    done = ours(place, "--tasks", ",".join(TASKS), "--num-fewshot", "0", "--output", str(tmp_path / "all.json")).ok()
    found = json.loads((tmp_path / "all.json").read_text())["tasks"]
    for task in TASKS:
        assert values(found, task) == pytest.approx(values(theirs[0], task), rel=1e-5) and values(found, task)
    for mine, other in zip(found["samples"]["choices"], theirs[0]["samples"]["choices"], strict=True):
        for (logprob, greedy), (their_logprob, their_greedy) in zip(mine["filtered_resps"], other["filtered_resps"], strict=True):
            assert float(logprob) == pytest.approx(float(their_logprob), abs=1e-4) and greedy == their_greedy
    answers = [[sample["resps"] for sample in each["samples"]["answers"]] for each in (found, theirs[0])]
    assert answers[0] == answers[1] and any(any(answer) for answer in answers[0][0])
    assert "|choices|" in done.out.replace(" ", "") and "acc_norm" in done.out


def test_with_examples_before_each_question(place, theirs):
    found = json.loads(ours(place, "--tasks", "choices", "--num-fewshot", "2", "--json").ok().out)["tasks"]
    assert values(found, "choices") == pytest.approx(values(theirs[2], "choices"), rel=1e-5)
    assert found["n-shot"] == {"choices": 2}


def test_some_questions_with_texts_beside(place):
    told = json.loads(ours(place, "--tasks", "choices", "--limit", "2", "--text", str(place / "texts.json"), "--chat", "--json").ok().out)
    assert told["tasks"]["n-samples"]["choices"]["effective"] == 2 and told["text"]["texts"]["tokens"] > 100


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "say what with: --text FILES, --tasks"),
        (["--tasks", "nonsense"], "there is no task 'nonsense'"),
        (["--tasks", "choices", "--limit", "0"], "--limit: 0 is too small"),
        (["--text", "a=x", "--text", "a=y"], "two sets are called a"),
        (["--text", "x", "--output", "nowhere/file.json"], "there is no directory nowhere"),
        (["--text", "x", "--output", "/"], "--output: / is a directory; name a file"),
    ],
)
def test_what_is_wrong_is_said(place, words, sentence):
    done = ours(place, *words)
    assert done.code == 2 and sentence in done.err.splitlines()[-1], done.err


def test_a_pattern_is_of_tasks_and_a_special_token_ends_an_answer(place):
    import fw as library
    from fw.evaluating.harness import OnEngine, run_tasks

    llm = library.LLM(place / "model", dtype="fp32", device="cpu", max_context=CONTEXT)
    found = run_tasks(llm, ["choi*"], include=place / "tasks", shots=0, limit=1)
    assert list(found["results"]) == ["choices"]
    settings = OnEngine(llm)._ending({"stop": ["</s>", "z"]})
    assert settings["stop_token_ids"] == [llm.tokenizer.token_to_id("</s>")], "and z is a text"


def test_what_a_task_wants_and_nobody_knows_is_said():
    from fw.errors import UserError
    from fw.evaluating.harness import _settings

    assert _settings({"until": "z", "max_gen_toks": 5}) == {"stop": ["z"], "max_tokens": 5, "temperature": 0.0, "logprobs": None}
    with pytest.raises(UserError, match="penalty_alpha"):
        _settings({"until": ["z"], "penalty_alpha": 0.5})


def test_what_cannot_be_computed_is_no_answer(place):
    """And no score."""
    import torch

    import fw as library
    from fw.errors import UserError
    from fw.evaluating.harness import run_tasks

    llm = library.LLM(place / "model", dtype="fp32", device="cpu", max_context=CONTEXT)
    with torch.no_grad():
        for parameter in llm.model.parameters():
            parameter.fill_(torch.nan)
    for task, sentence in (("answers", "not computed to its end: no token can be chosen"), ("choices", "log-probabilities are no numbers")):
        with pytest.raises(UserError, match=sentence):
            run_tasks(llm, [task], include=place / "tasks", shots=0)


def test_a_template_without_a_place_for_systems_leaves_them_out():
    from fw.errors import UserError
    from fw.evaluating.harness import OnEngine

    def written(messages, **_):
        if any(message["role"] == "system" for message in messages):
            raise UserError("System role not supported")
        if not messages:
            raise UserError("nothing")
        return "".join(message["content"] for message in messages)

    engine = OnEngine(SimpleNamespace(tokenizer=SimpleNamespace(apply_chat_template=written)))
    system, user = {"role": "system", "content": "be kind"}, {"role": "user", "content": "who"}
    assert engine.apply_chat_template([system, user]) == "who"
    with pytest.raises(UserError, match="nothing"):
        engine.apply_chat_template([])


def test_what_was_kept_is_there_until_there_is_more(tmp_path, monkeypatch):
    from fw.cli import eval as command
    from fw.errors import UserError

    file, link = tmp_path / "all.json", tmp_path / "link.json"
    link.symlink_to(file)
    command._keep({"text": 1}, link)
    monkeypatch.setattr(Path, "write_text", lambda path, text: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match=r"link\.json cannot be written: No space left"):
        command._keep({"text": 2}, link)
    assert json.loads(file.read_bytes()) == {"text": 1} and link.is_symlink() and len(list(tmp_path.iterdir())) == 2
