"""Batches by OpenAI's own client."""

from __future__ import annotations

import json

from serving import until

CHAT, TEXT, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
ENDED = ("completed", "failed", "cancelled", "expired")


def line(number, url=TEXT, **body):
    """Of a file."""
    return {"custom_id": f"line {number}", "method": "POST", "url": url, "body": body}


def long_lines(count, max_tokens=200):
    """Lines that take their time."""
    return [line(n, prompt=f"{n}, ", max_tokens=max_tokens, temperature=0, ignore_eos=True) for n in range(count)]


def upload(client, lines):
    """Lines as a file; its id."""
    text = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
    return client.files.create(file=("asked.jsonl", text.encode()), purpose="batch").id


def create(client, lines, endpoint=TEXT, **more):
    """A batch of lines."""
    return client.batches.create(input_file_id=upload(client, lines), endpoint=endpoint, completion_window="24h", **more)


def wait_until(client, batch, what):
    """The batch, as soon as it is so."""
    return until(lambda: (found := client.batches.retrieve(batch.id)) and what(found) and found)


def ended(client, batch):
    """The batch, once it is over."""
    return wait_until(client, batch, lambda found: found.status in ENDED)


def lines_of(client, file):
    """Of a file of answers."""
    return [json.loads(text) for text in client.files.content(file).text.splitlines()] if file else []


def answers(client, batch):
    """Of both files by ``custom_id``, of which none is there twice; as many as are counted."""
    well, failed = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
    assert (len(well), len(failed)) == (batch.request_counts.completed, batch.request_counts.failed)
    found = {each["custom_id"]: each for each in [*well, *failed]}
    assert len(found) == len(well) + len(failed) and all(set(each) == {"id", "custom_id", "response", "error"} for each in found.values())
    assert len({each["id"] for each in found.values()}) == len(found)
    return found
