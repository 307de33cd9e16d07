"""Diagnosis of simulated machines: each problem has its code, message and commands."""

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from aioverbs.cli.diagnosis import Diagnosis, Finding, Severity, diagnose
from aioverbs.cli.machine import Library, Probe, Trial, Ways, parse_probe
from tests.cli.trees import IPV4, KERNEL, LINK_LOCAL, Tree

LIMITED = "Max locked memory         {0}              {0}              bytes"
ROOT_STATUS = "Name:\tpython\nCapEff:\t000001ffffffffff"
USER_STATUS = "Name:\tpython\nCapEff:\t0000000000000000"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def the_finding(diagnosis: Diagnosis) -> Finding:
    """Return the only finding."""
    (finding,) = diagnosis.findings
    return finding


def test_machine_without_problems(tree: Tree) -> None:
    tree.device()
    assert diagnose(tree.inspect()) == Diagnosis((), ("rxe0",), ())


def test_data_about_a_machine(tree: Tree) -> None:
    tree.device("mlx5_0", link_layer="InfiniBand", gids={0: LINK_LOCAL}, uverbs="uverbs3")
    tree.write("etc/libibverbs.d/mlx5.driver", "driver mlx5")
    tree.write("sys/class/net/ib0/operstate", "up")
    machine = tree.inspect()
    (device,) = machine.devices
    (port,) = device.ports
    assert (device.name, device.node, device.open_errno) == ("mlx5_0", "/dev/infiniband/uverbs3", 0)
    assert (port.number, port.state, port.physical, port.link_layer) == (1, "ACTIVE", "LinkUp", "InfiniBand")
    assert [(gid.index, gid.address, gid.kind) for gid in port.gids] == [(0, LINK_LOCAL, "RoCE v2")]
    assert (machine.kernel, machine.providers, machine.interfaces) == (KERNEL, ("mlx5",), ("ib0",))
    assert diagnose(machine).usable == ("mlx5_0",)  # link-local GIDs suffice over InfiniBand


def no_libibverbs(tree: Tree) -> None:
    problem = Library(problem="libibverbs.so.1: cannot open shared object file")
    tree.probe = Probe(libibverbs=problem, librdmacm=tree.probe.librdmacm)


def old_libibverbs(tree: Tree) -> None:
    problem = Library("/opt/libibverbs.so.1", "1.2", "undefined symbol: ibv_reg_mr", outdated=True)
    tree.probe = Probe(libibverbs=problem, librdmacm=tree.probe.librdmacm)


def crash(tree: Tree) -> None:
    tree.probe = Probe(crash="ended with status -11", warnings=("first", "a last word"))


def no_librdmacm(tree: Tree) -> None:
    tree.probe = replace(tree.probe, librdmacm=Library(problem="no such file"))


def old_librdmacm(tree: Tree) -> None:
    problem = Library("/opt/librdmacm.so.1", "1.2", "undefined symbol: rdma_establish", outdated=True)
    tree.probe = replace(tree.probe, librdmacm=problem)


def refused(name: str, number: int, *, container: bool = False) -> Callable[[Tree], None]:
    def change(tree: Tree) -> None:
        tree.refused[name] = number
        if container:
            tree.write(".dockerenv")

    return change


def no_provider(tree: Tree) -> None:
    tree.probe = replace(tree.probe, listed=(), trials={}, warnings=("couldn't load driver 'librxe-rdmav34.so'",))
    for name in ("rxe", "mlx5"):
        tree.write(f"etc/libibverbs.d/{name}.driver", f"driver {name}")


def trial(problem: str, number: int = 0, limit: int | None = None) -> Callable[[Tree], None]:
    def change(tree: Tree) -> None:
        tree.probe = replace(tree.probe, trials={"rxe0": Trial(problem, number)})
        if limit is not None:
            tree.write("proc/self/limits", LIMITED.format(limit))
            tree.write("proc/self/status", USER_STATUS)

    return change


def limited(tree: Tree) -> None:
    tree.write("proc/self/limits", LIMITED.format(8 << 20))
    tree.write("proc/self/status", USER_STATUS)


def not_optimized(tree: Tree) -> None:
    tree.probe = replace(tree.probe, optimized=False)


def remove(path: str) -> Callable[[Tree], None]:
    return lambda tree: (tree.root / path).unlink()


# A change of a machine without problems, and the resulting finding: code, subject, whether the device is unusable, part
# of the message, part of the first command.
CHANGES = [
    (no_libibverbs, "libibverbs-missing", "system", True, "cannot open shared", "apt-get install libibverbs1"),
    (old_libibverbs, "libibverbs-old", "system", True, "/opt/libibverbs.so.1, which drives all", None),
    (crash, "libraries-crash", "system", True, "status -11; its last line: a last word", "--reinstall libibverbs1"),
    (no_librdmacm, "librdmacm-missing", "system", False, "no such file", "install librdmacm1"),
    (old_librdmacm, "librdmacm-old", "system", False, "/opt/librdmacm.so.1, which connects", None),
    (not_optimized, "not-optimized", "system", False, "CFLAGS", "env -u CFLAGS pip install"),
    (remove("dev/infiniband/rdma_cm"), "rdma-cm-missing", "system", False, "", "modprobe rdma_ucm"),
    (refused("rdma_cm", errno.EACCES), "rdma-cm-permission", "system", False, "Permission denied", "chmod 666"),
    (remove("sys/class/infiniband_verbs/uverbs0/ibdev"), "no-uverbs", "rxe0", True, "", "modprobe ib_uverbs"),
    (remove("dev/infiniband/uverbs0"), "no-node", "rxe0", True, "/dev/infiniband/uverbs0 does not exist", "udevadm"),
    (refused("uverbs0", errno.EACCES), "permission", "rxe0", True, "may not open", "chmod 666 /dev/infiniband/uverbs0"),
    (
        refused("uverbs0", errno.EPERM, container=True),
        *("permission", "rxe0", True, "Operation not permitted", "docker run --device=/dev/infiniband/uverbs0"),
    ),
    (refused("uverbs0", errno.EIO), "node", "rxe0", True, "Input/output error", None),
    (no_provider, "no-provider", "rxe0", True, "providers: mlx5); libibverbs says: couldn't load", "ibverbs-providers"),
    (trial("ibv_create_qp failed", errno.EINVAL), "use", "rxe0", True, "ibv_create_qp failed", None),
    (trial("ibv_reg_mr failed", errno.ENOMEM), "use", "rxe0", True, "ibv_reg_mr failed", None),
    (trial("ibv_reg_mr", errno.ENOMEM, 64 << 10), "memlock", "system", True, "only 64 KiB", "ulimit -l unlimited"),
    (trial("ibv_reg_mr", errno.EPERM, 0), "memlock", "system", True, "only 0 KiB", "ulimit -l unlimited"),
    (trial("ibv_create_qp", errno.EPERM, 64 << 20), "use", "rxe0", True, "ibv_create_qp", None),
    (limited, "memlock", "system", False, "only 8192 KiB", "ulimit -l unlimited"),
]


@pytest.mark.parametrize(
    ("change", "code", "subject", "unusable", "message", "command"), CHANGES, ids=[each[1] for each in CHANGES]
)
def test_problem(
    tree: Tree,
    change: Callable[[Tree], None],
    code: str,
    subject: str,
    unusable: bool,
    message: str,
    command: str | None,
) -> None:
    tree.device()
    change(tree)
    diagnosis = diagnose(tree.inspect())
    finding = the_finding(diagnosis)
    assert (finding.code, finding.subject) == (code, subject)
    assert finding.severity is (Severity.ERROR if unusable else Severity.WARNING)
    assert (diagnosis.unusable if unusable else diagnosis.usable) == ("rxe0",)
    assert message in finding.message
    if command is None:
        assert finding.commands == ()
    else:
        assert command in finding.commands[0]


DEBIAN = ["sudo apt-get install libibverbs1 ibverbs-providers", "sudo apt-get install librdmacm1"]
RED_HAT = ["sudo dnf install libibverbs", "sudo dnf install librdmacm"]


@pytest.mark.parametrize(
    ("os_release", "commands"),
    [
        ('NAME="Debian GNU/Linux"\nID=debian', DEBIAN),
        ("ID=ubuntu\nID_LIKE=debian", DEBIAN),
        ('ID="linuxmint"\nID_LIKE="ubuntu debian"', DEBIAN),
        ("ID=fedora", RED_HAT),
        ('ID="rhel"\nID_LIKE="fedora"', RED_HAT),
        ('ID="rocky"\nID_LIKE="rhel centos fedora"', RED_HAT),
    ],
    ids=["Debian", "Ubuntu", "Mint", "Fedora", "RHEL", "Rocky"],
)
def test_packages_of_missing_libraries(tree: Tree, os_release: str, commands: list[str]) -> None:
    tree.device()
    tree.write("etc/os-release", os_release)
    tree.probe = Probe(libibverbs=Library(problem="no such file"), librdmacm=Library(problem="no such file"))
    assert [command for finding in diagnose(tree.inspect()).findings for command in finding.commands] == commands


def test_packages_on_an_unknown_distribution(tree: Tree) -> None:
    tree.device()
    tree.write("etc/os-release", "ID=arch")
    no_libibverbs(tree)
    assert the_finding(diagnose(tree.inspect())).commands == (
        "sudo apt-get install libibverbs1 ibverbs-providers  # Debian, Ubuntu",
        "sudo dnf install libibverbs  # Fedora, RHEL",
    )
    (tree.root / "etc/os-release").unlink()
    assert len(the_finding(diagnose(tree.inspect())).commands) == 2


@pytest.mark.parametrize(
    ("name", "text", "message", "command"),
    [
        ("AIOVERBS_SOFT_USERS", "root", "got 'root'", "unset AIOVERBS_SOFT_USERS"),
        ("AIOVERBS_SOFT_ADDRESS", "no host", "nor a host name", "unset AIOVERBS_SOFT_ADDRESS"),
        ("AIOVERBS_SOFT_ADDRESS", "no-such-host.invalid:0", "'no-such-host.invalid'", "unset AIOVERBS_SOFT_ADDRESS"),
        ("XDG_RUNTIME_DIR", "run", "must begin with /", "export AIOVERBS_SOFT_DIRECTORY=/tmp/aioverbs-$(id -u)"),
    ],
)
def test_invalid_software_settings_leave_rdma_devices_usable(
    tree: Tree, name: str, text: str, message: str, command: str
) -> None:
    tree.device()
    tree.environment[name] = text
    diagnosis = diagnose(tree.inspect())
    finding = the_finding(diagnosis)
    assert (finding.code, finding.subject, finding.severity) == ("soft-settings", "soft0", Severity.ERROR)
    assert finding.message.startswith(f"the software device cannot be opened: {name}: ")
    assert message in finding.message
    assert finding.commands == (command,)
    assert diagnosis.usable == ("rxe0",)


def test_cap_ipc_lock_lifts_the_memlock_limit(tree: Tree) -> None:
    tree.device()
    limited(tree)
    tree.write("proc/self/status", ROOT_STATUS)
    assert diagnose(tree.inspect()).findings == ()


@pytest.mark.parametrize(("uid_map", "lifts"), [("0 0 4294967295", True), ("0 1000 1\n1 100000 65536", False)])
def test_cap_ipc_lock_of_another_user_namespace_lifts_nothing(tree: Tree, uid_map: str, lifts: bool) -> None:
    """A container without root privileges has all capabilities in its own namespace; the kernel looks at the first."""
    tree.device()
    limited(tree)
    tree.write("proc/self/status", ROOT_STATUS)
    tree.write("proc/self/uid_map", uid_map)
    assert [each.code for each in diagnose(tree.inspect()).findings] == ([] if lifts else ["memlock"])


@pytest.mark.parametrize(
    ("port", "code", "severity", "message", "command"),
    [
        (
            {"state": "1: DOWN", "physical": "3: Disabled"},
            "port",
            Severity.ERROR,
            "eth0 is down",
            "ip link set eth0 up",
        ),
        (
            {"state": "2: INIT", "link_layer": "InfiniBand", "gids": {0: LINK_LOCAL}},
            *("port", Severity.ERROR, "subnet manager", "install opensm"),
        ),
        (
            {"state": "1: DOWN", "physical": "2: Polling", "link_layer": "InfiniBand", "gids": {}},
            *("port", Severity.ERROR, "has no link", ""),
        ),
        ({"state": "1: DOWN", "physical": "2: Polling"}, "port", Severity.ERROR, "eth0 has no link", ""),
        ({"gids": {}}, "no-gid", Severity.ERROR, "port 1 has no GID", "ip address add 192.0.2.1/24 dev eth0"),
        ({"gids": {0: LINK_LOCAL}}, "no-ip-gid", Severity.WARNING, "only link-local GIDs", "ip address add"),
    ],
    ids=["down", "init", "no link", "no carrier", "no GID", "no GID of an IP address"],
)
def test_port(tree: Tree, port: dict[str, str], code: str, severity: Severity, message: str, command: str) -> None:
    tree.device(**port)  # type: ignore[arg-type]
    diagnosis = diagnose(tree.inspect())
    finding = the_finding(diagnosis)
    assert (finding.code, finding.severity, finding.subject) == (code, severity, "rxe0")
    assert message in finding.message
    assert command in "".join(finding.commands)
    assert (diagnosis.unusable if severity is Severity.ERROR else diagnosis.usable) == ("rxe0",)


@pytest.mark.parametrize(
    ("limit", "message"), [(8 << 20, "more fails with ENOMEM"), (0, "any memory fails with EPERM")]
)
def test_error_of_registering_beyond_the_memlock_limit(tree: Tree, limit: int, message: str) -> None:
    tree.device()
    tree.write("proc/self/limits", LIMITED.format(limit))
    tree.write("proc/self/status", USER_STATUS)
    assert the_finding(diagnose(tree.inspect())).message.endswith(f"registering {message}")


@pytest.mark.parametrize("name", ["rxe0", "mlx5_0"])
@pytest.mark.parametrize("gid_type", ["RoCE v2", "IB/RoCE v1"])
def test_link_local_gids_without_ipv6(tree: Tree, name: str, gid_type: str) -> None:
    """For RoCE v2 the kernel resolves peers with the host's IPv6, also for hardware devices."""
    tree.device(name, gids={0: LINK_LOCAL}, ipv6=False, gid_type=gid_type)
    diagnosis = diagnose(tree.inspect())
    finding = the_finding(diagnosis)
    by_ip = gid_type == "RoCE v2"
    assert (finding.code, finding.severity) == ("no-ip-gid", Severity.ERROR if by_ip else Severity.WARNING)
    assert ("disabled on eth0" in finding.message) == by_ip
    assert (diagnosis.unusable if by_ip else diagnosis.usable) == (name,)


def test_a_kernel_without_ipv6(tree: Tree) -> None:
    tree.device(gids={0: LINK_LOCAL})
    (tree.root / "proc/sys/net/ipv6/conf/eth0/disable_ipv6").unlink()
    assert diagnose(tree.inspect()).unusable == ("rxe0",)


def test_an_interface_of_another_namespace_may_have_ipv6(tree: Tree) -> None:
    tree.device(gids={0: LINK_LOCAL}, ipv6=False)
    (tree.root / "sys/class/net/eth0/operstate").unlink()
    (tree.root / "sys/class/net/eth0").rmdir()
    assert diagnose(tree.inspect()).usable == ("rxe0",)


def test_one_of_two_devices_is_usable(tree: Tree) -> None:
    tree.device("rxe0")
    tree.device("rxe1", state="1: DOWN", physical="3: Disabled", netdev="eth1", uverbs="uverbs1")
    diagnosis = diagnose(tree.inspect())
    assert (diagnosis.usable, diagnosis.unusable) == (("rxe0",), ("rxe1",))
    assert the_finding(diagnosis).subject == "rxe1"


def test_one_active_port_of_two_is_enough(tree: Tree) -> None:
    tree.device("mlx5_0")
    second = "sys/class/infiniband/mlx5_0/ports/2"
    tree.write(f"{second}/state", "1: DOWN")
    assert diagnose(tree.inspect()) == Diagnosis((), ("mlx5_0",), ())


class TestNoDevice:
    """Advice for a machine without devices depends on its hardware and kernel."""

    def test_soft_roce_over_an_existing_interface(self, tree: Tree) -> None:
        tree.write("sys/class/net/enp1s0/operstate", "up")
        tree.write(f"lib/modules/{KERNEL}/modules.dep", "kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko.xz: kernel/x.ko")
        finding = the_finding(diagnose(tree.inspect()))
        assert (finding.code, finding.severity) == ("no-device", Severity.ERROR)
        assert finding.commands == ("sudo modprobe rdma_rxe", "sudo rdma link add rxe0 type rxe netdev enp1s0")

    def test_a_kernel_without_soft_roce(self, tree: Tree) -> None:
        tree.write(f"lib/modules/{KERNEL}/modules.dep", "kernel/drivers/net/veth.ko:")
        finding = the_finding(diagnose(tree.inspect()))
        assert (finding.code, finding.commands) == ("no-device", ())
        assert f"this kernel ({KERNEL}) has no module rdma_rxe" in finding.message

    def test_a_kernel_with_unknown_modules(self, tree: Tree) -> None:
        assert the_finding(diagnose(tree.inspect())).commands[0] == "sudo modprobe rdma_rxe"

    @pytest.mark.parametrize("mark", ["run/.containerenv", ".dockerenv", "proc/1/environ"])
    def test_a_container(self, tree: Tree, mark: str) -> None:
        tree.write(mark, "PATH=/bin\0container=podman\0")
        assert the_finding(diagnose(tree.inspect())).commands[0].startswith("docker run --device=/dev/infiniband ")

    @pytest.mark.parametrize(
        ("vendor", "number", "kind", "module"),
        [
            ("0x15b3", "0x101d", "0x020000", "mlx5_ib"),
            ("0x15b3", "0x1003", "0x020700", "mlx4_ib"),
            ("0x1d0f", "0xefa1", "0x020000", "efa"),
        ],
    )
    def test_hardware_without_its_module(self, tree: Tree, vendor: str, number: str, kind: str, module: str) -> None:
        folder = "sys/bus/pci/devices/0000:01:00.0"
        for name, text in (("vendor", vendor), ("device", number), ("class", kind)):
            tree.write(f"{folder}/{name}", text)
        finding = the_finding(diagnose(tree.inspect()))
        assert (finding.code, finding.commands) == ("no-module", (f"sudo modprobe {module}", "sudo modprobe ib_uverbs"))
        assert module in finding.message
        # Once the module is loaded, the advice is that of any machine without devices.
        tree.write(f"sys/module/{module}/refcnt")
        assert the_finding(diagnose(tree.inspect())).code == "no-device"

    def test_other_hardware(self, tree: Tree) -> None:
        for vendor, number, kind in (("0x15b3", "0x101d", "0x010802"), ("0x8086", "0x1572", "0x020000")):
            for name, text in (("vendor", vendor), ("device", number), ("class", kind)):
                tree.write(f"sys/bus/pci/devices/{number}/{name}", text)
        assert the_finding(diagnose(tree.inspect())).code == "no-device"


def test_routable_gids(tree: Tree) -> None:
    for address in (IPV4, "2001:0db8:0000:0000:0000:0000:0000:0001"):
        tree.device(gids={1: address})
        assert diagnose(tree.inspect()).findings == ()


def test_devices_that_cannot_be_listed_are_no_crash_and_no_missing_provider(tree: Tree) -> None:
    tree.device()
    tree.probe = replace(tree.probe, listed=(), trials={}, list_problem="ibv_get_device_list failed: EPERM")
    diagnosis = diagnose(tree.inspect())
    finding = the_finding(diagnosis)
    assert (finding.code, finding.subject, finding.severity) == ("list", "system", Severity.ERROR)
    assert finding.message == "libibverbs cannot list the RDMA devices: ibv_get_device_list failed: EPERM"
    assert finding.commands == ("strace -f -e trace=openat,socket aioverbs devices",)
    assert finding.hint is not None
    assert diagnosis.unusable == ("rxe0",)


def test_files_that_cannot_be_read_or_decoded(tree: Tree) -> None:
    card = "sys/bus/pci/devices/0000:01:00.0"
    tree.write(f"{card}/vendor", "0x15b3")
    tree.write(f"{card}/class", "0x020000")  # the number of the model is missing
    tree.write("proc/1/environ")
    (tree.root / "proc/1/environ").write_bytes(b"NAME=\xff\xfe\0container=lxc\0")
    machine = tree.inspect()
    assert machine.hardware == ()
    assert machine.container
    tree.write(f"{card}/device", "0x1017")
    assert tree.inspect().hardware == ("mlx5_ib",)


def test_parsing_the_output_of_the_probe() -> None:
    text = """{"libibverbs": {"path": "/l", "version": "44.0"}, "librdmacm": {"problem": "none"},
               "listed": ["rxe0"], "trials": {"rxe0": {"problem": "no", "number": 12}},
               "optimized": false, "list_problem": null, "ways": {"problem": "no memory"}}"""
    assert parse_probe(text, ("a warning",)) == Probe(
        Library("/l", "44.0"),
        Library(problem="none"),
        ("rxe0",),
        {"rxe0": Trial("no", 12)},
        ("a warning",),
        optimized=False,
        ways=Ways(problem="no memory"),
    )
