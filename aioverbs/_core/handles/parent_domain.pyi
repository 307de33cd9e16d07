from typing_extensions import disjoint_base

from aioverbs._core.alloc.allocators import USE_DEFAULT as USE_DEFAULT, _Allocator as _Allocator
from aioverbs._core.handles.handles import Affinity, Context, Handle, ProtectionDomain, XrcDomain as XrcDomain

@disjoint_base
class ThreadDomain(Handle):
    def __init__(self, context: Context, *, affinity: Affinity | None = None) -> None: ...

@disjoint_base
class ParentDomain(ProtectionDomain):
    def __init__(
        self,
        pd: ProtectionDomain,
        td: ThreadDomain | None = None,
        allocator: _Allocator | None = None,
        pd_context: object = None,
        *,
        affinity: Affinity | None = None,
    ) -> None: ...
    @property
    def base(self) -> ProtectionDomain: ...
    @property
    def td(self) -> ThreadDomain | None: ...
    @property
    def allocator(self) -> _Allocator | None: ...
    @property
    def pd_context(self) -> object: ...
    @property
    def held(self) -> int: ...
