"""The `aioverbs` command."""
