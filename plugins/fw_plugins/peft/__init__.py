"""Which small part of a model trains."""
