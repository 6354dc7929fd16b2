"""A plain encoder for ggml's Q4_K blocks, which the `gguf` package can only decode."""

import numpy as np
import numpy.typing as npt

_Codes = npt.NDArray[np.uint8]
_Values = npt.NDArray[np.float32]

_SUPER, _SUB = 256, 32  # values per block, and per sub-block with its own scale and minimum


def quantize_q4_k(weights: _Values) -> _Codes:
    """Encode float32 [..., n] with n a multiple of 256 as uint8 [..., n / 256 * 144].

    A value is `d * scale * q - dmin * minimum` with 4-bit q and 6-bit scale and minimum. Each sub-block is fitted to
    its own range; no error-minimising search is done, so files differ from those of other tools but mean what they
    say.
    """
    subs = weights.reshape(-1, _SUPER // _SUB, _SUB).astype(np.float32)
    minimum = np.maximum(-subs.min(-1), 0.0)
    scale = (np.maximum(subs.max(-1), 0.0) + minimum) / 15.0
    d = (scale.max(-1) / 63.0).astype(np.float16)
    dmin = (minimum.max(-1) / 63.0).astype(np.float16)
    scale6, step = _six_bits(scale, d)
    minimum6, floor = _six_bits(minimum, dmin)
    safe = np.where(step > 0, step, 1.0)[..., None]
    q = np.clip(np.rint((subs + floor[..., None]) / safe), 0, 15).astype(np.uint8)

    low, high = q[:, 0::2], q[:, 1::2]  # neighbouring sub-blocks share bytes
    nibbles = (low | high << 4).reshape(len(q), _SUPER // 2)
    halves = np.stack([d, dmin], axis=1).view(np.uint8)
    blocks = np.concatenate([halves, _pack_scales(scale6, minimum6), nibbles], axis=1)
    return blocks.reshape(*weights.shape[:-1], -1)


def _six_bits(values: _Values, unit: npt.NDArray[np.float16]) -> tuple[_Codes, _Values]:
    """Codes 0..63 in steps of `unit` [blocks], and the values those codes stand for."""
    width = unit.astype(np.float32)[:, None]
    codes = np.clip(np.rint(values / np.where(width > 0, width, 1.0)), 0, 63).astype(np.uint8)
    return codes, codes * width


def _pack_scales(scale: _Codes, minimum: _Codes) -> _Codes:
    """Twelve bytes: scales 0-3, minima 0-3 (with the top bits of 4-7 above them), then the low bits of 4-7."""
    first = scale[:, :4] | (scale[:, 4:] >> 4) << 6
    second = minimum[:, :4] | (minimum[:, 4:] >> 4) << 6
    third = (scale[:, 4:] & 15) | (minimum[:, 4:] & 15) << 4
    return np.concatenate([first, second, third], axis=1)
