"""Model directories in the Hugging Face layout: found, read, loaded and written."""

from fw.locate import find
from fw.pretrained.directory import read_config
from fw.pretrained.load import load_model, save_model
from fw.pretrained.reading import plugin_for

__all__ = ["find", "load_model", "plugin_for", "read_config", "save_model"]
