"""What a model is worth: how likely it finds texts, and tasks of the evaluation harness."""
