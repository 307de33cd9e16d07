"""Where verbs contexts come from: `software` in this process, `hardware` through libibverbs and pyverbs.

Both have ``names()``, the devices that are there, ``open_context(name)`` and ``gid_table(context, port)``.
"""
