"""Each operation on each type of queue pair, between two devices, by each kind of transfer."""

import pytest

from aioverbs import Device, MessageModel, QpType, ThreadModel
from tests.capabilities import qp_types
from tests.data_path import test_operations as operations
from tests.data_path.ends import CONNECTED, TYPES

pytestmark = pytest.mark.every_way

MODELS = dict(zip(TYPES, MessageModel, strict=True))  # each type with another message model


@qp_types(*TYPES)
async def test_sends_arrive_in_receives(device: Device, qp_type: QpType) -> None:
    await operations.test_sends_arrive_in_receives(device, qp_type, ThreadModel.SINGLE, MODELS[qp_type])


@qp_types(*CONNECTED)
async def test_remote_memory_is_written_and_read(device: Device, qp_type: QpType) -> None:
    await operations.test_remote_memory_is_written_and_read(device, qp_type, ThreadModel.SINGLE, MODELS[qp_type])


@qp_types(QpType.RC, QpType.XRC_SEND)
async def test_atomics_return_the_previous_value(device: Device, qp_type: QpType) -> None:
    await operations.test_atomics_return_the_previous_value(device, qp_type, ThreadModel.SINGLE, MODELS[qp_type])


@qp_types(*CONNECTED)
async def test_windows_grant_access_until_they_are_invalidated(device: Device, qp_type: QpType) -> None:
    test = operations.test_windows_grant_access_until_they_are_invalidated
    await test(device, qp_type, ThreadModel.SINGLE, MODELS[qp_type])


@qp_types(*CONNECTED)
async def test_a_send_invalidates_a_window_of_the_peer(device: Device, qp_type: QpType) -> None:
    await operations.test_a_send_invalidates_a_window_of_the_peer(device, qp_type)
