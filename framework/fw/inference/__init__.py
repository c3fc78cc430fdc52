"""Text from models: many requests at once, over one model and one cache of keys and values."""
