"""Resources apart from what they are for: the tree that they form, who owns them, and calls to another loop."""
