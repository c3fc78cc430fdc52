"""Reference models. Each architecture is one short file over the shared layers; its Hugging Face name map stands beside it."""
