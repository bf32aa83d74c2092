"""The peer of the `step` benchmark: a distillation step in PyTorch, put together as the released trainer's is.

The target's probabilities of the whole batch are in memory; each step of the unroll applies the head to every position
and takes a log-softmax of the whole logits; attention scores are dense, and a list of keys and values grows by one
entry a step. Masked positions are multiplied by zero at the end. It computes the same loss and update as our step.

Axes: B rows, S sequence, N heads, G key/value heads, h head size, H width, T target width, V vocabulary.

Runs in an interpreter of its own, which needs PyTorch and NumPy and nothing else.
"""

import torch
import torch.nn.functional as F
from torch import nn

from osprey_jax.benchmark import step_inputs
from osprey_jax.benchmark.step_inputs import StepShape
from osprey_jax.benchmark.timing import arguments_of_child, serve


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def linear(out_size: int, in_size: int) -> nn.Linear:
    return nn.Linear(in_size, out_size, bias=False)


class Attention(nn.Module):
    def __init__(self, shape: StepShape):
        super().__init__()
        self.shape, heads, kv = shape, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj, self.o_proj = linear(heads, 2 * shape.width), linear(shape.width, heads)
        self.k_proj, self.v_proj = linear(kv, 2 * shape.width), linear(kv, 2 * shape.width)
        self.q_norm, self.k_norm = RMSNorm(shape.head_dim, shape.eps), RMSNorm(shape.head_dim, shape.eps)

    def forward(self, x_BxSx2H, rotary, mask_SxS, memory: list):
        B, S, _ = x_BxSx2H.shape
        heads = lambda y: y.view(B, S, -1, self.shape.head_dim).transpose(1, 2)
        repeat = lambda y: y.repeat_interleave(self.shape.heads // self.shape.kv_heads, dim=1)
        q_BxNxSxh = rotate(self.q_norm(heads(self.q_proj(x_BxSx2H))), rotary)
        k_BxNxSxh = repeat(rotate(self.k_norm(heads(self.k_proj(x_BxSx2H))), rotary))
        memory.append((k_BxNxSxh, repeat(heads(self.v_proj(x_BxSx2H)))))
        (k0, v0), later = memory[0], memory[1:]
        scale = self.shape.head_dim**-0.5
        scores = [torch.matmul(q_BxNxSxh, k0.mT) * scale + mask_SxS]
        scores += [(q_BxNxSxh * k).sum(-1, keepdim=True) * scale for k, _ in later]
        weights = torch.cat(scores, dim=-1).softmax(dim=-1)
        out_BxNxSxh = torch.matmul(weights[..., :S], v0)
        for i, (_, v) in enumerate(later):
            out_BxNxSxh = out_BxNxSxh + weights[..., S + i].unsqueeze(-1) * v
        return self.o_proj(out_BxNxSxh.transpose(1, 2).reshape(B, S, -1))


def rotate(x_BxNxSxh, rotary):
    cos, sin = rotary
    first, second = x_BxNxSxh.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class MLP(nn.Module):
    def __init__(self, shape: StepShape):
        super().__init__()
        self.gate_proj, self.up_proj = linear(shape.inner, shape.width), linear(shape.inner, shape.width)
        self.down_proj = linear(shape.width, shape.inner)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: StepShape):
        super().__init__()
        norm = lambda: RMSNorm(shape.width, shape.eps)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = norm(), norm(), norm()
        self.self_attn, self.mlp = Attention(shape), MLP(shape)

    def forward(self, constant, stream, rotary, mask, memory):
        x = torch.cat([self.input_layernorm(constant), self.hidden_norm(stream)], dim=-1)
        stream = stream + self.self_attn(x, rotary, mask, memory)
        return stream + self.mlp(self.post_attention_layernorm(stream))


class Drafter(nn.Module):
    def __init__(self, shape: StepShape):
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.width)
        self.fc = linear(shape.width, 3 * shape.target_width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width, shape.eps)
        self.lm_head = linear(shape.vocab, shape.width)


def next_position(x):
    """The value at p + 1 in place p, zeros at the end."""
    return F.pad(x[:, 1:], (0, 0) * (x.dim() - 2) + (0, 1))


def unrolled_loss(drafter: Drafter, shape: StepShape, inputs: dict, head_VxT) -> torch.Tensor:
    """Sum over the steps of the unroll of decay^k times their soft cross-entropy, as in the release."""
    S = shape.sequence
    with torch.no_grad():
        target_BxSxV = next_position(inputs["hidden"] @ head_VxT.T).softmax(dim=-1)
        # Beyond the end the uniform distribution, as zero logits give.
        target_BxSxV = F.pad(target_BxSxV, (0, 0, 0, shape.steps), value=1 / shape.vocab)
    mask_SxS = torch.full((S, S), -torch.inf).triu(1)
    frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    token_ids, loss_mask = next_position(inputs["token_ids"]), inputs["loss_mask"].float()
    feature, memories, loss = drafter.fc(inputs["taps"]), [[] for _ in drafter.layers], 0.0
    for k in range(shape.steps):
        angle_Sxf = torch.outer(torch.arange(k, S + k), frequencies)
        rotary = angle_Sxf.cos(), angle_Sxf.sin()
        stream = drafter.embed_tokens(token_ids)
        for layer, memory in zip(drafter.layers, memories, strict=True):
            stream = layer(feature, stream, rotary, mask_SxS, memory)
        log_BxSxV = drafter.lm_head(drafter.norm(stream)).log_softmax(dim=-1)
        cross_entropy_BxS = -(target_BxSxV[:, k : S + k] * log_BxSxV).sum(-1)
        loss = loss + shape.decay**k * (cross_entropy_BxS * loss_mask).mean()
        feature, token_ids, loss_mask = stream, next_position(token_ids), next_position(loss_mask)
    return loss


def main() -> None:
    arguments = arguments_of_child()
    torch.set_num_threads(arguments.pop("threads"))
    shape = StepShape(**arguments)
    drafter = Drafter(shape)
    drafter.load_state_dict({name: torch.from_numpy(x) for name, x in step_inputs.drafter_weights(shape).items()})
    inputs = {name: torch.from_numpy(x) for name, x in step_inputs.batch(shape).items()}
    head_VxT = torch.from_numpy(step_inputs.target_head(shape))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=shape.learning_rate, weight_decay=0.0)

    def step() -> float:
        loss = unrolled_loss(drafter, shape, inputs, head_VxT)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), shape.clip_norm)
        optimizer.step()
        return loss.item()

    serve(step)


if __name__ == "__main__":
    main()
