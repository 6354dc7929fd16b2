"""What a GPU backend cannot run is refused by name, before anything is computed."""

import numpy as np
import pytest
from support.models import MODELS

import pydflash

pytestmark = pytest.mark.gpu


def test_heads_that_the_attention_kernel_lacks(real_gpu: str) -> None:
    """Attention heads of 32 values."""
    if not real_gpu.startswith("CUDA"):
        pytest.skip(f"the sizes are those of ggml's CUDA kernels, this is {real_gpu}")
    ids = np.arange(10, dtype=np.int32)
    with (
        pydflash.TargetModel.open(MODELS / "nano-bf16.gguf", real_gpu) as target,
        pydflash.TargetCache(target, 256) as cache,
    ):
        for _ in range(2):
            with pytest.raises(pydflash.UnsupportedModelError, match=f"device {real_gpu} lacks FLASH_ATTN_EXT"):
                cache.forward(ids)
            assert cache.position == 0
    with pydflash.TargetModel.open(None, real_gpu) as target, pydflash.TargetCache(target, 256) as cache:
        assert np.isfinite(cache.forward(ids).logits).all()


def test_a_device_that_is_not_there(real_gpu: str) -> None:
    with pytest.raises(pydflash.NotFoundError, match=f'no device "cuda:99".*{real_gpu}'):
        pydflash.TargetModel.open(None, "cuda:99")
