"""scripts/make_random_pair.py: its blocks mean what they should, and its pairs accept what they promise, here and in
llama.cpp."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

import pydflash
from pydflash.text import Tokenizer

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SIZES = ["tiny", "tiny-moe", "tiny-tied"]
FAVOURITE = "x"
PROMPT = np.random.default_rng(1).integers(257, 1000, 40).astype(np.int32)
N_NEW = 64


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """The script's modules, which import each other by bare names."""
    names = ("pair_blocks", "pair_sizes", "make_random_pair")
    sys.path.insert(0, str(SCRIPTS))
    try:
        yield {name: __import__(name) for name in names}
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def pairs(scripts: dict[str, ModuleType], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with a target, drafters that always and never agree with it, and a windowed one."""
    folders = {}
    for size in SIZES:
        folders[size] = tmp_path_factory.mktemp(size)
        paths = scripts["make_random_pair"].make_pair(folders[size], size, ["all", "none"], [0, 16])
        names = ["target", "draft-all", "draft-all-w16", "draft-none", "draft-none-w16"]
        assert [path.name for path in paths] == [f"{name}.gguf" for name in names]
    return folders


def decode(
    folder: Path, draft: str, width: int, sampling: pydflash.SamplingOptions | None = None, n_new: int = N_NEW
) -> tuple[list[int], pydflash.DecoderStats]:
    """Ids emitted behind PROMPT, and what became of the proposals."""
    with (
        pydflash.TargetModel.open(folder / "target.gguf", n_threads=1) as target,
        pydflash.DraftModel.open(folder / f"{draft}.gguf", target) as model,
        pydflash.TargetCache(target, 1024, capture_layers=model.config.target_layer_ids) as cache,
        pydflash.DraftContext(model) as context,
        pydflash.Decoder(cache, context) as decoder,
    ):
        decoder.begin(sampling or pydflash.SamplingOptions(), [])
        ids = list(decoder.prefill(PROMPT, n_new).tokens)
        while len(ids) < n_new:
            ids += decoder.step(width, n_new - len(ids)).tokens
        return ids, decoder.stats


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("std", [0.001, 0.02, 1.0])
def test_random_blocks_have_the_wanted_spread(scripts: dict[str, ModuleType], name: str, std: float) -> None:
    qtype = GGMLQuantizationType[name]
    blocks = scripts["pair_blocks"].random_blocks(qtype, 600, std, np.random.default_rng(0))
    assert blocks.shape == (600, GGML_QUANT_SIZES[qtype][1])
    values = dequantize(blocks, qtype)
    assert values.std() == pytest.approx(std, rel=0.04)
    assert abs(values.mean()) < 0.03 * std


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0"])
def test_blocks_without_spread_are_zero_but_not_empty(scripts: dict[str, ModuleType], name: str) -> None:
    qtype = GGMLQuantizationType[name]
    blocks = scripts["pair_blocks"].random_blocks(qtype, 8, 0.0, np.random.default_rng(0))
    assert not dequantize(blocks, qtype).any()
    assert blocks.any()


def test_a_spread_that_the_type_cannot_hold_is_refused(scripts: dict[str, ModuleType]) -> None:
    for std in (1e-7, 1e9):
        with pytest.raises(ValueError, match="outside the range of Q4_K"):
            scripts["pair_blocks"].random_blocks(GGMLQuantizationType.Q4_K, 8, std, np.random.default_rng(0))


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_sign_blocks(scripts: dict[str, ModuleType], name: str) -> None:
    qtype = GGMLQuantizationType[name]
    signs = np.random.default_rng(2).integers(0, 2, 1024).astype(bool)
    blocks, amplitude = scripts["pair_blocks"].sign_blocks(qtype, signs, 16.0)
    assert amplitude == pytest.approx(16.0, rel=1e-3)
    np.testing.assert_allclose(dequantize(blocks, qtype).reshape(-1), np.where(signs, amplitude, -amplitude), rtol=1e-3)


def test_a_tile_never_repeats_a_row(scripts: dict[str, ModuleType]) -> None:
    row = 20
    n = scripts["pair_sizes"].next_coprime_prime(100, row)
    assert n == 101
    units = np.arange(n, dtype=np.uint8).reshape(n, 1)
    tile = scripts["pair_blocks"].Tile(units)
    first = scripts["pair_blocks"].gather(tile.take(row * 60)).reshape(60, row)
    second = scripts["pair_blocks"].gather(tile.take(row * 40)).reshape(40, row)
    rows = np.concatenate([first, second])
    assert len({bytes(r) for r in rows}) == 100
    assert second[0, 0] == (first[-1, -1] + 1) % n


def test_published_sizes(scripts: dict[str, ModuleType]) -> None:
    target, draft = scripts["pair_sizes"].SIZES["27B"]
    assert target.rope_sections == [11, 11, 10, 0]
    assert target.conv_channels == 10240
    assert draft.taps(target.n_layer) == [1, 16, 31, 46, 61]
    kinds = [target.is_recurrent(i) for i in range(target.n_layer)]
    assert (kinds.count(True), kinds.count(False)) == (48, 16)


@pytest.mark.parametrize("size", SIZES)
def test_geometry_is_read_back(scripts: dict[str, ModuleType], pairs: dict[str, Path], size: str) -> None:
    wanted, wanted_draft = scripts["pair_sizes"].SIZES[size]
    with pydflash.TargetModel.open(pairs[size] / "target.gguf", n_threads=1) as target:
        config = target.config
        assert config.architecture == wanted.architecture
        assert (config.n_layer, config.n_embd, config.n_vocab) == (wanted.n_layer, wanted.n_embd, wanted.n_vocab)
        assert (config.n_head, config.n_head_kv, config.head_dim) == (4, 2, 64)
        assert config.conv_channels == wanted.conv_channels
        assert (config.n_expert, config.n_expert_used) == (wanted.n_expert, wanted.n_expert_used)
        tokenizer = Tokenizer.from_metadata(target.metadata)
        assert tokenizer.decode(tokenizer.encode("the x\n")) == "the x\n"
        assert config.mask_token_id == tokenizer.mask_id == wanted.n_vocab - 1
        assert tokenizer.id_of("<|im_end|>") in target.stop_ids
        with pydflash.DraftModel.open(pairs[size] / "draft-all-w16.gguf", target) as draft:
            assert draft.config.target_layer_ids == (1, 2, 3, 4, 5)
            assert draft.config.windows == (16, 0)
            assert draft.config.block_size == wanted_draft.block_size
            assert draft.config.form == "llama.cpp"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("draft", ["draft-all", "draft-all-w16"])
def test_every_proposal_is_accepted(pairs: dict[str, Path], size: str, draft: str) -> None:
    ids, stats = decode(pairs[size], draft, width=16)
    assert stats.accepted == stats.proposed > 0
    assert stats.steps == -(-(N_NEW - 1) // 16)
    assert len(set(ids)) == 1


@pytest.mark.parametrize("size", SIZES)
def test_no_proposal_is_accepted(pairs: dict[str, Path], size: str) -> None:
    ids, stats = decode(pairs[size], "draft-none", width=8)
    assert stats.accepted == 0
    assert stats.steps == N_NEW - 1
    assert ids == decode(pairs[size], "draft-all", width=1)[0]


@pytest.mark.parametrize("size", ["tiny", "tiny-tied"])
def test_a_rate_is_that_of_the_first_slot(scripts: dict[str, ModuleType], tmp_path: Path, size: str) -> None:
    scripts["make_random_pair"].make_pair(tmp_path, size, ["0.6"], [0])
    accepted = proposed = 0
    for seed in range(2):
        sampling = pydflash.SamplingOptions(temperature=1.0, seed=seed)
        _, stats = decode(tmp_path, "draft-0.6", width=2, sampling=sampling, n_new=400)
        accepted, proposed = accepted + stats.accepted_by_slot[0], proposed + stats.proposed_by_slot[0]
    four_sigma = 4 * np.sqrt(0.6 * 0.4 / proposed)
    assert abs(accepted / proposed - 0.6) < four_sigma < 0.1
    assert decode(tmp_path, "draft-0.6", width=16)[1].accepted > 0


def test_an_ordinary_pair_says_something_else_at_each_position(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    scripts["make_random_pair"].make_pair(tmp_path, "tiny", ["all"], [0], degenerate=False)
    with (
        pydflash.TargetModel.open(tmp_path / "target.gguf", n_threads=1) as target,
        pydflash.TargetCache(target, 256, capture_layers=()) as cache,
    ):
        logits = cache.forward(PROMPT, logits="all").logits
    assert len(set(logits.argmax(-1).tolist())) > len(PROMPT) // 2
    assert 1.0 < logits.std() < 6.0
    assert np.isfinite(logits).all()


def test_the_same_seed_gives_the_same_bytes(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    made = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        paths = scripts["make_random_pair"].make_pair(tmp_path / name, "tiny", ["all"], [0], seed=seed)
        made[name] = [path.read_bytes() for path in paths]
    assert made["a"] == made["b"]
    assert made["a"][0] != made["c"][0]
    assert made["a"][1] != made["c"][1]


@pytest.mark.parametrize("size", SIZES)
def test_llama_cpp_accepts_the_same(pairs: dict[str, Path], size: str) -> None:
    sys.path.insert(0, str(SCRIPTS / "oracles"))
    try:
        from server_peer import LlamaServer
    finally:
        sys.path.remove(str(SCRIPTS / "oracles"))
    counts = {}
    for draft in ("draft-all", "draft-none"):
        server = LlamaServer(str(pairs[size] / "target.gguf"), str(pairs[size] / f"{draft}.gguf"), context=256)
        answer = server.complete(PROMPT.tolist(), N_NEW)
        assert answer["content"] == FAVOURITE * N_NEW
        counts[draft] = (answer["timings"]["draft_n"], answer["timings"]["draft_n_accepted"])
    assert counts["draft-all"][0] == counts["draft-all"][1] > 0
    assert counts["draft-none"][0] > 0
    assert counts["draft-none"][1] == 0


@pytest.mark.parametrize("words", [["--acceptance", "some"], ["--acceptance", "1.5"], ["--size", "3B"]])
def test_bad_arguments_are_refused(tmp_path: Path, words: list[str]) -> None:
    command = [sys.executable, str(SCRIPTS / "make_random_pair.py"), str(tmp_path / "pair"), "--size", "tiny", *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert words[1] in done.stderr
    assert not (tmp_path / "pair").exists()


def test_command_line_writes_what_it_says(tmp_path: Path) -> None:
    script = str(SCRIPTS / "make_random_pair.py")
    options = ["--size", "tiny", "--acceptance", "none", "--mix", "q4_k_s", "--gate-type", "f32"]
    done = subprocess.run([sys.executable, script, str(tmp_path), *options], check=True, capture_output=True, text=True)
    assert {path.name for path in tmp_path.iterdir()} == {"target.gguf", "draft-none.gguf"}
    assert "draft-none.gguf: 0.00" in done.stdout
    with pydflash.GgufFile.open(tmp_path / "target.gguf") as file:
        types = {tensor.name: tensor.type for tensor in file.tensors}
    assert types["blk.0.ssm_alpha.weight"] == "f32"
    assert {types[f"blk.{i}.ffn_down.weight"] for i in range(8)} == {"q4_K"}
