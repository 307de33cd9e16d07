"""Requests that are wrong in ways that only hurt later."""

import pytest

from aioverbs import AccessFlags, QpCapabilities, RegionSlice
from aioverbs._verbs.device import Device

ALL = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE


class Short(list[RegionSlice]):
    """Says that it has one piece."""

    def __len__(self) -> int:
        return 1


async def test_what_does_not_fit_is_refused(device: Device) -> None:
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.register(4096, ALL) as memory,
        domain.queue_pair(cq, capabilities=QpCapabilities(max_send_sge=2)) as near,
        domain.queue_pair(cq) as far,
    ):
        near.connect(far.local_endpoint(), ALL)
        far.connect(near.local_endpoint(), ALL)
        pieces = [memory[each : each + 1] for each in range(3)]
        for local in (pieces, Short(pieces)):
            with pytest.raises(ValueError, match="more than the 2"):
                _ = near.write(local, memory.remote()[64:67])
        with pytest.raises(TypeError):
            _ = near.write_with_immediate(memory[:8], memory.remote()[64:72], None)  # type: ignore[arg-type]
        assert len(memory.pins) == 0
