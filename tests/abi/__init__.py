"""verbs_abi.h against the installed <infiniband/verbs.h>."""
