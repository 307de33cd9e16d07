"""Providers of verbs contexts: `software` in this process, `hardware` through libibverbs.

Both have ``names()``, which returns the names of the devices, ``open_context(name)``, which returns a context that the
caller destroys, and ``gid_table(context, port)``, which returns the GIDs of a port.
"""
