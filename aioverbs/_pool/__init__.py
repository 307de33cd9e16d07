"""Worker pools: threads or processes with an event loop and a resource domain each."""
