"""What Prometheus reads, by vLLM's names where it has them (https://docs.vllm.ai/en/stable/usage/metrics.html)."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fw.server.engines import Engines
from fw.server.errors import ApiError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """Of a server.

    Args:
        name: the model's.
    """

    def __init__(self, engines: Engines, name: str) -> None:
        self._registry = CollectorRegistry()
        self._name = name
        labels = ["model_name"]

        def histogram(called: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{called}", text, labels, registry=self._registry, buckets=buckets).labels(name)

        self._first = histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", _FIRST)
        self._between = histogram("inter_token_latency_seconds", "Between two tokens of an answer.", _BETWEEN)
        self._whole = histogram("e2e_request_latency_seconds", "From a request's arrival to the end of its answer.", _WHOLE)
        self._prompt = histogram("request_prompt_tokens", "Tokens of prompts.", _TOKENS)
        self._answer = histogram("request_generation_tokens", "Tokens of answers.", _TOKENS)
        self._ended = Counter(
            "vllm:request_success", "Requests that have ended, by how.", [*labels, "finished_reason"], registry=self._registry
        )
        self._aborted = Counter(
            "fw:requests_aborted", "Requests whose client has gone, or whose time was over.", labels, registry=self._registry
        ).labels(name)
        self.requests, self.aborts = 0, 0
        self._registry.register(_OfEngines(engines, name))

    def first(self, seconds: float) -> None:
        """Of a request, the first token of any of its answers came so long after it."""
        self._first.observe(seconds)

    def between(self, seconds: float) -> None:
        """A token came so long after the one before in its answer."""
        self._between.observe(seconds)

    def ended(self, seconds: float, prompt_tokens: int, answer_tokens: int, reasons: list[str]) -> None:
        """A request has been answered."""
        self.requests += 1
        self._whole.observe(seconds)
        self._prompt.observe(prompt_tokens)
        self._answer.observe(answer_tokens)
        for reason in reasons:
            self._ended.labels(self._name, reason).inc()

    def aborted(self) -> None:
        """A request has been left."""
        self.requests, self.aborts = self.requests + 1, self.aborts + 1
        self._aborted.inc()

    def text(self) -> bytes:
        """All of it."""
        return generate_latest(self._registry)


class _OfEngines(Collector):
    """What engines and queue are like when somebody looks."""

    def __init__(self, engines: Engines, name: str) -> None:
        self._engines, self._name = engines, name

    def describe(self) -> list[Metric]:
        """Nothing before engines are there."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        state = self._engines.state
        try:
            used = state.kv_used_bytes / self._engines.kv_budget_bytes
        except ApiError:
            used = 0.0
        for name, text, value in (
            ("vllm:num_requests_running", "Sequences that are being computed.", state.running),
            ("vllm:num_requests_waiting", "Sequences that wait.", state.waiting),
            ("vllm:kv_cache_usage_perc", "Of the room for keys and values, what sequences have; 1 is all.", used),
            ("fw:kv_cache_used_bytes", "Keys and values of sequences.", state.kv_used_bytes),
            ("fw:weight_bytes", "Of the model's weights.", state.weight_bytes),
            ("fw:memory_bytes", "That engines have taken, on the host or the GPU.", state.held_bytes),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._name], value)
            yield gauge
        for name, text, value in (
            ("vllm:num_preemptions", "Sequences that had to begin anew for want of room.", state.preemptions),
            ("vllm:prefix_cache_queries", "Tokens of prompts.", state.prompt_tokens),
            ("vllm:prefix_cache_hits", "Of these, that were known from other requests.", state.cached_tokens),
            ("vllm:prompt_tokens", "Tokens of prompts.", state.prompt_tokens),
            ("vllm:generation_tokens", "Tokens that were generated.", state.generated_tokens),
            ("fw:requests_rejected", "Requests that found the queue full.", self._engines.rejected),
        ):
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._name], value)
            yield counter
