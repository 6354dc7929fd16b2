"""TargetCache from Python: shapes and meaning of what it returns, ways to run part of it, commit and restore."""

import itertools

import numpy as np
import pytest

import pydflash
from pydflash import TargetCache, TargetModel

IDS = [301, 40, 7, 999, 1200, 3, 77]


def test_logit_rows(cache: TargetCache) -> None:
    everything = cache.forward(IDS, "all").logits
    assert everything.shape == (7, 4096)
    for wanted, rows in (("last", [6]), ("none", []), ([0, 3, 6], [0, 3, 6]), ((2,), [2]), (np.array([1, 2]), [1, 2])):
        cache.reset()
        result = cache.forward(np.array(IDS, np.int32), wanted)  # type: ignore[arg-type]
        assert result.logits.dtype == np.float32
        assert np.array_equal(result.logits, everything[rows])
        last = cache.last_logits
        assert (last is None) == (6 not in rows)
        assert last is None or np.array_equal(last, everything[6])
        assert result.hidden == {}
        assert result.hidden_out is None
    with pytest.raises(pydflash.InvalidArgumentError, match="'first'"):
        cache.forward(IDS, "first")  # type: ignore[arg-type]


def test_ranges_of_layers_make_up_the_whole(target: TargetModel, cache: TargetCache) -> None:
    whole = cache.forward(IDS, "all", hidden_layers=(0, 4, 11), want_hidden=True)
    assert list(whole.hidden) == [0, 4, 11]
    assert all(rows.shape == (7, 256) for rows in whole.hidden.values())
    assert whole.hidden_out is not None
    assert np.array_equal(whole.hidden_out, whole.hidden[11])
    cache.reset()
    first = cache.forward(IDS, "none", layers=(0, 5), want_hidden=True)
    assert cache.position == 0
    assert first.hidden_out is not None
    assert np.array_equal(first.hidden_out, whole.hidden[4])
    rest = cache.forward(None, "all", hidden_in=first.hidden_out, layers=range(5, 12))
    assert cache.position == 7
    assert np.array_equal(rest.logits, whole.logits)


def test_a_cache_of_some_layers(target: TargetModel) -> None:
    with TargetModel.open(layers=(0, 4), load_output=False, n_threads=1) as part:
        assert not part.config.has_output
        assert (part.config.layer_begin, part.config.layer_end) == (0, 4)
        with TargetCache(part, 64) as cache, TargetCache(target, 64) as whole:
            assert cache.capture_layers == (1, 3)
            cache.forward(IDS, "none")
            whole.forward(IDS, "none")
            assert np.array_equal(cache.features(0, 7), whole.features(0, 7)[:, :512])
            with pytest.raises(pydflash.InvalidArgumentError):
                cache.verify([1])


@pytest.mark.parametrize("options", [{}, {"k_type": "q8_0", "v_type": "q4_0"}, {"layers": (2, 9)}, {"capacity": 1000}])
def test_the_plan_is_exact(target: TargetModel, options: dict[str, object]) -> None:
    plan = TargetCache.plan(target, **options)  # type: ignore[arg-type]
    with TargetCache(target, **options) as cache:  # type: ignore[arg-type]
        assert cache.state.memory_bytes == plan.total_bytes
        assert cache.state.physical_capacity == plan.physical_capacity
    c = target.config
    begin, end = options.get("layers", (0, c.n_layer))  # type: ignore[misc]
    kinds = c.layer_kinds[begin:end]
    capacity = -(-int(options.get("capacity", 4096)) // 256) * 256  # type: ignore[call-overload]
    values = kinds.count("attention") * capacity * c.n_head_kv * c.head_dim
    assert plan.k_bytes == values * 34 // 32 if "k_type" in options else values * 2
    assert plan.v_bytes == values * 18 // 32 if "v_type" in options else values * 2
    assert plan.recurrent_bytes == kinds.count("recurrent") * 4 * c.ssm_dt_rank * c.ssm_d_state**2
    assert plan.conv_bytes == kinds.count("recurrent") * 4 * (c.ssm_d_conv - 1) * c.conv_channels
    parts = (plan.k_bytes, plan.v_bytes, plan.recurrent_bytes, plan.conv_bytes, plan.feature_bytes, plan.rotation_bytes)
    assert sum(parts) <= plan.total_bytes <= sum(parts) + 64 * 1024


@pytest.mark.parametrize("capacity", [1, 255, 257, 5000])
def test_feature_ring(target: TargetModel, capacity: int) -> None:
    with TargetCache(target, capacity, max_verify=1) as cache:
        assert cache.feature_capacity == min(-(-capacity // 256) * 256, 4096)
        assert TargetCache.plan(target, capacity).feature_bytes == cache.feature_capacity * 5 * 256 * 4
    with TargetCache(target, 64, capture_layers=()) as cache:
        assert (cache.feature_capacity, cache.capture_layers) == (0, ())
        cache.forward(IDS, "none")
        assert cache.feature_range[0] == cache.feature_range[1]
        with pytest.raises(pydflash.InvalidArgumentError):
            cache.features(0, 1)


@pytest.mark.parametrize("n", range(4))
def test_verify_and_commit_is_decoding(target: TargetModel, n: int) -> None:
    ids = [8, 900, 31]
    with TargetCache(target, 64) as cache, TargetCache(target, 64) as plain:
        cache.forward(IDS)
        plain.forward(IDS)
        states = [plain.read(0, "recurrent")]
        expected = []
        for token in ids:
            expected.append(plain.forward([token], "all").logits[0])
            states.append(plain.read(0, "recurrent"))
        verify = cache.verify(ids)
        assert (verify.base, verify.n_rows, cache.position) == (7, 3, 7)
        assert np.abs(verify.logits - np.array(expected)).max() < 0.05
        assert np.array_equal(verify.argmax, verify.logits.argmax(axis=1))
        assert verify.conv_input(0).shape == (3 + 3, 512)
        (verify.commit if n % 2 else cache.commit)(n)
        assert cache.position == 7 + n
        assert not verify.current
        assert np.abs(cache.read(0, "recurrent") - states[n]).max() < 0.05
        with pytest.raises(pydflash.InvalidArgumentError, match="stale"):
            verify.commit(n)
        with pytest.raises(pydflash.InvalidArgumentError):
            cache.commit(n)


def test_a_later_move_makes_an_outcome_stale(cache: TargetCache) -> None:
    cache.forward(IDS)
    cache.snapshot_state()
    for move in (
        lambda: cache.verify([5]),
        lambda: cache.forward([5]),
        cache.restore_state,
        lambda: cache.commit(1),
        cache.reset,
    ):
        verify = cache.verify([1, 2])
        assert verify.current
        move()
        assert not verify.current
        for use in (lambda: verify.commit(1), lambda: verify.conv_input(0), lambda: verify.state(0, 0)):  # noqa: B023
            with pytest.raises(pydflash.InvalidArgumentError, match="stale"):
                use()
    verify = cache.verify([1], logits=False)
    with pytest.raises(pydflash.InvalidArgumentError, match="logits=True"):
        _ = verify.logits
    cache.close()
    with pytest.raises(pydflash.InvalidArgumentError):
        verify.commit(1)


def test_a_decoder_makes_an_outcome_stale(cache: TargetCache) -> None:
    with pydflash.Decoder(cache) as decoder:
        verify = cache.verify([1, 2])
        decoder.begin()
        decoder.prefill([4, 5], 10)
        with pytest.raises(pydflash.InvalidArgumentError):
            verify.commit(1)
        assert decoder.position == 2


def test_kept_states(target: TargetModel) -> None:
    with TargetCache(target, 64, keep_states=True) as cache:
        cache.forward(IDS)
        verify = cache.verify([8, 900])
        kept = [verify.state(1, row) for row in range(2)]
        verify.commit(1)
        assert np.array_equal(cache.read(1, "recurrent"), kept[0])
        assert not np.array_equal(kept[0], kept[1])
        assert kept[0].shape == (4, 64, 64)


def test_snapshot_and_restore(cache: TargetCache) -> None:
    cache.forward(IDS[:4])
    cache.snapshot_state()
    expected = cache.forward(IDS[4:], "all").logits
    cache.restore_state()
    assert cache.position == 4
    assert np.array_equal(cache.forward(IDS[4:], "all").logits, expected)


def test_prefill_only(target: TargetModel) -> None:
    with TargetCache(target, 64, prefill_only=True) as cache:
        cache.forward(IDS)
        assert not cache.state.can_verify
        with pytest.raises(pydflash.InvalidArgumentError, match="prefill"):
            cache.verify([1])
        cache.migrate(4)
        assert (cache.state.can_verify, cache.state.max_verify, cache.position) == (True, 4, 7)
        cache.verify([1, 2, 3, 4]).commit(4)
        assert cache.position == 11


@pytest.mark.parametrize("parts", list(itertools.product((True, False), repeat=3)))
def test_reset(cache: TargetCache, parts: tuple[bool, bool, bool]) -> None:
    kv, recurrent, features = parts
    cache.forward(IDS)
    state = cache.read(0, "recurrent")
    cache.reset(kv=kv, recurrent=recurrent, features=features)
    assert cache.position == 0
    assert bool(cache.read(0, "recurrent").any()) == (not recurrent)
    assert recurrent or np.array_equal(cache.read(0, "recurrent"), state)


def test_inspection(target: TargetModel, cache: TargetCache) -> None:
    cache.forward(IDS)
    assert cache.read(3, "k").shape == (7, 2, 64)
    assert cache.read(3, "v", 2, 5).shape == (3, 2, 64)
    assert np.array_equal(cache.read(3, "k", 2, 5), cache.read(3, "k")[2:5])
    assert cache.read(0, "recurrent").shape == (4, 64, 64)
    assert cache.read(0, "conv").shape == (3, 512)
    assert cache.features(2, 6).shape == (4, 1280)
    assert cache.features(3, 3).shape == (0, 1280)
    assert cache.moe_selected(0).shape == (0, 0)
    assert cache.feature_range == (0, 7)
    assert cache.model is target
    assert cache.options == pydflash.CacheOptions(capacity=512)


def test_a_mixture_of_experts(f32_target: "object") -> None:
    moe = f32_target("moe")  # type: ignore[operator]
    assert moe.config.is_moe
    with TargetCache(moe, 64) as cache:
        cache.forward([1, 2, 3, 4])
        chosen = cache.moe_selected(0)
        assert chosen.shape == (4, moe.config.n_expert_used)
        assert chosen.min() >= 0
        assert chosen.max() < moe.config.n_expert
        assert all(len(set(row)) == len(row) for row in chosen.tolist())


def test_work_counters(cache: TargetCache) -> None:
    cache.forward(IDS)
    before = pydflash.work_counters()
    cache.forward(IDS)
    after = pydflash.work_counters()
    assert after.graphs_computed > before.graphs_computed
    assert after.graphs_built == before.graphs_built
    assert after.bytes_to_device > before.bytes_to_device


def test_devices() -> None:
    found = pydflash.devices()
    assert any(device.kind == "cpu" and device.name == "CPU" for device in found)
    assert all(device.description for device in found)
