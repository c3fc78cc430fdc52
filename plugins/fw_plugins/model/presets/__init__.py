"""Published shapes under their usual names; every field can be overridden."""
