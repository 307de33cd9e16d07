"""Work requests, their completions, and what awaits them."""
