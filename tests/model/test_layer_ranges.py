"""A forward in ranges of layers, hidden states in and out: the bits of a forward through the whole model."""

from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest
from support.goldens import target_golden

import pydflash

Target = Callable[[str], pydflash.TargetModel]
N_IDS = 40


def open_cache(model: pydflash.TargetModel) -> pydflash.TargetCache:
    taps = tuple(range(model.config.layer_begin, model.config.layer_end))
    return pydflash.TargetCache(model, capacity=256, k_type="f32", v_type="f32", capture_layers=taps)


def state_of(cache: pydflash.TargetCache) -> dict[str, np.ndarray]:
    """What a cache holds of every layer that it has."""
    config = cache.model.config
    out = {}
    for layer in range(config.layer_begin, config.layer_end):
        if config.layer_kinds[layer] == "recurrent":
            out |= {f"recurrent{layer}": cache.read(layer, "recurrent"), f"conv{layer}": cache.read(layer, "conv")}
        else:
            out |= {f"k{layer}": cache.read(layer, "k"), f"v{layer}": cache.read(layer, "v")}
    return out


def assert_same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for key, values in left.items():
        np.testing.assert_array_equal(values, right[key], err_msg=key)


@pytest.mark.parametrize("name", ["nano", "dense", "moe"])
@pytest.mark.parametrize("chunk", [1, 16, 512])
def test_layer_by_layer_is_the_whole_bit_for_bit(f32_target: Target, name: str, chunk: int) -> None:
    """Logits, features and states of a prompt, and of the tokens that follow in the ordinary way."""
    ids = target_golden(name).ids[0]
    model = f32_target(name)
    n = model.config.n_layer
    with open_cache(model) as whole, open_cache(model) as ranged:
        wanted = whole.forward(ids[:N_IDS], "all", chunk=chunk, hidden_layers=range(n))
        x = ranged.forward(ids[:N_IDS], "none", chunk=chunk, layers=(0, 1), want_hidden=True).hidden_out
        for layer in range(1, n):
            assert ranged.position == 0
            np.testing.assert_array_equal(x, wanted.hidden[layer - 1])
            last = layer == n - 1
            result = ranged.forward(
                None,
                "all" if last else "none",
                chunk=chunk,
                hidden_in=x,
                layers=(layer, layer + 1),
                want_hidden=True,
            )
            x = result.hidden_out
        np.testing.assert_array_equal(x, wanted.hidden[n - 1])
        np.testing.assert_array_equal(result.logits, wanted.logits)
        assert ranged.position == whole.position == N_IDS
        np.testing.assert_array_equal(ranged.features(0, N_IDS), whole.features(0, N_IDS))
        assert_same(state_of(ranged), state_of(whole))
        more = ids[N_IDS : N_IDS + 3]
        np.testing.assert_array_equal(ranged.forward(more, "all").logits, whole.forward(more, "all").logits)
        assert_same(state_of(ranged), state_of(whole))


@pytest.mark.parametrize("name", ["nano", "dense"])
def test_every_cut_into_two_models(f32_target: Target, f32_path: Callable[[str], object], name: str) -> None:
    """Two models with a part of the layers each, every layer in its own cache, for a prompt and single tokens."""
    ids = target_golden(name).ids[0]
    model = f32_target(name)
    n = model.config.n_layer
    for cut in range(1, n):
        with ExitStack() as stack:
            parts = [
                stack.enter_context(pydflash.TargetModel.open(f32_path(name), layers=layers, load_output=head))  # type: ignore[arg-type]
                for layers, head in (((0, cut), False), ((cut, n), True))
            ]
            a, b, whole = (stack.enter_context(open_cache(part)) for part in (*parts, model))
            for begin, end in ((0, 20), (20, 21), (21, 22), (22, 30)):
                wanted = whole.forward(ids[begin:end], "all").logits
                x = a.forward(ids[begin:end], "none", want_hidden=True).hidden_out
                got = b.forward(None, "all", hidden_in=x).logits
                np.testing.assert_array_equal(got, wanted, err_msg=f"cut {cut}, tokens {begin} to {end}")
            assert a.position == b.position == whole.position == 30
            assert_same(state_of(a) | state_of(b), state_of(whole))
            features = np.concatenate([a.features(0, 30), b.features(0, 30)], axis=1)
            np.testing.assert_array_equal(features, whole.features(0, 30))


def test_ranges_that_are_refused(f32_target: Target) -> None:
    """The message names the range and the limit, and the cache is as it was."""
    model = f32_target("nano")
    n = model.config.n_layer
    ids = target_golden("nano").ids[0][:4]
    x = np.zeros((4, model.config.n_embd), np.float32)
    with open_cache(model) as cache:
        cache.forward(ids, "none")
        before = state_of(cache)
        for begin, end in ((0, n + 1), (n, n + 1)):
            limit = rf"layers \[{begin}, {end}\), want a part of the cache's \[0, {n}\)"
            with pytest.raises(pydflash.InvalidArgumentError, match=limit):
                cache.forward(None, "none", hidden_in=x, layers=(begin, end))
        for begin, end in ((1, 1), (2, 1)):
            with pytest.raises(pydflash.InvalidArgumentError, match=rf"\({begin}, {end}\).*0 <= begin < end"):
                cache.forward(None, "none", hidden_in=x, layers=(begin, end))
        with pytest.raises(pydflash.InvalidArgumentError, match="layers from 1 need hidden states"):
            cache.forward(ids, "none", layers=(1, n))
        with pytest.raises(pydflash.InvalidArgumentError, match="head and the last layer"):
            cache.forward(ids, "last", layers=(0, n - 1))
        assert cache.position == 4
        assert_same(state_of(cache), before)
