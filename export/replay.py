"""What SGLang computes with an exported drafter, from its files and the target's features, in plain numpy float32.

Shares no code with training, the in-process engine or the kernels, so that it can disagree with them.

Axes: S sequence, P points (positions at which a chain of drafts starts), K steps, H drafter width, T target width,
N query heads, G key/value heads, M = N / G, h head size, V draft vocabulary.

With the features of positions up to p known, the drafter at p has read the tokens x[1..p+1] (step 0) and drafts x[p+2].
Step k then reads token x[p+1+k] at RoPE position p+k, with the stream of the step before in the feature's place; its
keys are those of step 0 up to p and one of each later step of its own chain. Tokens are those of the row: a chain that
has drafted the row's tokens so far has read the same, so the length of its agreement needs no other run.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from export.exported import Exported, Rope

Attention = Callable[[int, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""(layer, q_PxNxh, k_PxGxh, v_PxGxh) -> attended_PxNxh."""


@dataclasses.dataclass(frozen=True)
class Serving:
    """How files are served. `check` looks for faults by changing one of these at a time."""

    tap_layers: tuple[int, ...]
    rope: Rope
    swap: bool  # the stream starts as the embedding
    target_embedding: bool  # the target's table in place of the drafter's own
    normed_stream: bool = False  # hand on the stream after the final norm: no server of these drafters does


class Replay:
    """`exported` served as `serving` says. Raises `KeyError` for a tensor that is not there."""

    def __init__(self, exported: Exported, serving: Serving):
        self.exported, self.serving = exported, serving
        self._weights = {
            name: value.astype(np.float32, copy=False)
            for name, value in exported.tensors.items()
            if name not in ("d2t", "t2d")
        }
        self._frequencies_f = _frequencies(exported.head_dim, serving.rope)

    def streams(
        self, embedding_SxH: np.ndarray, taps_Sx3T: np.ndarray, points_P: np.ndarray, steps: int
    ) -> list[np.ndarray]:
        """The un-normed stream of each step at the points, (P, H) each; the row's last token stands for those beyond.

        Args:
          embedding_SxH: of the row's tokens, by the table that is served.
        """
        last = len(embedding_SxH) - 1
        next_SxH, feature_SxH = embedding_SxH[1:], taps_Sx3T[:-1] @ self._weights["fc.weight"].T
        step0 = []

        def causal(layer, q_SxNxh, k_SxGxh, v_SxGxh):
            step0.append((k_SxGxh, v_SxGxh))
            return _causal(q_SxNxh, k_SxGxh, v_SxGxh)

        stream_SxH = self._step(next_SxH, feature_SxH, np.arange(last), causal)
        out = [stream_SxH[points_P]]
        chains = [[] for _ in step0]  # (keys_PxGxh, values_PxGxh) of each later step, by layer

        def along(layer, q_PxNxh, k_PxGxh, v_PxGxh):
            chains[layer].append((k_PxGxh, v_PxGxh))
            return _along_chain(q_PxNxh, *step0[layer], chains[layer], points_P)

        for k in range(1, steps):
            feature_PxH = self.normed(out[-1]) if self.serving.normed_stream else out[-1]
            token_PxH = embedding_SxH[np.minimum(points_P + 1 + k, last)]
            out.append(self._step(token_PxH, feature_PxH, points_P + k, along))
        return out

    def normed(self, stream_PxH: np.ndarray) -> np.ndarray:
        return self._norm(stream_PxH, "norm")

    def logits(self, stream_PxH: np.ndarray) -> np.ndarray:
        """(P, V) from un-normed streams."""
        return self.normed(stream_PxH) @ self._weights["lm_head.weight"].T

    def target_ids(self, draft_ids: np.ndarray) -> np.ndarray:
        """Ids of the draft vocabulary as the target's: each has its offset in `d2t`."""
        offsets = self.exported.tensors.get("d2t")
        return draft_ids if offsets is None else draft_ids + offsets[draft_ids]

    # ---- one step

    def _step(self, embedding_PxH, feature_PxH, positions_P, attend: Attention) -> np.ndarray:
        swap = self.serving.swap
        stream_PxH, constant_PxH = (embedding_PxH, feature_PxH) if swap else (feature_PxH, embedding_PxH)
        for i in range(self.exported.num_layers):
            layer = self.exported.layer(i)
            x_Px2H = np.concatenate(
                [self._norm(constant_PxH, f"{layer}input_layernorm"), self._norm(stream_PxH, f"{layer}hidden_norm")], -1
            )
            stream_PxH = stream_PxH + self._attention(i, x_Px2H, positions_P, attend)
            hidden_PxH = self._norm(stream_PxH, f"{layer}post_attention_layernorm")
            gate_PxF, up_PxF = (self._linear(hidden_PxH, f"{layer}mlp.{name}_proj") for name in ("gate", "up"))
            stream_PxH = stream_PxH + self._linear(gate_PxF * _sigmoid(gate_PxF) * up_PxF, f"{layer}mlp.down_proj")
        return stream_PxH

    def _attention(self, i: int, x_Px2H, positions_P, attend: Attention) -> np.ndarray:
        name = f"{self.exported.layer(i)}self_attn."
        q_PxNxh, k_PxGxh, v_PxGxh = (
            self._linear(x_Px2H, f"{name}{part}_proj").reshape(len(x_Px2H), -1, self.exported.head_dim)
            for part in "qkv"
        )
        if self.exported.qk_norm:
            q_PxNxh, k_PxGxh = self._norm(q_PxNxh, f"{name}q_norm"), self._norm(k_PxGxh, f"{name}k_norm")
        q_PxNxh, k_PxGxh = (_rotated(x, positions_P, self._frequencies_f) for x in (q_PxNxh, k_PxGxh))
        return self._linear(attend(i, q_PxNxh, k_PxGxh, v_PxGxh).reshape(len(x_Px2H), -1), f"{name}o_proj")

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        y = x @ self._weights[f"{name}.weight"].T
        return y + self._weights[f"{name}.bias"] if f"{name}.bias" in self._weights else y

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean = np.mean(np.square(x), axis=-1, keepdims=True)
        return x / np.sqrt(mean + np.float32(self.exported.rms_norm_eps)) * self._weights[f"{name}.weight"]


# ---- attention and RoPE


def _causal(q_SxNxh: np.ndarray, k_SxGxh: np.ndarray, v_SxGxh: np.ndarray) -> np.ndarray:
    """Each position over those up to itself; one head at a time, since a row may be long."""
    S, N, h = q_SxNxh.shape
    share = N // k_SxGxh.shape[1]
    hidden_SxS = np.triu(np.ones((S, S), bool), 1)
    out_SxNxh = np.empty_like(q_SxNxh)
    for n in range(N):
        scores_SxS = q_SxNxh[:, n] @ k_SxGxh[:, n // share].T / np.float32(h**0.5)
        scores_SxS[hidden_SxS] = -np.inf
        out_SxNxh[:, n] = _softmax(scores_SxS) @ v_SxGxh[:, n // share]
    return out_SxNxh


def _along_chain(q_PxNxh, k0_SxGxh, v0_SxGxh, chain: list[tuple[np.ndarray, np.ndarray]], points_P) -> np.ndarray:
    """Each point over the keys of step 0 up to itself and those of its own chain."""
    P, N, h = q_PxNxh.shape
    S, G, _ = k0_SxGxh.shape
    q_PxGxMxh = q_PxNxh.reshape(P, G, N // G, h)
    keys_CxPxGxh, values_CxPxGxh = (np.stack(part) for part in zip(*chain, strict=True))
    first_PxGxMxS = np.einsum("pgmh,sgh->pgms", q_PxGxMxh, k0_SxGxh, optimize=True)
    seen_Px1x1xS = (np.arange(S) <= points_P[:, None])[:, None, None]
    first_PxGxMxS = np.where(seen_Px1x1xS, first_PxGxMxS, np.float32(-np.inf))
    later_PxGxMxC = np.einsum("pgmh,cpgh->pgmc", q_PxGxMxh, keys_CxPxGxh, optimize=True)
    weights = _softmax(np.concatenate([first_PxGxMxS, later_PxGxMxC], axis=-1) / np.float32(h**0.5))
    out_PxGxMxh = np.einsum("pgms,sgh->pgmh", weights[..., :S], v0_SxGxh, optimize=True)
    out_PxGxMxh += np.einsum("pgmc,cpgh->pgmh", weights[..., S:], values_CxPxGxh, optimize=True)
    return out_PxGxMxh.reshape(P, N, h)


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return (0.5 * (1 + np.tanh(0.5 * x))).astype(np.float32)


def _frequencies(head_dim: int, rope: Rope) -> np.ndarray:
    """Radians per position (h / 2,), float32.

    llama3: wavelengths above original / low_freq_factor positions are stretched by `factor`, those below
    original / high_freq_factor stay, and between the two the frequency goes over from one to the other.
    """
    frequencies = np.array([rope.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)])
    if rope.scaling is not None:
        low, high = rope.scaling["low_freq_factor"], rope.scaling["high_freq_factor"]
        for i, frequency in enumerate(frequencies):
            turns = rope.scaling["original_max_position_embeddings"] * frequency / (2 * np.pi)
            kept = min(max((turns - low) / (high - low), 0.0), 1.0)
            frequencies[i] = frequency * (kept + (1 - kept) / rope.scaling["factor"])
    return frequencies.astype(np.float32)


def _rotated(x_PxNxh: np.ndarray, positions_P: np.ndarray, frequencies_f: np.ndarray) -> np.ndarray:
    """The first half of each head against the second."""
    angle_Px1xf = (positions_P[:, None].astype(np.float32) * frequencies_f)[:, None]
    cos, sin = np.cos(angle_Px1xf), np.sin(angle_Px1xf)
    half = x_PxNxh.shape[-1] // 2
    first, second = x_PxNxh[..., :half], x_PxNxh[..., half:]
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
