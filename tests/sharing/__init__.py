"""Protection domains between processes, on the software device."""
