"""Devices and what a build can do on them."""

import pytest

import pydflash


def test_the_cpu_is_a_device() -> None:
    assert "CPU" in {device.name for device in pydflash.devices()}


def test_own_kernels_take_few_rows_where_the_build_has_them() -> None:
    counts = pydflash.own_kernel_counts()
    assert pydflash.own_kernel_rows() == (32 if counts else 0)
    assert all(count >= 0 for count in counts.values())


def test_own_kernels_can_be_turned_off_and_on() -> None:
    before = pydflash.own_kernel_rows()
    assert pydflash.own_kernel_rows(0) == 0
    assert pydflash.own_kernel_rows() == 0
    if before:
        assert pydflash.own_kernel_rows(512) == 512
        assert pydflash.own_kernel_rows(before) == before
    else:
        with pytest.raises(pydflash.UnsupportedModelError, match="built without DFLASH_CUDA"):
            pydflash.own_kernel_rows(32)


@pytest.mark.parametrize("rows", [-1, 513, True])
def test_rows_out_of_range_are_named(rows: int) -> None:
    before = pydflash.own_kernel_rows()
    with pytest.raises(pydflash.InvalidArgumentError, match=f"rows is {rows}, expected 0 to 512"):
        pydflash.own_kernel_rows(rows)
    assert pydflash.own_kernel_rows() == before
