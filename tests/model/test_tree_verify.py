"""Tree verification: a path of a tree is a chain, and committing a path is plain decoding of its tokens."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from support.goldens import target_golden

import pydflash
from pydflash import InvalidArgumentError

Target = Callable[[str], pydflash.TargetModel]
NAMES = ["nano", "dense", "equalkv", "moe"]
KINDS = {"recurrent": ("recurrent", "conv"), "attention": ("k", "v")}
PROMPT = 20


def open_cache(model: pydflash.TargetModel, **options: object) -> pydflash.TargetCache:
    defaults = {"capacity": 256, "k_type": "f32", "v_type": "f32", "max_verify": 65}
    return pydflash.TargetCache(model, **(defaults | options))  # type: ignore[arg-type]


def random_tree(rng: np.random.Generator, n: int, spread: int) -> tuple[np.ndarray, list[int]]:
    """Tokens and parents; a small spread makes deep trees, a large one bushes."""
    parents = [-1] + [int(rng.integers(max(0, i - spread), i)) for i in range(1, n)]
    return rng.integers(0, 300, n).astype(np.int32), parents


def path_to(parents: list[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def state_of(cache: pydflash.TargetCache) -> dict[str, np.ndarray]:
    config = cache.model.config
    out = {"features": cache.features(*cache.feature_range)}
    for layer in range(config.n_layer):
        for what in KINDS[config.layer_kinds[layer]]:
            out[f"{what}{layer}"] = cache.read(layer, what)  # type: ignore[arg-type]
    return out


def assert_equal_state(a: pydflash.TargetCache, b: pydflash.TargetCache, atol: float = 0.0) -> None:
    assert a.position == b.position
    right = state_of(b)
    for key, values in state_of(a).items():
        np.testing.assert_allclose(values, right[key], rtol=0, atol=atol, err_msg=key)


@pytest.fixture
def pair(f32_target: Target) -> Iterator[Callable[..., tuple[pydflash.TargetCache, pydflash.TargetCache]]]:
    """Two caches of one model behind the same prompt."""
    opened: list[pydflash.TargetCache] = []

    def make(name: str, **options: object) -> tuple[pydflash.TargetCache, pydflash.TargetCache]:
        both = (open_cache(f32_target(name), **options), open_cache(f32_target(name), **options))
        for cache in both:
            cache.forward(target_golden(name).ids[2][:PROMPT], logits="none")
        opened.extend(both)
        return both

    yield make
    for cache in opened:
        cache.close()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n", "spread"), [(14, 3), (23, 8), (12, 12)])
def test_every_path_has_the_values_of_a_chain(
    pair: Callable[..., tuple[pydflash.TargetCache, pydflash.TargetCache]], name: str, n: int, spread: int
) -> None:
    """Bit for bit against a chain of as many rows; within rounding against one that is as long as the path."""
    cache, plain = pair(name)
    tokens, parents = random_tree(np.random.default_rng(n), n, spread)
    before = state_of(cache)
    verify = cache.verify_tree(tokens, parents)
    assert cache.position == PROMPT
    assert verify.parents is not None
    assert verify.parents.tolist() == parents
    for key, values in state_of(cache).items():
        np.testing.assert_array_equal(values, before[key], err_msg=f"verify changed {key}")
    for node in range(n):
        path = path_to(parents, node)
        chain = plain.verify(np.concatenate([tokens[path], tokens[: n - len(path)]]))
        np.testing.assert_array_equal(verify.logits[node], chain.logits[len(path) - 1], err_msg=f"node {node}")
        short = plain.verify(tokens[path])
        np.testing.assert_allclose(verify.logits[node], short.logits[-1], atol=2e-3)
        assert verify.argmax[node] == short.argmax[-1]


@pytest.mark.parametrize("name", NAMES)
def test_a_committed_path_is_plain_decoding(
    pair: Callable[..., tuple[pydflash.TargetCache, pydflash.TargetCache]], name: str
) -> None:
    """Invariant B for every node of a random tree; exactly equal to committing a chain of as many rows."""
    cache, plain = pair(name)
    tokens, parents = random_tree(np.random.default_rng(5), 11, 4)
    prompt, after = target_golden(name).ids[2][:PROMPT], target_golden(name).ids[1][:3]
    for node in range(-1, len(tokens)):
        path = path_to(parents, node)
        for one in (cache, plain):
            one.reset()
            one.forward(prompt, logits="none")
        cache.verify_tree(tokens, parents).commit_path(path)
        plain.verify(np.concatenate([tokens[path], tokens[: len(tokens) - len(path)]])).commit(len(path))
        assert_equal_state(cache, plain)
        plain.reset()
        plain.forward(prompt, logits="none")
        for token in tokens[path]:
            plain.forward([token], logits="none")
        assert_equal_state(cache, plain, atol=2e-4)
        logits = [one.forward(after, logits="all").logits for one in (cache, plain)]
        np.testing.assert_allclose(*logits, atol=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_a_tree_of_one_path_is_a_chain(
    pair: Callable[..., tuple[pydflash.TargetCache, pydflash.TargetCache]], name: str
) -> None:
    cache, plain = pair(name)
    tokens = target_golden(name).ids[1][:9]
    tree, chain = cache.verify_tree(tokens, list(range(-1, 8))), plain.verify(tokens)
    np.testing.assert_array_equal(tree.logits, chain.logits)
    tree.commit_path([0, 1, 2, 3, 4])
    chain.commit(5)
    assert_equal_state(cache, plain)


@pytest.mark.parametrize(
    ("k_type", "v_type"), [("f16", "bf16"), ("q8_0", "q4_0"), ("q5_1", "q4_1"), ("q5_0", "f32"), ("bf16", "q8_0")]
)
def test_rows_move_as_they_are_stored(f32_target: Target, k_type: str, v_type: str) -> None:
    """Keys and values of a path are the bytes that a chain would have stored."""
    options = {"k_type": k_type, "v_type": v_type, "feature_type": "f16"}
    with open_cache(f32_target("nano"), **options) as cache, open_cache(f32_target("nano"), **options) as plain:
        ids = target_golden("nano").ids[2][:PROMPT]
        tokens, parents = np.arange(40, 49, dtype=np.int32), [-1, 0, 0, 1, 1, 2, 5, 6, 7]
        path = [0, 2, 5, 6, 7, 8]
        for one in (cache, plain):
            one.forward(ids, logits="none")
        cache.verify_tree(tokens, parents).commit_path(path)
        plain.verify(np.concatenate([tokens[path], tokens[:3]])).commit(len(path))
        assert_equal_state(cache, plain)


@pytest.mark.parametrize("n", [63, 64, 65])
@pytest.mark.parametrize("kv", ["f32", "f16", "q8_0"])
def test_the_largest_trees_have_the_values_of_short_chains(f32_target: Target, kv: str, n: int) -> None:
    with (
        open_cache(f32_target("nano"), k_type=kv, v_type=kv) as cache,
        open_cache(f32_target("nano"), k_type=kv, v_type=kv) as plain,
    ):
        tokens, parents = random_tree(np.random.default_rng(n), n, 9)
        for one in (cache, plain):
            one.forward(target_golden("nano").ids[2][:PROMPT], logits="none")
        verify = cache.verify_tree(tokens, parents)
        for node in range(0, n, 7):
            path = path_to(parents, node)
            np.testing.assert_allclose(verify.logits[node], plain.verify(tokens[path]).logits[-1], atol=2e-3)


def test_many_trees_one_after_the_other(f32_target: Target) -> None:
    """Feature ring wrapping, keys beyond 256, a window, chains in between: state equals plain decoding throughout."""
    rng = np.random.default_rng(3)
    options = {"capacity": 400, "feature_capacity": 23, "fa_window": 50, "max_verify": 23}
    with open_cache(f32_target("nano"), **options) as cache, open_cache(f32_target("nano"), **options) as plain:
        ids = target_golden("nano").ids[2][:PROMPT]
        cache.forward(ids, logits="none")
        plain.forward(ids, logits="none")
        for step in range(90):
            n = int(rng.integers(1, 24))
            tokens, parents = random_tree(rng, n, int(rng.integers(1, 8)))
            path = path_to(parents, int(rng.integers(0, n)))
            if step % 5 == 4:
                cache.verify(tokens).commit(len(path) - 1)
                accepted = tokens[: len(path) - 1]
            else:
                cache.verify_tree(tokens, parents, logits=False).commit_path(path)
                accepted = tokens[path]
            if len(accepted):
                plain.forward(accepted, logits="none", chunk=1)
            if step % 10 == 9:
                begin = max(cache.feature_range[0], plain.feature_range[0])
                left, right = (one.features(begin, one.position) for one in (cache, plain))
                np.testing.assert_allclose(left, right, atol=5e-4)
        assert cache.position == plain.position > 256
        logits = [one.forward([7], logits="last").logits for one in (cache, plain)]
        np.testing.assert_allclose(*logits, atol=2e-3)


def test_commit_of_a_number_of_rows_needs_a_path(
    pair: Callable[..., tuple[pydflash.TargetCache, pydflash.TargetCache]],
) -> None:
    cache, plain = pair("nano")
    tokens, parents = np.arange(40, 45, dtype=np.int32), [-1, 0, 1, 1, 0]
    verify = cache.verify_tree(tokens, parents)
    with pytest.raises(InvalidArgumentError, match=r"path\[3\] is node 3, whose parent is 1 and not 2"):
        verify.commit(4)
    verify.commit(3)
    plain.verify(tokens).commit(3)
    assert_equal_state(cache, plain)
    with pytest.raises(InvalidArgumentError, match="newest outcome"):
        verify.commit_path([0])


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([0, 0, 1], "parent of node 0 is 0, want -1"),
        ([-1, 1, 0], r"parent of node 1 is 1, want 0 to 0: a parent comes before its children"),
        ([-1, 2, 1], r"parent of node 1 is 2, want 0 to 0: a parent comes before its children"),
        ([-1, 0, 3], r"parent of node 2 is 3, want 0 to 1"),
        ([-1, 0, -1], r"parent of node 2 is -1, want 0 to 1"),
        ([-1, 0, -7], r"parent of node 2 is -7, want 0 to 1"),
        ([-1, 0], "parents.*2 rows.*3, one for each id"),
        ([], "parents.*0 rows"),
    ],
)
def test_parents_that_are_no_tree_are_refused(
    pair: Callable[..., tuple[pydflash.TargetCache, pydflash.TargetCache]], parents: list[int], message: str
) -> None:
    cache, _ = pair("nano")
    before = state_of(cache)
    with pytest.raises(InvalidArgumentError, match=message):
        cache.verify_tree([1, 2, 3], parents)
    for key, values in state_of(cache).items():
        np.testing.assert_array_equal(values, before[key], err_msg=key)
    cache.verify_tree([1, 2, 3], [-1, 0, 0]).commit_path([0, 2])


def test_other_refusals(f32_target: Target) -> None:
    with open_cache(f32_target("nano"), max_verify=8, capacity=20) as cache:
        cache.forward([1, 2, 3], logits="none")
        with pytest.raises(InvalidArgumentError, match="a tree of 9 rows, want 1 to max_verify 8"):
            cache.verify_tree(list(range(9)), [-1, *[0] * 8])
        with pytest.raises(InvalidArgumentError, match="want 1 to max_verify 8"):
            cache.verify_tree([], [])
        with pytest.raises(InvalidArgumentError, match="token id 99999 at index 2"):
            cache.verify_tree([1, 2, 99999], [-1, 0, 0])
        verify = cache.verify_tree([1, 2, 3, 4], [-1, 0, 0, 2])
        for path, message in (
            ([1], r"path\[0\] is node 1, whose parent is 0 and not -1"),
            ([0, 3], r"path\[1\] is node 3, whose parent is 2 and not 0"),
            ([0, 2, 1], r"path\[2\] is node 1"),
            ([0, 4], r"path\[1\] is node 4, want 0 to 3"),
            ([-1], r"path\[0\] is node -1"),
        ):
            with pytest.raises(InvalidArgumentError, match=message):
                verify.commit_path(path)
        with pytest.raises(InvalidArgumentError, match="keep_states"):
            verify.state(0, 1)
        assert verify.conv_input(0).shape[0] == cache.model.config.ssm_d_conv - 1 + 4
        verify.commit_path([0, 2, 3])
        assert cache.position == 6
        chain = cache.verify([1, 2, 3])
        with pytest.raises(InvalidArgumentError, match=r"path\[1\] is row 2, a chain has row 1 there"):
            chain.commit_path([0, 2])
        chain.commit_path([0, 1])
        cache.forward(list(range(6)), logits="none")
        with pytest.raises(pydflash.CapacityError, match="7 tokens at position 14"):
            cache.verify_tree(list(range(7)), [-1, *[0] * 6])
    with (
        open_cache(f32_target("nano"), max_verify=80) as cache,
        pytest.raises(InvalidArgumentError, match="a tree of 66 rows, want 1 to 65"),
    ):
        cache.verify_tree(list(range(66)), [-1, *[0] * 65])
