"""Special and added tokens: which there are, and how they get into the ``tokenizers`` library's object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer as Backend

from fw.errors import UserError
from fw.tokenizer import classes
from fw.tokenizer.files import ADDED_TOKENS, CONFIG, SPECIAL_TOKENS_MAP, TOKENIZER, ModelHint, parse, text_of

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA = "extra_special_tokens"

Token = str | AddedToken


@dataclass(frozen=True)
class Pipeline:
    """A tokenizer ready for use.

    Attributes:
        named: special tokens by their names in the configuration, ``bos_token`` and others, as a chat template sees them.
        config: ``tokenizer_config.json``.
        class_name: whose rules are followed; empty where ``tokenizer.json`` is taken as it is.
    """

    backend: Backend
    named: dict[str, str]
    config: dict[str, Any]
    class_name: str


def assemble(files: Mapping[str, bytes], hint: ModelHint, place: str) -> Pipeline:
    """Make the tokenizer that the files describe, by the rules of AutoTokenizer in transformers 5.

    ``add_bos_token`` and ``add_eos_token`` have no effect there, nor here: what is added to a text stands in ``tokenizer.json``.

    Raises:
        UserError: a file is damaged, or says something that cannot be followed.
    """
    config = parse(files[CONFIG], f"{place}/{CONFIG}") if CONFIG in files else {}
    _refuse(config, place)
    text = text_of(files[TOKENIZER], f"{place}/{TOKENIZER}")
    name = classes.class_of(config, hint, '"ByteLevel"' in text, place)
    options = _options(config)
    declared = _declared(config, f"{place}/{CONFIG}: added_tokens_decoder")
    if declared is None:
        # A configuration without added_tokens_decoder has these two beside it, or nothing.
        if SPECIAL_TOKENS_MAP in files:
            _merge_special_tokens_map(options, parse(files[SPECIAL_TOKENS_MAP], f"{place}/{SPECIAL_TOKENS_MAP}"))
        declared = _from_added_tokens(parse(files[ADDED_TOKENS], f"{place}/{ADDED_TOKENS}"), options) if ADDED_TOKENS in files else {}
        in_json = True
    else:
        in_json = False

    content: dict[str, Any] = {}
    if name == classes.AS_IT_IS:
        backend = _load(text, f"{place}/{TOKENIZER}")
        if in_json:
            declared = {**declared, **backend.get_added_tokens_decoder()}
    else:
        content = parse(files[TOKENIZER], f"{place}/{TOKENIZER}")
        options = {**classes.DEFAULTS[name], **options}
        if in_json:
            listed = {str(i): token for i, token in ((int(t["id"]), t) for t in content.get("added_tokens", []))}
            declared = {**declared, **(_declared({"added_tokens_decoder": listed}, f"{place}/{TOKENIZER}: added_tokens") or {})}
        backend = classes.build(name, content, options, place)
    padding = content.get("padding") or backend.padding
    if padding:
        options.setdefault("pad_token", padding["pad_token"])
    backend.no_padding()
    backend.no_truncation()

    named, extra = _special_tokens(options, {t.content: t for t in declared.values()}, place)
    _add(backend, declared, named, extra)
    if name == "Qwen2Tokenizer":  # whatever flags its files give them
        everything = dict.fromkeys([*map(str, named.values()), *map(str, extra)])
        backend.add_tokens([AddedToken(token, special=True) for token in everything])
    classes.after_special_tokens(name, backend)
    _check_ids(backend, declared, content, place)
    _refuse_cleaning(config, backend, place)
    return Pipeline(backend, {key: str(token) for key, token in named.items()}, config, name)


def _load(text: str, place: str) -> Backend:
    try:
        return Backend.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{place}: the tokenizers library cannot read it: {error}; copy it anew, or update tokenizers") from None


def _refuse(config: Mapping[str, Any], place: str) -> None:
    """What would change the ids and is not followed here."""
    for key, wanted in (("fast_tokenizer_files", None), ("init_inputs", None), ("fix_mistral_regex", False)):
        if config.get(key):
            say = f"set it to {str(wanted).lower()}" if wanted is not None else "remove it"
            raise UserError(f"{place}/{CONFIG}: {key} is not supported; {say} to take {TOKENIZER} as it is")


def _refuse_cleaning(config: Mapping[str, Any], backend: Backend, place: str) -> None:
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    is_bpe = type(backend.model).__name__ == "BPE"  # for BPE it is without effect unless forced
    if config.get("clean_up_tokenization_spaces") and (not is_bpe or config.get(forced)):
        key = forced if is_bpe else "clean_up_tokenization_spaces"
        raise UserError(f"{place}/{CONFIG}: {key} takes spaces out of decoded text, which is not supported; set it to false")


def _token(value: Any, place: str) -> Token:
    """A token written as a string or as an object."""
    if isinstance(value, str | AddedToken):
        return value
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        flags = {key: flag for key, flag in value.items() if key not in ("__type", "id")}
        try:
            return AddedToken(**flags)
        except TypeError:
            pass
    raise UserError(f"{place}: {value!r} is not a token; write a string, or an object with content and flags")


def _options(config: Mapping[str, Any]) -> dict[str, Any]:
    options = {key: value for key, value in config.items() if key not in ("add_bos_token", "add_eos_token", "added_tokens_decoder")}
    if "additional_special_tokens" in options and not options.get(_EXTRA):
        options[_EXTRA] = options.pop("additional_special_tokens")
    return options


def _declared(config: Mapping[str, Any], place: str) -> dict[int, AddedToken] | None:
    if "added_tokens_decoder" not in config:
        return None
    declared = {}
    for index, value in config["added_tokens_decoder"].items():
        token = _token(value, f"{place}, {index}")
        declared[int(index)] = token if isinstance(token, AddedToken) else AddedToken(token)
    return declared


def _merge_special_tokens_map(options: dict[str, Any], special: Mapping[str, Any]) -> None:
    for key, value in special.items():
        if key == _EXTRA and isinstance(value, list):
            before = list(options.get(_EXTRA) or [])
            value = before + [token for token in map(_special, value) if token not in before]
        elif isinstance(value, dict) and key != _EXTRA:
            value = _special(value)
        options[key] = value


def _special(value: Any) -> Token:
    return _token({**value, "special": True}, SPECIAL_TOKENS_MAP) if isinstance(value, dict) else _token(value, SPECIAL_TOKENS_MAP)


def _from_added_tokens(ids: Mapping[str, Any], options: Mapping[str, Any]) -> dict[int, AddedToken]:
    extra = options.get(_EXTRA) or []
    special = {_spelling(options[name]) for name in _NAMES if options.get(name)} | {_spelling(token) for token in extra}
    return {
        index: AddedToken(text, lstrip=False, rstrip=False, normalized=text not in special, special=text in special)
        for text, index in ids.items()
    }


def _spelling(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def _special_tokens(options: Mapping[str, Any], declared: Mapping[str, AddedToken], place: str) -> tuple[dict[str, Token], list[Token]]:
    """Those that have names, in the order in which they get their ids, and those that have none."""
    where = f"{place}/{CONFIG}"
    named: dict[str, Token] = {}
    for name in _NAMES:
        if options.get(name) is not None:
            token = _token(options[name], f"{where}: {name}")
            named[name] = declared.get(str(token), token)
    # The older name counts in special_tokens_map.json only where the newer one is nowhere.
    extra = (options[_EXTRA] if _EXTRA in options else options.get("additional_special_tokens")) or []
    # A model's own names, image_token for one; those written as objects come first.
    own = {name: value for name, value in options.items() if name.endswith("_token") and name not in _NAMES}
    for name in sorted(own, key=lambda name: isinstance(own[name], str)):
        if isinstance(own[name], str | dict | AddedToken):
            named[name] = _token(own[name], f"{where}: {name}")
    if isinstance(extra, dict):
        for name, value in extra.items():
            named[name] = _token(value, f"{where}: {_EXTRA}.{name}")
        extra = []
    if not isinstance(extra, list):
        raise UserError(f"{where}: {_EXTRA} is a {type(extra).__name__}; write a list of tokens, or an object of names and tokens")
    return named, [_token(token, f"{where}: {_EXTRA}") for token in extra]


def _add(backend: Backend, declared: Mapping[int, AddedToken], named: Mapping[str, Token], extra: list[Token]) -> None:
    """Add what the backend lacks: the declared tokens in the order of their ids, then the special ones."""
    present = backend.get_added_tokens_decoder()
    exact = {repr(token) for token in present.values()}
    wanted: list[Token] = [token for _, token in sorted(declared.items()) if repr(token) not in exact]
    known = {token.content for token in present.values()} | set(map(str, wanted))
    for token in [*named.values(), *extra]:
        if str(token) not in known:
            known.add(str(token))
            wanted.append(token)
    names = set(map(str, named.values()))
    tokens = []
    for token in wanted:
        if isinstance(token, str):
            token = AddedToken(token, special=True)
        elif str(token) in names:
            token.special = True
        tokens.append(token)
    backend.add_tokens(tokens)


def _check_ids(backend: Backend, declared: Mapping[int, AddedToken], content: Mapping[str, Any], place: str) -> None:
    """Each added token has the id that the files give it; the library numbers them itself."""
    ids = {token.content: index for index, token in declared.items()}
    ids |= {token["content"]: token["id"] for token in content.get("added_tokens", [])}
    for text, index in ids.items():
        given = backend.token_to_id(text)
        if given != index:
            raise UserError(
                f"{place}: token {text!r} has id {index} in the configuration and gets {given} from {TOKENIZER};"
                f" make the two agree, or save the tokenizer anew with transformers"
            )
