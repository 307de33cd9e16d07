"""Cut the power of a virtual machine with a loaded storage server many times, and check the data that is left.

    python tests/rdma/power_cuts.py --rounds 50

The server's volumes are on an ext4 file system on a disk of the machine. Each round boots the machine, serves the
volumes again, checks that all acknowledged data is there, and loads the server until QEMU is killed: data that the
guest's kernel had not given to the disk by then is lost. `power_guest.py` runs in the guest. Rounds alternate between
both backings on the software device, and the cache on soft-RoCE.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DISK_MIB = 256
ROUND_LIMIT_S = 300
CUT = "cut"
WAYS = (("mapped", "soft0"), ("cached", "soft0"), ("cached", "rxe0"))


def main(rounds: int, folder: Path) -> int:
    """Run the rounds; return the status of the first that fails, else 0."""
    disk, results = folder / "disk", folder / "results"
    with disk.open("wb") as file:
        file.truncate(DISK_MIB << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", disk], check=True)
    results.mkdir()
    last = results / "none"
    acknowledged = 0
    for number in range(rounds + 1):
        ends = number == rounds
        journal = results / str(number)
        backing, device = WAYS[number % len(WAYS)]
        vm = [sys.executable, str(ROOT / "tests/rdma/vm.py"), "--cwd", str(ROOT), "--timeout", str(ROUND_LIMIT_S)]
        vm += ["--disk", str(disk), "--results", str(results), *(() if ends else ("--cut", CUT))]
        guest = [sys.executable, "-P", str(ROOT / "tests/rdma/power_guest.py"), str(last), journal.name]
        guest += [backing, device, "" if ends else CUT]
        status = subprocess.run([*vm, "--", *guest], check=False).returncode
        (results / CUT).unlink(missing_ok=True)
        if status:
            print(f"round {number}, {backing} on {device}: failed, {status}; after {acknowledged} blocks", flush=True)
            return status
        if not ends:
            count = journal.read_text().count("flushed")
            acknowledged += count
            print(f"round {number}, {backing} on {device}: cut, {count} blocks were acknowledged", flush=True)
        last = journal
    print(f"{rounds} power cuts, {acknowledged} blocks acknowledged, none lost")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Cut the power of a virtual machine with a storage server under load.")
    parser.add_argument("--rounds", type=int, default=50, help="how often (default: 50)")
    with tempfile.TemporaryDirectory(prefix="power-cuts-") as name:
        sys.exit(main(parser.parse_args().rounds, Path(name)))
