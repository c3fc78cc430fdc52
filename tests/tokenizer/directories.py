"""Small tokenizers of the kinds that models come with, written as the directories that models are published in."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from conftest import corpus_text

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

TEXTS = [
    "",
    " ",
    "   ",
    "\n\n",
    "The model reads text and learns what comes next.",
    " leading and trailing ",
    "  two  spaces   three\t\ttabs\r\nand lines\n\n\n",
    "def f(x: int) -> list[int]:\n    return [x ** 2 for _ in range(10)]  # 12345\n",
    "I'm sure they'LL say we've 1234567 of it , don't you ?",
    "漢字かな交じり文。한국어 텍스트",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽",
    "e\u0301 n\u0303 a\u0308\u0323 \u1e9b\u0323 ﬁ Å",
    "مرحبا بالعالم، كيف الحال؟",
    "\x00\x01\x1b[0m\x7f\u200b\ufeff",
    "<|endoftext|>inside<|endoftext|> text <s>a</s> <bos>b<eos> <unk>",
    "<|im_start|>user\nhi<|im_end|>\n <tool_call> x </tool_call><image>",
    "a [L] b  [R]  c [W]ord x[W]y [N] [n] Ａ １",
    "▁underline▁ <0xE2> <0x41>",
]
CORPUS = [corpus_text(60), *TEXTS, "漢字 漢字 かな 👍 👍 مرحبا naïve café " * 3]


@lru_cache
def byte_level_vocabulary(regex: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split(regex)
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return learnt(tokenizer)


@lru_cache
def metaspace_vocabulary(*specials: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    first = [*specials, *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=520, special_tokens=first, limit_alphabet=70, show_progress=False)
    tokenizer.train_from_iterator([corpus_text(60), TEXTS[4], TEXTS[7], "漢字 漢字 ? . , ' [ ]"], trainer)
    return learnt(tokenizer)


def learnt(tokenizer: Tokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def split(regex: str, prefix: bool = False):
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(regex), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)]
    )


def byte_level(
    regex: str = GPT2, specials: tuple[str, ...] = ("<|endoftext|>",), nfc: bool = False, bos: str = "", **model: Any
) -> Tokenizer:
    vocab, merges = byte_level_vocabulary(regex)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, **model))
    tokenizer.pre_tokenizer = split(regex)
    tokenizer.decoder = decoders.ByteLevel()
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(list(specials))
    if bos:
        template = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def metaspace(form: str, specials: tuple[str, ...] = ("<unk>", "<s>", "</s>"), bos: str = "<s>") -> Tokenizer:
    """``form``: how spaces are treated, by a "normalizer" or a "pre_tokenizer", or as Gemma does."""
    vocab, merges = metaspace_vocabulary(*specials)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if form == "gemma":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        steps.append(decoders.Strip(" ", 1, 0))
    if form == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif form == "pre_tokenizer":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in specials])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


def unigram() -> Tokenizer:
    pieces = [("<unk>", 0.0), ("▁", -2.0), *((c, -3.0) for c in "abcdefghijklmnopqrstuvwxyz.漢"), ("▁the", -1.0), ("▁model", -1.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer


def word_piece() -> Tokenizer:
    vocab = {token: i for i, token in enumerate(["[UNK]", "the", "model", "##s", ".", ","])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]"])
    return tokenizer


def flagged() -> Tokenizer:
    """Added tokens with every flag."""
    tokenizer = byte_level(nfc=True)
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.add_tokens(
        [
            AddedToken("[L]", lstrip=True),
            AddedToken("[R]", rstrip=True, special=True),
            AddedToken("[W]", single_word=True),
            AddedToken("[N]", normalized=True),
            AddedToken("A 1", normalized=True),
            AddedToken("漢", normalized=False),
        ]
    )
    return tokenizer


def with_limits() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(pad_id=3, pad_token="$", length=9)
    return tokenizer


def write(directory: Path, tokenizer: Tokenizer, settings: dict[str, Any] | None = None, /, **others: Any) -> Path:
    """``settings`` is ``tokenizer_config.json``; ``others`` are files by stem, ``template`` a ``chat_template.jinja``, the rest JSON."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    if settings is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False))
    for stem, content in others.items():
        if stem == "template":
            (directory / "chat_template.jinja").write_text(content)
        else:
            (directory / f"{stem}.json").write_text(json.dumps(content))
    return directory


FAST = "PreTrainedTokenizerFast"
QWEN_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def declared(tokenizer: Tokenizer) -> dict[str, Any]:
    """``added_tokens_decoder`` of what the tokenizer has."""
    flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {str(i): {flag: getattr(token, flag) for flag in flags} for i, token in tokenizer.get_added_tokens_decoder().items()}


def qwen() -> Tokenizer:
    tokenizer = byte_level(QWEN2, QWEN_SPECIALS, nfc=True)
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("</tool_call>", normalized=False)])
    return tokenizer


def qwen_config(**more: Any) -> dict[str, Any]:
    return {
        "add_bos_token": False,
        "added_tokens_decoder": declared(qwen()),
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 32768,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
        **more,
    }


def llama_config(**more: Any) -> dict[str, Any]:
    def token(content: str) -> dict[str, Any]:
        flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
        return {"__type": "AddedToken", "content": content, **flags}

    return {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": token("<s>"),
        "eos_token": token("</s>"),
        "unk_token": token("<unk>"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1000000000000000019884624838656,
        "sp_model_kwargs": {},
        "tokenizer_class": "LlamaTokenizer",
        **more,
    }


GEMMA = ("<pad>", "<eos>", "<bos>", "<unk>")
LLAMA3_SPECIALS = ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
LLAMA3_CONFIG = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "clean_up_tokenization_spaces": True}


def llama3() -> Tokenizer:
    return byte_level(LLAMA3, LLAMA3_SPECIALS, bos="<|begin_of_text|>", ignore_merges=True)


Writer = Callable[[Path], Path]
END = "<|endoftext|>"

DIRECTORIES: dict[str, Writer] = {
    "gpt2": lambda d: write(d, byte_level(), {"tokenizer_class": FAST, "eos_token": END, "bos_token": END}),
    "gpt2-no-config": lambda d: write(d, byte_level()),
    "gpt2-its-type": lambda d: write(d, byte_level(), {"model_max_length": 1024}, config={"model_type": "gpt2"}),
    "gpt2-its-class": lambda d: write(d, byte_level(QWEN2), {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}),
    "gpt-neox": lambda d: write(d, byte_level(QWEN2, bos=END), {"tokenizer_class": "GPTNeoXTokenizer", "add_bos_token": True}),
    "gpt-neox-padded": lambda d: write(d, byte_level(), {"tokenizer_class": "GPTNeoXTokenizerFast", "pad_token": END}),
    "llama3": lambda d: write(d, llama3(), {**LLAMA3_CONFIG, "tokenizer_class": FAST}, config={"model_type": "llama"}),
    "llama3-as-llama": lambda d: write(d, llama3(), {**LLAMA3_CONFIG, "tokenizer_class": "LlamaTokenizer", "add_eos_token": True}),
    "qwen2": lambda d: write(d, qwen(), qwen_config(), config={"model_type": "qwen2"}),
    "qwen3": lambda d: write(d, qwen(), qwen_config(), config={"model_type": "qwen3"}),
    "qwen3_5": lambda d: write(d, qwen(), qwen_config(), config={"model_type": "qwen3_5"}),
    "qwen2-overruled": lambda d: write(d, byte_level(GPT2, QWEN_SPECIALS), {"tokenizer_class": FAST}, config={"model_type": "qwen2"}),
    "qwen2-extra": lambda d: write(
        d, qwen(), {"tokenizer_class": "Qwen2TokenizerFast", "extra_special_tokens": ["<|im_start|>", "<|im_end|>", "<image>"]}
    ),
    "qwen2-promoted": lambda d: write(d, qwen(), qwen_config(additional_special_tokens=["<tool_call>"])),
    "declared-only": lambda d: write(
        d,
        byte_level(),
        {"tokenizer_class": FAST, "eos_token": "<s>", "added_tokens_decoder": {421: {"content": "<s>", "special": False}}},
    ),
    "llama2-normalizer": lambda d: write(d, metaspace("normalizer"), llama_config(tokenizer_class=FAST)),
    "llama2-pre-tokenizer": lambda d: write(d, metaspace("pre_tokenizer"), llama_config(tokenizer_class=FAST)),
    "llama2": lambda d: write(d, metaspace("normalizer"), llama_config(legacy=False, add_eos_token=True), config={"model_type": "llama"}),
    "llama2-legacy": lambda d: write(d, metaspace("normalizer"), llama_config(legacy=True, pad_token="</s>")),
    "llama2-no-prefix": lambda d: write(d, metaspace("normalizer"), llama_config(add_prefix_space=False, legacy=None)),
    "llama2-named-by-model": lambda d: write(
        d, metaspace("normalizer"), config={"model_type": "llama", "tokenizer_class": "LlamaTokenizer"}
    ),
    "mistral": lambda d: write(d, metaspace("normalizer"), llama_config(), config={"model_type": "mistral"}),
    "gemma": lambda d: write(
        d, metaspace("gemma", GEMMA, "<bos>"), {"tokenizer_class": "GemmaTokenizer", "mask_token": None}, config={"model_type": "gemma2"}
    ),
    "gemma-new-token": lambda d: write(d, metaspace("gemma", GEMMA, "<bos>"), {"tokenizer_class": "GemmaTokenizerFast"}),
    "flags": lambda d: write(d, flagged(), {"tokenizer_class": FAST, "unk_token": END, "added_tokens_decoder": declared(flagged())}),
    "flags-rebuilt": lambda d: write(d, flagged(), {"tokenizer_class": "GPT2TokenizerFast", "added_tokens_decoder": declared(flagged())}),
    "older-files": lambda d: write(
        d,
        byte_level(),
        {"tokenizer_class": "NoSuchTokenizer", "eos_token": "overridden"},
        special_tokens_map={
            "eos_token": {"content": END, "lstrip": True, "normalized": False, "rstrip": False, "single_word": False},
            "additional_special_tokens": ["<image>", END],
        },
        added_tokens={"<image>": 421, "</tool_call>": 422},
    ),
    "own-names": lambda d: write(
        d,
        byte_level(),
        {
            "tokenizer_class": "TokenizersBackend",
            "image_token": "<image>",
            "eos_token": "<s>",
            "sep_token": "</s>",
            "extra_special_tokens": {"call_token": "<tool_call>"},
        },
    ),
    "limits": lambda d: write(d, with_limits(), {"tokenizer_class": FAST}),
    "limits-rebuilt": lambda d: write(d, with_limits(), {"tokenizer_class": "GPT2Tokenizer", "pad_token": END}),
    "splitting": lambda d: write(d, byte_level(), {"tokenizer_class": FAST, "split_special_tokens": True, "bos_token": END}),
    "code-not-needed": lambda d: write(d, qwen(), qwen_config(auto_map={"AutoTokenizer": ["own.Slow", None]})),
    "unigram": lambda d: write(d, unigram(), {"tokenizer_class": FAST, "eos_token": "</s>"}),
    "word-piece": lambda d: write(d, word_piece(), {"tokenizer_class": FAST, "unk_token": "[UNK]"}),
}
