"""What drafter files load, what is refused with which words, and that wrong settings cost acceptance."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.gguf_edit import REMOVE, Tensors, edit_gguf
from support.goldens import step_golden
from support.models import DRAFTERS

import pydflash
from pydflash import SamplingOptions

Path_ = Callable[[str], Path]
Target = Callable[[str], pydflash.TargetModel]


def mean_accepted_length(target: pydflash.TargetModel, path: Path, full_rows: int = 8192) -> tuple[float, list[int]]:
    emitted, steps, tokens = 0, 0, []
    with (
        pydflash.DraftModel.open(path, target) as drafter,
        pydflash.TargetCache(
            target, capacity=512, k_type="f32", v_type="f32", capture_layers=drafter.config.target_layer_ids
        ) as cache,
        pydflash.DraftContext(drafter, full_rows=full_rows) as context,
        pydflash.Decoder(cache, context) as decoder,
    ):
        for case in step_golden("d-part")["cases"]:
            decoder.reset()
            decoder.begin(SamplingOptions(temperature=0.0, seed=1), stop_ids=[])
            out = list(decoder.prefill(case["prompt"], 64).tokens)
            while len(out) < 64:
                step = decoder.step(8, 64 - len(out))
                out += step.tokens
                emitted += len(step.tokens)
                steps += 1
            tokens += out
    return emitted / steps, tokens


def test_every_missing_misshapen_or_unknown_tensor_is_named(
    f32_path: Path_, f32_target: Target, tmp_path: Path
) -> None:
    source, target = f32_path("d-part"), f32_target("nano")
    for tensor in gguf.GGUFReader(source).tensors:
        name = tensor.name
        path = edit_gguf(source, tmp_path / "missing.gguf", tensors=lambda table, name=name: table.pop(name))  # type: ignore[misc]
        with pytest.raises(pydflash.FormatError, match=f"{name} is missing"):
            pydflash.DraftModel.open(path, target)

        def grow(table: Tensors, name: str = name) -> None:
            data, kind = table[name]
            table[name] = (np.concatenate([data, data[:1]]), kind)

        path = edit_gguf(source, tmp_path / "grown.gguf", tensors=grow)
        with pytest.raises(pydflash.FormatError, match=f"{name} is .* want"):
            pydflash.DraftModel.open(path, target)
    one = (np.ones(4, np.float32), gguf.GGMLQuantizationType.F32)
    for name in ("blk.0.attn_gate.weight", "blk.7.attn_q.weight", "dflash.aux_hidden_norm.0.weight", "extra"):
        path = edit_gguf(source, tmp_path / "extra.gguf", tensors=lambda table, name=name: table.update({name: one}))  # type: ignore[misc]
        with pytest.raises(pydflash.UnsupportedModelError, match=name):
            pydflash.DraftModel.open(path, target)


@pytest.mark.parametrize(
    ("key", "value", "error", "words"),
    [
        ("dflash.rope.freq_base", 0.0, pydflash.FormatError, "freq_base"),
        ("dflash.rope.freq_base", float("nan"), pydflash.FormatError, "freq_base"),
        ("dflash.rope.freq_base", REMOVE, pydflash.FormatError, "freq_base"),
        ("tokenizer.ggml.mask_token_id", REMOVE, pydflash.FormatError, "mask token"),
        ("tokenizer.ggml.mask_token_id", 100000, pydflash.PydflashError, "mask token id 100000"),
        ("dflash.target_layers", REMOVE, pydflash.FormatError, "target_layers"),
        ("dflash.target_layers", [1, 3, 99], pydflash.PydflashError, "98"),
        ("dflash.target_layers", [3, 2, 1], pydflash.FormatError, "increasing"),
        ("dflash.attention.head_count_kv", 1, pydflash.FormatError, "attn_k"),
        ("dflash.block_size", 1, pydflash.FormatError, "block_size"),
        ("dflash.selector_rank", 4, pydflash.FormatError, "conv_kernel_size"),
        ("dflash.hidden_activation", "gelu", pydflash.UnsupportedModelError, "gelu"),
    ],
)
def test_wrong_keys_are_named(
    f32_path: Path_, f32_target: Target, tmp_path: Path, key: str, value: object, error: type[Exception], words: str
) -> None:
    path = edit_gguf(f32_path("d-part"), tmp_path / "wrong.gguf", {key: value})
    with pytest.raises(error, match=words):
        pydflash.DraftModel.open(path, f32_target("nano"))


def test_drafter_of_another_target(f32_path: Path_) -> None:
    with (
        pydflash.TargetModel.open(None, n_threads=1) as built_in,
        pytest.raises(pydflash.PydflashError, match="width 64, the target has 256"),
    ):
        pydflash.DraftModel.open(f32_path("d-part"), built_in)


def test_folder_without_weights(tmp_path: Path, f32_target: Target) -> None:
    with pytest.raises(pydflash.NotFoundError, match=r"config\.json"):
        pydflash.DraftModel.open(tmp_path, f32_target("nano"))
    (tmp_path / "config.json").write_text((DRAFTERS / "full" / "config.json").read_text())
    with pytest.raises(pydflash.NotFoundError, match="safetensors"):
        pydflash.DraftModel.open(tmp_path, f32_target("nano"))


def test_the_shipped_settings_are_the_best(f32_path: Path_, f32_target: Target, tmp_path: Path) -> None:
    """Feature layers off by one, another mask id, another rope base: still lossless, but fewer tokens a step."""
    source, target = f32_path("d-part"), f32_target("nano")
    best, tokens = mean_accepted_length(target, source)
    reader = gguf.GGUFReader(source)
    taps = [int(v) for v in reader.fields["dflash.target_layers"].contents()]
    perturbed: list[dict[str, object]] = [
        {"dflash.target_layers": [t + 1 if t == max(taps) else t for t in taps]},
        {"dflash.target_layers": [max(1, taps[0] - 1) if i == 0 and taps[0] > 1 else t for i, t in enumerate(taps)]},
        {"tokenizer.ggml.mask_token_id": 0},
    ]
    for keys in perturbed:
        if keys.get("dflash.target_layers") == taps:
            continue
        length, got = mean_accepted_length(target, edit_gguf(source, tmp_path / "off.gguf", keys))
        assert got == tokens
        assert length < best - 0.3, keys


def test_short_draft_context_slides(f32_path: Path_, f32_target: Target) -> None:
    """A drafter that remembers less than the context goes on at its limit; the text stays the same."""
    long, tokens = mean_accepted_length(f32_target("nano"), f32_path("d-part"))
    short, got = mean_accepted_length(f32_target("nano"), f32_path("d-part"), full_rows=1)
    assert got == tokens
    assert short > 1.0
    assert long >= short - 1.0


def test_reduced_vocabulary_head(f32_path: Path_, f32_target: Target, tmp_path: Path) -> None:
    """A drafter with its own head over some of the tokens proposes through its map, not through the target's head."""
    source, target = f32_path("d-part"), f32_target("nano")
    best, tokens = mean_accepted_length(target, source)
    head = {t.name: np.array(t.data) for t in gguf.GGUFReader(f32_path("nano")).tensors}["output.weight"]
    used = np.array(sorted(set(tokens)), np.int64)
    order = np.random.default_rng(0).permutation(used)

    def add(table: Tensors) -> None:
        table["output.weight"] = (head[order], gguf.GGMLQuantizationType.F32)
        table["d2t"] = (order, gguf.GGMLQuantizationType.I64)

    path = edit_gguf(source, tmp_path / "reduced.gguf", {"dflash.vocab_size": REMOVE}, add)
    length, got = mean_accepted_length(target, path)
    assert got == tokens
    assert length >= best - 0.05
    with pydflash.DraftModel.open(path, target) as drafter:
        assert drafter.config.has_own_head

    def lie(table: Tensors) -> None:
        add(table)
        table["d2t"] = (order + 1000, gguf.GGMLQuantizationType.I64)

    with pytest.raises(pydflash.FormatError, match="d2t maps"):
        pydflash.DraftModel.open(edit_gguf(source, tmp_path / "lie.gguf", tensors=lie), target)


def test_context_is_f32_on_a_cpu(f32_path: Path_, f32_target: Target) -> None:
    with pydflash.DraftModel.open(f32_path("d-swa"), f32_target("nano")) as drafter:
        sizes = {}
        for kind in ("auto", "f32", "f16"):
            with pydflash.DraftContext(drafter, kind, kind) as context:  # type: ignore[arg-type]
                sizes[kind] = context.state.memory_bytes
        assert sizes["auto"] == sizes["f32"] == 2 * sizes["f16"]


def test_windowed_drafter_memory_does_not_grow(f32_path: Path_, f32_target: Target) -> None:
    """Rows of sliding layers: window, block and slack; the option for full layers is theirs alone."""
    with pydflash.DraftModel.open(f32_path("d-swa"), f32_target("nano")) as drafter:
        assert drafter.config.windows[0] > 0
        sizes = []
        for rows in (512, 4096):
            with pydflash.DraftContext(drafter, "f16", "f16", full_rows=rows) as context:
                sizes.append(context.state.memory_bytes)
        n_full = sum(1 for window in drafter.config.windows if window == 0)
        row = 2 * 2 * drafter.config.n_head_kv * drafter.config.head_dim
        assert sizes[1] - sizes[0] == n_full * row * (4096 - 512)


@pytest.mark.parametrize("device", ["cpu"])
def test_drafter_on_another_device(f32_path: Path_, f32_target: Target, device: str) -> None:
    """Features travel through the mirror; another Device counts as another device even on one CPU."""
    target = f32_target("nano")
    cases = step_golden("d-part")["cases"]
    with (
        pydflash.DraftModel.open(f32_path("d-part"), target, device=device) as drafter,
        pydflash.TargetCache(
            target, capacity=512, k_type="f32", v_type="f32", capture_layers=drafter.config.target_layer_ids
        ) as cache,
        pydflash.DraftContext(drafter) as context,
    ):
        with pytest.raises(pydflash.PydflashError, match="needs a feature mirror"):
            pydflash.Decoder(cache, context)
        for dtype in ("f32", "q8_0"):
            with (
                pydflash.DraftFeatureMirror(drafter, capacity=256, dtype=dtype) as mirror,  # type: ignore[arg-type]
                pydflash.Decoder(cache, context, mirror) as decoder,
            ):
                accepted = 0
                for case in cases:
                    decoder.reset()
                    decoder.begin(SamplingOptions(temperature=0.0, seed=1), stop_ids=[])
                    out = list(decoder.prefill(case["prompt"], 64).tokens)
                    while len(out) < 64:
                        step = decoder.step(8, 64 - len(out))
                        out += step.tokens
                        accepted += step.n_accepted
                    assert out == case["greedy"]
                assert accepted > 20
