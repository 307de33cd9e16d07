"""Declarations of libibverbs and librdmacm, and the tables of their verbs."""
