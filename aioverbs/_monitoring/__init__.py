"""What a process shows to `aioverbs top` while it runs."""
