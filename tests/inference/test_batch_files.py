"""Files of a batch: what is read, going on after a kill, and what answers belong to."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

import fw as library
from batch_lines import answers, written
from conftest import fw
from fw.errors import UserError
from fw.inference.batch import run_batch

ONE, TWO = [{"prompt": "the quick brown fox"}], [{"prompt": "the quick brown fox"}, {"prompt": "a", "max_tokens": 3}]
KILLED = """
import os, signal, sys
from fw.inference import batch
write, count = batch._write, 0
def writes(out, told):
    global count
    write(out, told)
    count += 1
    if count == 10:
        os.kill(os.getpid(), signal.SIGKILL)
batch._write = writes
from fw.cli import main
main(sys.argv[1:])
"""


def test_lines_are_those_that_editors_count(llm, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt":\r"b"}\n\xc2\xa0\n{"prompt": "c"}')
    progress = run_batch(llm, source, tmp_path / "out", {"max_tokens": 2}, "small", lambda p: None)
    found = answers(tmp_path / "out")
    assert sorted(found) == [1, 3, 4, 5] and progress.lines == progress.done == 4
    assert [number for number, one in found.items() if "error" in one] == [4], "white space of Unicode's is a line"


def test_what_can_be_read_once_only_is_refused(llm, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match="can be read once only"):
        run_batch(llm, pipe, tmp_path / "out", {}, "small", lambda p: None)
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written_is_refused(llm, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--output: .*/file/out cannot be written \(.*/file: File exists\); give another"):
        run_batch(llm, written(tmp_path / "in.jsonl", ONE), tmp_path / "file" / "out", {}, "small", lambda p: None)


def test_an_input_that_changes_meanwhile_is_said(llm, tmp_path):
    source, target = written(tmp_path / "in.jsonl", ONE), tmp_path / "out"

    def grow(progress):
        if not progress.done:
            written(source, TWO)

    with pytest.raises(UserError, match="has other lines than when the batch began"):
        run_batch(llm, source, target, {"max_tokens": 2}, "small", grow)


def test_two_do_not_write_one_file(llm, tmp_path):
    source, target, seen = written(tmp_path / "in.jsonl", ONE), tmp_path / "out", []

    def again(progress):
        with pytest.raises(UserError, match="another process is writing") as error:
            run_batch(llm, source, target, {"max_tokens": 2}, "small", lambda p: None)
        seen.append(error)

    run_batch(llm, source, target, {"max_tokens": 2}, "small", again)
    assert seen and len(answers(target)) == 1 and [path.name for path in tmp_path.iterdir() if "unfinished" in path.name] == []


def test_a_line_of_somebody_else_among_answers_is_said(llm, tmp_path):
    source, target = written(tmp_path / "in.jsonl", TWO), tmp_path / "out"

    def stop(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_batch(llm, source, target, {"max_tokens": 2}, "small", stop)
    for odd in ("\n", "{}\n", "[1]\n", "no JSON\n"):
        target.write_text(odd)
        with pytest.raises(UserError, match=r"line 1 of .* is no answer of a batch; remove that line"):
            run_batch(llm, source, target, {"max_tokens": 2}, "small", lambda p: None)
        assert target.read_text() == odd


def test_going_on_after_a_kill(directory, tmp_path):
    """Killed in the middle of a line, at any moment: what was answered is not asked again, nothing is missing."""
    source = written(tmp_path / "in.jsonl", [{"prompt": "abcdefgh"[: 1 + n % 8], "max_tokens": 5 + n % 40} for n in range(60)])
    target = tmp_path / "answers.jsonl"
    command = ["generate", str(directory), "--input", str(source), "--output", str(target)]
    command += ["--temperature", "0", "--ignore-eos", "inference.max_sequences=4"]
    killed = subprocess.run([sys.executable, "-c", KILLED, *command], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before = target.read_bytes()
    whole = before[: before.rfind(b"\n") + 1]
    kept = whole.count(b"\n")
    assert kept == 10
    target.write_bytes(whole + b'{"line": 99, "text": "half of')
    out = fw(*command).ok().out
    assert f"{60 - kept} answers" in out and f"{kept} from before" in out
    assert target.read_bytes().startswith(whole), "what was there stays"
    found = answers(target)
    assert sorted(found) == list(range(1, 61))
    llm = library.LLM(directory)
    for number in (1, 30, 60):
        expected = llm.generate("abcdefgh"[: 1 + (number - 1) % 8], temperature=0, max_tokens=5 + (number - 1) % 40, ignore_eos=True)
        assert found[number]["token_ids"] == expected[0].token_ids
    again = fw(*command)
    assert again.code == 2 and "exists already" in again.err, "it is whole now"


def test_half_of_another_batch_is_left_alone(llm, tmp_path):
    source, target = written(tmp_path / "in.jsonl", ONE), tmp_path / "answers.jsonl"

    def stop(progress: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_batch(llm, source, target, {"max_tokens": 4, "logit_bias": {5: 1.0}}, "small", stop)
    assert not len(llm.engine)

    def again(model="small", **more):
        return run_batch(llm, source, target, {"max_tokens": 4, "logit_bias": {5: 1.0}, **more}, model, lambda p: None)

    schemas = '(logit_bias: {"5": 1.0}, and now {}; json_schema: none, and now {"type": "integer"})'
    for ask, why in (
        (lambda: again(max_tokens=5), "(max_tokens: 4, and now 5)"),
        (lambda: again(logit_bias={5: 2.0}), '(logit_bias: {"5": 1.0}, and now {"5": 2.0})'),
        (lambda: again(logit_bias={}, json_schema={"type": "integer"}), schemas),
        (lambda: again("other"), "(model: small, and now other)"),
    ):
        with pytest.raises(UserError, match=f"half of another batch {re.escape(why)}; ask as that did, or remove it and"):
            ask()
    before = source.read_text()
    written(source, TWO)
    with pytest.raises(UserError, match=r"half of another batch \(other prompts\)"):
        again()
    source.write_text(before)
    assert again(logit_bias={"5": 1}).done == 1, "the same, as JSON has it"


def test_a_draft_guesses_for_a_file(directory, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "hello"}\n{"prompt": "who"}\n')
    words = ["generate", directory, "--input", source, "--output", target, "--temperature", "0", "--max-tokens", "21", "--ignore-eos"]
    told = fw(*words, f"inference.draft={directory}", "inference.speculate=4", "inference.dtype=bf16").ok()
    assert "2 answers, 42 tokens" in told.out and "; 32 of 32 guesses were right" in told.out
