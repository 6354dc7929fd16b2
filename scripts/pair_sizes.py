"""Geometry of the model pairs that make_random_pair.py can write.

Targets: the published Qwen3.5 configurations. Drafters: the published DFlash ones where there is one; the 0.8B target
has none and gets five layers of its own width.
"""

from dataclasses import dataclass
from math import gcd


@dataclass(frozen=True, kw_only=True)
class TargetSize:
    """A qwen35 target, or qwen35moe when n_expert is not 0.

    n_head and n_head_kv of head_dim belong to the full-attention layers, every `interval`-th one; n_group key heads and
    n_value value heads of state dimensions to the others. tied: no output matrix, the embedding table serves as one.
    """

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_value: int
    n_ff: int = 0
    n_group: int = 16
    head_dim: int = 256
    state: int = 128
    interval: int = 4
    conv: int = 4
    n_vocab: int = 248320
    n_ctx: int = 262144
    tied: bool = False
    n_expert: int = 0
    n_expert_used: int = 0
    n_ff_exp: int = 0

    @property
    def architecture(self) -> str:
        return "qwen35moe" if self.n_expert else "qwen35"

    @property
    def n_rot(self) -> int:
        """Rotated dimensions of a head: a quarter."""
        return self.head_dim // 4

    @property
    def rope_sections(self) -> list[int]:
        """Rotary pairs for time, height and width: 11, 11, 10 for the published head size."""
        pairs = self.n_rot // 2
        third = -(-pairs // 3)
        return [third, third, pairs - 2 * third, 0]

    @property
    def inner(self) -> int:
        return self.state * self.n_value

    @property
    def conv_channels(self) -> int:
        return self.state * (2 * self.n_group + self.n_value)

    def is_recurrent(self, layer: int) -> bool:
        return (layer + 1) % self.interval != 0


@dataclass(frozen=True, kw_only=True)
class DraftSize:
    """A DFlash drafter; its width and vocabulary are the target's."""

    n_ff: int
    n_layer: int = 5
    n_head: int = 32
    n_head_kv: int = 8
    head_dim: int = 128
    block_size: int = 16
    n_taps: int = 5

    def taps(self, n_target_layers: int) -> list[int]:
        """Captured target layers, counted from 0: evenly spread between the second and the third from the end."""
        return [1 + i * (n_target_layers - 4) // (self.n_taps - 1) for i in range(self.n_taps)]


_TINY = TargetSize(
    n_layer=8, n_embd=512, n_head=4, n_head_kv=2, n_value=4, n_ff=512, n_group=2, head_dim=64, state=64, n_vocab=1024,
    n_ctx=4096,
)  # fmt: skip
_TINY_MOE = TargetSize(
    n_layer=8, n_embd=512, n_head=4, n_head_kv=2, n_value=4, n_group=2, head_dim=64, state=64, n_vocab=1024, n_ctx=4096,
    n_expert=8, n_expert_used=2, n_ff_exp=256,
)  # fmt: skip
_TINY_TIED = TargetSize(
    n_layer=8, n_embd=512, n_head=4, n_head_kv=2, n_value=4, n_ff=512, n_group=2, head_dim=64, state=64, n_vocab=1024,
    n_ctx=4096, tied=True,
)  # fmt: skip
_TINY_DRAFT = DraftSize(n_ff=512, n_layer=2, n_head=4, n_head_kv=2, head_dim=64)

SIZES: dict[str, tuple[TargetSize, DraftSize]] = {
    "tiny": (_TINY, _TINY_DRAFT),
    "tiny-moe": (_TINY_MOE, _TINY_DRAFT),
    "tiny-tied": (_TINY_TIED, _TINY_DRAFT),
    "0.8B": (
        TargetSize(n_layer=24, n_embd=1024, n_head=8, n_head_kv=2, n_value=16, n_ff=3584, tied=True),
        DraftSize(n_ff=3584, n_head=16),
    ),
    "4B": (
        TargetSize(n_layer=32, n_embd=2560, n_head=16, n_head_kv=4, n_value=32, n_ff=9216, tied=True),
        DraftSize(n_ff=9216),
    ),
    "9B": (
        TargetSize(n_layer=32, n_embd=4096, n_head=16, n_head_kv=4, n_value=32, n_ff=12288),
        DraftSize(n_ff=12288),
    ),
    "27B": (
        TargetSize(n_layer=64, n_embd=5120, n_head=24, n_head_kv=4, n_value=48, n_ff=17408),
        DraftSize(n_ff=17408),
    ),
    "35B-A3B": (
        TargetSize(
            n_layer=40, n_embd=2048, n_head=16, n_head_kv=2, n_value=32, n_expert=256, n_expert_used=8, n_ff_exp=512
        ),
        DraftSize(n_ff=6144, n_layer=8, n_head_kv=4),
    ),
}


def next_coprime_prime(at_least: int, row: int) -> int:
    """The smallest prime from `at_least` on that does not divide `row`."""
    n = max(2, at_least)
    while gcd(n, row) != 1 or any(n % i == 0 for i in range(2, int(n**0.5) + 1)):
        n += 1
    return n
