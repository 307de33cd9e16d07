"""The guest's kernel and initramfs: downloaded and built once, then kept in a cache directory.

The kernel is the distribution's, unpacked and never installed. It is kept until the cache is removed: if it were
updated automatically, failures would be harder to explain.
"""

import contextlib
import fcntl
import hashlib
import lzma
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.debian import PackageError, apt_get
from tests.rdma.vm_errors import Failure, VmError

# depmod and modprobe are in directories that unprivileged users lack in PATH.
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BUSYBOX = Path("/bin/busybox")
TOOL_LIMIT_S = 300
INIT = Path(__file__).with_name("vm_init.sh")

MODULES = (
    "virtio_pci",
    "virtio_console",
    "9p",
    "9pnet_virtio",
    "overlay",
    "veth",
    "rdma_rxe",
    "rdma_ucm",
    "virtio_blk",
    "ext4",
)
# On Linux 6.1 rxe needs crc32_generic, which later kernels do not have. The other modules are for tests: another
# interface, and loss and delay on the veth pair.
OPTIONAL_MODULES = ("crc32_generic", "dummy", "sch_netem")

# The package that depends on the newest kernel, by the distribution's ID.
KERNEL_PACKAGES = {"debian": "linux-image-amd64", "ubuntu": "linux-image-generic"}


@dataclass(frozen=True, slots=True)
class Image:
    """Files that QEMU boots."""

    kernel: Path
    initramfs: Path


def prepare_image(cache: Path) -> Image:
    """Return the kernel and initramfs in `cache`; create missing ones first.

    Raises:

            VmError: the kernel could not be downloaded or unpacked.
    """
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / "lock"):
        kernel = cache / f"kernel-{hashlib.sha256(repr((OPTIONAL_MODULES, MODULES)).encode()).hexdigest()[:16]}"
        if not kernel.is_dir():
            print("vm: fetching a kernel", file=sys.stderr, flush=True)
            with _scratch(cache) as scratch:
                _fetch_kernel(scratch)
                _collect_kernel(scratch / "unpacked", scratch / "kernel")
                (scratch / "kernel").rename(kernel)
        initramfs = cache / f"initramfs-{_digest(kernel)}"
        if not initramfs.exists():
            for stale in cache.glob("initramfs-*"):
                stale.unlink()
            with _scratch(cache) as scratch:
                _pack_initramfs(kernel, scratch)
                (scratch / "initramfs").rename(initramfs)
        return Image(kernel / "kernel", initramfs)


def _fetch_kernel(scratch: Path) -> None:
    """Download the newest kernel's packages and unpack them into `scratch/unpacked`."""
    distribution = _distribution()
    if distribution not in KERNEL_PACKAGES:
        message = f"no kernel package is known for {distribution!r}: Debian 12 and Ubuntu 24.04 are"
        raise VmError(Failure.NOT_PREPARED, message)
    meta = KERNEL_PACKAGES[distribution]
    try:
        apt_get("download", *_kernel_packages(meta), cwd=scratch)
    except PackageError:
        apt_get("update")
        apt_get("download", *_kernel_packages(meta), cwd=scratch)
    for package in sorted(scratch.glob("*.deb")):
        _run("dpkg", "-x", str(package), str(scratch / "unpacked"))


def _kernel_packages(meta: str) -> list[str]:
    """Return the names of the packages with the kernel of `meta`, and with its modules."""
    direct = _depends(meta, r"linux-(?:image|modules)-(?:\w+-)?\d\S*")
    if not direct:
        raise VmError(Failure.NOT_PREPARED, f"apt knows no kernel that {meta} depends on")
    # Ubuntu's kernel package depends on a package with its modules.
    indirect = {name for package in direct for name in _depends(package, r"linux-modules-\d\S*")}
    return sorted({*direct, *indirect})


def _depends(package: str, pattern: str) -> list[str]:
    text = _run("apt-cache", "depends", package, check=False)
    return re.findall(rf"^ +\|?Depends: ({pattern})$", text.decode(), re.MULTILINE)


def _collect_kernel(unpacked: Path, kernel: Path) -> None:
    """Copy the kernel and a few modules from an unpacked package."""
    images = sorted(unpacked.glob("boot/vmlinuz-*"))
    if len(images) != 1:
        raise VmError(Failure.NOT_PREPARED, f"expected one kernel, the packages hold {images}")
    version = images[0].name.removeprefix("vmlinuz-")
    if not (unpacked / "lib").exists() and (unpacked / "usr/lib").exists():
        (unpacked / "lib").symlink_to("usr/lib")
    _run("depmod", "-b", str(unpacked), version)

    (kernel / "modules").mkdir(parents=True)
    (kernel / "kernel").write_bytes(_bootable(images[0].read_bytes()))
    order: list[str] = []
    for module in (*OPTIONAL_MODULES, *MODULES):
        plan = _run(
            *("modprobe", "-d", str(unpacked), "-S", version, "--show-depends", module),
            check=module in MODULES,
        )
        for file in re.findall(r"^insmod (\S+)", plan.decode(), re.MULTILINE):
            # busybox reads uncompressed modules only.
            name = f"{Path(file).name.partition('.')[0]}.ko"
            (kernel / "modules" / name).write_bytes(_uncompress(Path(file).read_bytes()))
            if name not in order:
                order.append(name)
    (kernel / "modules/order").write_text("".join(f"{name}\n" for name in order))


def _bootable(compressed: bytes) -> bytes:
    """Return the ELF file inside a kernel if QEMU can boot it, else the kernel unchanged.

    Under emulation, a kernel that uncompresses itself takes 3 s longer to boot.
    """
    # Linux' Documentation/arch/x86/boot.rst: setup_sects, payload_offset, payload_length.
    offset, length = struct.unpack_from("<II", compressed, 0x248)
    start = (compressed[0x1F1] + 1) * 512 + offset
    # The last four bytes of the payload are its uncompressed size, not part of the stream.
    elf = _uncompress(compressed[start : start + length - 4])
    # QEMU enters at the address in this ELF note: name "Xen", type 18, a word of 4 or 8 bytes.
    notes = (struct.pack("<III4s", 4, size, 18, b"Xen") for size in (4, 8))
    return elf if any(note in elf for note in notes) else compressed


def _uncompress(data: bytes) -> bytes:
    """Decompress a kernel or module; return other data unchanged."""
    if data.startswith(b"\xfd7zXZ\x00"):
        return lzma.decompress(data)
    if data.startswith(b"\x28\xb5\x2f\xfd"):
        return _run("zstd", "-dcq", stdin=data)
    return data


def _pack_initramfs(kernel: Path, scratch: Path) -> None:
    """Pack busybox, the init script and the modules into `scratch/initramfs`."""
    root = scratch / "root"
    for directory in ("bin", "dev", "lower", "proc", "root", "sys", "upper"):
        (root / directory).mkdir(parents=True)
    shutil.copy(BUSYBOX, root / "bin/busybox")
    shutil.copy(INIT, root / "init")
    (root / "init").chmod(0o755)
    shutil.copytree(kernel / "modules", root / "modules")
    names = "".join(f"{path.relative_to(root)}\n" for path in sorted(root.rglob("*")))
    pack = ("cpio", "--quiet", "-o", "-H", "newc", "-R", "0:0")
    (scratch / "initramfs").write_bytes(_run(*pack, stdin=names.encode(), cwd=root))


def _digest(kernel: Path) -> str:
    """Return a digest of an initramfs's parts, so that a change of any part makes a new one."""
    digest = hashlib.sha256(INIT.read_bytes())
    for path in (BUSYBOX, Path(__file__), *sorted((kernel / "modules").iterdir())):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _distribution() -> str:
    release = Path("/etc/os-release").read_text()
    found = re.search(r'^ID="?(\w+)"?$', release, re.MULTILINE)
    return found[1] if found else "unknown"


def _run(*command: str, stdin: bytes = b"", cwd: Path | None = None, check: bool = True) -> bytes:
    """Run a tool and return its output; with `check`, raise if it fails."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={"PATH": SYSTEM_PATH, "LC_ALL": "C"},
            input=stdin,
            capture_output=True,
            timeout=TOOL_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise VmError(Failure.NOT_PREPARED, str(error)) from error
    if check and done.returncode != 0:
        message = f"{' '.join(command)} failed with {done.returncode}:\n{done.stderr.decode()}"
        raise VmError(Failure.NOT_PREPARED, message)
    return done.stdout


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process at a time fill the cache; the kernel drops the lock of a process that dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _scratch(cache: Path) -> Iterator[Path]:
    """A directory beside the result, so that a complete result can be renamed into place."""
    with tempfile.TemporaryDirectory(dir=cache, prefix="making-") as name:
        yield Path(name)
