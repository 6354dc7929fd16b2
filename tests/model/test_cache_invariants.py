"""Invariants A, B, E (recurrent snapshot) and H of the target cache."""

from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
from support.goldens import target_golden

import pydflash

Target = Callable[[str], pydflash.TargetModel]
NAMES = ["nano", "dense", "equalkv", "moe"]
KINDS: dict[str, tuple[Literal["k", "v", "recurrent", "conv"], ...]] = {
    "recurrent": ("recurrent", "conv"),
    "attention": ("k", "v"),
}


def open_cache(model: pydflash.TargetModel, **options: object) -> pydflash.TargetCache:
    return pydflash.TargetCache(model, capacity=256, k_type="f32", v_type="f32", **options)  # type: ignore[arg-type]


def state_of(cache: pydflash.TargetCache) -> dict[str, np.ndarray]:
    """Everything a cache holds for the committed tokens."""
    config = cache.model.config
    out = {"features": cache.features(*cache.feature_range)}
    for layer in range(config.n_layer):
        kinds = KINDS[config.layer_kinds[layer]]
        for what in kinds:
            out[f"{what}{layer}"] = cache.read(layer, what)
    return out


def assert_same_state(a: pydflash.TargetCache, b: pydflash.TargetCache, atol: float) -> None:
    assert a.position == b.position
    left, right = state_of(a), state_of(b)
    assert left.keys() == right.keys()
    for key, values in left.items():
        # A value of 6 cannot agree as closely as one of 0.1: kernels for one and for many rows add in another order.
        np.testing.assert_allclose(values, right[key], rtol=1e-4, atol=atol, err_msg=key)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_chunks_leave_the_same_state(f32_target: Target, name: str, chunk: int) -> None:
    ids = target_golden(name).ids[1][:50]
    with open_cache(f32_target(name)) as whole, open_cache(f32_target(name)) as parts:
        whole.forward(ids, logits="none")
        parts.forward(ids, logits="none", chunk=chunk)
        assert_same_state(whole, parts, 2e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [1, 2, 5, 16])
def test_verify_and_commit_equals_plain_decode(f32_target: Target, name: str, width: int) -> None:
    """Any number of accepted rows, rejected rows wrong on purpose."""
    ids = target_golden(name).ids[2]
    model = f32_target(name)
    with open_cache(model) as cache, open_cache(model) as plain:
        for n in range(width + 1):
            cache.reset()
            plain.reset()
            cache.forward(ids[:20], logits="none")
            before = state_of(cache)
            block = ids[20 : 20 + width].copy()
            block[n:] = (block[n:] + 7) % 300
            verify = cache.verify(block)
            assert cache.position == 20
            for key, values in state_of(cache).items():
                np.testing.assert_array_equal(values, before[key], err_msg=f"verify changed {key}")
            verify.commit(n)
            plain.forward(ids[:20], logits="none")
            if n:
                rows = plain.forward(block[:n], logits="all", chunk=1).logits
                np.testing.assert_allclose(verify.logits[:n], rows, atol=5e-4)
            assert_same_state(cache, plain, 2e-4)
            after = cache.forward(ids[40:45], logits="all").logits
            np.testing.assert_allclose(after, plain.forward(ids[40:45], logits="all").logits, atol=5e-4)


def test_commit_is_bitwise_the_recurrence(f32_target: Target) -> None:
    """Replaying n rows gives the bits of a verify of exactly n rows that is accepted whole."""
    ids = target_golden("dense").ids[0]
    model = f32_target("dense")
    layers = [i for i, kind in enumerate(model.config.layer_kinds) if kind == "recurrent"]
    with open_cache(model, keep_states=True) as cache:
        for n in range(1, 17):
            cache.reset()
            cache.forward(ids[:20], logits="none")
            verify = cache.verify(ids[20:36])
            states = {layer: verify.state(layer, n - 1) for layer in layers}
            verify.commit(n)
            for layer in layers:
                np.testing.assert_array_equal(cache.read(layer, "recurrent"), states[layer])


def test_stale_and_oversized_verify(f32_target: Target) -> None:
    ids = target_golden("nano").ids[0]
    with open_cache(f32_target("nano"), max_verify=4) as cache:
        cache.forward(ids[:10], logits="none")
        with pytest.raises(pydflash.InvalidArgumentError, match="want 1 to max_verify 4"):
            cache.verify(ids[10:15])
        first = cache.verify(ids[10:14])
        second = cache.verify(ids[10:13])
        with pytest.raises(pydflash.InvalidArgumentError, match="stale"):
            first.commit(1)
        with pytest.raises(pydflash.InvalidArgumentError, match="want 0 to 3"):
            second.commit(4)
        second.commit(0)
        assert cache.position == 10
        with pytest.raises(pydflash.InvalidArgumentError):
            second.commit(1)


def test_prefill_only_cache_migrates(f32_target: Target) -> None:
    ids = target_golden("nano").ids[0]
    model = f32_target("nano")
    with open_cache(model, prefill_only=True) as cache, open_cache(model) as other:
        cache.forward(ids[:30], logits="none")
        with pytest.raises(pydflash.InvalidArgumentError, match="prefill only"):
            cache.verify(ids[30:33])
        cache.migrate(8)
        cache.verify(ids[30:38]).commit(3)
        other.forward(ids[:33], logits="none")
        assert_same_state(cache, other, 2e-4)


def test_recurrent_snapshot_and_replay(f32_target: Target) -> None:
    ids = target_golden("dense").ids[0]
    model = f32_target("dense")
    with open_cache(model) as cache, open_cache(model) as plain:
        with pytest.raises(pydflash.InvalidArgumentError, match="no recurrent state was saved"):
            cache.restore_state()
        cache.forward(ids[:20], logits="none")
        cache.snapshot_state()
        cache.forward(ids[50:60], logits="none")
        cache.restore_state()
        assert cache.position == 20
        cache.forward(ids[20:30], logits="none")
        plain.forward(ids[:30], logits="none")
        for layer in range(model.config.n_layer):
            for what in KINDS[model.config.layer_kinds[layer]]:
                np.testing.assert_allclose(cache.read(layer, what), plain.read(layer, what), atol=2e-4)


def test_nothing_survives_a_reset(f32_target: Target) -> None:
    golden = target_golden("nano")
    model = f32_target("nano")
    with open_cache(model) as used:
        for round_ in range(20):
            ids = golden.ids[round_ % 4][: 10 + round_]
            used.reset(kv=bool(round_ % 2))
            got = used.forward(ids, logits="last").logits
            used.verify(golden.ids[0][:5]).commit(2)
            with open_cache(model) as fresh:
                np.testing.assert_array_equal(got, fresh.forward(ids, logits="last").logits)


@pytest.mark.parametrize("capacity", [17, 64, 256])
def test_context_is_never_overrun(f32_target: Target, capacity: int) -> None:
    ids = np.resize(target_golden("nano").ids[0], 300)
    with pydflash.TargetCache(f32_target("nano"), capacity=capacity, feature_capacity=16) as cache:
        with pytest.raises(pydflash.CapacityError, match=f"do not fit a context of {capacity}"):
            cache.forward(ids[: capacity + 1], logits="none")
        assert cache.position == 0
        cache.forward(ids[: capacity - 3], logits="none")
        with pytest.raises(pydflash.CapacityError):
            cache.verify(ids[:4])
        cache.verify(ids[:3]).commit(3)
        assert cache.position == capacity
        with pytest.raises(pydflash.CapacityError):
            cache.forward(ids[:1], logits="none")


def test_feature_ring_wraps(f32_target: Target) -> None:
    """Features of the last positions are right at every wrap offset; rows that a verify overwrote are not offered."""
    ids = np.resize(target_golden("nano").ids[0], 200)
    model = f32_target("nano")
    with open_cache(model, capture_layers=(1, 2)) as big:
        big.forward(ids, logits="none")
        all_rows = big.features(0, 200)
    with open_cache(model, capture_layers=(1, 2), feature_capacity=24, max_verify=16) as ring:
        for n in range(1, 120, 7):
            ring.reset()
            ring.forward(ids[:n], logits="none", chunk=9)
            begin, end = ring.feature_range
            assert (begin, end) == (max(0, n - 24), n)
            np.testing.assert_allclose(ring.features(begin, end), all_rows[begin:end], atol=2e-4)
            if begin > 0:
                with pytest.raises(pydflash.InvalidArgumentError, match="there are"):
                    ring.features(begin - 1, end)
            ring.verify(ids[n : n + 10]).commit(4)
            begin, end = ring.feature_range
            assert (begin, end) == (max(0, n + 10 - 24), n + 4)
            np.testing.assert_allclose(ring.features(begin, end), all_rows[begin:end], atol=2e-4)


def test_plan_is_exact(f32_target: Target) -> None:
    model = f32_target("dense")
    for k_type, v_type in (("f16", "f16"), ("q8_0", "q4_0"), ("f32", "bf16")):
        plan = pydflash.TargetCache.plan(model, capacity=1000, k_type=k_type, v_type=v_type)
        with pydflash.TargetCache(model, capacity=1000, k_type=k_type, v_type=v_type) as cache:
            assert cache.state.memory_bytes == plan.total_bytes
        row = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
        width = model.config.head_dim * model.config.n_head_kv * 2  # two full-attention layers
        assert plan.k_bytes == width * 1024 * row[k_type]
        assert plan.v_bytes == width * 1024 * row[v_type]


def test_steady_state_builds_and_allocates_nothing(f32_target: Target) -> None:
    ids = target_golden("nano").ids[0]
    with open_cache(f32_target("nano")) as cache:
        cache.forward(ids[:40], logits="none")
        for n in (3, 16, 1):
            cache.verify(ids[:16]).commit(n)
        before = pydflash.work_counters()
        for n in (5, 0, 16, 2):
            cache.verify(ids[:16]).commit(n)
        after = pydflash.work_counters()
        assert after.graphs_built == before.graphs_built
        assert after.buffers_allocated == before.buffers_allocated
        assert after.graphs_computed > before.graphs_computed
