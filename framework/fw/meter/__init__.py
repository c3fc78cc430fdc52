"""What was measured: memory, time and floating-point rates."""
