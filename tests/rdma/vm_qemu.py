"""Run QEMU: with KVM if that works, with a time limit, and never beyond the life of this process."""

import contextlib
import os
import subprocess
import termios
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.rdma.vm_errors import Failure, VmError
from tests.rdma.vm_image import Image

QEMU = "qemu-system-x86_64"
KVM = ("-accel", "kvm", "-cpu", "host")
TCG = ("-accel", "tcg,thread=multi", "-cpu", "max")
TCG_PACE = 10  # factor to KVM: system calls take 6 or 7 times as long, Python 17 times
KVM_PROBE_LIMIT_S = 10.0
BOOT_LIMIT_S = 120.0
MEMORY_MIB = 3072
KERNEL_LINE = "console=ttyS0 quiet panic=-1 oops=panic mitigations=off tsc=reliable clocksource=tsc"


@dataclass(frozen=True, slots=True)
class Guest:
    """A guest to boot.

    Attributes:
        image: kernel and initramfs.
        accelerator: QEMU's arguments that say how instructions are executed.
        share: the directory that the guest may write to; it finds its second stage there and
            leaves the files `booted`, `failure` and `status`.
        terminal: whether the guest's console is our terminal, rather than a pipe.
        disk: what the guest has as /dev/vda, a file of a whole file system.
        cut: QEMU is killed when this file is there, as if the guest's power were cut: what its kernel
            holds in memory is lost, what it gave to the disk is not. The command was successful then.
    """

    image: Image
    accelerator: tuple[str, ...]
    share: Path
    terminal: bool
    disk: Path | None = None
    cut: Path | None = None

    def command(self) -> list[str]:
        """Return QEMU's command line; the guest's output is its standard output."""
        # A virtio console is a terminal but passes 16 bytes at a time; a virtio port is neither.
        output = "virtconsole" if self.terminal else "virtserialport"
        drive = f"file={self.disk},format=raw,if=none,id=disk,cache=writeback"
        return [
            *_base_command(self.image, self.accelerator, self.share / "console", KERNEL_LINE),
            *("-smp", "2", "-m", str(MEMORY_MIB)),
            *("-chardev", "stdio,id=output,signal=off"),
            *("-device", "virtio-serial-pci", "-device", f"{output},chardev=output"),
            *("-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap"),
            *("-device", "virtio-9p-pci,fsdev=host,mount_tag=host"),
            *("-fsdev", f"local,id=run,path={self.share},security_model=none"),
            *("-device", "virtio-9p-pci,fsdev=run,mount_tag=run"),
            *(("-drive", drive, "-device", "virtio-blk-pci,drive=disk") if self.disk else ()),
        ]

    def run(self, timeout_s: float) -> int:
        """Boot, wait for the command in the guest, and return its exit status.

        Arguments:
            timeout_s: how long the command may take; booting is limited by itself.

        Raises:
            VmError: there is no exit status of the command; the message ends with what the
                guest's kernel had to say.
        """
        # QEMU reads nothing from its standard input, but an end of file would tell the guest that its output is not
        # read.
        stream = None if self.terminal else subprocess.PIPE
        with (
            _restored_terminal(self.terminal),
            (self.share / "qemu").open("wb") as errors,
            _bound_process(self.command(), stdin=stream, stdout=stream, stderr=errors) as process,
        ):
            copier = threading.Thread(target=_copy_output, args=(process,), daemon=True)
            copier.start()
            failure = self._wait(process, timeout_s)
            if self._is_cut():
                process.kill()
        # A stalled reader of our output must not stall us for ever.
        copier.join(10.0)
        if self._is_cut():
            return 0
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int((self.share / "status").read_text())
        raise self._error(failure, timeout_s)

    def _is_cut(self) -> bool:
        return self.cut is not None and self.cut.exists()

    def _wait(self, process: "subprocess.Popen[bytes]", timeout_s: float) -> Failure | None:
        """Wait for the end of QEMU; return which limit was exceeded, if any."""
        deadline = time.monotonic() + BOOT_LIMIT_S
        booted = False
        while process.poll() is None:
            if self._is_cut():
                return None
            if not booted and (self.share / "booted").exists():
                booted = True
                deadline = time.monotonic() + timeout_s
            if time.monotonic() > deadline:
                return Failure.TIMED_OUT if booted else Failure.NOT_BOOTED
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.005 if self.cut is not None else 0.05)
        return None

    def _error(self, failure: Failure | None, timeout_s: float) -> VmError:
        console = _tail(self.share / "console")
        reason = _tail(self.share / "failure").strip()
        if failure is Failure.TIMED_OUT:
            message = f"the command did not end within {timeout_s:g} s"
        elif failure is Failure.NOT_BOOTED:
            message = f"the guest did not start the command within {BOOT_LIMIT_S:g} s"
        elif not (self.share / "booted").exists():
            failure = Failure.NOT_BOOTED
            message = f"the guest did not boot: {reason or 'its console and QEMU say why'}"
        elif "Kernel panic" in console:
            failure = Failure.PANIC
            message = "the guest's kernel died while the command ran"
        else:
            failure = Failure.LOST
            message = "the guest ended and left no exit status of the command"
        # If we ended QEMU, its message adds nothing.
        remarks = "" if failure is Failure.TIMED_OUT else _tail(self.share / "qemu")
        for title, text in (("console", console), ("QEMU", remarks)):
            if text.strip():
                message += f"\n--- {title} ---\n{text.strip()}"
        return VmError(failure, message)


def choose_accelerator(image: Image, cache: Path) -> tuple[str, ...]:
    """Return QEMU's arguments for KVM if a guest really runs under it, else for emulation.

    An accessible /dev/kvm does not suffice: with nested virtualization it may hang every guest. The answer is kept in
    `cache` until the host is rebooted.
    """
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return TCG
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    known = cache / "kvm"
    answer = known.read_text() if known.exists() else ""
    if not answer.startswith(f"{boot} "):
        answer = f"{boot} {'works' if _kvm_works(image, cache) else 'fails'}"
        known.write_text(answer)
    return KVM if answer == f"{boot} works" else TCG


def forget_accelerator(cache: Path) -> None:
    """Make the next run probe KVM again, since a guest under KVM did not boot."""
    (cache / "kvm").unlink(missing_ok=True)


def _kvm_works(image: Image, cache: Path) -> bool:
    console = cache / "kvm-console"
    console.unlink(missing_ok=True)
    command = _base_command(image, KVM, console, f"{KERNEL_LINE} vm.probe")
    with _bound_process(
        [*command, "-m", "512"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            process.wait(KVM_PROBE_LIMIT_S)
        except subprocess.TimeoutExpired:
            return False
    return "vm: alive" in _tail(console)


def _base_command(image: Image, accelerator: tuple[str, ...], console: Path, kernel_line: str) -> list[str]:
    return [
        # QEMU ends with this process, even if this process is killed and cannot clean up.
        *("setpriv", "--pdeathsig", "KILL", QEMU),
        *accelerator,
        *("-nodefaults", "-display", "none", "-no-reboot", "-nic", "none"),
        *("-kernel", str(image.kernel), "-initrd", str(image.initramfs), "-append", kernel_line),
        *("-serial", f"file:{console}"),
    ]


@contextlib.contextmanager
def _bound_process(
    command: list[str],
    stdin: int | None,
    stdout: int | None,
    stderr: int | IO[bytes],
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process that ends with the block."""
    process = subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(3.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def _restored_terminal(ours: bool) -> Iterator[None]:
    """Restore the terminal that QEMU shares with us, however QEMU ends."""
    if not ours or not os.isatty(0):
        yield
        return
    settings = termios.tcgetattr(0)
    blocking = [os.get_blocking(fd) for fd in range(3)]
    try:
        yield
    finally:
        for fd in range(3):
            os.set_blocking(fd, blocking[fd])
        termios.tcsetattr(0, termios.TCSADRAIN, settings)


def _copy_output(process: "subprocess.Popen[bytes]") -> None:
    """Copy the guest's output to our standard output.

    QEMU does not get our standard output itself: it would make it non-blocking for all processes that share it.
    """
    if process.stdout is None:
        return
    try:
        while data := os.read(process.stdout.fileno(), 65536):
            view = memoryview(data)
            while view:
                view = view[os.write(1, view) :]
    except BrokenPipeError:
        process.terminate()


def _tail(path: Path, size: int = 6000) -> str:
    try:
        return path.read_bytes()[-size:].decode(errors="replace").replace("\r\n", "\n")
    except FileNotFoundError:
        return ""
