"""SGLang's compiled CPU kernels in plain PyTorch, as far as greedy EAGLE-3 with top-k 1 calls them.

No wheel of them for CPUs is published. The signatures are those of SGLang's call sites; its `intel_amx` attention
backend works on any CPU with these. `convert_weight_packed` stays undefined, by which SGLang knows that there is no
AMX and multiplies by PyTorch. Cases outside of what the tests serve raise.

Letters: n new tokens of a request, t all of its tokens, N query heads, G key/value heads, h head size.
"""

import torch

__version__ = "0.0.0"

_library = torch.library.Library("sgl_kernel", "FRAGMENT")

# ---- attention


def _attention(q_nxNxh, k_txGxh, v_txGxh, scale):
    """Causal: the n queries are the last of t positions."""
    n, t, share = q_nxNxh.shape[0], k_txGxh.shape[0], q_nxNxh.shape[1] // k_txGxh.shape[1]
    k_txNxh, v_txNxh = (x.float().repeat_interleave(share, dim=1) for x in (k_txGxh, v_txGxh))
    scores_Nxnxt = torch.einsum("nah,tah->ant", q_nxNxh.float(), k_txNxh) * scale
    seen_nxt = torch.arange(t) <= torch.arange(t - n, t)[:, None]
    weights_Nxnxt = scores_Nxnxt.masked_fill(~seen_nxt, float("-inf")).softmax(-1)
    return torch.einsum("ant,tah->nah", weights_Nxnxt, v_txNxh).to(q_nxNxh.dtype)


_library.define(
    "extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) out, Tensor k_buffer, Tensor v_buffer, "
    "float k_scale, float v_scale, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, "
    "Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, float scale, float logit_cap, "
    "bool is_cross_attn, int window, Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask, bool is_causal) -> ()"
)
_library.define(
    "decode_attention_cpu(Tensor q, Tensor(a!) k_buffer, Tensor(b!) v_buffer, float k_scale, float v_scale, "
    "Tensor(c!) out, Tensor k, Tensor v, Tensor loc, Tensor attn_logits, Tensor req_to_token, "
    "Tensor req_pool_indices, Tensor seq_lens, float scale, float logit_cap, bool is_cross_attn, int window, "
    "Tensor? encoder_lens, Tensor? sinks) -> ()"
)


def _only(**conditions):
    for what, unmet in conditions.items():
        if unmet:
            raise NotImplementedError(what)


def _extend_attention(
    q, k, v, out, k_buffer, v_buffer, k_scale, v_scale, req_to_token, rows, seq_lens, extend_seq_lens, starts,
    max_len_extend, scale, logit_cap, is_cross_attn, window, encoder_lens, sinks, tree_mask, is_causal,
):  # fmt: skip
    """The new keys and values are in the buffers already."""
    _only(
        cross_attention=is_cross_attn or not is_causal,
        logit_cap=logit_cap,
        window=window,
        sinks=sinks is not None,
        tree=tree_mask is not None,
    )
    for row, length, n, start in zip(rows, seq_lens.tolist(), extend_seq_lens.tolist(), starts.tolist(), strict=True):
        place_t = req_to_token[row, :length].long()
        new = slice(start, start + n)
        out[new] = _attention(q[new], k_buffer[place_t], v_buffer[place_t], scale)


def _decode_attention(
    q, k_buffer, v_buffer, k_scale, v_scale, out, k, v, loc, attn_logits, req_to_token, rows, seq_lens, scale,
    logit_cap, is_cross_attn, window, encoder_lens, sinks,
):  # fmt: skip
    """Writes the new keys and values itself."""
    _only(cross_attention=is_cross_attn, logit_cap=logit_cap, window=window, sinks=sinks is not None)
    k_buffer[loc.long()] = k.view(-1, *k_buffer.shape[1:])
    v_buffer[loc.long()] = v.view(-1, *v_buffer.shape[1:])
    for i, (row, length) in enumerate(zip(rows, seq_lens.tolist(), strict=True)):
        place_t = req_to_token[row, :length].long()
        out[i : i + 1] = _attention(q[i : i + 1], k_buffer[place_t], v_buffer[place_t], scale)


_library.impl("extend_attention_cpu", _extend_attention, "CPU")
_library.impl("decode_attention_cpu", _decode_attention, "CPU")

# ---- places in the cache


def _windows(req_to_token, rows, starts, ends):
    """Slots of positions start..end of each request, one after the other."""
    spans = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
    return torch.cat([req_to_token[row, start:end] for row, start, end in spans])


def build_draft_decode_metadata_cpu(req_to_token, rows, seq_lens, topk, num_steps, pool_len):
    """The table of each chain: with one a request, the request's own."""
    _only(a_tree_of_drafts=topk != 1)
    return req_to_token[rows]


def assign_draft_cache_locs_contiguous_cpu(rows, req_to_token, seq_lens, out, pool_len, topk, num_cols):
    _only(a_tree_of_drafts=topk != 1)
    out.copy_(_windows(req_to_token, rows, seq_lens, seq_lens + num_cols))


def assign_extend_cache_locs_cpu(rows, req_to_token, starts, ends, out, pool_len):
    slots = _windows(req_to_token, rows, starts, ends)
    out[: len(slots)] = slots.to(out.dtype)


def assign_req_to_token_pool_cpu(rows, req_to_token, starts, ends, slots, pool_len):
    done = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        req_to_token[row, start:end] = slots[done : done + end - start].to(req_to_token.dtype)
        done += end - start


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, target_slots, source_slots):
    """Called once, to warm up, from slots to themselves: the accepted part of a chain is where it belongs."""
    _only(moves_in_the_cache=not torch.equal(target_slots, source_slots))


# ---- drafting and verification


def build_tree_kernel_efficient_cpu(
    parents, selected, seq_lens, mask, positions, index, next_token, next_sibling, topk, depth, num_tokens, mask_mode
):
    """A chain: each token after the one before. The mask is not read then."""
    _only(a_tree_of_drafts=topk != 1)
    place_J = torch.arange(num_tokens)
    index.copy_(torch.arange(index.numel()).view_as(index))
    next_token.copy_(torch.where(place_J + 1 < num_tokens, place_J + 1, -1).expand_as(next_token))
    next_sibling.fill_(-1)
    positions.copy_((seq_lens[:, None] + place_J).view_as(positions))


def verify_tree_greedy_cpu(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling,
    target_predict,
):  # fmt: skip
    """Accept drafted tokens as long as each is the target's choice after the one before."""
    predicts.copy_(target_predict.view_as(predicts))
    right = candidates[:, 1:] == target_predict.view_as(candidates)[:, :-1]
    accept_token_num.copy_(right.int().cumprod(-1).sum(-1))
    kept = torch.arange(accept_index.shape[1]) <= accept_token_num[:, None]
    accept_index.copy_(torch.where(kept, retrive_index[:, : accept_index.shape[1]], -1))


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    """The last token of each request that was accepted or added."""
    bonus_tokens.copy_(accept_tokens.view(len(accept_lens), accept_stride).gather(1, accept_lens[:, None] - 1)[:, 0])


def __getattr__(name):
    """What is imported and never called here: trees of drafts, several draft models, other kinds of layers."""
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(name)

    return missing
