"""Human-readable report of the demonstration."""

from rich.console import Console
from rich.table import Table

from storage_server.demo.scenario import Outcome

__all__ = ["print_report"]


def print_report(console: Console, outcome: Outcome) -> None:
    """Print the results of the demonstration, and whether all checks passed."""
    console.print("\nresources of the server", outcome.tree, sep="\n")
    table = Table(box=None, pad_edge=False, show_header=False)
    latencies = ", ".join(f"{name} {value:,.1f} µs" for name, value in outcome.read_us.items())
    table.add_row("device", f"{outcome.device}, thread domains {'native' if outcome.native else 'not native'}")
    table.add_row("files", f"{outcome.files:,} of mixed sizes; {outcome.bytes:,} bytes")
    table.add_row("reads of 4 KiB", f"{outcome.blocks:,}: {latencies}")
    table.add_row("flushes", f"{outcome.flushes:,} flushes, {outcome.syncs:,} syncs of the disk")
    table.add_row("data by messages", f"{outcome.message_bytes:,} bytes; all others by one-sided RDMA")
    stopped = f"AffinityError: {outcome.affinity_error}" if outcome.affinity_error else "the call was not stopped"
    table.add_row("wrong loop", stopped)
    console.print()
    console.print(table)
    for each in outcome.wrong:
        console.print(f"[red]wrong: {each}")
    if outcome.verified:
        console.print(f"[bold green]verified: {outcome.bytes:,} bytes in {outcome.files:,} files, each byte")
    else:
        console.print("[bold red]verification failed")
