"""Opening and closing of resources: parents, children, owners, garbage collection, and failures."""

import asyncio
import contextlib
import errno
import gc
import io
import re
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
import uvloop
from rich.console import Console

from aioverbs import (
    AffinityError,
    BusyResourceError,
    ClosedResourceError,
    Connection,
    ParentDomain,
    Resource,
    ResourceDomain,
    ResourceInfo,
    ResourceState,
    VerbsError,
    connect,
    serve,
)
from aioverbs._core.handles import handles
from aioverbs._verbs.device import Device, open_device
from tests.capabilities import Capability, needs
from tests.garbage import collect_garbage
from tests.waiting import until

MAKERS: dict[str, Callable[[Device], Resource]] = {
    "protection domain": lambda device: device.protection_domain(),
    "thread domain": lambda device: device.thread_domain(),
    "resource domain": lambda device: device.resource_domain(),
    "xrc domain": lambda device: device.xrc_domain(),
}
every_kind = pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=kind, marks=needs(Capability.XRC_DOMAINS) if kind == "xrc domain" else ())
        for kind, make in MAKERS.items()
    ],
)


def open_objects(device: Device) -> dict[str, int]:
    """Return the counts of the device's open objects."""
    return {kind: count for kind, count in device.statistics().objects if count}


async def open_and_drop(resource: Resource) -> None:
    """Open a resource and drop the last reference to it."""
    await resource.open()
    del resource
    collect_garbage()


@needs(Capability.OBJECT_COUNTS)
@every_kind
async def test_a_block_opens_and_closes(device: Device, make: Callable[[Device], Resource]) -> None:
    resource = make(device)
    states = [resource.state]
    assert not open_objects(device)
    async with resource as entered:
        assert entered is resource
        states.append(resource.state)
        assert open_objects(device)
        assert resource.statistics() == resource.statistics()
        assert isinstance(hash(resource.statistics()), int)
        assert repr(resource).endswith("(open)>")
    assert [*states, resource.state] == [ResourceState.NEW, ResourceState.OPEN, ResourceState.CLOSED]
    assert not open_objects(device)
    await resource.aclose()
    with pytest.raises(ClosedResourceError, match="cannot be opened again: make a new one"):
        await resource.open()


@needs(Capability.OBJECT_COUNTS)
@every_kind
async def test_open_and_close_without_a_block(device: Device, make: Callable[[Device], Resource]) -> None:
    resource = await make(device).open()
    assert open_objects(device)
    await resource.aclose()
    assert not open_objects(device)


@every_kind
async def test_a_closed_parent_makes_no_children(device: Device, make: Callable[[Device], Resource]) -> None:
    other = await open_device("soft0").open()
    resource = make(other)
    await other.aclose()
    with pytest.raises(ClosedResourceError, match="is not open: nothing can be made from it"):
        await resource.open()
    with pytest.raises(ClosedResourceError, match="is not open"):
        make(other)
    assert resource.state is ResourceState.NEW


@every_kind
async def test_closing_an_unopened_resource_does_nothing(device: Device, make: Callable[[Device], Resource]) -> None:
    resource = make(device)
    await resource.aclose()
    assert resource.state is ResourceState.NEW


@needs(Capability.FAULT_PLAN)
async def test_an_error_of_the_block_is_not_hidden_by_an_error_of_closing(device: Device) -> None:
    faults = device.faults
    pd = device.protection_domain()

    async def body() -> None:
        async with pd:
            faults.fail("dealloc_pd", errno.EIO)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        await body()
    assert any("closing" in note and "EIO" in note for note in caught.value.__notes__)
    await pd.aclose()


async def test_parents_close_children_newest_first_with_a_warning_for_each(device: Device) -> None:
    pd = await device.protection_domain().open()
    td = await device.thread_domain().open()
    domain = await pd.parent_domain(td).open()
    with pytest.warns(ResourceWarning) as caught:
        await pd.aclose()
    assert ["ParentDomain" in str(warning.message) for warning in caught] == [True]
    assert __file__ in str(caught[0].message)
    assert domain.closed
    assert pd.closed
    assert td.state is ResourceState.OPEN
    await td.aclose()


async def test_closing_continues_when_warnings_are_errors(device: Device) -> None:
    pd = await device.protection_domain().open()
    domains = [await pd.parent_domain().open() for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ResourceWarning):
            await pd.aclose()
    assert pd.closed
    assert all(domain.closed for domain in domains)


async def test_closing_parents_before_children_closes_all(device: Device) -> None:
    pd, td = await device.protection_domain().open(), await device.thread_domain().open()
    domain = await pd.parent_domain(td).open()
    with pytest.warns(ResourceWarning, match="ParentDomain"):
        await td.aclose()
    assert domain.closed
    await pd.aclose()


async def test_closing_does_not_touch_children_of_another_loop() -> None:
    async with open_device("soft0") as device, device.protection_domain() as pd:
        opened = asyncio.Event()
        here = asyncio.get_running_loop()
        domains: list[ParentDomain] = []

        async def elsewhere() -> asyncio.Event:
            async with device.thread_domain() as td, pd.parent_domain(td) as domain:
                domains.append(domain)
                done = asyncio.Event()
                loops.append((asyncio.get_running_loop(), done))
                here.call_soon_threadsafe(opened.set)
                await done.wait()
            return done

        loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        thread = asyncio.create_task(asyncio.to_thread(asyncio.run, elsewhere()))
        await opened.wait()
        (domain,) = domains
        for resource in (pd, device):
            with pytest.raises(BusyResourceError, match=r"cannot be closed here: .* belongs to <Affinity of thread"):
                await resource.aclose()
        with pytest.raises(AffinityError, match="aclose on"):
            await domain.aclose()
        assert [each.state for each in (device, pd, domain)] == [ResourceState.OPEN] * 3
        loop, done = loops[0]
        loop.call_soon_threadsafe(done.set)
        await thread
        assert domain.closed


async def test_a_device_closes_resources_of_closed_loops() -> None:
    device = await open_device("soft0").open()

    async def leave_open() -> ResourceDomain:
        return await device.resource_domain().open()

    domain = await asyncio.to_thread(asyncio.run, leave_open())
    assert domain.owner is not None
    assert domain.owner.orphaned
    with pytest.warns(ResourceWarning, match="ResourceDomain"):
        await device.aclose()
    assert domain.closed
    assert handles.open_handles() == []


@needs(Capability.OBJECT_COUNTS)
async def test_a_collected_resource_is_closed_by_its_owner(device: Device) -> None:
    with pytest.warns(ResourceWarning, match=r"ThreadDomain .* was still open: it was forgotten"):
        await open_and_drop(device.thread_domain())
    assert open_objects(device) == {"thread_domains": 1}, "a finalizer calls no verb"
    for _ in range(10):
        await asyncio.sleep(0)
    assert not open_objects(device)


def places(caught: pytest.WarningsRecorder) -> list[tuple[str, int]]:
    """Return the file and line that each recorded warning names."""
    return [(each.filename, each.lineno) for each in caught]


async def test_warnings_name_the_line_of_the_user_that_made_the_object(device: Device) -> None:
    line = sys._getframe().f_lineno
    with pytest.warns(ResourceWarning) as forgotten:
        await open_and_drop(device.thread_domain())
    domain = await device.resource_domain().open()
    part = await domain.completion_queue(8).open()
    with pytest.warns(ResourceWarning) as left_open:
        await asyncio.create_task(domain.aclose())
    assert part.closed
    assert places(forgotten) == [(__file__, line + 2)]
    assert places(left_open) == [(__file__, line + 4)]
    for each in (*forgotten, *left_open):
        assert f"opened at {each.filename}:{each.lineno}" in str(each.message)


async def test_warnings_about_buffers_name_the_line_that_leased_them(device: Device) -> None:
    async with device.resource_domain() as domain:
        pool = await domain.buffer_pool(64, 2).open()

        def lease_and_drop() -> None:
            pool.lease_nowait()
            collect_garbage()

        line = sys._getframe().f_lineno
        with pytest.warns(ResourceWarning) as forgotten:
            lease_and_drop()
        buffer = await pool.lease()
        with pytest.warns(ResourceWarning) as unreleased:
            await asyncio.create_task(pool.aclose())
        del buffer
        assert places(forgotten) == [(__file__, line - 3)]
        assert places(unreleased) == [(__file__, line + 3)]


async def test_filters_for_warnings_apply_to_the_module_of_the_user(device: Device) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", category=ResourceWarning, module=f"{__name__}$")
        await open_and_drop(device.thread_domain())
    assert len(caught) == 1


async def test_resources_that_a_task_of_the_library_makes_are_never_created_by_asyncio(device: Device) -> None:
    async def keep(connection: Connection) -> None:
        await connection.receive()

    async with (
        device.resource_domain() as domain,
        serve(keep, "127.0.0.1", domain=domain) as server,
        connect("127.0.0.1", server.port, domain=domain) as near,
    ):
        await until(lambda: str(device.resources()).count("Connection") == 3)  # one is the server's spare end
        text = str(device.resources())
        assert not re.search(r"opened at (\?|\S*asyncio)", text)
        await near.send(b"")


def test_creation_sites_are_the_same_on_loops_whose_frames_the_stack_does_not_show() -> None:
    """With uvloop, the caller of a task of the library seems to be the line of the user that runs the loop."""

    async def keep(connection: Connection) -> None:
        await connection.receive()

    async def find() -> list[tuple[str, str]]:
        async with (
            open_device("soft0") as device,
            device.resource_domain() as domain,
            serve(keep, "127.0.0.1", domain=domain) as server,
            connect("127.0.0.1", server.port, domain=domain) as near,
        ):
            await until(lambda: str(device.resources()).count("Connection") == 3)  # one is the server's spare end
            found = re.findall(r" (\w+).*opened at (.*)", str(device.resources()))
            await near.send(b"")
            return sorted(found)

    def find_on(loop: asyncio.AbstractEventLoop) -> list[tuple[str, str]]:
        with contextlib.closing(loop):
            return loop.run_until_complete(find())

    assert find_on(uvloop.new_event_loop()) == find_on(asyncio.new_event_loop())


@pytest.mark.parametrize("name", ["user", "contextlib2", "threading_tools", "anyioutils", None, 5])
def test_the_creation_site_is_in_a_module_of_any_name(name: object) -> None:
    scope = {"__name__": name, "open_device": open_device}
    exec(compile("device = open_device('soft0')", "/user.py", "exec"), scope)
    device = scope["device"]
    assert isinstance(device, Device)
    assert device.resources().created == "/user.py:1"


async def test_a_warning_that_is_repeated_at_a_line_is_shown_once_by_default(device: Device) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            await open_and_drop(device.thread_domain())
    assert len(caught) == 1


async def test_a_collected_resource_without_an_owner_is_closed_with_its_device() -> None:
    device = await open_device("soft0").open()
    with pytest.warns(ResourceWarning, match="ProtectionDomain"):
        await open_and_drop(device.protection_domain())
    assert open_objects(device) == {"pds": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await device.aclose()  # no second warning


@pytest.mark.parametrize("kind", ["native", "anyio"])
async def test_a_cancelled_close_still_closes(device: Device, kind: str) -> None:
    resource = await device.resource_domain().open()
    if kind == "anyio":
        with anyio.CancelScope() as scope:
            scope.cancel()
            await resource.aclose()
    else:
        task = asyncio.create_task(resource.aclose())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    assert resource.closed
    assert not open_objects(device)


@needs(Capability.FAULT_PLAN)
@every_kind
async def test_failure_of_any_verb_leaks_nothing(device: Device, make: Callable[[Device], Resource]) -> None:
    faults = device.faults
    faults.count_calls()
    async with make(device):
        pass
    calls = faults.calls()
    faults.count_calls(False)
    assert calls >= 2
    for k in range(1, calls + 1):
        faults.fail(None, errno.EIO, first=k)
        resource = make(device)
        with pytest.raises(VerbsError, match="EIO"):
            async with resource:
                pass
        faults.clear()
        # Closing again destroys the remaining objects.
        await resource.aclose()
        assert not open_objects(device)


@needs(Capability.FAULT_PLAN, Capability.OBJECT_COUNTS)
async def test_a_failed_open_can_be_retried(device: Device) -> None:
    pd = device.protection_domain()
    device.faults.fail("alloc_pd", errno.ENOMEM)
    with pytest.raises(VerbsError, match="ENOMEM"):
        await pd.open()
    assert pd.state is ResourceState.NEW
    async with pd:
        assert open_objects(device) == {"pds": 1}


@needs(Capability.FAULT_PLAN)
async def test_a_half_opened_resource_can_only_be_closed(device: Device) -> None:
    faults = device.faults
    domain = device.resource_domain()
    # The parent domain is made last; when it fails, destroying the thread domain fails as well.
    faults.fail("alloc_parent_domain", errno.ENOMEM)
    faults.fail("dealloc_td", errno.EIO, times=2)
    with pytest.raises(VerbsError, match="ENOMEM") as caught:
        await domain.open()
    assert any("destroying the handles made so far failed" in note and "EIO" in note for note in caught.value.__notes__)
    assert (domain.state, domain.closed, repr(domain)) == (ResourceState.FAILED, False, "<ResourceDomain (failed)>")
    assert domain.td is not None
    assert (domain.native, domain.td.state, domain.base.state) == (False, ResourceState.FAILED, ResourceState.FAILED)
    (shown,) = device.resources().children
    assert (shown.kind, shown.state) == ("ResourceDomain", ResourceState.FAILED)
    uses: list[Callable[[], object]] = [
        lambda: domain.handle,
        lambda: domain.parent,
        lambda: domain.completion_queue(64),
        lambda: domain.register(64),
    ]
    for use in uses:
        with pytest.raises(ClosedResourceError, match="is not open: its opening failed, and it can only be closed"):
            use()
    with pytest.raises(ClosedResourceError, match=r"\(failed\).* is not open: nothing can be made from it"):
        await domain.base.parent_domain().open()
    with pytest.raises(ClosedResourceError, match="cannot be opened again"):
        await domain.open()
    with pytest.raises(VerbsError, match="EIO"):
        await domain.aclose()
    assert domain.state is ResourceState.FAILED
    await domain.aclose()
    assert domain.closed
    assert not open_objects(device)


@needs(Capability.FAULT_PLAN)
async def test_a_collected_half_opened_resource_is_closed(device: Device) -> None:
    faults = device.faults

    async def fail() -> None:
        faults.fail("alloc_parent_domain", errno.ENOMEM)
        faults.fail("dealloc_td", errno.EIO)
        with pytest.raises(VerbsError, match="ENOMEM"):
            await device.resource_domain().open()
        collect_garbage()

    with pytest.warns(ResourceWarning, match=r"ResourceDomain \(failed\).* it was forgotten"):
        await fail()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not open_objects(device)


async def test_resource_tree(device: Device) -> None:
    async with device.protection_domain() as pd, device.thread_domain() as td, pd.parent_domain(td):
        tree = device.resources()
        assert (tree.kind, tree.label, tree.state, tree.owner) == ("Device", device.name, ResourceState.OPEN, None)
        assert [child.kind for child in tree.children] == ["ProtectionDomain", "ThreadDomain"]
        assert [child.kind for child in tree.children[0].children] == ["ParentDomain"]
        assert tree.children[1].owner is not None
        assert "MainThread" in tree.children[1].owner
        text = str(tree)
        assert Path(__file__).name in text
        assert text.count("\n") == 3
    assert device.resources().children == ()


def test_resource_tree_is_printed_without_interpreting_markup() -> None:
    """Labels can contain text from a peer, which must not be interpreted as markup."""
    shown = io.StringIO()
    Console(file=shown, width=200).print(
        ResourceInfo("Connection", "with [/x]", None, ResourceState.OPEN, "here:1", ())
    )
    assert "Connection with [/x], open, opened at here:1" in shown.getvalue()


async def test_resource_tree_shows_creation_sites(device: Device) -> None:
    line = sys._getframe().f_lineno
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64),
    ):
        (tree,) = device.resources().children
        parts = {child.kind: child.created for child in tree.children}
        assert tree.created == parts["ProtectionDomain"] == f"{__file__}:{line + 2}"
        assert parts["CompletionQueue"] == f"{__file__}:{line + 3}"


@every_kind
async def test_closed_resources_need_no_garbage_collection(device: Device, make: Callable[[Device], Resource]) -> None:
    resource = make(device)
    async with resource:
        pass
    reference = weakref.ref(resource)
    gc.disable()
    try:
        del resource
        assert reference() is None
    finally:
        gc.enable()


async def test_rich_prints_the_tree(device: Device) -> None:
    console = Console(record=True, width=300, file=io.StringIO())
    async with device.protection_domain() as pd, pd.parent_domain():
        console.print(device.resources())
    lines = console.export_text().splitlines()
    assert [line.lstrip("│ └─").split(",")[0] for line in lines] == [
        f"Device {device.name}",
        "ProtectionDomain",
        "ParentDomain",
    ]
