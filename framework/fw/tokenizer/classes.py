"""Which of transformers' tokenizer classes a directory stands for, and the pipelines of those that do not take ``tokenizer.json``'s.

AutoTokenizer of transformers 5 takes most ``tokenizer.json`` as they are. Some classes take from it only the vocabulary, the merges, the
added tokens and the post-processor, and bring normalizer, pre-tokenizer and decoder of their own; a model is then run with these.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from fw.errors import UserError
from fw.tokenizer.files import CONFIG, TOKENIZER, ModelHint

AS_IT_IS = ""
"""The class that takes ``tokenizer.json`` as it is."""


MADE_BY_FW = "fw_tokenizer_json_as_it_is"
"""Set in ``tokenizer_config.json`` of a tokenizer that fw made: its pipeline is the file's, whatever model it is saved beside."""


def _words(text: str) -> list[str]:
    return text.split()


_GENERIC = {"TokenizersBackend", "PreTrainedTokenizer", "PythonBackend", "Bloom", "BloomTokenizer", "ConvBertTokenizer", "FNetTokenizer"}

# Types of models whose tokenizer_class transformers overrules: with AS_IT_IS, or with a class of its choice.
_TYPES_AS_IT_IS = set(
    _words(
        "EvollaModel arctic aria beam bigbird_pegasus camembertv2-base canary chatlm cohere_asr ernie4_5 ernie4_5_moe flex_olmo fuyu glm"
        " glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe glm_image glmasr got_ocr2 gpt_bigcode gradium_phonon_tts granite granitemoe"
        " granitemoehybrid granitemoeshared h2ovl_chat hyperclovax hyperclovax_vlm internlm2 internlm3 iquestcoder jamba kimi_k25"
        " kimi_linear kosmos-2 llava llava_next mimo_v2_flash minicpm3 minicpm_ocr minicpmv minicpmv4_6 minicpmv4_7 minimax_m2 ministral"
        " ministral3 mistral mistral3 mistral_large4 mixtral modernbert modernbert-decoder molmo molmo2 nemo_speechlm nemotron nvfp4"
        " nystromformer olmo2 olmo3 olmo_hybrid opencua openvla paddleocr_vl pegasus_x persimmon phi3 phi3_v phimoe pix2struct pixtral"
        " pocket_tts smolvlm stablelm step3_vl umt5 vipllava voxtral voxtral_realtime xlm-roberta-xl"
    )
)
_TYPES_OVERRULED = {
    "qwen2": "Qwen2Tokenizer",
    "qwen3_5": "Qwen3_5Tokenizer",
    "qwen3_5_moe": "Qwen3_5Tokenizer",
    "qwen3_5_moe_text": "Qwen3_5Tokenizer",
    "qwen4_exp": "Qwen3_5Tokenizer",
    "hyperclovax_vision_v2": "GPT2Tokenizer",
    "siglip2": "Siglip2Tokenizer",
}
# The class of a model type where neither file names one.
_CLASS_OF_TYPE = {
    **_TYPES_OVERRULED,
    **dict.fromkeys(["idefics", "idefics2"], "LlamaTokenizer"),
    **dict.fromkeys(
        _words("diffusion_gemma gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma shieldgemma2 t5gemma zaya"),
        "GemmaTokenizer",
    ),
    **dict.fromkeys(
        _words(
            "audioflamingo3 colqwen2 cosmos3_omni dots3_note fun_asr_nano hunyuan_vl internvl lighton_ocr moss_transcribe_diarize ovis2"
            " qianfan_ocr qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe"
            " qwen3_vl qwen3_vl_moe vibevoice"
        ),
        "Qwen2Tokenizer",
    ),
    "qwen3_5_text": "Qwen3_5Tokenizer",
    **dict.fromkeys(
        _words("blip-2 codegen dbrx emu3 gpt2 gpt_neo gptj instructblip instructblipvideo jais2 opt phi starcoder2"), "GPT2Tokenizer"
    ),
    **dict.fromkeys(_words("falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm"), "GPTNeoXTokenizer"),
    **dict.fromkeys(_words("aya_vision cohere cohere2"), "CohereTokenizer"),
    "code_llama": "CodeLlamaTokenizer",
}
# Classes that bring a pipeline not written here, or that read no tokenizer.json at all.
_REFUSED = {
    f"{name}Tokenizer"
    for name in (
        _words(
            "Albert Auto Bart Barthez Bartpho Basic Bert BertGeneration BertJapanese Bertweet BigBird BioGpt Blenderbot BlenderbotSmall"
            " ByT5 CLIP CTRL Camembert Canine Character Clvp CodeGen CodeLlama Cohere Cpm CpmAnt DPRContextEncoder DPRQuestionEncoder"
            " DPRReader Deberta DebertaV2 Dia DistilBert Electra Esm Esmc FSMT FastSpeech2Conformer Flaubert Funnel GPTNeoXJapanese GPTSw3"
            " Herbert LED Lasr LayoutLM LayoutLMv2 LayoutLMv3 LayoutXLM Luke Lxmert M2M100 MBart MBart50 MLuke MPNet Marian MarkupLM Mecab"
            " Mgpstr MobileBert Mvp MyT5 Nllb Nougat OpenAIGPT PLBart Pegasus Perceiver Phobert Pop2Piano ProphetNet Rag Reformer RemBert"
            " RoCBert RoFormer Roberta SeamlessM4T Siglip Siglip2 Speech2Text SpeechT5 Splinter SqueezeBert T5 Tapas Tipsv2 Udop"
            " VideoPrism Vits Wav2Vec2CTC Wav2Vec2PhonemeCTC Whisper Wordpiece XGLM XLM XLMRoberta XLNet"
        )
    )
}

_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # as published
_QWEN3_5 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

Vocabulary = tuple[dict[str, int], list[tuple[str, str]]]
Options = Mapping[str, Any]

DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "GemmaTokenizer": {
        "unk_token": "<unk>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    "Qwen2Tokenizer": {"unk_token": "<|endoftext|>", "bos_token": None, "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    "Qwen3_5Tokenizer": {"unk_token": "<|endoftext|>", "bos_token": None, "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    "GPT2Tokenizer": {"unk_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": None},
    "GPTNeoXTokenizer": {
        "unk_token": "<|endoftext|>",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|padding|>",
    },
}
"""Special tokens a class has where the configuration does not name them."""


def class_of(config: Options, hint: ModelHint, byte_level: bool, place: str) -> str:
    """The class AutoTokenizer makes, without ``Fast``; :data:`AS_IT_IS` for the general one.

    Args:
        config: ``tokenizer_config.json``.
        byte_level: ``tokenizer.json`` has a byte-level part.

    Raises:
        UserError: the class is one that cannot be made here, or code of the directory's own is asked for.
    """
    if config.get(MADE_BY_FW) is True:
        return AS_IT_IS
    named = config.get("tokenizer_class") or ""
    if not isinstance(named, str):
        raise UserError(f"{place}/{CONFIG}: tokenizer_class is {named!r}, not a name; leave it out or name one")
    auto_map = config.get("auto_map")
    if isinstance(auto_map, dict):
        auto_map = auto_map.get("AutoTokenizer")
    if auto_map:
        name = _with_code(named.removesuffix("Fast"), hint.model_type, place)
    else:
        name = _without_code((named or hint.tokenizer_class).removesuffix("Fast"), hint.model_type, byte_level)
    if name in _REFUSED:
        raise UserError(
            f"{place}/{CONFIG}: tokenizer_class {name} has rules of its own that are not known here;"
            f' set "tokenizer_class": "PreTrainedTokenizerFast" to take {TOKENIZER} as it is'
        )
    return name if name in _BUILDERS else AS_IT_IS


def _without_code(name: str, model_type: str, byte_level: bool) -> str:
    if not name:
        return AS_IT_IS if model_type in _TYPES_AS_IT_IS else _CLASS_OF_TYPE.get(model_type, AS_IT_IS)
    if model_type in _TYPES_AS_IT_IS:
        return AS_IT_IS
    if model_type in _TYPES_OVERRULED:
        return _TYPES_OVERRULED[model_type]
    # Llama 3 and others name the class of Llama 2, whose pipeline is another.
    return AS_IT_IS if name == "LlamaTokenizer" and byte_level else name


def _with_code(name: str, model_type: str, place: str) -> str:
    """Code in the directory is never run; transformers does without it too where it knows the class or the type of model."""
    known = name in _BUILDERS or name in _REFUSED or name in _GENERIC
    if not known and model_type not in _TYPES_AS_IT_IS and model_type not in _CLASS_OF_TYPE:
        raise UserError(
            f"{place}/{CONFIG}: auto_map asks for code of the directory's own, which is not run;"
            f" remove auto_map to take {TOKENIZER} as it is"
        )
    if known or name:
        return name
    return AS_IT_IS if model_type in _TYPES_AS_IT_IS else _CLASS_OF_TYPE[model_type]


def build(name: str, content: Options, options: Options, place: str) -> Tokenizer:
    """The pipeline of a class, with the vocabulary and merges of ``tokenizer.json`` and no added tokens yet.

    Args:
        name: what :func:`class_of` gave.
        content: ``tokenizer.json``.
        options: ``tokenizer_config.json`` over :data:`DEFAULTS`.
    """
    model = content.get("model", {})
    vocab, merges = model.get("vocab"), model.get("merges")
    if not isinstance(vocab, dict) or not isinstance(merges, list):
        raise UserError(
            f"{place}/{TOKENIZER}: its model is {model.get('type', 'of no type')}, and tokenizer_class {name} is a BPE;"
            ' set "tokenizer_class": "PreTrainedTokenizerFast" to take the file as it is'
        )
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]
    try:
        tokenizer = _BUILDERS[name]((vocab, pairs), options)  # type: ignore[arg-type]
        tokenizer.post_processor = Tokenizer.from_str(_without_vocabulary(content)).post_processor
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{place}/{TOKENIZER}: the tokenizers library cannot read it: {error}; copy it anew, or update it") from None
    return tokenizer


def after_special_tokens(name: str, tokenizer: Tokenizer) -> None:
    """What a class does once its special tokens are there."""
    if name == "GPTNeoXTokenizer":  # adds no token, whatever tokenizer.json says
        tokenizer.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])


def _without_vocabulary(content: Options) -> str:
    model = {"type": "BPE", "vocab": {}, "merges": []}
    return json.dumps({**content, "model": model, "added_tokens": []})


def _llama(vocabulary: Vocabulary, options: Options) -> Tokenizer:
    prefix = options.get("add_prefix_space")
    prefix = True if prefix is None else prefix
    tokenizer = Tokenizer(BPE(*vocabulary, fuse_unk=True, byte_fallback=True))
    scheme = ("always" if options.get("legacy", False) else "first") if prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1)] if prefix else steps)
    return tokenizer


def _gemma(vocabulary: Vocabulary, options: Options) -> Tokenizer:
    unk = str(options["unk_token"])
    tokenizer = Tokenizer(BPE(*vocabulary, fuse_unk=True, byte_fallback=True, unk_token=unk))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _qwen(regex: str) -> Callable[[Vocabulary, Options], Tokenizer]:
    def make(vocabulary: Vocabulary, options: Options) -> Tokenizer:
        tokenizer = _byte_level(vocabulary)
        tokenizer.normalizer = normalizers.NFC()
        prefix = bool(options.get("add_prefix_space"))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(regex), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)]
        )
        return tokenizer

    return make


def _gpt2(vocabulary: Vocabulary, options: Options) -> Tokenizer:
    tokenizer = _byte_level(vocabulary)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=options.get("add_prefix_space", False))
    return tokenizer


def _gpt_neox(vocabulary: Vocabulary, options: Options) -> Tokenizer:
    tokenizer = _byte_level(vocabulary)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=options.get("add_prefix_space", False), trim_offsets=options.get("trim_offsets", True)
    )
    return tokenizer


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    tokenizer = Tokenizer(BPE(*vocabulary, continuing_subword_prefix="", end_of_word_suffix=""))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


_BUILDERS: dict[str, Callable[[Vocabulary, Options], Tokenizer]] = {
    "LlamaTokenizer": _llama,
    "GemmaTokenizer": _gemma,
    "Qwen2Tokenizer": _qwen(_QWEN2),
    "Qwen3_5Tokenizer": _qwen(_QWEN3_5),
    "GPT2Tokenizer": _gpt2,
    "GPTNeoXTokenizer": _gpt_neox,
}
