"""The helpers that other tests rely on: widening, quantising and comparing must be right themselves."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.goldens import block_golden, demo_answers, nano_logits, step_golden, target_golden
from support.models import DRAFTERS, MODELS, QuantType, quantize_gguf, read_tensors, upcast_folder, upcast_gguf
from support.q4_k import quantize_q4_k


def _metadata(path: Path) -> dict[str, tuple[list[gguf.GGUFValueType], object]]:
    fields = gguf.GGUFReader(path).fields
    return {name: (field.types, field.contents()) for name, field in fields.items() if not name.startswith("GGUF.")}


@pytest.mark.parametrize("name", ["nano-bf16", "moe-bf16", "wide-q4_k"])
def test_upcast_keeps_numbers_and_metadata(name: str, tmp_path: Path) -> None:
    source = MODELS / f"{name}.gguf"
    wide = upcast_gguf(source, tmp_path / "wide.gguf")
    before, after = _metadata(source), _metadata(wide)
    assert after.pop("general.file_type") == (before.pop("general.file_type")[0], 0)
    assert after == before
    assert {t.tensor_type.name for t in gguf.GGUFReader(wide).tensors} == {"F32"}
    old, new = read_tensors(source), read_tensors(wide)
    assert list(old) == list(new)
    for tensor, values in old.items():
        np.testing.assert_array_equal(values, new[tensor])


@pytest.mark.parametrize(("quant", "worst"), [("q8_0", 1 / 127), ("q4_0", 1 / 7), ("q4_k", 1 / 7)])
def test_quantised_copy_is_close_and_shrinks(quant: QuantType, worst: float, tmp_path: Path) -> None:
    source = upcast_gguf(MODELS / "wide-q4_k.gguf", tmp_path / "wide.gguf")
    copy = quantize_gguf(source, tmp_path / "copy.gguf", quant)
    assert copy.stat().st_size < source.stat().st_size / 3
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(copy).tensors}
    assert kinds["blk.0.ffn_down.weight"] == quant.upper()
    assert kinds["blk.0.ssm_conv1d.weight"] == kinds["output_norm.weight"] == "F32"
    new = read_tensors(copy)
    for name, values in read_tensors(source).items():
        assert np.abs(new[name] - values).max() <= worst * np.abs(values).max(), name


def test_q4_k_error_is_half_a_step() -> None:
    weights = np.random.default_rng(0).standard_normal((3, 512)).astype(np.float32)
    weights[0] = 0.0
    weights[1] += 10.0
    stored = quantize_q4_k(weights)
    assert stored.shape == (3, 288)
    error = np.abs(gguf.quants.dequantize(stored, gguf.GGMLQuantizationType.Q4_K) - weights)
    subs = weights.reshape(3, -1, 32)
    span = np.maximum(subs.max(-1), 0.0) - np.minimum(subs.min(-1), 0.0)
    # half a step of the 4-bit code, and the rounding of 6-bit scale and minimum
    limit = span / 30 + span.max(-1, keepdims=True) * 0.5 / 63 * 2
    assert (error.reshape(3, -1, 32).max(-1) <= limit + 1e-6).all()


def test_drafter_forms_hold_the_same_numbers(tmp_path: Path) -> None:
    folder = upcast_folder(DRAFTERS / "full", tmp_path / "full")
    plain = load_file(folder / "model.safetensors")
    llama_cpp, lucebox = (read_tensors(DRAFTERS / f"full-{form}.gguf") for form in ("bf16", "lucebox-f16"))
    assert len(plain) == len(llama_cpp) == len(lucebox)
    for hf, name, other in (
        ("fc.weight", "fc.weight", "dflash.fc.weight"),
        ("hidden_norm.weight", "enc.output_norm.weight", "dflash.hidden_norm.weight"),
        ("layers.1.self_attn.q_proj.weight", "blk.1.attn_q.weight", "blk.1.attn_q.weight"),
        ("layers.1.post_attention_layernorm.weight", "blk.1.ffn_norm.weight", "blk.1.ffn_norm.weight"),
    ):
        np.testing.assert_array_equal(plain[hf], llama_cpp[name])
        np.testing.assert_array_equal(plain[hf], lucebox[other])


def test_goldens_are_whole() -> None:
    golden = target_golden("nano")
    ids, logits = nano_logits()
    np.testing.assert_array_equal(golden.ids, ids)
    near = golden.logits.compare(logits)
    assert near.max_abs_diff < 8e-3
    assert near.argmax_equal >= near.positions - 1
    far = golden.logits.compare(np.roll(logits, 1, axis=1))
    assert far.max_abs_diff > 1.0
    one = golden.logits.compare(logits[2, 5:9], (2, slice(5, 9)))
    assert one.max_abs_diff < 8e-3


def test_step_goldens_cover_every_accepted_count() -> None:
    produced = {step[2] for case in step_golden("d-part")["cases"] for step in case["steps"]}
    assert produced == set(range(1, 9))
    for case in step_golden("d-part")["cases"]:
        assert sum(step[2] for step in case["steps"]) == len(case["greedy"]) - 1


def test_block_golden_shapes() -> None:
    golden = block_golden("full")
    rows = (len(golden.contexts), golden.block_size)
    assert golden.logits.argmax.shape == rows
    assert golden.logits.top_ids.shape == (*rows, 8)
    assert golden.features is not None
    assert golden.features.shape == (40, 2 * 64)
    np.testing.assert_array_equal(golden.anchors, golden.ids[golden.contexts])


def test_two_independent_engines_agree_on_the_built_in_pair() -> None:
    exact, peer = demo_answers("reference"), demo_answers("llama-cpp-dflash")
    assert len(exact) == len(peer) == 24
    for ours, theirs in zip(exact, peer, strict=True):
        assert (ours["id"], ours["tokens"]) == (theirs["id"], theirs["tokens"])
        assert ours["accepted_length"] == theirs["accepted_length"]
