"""Public members to call, their arguments, and the members that any caller may use, found by introspection."""

import ast
import dataclasses
import enum
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioverbs import AccessFlags
from tests.conftest import ROOT

if TYPE_CHECKING:
    from tests.manager.affinity_objects import OwnedObjects

sys.path.append(str(ROOT / "aioverbs" / "_docs"))

import stubs
import surface

__all__ = [
    "ANY_CALLER",
    "ANY_CALLER_CLASSES",
    "ANY_CALLER_ON_SHARED_DOMAINS",
    "ANY_CALLER_SIDE_EFFECTS",
    "arguments",
    "is_value",
    "members",
    "returned_kinds",
]

_HANDLE = "handle"  # compiled object below a resource; its verbs check their caller themselves
_MODULES = re.compile(r"(?:\b[a-z_]\w*\.)+")  # module prefixes of names
_WORD = re.compile(r"\w+")
_PROTOCOLS = (
    "__aenter__", "__aexit__", "__aiter__", "__anext__", "__await__", "__bool__", "__enter__", "__exit__",
    "__getitem__", "__iter__", "__len__", "__next__", "__repr__",
)  # fmt: skip

# Classes whose members any caller may use, and why.
ANY_CALLER_CLASSES = {
    "AddressHandle": "any event loop may use it: `Domain.address_handle`",
    "Affinity": "reports the owner and refuses others",
    "Backoff": "a value",
    "BufferPool": "any event loop may use it",
    "Device": "SAFE",
    "FaultPlan": "any thread may change the plan",
    "ImportedMemoryRegion": "any event loop may use it",
    "LeasedBuffer": "goes back to its pool from any thread",
    "LeastLoaded": "a policy, called under its pool's lock",
    "MemoryRegion": "any event loop may use it",
    "MemoryWindow": "any event loop may use it",
    "Monitor": "any event loop may begin and end it",
    "ProtectionDomain": "SAFE",
    "Received": "a value",
    "RegionSlice": "a value",
    "RegistrationCache": "any event loop may use it",
    "RemoteRegion": "a value",
    "RoundRobin": "a policy, called under its pool's lock",
    "SharedProtectionDomain": "any event loop may use it",
    "CallFuture": "waited for on any loop or in any thread",
    "UseDefault": "a value",
    "Destination": "a value",
    "Worker": "attributes that check their caller",
    "XrcDomain": "any event loop may use it",
}

# Members that any caller may use, of all classes or of one, and why. They are called and must not change any state.
_MAKES = "makes an unopened resource, whose opening is checked"
_CACHED = "returns a cached value"
ANY_CALLER = {
    "__len__": _CACHED,
    "__repr__": _CACHED,
    "access": _CACHED,
    "adopt_memory_region": _MAKES,
    "address_handle": _MAKES,
    "addresses": _CACHED,
    "allocator": _CACHED,
    "as_byte_stream": "makes an object that checks its caller",
    "base": _CACHED,
    "batch": "makes an object that checks its caller",
    "broken": _CACHED,
    "buffer_pool": _MAKES,
    "cache": "any event loop may use it",
    "capabilities": _CACHED,
    "closed": _CACHED,
    "completion_queue": _MAKES,
    "context": _CACHED,
    "depth": _CACHED,
    "ended": _CACHED,
    "events": "any event loop may listen",
    "extra": _CACHED,
    "extra_attributes": _CACHED,
    "gid_index": _CACHED,
    "import_memory_region": _MAKES,
    "label": _CACHED,
    "local_address": _CACHED,
    "local_endpoint": _CACHED,
    "memory_window": _MAKES,
    "message_model": _CACHED,
    "moderated": _CACHED,
    "native": _CACHED,
    "native_allocators": _CACHED,
    "owner": _CACHED,
    "parent": _CACHED,
    "parent_domain": _MAKES,
    "path_to": _CACHED,
    "pd": _CACHED,
    "peer": _CACHED,
    "port": _CACHED,
    "qp": "returns an object that checks its caller",
    "qp_num": _CACHED,
    "qp_state": _CACHED,
    "qp_type": _CACHED,
    "queue_pair": _MAKES,
    "register": "any caller may use a region, wherever it is registered",
    "remote": _CACHED,
    "remote_address": _CACHED,
    "remote_endpoint": _CACHED,
    "revoked": _CACHED,
    "settings": _CACHED,
    "share": _MAKES,
    "shared_memory": "an allocator, for any caller",
    "shared_receive_queue": _MAKES,
    "state": _CACHED,
    "statistics": _CACHED,
    "td": _CACHED,
    "thread_model": _CACHED,
    "traffic": _CACHED,
    # Of one class.
    "Channel.identifier": _MAKES,
    "Channel.listener": _MAKES,
    "RemoteGrant.__getitem__": "makes a value",
    "Identifier.connected": _CACHED,
    "Identifier.device_name": _CACHED,
    "Identifier.peer_address": _CACHED,
    "Identifier.port_num": _CACHED,
    "Identifier.private_data": _CACHED,
    "Inbox.__aiter__": "returns self",
    "Listener.__aiter__": "returns self",
    "Listener.address": _CACHED,
    "Message.byte_len": _CACHED,
    "Message.written": _CACHED,
    "Message.data": "returns its bytes",
    "Message.immediate": _CACHED,
    "Message.invalidated_rkey": _CACHED,
    "Message.local": "returns its memory",
    "Message.route": _CACHED,
    "Message.src_qp": _CACHED,
    "MessageByteStream.__aiter__": "returns self",
    "QueuePair.messages": "returns an object that checks its caller",
    "Batch.__aenter__": "does nothing; leaving the block is checked",
    "Batch.__aexit__": "does nothing but posting, which is checked",
    "Connection.__aenter__": "does nothing; leaving the block is checked",
    "Connection.__aiter__": "returns self",
    "Connection.open": "does nothing",
    "ConnectionListener.__aiter__": "returns self",
    "Grant.__aenter__": "does nothing; leaving the block is checked",
    "Message.__enter__": "does nothing; leaving the block is checked",
    "MessageByteStream.__aenter__": "does nothing; leaving the block is checked",
    "Operation.__iter__": "returns self",
    "Operation.result": "returns the result",
    "OwnedIterator.__aiter__": "returns self",
    "SharedReceiveQueue.messages": "returns an object that checks its caller",
    "WorkerPool.grace_s": _CACHED,
    "WorkerPool.processes": _CACHED,
    "WorkerPool.size": _CACHED,
}

# Members that any caller may use and that have side effects: the table does not call them.
ANY_CALLER_SIDE_EFFECTS = {
    "Connection.abort": "is carried to the owner's loop",
    "ConnectionListener.close": "is carried to the owner's loop",
    "Server.close": "is carried to the owner's loop",
    "ResourceDomain.run": "calls on the owner's loop, and waits",
    "WorkerPool.drain": "any event loop may wait for its calls",
    "WorkerPool.map": "any event loop may call there",
    "WorkerPool.run": "any event loop may call there",
    "WorkerPool.start_soon": "any thread may call there",
}

# The same, if other loops may use the domain.
ANY_CALLER_ON_SHARED_DOMAINS = {
    "Connecting.__await__": "any event loop may connect on a domain that may be used by any caller",
}

# Arguments by parameter name, for types such as int; otherwise by the first known type in the annotation.
_BY_NAME: dict[str, Callable[["OwnedObjects"], object]] = {
    "add": lambda owned: 1,
    "attribute": lambda owned: None,
    "compare": lambda owned: 0,
    "count": lambda owned: 1,
    "depth": lambda owned: 512,
    "exc_tb": lambda owned: None,
    "exc_type": lambda owned: owned.block_error and type(owned.block_error),
    "exc_val": lambda owned: owned.block_error,
    "error": lambda owned: owned.block_error,
    "host": lambda owned: "127.0.0.1",
    "immediate": lambda owned: 1,
    "kind": lambda owned: owned.block_error and type(owned.block_error),
    "max_wr": lambda owned: 4,
    "memory": lambda owned: 64,
    "mr": lambda owned: None,
    "port": lambda owned: 7174,
    "rkey": lambda owned: owned.region.rkey,
    "share_key": lambda owned: 7,
    "size": lambda owned: 64,
    "swap": lambda owned: 1,
    "traceback": lambda owned: None,
    "value": lambda owned: None,
    "Domain.import_memory_region.key": lambda owned: 1,
    "Operation.throw.kind": lambda owned: ValueError,
    "OwnedIterator.athrow.kind": lambda owned: ValueError,
}
_BY_TYPE: dict[str, Callable[["OwnedObjects"], object]] = {
    "AccessFlags": lambda owned: AccessFlags.REMOTE_WRITE,
    "Buffer": lambda owned: b"from elsewhere",
    "BufferPool": lambda owned: owned.pool,
    "CompletionQueue": lambda owned: owned.cq,
    "Endpoint": lambda owned: owned.endpoint,
    "MemoryWindow": lambda owned: owned.window,
    "QueuePair": lambda owned: owned.qp,
    "RegionSlice": lambda owned: owned.region[:8],
    "RemoteRegion": lambda owned: owned.region.remote()[8:16],
    "bytes": lambda owned: b"from elsewhere",
    "slice": lambda owned: slice(0, 8),
}


def members(subject: object) -> Iterator[str]:
    """Yield the public members of an object: attributes, methods, and special methods."""
    kind = type(subject)
    ours = surface.is_ours(kind)
    for name in dir(subject):
        if name.startswith("_") and name not in _PROTOCOLS:
            continue
        if not ours and name not in ("__aenter__", "__anext__", "aclose"):
            continue
        static = inspect.getattr_static(kind, name, None)
        if isinstance(static, staticmethod | classmethod) or name == _HANDLE:
            continue
        yield name


def arguments(kind: type, name: str, owned: "OwnedObjects") -> list[object]:
    """Return arguments for a method: a suitable value for each parameter without a default."""
    static = inspect.getattr_static(kind, name)
    return [
        _argument(kind, name, parameter, annotation, owned)
        for parameter, annotation in _annotations(kind, name, static)
        if parameter != "return"
    ]


def _argument(kind: type, name: str, parameter: str, annotation: str, owned: "OwnedObjects") -> object:
    owners = (f"{base.__name__}.{name}.{parameter}" for base in kind.__mro__)
    for key in (*owners, parameter):
        if key in _BY_NAME:
            return _BY_NAME[key](owned)
    for word in _WORD.findall(annotation):
        if word in _BY_TYPE:
            return _BY_TYPE[word](owned)
    raise AssertionError(
        f"nothing to call {kind.__name__}.{name} with: say in tests/manager/affinity_members.py what its argument "
        f"`{parameter}: {annotation}` may be, in _BY_NAME or _BY_TYPE"
    )


@functools.cache
def _annotations(kind: type, name: str, static: object) -> tuple[tuple[str, str], ...]:
    """Return name and annotation of each parameter without a default, and of "return", as text."""
    for base in kind.__mro__:
        if name not in vars(base):
            continue
        if surface.is_compiled(base):  # compiled methods have no annotations
            return _in_stub(base, name)
        break
    function = static.fget if isinstance(static, property) else static
    if not inspect.isroutine(function):
        return ()
    try:
        signature = inspect.signature(function)
    except ValueError:  # slot methods of object
        return ()
    found = [
        (each.name, _text(each.annotation))
        for each in signature.parameters.values()
        if each.default is each.empty
        and each.name != "self"
        and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    return (*found, ("return", _text(signature.return_annotation)))


def _text(annotation: object) -> str:
    return _MODULES.sub("", inspect.formatannotation(annotation).replace("'", ""))


def _in_stub(kind: type, name: str) -> tuple[tuple[str, str], ...]:
    stub = _stub(surface.defined_in(kind))
    known = f"{kind.__name__}.{name}"
    if known in stub.properties:
        return (("return", stub.properties[known]),)
    if known not in stub.signatures:
        return ()
    signature = stub.signatures[known]
    (function,) = ast.parse(f"def function{signature.arguments}: ...").body
    assert isinstance(function, ast.FunctionDef)
    plain = [*function.args.posonlyargs, *function.args.args]
    required = plain[: len(plain) - len(function.args.defaults)]
    found = [(each.arg, ast.unparse(each.annotation) if each.annotation else "") for each in required]
    return (*found, ("return", signature.returns or ""))


@functools.cache
def _stub(module: str) -> Any:
    path = Path(str(importlib.import_module(module).__file__))
    return stubs.read(path.with_name(f"{module.rpartition('.')[2]}.pyi"))


@functools.cache
def _classes() -> dict[str, type]:
    """Return every class of the package, by name."""
    modules = [module for name, module in sys.modules.items() if name.startswith("aioverbs.")]
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, type) and surface.is_ours(value)
    }


def is_value(kind: type) -> bool:
    """Return whether any caller may use a class: immutable, an exception, a protocol, or without loop and verbs."""
    return (
        issubclass(kind, BaseException | enum.Enum | tuple)
        or kind.__name__.endswith("Allocator")  # called by providers from any thread
        or getattr(kind, "_is_protocol", False)
        or (dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen)  # type: ignore[attr-defined]
        or "PURE" in (sys.modules[surface.defined_in(kind)].__doc__ or "")
    )


def returned_kinds(kind: type) -> Iterator[tuple[str, type]]:
    """Yield member name and class for each class of the package that members return."""
    for name in dir(kind):
        static = inspect.getattr_static(kind, name)
        if name.startswith("_") or isinstance(static, staticmethod | classmethod) or name == _HANDLE:
            continue
        for what, annotation in _annotations(kind, name, static):
            for word in _WORD.findall(annotation) if what == "return" else ():
                if word in _classes():
                    yield name, _classes()[word]
