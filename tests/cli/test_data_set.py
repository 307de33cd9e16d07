"""The files of `aioverbs demo`: of which sizes, where they lie, and that no wrong byte is taken for a right one."""

import hashlib

import pytest
from hypothesis import given, settings, strategies as st

from aioverbs.cli.demonstration.data_set import (
    BLOCK,
    LARGEST,
    SMALLEST,
    DataFile,
    batches,
    contents,
    data_files,
    end_of,
    fault_of,
)

totals = st.integers(16 * BLOCK, 256 << 20)
seeds = st.text(max_size=5)


@given(totals, seeds)
def test_files_have_all_bytes_together(total: int, seed: str) -> None:
    files = data_files(total, seed)
    assert sum(file.size for file in files) == total
    assert min(file.size for file in files) <= SMALLEST
    assert max(file.size for file in files) <= LARGEST
    assert any(file.size >= BLOCK for file in files)
    assert len({file.name for file in files}) == len(files)
    assert files == data_files(total, seed)


@given(totals, seeds)
def test_no_two_files_lie_in_one_block(total: int, seed: str) -> None:
    end = 0
    files = data_files(total, seed)
    for file in files:
        assert file.offset == end
        assert file.offset % BLOCK == 0
        end = file.offset + file.room
        assert file.size <= file.room < file.size + BLOCK
    assert end_of(files) == end


@given(totals, st.integers(LARGEST, 2 * LARGEST))
def test_batches_have_each_file_once_and_fit(total: int, room: int) -> None:
    files = data_files(total, "")
    found = list(batches(files, room))
    assert [file for batch in found for file, _ in batch] == files
    for batch in found:
        assert [place for _, place in batch] == [file.offset - batch[0][0].offset for file, _ in batch]
        assert 0 < sum(file.room for file, _ in batch) <= room


def test_sizes_are_mixed() -> None:
    sizes = [file.size for file in data_files(100 << 20, "1")]
    assert max(sizes) == 25 << 20
    for least, most in ((1, 1 << 10), (1 << 10, 1 << 20), (1 << 20, LARGEST)):
        assert sum(least <= size < most for size in sizes) >= 3


def test_too_little_for_files_of_mixed_sizes() -> None:
    with pytest.raises(ValueError, match=r"65,536 bytes together, or more, not 65,535"):
        data_files((64 << 10) - 1, "")


def test_contents_are_the_same_again_and_other_ones_in_each_file() -> None:
    first, second = (DataFile("file", seed, 0, 3_000_000) for seed in ("1/1", "1/2"))
    made = b"".join(contents(first))
    assert len(made) == first.size
    assert b"".join(contents(first)) == made
    assert b"".join(contents(second)) != made


FILE = DataFile("file-0007", "7", 0, (1 << 20) + 5)
MADE = b"".join(contents(FILE))
DIGEST = hashlib.sha256(MADE).digest()


def test_what_is_as_it_was() -> None:
    assert fault_of(FILE, DIGEST, MADE, memoryview(bytearray(MADE))) is None


@settings(max_examples=20)  # a MiB each
@given(st.integers(0, FILE.size - 1), st.integers(1, 255))
def test_one_wrong_byte(at: int, difference: int) -> None:
    found = bytearray(MADE)
    found[at] ^= difference
    fault = fault_of(FILE, DIGEST, MADE, memoryview(found))
    assert fault is not None
    assert f"file-0007, of 1,048,581 bytes, is not what was written from byte {at:,} on (1 bytes" in fault


def test_a_file_that_was_changed_on_the_disk_as_well() -> None:
    changed = b"x" + MADE[1:]
    fault = fault_of(FILE, DIGEST, changed, changed)
    assert fault is not None
    assert fault.endswith("has another SHA-256 than what was made")


def test_one_that_is_too_short() -> None:
    assert fault_of(FILE, DIGEST, MADE, MADE[:-1]) == "file-0007 has 1,048,580 bytes, and not 1,048,581"
