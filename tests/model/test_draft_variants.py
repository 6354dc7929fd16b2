"""Drafters with more than the plain network: reduced vocabularies, DFlash2, DSpark. Numbers are those of the packages
dflash (network, selector) and speculators (Markov and confidence heads)."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file
from support.gguf_edit import REMOVE, Tensors, edit_gguf
from support.goldens import GOLDENS, step_golden
from support.models import DRAFTERS, MODELS, quantize_gguf

import pydflash
from pydflash import EngineOptions, SamplingOptions

Target = Callable[[str], pydflash.TargetModel]
Drafter = Callable[[str], pydflash.DraftModel]
Path_ = Callable[[str], Path]
VARIANTS = ["reduced", "dflash2", "dspark", "dspark-speculators"]
STEPPED = ["d2-part", "ds-part"]


def forms_of(name: str) -> list[Path]:
    return [path for path in (DRAFTERS / name, DRAFTERS / f"{name}-bf16.gguf") if path.exists()]


def decode(
    target: pydflash.TargetModel,
    path: Path,
    options: SamplingOptions,
    *,
    tree: int = 0,
    min_chance: float = 0.0,
    width: int = 16,
) -> tuple[list[list[int]], list[list[int]]]:
    """Texts of the golden prompts, and how many tokens each step emitted."""
    texts, lengths = [], []
    with (
        pydflash.DraftModel.open(path, target, weights="f32") as drafter,
        pydflash.TargetCache(
            target,
            capacity=512,
            k_type="f32",
            v_type="f32",
            capture_layers=drafter.config.target_layer_ids,
            max_verify=max(17, tree + 1),
        ) as cache,
        pydflash.DraftContext(drafter) as context,
        pydflash.Decoder(cache, context) as decoder,
    ):
        decoder.set_min_chance(min_chance)
        for case in step_golden("d2-part")["cases"]:
            decoder.reset()
            decoder.begin(options, stop_ids=[])
            out, steps = list(decoder.prefill(case["prompt"], 64).tokens), []
            while len(out) < 64:
                step = decoder.step_tree(tree, 64 - len(out)) if tree else decoder.step(width, 64 - len(out))
                out += step.tokens
                steps.append(len(step.tokens))
            texts.append(out)
            lengths.append(steps)
    return texts, lengths


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_the_reference(f32_target: Target, name: str) -> None:
    """Logits, proposals and confidence, in every file form there is; the Markov head's part is in the logits."""
    target = f32_target("nano")
    with np.load(GOLDENS / f"block-{name}.npz") as golden:
        for path in forms_of(name):
            with (
                pydflash.DraftModel.open(path, target, weights="f32") as drafter,
                pydflash.TargetCache(
                    target, capacity=512, k_type="f32", v_type="f32", capture_layers=drafter.config.target_layer_ids
                ) as cache,
                pydflash.DraftContext(drafter, "f32", "f32") as context,
            ):
                cache.forward(golden["ids"], logits="none")
                features = cache.features(0, len(golden["ids"]))
                first = 0 if drafter.config.sample_from_anchor else 1
                assert drafter.config.n_proposals == golden["block_size"] - first
                for i, n in enumerate(golden["contexts"]):
                    context.reset()
                    context.append_host(features[:n], 0)
                    got = context.propose(int(golden["anchors"][i]), logits=True)
                    assert got.logits is not None
                    top = np.take_along_axis(got.logits, golden["top_ids"][i][first:], axis=-1)
                    assert np.abs(top - golden["top_logits"][i][first:]).max() <= 1e-3
                    columns = golden["column_logits"][i][first:]
                    assert np.abs(got.logits[:, golden["columns"]] - columns).max() <= 1e-3
                    np.testing.assert_array_equal(got.ids, golden["proposals"][i])
                    if drafter.config.heads.has_confidence:
                        assert got.chances is not None
                        np.testing.assert_allclose(got.chances, golden["confidence"][i], atol=1e-4)
                    else:
                        assert golden["confidence"].size == 0


def test_heads_are_told(f32_target: Target) -> None:
    heads = {}
    for name in VARIANTS:
        with pydflash.DraftModel.open(DRAFTERS / name, f32_target("nano")) as drafter:
            heads[name] = drafter.config.heads
    assert (heads["reduced"].n_vocab, heads["reduced"].says_chances) == (96, False)
    assert (heads["dflash2"].conv_kernel, heads["dflash2"].selector_top_k, heads["dflash2"].n_vocab) == (3, 4, 384)
    assert (heads["dspark"].markov_rank, heads["dspark"].has_confidence) == (16, True)
    assert (heads["dspark-speculators"].n_vocab, heads["dspark-speculators"].markov_rank) == (96, 16)


@pytest.mark.parametrize("name", STEPPED)
def test_steps_equal_the_reference(f32_target: Target, name: str) -> None:
    golden = step_golden(name)["cases"]
    texts, lengths = decode(f32_target("nano"), MODELS / f"{name}-bf16.gguf", SamplingOptions(temperature=0.0, seed=1))
    assert texts == [case["greedy"] for case in golden]
    assert lengths == [[produced for _, _, produced in case["steps"]] for case in golden]
    assert max(map(max, lengths)) > 4  # partial and long acceptance both occur
    assert min(map(min, lengths)) == 1


@pytest.mark.parametrize("name", [*STEPPED, *VARIANTS])
def test_variants_change_no_text(f32_target: Target, name: str) -> None:
    """Greedy and drawn; as chains, trees, and chains that the drafter itself ends early."""
    target = f32_target("nano")
    path = MODELS / f"{name}-bf16.gguf" if name in STEPPED else DRAFTERS / name
    for options in (SamplingOptions(temperature=0.0, seed=1), SamplingOptions(temperature=1.0, seed=5)):
        plain, _ = decode(target, path, options, width=1)
        assert decode(target, path, options)[0] == plain
        assert decode(target, path, options, tree=12)[0] == plain
        assert decode(target, path, options, min_chance=0.3)[0] == plain


@pytest.mark.parametrize("name", STEPPED)
def test_a_tree_follows_the_chain(f32_target: Target, name: str) -> None:
    """Its first path is the chain of proposals, scores are log-probabilities, and it accepts no less."""
    target = f32_target("nano")
    path, greedy = MODELS / f"{name}-bf16.gguf", SamplingOptions(temperature=0.0, seed=1)
    with (
        pydflash.DraftModel.open(path, target, weights="f32") as drafter,
        pydflash.TargetCache(
            target, capacity=512, k_type="f32", v_type="f32", capture_layers=drafter.config.target_layer_ids
        ) as cache,
        pydflash.DraftContext(drafter, "f32", "f32") as context,
    ):
        for case in step_golden(name)["cases"]:
            cache.reset()
            context.reset()
            cache.forward(np.array(case["prompt"]), logits="none")
            context.append(cache, 0, len(case["prompt"]))
            chain = context.propose(case["greedy"][0]).ids
            tree = context.propose_tree(case["greedy"][0], 16)
            np.testing.assert_array_equal(tree.tokens[1:5], chain[:4])  # a quarter of the nodes is the chain
            np.testing.assert_array_equal(tree.parents[1:5], range(4))
            assert (tree.scores[1:] <= 1e-5).all()
            for node in range(1, len(tree.tokens)):
                assert tree.scores[node] <= tree.scores[tree.parents[node]] + 1e-5
                siblings = tree.tokens[(tree.parents == tree.parents[node])]
                assert len(set(siblings.tolist())) == len(siblings)
    n_chain = sum(map(len, decode(target, path, greedy)[1]))
    n_tree = sum(map(len, decode(target, path, greedy, tree=22)[1]))
    assert n_tree <= n_chain


@pytest.mark.parametrize("name", STEPPED)
def test_chances_tell_right_from_wrong(f32_target: Target, name: str) -> None:
    """Ending chains by them verifies fewer proposals, of which more are right."""
    target, greedy = f32_target("nano"), SamplingOptions(temperature=0.0, seed=1)
    counts = []
    with (
        pydflash.DraftModel.open(MODELS / f"{name}-bf16.gguf", target, weights="f32") as drafter,
        pydflash.TargetCache(
            target, capacity=512, k_type="f32", v_type="f32", capture_layers=drafter.config.target_layer_ids
        ) as cache,
        pydflash.DraftContext(drafter) as context,
        pydflash.Decoder(cache, context) as decoder,
    ):
        for min_chance in (0.0, 0.3):
            proposed = accepted = 0
            decoder.set_min_chance(min_chance)
            for case in step_golden(name)["cases"]:
                decoder.reset()
                decoder.begin(greedy, stop_ids=[])
                n = len(decoder.prefill(case["prompt"], 64).tokens)
                while n < 64:
                    step = decoder.step(16, 64 - n)
                    n += len(step.tokens)
                    proposed, accepted = proposed + step.n_proposed, accepted + step.n_accepted
            counts.append((proposed, accepted))
        for wrong in (-0.1, 1.0, float("nan")):
            with pytest.raises(pydflash.InvalidArgumentError, match="min_chance"):
                decoder.set_min_chance(wrong)
    (all_proposed, all_accepted), (proposed, accepted) = counts
    assert proposed < 0.8 * all_proposed
    assert accepted >= 0.6 * all_accepted
    assert accepted / proposed > 1.2 * all_accepted / all_proposed


@pytest.mark.parametrize("quant", ["f16", "bf16", "q8_0", "q4_0"])
def test_dflash2_in_other_weight_types(f32_target: Target, tmp_path: Path, quant: str) -> None:
    """All numbers stay finite over many steps, and 16 bits accept as much as 32."""
    target, greedy = f32_target("nano"), SamplingOptions(temperature=0.0, seed=1)
    path = quantize_gguf(MODELS / "d2-part-bf16.gguf", tmp_path / "draft.gguf", quant)  # type: ignore[arg-type]
    exact = sum(map(len, decode(target, MODELS / "d2-part-bf16.gguf", greedy)[1]))
    texts, lengths = decode(target, path, greedy)
    assert texts == [case["greedy"] for case in step_golden("d2-part")["cases"]]
    if quant in ("f16", "bf16"):
        assert sum(map(len, lengths)) <= 1.05 * exact


def test_f16_is_refused_where_it_overflows(f32_target: Target, f32_path: Path_, tmp_path: Path) -> None:
    def blow_up(table: Tensors) -> None:
        data, kind = table["blk.1.ffn_conv_proj.weight"]
        data = data.copy()
        data[0, 0] = 70000.0
        table["blk.1.ffn_conv_proj.weight"] = (data, kind)

    path = edit_gguf(f32_path("d2-part"), tmp_path / "large.gguf", tensors=blow_up)
    with pytest.raises(pydflash.UnsupportedModelError, match=r"ffn_conv_proj.weight holds 70000, f16 ends at 65504"):
        pydflash.DraftModel.open(path, f32_target("nano"), weights="f16")
    pydflash.DraftModel.open(path, f32_target("nano"), weights="bf16").close()


def test_broken_numbers_are_an_error(f32_target: Target, f32_path: Path_, tmp_path: Path) -> None:
    """An argmax over NaN is a token; the selector's chances give it away."""

    def break_it(table: Tensors) -> None:
        data, kind = table["selector_hidden.weight"]
        table["selector_hidden.weight"] = (np.full_like(data, np.nan), kind)

    path = edit_gguf(f32_path("d2-part"), tmp_path / "nan.gguf", tensors=break_it)
    target = f32_target("nano")
    with pydflash.DraftModel.open(path, target) as drafter, pydflash.DraftContext(drafter) as context:
        context.append_host(np.ones((4, 128), np.float32), 0)
        with pytest.raises(pydflash.PydflashError, match="numbers are broken"):
            context.propose(3)


def with_tensor(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensors], None]:
    def edit(table: Tensors) -> None:
        data, kind = table[name]
        table[name] = (change(np.array(data)), kind)

    return edit


def cut(data: np.ndarray) -> np.ndarray:
    return data[:-1]


@pytest.mark.parametrize(
    ("file", "keys", "tensors", "words"),
    [
        ("d2-part", {"dflash.selector_rank": REMOVE}, None, "selector_rank"),
        (
            "d2-part",
            {"dflash.selector_rank": 16},
            None,
            r"predecessor.weight is \[32, 384\], want \[16, 384\]",
        ),
        ("d2-part", {"dflash.selector_top_k": 0}, None, "selector_top_k"),
        ("d2-part", {"dflash.selector_top_k": 65}, None, "selector_top_k.*65"),
        ("d2-part", {"dflash.conv_group_size": 48}, None, "conv_group_size 48 does not divide the width 64"),
        ("d2-part", {"dflash.conv_kernel_size": 2}, None, r"attn_conv_base is \[64, 3, 2\], want \[64, 2, 2\]"),
        ("d2-part", {"dflash.conv_kernel_size": 17}, None, "conv_kernel_size.*17"),
        ("d2-part", {"dflash.sample_from_anchor": True}, None, "sample_from_anchor"),
        ("d2-part", {}, with_tensor("selector_successor.weight", cut), r"selector_successor.weight is \[32, 383\]"),
        ("ds-part", {}, with_tensor("markov_w1.weight", cut), r"markov_w1.weight is \[16, 383\], want \[16, 384\]"),
        ("ds-part", {}, with_tensor("markov_w2.weight", cut), r"markov_w2.weight is \[16, 383\], want \[16, 384\]"),
        ("ds-part", {}, with_tensor("conf_proj.weight", lambda w: w[:, :-1]), r"conf_proj.weight is \[79, 1\]"),
        ("ds-part", {}, lambda table: table.pop("markov_w2.weight"), "markov_w2.weight is missing"),
        ("ds-part", {}, lambda table: table.pop("conf_proj.weight"), "conf_proj.weight is missing"),
        ("ds-part", {}, lambda table: table.pop("markov_w1.weight"), "confidence head without a Markov head"),
        ("ds-part", {"dflash.logit_scale": -1.0}, None, "logit scale"),
        ("d-part", {"dflash.attention.scale": 0.5}, None, "attention scale"),
        ("d-part", {"dflash.attention.value_scale": 0.5}, None, "value scale"),
    ],
)
def test_wrong_heads_are_named(
    f32_path: Path_,
    f32_target: Target,
    tmp_path: Path,
    file: str,
    keys: dict[str, object],
    tensors: Callable[[Tensors], None] | None,
    words: str,
) -> None:
    path = edit_gguf(f32_path(file), tmp_path / "wrong.gguf", keys, tensors)
    with pytest.raises((pydflash.FormatError, pydflash.UnsupportedModelError), match=words):
        pydflash.DraftModel.open(path, f32_target("nano"))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("blk.0.attn_gate.weight", "a gate on the attention output"),
        ("dflash.aux_hidden_norm.0.weight", "a norm for each layer's features"),
        ("blk.0.attn_sinks.weight", "attention sinks"),
    ],
)
def test_parts_without_a_reference_are_refused(
    f32_path: Path_, f32_target: Target, tmp_path: Path, name: str, what: str
) -> None:
    one = (np.ones(4, np.float32), gguf.GGMLQuantizationType.F32)
    path = edit_gguf(f32_path("d-part"), tmp_path / "extra.gguf", tensors=lambda table: table.update({name: one}))
    with pytest.raises(pydflash.UnsupportedModelError, match=f"{name}: drafters with {what} are not supported"):
        pydflash.DraftModel.open(path, f32_target("nano"))


def folder_with(
    name: str, out: Path, keys: dict[str, object], change: Callable[[dict[str, np.ndarray]], object] | None = None
) -> Path:
    """A drafter's folder with keys of config.json and tensors changed, widened to float32."""
    out.mkdir()
    config = json.loads((DRAFTERS / name / "config.json").read_text(encoding="utf-8"))
    (out / "config.json").write_text(json.dumps(config | keys), encoding="utf-8")
    raw = (DRAFTERS / name / "model.safetensors").read_bytes()
    n = int.from_bytes(raw[:8], "little")
    tensors = {}
    for tensor, info in json.loads(raw[8 : 8 + n]).items():
        if tensor == "__metadata__":
            continue
        begin, end = (8 + n + offset for offset in info["data_offsets"])
        if info["dtype"] == "BF16":
            values = (np.frombuffer(raw[begin:end], np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(raw[begin:end], {"I64": np.int64, "BOOL": np.bool_}[info["dtype"]])
        tensors[tensor] = values.reshape(info["shape"]).copy()
    if change is not None:
        change(tensors)
    save_file(tensors, out / "model.safetensors")
    return out


def shift(index: int, by: int) -> Callable[[dict[str, np.ndarray]], object]:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["d2t"][index] += by

    return change


@pytest.mark.parametrize(
    ("name", "keys", "change", "words"),
    [
        ("reduced", {}, shift(95, 1000), r"d2t maps 95 to \d+, want 0 to 383"),
        ("reduced", {}, shift(0, -1000), "d2t maps 0 to -"),
        ("reduced", {}, lambda t: t.update(d2t=t["d2t"] * 0 - np.arange(96) + 7), "d2t maps both 0 and 1 to 7"),
        ("reduced", {}, lambda t: t.update(t2d=~t["t2d"]), "t2d says"),
        ("reduced", {}, lambda t: t.update(t2d=t["t2d"][:-1]), r"t2d is \[383\], want \[384\]"),
        ("reduced", {}, lambda t: t.update(d2t=t["d2t"][:-1]), r"d2t is \[95\], want \[96\]"),
        ("reduced", {}, lambda t: t.pop("lm_head.weight"), "d2t map without an output head"),
        ("reduced", {}, lambda t: t.pop("d2t"), "there is no d2t map"),
        ("reduced", {"draft_vocab_size": 95}, None, "draft_vocab_size 95, the head has 96"),
        ("reduced", {"draft_vocab_size": 500}, None, "draft_vocab_size 500, want at most vocab_size 384"),
        ("dspark", {"markov_head_type": "gated"}, None, "gated"),
        ("dspark", {"markov_rank": 8}, None, "rank 16, want 8"),
        ("dspark", {"architectures": ["Lfm2DSparkDraftModel"]}, None, "Lfm2DSparkDraftModel"),
        ("dflash2", {"rope_is_neox_style": False}, None, "interleaved"),
        ("dflash2", {"dflash_config": {"mask_token_id": 381, "target_layer_ids": [0, 2]}}, None, "conv_kernel_size"),
    ],
)
def test_wrong_folders_are_named(
    f32_target: Target,
    tmp_path: Path,
    name: str,
    keys: dict[str, object],
    change: Callable[[dict[str, np.ndarray]], object] | None,
    words: str,
) -> None:
    folder = folder_with(name, tmp_path / "wrong", keys, change)
    with pytest.raises(pydflash.PydflashError, match=words):
        pydflash.DraftModel.open(folder, f32_target("nano"))


def test_the_chain_starts_where_the_file_says(f32_target: Target, f32_path: Path_, tmp_path: Path) -> None:
    """A block read from the wrong row is accepted far less; the text is the same."""
    target, greedy = f32_target("nano"), SamplingOptions(temperature=0.0, seed=1)
    right_texts, right = decode(target, f32_path("ds-part"), greedy)
    wrong = edit_gguf(f32_path("ds-part"), tmp_path / "wrong.gguf", {"dflash.sample_from_anchor": False})
    wrong_texts, lengths = decode(target, wrong, greedy)
    assert wrong_texts == right_texts
    assert sum(map(len, lengths)) > 1.3 * sum(map(len, right))


@pytest.mark.parametrize("name", STEPPED)
def test_the_engine_ends_chains_by_chances(
    f32_target: Target, f32_drafter: Drafter, prompts: list[list[int]], name: str
) -> None:
    """With dear rows the policy lets the drafter end chains; the text is that of plain decoding."""
    options = EngineOptions(
        n_ctx=512, k_type="f32", v_type="f32", draft_k_type="f32", draft_v_type="f32", n_threads=1, max_verify=16
    )
    with pydflash.Engine.open(f32_target("nano"), f32_drafter(name), options) as engine:
        policy = engine.width_policy
        assert policy is not None
        for ids in prompts[:2]:
            plain = engine.generate(ids, SamplingOptions(max_tokens=64, width=1, temperature=0.0))
            for width in policy.widths:
                for _ in range(30):  # nearly free up to four rows, dear beyond
                    policy.measured(width, 1.0 if width <= 4 else 1.0 + 0.05 * width)
            ours = engine.generate(ids, SamplingOptions(max_tokens=64, temperature=0.0))
            assert ours.token_ids == plain.token_ids
            assert ours.stats.proposed > 0
            fixed = engine.generate(ids, SamplingOptions(max_tokens=64, width=8, temperature=0.0))
            assert fixed.token_ids == plain.token_ids
            assert set(fixed.stats.widths) - {8} <= {1, 2, 3, 4, 5, 6, 7}  # only the end of the budget is narrower
            assert fixed.stats.widths[8] >= 5
