"""Providers of verbs contexts: `software` in this process, `hardware` through libibverbs and pyverbs.

Both have ``names()``, which lists the devices, ``open_context(name)``, which returns a context that the caller
destroys, and ``gid_table(context, port)``.
"""
