"""Protection domains that are shared between processes."""
