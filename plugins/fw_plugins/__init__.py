"""First-party plugins, one folder per kind. Nothing privileges them over a plugin from elsewhere."""
