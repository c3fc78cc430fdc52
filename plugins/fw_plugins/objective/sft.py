"""Supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from fw.api import IGNORED, Conflicts, Corpus, Sample, UserError
from fw_plugins.objective.causal_lm import CausalLMConfig, CausalLMObjective

_WHAT_HAS = "use data=chat, or data=jsonl with prompt and completion, both without learn=all; to learn every token, objective=causal_lm"


class SFT(CausalLMObjective):
    """Cross-entropy of answers alone, as causal_lm has it of all that data says is learnt; data of which everything is are refused."""

    api = 1
    conflicts: ClassVar[tuple[Conflicts, ...]] = (
        *CausalLMObjective.conflicts,
        Conflicts("data", ("synthetic", "text"), f"nothing in it says what an answer is; {_WHAT_HAS}"),
    )
    Config = CausalLMConfig
    config: CausalLMConfig

    def check_data(self, corpus: Corpus) -> None:
        """Some token is no answer's."""
        if not any(_asks(sample) for sample in _each(corpus)):
            raise UserError(f"data.name: of these samples every token is learnt, so that nothing is an answer to anything; {_WHAT_HAS}")


def _each(corpus: Corpus) -> Iterator[Sample]:
    return (corpus.train[number] for number in range(len(corpus.train)))


def _asks(sample: Sample) -> bool:
    """Whether a token of it is there, and not learnt."""
    ignored_L = sample["labels"] == IGNORED
    if (segments_L := sample.get("segments")) is not None:
        # Behind a document's last token nothing follows, and padding is none.
        ends_L = segments_L != segments_L.roll(-1)
        ignored_L = ignored_L & (segments_L > 0) & ~ends_L
    return bool(ignored_L.any())
