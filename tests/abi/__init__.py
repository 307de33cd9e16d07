"""libibverbs.h against the installed <infiniband/verbs.h>."""
