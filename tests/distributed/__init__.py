"""Tests of the comm backend for Dask."""
