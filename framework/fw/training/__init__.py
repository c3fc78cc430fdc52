"""A recipe trained by Lightning's Trainer: the module, the strategy, the order of the data, and what happens between steps."""
