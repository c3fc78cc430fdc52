"""The evaluation harness against the server: its figures are those that the model itself gives."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("lm_eval")

PAIRS = [
    ("once upon", " a time"),
    ("the model", " reads é漢"),
    ("x", "y"),
    ("a longer context, of more tokens than the others", " and so on"),
]
QUESTIONS = [
    {"question": "one and one", "choices": [" two", " three", " é"], "answer": 0},
    {"question": "red and blue", "choices": [" green", " violet"], "answer": 1},
    {"question": "up", "choices": [" down", " left", " right", " upper"], "answer": 0},
] * 3


@pytest.fixture(scope="module")
def reference(directory):
    """The log-likelihood of a continuation, and whether it is what the model would say."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), AutoTokenizer.from_pretrained(directory)

    def loglikelihood(context, continuation):
        before, ids = tokenizer(context)["input_ids"], tokenizer(context + continuation)["input_ids"]
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        rows, own = logprobs[len(before) - 1 : -1], torch.tensor(ids[len(before) :])
        return rows.gather(1, own[:, None]).sum().item(), bool((rows.argmax(-1) == own).all())

    return loglikelihood


@pytest.fixture(scope="module")
def arguments(server, directory):
    return {
        "model": directory.name,
        "base_url": f"{server.url}/v1/completions",
        "tokenizer": str(directory),
        "tokenizer_backend": "huggingface",
        "num_concurrent": 4,
        "max_length": 2048,
    }


def test_loglikelihoods(arguments, reference, directory):
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    harness = LocalCompletionsAPI(**arguments)
    asked = [Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=0) for pair in PAIRS]
    for (value, greedy), pair in zip(harness.loglikelihood(asked, disable_tqdm=True), PAIRS, strict=True):
        right, likeliest = reference(*pair)
        assert value == pytest.approx(right, abs=1e-4) and greedy == likeliest


def test_a_task_of_choices(arguments, reference, tmp_path):
    import lm_eval
    from lm_eval.tasks import TaskManager

    (tmp_path / "questions.json").write_text("\n".join(map(json.dumps, QUESTIONS)))
    (tmp_path / "questions.yaml").write_text(f"""
task: questions
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "questions.json"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_target: answer
doc_to_choice: choices
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
""")
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = lm_eval.simple_evaluate("local-completions", model_args=arguments, tasks=["questions"], task_manager=tasks, log_samples=True)
    right = 0
    for sample in found["samples"]["questions"]:
        question = sample["doc"]
        values = [reference(question["question"], choice)[0] for choice in question["choices"]]
        got = [float(answer[0]) for answer in sample["filtered_resps"]]
        assert got == pytest.approx(values, abs=1e-4)
        right += max(range(len(values)), key=values.__getitem__) == question["answer"]
    assert found["results"]["questions"]["acc,none"] == pytest.approx(right / len(QUESTIONS))
