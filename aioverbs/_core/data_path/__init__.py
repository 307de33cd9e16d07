"""Posting of work requests, their completions, and the operations that callers await."""
