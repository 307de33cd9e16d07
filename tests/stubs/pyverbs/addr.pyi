# What aioverbs uses of pyverbs.addr.

from pyverbs.base import PyverbsObject

class GID(PyverbsObject):
    @property
    def gid(self) -> str: ...
