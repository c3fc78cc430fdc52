"""What is predicted: a run without the bytes."""
