"""Snapshots of the resources of a process, for `aioverbs top`."""
