"""The page in a real browser, with a keyboard alone."""

from __future__ import annotations

import pytest

import fw
from browser import CHROMIUM, Browser
from serving import KEY, make_model, serving

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")

ANSWERS = "[...document.querySelectorAll('.turn:not(.user) .text')].map(each => each.textContent)"
IDLE = "document.getElementById('conversation').getAttribute('aria-busy') === 'false'"
BUSY = "document.getElementById('conversation').getAttribute('aria-busy') === 'true'"
FOCUS = "document.activeElement.id"


@pytest.fixture
def browser():
    with Browser() as made:
        yield made


def quiet(browser, url):
    """Nothing is wrong with the page, and nobody but the server was asked for anything."""
    assert not [line for line in browser.console if line.startswith(("error", "exception", "assert", "warning"))]
    assert all(address.startswith((url, "data:", "about:")) for address in browser.asked)


def settle(browser, temperature, tokens):
    browser.get(f"document.getElementById('temperature').value = {temperature}, document.getElementById('max-tokens').value = {tokens}")


def test_a_chat(server, browser, directory):
    browser.open(server.url)
    browser.until("document.getElementById('state').dataset.state === 'ready' && document.getElementById('model').value")
    assert browser.get(FOCUS) == "message" and browser.get("document.getElementById('model').value") == directory.name
    settle(browser, 0, 30)
    browser.type("hello there")
    browser.press("Enter")
    browser.until(f"document.querySelectorAll('.facts').length === 1 && {IDLE}")
    browser.type("and again")
    browser.press("Enter")
    browser.until(f"document.querySelectorAll('.facts').length === 2 && {IDLE}")
    llm = fw.LLM(directory, dtype="fp32")
    chat = [{"role": "user", "content": "hello there"}]
    (first,) = llm.generate(chat, max_tokens=30, temperature=0)
    chat += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "and again"}]
    (second,) = llm.generate(chat, max_tokens=30, temperature=0)
    assert browser.get(ANSWERS) == [first.text, second.text]
    assert f"{len(second.token_ids)} tokens" in browser.text(".turn:last-child .facts")
    server.idle()
    quiet(browser, server.url)


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """Serves a model that goes on for seconds: it knows no end, and is large enough."""
    place = make_model(tmp_path_factory.mktemp("models") / "talker", ends=False, hidden_size=256, num_hidden_layers=8)
    with serving(place, "inference.dtype=fp32") as server:
        yield server


def test_the_load_and_memory_planned_beside_measured(talker, browser):
    server = talker
    browser.open(server.url)
    browser.until("document.querySelectorAll('#memory tbody tr').length > 2")
    planned, measured = (f"document.querySelector('#memory tbody tr td:nth-child({n})').textContent" for n in (2, 3))
    browser.until(f"{planned} !== '–'")
    assert browser.get(planned) == browser.get(measured), "weights are what they were to be"
    stats = server.stats()
    assert browser.text("#running") == f"0 of {stats['max_sequences']}" and browser.text("#waiting") == f"0 of {stats['max_queue']}"
    assert browser.text("#context") == f"{stats['max_context']:,} tokens"
    browser.type("go on")
    settle(browser, 1, 1500)
    browser.press("Enter")
    browser.until(f"document.getElementById('running').textContent.startsWith('1 of') && {BUSY}")
    browser.press("Escape")
    browser.until(IDLE)
    assert "stopped" in browser.text(".turn:last-child .facts")
    server.idle()
    browser.until("document.getElementById('running').textContent.startsWith('0 of')")
    assert int(browser.text("#generated-total").replace(",", "").split(".")[0].rstrip("KM")) > 0
    quiet(browser, server.url)


def test_all_of_it_can_be_reached_with_the_tab_key(server, browser):
    browser.open(server.url)
    browser.until("document.getElementById('state').dataset.state === 'ready'")
    browser.get("document.activeElement.blur(), document.body.tabIndex = -1, document.body.focus()")
    there = []
    for _ in range(12):
        browser.press("Tab")
        there.append(browser.get("document.activeElement.id || document.activeElement.className || document.activeElement.tagName"))
    assert there[:2] == ["skip", "model"]
    assert {"new-chat", "conversation", "message", "send", "SUMMARY", "status"} <= set(there)
    named = "[...document.querySelectorAll('button, input, select, textarea')].filter(e => !e.closest('[hidden]') && !e.hidden)"
    unnamed = "e => !(e.textContent.trim() || e.getAttribute('aria-label') || document.querySelector(`label[for=${e.id}]`))"
    assert browser.get(f"{named}.filter({unnamed}).map(e => e.id)") == []


def test_a_key_is_asked_for(directory, tmp_path, browser):
    (tmp_path / "keys").write_text(KEY)
    with serving(directory, "inference.dtype=fp32", "--api-keys", str(tmp_path / "keys")) as server:
        browser.open(server.url)
        browser.until("!document.getElementById('key-form').hidden")
        browser.get("document.getElementById('key').focus()")
        browser.type("wrong")
        browser.press("Enter")
        browser.until("document.getElementById('key-hint').textContent.includes('did not accept')")
        browser.type(KEY)
        browser.press("Enter")
        browser.until("document.getElementById('state').dataset.state === 'ready' && document.getElementById('key-form').hidden")
        assert browser.get(FOCUS) == "message"
        settle(browser, 0, 5)
        browser.type("<b>x</b>")
        browser.press("Enter")
        browser.until(f"document.querySelectorAll('.facts').length === 1 && {IDLE}")
        assert browser.text(".turn.user .text") == "<b>x</b>", "what somebody says is text, whatever it looks like"
        assert browser.get("localStorage.length") == 0
