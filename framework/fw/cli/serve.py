"""Serve a model over HTTP, by OpenAI's interface: chats, completions, embeddings, adapters, batches; with a page at /."""

from __future__ import annotations

import argparse

from fw.errors import EXIT_OK

EXAMPLES = """examples:
  fw serve path/to/model
  fw serve runs/quickstart --port 9000 --name quickstart
  fw serve configs/serve-8b-int8.yaml serve.port=9000
  fw serve path/to/model --adapter poems=runs/poems --host 0.0.0.0 --api-keys keys.txt
  curl localhost:8000/v1/completions -d '{"prompt": "Once", "max_tokens": 20}' -H 'Content-Type: application/json'"""

_OPTIONS = {
    "host": ("ADDRESS", "to listen at (127.0.0.1)"),
    "port": ("N", "likewise (8000); 0 for any that is free"),
    "name": ("NAME", "by which requests ask for the model (its directory's)"),
    "replicas": ("N", "engines, each with the whole model (1)"),
    "api_keys": ("FILE", "a key in each line, one of which requests must have"),
    "adapters_dir": ("DIR", "within which /v1/load_lora_adapter loads"),
    "max_queue": ("N", "sequences that may wait (256)"),
    "timeout": ("SECONDS", "for a request (600)"),
    "drain": ("SECONDS", "that running requests have after SIGTERM (30)"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to serve, to whom."""
    parser.add_argument("model", metavar="MODEL|CONFIG", help="model, adapter or run directory, org/name of the hub, or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="serve.…, inference.…, kv_cache=…, quantization=…, offload.…")
    for name, (metavar, text) in _OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, help=text)
    parser.add_argument(
        "--adapter", action="append", default=[], metavar="NAME=DIR", help="an adapter that requests may ask for; may be given again"
    )
    parser.add_argument("--insecure", action="store_true", help="listen at any address without keys")


def run(options: argparse.Namespace) -> int:
    """Until SIGTERM or Ctrl-C."""
    from fw.server.signals import Asked, leaving

    try:
        with leaving():
            return _run(options)
    except Asked:
        return EXIT_OK


def _run(options: argparse.Namespace) -> int:
    from fw.server.run import run as serve
    from fw.server.settings import settings

    given = {name: value for name in _OPTIONS if (value := getattr(options, name)) is not None}
    given |= {"insecure": True} if options.insecure else {}
    given |= {"adapters": options.adapter} if options.adapter else {}
    return serve(settings(options.model, options.overrides, given))
