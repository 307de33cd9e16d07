"""Run a command with RDMA devices: in a virtual machine with two soft-RoCE links.

    python tests/rdma/vm.py -- ibv_devinfo
    python tests/rdma/vm.py --shell

The guest sees the host's files at their paths; what it writes goes to memory and is lost at its end, except files in
$AIOVERBS_RESULTS, with `--results`. Its devices, named in $AIOVERBS_RDMA_DEVICES, are rxe0 at 10.77.0.1 and rxe1 at
10.77.0.2; their IPv4 GID has index 1, and their MTU is 4096. Packets between them cross a pair of veth interfaces,
veth0 and veth1, which tests may slow down, break or take down.

The exit status is the command's, or one of `vm_errors.Failure`.
"""

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType

# Run as a script: import the project's packages from its root.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.debian import PackageError
from tests.rdma.vm_errors import Failure, VmError
from tests.rdma.vm_image import SYSTEM_PATH, prepare_image
from tests.rdma.vm_packages import ensure_packages
from tests.rdma.vm_qemu import KVM, TCG_PACE, Guest, choose_accelerator, forget_accelerator

PROJECT = Path(__file__).resolve().parents[2]
GUEST_SCRIPT = Path(__file__).with_name("vm_guest.sh")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    options = _parse(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        return _run(options)
    except VmError as error:
        print(f"vm: {error}", file=sys.stderr)
        return error.failure
    except PackageError as error:
        print(f"vm: {error}", file=sys.stderr)
        return Failure.NOT_PREPARED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run(options: argparse.Namespace) -> int:
    cache: Path = options.cache.resolve()
    ensure_packages()
    image = prepare_image(cache)
    accelerator = choose_accelerator(image, cache)
    if options.prepare:
        return 0
    pace = 1 if accelerator is KVM else TCG_PACE
    with tempfile.TemporaryDirectory(prefix="rdma-vm-") as name:
        share = Path(name)
        _fill_share(share, options, pace)
        cut = share / "results" / options.cut if options.cut is not None else None
        guest = Guest(image, accelerator, share, terminal=options.shell, disk=options.disk, cut=cut)
        try:
            return guest.run(options.timeout)
        except VmError as error:
            if error.failure is Failure.NOT_BOOTED and accelerator is KVM:
                forget_accelerator(cache)
            raise
        finally:
            if options.results is not None:
                shutil.copytree(share / "results", options.results, dirs_exist_ok=True)


def _fill_share(share: Path, options: argparse.Namespace, pace: int) -> None:
    """Write the files that the guest reads from the share, and create a place for its results."""
    (share / "results").mkdir()
    shutil.copyfile(GUEST_SCRIPT, share / "guest.sh")
    (share / "command").write_text(_command_script(options, pace))
    if options.shell:
        size = shutil.get_terminal_size()
        (share / "terminal").write_text(f"{size.lines} {size.columns}\n")


def _command_script(options: argparse.Namespace, pace: int) -> str:
    """Return the command with its environment, as a script for the guest's /bin/sh."""
    environment = {
        # Programs of a virtual environment come first, as on the host, then the system's tools, even if the host's user
        # has them not in PATH.
        "PATH": f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}".removeprefix(":"),
        "HOME": "/tmp",
        "TMPDIR": "/run/tmp",
        "USER": "root",
        "LANG": "C.UTF-8",
        "TERM": os.environ.get("TERM", "dumb"),
        "PYTHONUNBUFFERED": "1",
        "AIOVERBS_RDMA_DEVICES": "rxe0,rxe1",
        "AIOVERBS_RDMA_ADDRESSES": "10.77.0.1,10.77.0.2",
        "AIOVERBS_RDMA_GID_INDEX": "1",
        "AIOVERBS_RESULTS": "/run/vm/results",
        "AIOVERBS_TEST_PACE": str(pace),
        **dict(options.env),
    }
    lines = [
        *(f"export {name}={shlex.quote(value)}" for name, value in environment.items()),
        f"cd {shlex.quote(str(options.cwd.resolve()))} || exit 126",
        f"exec {shlex.join(options.command or ['/bin/bash', '-i'])}",
    ]
    return "".join(f"{line}\n" for line in lines)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run a command in a virtual machine with two soft-RoCE devices.")
    parser.add_argument(
        "--prepare",
        action="store_true",
        help="run nothing; install, fetch and build what a later run needs",
    )
    parser.add_argument(
        "--shell",
        action="store_true",
        help="run on this terminal; without a command, an interactive shell",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        metavar="S",
        help="how long the command may take (default: 600 s, with --shell a day)",
    )
    parser.add_argument("--cwd", type=Path, default=Path.cwd(), metavar="DIR", help="the directory to run it in")
    parser.add_argument(
        "--env",
        type=_assignment,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an environment variable for the command; of the caller's own only PATH is kept",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=PROJECT / ".cache/rdma-vm",
        metavar="DIR",
        help="where kernel and initramfs are kept (default: .cache/rdma-vm in the project)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="DIR",
        help="copy to DIR what the command leaves in $AIOVERBS_RESULTS",
    )
    parser.add_argument(
        "--disk",
        type=Path,
        metavar="FILE",
        help="a file that is the guest's disk, /dev/vda",
    )
    parser.add_argument(
        "--cut",
        metavar="NAME",
        help="cut the machine's power when the command has made this file in $AIOVERBS_RESULTS",
    )
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="after --")
    options = parser.parse_args(arguments)
    if not (options.command or options.shell or options.prepare):
        parser.error("give a command, or --shell")
    if options.timeout is None:
        options.timeout = 86400.0 if options.shell else 600.0
    return options


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("a time must be positive and finite")
    return value


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _end(number: int, frame: FrameType | None) -> None:
    """Exit, with clean-up."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
