"""What target files load, and what is refused with which words."""

import logging
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.gguf_edit import REMOVE, Tensors, edit_gguf
from support.goldens import target_golden

import pydflash

Path_ = Callable[[str], Path]
F32 = gguf.GGMLQuantizationType.F32


def logits_of(path: Path, ids: np.ndarray) -> np.ndarray:
    with (
        pydflash.TargetModel.open(path, n_threads=1) as model,
        pydflash.TargetCache(model, capacity=256, k_type="f32", v_type="f32") as cache,
    ):
        return cache.forward(ids, logits="all").logits


def full_layers(path: Path) -> list[int]:
    with pydflash.TargetModel.open(path, n_threads=1) as model:
        return [i for i, kind in enumerate(model.config.layer_kinds) if kind == "attention"]


def test_fused_projection_of_full_attention(f32_path: Path_, tmp_path: Path) -> None:
    source = f32_path("dense")
    layers = full_layers(source)

    def fuse(table: Tensors) -> None:
        for layer in layers:
            parts = [table.pop(f"blk.{layer}.attn_{which}.weight")[0] for which in "qkv"]
            table[f"blk.{layer}.attn_qkv.weight"] = (np.concatenate(parts), F32)

    ids = target_golden("dense").ids[0]
    fused = edit_gguf(source, tmp_path / "fused.gguf", tensors=fuse)
    np.testing.assert_allclose(logits_of(fused, ids), logits_of(source, ids), atol=1e-5)


@pytest.mark.parametrize("suffix", [".scale", ".weight.scale"])
def test_weight_scales(f32_path: Path_, tmp_path: Path, suffix: str) -> None:
    """Every matrix halved, its scale 2: the same logits. The head's scale counts too."""
    source = f32_path("dense")

    def scale(table: Tensors) -> None:
        for name in list(table):
            data, kind = table[name]
            base = name.removesuffix(".weight")
            if data.ndim == 2 and base != "token_embd" and "conv1d" not in base:
                table[name] = (data / np.float32(2), kind)
                table[base + suffix] = (np.array([2.0], np.float32), F32)

    ids = target_golden("dense").ids[0]
    scaled = edit_gguf(source, tmp_path / "scaled.gguf", tensors=scale)
    np.testing.assert_allclose(logits_of(scaled, ids), logits_of(source, ids), atol=1e-4)


def test_expert_scale_vectors(f32_path: Path_, tmp_path: Path) -> None:
    source = f32_path("moe")

    def scale(table: Tensors) -> None:
        for name in list(table):
            if name.endswith("_exps.weight"):
                data, kind = table[name]
                factors = np.linspace(0.5, 2.0, data.shape[0], dtype=np.float32)
                table[name] = (data / factors[:, None, None], kind)
                table[name.removesuffix(".weight") + ".scale"] = (factors, F32)

    ids = target_golden("moe").ids[0]
    scaled = edit_gguf(source, tmp_path / "scaled.gguf", tensors=scale)
    np.testing.assert_allclose(logits_of(scaled, ids), logits_of(source, ids), atol=2e-3)


def test_expert_weights_that_are_not_to_be_normed_are_refused(f32_path: Path_, tmp_path: Path) -> None:
    source = f32_path("moe")
    ids = target_golden("moe").ids[0]
    usual = edit_gguf(source, tmp_path / "usual.gguf", {"qwen35moe.expert_weights_norm": True})
    np.testing.assert_array_equal(logits_of(usual, ids), logits_of(source, ids))
    other = edit_gguf(source, tmp_path / "other.gguf", {"qwen35moe.expert_weights_norm": False})
    with pytest.raises(pydflash.UnsupportedModelError, match="expert_weights_norm is false, want true"):
        logits_of(other, ids)


def test_layer_kinds_from_the_list_win_over_the_interval(f32_path: Path_, tmp_path: Path) -> None:
    source = f32_path("nano")
    ids = target_golden("nano").ids[0]
    wanted = logits_of(source, ids)
    by_list = edit_gguf(source, tmp_path / "list.gguf", {"qwen35.full_attention_interval": 3})
    np.testing.assert_array_equal(logits_of(by_list, ids), wanted)
    by_interval = edit_gguf(source, tmp_path / "interval.gguf", {"qwen35.attention.recurrent_layers": REMOVE})
    np.testing.assert_array_equal(logits_of(by_interval, ids), wanted)


def test_split_file(f32_path: Path_, tmp_path: Path) -> None:
    source = f32_path("nano")
    edit_gguf(source, tmp_path / "nano.gguf", split_max_tensors=20)
    parts = sorted(tmp_path.glob("nano-*.gguf"))
    assert len(parts) > 1
    ids = target_golden("nano").ids[0]
    for part in (parts[0], parts[-1]):
        np.testing.assert_array_equal(logits_of(part, ids), logits_of(source, ids))
    parts[1].unlink()
    with pytest.raises(pydflash.NotFoundError, match=parts[1].name):
        pydflash.TargetModel.open(parts[0])


def test_missing_end_token(f32_path: Path_, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = edit_gguf(f32_path("nano"), tmp_path / "no-eos.gguf", {"tokenizer.ggml.eos_token_id": REMOVE})
    with caplog.at_level(logging.WARNING), pydflash.TargetModel.open(path, n_threads=1) as model:
        assert model.stop_ids  # the known end markers of the vocabulary
    assert any("eos_token_id" in record.message for record in caplog.records)


def test_several_end_tokens(f32_path: Path_, tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 9}
    path = edit_gguf(f32_path("nano"), tmp_path / "ends.gguf", keys)
    with pydflash.TargetModel.open(path, n_threads=1) as model:
        assert {7, 9} <= model.stop_ids


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("qwen3next", "Qwen3-Next"),
        ("qwen4exp", "Flash-Next"),
        ("llama", "llama is not supported"),
        ("dflash", "drafter"),
    ],
)
def test_other_architectures_are_named(f32_path: Path_, tmp_path: Path, architecture: str, words: str) -> None:
    path = edit_gguf(f32_path("nano"), tmp_path / "other.gguf", architecture=architecture)
    with pytest.raises(pydflash.UnsupportedModelError, match=words):
        pydflash.TargetModel.open(path)


def tensor_names(path: Path) -> list[str]:
    return [tensor.name for tensor in gguf.GGUFReader(path).tensors]


def test_every_missing_or_misshapen_tensor_is_named(f32_path: Path_, tmp_path: Path) -> None:
    source = f32_path("nano")
    for name in tensor_names(source):
        if name == "output.weight":
            continue  # absent means that the embedding is the head
        path = edit_gguf(source, tmp_path / "missing.gguf", tensors=lambda table, name=name: table.pop(name))  # type: ignore[misc]
        with pytest.raises(pydflash.FormatError, match=f"{name} is missing"):
            pydflash.TargetModel.open(path)

        def grow(table: Tensors, name: str = name) -> None:
            data, kind = table[name]
            table[name] = (np.concatenate([data, data[:1]]), kind)

        path = edit_gguf(source, tmp_path / "grown.gguf", tensors=grow)
        if name == "token_embd.weight":  # its rows are the vocabulary; the head no longer fits
            name = "output.weight"
        with pytest.raises(pydflash.FormatError, match=f"{name} is .* want"):
            pydflash.TargetModel.open(path)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("block_count", 0, "block_count"),
        ("block_count", 10**9, "block_count"),
        ("embedding_length", REMOVE, "embedding_length"),
        ("attention.head_count", 3, "attn_q"),
        ("attention.head_count_kv", 0, "head_count_kv"),
        ("ssm.inner_size", 65, "inner_size"),
        ("ssm.conv_kernel", REMOVE, "conv_kernel"),
        ("rope.freq_base", 0.0, "freq_base"),
        ("rope.freq_base", float("nan"), "freq_base"),
        ("rope.dimension_sections", REMOVE, "dimension_sections"),
    ],
)
def test_wrong_keys_are_named(f32_path: Path_, tmp_path: Path, key: str, value: object, words: str) -> None:
    path = edit_gguf(f32_path("nano"), tmp_path / "wrong.gguf", {f"qwen35.{key}": value})
    with pytest.raises(pydflash.ModelError, match=words):
        pydflash.TargetModel.open(path)


def test_embedding_on_the_host(f32_path: Path_) -> None:
    ids = target_golden("nano").ids[0]
    with (
        pydflash.TargetModel.open(f32_path("nano"), n_threads=1, embedding="host") as model,
        pydflash.TargetCache(model, capacity=256, k_type="f32", v_type="f32") as cache,
    ):
        np.testing.assert_array_equal(cache.forward(ids, logits="all").logits, logits_of(f32_path("nano"), ids))
        rows = model.embed(ids[:4])
        assert rows.shape == (4, model.config.n_embd)
        with pytest.raises(pydflash.InvalidArgumentError, match="token id"):
            model.embed([0, model.n_vocab])
        with pytest.raises(pydflash.InvalidArgumentError, match="token id"):
            cache.forward([-1])


@pytest.mark.parametrize("quant", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_embedding_types(f32_path: Path_, tmp_path: Path, quant: str) -> None:
    """Rows looked up on the host equal the gguf package's own dequantisation."""
    from support.models import quantize_gguf, read_tensors

    path = quantize_gguf(f32_path("nano"), tmp_path / "typed.gguf", quant)  # type: ignore[arg-type]
    table = read_tensors(path)["token_embd.weight"]
    with pydflash.TargetModel.open(path, n_threads=1) as model:
        np.testing.assert_allclose(model.embed([0, 3, 300]), table[[0, 3, 300]], atol=1e-6)
