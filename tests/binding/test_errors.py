"""Statuses become exceptions with their numbers, and a call that is refused changes nothing."""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pydflash
from pydflash import _ffi, errors
from pydflash._ffi import ffi, lib


def test_every_status_has_a_class() -> None:
    statuses = ffi.typeof("dflash_status").elements
    assert set(errors.STATUS_TO_ERROR) == set(statuses) - {0}
    for status, c_name in statuses.items():
        err = _ffi.new_error()
        err.message = b"what happened"
        if status == 0:
            _ffi.check(status, err, "op")
            continue
        with pytest.raises(errors.STATUS_TO_ERROR[status]) as caught:
            _ffi.check(status, err, "op")
        assert type(caught.value) is errors.STATUS_TO_ERROR[status]
        assert (caught.value.status, caught.value.operation, caught.value.message) == (status, "op", "what happened")
        assert f"DFLASH_STATUS_{ffi.string(lib.dflash_status_name(status)).decode()}" == c_name
        assert isinstance(caught.value, pydflash.PydflashError)
    assert len(set(errors.STATUS_TO_ERROR.values())) == len(statuses) - 1


def test_errors_come_with_the_numbers(cache: pydflash.TargetCache) -> None:
    with pytest.raises(pydflash.CapacityError, match="600 tokens at position 0 do not fit a context of 512") as caught:
        cache.forward([1] * 600)
    assert caught.value.operation == "target_cache_forward"
    assert cache.position == 0
    with pytest.raises(pydflash.InvalidArgumentError, match="token id 4096 at index 1, want 0 to 4095"):
        cache.forward([1, 4096])
    with pytest.raises(pydflash.InvalidArgumentError, match="token id -1"):
        cache.forward([-1])
    assert cache.position == 0


def test_files() -> None:
    with pytest.raises(FileNotFoundError, match="no-such-file"):
        pydflash.TargetModel.open("no-such-file.gguf")
    with pytest.raises(pydflash.NotFoundError, match="no-such-file"):
        pydflash.GgufFile.open(Path("no-such-file.gguf"))
    with pytest.raises(pydflash.ModelError):
        pydflash.TargetModel.open(__file__)
    with pytest.raises(pydflash.NotFoundError, match="toaster"):
        pydflash.TargetModel.open(device="toaster")
    with pytest.raises(pydflash.InvalidArgumentError, match="NUL"):
        pydflash.GgufFile.open("a\0b")


BAD_OPTIONS: list[tuple[Callable[..., object], dict[str, object]]] = [
    (pydflash.TargetCache, {"capacity": 0}),
    (pydflash.TargetCache, {"capacity": 1 << 30}),
    (pydflash.TargetCache, {"capacity": 1.5}),
    (pydflash.TargetCache, {"k_type": "q3_K"}),
    (pydflash.TargetCache, {"v_type": ""}),
    (pydflash.TargetCache, {"max_verify": 0}),
    (pydflash.TargetCache, {"max_verify": 2000}),
    (pydflash.TargetCache, {"capture_layers": (3, 1)}),
    (pydflash.TargetCache, {"capture_layers": (-1,)}),
    (pydflash.TargetCache, {"capture_layers": (12,)}),
    (pydflash.TargetCache, {"feature_capacity": -1}),
    (pydflash.TargetCache, {"feature_type": "q8_0"}),
    (pydflash.TargetCache, {"layers": (3, 3)}),
    (pydflash.TargetCache, {"layers": (0, 13)}),
    (pydflash.TargetCache, {"layers": 3}),
    (pydflash.TargetCache, {"fa_window": -1}),
    (pydflash.TargetCache, {"prefill_only": 1}),
]


@pytest.mark.parametrize(("make", "options"), BAD_OPTIONS)
def test_options_outside_their_limits(
    make: Callable[..., object], options: dict[str, object], target: pydflash.TargetModel
) -> None:
    for function in (make, pydflash.TargetCache.plan):
        with pytest.raises(pydflash.InvalidArgumentError) as caught:
            function(target, **options)
        assert next(iter(options)).split("_")[0] in str(caught.value).replace("feature layer", "capture layer")


def test_unknown_keywords_fail(target: pydflash.TargetModel) -> None:
    for function, known in itertools.product(
        (pydflash.TargetCache, pydflash.TargetCache.plan, pydflash.SamplingOptions, pydflash.EngineOptions),
        (True, False),
    ):
        arguments = (target,) if known and function not in (pydflash.SamplingOptions, pydflash.EngineOptions) else ()
        with pytest.raises(TypeError):
            function(*arguments, capasity=5)  # type: ignore[operator]


def test_a_failed_call_leaves_the_cache_as_it_was(cache: pydflash.TargetCache) -> None:
    cache.forward([1, 2, 3])
    before = (cache.state, cache.last_logits, cache.read(0, "recurrent"), cache.read(3, "k"), cache.features(0, 3))
    verify = cache.verify([4, 5])
    for attempt in (
        lambda: cache.forward([5000]),
        lambda: cache.forward([]),
        lambda: cache.forward([1, 2], [1, 0]),
        lambda: cache.forward([1, 2], [2]),
        lambda: cache.forward([1, 2], hidden_layers=(12,)),
        lambda: cache.forward([1, 2], hidden_layers=(3, 2)),
        lambda: cache.forward([1, 2], layers=(4, 20)),
        lambda: cache.forward(None),
        lambda: cache.forward([1], hidden_in=np.zeros((1, 256), np.float32)),
        lambda: cache.verify([1] * 17),
        lambda: cache.verify([]),
        lambda: verify.commit(3),
        lambda: cache.commit(-1),
        cache.restore_state,
        lambda: cache.features(0, 4),
        lambda: cache.features(2, 1),
        lambda: cache.read(0, "k"),
        lambda: cache.read(3, "recurrent"),
        lambda: cache.read(3, "k", 0, 4),
        lambda: cache.read(3, "w"),  # type: ignore[arg-type]
        lambda: cache.read(-1, "k"),
        lambda: cache.read(12, "k"),
        lambda: cache.migrate(0),
        lambda: cache.reset(kv=2),  # type: ignore[arg-type]
        lambda: verify.state(0, 0),
        lambda: verify.conv_input(3),
        lambda: cache.moe_selected(99),
    ):
        with pytest.raises(pydflash.InvalidArgumentError):
            attempt()
    after = (cache.state, cache.last_logits, cache.read(0, "recurrent"), cache.read(3, "k"), cache.features(0, 3))
    assert after[0].position == before[0].position
    assert all(np.array_equal(left, right) for left, right in zip(before[1:], after[1:], strict=True))  # type: ignore[arg-type]
