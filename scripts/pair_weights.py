"""Made-up weights of a target or drafter, tensor by tensor; make_random_pair.py says what they are meant to do."""

import math
from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType
from pair_blocks import (
    F32,
    Q4_K,
    Q6_K,
    Q8_0,
    Bytes,
    Floats,
    Run,
    Tensor,
    Tile,
    float_tensor,
    gather,
    random_blocks,
    row_bytes,
    sign_blocks,
)
from pair_sizes import DraftSize, TargetSize, next_coprime_prime

GATE_TYPES = {"f32": F32, "q8_0": Q8_0, "q4_k": Q4_K}
_VOTE = 16.0  # size of a vote dimension
_FREE = 1.6  # root mean square of the others in an embedding row, and of all that the layers add
_TILE_BLOCKS = 1 << 18


class Weights:
    """Makes the tensors of one file, whose matrices have type `matrix` unless a call says otherwise.

    Residual dimensions [0, n_vote) are vote dimensions; n_vote is 0 for an ordinary file.
    """

    def __init__(self, n_embd: int, n_branches: int, n_vote: int, matrix: GGMLQuantizationType, seed: int) -> None:
        self.n_embd = n_embd
        self.n_vote = n_vote
        self.matrix = matrix
        self.rng = np.random.default_rng(seed)
        self._tiles: dict[tuple[GGMLQuantizationType, float], Tile] = {}
        n_free = n_embd - n_vote
        self._free = _FREE if n_vote else 1.0
        rms = math.sqrt((n_vote * _VOTE**2 + n_free * self._free**2) / n_embd)
        self._free_gain = rms / self._free if n_vote else 1.0
        self._in_std = 1.0 / math.sqrt(n_free)
        # All branches together add about as much as was there.
        self._out_gain = self._free / math.sqrt(2 * n_branches)

    def tile(self, qtype: GGMLQuantizationType, std: float) -> Tile:
        # The nearest power of two to a quarter: few tiles serve all tensors.
        std = 2.0 ** (round(4 * math.log2(std)) / 4) if std > 0 else 0.0
        if (qtype, std) not in self._tiles:
            n = next_coprime_prime(_TILE_BLOCKS if self.n_embd > 512 else 4096, self.n_embd)
            self._tiles[qtype, std] = Tile(random_blocks(qtype, n, std, self.rng))
        return self._tiles[qtype, std]

    def vector(self, name: str, n: int, low: float = 0.9, high: float = 1.1) -> Tensor:
        return float_tensor(name, self.rng.uniform(low, high, n).astype(np.float32))

    def norm(self, name: str) -> Tensor:
        """Norm in front of a branch, which sees the free dimensions only, at a root mean square near 1."""
        weights = self.rng.uniform(0.9, 1.1, self.n_embd) * self._free_gain
        weights[: self.n_vote] = 0.0
        return float_tensor(name, weights.astype(np.float32))

    def into(self, name: str, n_rows: int, qtype: GGMLQuantizationType | None = None, n_in: int = 0) -> Tensor:
        """Projection [n_rows, n_in or n_embd] out of the residual stream."""
        qtype, n_in = self.matrix if qtype is None else qtype, n_in or self.n_embd
        if qtype == F32:
            values = self.rng.standard_normal((n_rows, n_in), np.float32) * np.float32(self._in_std)
            return float_tensor(name, values)
        std = self._in_std * math.sqrt(self.n_embd / n_in)
        return Tensor(name, (n_rows, n_in), qtype, (self.tile(qtype, std).take(n_rows * row_bytes(qtype, n_in)),))

    def back(self, name: str, n_in: int, qtype: GGMLQuantizationType | None = None, n_stacked: int = 0) -> Tensor:
        """Projection [n_embd, n_in], or a stack of them, that adds to the free dimensions."""
        qtype = self.matrix if qtype is None else qtype
        row = row_bytes(qtype, n_in)
        live = self.tile(qtype, self._out_gain / math.sqrt(n_in))
        runs: list[Run] = []
        for _ in range(n_stacked or 1):
            if self.n_vote:
                runs.append(self.tile(qtype, 0.0).take(self.n_vote * row))
            runs.append(live.take((self.n_embd - self.n_vote) * row))
        shape = (n_stacked, self.n_embd, n_in) if n_stacked else (self.n_embd, n_in)
        return Tensor(name, shape, qtype, tuple(runs))

    def stack(self, name: str, n_rows: int, n_stacked: int) -> Tensor:
        flat = self.into(name, n_rows * n_stacked)
        return Tensor(name, (n_stacked, n_rows, self.n_embd), flat.qtype, flat.runs)

    def rows(self, name: str, n_rows: int, qtype: GGMLQuantizationType, vote: Bytes, special: dict[int, Bytes],
             free_std: float) -> Tensor:  # fmt: skip
        """A vocabulary matrix [n_rows, n_embd] whose rows begin with the blocks `vote`; `special` rows with others."""
        free = self.tile(qtype, free_std)
        size = row_bytes(qtype, self.n_embd)
        if len(vote) == 0:
            return Tensor(name, (n_rows, self.n_embd), qtype, (free.take(n_rows * size),))
        ring_rows = next_coprime_prime(min(4096, n_rows), 1)
        free_bytes = size - vote.size
        ring = np.empty((ring_rows, size), np.uint8)
        ring[:, : vote.size] = vote.reshape(-1)
        ring[:, vote.size :] = gather(free.take(ring_rows * free_bytes)).reshape(ring_rows, free_bytes)
        tile = Tile(ring)
        runs: list[Run] = []
        done = 0
        for token_id, blocks in sorted(special.items()):
            runs.append(tile.take((token_id - done) * size))
            row = np.concatenate([blocks.reshape(-1), gather(free.take(free_bytes))])
            runs.append(Run(row, 0, size))
            done = token_id + 1
        runs.append(tile.take((n_rows - done) * size))
        return Tensor(name, (n_rows, self.n_embd), qtype, tuple(runs))


@dataclass(frozen=True)
class Ends:
    """Embedding table and head of a target, and the weights of the final norm, which are the drafter's too."""

    tensors: list[Tensor]
    final_norm: Floats


def target_ends(weights: Weights, size: TargetSize, favourite: int, margin: float) -> Ends:
    """`margin`: the favourite's logit minus any other one's."""
    n_vote, n_embd = weights.n_vote, weights.n_embd
    embed_type = Q6_K if size.tied else Q4_K
    if n_vote == 0:
        none = np.empty((0, 0), np.uint8)
        gain = 3.0 / math.sqrt(n_embd)  # logits with a standard deviation of 3
        embedding = weights.rows("token_embd.weight", size.n_vocab, embed_type, none, {}, 1.0)
        if size.tied:
            return Ends([embedding], np.full(n_embd, gain, np.float32))
        head = weights.rows("output.weight", size.n_vocab, Q6_K, none, {}, gain)
        return Ends([embedding, head], np.ones(n_embd, np.float32))
    signs = weights.rng.integers(0, 2, n_vote).astype(bool)
    pattern, size_of_vote = sign_blocks(embed_type, signs, _VOTE)
    hidden_vote, free_square = size_of_vote, 2.0 * _FREE**2  # the layers double the square of the free dimensions
    if size.tied:
        # The favourite's own row has to stick out, so it is twice as long.
        strong, hidden_vote = sign_blocks(embed_type, signs, 2 * _VOTE)
        tensors = [weights.rows("token_embd.weight", size.n_vocab, embed_type, pattern, {favourite: strong}, _FREE)]
        row_difference = hidden_vote - size_of_vote
    else:
        embedding = weights.rows("token_embd.weight", size.n_vocab, embed_type, pattern, {}, _FREE)
        aligned, row_difference = sign_blocks(Q6_K, signs, 1.0)
        blank = np.zeros_like(aligned)
        head_std = 3.0 / math.sqrt(n_embd)
        head = weights.rows("output.weight", size.n_vocab, Q6_K, blank, {favourite: aligned}, head_std)
        tensors = [embedding, head]
    rms = math.sqrt((n_vote * hidden_vote**2 + (n_embd - n_vote) * free_square) / n_embd)
    final_norm = np.zeros(n_embd, np.float32)
    final_norm[:n_vote] = margin / (n_vote * hidden_vote / rms * row_difference)
    return Ends(tensors, final_norm)


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Types of a target's matrices besides Q4_K, and Q6_K for the head.

    more_bits: Q6_K also for the inputs of attention values and the second feed-forward matrix of half of the layers, as
    in files that llama.cpp's tools call Q4_K_M; else a file of the kind Q4_K_S. gates: of ssm_alpha and ssm_beta.
    """

    more_bits: bool = True
    gates: GGMLQuantizationType = Q8_0

    def sensitive(self, layer: int, n_layer: int) -> GGMLQuantizationType:
        """The first and last eighth of the layers, and every third one between."""
        eighth = n_layer // 8
        inner = (layer - eighth) % 3 == 2
        return Q6_K if self.more_bits and (layer < eighth or layer >= 7 * n_layer // 8 or inner) else Q4_K


def target_layer(w: Weights, size: TargetSize, layer: int, mix: Mix) -> list[Tensor]:
    b = f"blk.{layer}."
    sensitive = mix.sensitive(layer, size.n_layer)
    tensors = [w.norm(b + "attn_norm.weight"), w.norm(b + "post_attention_norm.weight")]
    if size.is_recurrent(layer):
        conv = w.rng.standard_normal((size.conv_channels, size.conv), np.float32) * np.float32(0.5)
        tensors += [
            w.into(b + "attn_qkv.weight", size.conv_channels, sensitive),
            w.into(b + "attn_gate.weight", size.inner),
            float_tensor(b + "ssm_conv1d.weight", conv),
            w.vector(b + "ssm_dt.bias", size.n_value, -4.0, 0.0),
            float_tensor(b + "ssm_a", -w.rng.uniform(0.02, 1.0, size.n_value).astype(np.float32)),
            w.into(b + "ssm_alpha.weight", size.n_value, mix.gates),
            w.into(b + "ssm_beta.weight", size.n_value, mix.gates),
            w.vector(b + "ssm_norm.weight", size.state),
            w.back(b + "ssm_out.weight", size.inner),
        ]
    else:
        tensors += [
            w.into(b + "attn_q.weight", 2 * size.head_dim * size.n_head),
            w.into(b + "attn_k.weight", size.head_dim * size.n_head_kv),
            w.into(b + "attn_v.weight", size.head_dim * size.n_head_kv, sensitive),
            w.vector(b + "attn_q_norm.weight", size.head_dim),
            w.vector(b + "attn_k_norm.weight", size.head_dim),
            w.back(b + "attn_output.weight", size.head_dim * size.n_head),
        ]
    if not size.n_expert:
        return [*tensors, *feed_forward(w, b, size.n_ff, down=sensitive)]
    shared_gate = w.rng.standard_normal(w.n_embd, np.float32) / np.float32(math.sqrt(w.n_embd))
    return [
        *tensors,
        w.into(b + "ffn_gate_inp.weight", size.n_expert, F32),
        w.stack(b + "ffn_gate_exps.weight", size.n_ff_exp, size.n_expert),
        w.stack(b + "ffn_up_exps.weight", size.n_ff_exp, size.n_expert),
        w.back(b + "ffn_down_exps.weight", size.n_ff_exp, sensitive, size.n_expert),
        float_tensor(b + "ffn_gate_inp_shexp.weight", shared_gate),
        *feed_forward(w, b, size.n_ff_exp, "_shexp", down=sensitive),
    ]


def feed_forward(
    w: Weights, b: str, n_ff: int, suffix: str = "", down: GGMLQuantizationType | None = None
) -> list[Tensor]:
    return [
        w.into(f"{b}ffn_gate{suffix}.weight", n_ff),
        w.into(f"{b}ffn_up{suffix}.weight", n_ff),
        w.back(f"{b}ffn_down{suffix}.weight", n_ff, down),
    ]


def draft_layer(w: Weights, draft: DraftSize, b: str) -> list[Tensor]:
    return [
        w.norm(b + "attn_norm.weight"),
        w.norm(b + "ffn_norm.weight"),
        w.into(b + "attn_q.weight", draft.head_dim * draft.n_head),
        w.into(b + "attn_k.weight", draft.head_dim * draft.n_head_kv),
        w.into(b + "attn_v.weight", draft.head_dim * draft.n_head_kv),
        w.vector(b + "attn_q_norm.weight", draft.head_dim),
        w.vector(b + "attn_k_norm.weight", draft.head_dim),
        w.back(b + "attn_output.weight", draft.head_dim * draft.n_head),
        *feed_forward(w, b, draft.n_ff),
    ]
