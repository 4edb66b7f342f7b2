"""Models: finding and loading them, and their shape from the config alone."""
