"""Files of records, and tokenizers with chat templates, made on the spot."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers

from fw.kinds import make
from fw.kinds.data import DataPlugin
from fw.tokenizer import Tokenizer

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(directory: Path, template: str | None) -> Path:
    """Bytes, and ChatML's marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    directory.mkdir(parents=True, exist_ok=True)
    Tokenizer.from_backend(backend, eos_token="<|im_end|>", chat_template=template).save(directory)
    return directory


def plugin(name: str, **options: object):
    return make(DataPlugin, name, **options)


def write(file: Path, *values: object) -> str:
    text = "".join((value if isinstance(value, str) else json.dumps(value)) + "\n" for value in values)
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return str(file)


def opened(data, length: int = 512, said: list[str] | None = None):
    data.prepare((said if said is not None else []).append)
    return data.open(length)
