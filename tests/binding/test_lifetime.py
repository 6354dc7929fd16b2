"""Who keeps whom alive, what close() does, and that memory comes back."""

import copy
import gc
import itertools
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import pydflash
from pydflash import builtin
from pydflash._handle import NativeHandle

HEADER = Path(__file__).resolve().parents[2] / "native" / "capi" / "dflash.h"


def handle_classes() -> dict[str, type[NativeHandle]]:
    """Class by the C noun it wraps."""
    words = {cls: re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower() for cls in NativeHandle.__subclasses__()}
    return {"gguf" if noun == "gguf_file" else noun: cls for cls, noun in words.items()}


class Family:
    """One object of each class, made from each other."""

    def __init__(self) -> None:
        self.gguf = pydflash.GgufFile.open(builtin.target_path())
        self.target_model = pydflash.TargetModel.open(n_threads=1)
        self.draft_model = pydflash.DraftModel.open(None, self.target_model)
        self.target_cache = pydflash.TargetCache(
            self.target_model, 128, capture_layers=self.draft_model.config.target_layer_ids
        )
        self.draft_context = pydflash.DraftContext(self.draft_model, full_rows=128)
        self.draft_feature_mirror = pydflash.DraftFeatureMirror(self.draft_model, capacity=128)
        self.decoder = pydflash.Decoder(self.target_cache, self.draft_context)
        with pydflash.TargetCache(self.target_model, 128) as cache:
            cache.forward([1, 2, 3])
            self.prefix_snapshot = pydflash.PrefixSnapshot.take(cache, tokens=[1, 2, 3])

    def members(self) -> dict[str, NativeHandle]:
        return {name: value for name, value in vars(self).items() if isinstance(value, NativeHandle)}

    def close(self) -> None:
        for member in self.members().values():
            member.close()


@pytest.fixture
def family() -> Iterator[Family]:
    family = Family()
    yield family
    family.close()


def uses(family: Family) -> dict[str, Callable[[], object]]:
    """A call of each object, by the C noun."""
    return {
        "gguf": lambda: family.gguf.metadata,
        "target_model": lambda: family.target_model.embed([1]),
        "draft_model": lambda: pydflash.DraftContext(family.draft_model),
        "target_cache": lambda: family.target_cache.position,
        "draft_context": lambda: family.draft_context.cursor,
        "draft_feature_mirror": lambda: family.draft_feature_mirror.valid_range,
        "decoder": lambda: family.decoder.position,
        "prefix_snapshot": lambda: family.prefix_snapshot.logits,
    }


def test_every_row_of_the_ownership_table_has_a_class_that_is_tested_here(family: Family) -> None:
    text = HEADER.read_text()
    table = text[text.index("---- Ownership") : text.index("typedef struct dflash_gguf ")]
    rows = [line[4:43] for line in table.splitlines() if re.match(r" \*   [a-z]", line)][1:]
    nouns = {noun for row in rows for noun in re.findall(r"\w+", row)} - {
        *("arrays", "strings", "options", "dflash_error", "callback", "and", "user", "pointer"),
    }
    assert nouns == set(handle_classes()) == set(family.members()) == set(uses(family))


@pytest.mark.parametrize("noun", sorted(handle_classes()))
def test_a_closed_object_refuses_to_work_and_can_be_closed_again(family: Family, noun: str) -> None:
    member = family.members()[noun]
    assert not member.closed
    member.close()
    assert member.closed
    with pytest.raises(pydflash.ClosedError, match="closed"):
        uses(family)[noun]()
    with pytest.raises(pydflash.ClosedError), member:
        pass
    member.close()
    assert repr(member).endswith(", closed>")


@pytest.mark.parametrize("noun", sorted(handle_classes()))
def test_with_closes(family: Family, noun: str) -> None:
    member = family.members()[noun]
    with member as inside:
        assert inside is member
        assert "closed" not in repr(member)
    assert member.closed


def test_children_work_after_their_parents_are_closed(family: Family) -> None:
    family.target_model.close()
    family.draft_model.close()
    family.draft_feature_mirror.close()
    assert family.target_cache.forward([1, 2, 3]).logits.shape == (1, 4096)
    family.target_cache.reset()
    family.target_cache.close()
    family.draft_context.close()
    family.decoder.begin(pydflash.SamplingOptions())
    assert len(family.decoder.prefill([1, 2, 3], 8).tokens) == 1
    assert len(family.decoder.step(16, 7).tokens) >= 1


def test_parents_live_as_long_as_their_children() -> None:
    def decoder() -> pydflash.Decoder:
        with ExitStack() as stack:
            family = Family()
            stack.callback(family.gguf.close)
            stack.callback(family.draft_feature_mirror.close)
            return family.decoder

    made = decoder()
    gc.collect()
    with made.cache.model, made.cache, made:
        made.begin()
        assert made.prefill([5, 6, 7], 4).tokens
        context = made.draft_context
        assert context is not None
        context.model.close()
        context.close()


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_closing_is_safe(family: Family, seed: int) -> None:
    members = list(family.members().values())
    family.target_cache.forward([1, 2, 3])
    for i in np.random.default_rng(seed).permutation(len(members)):
        members[i].close()
    assert all(member.closed for member in members)


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_a_snapshot_is_freed_with_its_last_reference(family: Family) -> None:
    """Caches drop snapshots that others may hold, so nobody has to close them."""
    family.target_cache.forward(list(range(100)))
    kept = pydflash.PrefixSnapshot.take(family.target_cache, tokens=list(range(100)))
    before = resident_bytes()
    for _ in range(200):
        pydflash.PrefixSnapshot.take(family.target_cache, tokens=list(range(100)))
    grown = resident_bytes() - before
    assert grown < 20 * kept.n_bytes, f"grew by {grown} bytes with snapshots of {kept.n_bytes}"
    family.target_cache.close()
    family.target_model.close()
    assert kept.read(0).size > 0


@pytest.mark.parametrize("noun", sorted(handle_classes().keys() - {"prefix_snapshot"}))
@pytest.mark.filterwarnings("always::ResourceWarning")
def test_a_forgotten_object_warns(noun: str, target: pydflash.TargetModel, drafter: pydflash.DraftModel) -> None:
    cache = pydflash.TargetCache(target, 64, capture_layers=drafter.config.target_layer_ids)
    makers: dict[str, Callable[[], NativeHandle]] = {
        "gguf": lambda: pydflash.GgufFile.open(builtin.draft_path()),
        "target_model": lambda: pydflash.TargetModel.open(layers=(0, 1), load_output=False),
        "draft_model": lambda: pydflash.DraftModel.open(None, target),
        "target_cache": lambda: pydflash.TargetCache(target, 64),
        "draft_context": lambda: pydflash.DraftContext(drafter),
        "draft_feature_mirror": lambda: pydflash.DraftFeatureMirror(drafter),
        "decoder": lambda: pydflash.Decoder(cache),
    }
    with cache:
        made = makers[noun]()
        name = type(made).__name__
        with pytest.warns(ResourceWarning, match=f"unclosed {name}"):
            del made


def test_objects_cannot_be_pickled_and_say_so(family: Family) -> None:
    for member in family.members().values():
        with pytest.raises(TypeError):
            pickle.dumps(member)
        with pytest.raises(TypeError):
            copy.deepcopy(member)


def test_repr_tells_what_it_is(family: Family) -> None:
    texts = {noun: repr(member) for noun, member in family.members().items()}
    assert re.fullmatch(r"<GgufFile 'demo-target-q8_0.gguf', \d+ keys, \d+ tensors>", texts["gguf"])
    assert "qwen35, 12 layers" in texts["target_model"]
    assert "blocks of 16, features of layers 1, 3, 5, 7, 9" in texts["draft_model"]
    assert "of 128 tokens, k f16, v f16, 5 feature layers, position 0," in texts["target_cache"]
    assert "positions [0, 0)" in texts["draft_context"]
    assert "of 128 rows of 5 x 256 f32 on CPU, positions [0, 0), 0.6 MiB" in texts["draft_feature_mirror"]
    assert "with a drafter, position 0, 0 emitted in 0 steps" in texts["decoder"]


def test_repr_of_an_object_whose_constructor_failed() -> None:
    cache = pydflash.TargetCache.__new__(pydflash.TargetCache)
    assert repr(cache) == "<TargetCache: not open>"
    assert cache.closed
    cache.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_memory_comes_back() -> None:
    def live() -> None:
        family = Family()
        family.decoder.begin()
        family.decoder.prefill(list(range(40)), 30)
        for _ in range(2):
            family.decoder.step(16, 8)
        family.close()

    # Allocators keep some memory for later: the first rounds may grow.
    for _ in range(3):
        live()
    before = resident_bytes()
    for _ in range(10):
        live()
    grown = resident_bytes() - before
    # One family takes more than 30 MB, so a leak of one would show ten times.
    assert grown < 15e6, f"grew by {grown / 1e6:.1f} MB"


def test_results_do_not_depend_on_the_object(target: pydflash.TargetModel) -> None:
    with pydflash.TargetCache(target, 64, max_verify=4) as cache:
        result = cache.forward([1, 2, 3], "all", hidden_layers=(2,), want_hidden=True)
        verify = cache.verify([4, 5])
        rows = cache.features(0, 3)
    arrays = [result.logits, result.hidden[2], result.hidden_out, verify.logits, verify.argmax, rows]
    kept = [np.array(array) for array in arrays]
    with pydflash.TargetCache(target, 64, max_verify=4) as cache:
        cache.forward([9, 8, 7], "all")
    for array, copied in zip(arrays, kept, strict=True):
        assert isinstance(array, np.ndarray)
        assert array.flags.writeable
        assert np.array_equal(array, copied)
    with pytest.raises(pydflash.InvalidArgumentError, match="stale"):
        verify.commit(1)


def test_a_verify_keeps_its_cache(target: pydflash.TargetModel) -> None:
    verify = pydflash.TargetCache(target, 64).verify([1, 2, 3])
    gc.collect()
    verify.commit(2)
    cache = verify._cache
    assert cache.position == 2
    cache.close()


def test_serials_order_parents_before_children(family: Family) -> None:
    members = family.members()
    for parent, child in itertools.pairwise(
        ("target_model", "draft_model", "target_cache", "draft_context", "decoder")
    ):
        assert members[parent]._lock.serial < members[child]._lock.serial
