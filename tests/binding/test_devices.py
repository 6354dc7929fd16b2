"""Devices and what a build can do on them."""

import pytest

import pydflash


def test_the_cpu_is_a_device() -> None:
    assert "CPU" in {device.name for device in pydflash.devices()}


def test_own_kernels_are_on_where_the_build_has_them() -> None:
    counts = pydflash.own_kernel_counts()
    assert pydflash.own_kernels() == bool(counts)
    assert all(count >= 0 for count in counts.values())


def test_own_kernels_can_be_turned_off_and_on() -> None:
    before = pydflash.own_kernels()
    assert not pydflash.own_kernels(False)
    assert not pydflash.own_kernels()
    if before:
        assert pydflash.own_kernels(True)
    else:
        with pytest.raises(pydflash.UnsupportedModelError, match="built without DFLASH_CUDA"):
            pydflash.own_kernels(True)
