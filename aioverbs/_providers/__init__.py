"""Providers of verbs contexts: `software` in this process, `hardware` through libibverbs and pyverbs.

Both have ``names()``, which lists the devices, ``open_context(name)`` and ``gid_table(context, port)``.
"""
