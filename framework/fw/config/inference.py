"""The section ``inference``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from fw.config.size import parse_size
from fw.errors import UserError

_STEP_TOKENS, _STEP_TOKENS_ON_GPU = 512, 4096


@dataclass
class InferenceSection:
    """How requests share the machine."""

    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Of weights, and of what is computed. `auto`: as the files are; weights take 4 bytes each in fp32, 2 in bf16 and fp16."""
    weights: Literal["auto", "int8_weight_only", "w8a8"] = "auto"
    """How linear layers in bf16 on the CPU keep theirs. int8_weight_only: 8 bits and a scale for each output, half of the memory. w8a8: so,
    and activations become 8 bits for each token as well, which is fastest and loses more. `auto`: as they are."""
    device: str = "auto"
    """That the model computes on: cpu, cuda, cuda:1; `auto` for a GPU where there is one."""
    tensor: int = 1
    """Ranks on this host that divide every layer between them, a GPU each; on the CPU processes that share the cores, one for each
    socket's memory. Weights, keys and values of a rank are its part: as many times less."""
    kv_budget: str = ""
    """Most that keys and values of a rank may take, like 2GiB. Host memory follows use up to it; blocks on a GPU are taken at once. Empty
    for what max_sequences sequences of the whole context take, but no more than 0.4 of free memory."""
    budget: str = ""
    """Most that weights, a step, keys and values of a rank may take together, like 8GiB: what is left is for keys and values. Adapters
    beside the model (serve.adapters, --adapters) are not in it. Empty for no bound."""
    max_context: int | None = None
    """Most tokens of a sequence, prompt and answer; empty for the model's own. One that kv_budget does not hold is shortened, which is
    said."""
    max_sequences: int = 64
    """Sequences that are computed at once; others wait. Keys and values grow in proportion."""
    step_tokens: int = 0
    """Tokens that one step computes, of prompts and answers together: with more, long prompts are faster, and others wait longer for their
    next token. Activations grow in proportion. 0 for 512 on a CPU, and on a GPU 4096, which few tokens leave idle."""
    speculate: int = 0
    """Tokens of an answer that are guessed ahead, by what followed the same tokens before or by a draft model, and checked in one step:
    what is generated stays the same. Worth it for answers that repeat what they were given, or with a draft, and few sequences at once. No
    effect on memory but a row each."""
    draft: str = ""
    """A smaller model with the same tokens, that guesses: a directory, or org/name of the hub. Takes its weights, in the same dtype, and
    its part of kv_budget. Empty for no model."""
    replay: bool = True
    """Record a step of a few tokens, on a GPU as a CUDA graph, and repeat it without Python as long as there are as many of as many
    sequences. A recording takes about what a step's activations do. Steps of adapters and models with forward hooks are left to Python."""
    overlap: bool = True
    """On a GPU, begin a step before the last one's tokens have come from there, and look at these meanwhile: Python between steps costs no
    time. What is generated stays the same. Not with log-probabilities, penalties, forms, adapters, guesses or several ranks. On a CPU a
    step ends before anything else begins."""
    batch_invariant: bool = False
    """Results of a token are the same to the last bit whatever is computed beside it, log-probabilities included, in every dtype and
    without a compiler. A model is given as many rows at a time as always, 16 on a CPU, 64 on a GPU: long prompts and many answers at once
    take longer, and steps are not recorded. Takes no memory but logits of these rows."""
    prompt_tokens: int | None = None
    """Of these, most that one prompt may take, so that a long one does not keep short ones waiting; empty for half."""

    def __post_init__(self) -> None:
        for name in ("max_context", "max_sequences", "prompt_tokens", "tensor"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"inference.{name}: {value} is too small; the least is 1")
        if self.step_tokens < 0:
            raise UserError(f"inference.step_tokens: {self.step_tokens} is too small; the least is 1, and 0 leaves it to fw")
        if self.speculate < 0:
            raise UserError(f"inference.speculate: {self.speculate} is too small; the least is 0, for no guesses")
        if self.draft and not self.speculate:
            raise UserError("inference.draft: a draft guesses inference.speculate tokens, which is 0; set it, to 4 for one")
        if self.batch_invariant and self.tensor > 1:
            raise UserError(
                f"inference.batch_invariant: {self.tensor} ranks add up parts of sums, which it does not cover; set inference.tensor: 1"
            )
        if 0 < self.step_tokens < self.max_sequences:
            raise UserError(
                f"inference.max_sequences: {self.max_sequences} sequences want a token each, and inference.step_tokens is"
                f" {self.step_tokens}; raise that, or lower this"
            )
        for name in ("budget", "kv_budget"):
            value = getattr(self, name)
            if value and parse_size(value) <= 0:
                raise UserError(f"inference.{name}: {value} holds nothing")

    def filled(self, on_gpu: bool) -> InferenceSection:
        """With what was left to fw."""
        tokens = self.step_tokens or max(self.max_sequences, _STEP_TOKENS_ON_GPU if on_gpu else _STEP_TOKENS)
        return replace(self, step_tokens=tokens)

    @property
    def prompt_share(self) -> int:
        """Tokens of a step that one prompt may take."""
        return self.prompt_tokens or max(1, self.step_tokens // 2)

    @property
    def sequence_share(self) -> int:
        """Tokens of a step that are one sequence's at most; a draft computes its guesses anew beside them."""
        return self.prompt_share + (self.speculate if self.draft else 0)
