"""Text to ids and back as a model's own files say: ``tokenizer.json``, special tokens, chat templates, and text as it is generated."""

from fw.tokenizer.chat import on_day
from fw.tokenizer.stream import TextStream
from fw.tokenizer.tokenizer import TokenizedChat, Tokenizer, load_tokenizer

__all__ = ["TextStream", "TokenizedChat", "Tokenizer", "load_tokenizer", "on_day"]
