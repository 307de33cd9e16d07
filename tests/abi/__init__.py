"""Comparison of libibverbs.h and librdmacm.h with the installed headers."""
