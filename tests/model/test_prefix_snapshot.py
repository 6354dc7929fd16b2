"""Invariant E: what goes on from a snapshot is what would have gone on without one."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import pydflash
from pydflash import PrefixSnapshot, SamplingOptions

Target = Callable[[str], pydflash.TargetModel]
Drafter = Callable[[str], pydflash.DraftModel]
KV_TYPES = ["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]


class Sequence:
    """A cache, a context and a decoder over one pair."""

    def __init__(self, draft: pydflash.DraftModel, capacity: int, kv: str, draft_kv: str, **options: Any) -> None:
        target = draft.target
        self.cache = pydflash.TargetCache(
            target,
            capacity,
            kv,  # type: ignore[arg-type]
            kv,  # type: ignore[arg-type]
            capture_layers=draft.config.target_layer_ids,
            feature_capacity=options.pop("feature_capacity", 0),
        )
        self.context = pydflash.DraftContext(draft, draft_kv, draft_kv, **options)  # type: ignore[arg-type]
        self.decoder = pydflash.Decoder(self.cache, self.context)

    def close(self) -> None:
        for part in (self.decoder, self.context, self.cache):
            part.close()

    def read(self, ids: list[int]) -> None:
        self.decoder.begin(SamplingOptions(ignore_eos=True))
        self.decoder.feed(ids)

    def take(self, **options: Any) -> PrefixSnapshot:
        tokens = self.decoder.tokens[: self.cache.position]
        return PrefixSnapshot.take(self.cache, self.context, tokens=tokens, **options)

    def answer(self, ids: list[int], n: int, width: int) -> tuple[list[int], int, int]:
        """Tokens, and how many proposals were made and accepted."""
        self.decoder.begin(SamplingOptions(ignore_eos=True))
        tokens = list(self.decoder.prefill(ids, n).tokens)
        while len(tokens) < n:
            tokens += self.decoder.step(width, n - len(tokens)).tokens
        stats = self.decoder.stats
        self.decoder.settle()
        return tokens, stats.proposed, stats.accepted


SequenceMaker = Callable[..., Sequence]


@pytest.fixture
def make() -> Iterator[SequenceMaker]:
    with ExitStack() as stack:

        def sequence(
            draft: pydflash.DraftModel, capacity: int = 512, kv: str = "f32", draft_kv: str = "f32", **options: Any
        ) -> Sequence:
            made = Sequence(draft, capacity, kv, draft_kv, **options)
            stack.callback(made.close)
            return made

        yield sequence


def prompt(n: int, salt: int = 0) -> list[int]:
    return [(i * 31 + salt * 17 + (i * i) % 13) % 350 for i in range(n)]


@pytest.mark.parametrize("kv", KV_TYPES)
@pytest.mark.parametrize("width", [1, 8])
def test_a_restored_sequence_answers_like_the_one_it_was_taken_of(
    f32_drafter: Drafter, make: SequenceMaker, kv: str, width: int
) -> None:
    """Also quantised, rotated K/V, another capacity, and a cache that held something else."""
    draft = f32_drafter("d-part")
    draft_kv = kv if kv in ("f32", "f16") else "f16"  # this drafter's heads are too small for blocks
    source = make(draft, kv=kv, draft_kv=draft_kv)
    source.read(prompt(150))
    snapshot = source.take()
    wanted = source.answer(prompt(3, 1), 60, width)
    other = make(draft, capacity=2000, kv=kv, draft_kv=draft_kv)
    other.answer(prompt(90, 5), 20, 8)
    other.decoder.restore(snapshot)
    assert other.decoder.tokens == prompt(150)
    assert other.answer(prompt(3, 1), 60, width) == wanted


@pytest.mark.parametrize(("kv", "draft_kv"), [("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "f16")])
def test_the_built_in_pair_goes_on_too(make: SequenceMaker, kv: str, draft_kv: str) -> None:
    """q8_0 weights; with q8_0 the drafter's own rows are quantised and rotated."""
    with pydflash.TargetModel.open(n_threads=1) as target, pydflash.DraftModel.open(None, target) as draft:
        options: dict[str, Any] = {"full_rows": 200, "slack": 8}
        source = make(draft, 512, kv, draft_kv, **options)
        source.read(prompt(300))
        snapshot = source.take()
        assert (snapshot.info.k_rotation > 0) == (kv != "f16")
        assert (snapshot.info.draft_k_rotation > 0) == (draft_kv == "q8_0")
        other = make(draft, 700, kv, draft_kv, **options)
        other.decoder.restore(snapshot)
        wanted = source.answer(prompt(3, 1), 40, 8)
        assert other.answer(prompt(3, 1), 40, 8) == wanted


def test_the_whole_prompt_needs_no_forward_pass(f32_drafter: Drafter, make: SequenceMaker) -> None:
    draft = f32_drafter("d-part")
    source, other = make(draft), make(draft)
    source.decoder.begin(SamplingOptions(ignore_eos=True))
    first = source.decoder.prefill(prompt(40), 30).tokens
    snapshot = source.take()
    assert snapshot.has_logits
    other.decoder.restore(snapshot)
    other.decoder.begin(SamplingOptions(ignore_eos=True))
    before = pydflash.work_counters().graphs_computed
    assert other.decoder.prefill([], 30).tokens == first
    assert pydflash.work_counters().graphs_computed == before
    assert other.decoder.step(8, 20).tokens == source.decoder.step(8, 20).tokens


# d-swa's sliding layers keep fewer rows than its full ones; 64 full rows make those wrap too.
@pytest.mark.parametrize("depth", [20, 222, 223, 224, 225, 300, 479, 480, 481, 700])
@pytest.mark.parametrize("draft", ["d-swa", "d-part"])
def test_below_at_and_above_every_ring_size(f32_drafter: Drafter, make: SequenceMaker, draft: str, depth: int) -> None:
    """Draft logits behind a restore are those of an uninterrupted run, bit for bit: so is what is accepted."""
    model = f32_drafter(draft)
    options: dict[str, Any] = {"full_rows": 200, "slack": 8, "feature_capacity": 256}
    source, other = make(model, 1024, **options), make(model, 2048, **options)
    source.read(prompt(depth))
    snapshot = source.take()
    held = snapshot.info.draft_held
    assert len(held) == model.config.n_layer
    other.read(prompt(99, 3))
    other.decoder.restore(snapshot)
    assert other.context.state.cursor == depth
    for anchor in (3, 200):
        left, right = source.context.propose(anchor, logits=True), other.context.propose(anchor, logits=True)
        assert left.logits is not None
        np.testing.assert_array_equal(left.logits, right.logits)
    assert source.answer(prompt(5, 2), 40, 8) == other.answer(prompt(5, 2), 40, 8)


def test_the_depths_above_are_around_the_ring_sizes(f32_drafter: Drafter, make: SequenceMaker) -> None:
    source = make(f32_drafter("d-swa"), 1024, full_rows=200, slack=8, feature_capacity=256)
    source.read(prompt(700))
    rings = {700 - held for held in source.take().info.draft_held}
    assert rings == {224}


@pytest.mark.parametrize("kv", ["f32", "q8_0"])
def test_deltas_go_on_like_full_ones(f32_drafter: Drafter, make: SequenceMaker, kv: str) -> None:
    draft = f32_drafter("d-swa")
    options: dict[str, Any] = {"full_rows": 200, "slack": 8}
    source, other = make(draft, 1024, kv=kv, **options), make(draft, 1024, kv=kv, **options)
    source.read(prompt(100))
    parent: PrefixSnapshot | None = source.take()
    for i, n in enumerate((150, 7, 260)):
        source.decoder.feed(prompt(n, i + 1))
        parent = source.take(parent=parent)
    assert parent is not None
    assert (parent.kind, parent.depth, parent.info.kv_begin) == ("delta", 3, 257)
    full = source.take()
    flat = parent.flatten(draft.target, draft)
    assert flat.kind == "full"
    for a, b in zip(full.parts, flat.parts, strict=True):
        assert a == b
        np.testing.assert_array_equal(full.read(a.name), flat.read(b.name), err_msg=a.name)
    wanted = source.answer(prompt(5, 9), 40, 8)
    for snapshot in (parent, full, flat):
        other.decoder.restore(snapshot)
        assert other.answer(prompt(5, 9), 40, 8) == wanted
    assert parent.n_bytes < full.n_bytes < parent.total_bytes


def test_features_that_wait_are_part_of_it(f32_drafter: Drafter, make: SequenceMaker) -> None:
    """While decoding plainly the drafter reads nothing: its rows are in the ring, and in the snapshot."""
    draft = f32_drafter("d-part")
    source, other = make(draft), make(draft)
    source.read(prompt(30))
    source.answer(prompt(3, 1), 20, 1)
    waiting = source.cache.position - source.context.cursor
    assert waiting > 5
    snapshot = source.take()
    info = snapshot.info
    assert (info.feature_begin, info.feature_end) == (source.context.cursor, source.cache.position)
    other.decoder.restore(snapshot)
    source.decoder.drop_anchor()
    assert other.answer([7, 8], 40, 8) == source.answer([7, 8], 40, 8)
    source.decoder.restore(snapshot)
    with pytest.raises(pydflash.InvalidArgumentError, match="features behind that are needed"):
        source.take(features="none")
    source.decoder.catch_up()
    assert source.take().info.feature_begin == source.cache.position


@pytest.mark.parametrize("name", ["nano", "dense", "equalkv", "moe"])
def test_a_target_alone_keeps_its_features(f32_target: Target, name: str) -> None:
    model = f32_target(name)
    with (
        pydflash.TargetCache(model, 300, "f32", "f32", feature_capacity=64) as cache,
        pydflash.TargetCache(model, 600, "f32", "f32", feature_capacity=128) as other,
    ):
        cache.forward(prompt(200), logits="none", chunk=50)
        snapshot = PrefixSnapshot.take(cache)
        other.forward(prompt(20, 1))
        snapshot.restore_into(other)
        assert other.feature_range == cache.feature_range == (136, 200)
        np.testing.assert_array_equal(cache.features(136, 200), other.features(136, 200))
        left, right = cache.forward(prompt(9, 2), "all"), other.forward(prompt(9, 2), "all")
        np.testing.assert_array_equal(left.logits, right.logits)


def test_what_is_said_and_what_is_read(f32_drafter: Drafter, make: SequenceMaker) -> None:
    source = make(f32_drafter("d-part"), kv="q8_0")
    source.read(prompt(70))
    snapshot = source.take()
    said = snapshot.describe()
    assert said["position"] == 70
    assert said["k_type"] == "q8_0"
    assert said["target_digest"] == source.cache.model.digest
    by_part = said["bytes_by_part"]
    assert isinstance(by_part, dict)
    assert sum(by_part.values()) == said["n_bytes"] == snapshot.n_bytes == snapshot.total_bytes
    assert sum(part.n_bytes for part in snapshot.parts) + 4 * 70 == snapshot.n_bytes  # no logits: nothing was drawn
    assert snapshot.allocated_bytes >= snapshot.n_bytes
    layer = source.cache.model.config.layer_kinds.index("recurrent")
    state = snapshot.read(f"snap_ssm_state_{layer}")
    np.testing.assert_array_equal(state.reshape(-1), source.cache.read(layer, "recurrent").reshape(-1))
    assert not snapshot.tokens.flags.writeable
    assert "full of 70 tokens, k q8_0" in repr(snapshot)
    with pytest.raises(pydflash.InvalidArgumentError, match="snap_nothing"):
        snapshot.read("snap_nothing")
    with pytest.raises(pydflash.InvalidArgumentError, match="part"):
        snapshot.read(len(snapshot.parts))


def test_thin_snapshots_are_refused_for_models_with_recurrent_layers(f32_drafter: Drafter, make: SequenceMaker) -> None:
    source = make(f32_drafter("d-part"))
    source.read(prompt(50))
    thick = source.take()
    source.decoder.feed(prompt(20, 1))
    thin = PrefixSnapshot.thin(source.cache, 50, 70)
    assert thin.kind == "thin"
    other = make(f32_drafter("d-part"))
    with pytest.raises(pydflash.UnsupportedModelError, match="the recurrent layers would stay behind"):
        PrefixSnapshot.restore_chain(thick, [thin], other.cache)
    with pytest.raises(pydflash.UnsupportedModelError, match="thin"):
        thin.restore_into(other.cache)
    assert other.cache.position == 0
    PrefixSnapshot.restore_chain(thick, [], other.cache)
    assert other.cache.position == 50


def test_refusals_leave_the_cache_as_it_was(f32_drafter: Drafter, f32_target: Target, make: SequenceMaker) -> None:
    draft = f32_drafter("d-part")
    source = make(draft)
    source.read(prompt(100))
    snapshot = source.take()
    for kwargs, error, reason in (
        ({"capacity": 99}, pydflash.CapacityError, "100 tokens, the cache takes 99"),
        ({"kv": "f16"}, pydflash.SnapshotMismatchError, "K type: the snapshot has f32, the cache has f16"),
        ({"draft_kv": "f16"}, pydflash.SnapshotMismatchError, "draft K type"),
    ):
        other = make(draft, **kwargs)  # type: ignore[arg-type]
        other.read(prompt(30, 4))
        with pytest.raises(error, match=reason):
            other.decoder.restore(snapshot)
        assert other.decoder.tokens == prompt(30, 4)
        same = make(draft, **kwargs)  # type: ignore[arg-type]
        same.read(prompt(30, 4))
        assert other.answer([5], 20, 8) == same.answer([5], 20, 8)
    swapped = make(f32_drafter("d-rand"))
    with pytest.raises(pydflash.SnapshotMismatchError, match="drafter: the snapshot has"):
        swapped.decoder.restore(snapshot)
    with (
        pydflash.TargetCache(f32_target("dense"), 256, "f32", "f32") as stranger,
        pytest.raises(pydflash.SnapshotMismatchError, match="model"),
    ):
        snapshot.restore_into(stranger)
    alone = PrefixSnapshot.take(source.cache, tokens=prompt(100))
    with pytest.raises(pydflash.SnapshotMismatchError, match="no drafter state"):
        alone.restore_into(source.cache, source.context)
    unknown = PrefixSnapshot.take(source.cache, source.context)
    with pytest.raises(pydflash.InvalidArgumentError, match="does not know its tokens"):
        source.decoder.restore(unknown)
    source.decoder.feed([1])
    with pytest.raises(pydflash.SnapshotMismatchError, match="tokens"):
        PrefixSnapshot.take(source.cache, source.context, parent=unknown)


def test_a_verify_from_before_a_restore_is_stale(f32_target: Target) -> None:
    with pydflash.TargetCache(f32_target("nano"), 256) as cache:
        cache.forward(prompt(20))
        snapshot = PrefixSnapshot.take(cache, tokens=prompt(20))
        verify = cache.verify([1, 2, 3])
        snapshot.restore_into(cache)
        with pytest.raises(pydflash.InvalidArgumentError, match="stale"):
            verify.commit(1)
        assert cache.position == 20


def test_rewind_goes_through_the_nearest_snapshot(f32_target: Target) -> None:
    ids = prompt(120)
    model = f32_target("nano")
    with (
        pydflash.TargetCache(model, 256, "f32", "f32") as cache,
        pydflash.TargetCache(model, 256, "f32", "f32") as cold,
    ):
        snapshots = []
        for begin in range(0, 120, 40):
            cache.forward(ids[begin : begin + 40])
            snapshots.append(PrefixSnapshot.take(cache, tokens=ids[: begin + 40]))
        assert cache.rewind(120, ids, snapshots) == 0
        for position, replayed in ((100, 20), (80, 0), (41, 1), (39, 39), (0, 0)):
            snapshots[2].restore_into(cache)
            assert cache.rewind(position, ids, snapshots) == replayed
            assert cache.position == position
            cold.reset()
            if position:
                cold.forward(ids[:position])
            left, right = cache.forward([9, 8], "all").logits, cold.forward([9, 8], "all").logits
            np.testing.assert_allclose(left, right, atol=5e-4)
        with pytest.raises(pydflash.InvalidArgumentError, match="position"):
            cache.rewind(200, ids, snapshots)
        with pytest.raises(pydflash.InvalidArgumentError, match="at least"):
            cache.rewind(1, [], snapshots)
