"""Which plugins have been seen to work together, and which are refused together."""
