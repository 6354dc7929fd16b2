"""Arrays cross the boundary without a copy, or are refused: never silently read as something else."""

import numpy as np
import numpy.typing as npt
import pytest

import pydflash
from pydflash._ffi import as_c_array, as_ids, ffi


def address(array: npt.NDArray[np.generic]) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize(
    ("ctype", "dtype"), [("int32_t[]", "i4"), ("int64_t[]", "i8"), ("float[]", "f4"), ("uint8_t[]", "u1")]
)
def test_memory_is_shared(ctype: str, dtype: str) -> None:
    array = np.arange(6, dtype=dtype).reshape(2, 3)
    c_array = as_c_array(array, ctype, writable=True)
    assert int(ffi.cast("intptr_t", c_array)) == address(array)
    assert len(c_array) == 6
    assert [c_array[i] for i in range(6)] == array.ravel().tolist()
    c_array[4] = 77
    assert array[1, 1] == 77


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(4, np.float64),
        np.zeros(4, np.float16),
        np.zeros(4, np.int32),
        np.zeros(4, ">f4"),
        np.zeros(4, np.complex64),
        np.zeros(4, object),
        np.zeros(4, "f4,f4"),
    ],
    ids=lambda array: str(array.dtype),
)
def test_other_element_types_are_refused(array: npt.NDArray[np.generic]) -> None:
    with pytest.raises(pydflash.InvalidArgumentError, match=r"rows\.dtype is .*, expected float32"):
        as_c_array(array, "float[]", name="rows")


@pytest.mark.parametrize("value", [[1.0, 2.0], b"1234", None, memoryview(b"1234"), 5.0])
def test_what_is_no_array_is_refused(value: object) -> None:
    with pytest.raises(pydflash.InvalidArgumentError, match="a NumPy array of float32"):
        as_c_array(value, "float[]")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 6), np.float32)[:, ::2],
        np.zeros((4, 3), np.float32).T,
        np.zeros((4, 3), np.float32)[::-1],
        np.broadcast_to(np.zeros(3, np.float32), (4, 3)),
    ],
    ids=["stride", "transposed", "reversed", "broadcast"],
)
def test_gaps_are_refused(array: npt.NDArray[np.float32]) -> None:
    with pytest.raises(pydflash.InvalidArgumentError, match="contiguous"):
        as_c_array(array, "float[]")


def test_read_only_memory_may_be_read_but_not_written() -> None:
    array = np.ones(3, np.float32)
    array.flags.writeable = False
    assert as_c_array(array, "float[]")[2] == 1.0
    with pytest.raises(pydflash.InvalidArgumentError, match=r"flags\.writeable is False"):
        as_c_array(array, "float[]", writable=True)


@pytest.mark.parametrize("shape", [(3,), (3, 4, 1), (4, 3), (0, 5), ()])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(pydflash.InvalidArgumentError, match=r"expected \[n, 4\]"):
        as_c_array(np.zeros(shape, np.float32), "float[]", shape=(None, 4))


def test_empty_arrays_have_a_place() -> None:
    assert len(as_c_array(np.empty((0, 4), np.float32), "float[]", shape=(None, 4), writable=True)) == 0


def test_an_array_lives_as_long_as_its_c_array() -> None:
    c_array = as_c_array(np.full(1000, 3, np.int32), "int32_t[]")
    assert [c_array[i] for i in (0, 999)] == [3, 3]


def test_ids() -> None:
    ready = np.array([1, 2, 3], np.int32)
    assert as_ids(ready) is ready
    for ids in ([1, 2, 3], (1, 2, 3), range(1, 4), np.array([1, 2, 3], np.uint8), np.array([1, 2, 3], np.int64)):
        values = as_ids(ids)  # type: ignore[arg-type]
        assert values.dtype == np.int32
        assert values.tolist() == [1, 2, 3]
    assert as_ids(np.arange(10, dtype=np.int32)[::3]).tolist() == [0, 3, 6, 9]
    assert as_ids([]).shape == (0,)
    assert as_ids(np.empty(0)).shape == (0,)


@pytest.mark.parametrize(
    "ids",
    [
        [1.0, 2.0],
        np.array([1.0]),
        [True, False],
        ["1"],
        "12",
        b"12",
        5,
        None,
        [[1, 2]],
        np.zeros((2, 2), np.int32),
        [2**31],
        [-(2**31) - 1],
        [2**80],
        np.array([2**40]),
        [[1], [1, 2]],
    ],
    ids=repr,
)
def test_what_are_no_ids(ids: object) -> None:
    with pytest.raises(pydflash.InvalidArgumentError, match=r"ids(\.shape)? is"):
        as_ids(ids)  # type: ignore[arg-type]


def test_hidden_states_go_in_without_conversion(target: pydflash.TargetModel, cache: pydflash.TargetCache) -> None:
    ids = [5, 6, 7]
    expected = cache.forward(ids, "all").logits
    cache.reset()
    rows = target.embed(ids)
    got = cache.forward(None, "all", hidden_in=rows).logits
    assert np.array_equal(got, expected)
    for wrong in (rows.astype(np.float64), rows[:, ::2], rows[0], rows.T.copy(), rows.tolist()):
        with pytest.raises(pydflash.InvalidArgumentError, match="hidden_in"):
            cache.forward(None, hidden_in=wrong)
    rows.flags.writeable = False
    cache.reset()
    assert np.array_equal(cache.forward(None, "all", hidden_in=rows).logits, expected)


def test_features_go_out_and_into_a_drafter(
    target: pydflash.TargetModel, drafter: pydflash.DraftModel, cache: pydflash.TargetCache
) -> None:
    cache.forward(list(range(20)))
    rows = cache.features(0, 20)
    with pydflash.DraftContext(drafter) as direct, pydflash.DraftContext(drafter) as by_host:
        direct.append(cache, 0, 20)
        by_host.append_host(rows, 0)
        left, right = direct.propose(7, logits=True), by_host.propose(7, logits=True)
        assert left.logits is not None
        assert right.logits is not None
        assert np.array_equal(left.logits, right.logits)
        assert np.array_equal(left.ids, right.ids)
        assert left.ids.dtype == np.int32
        for wrong in (rows.astype(np.float16), rows[:, :-1], rows[::2], rows[0]):
            with pytest.raises(pydflash.InvalidArgumentError, match="features"):
                by_host.append_host(wrong, 20)
        assert by_host.cursor == 20


def test_mirror_arrays(drafter: pydflash.DraftModel) -> None:
    with pydflash.DraftFeatureMirror(drafter, capacity=8) as mirror:
        rows = np.random.default_rng(0).normal(size=(5, 1280)).astype(np.float32)
        assert mirror.write_rows(3, rows) == 5
        assert mirror.valid_range == (3, 8)
        assert np.array_equal(mirror.rows(3, 8), rows)
        assert mirror.rows(4, 4).shape == (0, 1280)
        part = np.full((2, 256), 9, np.float32)
        assert mirror.write_slice(1, 6, part) == 2
        for wrong in (rows.astype(np.float64), rows[:, :-1], np.asfortranarray(rows), rows[0]):
            with pytest.raises(pydflash.InvalidArgumentError, match="values"):
                mirror.write_rows(3, wrong)
        with pytest.raises(pydflash.InvalidArgumentError, match="values"):
            mirror.write_slice(1, 6, rows)
