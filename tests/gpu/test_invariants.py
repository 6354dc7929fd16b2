"""Invariants of the target cache on a GPU: chunks, verify and commit, saved states, resets, the feature ring."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import pydflash
from pydflash.text import Tokenizer

if TYPE_CHECKING:
    from conftest import Measured, Toolbox

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("every_row_by_own_kernels")]
MODELS = ["demo", "dense", "hd256", "wide", "tiny", "tiny-moe", "tiny-tied"]
OpenTarget = Callable[..., pydflash.TargetModel]


def ids_of(model: pydflash.TargetModel, n: int, seed: int = 0) -> np.ndarray:
    """Python text for the built-in model, which amplifies rounding on ids that make no text; random ids for others."""
    if model.config.name == "Target":
        text = Path(random.__file__).read_text(encoding="utf-8")
        ids = Tokenizer.from_metadata(model.metadata).encode(text[4000 + 500 * seed :][: 12 * n])
        return np.array(ids[:n], np.int32)
    return np.random.default_rng(seed).integers(0, model.n_vocab, n).astype(np.int32)


def open_cache(model: pydflash.TargetModel, **options: object) -> pydflash.TargetCache:
    return pydflash.TargetCache(model, capacity=512, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [1, 3, 8, 16, 100])
def test_chunks_leave_the_same_state(
    open_target: OpenTarget, tools: "Toolbox", measured: "Measured", name: str, chunk: int
) -> None:
    model = open_target(name)
    ids = ids_of(model, 150)
    with open_cache(model) as whole, open_cache(model) as chunked:
        reference = whole.forward(ids, logits="all").logits
        logits = chunked.forward(ids, logits="all", chunk=chunk).logits
        worst, part = tools.worst_state(chunked, whole)
        error = tools.difference(logits, reference)
        measured(f"{name}, chunks of {chunk}: logits", error)
        measured(f"{name}, chunks of {chunk}: worst state ({part})", worst)
        n_differ, gap = tools.other_argmax(logits, reference)
        measured(f"{name}, chunks of {chunk}: other argmax of {len(ids)}", n_differ)
        measured(f"{name}, chunks of {chunk}: largest gap there", gap)
        assert error < tools.same_device
        assert worst < tools.same_device
        assert gap < tools.largest_gap


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("width", [1, 2, 5, 8, 16])
def test_verify_and_commit_equals_plain_decode(
    open_target: OpenTarget, tools: "Toolbox", measured: "Measured", name: str, width: int
) -> None:
    """Any number of accepted rows, rejected ones wrong on purpose; a verify alone changes nothing at all."""
    model = open_target(name)
    ids = ids_of(model, 120, seed=1)
    worst = error = 0.0
    with open_cache(model) as cache, open_cache(model) as plain:
        for n in sorted({0, 1, width // 2, width - 1, width}):
            cache.reset()
            plain.reset()
            cache.forward(ids[:40], logits="none")
            plain.forward(ids[:40], logits="none")
            before = tools.state_of(cache)
            block = ids[40 : 40 + width].copy()
            block[n:] = (block[n:] + 7) % model.n_vocab
            verify = cache.verify(block)
            assert cache.position == 40
            for key, values in tools.state_of(cache).items():
                np.testing.assert_array_equal(values, before[key], err_msg=f"verify changed {key}")
            assert verify.argmax.tolist() == verify.logits.argmax(-1).tolist()
            verify.commit(n)
            if n:
                rows = plain.forward(block[:n], logits="all", chunk=1).logits
                error = max(error, tools.difference(verify.logits[:n], rows))
            worst = max(worst, tools.worst_state(cache, plain)[0])
            after = cache.forward(ids[60:70], logits="all").logits
            error = max(error, tools.difference(after, plain.forward(ids[60:70], logits="all").logits))
    measured(f"{name}, verify of {width}: logits", error)
    measured(f"{name}, verify of {width}: worst state", worst)
    assert error < tools.same_device
    assert worst < tools.same_device


@pytest.mark.parametrize("name", MODELS)
def test_commit_is_the_recurrence(open_target: OpenTarget, tools: "Toolbox", measured: "Measured", name: str) -> None:
    """Replaying n rows gives the state that the forward itself had after row n."""
    model = open_target(name)
    ids = ids_of(model, 64, seed=2)
    layers = [i for i, kind in enumerate(model.config.layer_kinds) if kind == "recurrent"]
    worst, equal, total = 0.0, 0, 0
    with open_cache(model, keep_states=True) as cache:
        for n in (1, 2, 7, 15, 16):
            cache.reset()
            cache.forward(ids[:32], logits="none")
            verify = cache.verify(ids[32:48])
            states = {layer: verify.state(layer, n - 1) for layer in layers}
            verify.commit(n)
            for layer in layers:
                found = cache.read(layer, "recurrent")
                worst = max(worst, tools.difference(found, states[layer]))
                equal, total = equal + int(np.array_equal(found, states[layer])), total + 1
    measured(f"{name}, replayed states", worst)
    measured(f"{name}, replayed states that are equal bit for bit", f"{equal} of {total}")
    assert worst < 1e-5


@pytest.mark.parametrize("name", ["demo", "tiny-moe"])
def test_a_saved_state_goes_on_as_if_nothing_had_happened(open_target: OpenTarget, tools: "Toolbox", name: str) -> None:
    model = open_target(name)
    ids = ids_of(model, 100, seed=3)
    with open_cache(model) as cache, open_cache(model) as plain:
        cache.forward(ids[:30], logits="none")
        cache.snapshot_state()
        cache.forward(ids[60:90], logits="none")
        cache.restore_state()
        assert cache.position == 30
        found = cache.forward(ids[30:60], logits="all").logits
        plain.forward(ids[:30], logits="none")
        assert tools.difference(found, plain.forward(ids[30:60], logits="all").logits) < 1e-5


@pytest.mark.parametrize("name", ["demo", "tiny-moe"])
def test_nothing_survives_a_reset(open_target: OpenTarget, tools: "Toolbox", name: str) -> None:
    model = open_target(name)
    with open_cache(model) as used:
        for round_ in range(6):
            ids = ids_of(model, 10 + 7 * round_, seed=round_)
            used.reset(kv=bool(round_ % 2))
            found = used.forward(ids, logits="last").logits
            used.verify(ids[:5]).commit(2)
            with open_cache(model) as fresh:
                assert tools.difference(found, fresh.forward(ids, logits="last").logits) < 1e-6


@pytest.mark.parametrize("feature_type", ["f32", "f16", "bf16"])
def test_the_feature_ring_wraps(
    open_target: OpenTarget, tools: "Toolbox", measured: "Measured", feature_type: str
) -> None:
    """The newest rows at every wrap offset, in each storage type; rows that a verify overwrote are not offered."""
    model = open_target("demo")
    ids = ids_of(model, 200, seed=4)
    worst = 0.0
    with open_cache(model, capture_layers=(1, 5)) as big:
        big.forward(ids, logits="none")
        rows = big.features(0, 200)
    with open_cache(model, capture_layers=(1, 5), feature_capacity=24, feature_type=feature_type) as ring:
        for n in (1, 23, 24, 25, 47, 48, 49, 100):
            ring.reset()
            ring.forward(ids[:n], logits="none", chunk=9)
            assert ring.feature_range == (max(0, n - 24), n)
            ring.verify(ids[n : n + 10]).commit(4)
            begin, end = ring.feature_range
            assert (begin, end) == (max(0, n + 10 - 24), n + 4)
            worst = max(worst, tools.difference(ring.features(begin, end), rows[begin:end]))
            with pytest.raises(pydflash.InvalidArgumentError, match="there are"):
                ring.features(begin, end + 1)
    measured(f"feature ring of {feature_type}", worst)
    assert worst < tools.same_device
