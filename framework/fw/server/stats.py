"""What the page shows."""

from __future__ import annotations

import time
from typing import Any

from fw import __version__
from fw.server.api import Api


def stats(api: Api) -> dict[str, Any]:
    """Everything but the plan at once; the plan as soon as it is made, which the first who looks begins."""
    engines, serve = api.engines, api.settings.serve
    state, ready = engines.state, engines.tokenizer is not None
    facts = engines.facts if ready else None
    return {
        "model": api.settings.name,
        "models": [api.settings.name, *api.adapters],
        "version": __version__,
        "state": engines.condition,
        "uptime_s": round(time.monotonic() - engines.starting.begun, 1),
        "device": None if facts is None else facts.device,
        "replicas": serve.replicas,
        "running": state.running,
        "waiting": state.waiting,
        "max_sequences": None if facts is None else engines.most,
        "max_queue": serve.max_queue,
        "max_context": None if facts is None else facts.context,
        "kv_used_bytes": state.kv_used_bytes,
        "kv_budget_bytes": None if facts is None else engines.kv_budget_bytes,
        "prefix_hit_tokens": state.cached_tokens,
        "prefix_query_tokens": state.prompt_tokens,
        "prompt_tokens_total": state.prompt_tokens,
        "generation_tokens_total": state.generated_tokens,
        "requests_total": api.metrics.requests,
        "rejected_total": engines.rejected,
        "aborted_total": api.metrics.aborts,
        "preemptions_total": state.preemptions,
        "memory": [] if facts is None else _memory(api),
    }


def _memory(api: Api) -> list[dict[str, Any]]:
    """Of one engine, planned beside measured; the largest of several."""
    state, replicas = api.engines.state, api.settings.serve.replicas
    planned = api.plan.now()
    rows = [
        ("weights", planned.get("weights"), state.weight_bytes // replicas),
        ("keys and values", planned.get("kv"), state.kv_live_bytes // replicas),
        ("a step", planned.get("step"), None),
        ("all", planned.get("all"), state.held_bytes // replicas),
    ]
    return [{"name": name, "planned_bytes": plan, "measured_bytes": measured} for name, plan, measured in rows]
