"""The packages beside this are installed into an environment of their own by `test_packages.py`; nobody else sees them."""

collect_ignore = ["adabelief", "gpt_neox", "half_cache"]
