"""Forms in the order in which requests go."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from fw.inference.options import Sampling
from fw.server.forming import Forming
from fw.server.messages import Add


def test_forms_of_who_goes_first_are_made_first():
    begun, go, made = threading.Event(), threading.Event(), []

    def form(sampling):
        begun.set()
        assert go.wait(60)
        made.append(sampling.regex)

    forming = Forming(SimpleNamespace(form=form))
    asked = [("x", 0), ("line", 1), ("a", 0), ("another line", 1), ("first", -1), ("b", 0)]
    for regex, priority in asked:
        forming.ask(Add(regex, [5], Sampling(regex=regex), priority))
        assert begun.wait(60), "the one that is made already is made to its end"
    go.set()
    keys = []
    for _ in asked:
        assert forming.ready.poll(60)
        ((add, _), found) = forming.made()
        assert found is None
        keys.append(add.key)
    assert keys == made == ["x", "first", "a", "b", "line", "another line"] and not len(forming)
