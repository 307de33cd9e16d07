"""Where verbs contexts come from: `software` in this process, `hardware` through libibverbs and pyverbs.

Both have ``names()``, the devices that are there, and ``open_context(name)``.
"""
