"""mtp.py - train multi-token-prediction (MTP) drafters exactly as serving engines run them.

A draft is one decoder layer that proposes the next few tokens of a frozen target model. One step, all rows t:

  x[t+1+k] -> embed* -> enorm -.
                               cat -> eh_proj -> z -> + attention -> + MoE -> r -> final norm -> n -> lm_head*
  g[t]     -----------> hnorm -'                      GQA, QK-norm,   sigmoid                    |  logits of
   ^                                                  RoPE at t+k     router                     |  x[t+2+k]
   '--- step 0: h[t], the target's last hidden state; step k: n (or r) of step k-1 --------------'  * frozen

Training is test-time training (TTT): K such steps in a row, each fed with the output of the one before, the
keys and values of all steps kept: what is trained is what is later served, token by token.

  torchrun mtp.py                                           demo on a CPU: builds a target, trains, evaluates
  torchrun mtp.py --target DIR --data F.jsonl --backend fa  one GPU, a GLM-4.x or Hunyuan 3 checkpoint
  torchrun --nproc-per-node 8 mtp.py --backend usp ...      one long sequence split over 8 GPUs
  python mtp.py eval --draft DIR                            acceptance on held-out text
  python mtp.py generate --draft DIR --prompt TEXT          lossless speculative decoding

Row t is the root of its own draft chain. What step k = 0..K-1 does in row t (h_t has seen x_0..x_t):

  | embeds    | hidden in       | RoPE position | predicts  | teacher                    | sees keys of
  | x_{t+1+k} | h_t, or d_t^k-1 | t + k         | x_{t+2+k} | softmax(lm_head h_{t+1+k}) | step 0: rows <= t,
  |           |                 |               |           |                            | steps 1..k: row t

Glossary: B batch, T tokens, C hidden_size, V vocab_size, H query heads, G key/value heads, D head_dim, N any
rows, E n_routed_experts, A num_experts_per_tok, F moe_intermediate_size, K ttt_length, P ranks of a sequence.
Attention tensors are (B, T, H, D). "fp32" is at least fp32: a float64 model stays float64.

The method is the MTP drafter of AngelSpec (Tencent, 2026); recycled hidden states go back to EAGLE, the
exchange between ranks to DeepSpeed Ulysses. This file is an independent implementation.
"""
from __future__ import annotations

import math
import warnings
from dataclasses import MISSING, dataclass, fields
from functools import cache, cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
try:
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
    FLEX_MISSING = None
except ImportError as error:
    FLEX_MISSING = f"torch {torch.__version__} cannot return FlexAttention's lse ({error})"

def require(holds, message):
    if not holds:
        raise ValueError(message)

# ---- Config ------------------------------------------------------------------------------------------------

HY_V3_KEYS = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts",
              "expert_hidden_dim": "moe_intermediate_size", "router_scaling_factor": "routed_scaling_factor",
              "route_norm": "norm_topk_prob", "qk_norm": "use_qk_norm"}

@dataclass
class MTPConfig:
    """Shape of a draft layer, in glm4_moe's spelling for every family."""
    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    n_shared_experts: int = 1
    partial_rotary_factor: float = 1.0
    use_qk_norm: bool = True
    attention_bias: bool = False
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True
    n_group: int = 1
    topk_group: int = 1
    initializer_range: float = 0.02
    max_position_embeddings: int = 131072
    model_type: str = "glm4_moe"

    def __post_init__(self):
        H, G, E, A = (self.num_attention_heads, self.num_key_value_heads, self.n_routed_experts,
                      self.num_experts_per_tok)
        usable = E // self.n_group * min(self.topk_group, self.n_group)
        rotary = int(self.head_dim * self.partial_rotary_factor)
        require(H % G == 0, f"num_attention_heads {H} must be a multiple of num_key_value_heads {G}")
        require(E % self.n_group == 0 and (self.n_group == 1 or E >= 2 * self.n_group),
                f"n_routed_experts {E} cannot be n_group {self.n_group} equal groups of at least two")
        require(1 <= A <= usable, f"num_experts_per_tok {A} is not in 1..{usable}, all topk_group allows")
        require(rotary > 0 and rotary % 2 == 0, f"RoPE turns {rotary} of {self.head_dim} dims, must be even")

    @classmethod
    def from_hf(cls, config, names=None):
        """Read a target's config.json, a dict. `names`: its tensors' names, which tell whether a hy_v3 layer
        has QK-norm if the config does not. ValueError for a family, RoPE or expert that does not fit."""
        family, hy_v3 = config.get("model_type"), config.get("model_type") == "hy_v3"
        require(hy_v3 or family == "glm4_moe", f"model_type {family!r} is neither glm4_moe nor hy_v3; MLA, "
                "softmax routers and dense MTP layers do not fit this draft")
        config = {HY_V3_KEYS.get(key, key) if hy_v3 else key: value for key, value in config.items()
                  if value is not None}
        act, bias = config.get("hidden_act", "silu"), config.get("mlp_bias", False)
        require(act == "silu" and not bias, "experts must be silu(gate) * up without bias, the config has "
                f"hidden_act {act!r}, mlp_bias {bias!r}")
        default = dict(use_qk_norm=False, partial_rotary_factor=0.5)
        if hy_v3:  # transformers writes neither key and does both, vLLM would read a missing qk_norm as False
            q_norm = names is None or any(name.endswith("self_attn.q_norm.weight") for name in names)
            default = dict(use_qk_norm=q_norm, norm_topk_prob=True)
            for name in default.keys() - config.keys():
                warnings.warn(f"the hy_v3 config does not say {name}: taken as {default[name]}")
        found = default | {f.name: config[f.name] for f in fields(cls) if f.name in config}
        found["rope_theta"], rotary = read_rope(config)
        found |= {} if rotary is None else {"partial_rotary_factor": rotary}
        found.setdefault("head_dim", found.get("hidden_size", 0) // found.get("num_attention_heads", 1))
        lost = [f.name for f in fields(cls) if f.default is MISSING and f.name not in found]
        require(not lost, f"the {family} config has no value for {', '.join(lost)}")
        return cls(**found)

def read_rope(config):
    """rope_theta, partial_rotary_factor or None: from the top level, rope_parameters or rope_scaling."""
    config = config | (config.get("rope_scaling") or {}) | (config.get("rope_parameters") or {})
    kind = config.get("rope_type", config.get("type", "default"))
    require(kind == "default", f"rope_type {kind!r} is not supported; only 'default' (plain RoPE) is")
    require(config.get("rope_theta"), "the config has no rope_theta, neither on top nor in rope_parameters")
    return float(config["rope_theta"]), config.get("partial_rotary_factor")

# ---- Small operations --------------------------------------------------------------------------------------

def fp32(dtype):
    """At least float32: what norms, routers, softmaxes and sums run in."""
    return torch.promote_types(dtype, torch.float32)

def halves(x):
    return x[:len(x) // 2], x[len(x) // 2:]

def window(x, start, stop):
    """A copy of x[:, start:stop], (B, stop - start, ...), zeros where x has ended."""
    part = x[:, start:stop]
    return torch.cat([part, part.new_zeros(len(x), stop - start - part.shape[1], *x.shape[2:])], dim=1)

def rope(x, position_ids, config):
    """Turn the first partial_rotary_factor * D dims of x (B, T, H, D), half-split, by position_ids (B, T).
    Angles are fp32, cos and sin are then cast to x's dtype, as transformers and vLLM do."""
    D, dtype = x.shape[-1], fp32(x.dtype)
    half = int(D * config.partial_rotary_factor) // 2
    frequency = 1.0 / config.rope_theta ** (torch.arange(half, dtype=dtype, device=x.device) / half)
    angle = position_ids.to(dtype)[..., None, None] * frequency  # (B, T, 1, half)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b, rest = x.split([half, half, D - 2 * half], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)

class Documents:
    """Which rows belong together. doc_ids (B, T): a document is a maximal run of equal values, negative is
    padding; None: each row of the batch is one. run (B, T) numbers documents from 1, -1 in padding;
    position_ids (B, T) counts from each document's start."""
    def __init__(self, doc_ids, batch, length, device):
        rows = torch.arange(length, device=device).expand(batch, length)
        self.whole = doc_ids is None
        doc_ids = torch.zeros_like(rows) if self.whole else doc_ids
        self.first = F.pad(doc_ids[:, 1:] != doc_ids[:, :-1], (1, 0), value=True)
        self.run = self.first.cumsum(1).masked_fill(doc_ids < 0, -1)
        self.position_ids = rows - torch.where(self.first, rows, 0).cummax(1).values

    def has_later(self, by):
        """(B, T) bool: does token t + by exist and lie in row t's document?"""
        return (self.run >= 0) & (window(self.run, by, by + self.run.shape[1]) == self.run)

    @cached_property
    def segments(self):
        """Index of every document, for kernels that take one at a time. Reads the tensors: for a CPU."""
        if self.whole:
            return [(slice(None), slice(None))]
        starts = self.first.nonzero().tolist()  # [b, start], b ascending
        stops = [j or self.run.shape[1] for _, j in starts[1:] + [[0, 0]]]
        return [(slice(b, b + 1), slice(i, j)) for (b, i), j in zip(starts, stops) if self.run[b, i] >= 0]

    @cached_property
    def block_mask(self):
        """FlexAttention's BlockMask. One head: the mask is the same for all of them."""
        run, (B, T) = self.run, self.run.shape
        return create_block_mask(lambda b, h, i, j: (i >= j) & (run[b, i] == run[b, j]) & (run[b, j] >= 0),
                                 B, None, T, T, device=run.device, _compile=run.is_cuda)

# ---- Attention ---------------------------------------------------------------------------------------------
#
# The mask of the TTT attention, rows t down, keys across (T = 4, step k = 2). A query of row t sees the keys
# of step 0 of rows <= t of its document and, of each later step, only the key of its own row: its own chain.
#
#        step 0     step 1     step 2         Block 0 is ordinary causal attention, o_0 and lse_0. What steps
#     t: 0 1 2 3    0 1 2 3    0 1 2 3        1..k add is one score per row, s_j = scale * <q, k_j[t]>:
#     0  x . . .    x . . .    x . . .
#     1  x x . .    . x . .    . x . .             lse = logsumexp(lse_0, s_1, .., s_k)
#     2  x x x .    . . x .    . . x .             out = exp(lse_0 - lse) o_0 + sum_j exp(s_j - lse) v_j[t]
#     3  x x x x    . . . x    . . . x
#
# which is what a serving engine computes when it drafts k tokens after a verified prefix. Backward, with the
# MERGED out and lse and w_j = exp(s_j - lse): dv_j = w_j dO, ds_j = w_j <dO, v_j - out>, dk_j = scale ds_j q,
# dq += scale ds_j k_j; dk_j, dv_j are summed over the query heads that share a key/value head. Block 0 too:
# its backward, given the merged out and lse, is exact. (Given its own, dq and dK_0 are wrong, dV_0 is right.)
#
# Every backend: attend(q, k, v, past_k, past_v, docs, group) -> (out, past_k, past_v). q, out (B, T, H, D);
# k, v (B, T, G, D) of this step; past_k, past_v lists of those of earlier steps, returned with this step's
# added. Rows of padding see nothing in block 0: o_0 = 0, lse_0 = -inf.

def attend_sdpa(q, k, v, past_k, past_v, docs, group=None):
    """Dense masked scores over the step-0 keys, the diagonals of later steps appended. Memory is T * T."""
    past_k, past_v = past_k + [k], past_v + [v]
    B, T, H, D = q.shape
    grouped = q.view(B, T, k.shape[2], -1, D)  # (B, T, G, H/G, D)
    same = (docs.run[:, :, None] == docs.run[:, None, :]) & (docs.run >= 0)[:, None, :]
    unseen = ~same.tril()[:, :, None, None]
    scores = [torch.einsum("btgrd,bsgd->btgrs", grouped, past_k[0]).masked_fill(unseen, -torch.inf)]
    scores += [torch.einsum("btgrd,btgd->btgr", grouped, key)[..., None] for key in past_k[1:]]
    weights = (torch.cat(scores, -1).to(fp32(q.dtype)) * D ** -0.5).softmax(-1).to(q.dtype)
    block_0 = weights[..., :T].masked_fill(unseen, 0.0)  # a row that sees nothing: nan -> 0
    out = torch.einsum("btgrs,bsgd->btgrd", block_0, past_v[0])
    for j, value in enumerate(past_v[1:]):
        out = out + weights[..., T + j, None] * value[:, :, :, None]
    return out.reshape(B, T, H, D), past_k, past_v

def merge_ref(o_0, lse_0, q, ks, vs, scale):
    """Merge block 0's attention with one key per row and later step, see above. o_0, q (B, T, H, D), lse_0
    (B, T, H), natural log, fp32; ks, vs lists of (B, T, G, D). Returns out (B, T, H, D) and lse (B, T, H)."""
    k, v = (torch.stack(x, dim=3).to(lse_0.dtype) for x in (ks, vs))  # (B, T, G, k, D)
    rows = (*k.shape[:3], -1, q.shape[-1])
    q32, o_0, lse_0 = q.view(rows).to(k.dtype), o_0.view(rows).to(k.dtype), lse_0.view(*rows[:4], 1)
    s = scale * q32 @ k.mT  # (B, T, G, H/G, k)
    lse = torch.cat([lse_0, s], -1).logsumexp(-1, keepdim=True)
    out = (lse_0 - lse).exp() * o_0 + (s - lse).exp() @ v
    return out.view(q.shape).to(q.dtype), lse.view(q.shape[:3])

def merge_backward_ref(dout, q, ks, vs, out, lse, scale, o_0=None, lse_0=None):
    """Backward of merge_ref: dq (the part through s_j), dks, dvs; given o_0 and lse_0 also do_0, dlse_0."""
    k, v = (torch.stack(x, dim=3).to(lse.dtype) for x in (ks, vs))
    rows = (*k.shape[:3], -1, q.shape[-1])
    q32, dout32, out32 = (x.view(rows).to(lse.dtype) for x in (q, dout, out))
    w = (scale * q32 @ k.mT - lse.view(*rows[:4], 1)).exp()  # (B, T, G, H/G, k)
    delta = (dout32 * out32).sum(-1, keepdim=True)
    ds = scale * w * (dout32 @ v.mT - delta)
    dks, dvs = (list((x.mT @ y).to(q.dtype).unbind(3)) for x, y in ((ds, q32), (w, dout32)))
    dq = (ds @ k).view(q.shape).to(q.dtype)
    if o_0 is None:
        return dq, dks, dvs
    w_0 = (lse_0 - lse).view(*rows[:4], 1).exp()
    dlse_0 = w_0 * ((dout32 * o_0.view(rows)).sum(-1, keepdim=True) - delta)
    return dq, dks, dvs, (w_0 * dout32).view(q.shape).to(q.dtype), dlse_0.view(lse.shape)

merge, merge_backward = merge_ref, merge_backward_ref

def causal_block_cpu(q, k, v, docs, scale):
    """o (B, T, H, D), lse (B, T, H) of causal attention by a private op, the only one on a CPU that gives its
    lse. It has no document mask that is linear in T, hence one call for each document."""
    out, lse = q.new_zeros(q.shape), q.new_full(q.shape[:3], -torch.inf, dtype=fp32(q.dtype))
    for at in docs.segments:
        part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(x[at].transpose(1, 2) for x in (q, k, v)), 0.0, True, scale=scale)
        out[at], lse[at] = (x.transpose(1, 2) for x in part)
    return out, lse

class AttendCPU(torch.autograd.Function):
    """Block 0 and the merge as one: given the merged out and lse, the block's own backward is exact."""
    @staticmethod
    def forward(ctx, docs, scale, q, *kv):
        (k, *ks), (v, *vs) = halves(kv)
        block_0 = causal_block_cpu(q, k, v, docs, scale)
        out, lse = merge(*block_0, q, ks, vs, scale) if ks else block_0
        ctx.docs, ctx.scale = docs, scale
        ctx.save_for_backward(q, out, lse, *kv)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, out, lse, *kv = ctx.saved_tensors
        (k, *ks), (v, *vs) = halves(kv)
        dout, dq, dk, dv = dout.contiguous(), *(x.new_zeros(x.shape) for x in (q, k, v))
        for at in ctx.docs.segments:
            part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(x[at].transpose(1, 2) for x in (dout, q, k, v, out, lse)), 0.0, True, scale=ctx.scale)
            dq[at], dk[at], dv[at] = (x.transpose(1, 2) for x in part)
        chain, dks, dvs = merge_backward(dout, q, ks, vs, out, lse, ctx.scale) if ks else (0, [], [])
        return None, None, dq + chain, dk, *dks, dv, *dvs

class Merge(torch.autograd.Function):
    """The merge outside a block whose own autograd takes a gradient for its lse (FlexAttention)."""
    @staticmethod
    def forward(ctx, scale, o_0, lse_0, q, *kv):
        out, lse = merge(o_0, lse_0, q, *halves(kv), scale)
        ctx.scale = scale
        ctx.save_for_backward(o_0, lse_0, q, out, lse, *kv)
        return out

    @staticmethod
    def backward(ctx, dout):
        o_0, lse_0, q, out, lse, *kv = ctx.saved_tensors
        dout, (ks, vs) = dout.contiguous(), halves(kv)
        dq, dks, dvs, *d_0 = merge_backward(dout, q, ks, vs, out, lse, ctx.scale, o_0, lse_0)
        return None, *d_0, dq, *dks, *dvs

compiled_flex_attention = cache(lambda: torch.compile(flex_attention, dynamic=False))

def causal_block_flex(q, k, v, docs, scale):
    """o (B, T, H, D), lse (B, T, H) by FlexAttention; on CUDA its autograd takes lse's gradient."""
    D = q.shape[-1]
    width = max(16, 1 << (D - 1).bit_length())  # compiled kernels take powers of two; zeros change no score
    q, k, v = (F.pad(x, (0, width - D)).transpose(1, 2) for x in (q, k, v))
    attention = compiled_flex_attention() if q.is_cuda else flex_attention
    out, aux = attention(q, k, v, block_mask=docs.block_mask, scale=scale, enable_gqa=True,
                         return_aux=AuxRequest(lse=True))
    return out[..., :D].transpose(1, 2).contiguous(), aux.lse.transpose(1, 2).contiguous()

def why_not_fa(device_type, dtype):
    """None where attend_fa runs, else the reason."""
    if device_type == "cuda":
        return FLEX_MISSING or ("FlexAttention has no float64 kernels" if dtype == torch.float64 else None)
    if device_type != "cpu":
        return f"neither a CPU nor a CUDA device but {device_type}"
    op = "_scaled_dot_product_flash_attention_for_cpu_backward"
    return None if hasattr(torch.ops.aten, op) else f"torch {torch.__version__} has no aten::{op}"

def attend_fa(q, k, v, past_k, past_v, docs, group=None):
    """Block 0 through a flash kernel with its lse, later steps merged in. Memory linear in T."""
    reason = why_not_fa(q.device.type, q.dtype)
    require(not reason, f"backend fa cannot run: {reason}. Use --backend sdpa.")
    past_k, past_v, scale = past_k + [k], past_v + [v], q.shape[-1] ** -0.5
    if q.device.type == "cpu":
        return AttendCPU.apply(docs, scale, q, *past_k, *past_v), past_k, past_v
    out, lse = causal_block_flex(q, past_k[0], past_v[0], docs, scale)
    if len(past_k) > 1:
        out = Merge.apply(scale, out, lse, q, *past_k[1:], *past_v[1:])
    return out, past_k, past_v

class AllToAll(torch.autograd.Function):
    """x[i] goes to rank i of the group, what comes from rank i becomes out[i]; its own backward."""
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, out = group, torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx, dout):
        return AllToAll.apply(dout.contiguous(), ctx.group), None

def attend_usp(q, k, v, past_k, past_v, docs, group=None):
    """attend_fa between two all-to-alls (Ulysses): tokens are sharded outside, heads inside; P must divide H.
    T is a rank's share of the row, docs describe all of it, the cache stays sharded by heads. Heads of K, V
    are repeated P / gcd(G, P) times: each rank gets those its query heads read. Autograd sums the copies."""
    P, (B, T, H, D) = dist.get_world_size(group), q.shape
    require(H % P == 0, f"backend usp: {P} ranks do not divide {H} query heads; use {math.gcd(H, P)} ranks")
    k, v = (x.repeat_interleave(P // math.gcd(x.shape[2], P), dim=2) for x in (k, v))
    heads = torch.cat([x.reshape(B, T, P, -1, D) for x in (q, k, v)], dim=3)  # (B, T, P, (H + 2Gf) / P, D)
    heads = AllToAll.apply(heads.permute(2, 0, 1, 3, 4).contiguous(), group)
    heads = heads.transpose(0, 1).reshape(B, P * T, -1, D)
    q, k, v = (x.contiguous() for x in heads.split([x.shape[2] // P for x in (q, k, v)], dim=2))
    out, past_k, past_v = attend_fa(q, k, v, past_k, past_v, docs)
    out = AllToAll.apply(out.reshape(B, P, T, -1, D).transpose(0, 1).contiguous(), group)
    return out.permute(1, 2, 0, 3, 4).reshape(B, T, H, D), past_k, past_v

BACKENDS = {"sdpa": attend_sdpa, "fa": attend_fa, "usp": attend_usp}

def attend_decode(q, k, v, past_k, past_v, docs=None, group=None):
    """Serving: T new rows attend causally to a growing cache (past_k, past_v: empty or one tensor)."""
    k, v = (torch.cat([*past, new], dim=1) for past, new in ((past_k, k), (past_v, v)))
    T, S = q.shape[1], k.shape[1]
    mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    q, *kv = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, *kv, attn_mask=mask, enable_gqa=True).transpose(1, 2), [k], [v]

class Attention(nn.Module):
    """Grouped-query attention; RMSNorm of each q and k head BEFORE RoPE where the config has use_qk_norm."""
    def __init__(self, config):
        super().__init__()
        self.config, C, D = config, config.hidden_size, config.head_dim
        H, G, bias = config.num_attention_heads, config.num_key_value_heads, config.attention_bias
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(C, heads * D, bias=bias) for heads in (H, G, G))
        self.o_proj = nn.Linear(H * D, C, bias=False)
        if config.use_qk_norm:
            self.q_norm, self.k_norm = (nn.RMSNorm(D, eps=config.rms_norm_eps) for _ in "qk")

    def forward(self, x, position_ids, past_k, past_v, docs, attend, group=None):
        cfg = self.config
        q, k, v = (f(x).view(*x.shape[:2], -1, cfg.head_dim) for f in (self.q_proj, self.k_proj, self.v_proj))
        if cfg.use_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rope(q, position_ids, cfg), rope(k, position_ids, cfg)
        out, past_k, past_v = attend(q, k, v, past_k, past_v, docs, group)
        return self.o_proj(out.flatten(2)), past_k, past_v

# ---- Mixture of experts ------------------------------------------------------------------------------------

class Router(nn.Module):
    """Sigmoid router. Stays at least fp32: .to(bfloat16) of the model does not cast its weight and bias. The
    bias steers the choice only and gets no gradient: `balance_experts` moves it."""
    def __init__(self, config):
        super().__init__()
        self.config, dtype = config, fp32(torch.get_default_dtype())
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size, dtype=dtype))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts, dtype=dtype))

    def _apply(self, fn, recurse=True):
        def keep_fp32(tensor):
            moved = fn(tensor)
            return moved if moved.dtype == fp32(moved.dtype) else tensor.to(moved.device)
        return super()._apply(keep_fp32, recurse)

    def forward(self, x):
        """x (N, C) -> weights (N, A) at least fp32, chosen experts (N, A) int64."""
        cfg = self.config
        scores = F.linear(x.to(self.weight.dtype), self.weight).sigmoid()
        choice = scores.detach() + self.e_score_correction_bias
        if cfg.n_group > 1:  # only experts of the best topk_group groups; a group's score: its two best
            grouped = choice.view(len(x), cfg.n_group, -1)
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(cfg.topk_group, dim=-1).indices
            shut = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
            choice = grouped.masked_fill(shut[..., None], -torch.inf).flatten(1)
        chosen = choice.topk(cfg.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(1, chosen)
        if cfg.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * cfg.routed_scaling_factor, chosen

def experts_ref(x, chosen, weights, gate_up_proj, down_proj):
    """One expert after another: y[n] = sum_a weights[n, a] * down[e] (silu(gate[e] x[n]) * up[e] x[n]).
    x (N, C); chosen, weights (N, A); gate_up_proj (E, 2F, C), gate rows first; down_proj (E, C, F)."""
    y = torch.zeros_like(x, dtype=weights.dtype)
    for e in range(len(gate_up_proj)):
        row, slot = (chosen == e).nonzero(as_tuple=True)
        gate, up = F.linear(x[row], gate_up_proj[e]).chunk(2, dim=-1)
        out = F.linear(F.silu(gate) * up, down_proj[e])
        y = y.index_add(0, row, out.to(y.dtype) * weights[row, slot, None])
    return y.to(x.dtype)

def sort_by_expert(chosen, n_experts):
    """order (N*A,): (row, slot) pairs in stable order of their expert; ends (E,): where an expert's end."""
    flat, order = chosen.flatten().sort(stable=True)
    return order, torch.searchsorted(flat, torch.arange(n_experts, device=flat.device), right=True)

class ExpertsCPU(torch.autograd.Function):
    """Pairs sorted by expert, each expert's rows worked on while they are in the cache. Saves x and gate_up's
    output; a routing weight's gradient is <act, dy W_down>: no expert's output is kept, no [N * A, C] is."""
    @staticmethod
    def forward(ctx, x, chosen, weights, gate_up_proj, down_proj):
        order, ends = sort_by_expert(chosen, len(gate_up_proj))
        rows, scale, ends = order // chosen.shape[1], weights.flatten()[order, None], ends.tolist()
        ctx.spans = [(e, slice(i, j)) for e, (i, j) in enumerate(zip([0] + ends, ends)) if i < j]
        hidden = x.new_empty(len(order), gate_up_proj.shape[1])
        y = torch.zeros_like(x, dtype=weights.dtype)
        for e, at in ctx.spans:
            gate, up = torch.mm(x[rows[at]], gate_up_proj[e].mT, out=hidden[at]).chunk(2, dim=-1)
            act = (F.silu(gate) * up).mul_(scale[at])
            y.index_add_(0, rows[at], (act @ down_proj[e].mT).to(y.dtype))  # a row occurs once per expert
        ctx.save_for_backward(x, weights, gate_up_proj, down_proj, order, hidden)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, weights, gate_up_proj, down_proj, order, hidden = ctx.saved_tensors
        rows, scale = order // weights.shape[1], weights.flatten()[order, None]
        dx, dscale = torch.zeros_like(x, dtype=scale.dtype), torch.empty_like(scale)
        dgate_up, ddown = torch.zeros_like(gate_up_proj), torch.zeros_like(down_proj)  # 0 if unused
        for e, at in ctx.spans:
            gate, up = hidden[at].to(scale.dtype).chunk(2, dim=-1)
            sig = gate.sigmoid()
            silu, dout = gate * sig, dy[rows[at]]
            act, dact = silu * up, (dout @ down_proj[e]).to(scale.dtype)
            dscale[at] = (act * dact).sum(-1, keepdim=True)
            torch.mm(dout.mT, (act * scale[at]).to(x.dtype), out=ddown[e])
            dact *= scale[at]
            dhidden = torch.cat([dact * up * (sig + silu * (1 - sig)), dact * silu], dim=-1).to(x.dtype)
            torch.mm(dhidden.mT, x[rows[at]], out=dgate_up[e])
            dx.index_add_(0, rows[at], (dhidden @ gate_up_proj[e]).to(dx.dtype))
        dweights = torch.empty_like(weights).view(-1).index_copy_(0, order, dscale[:, 0]).view(weights.shape)
        return dx.to(x.dtype), None, dweights, dgate_up, ddown

def experts_grouped(x, chosen, weights, gate_up_proj, down_proj):
    """experts_ref by two grouped matmuls over pairs sorted by expert: for CUDA, without a host sync."""
    order, ends = sort_by_expert(chosen, len(gate_up_proj))
    ends = ends.to(torch.int32)
    gate, up = F.grouped_mm(x[order // chosen.shape[1]], gate_up_proj.mT, offs=ends).chunk(2, dim=-1)
    act = F.silu(gate) * up * weights.flatten()[order, None].to(x.dtype)
    out = F.grouped_mm(act, down_proj.mT, offs=ends)  # (N * A, C), sorted by expert
    return out[order.argsort()].view(*chosen.shape, -1).to(weights.dtype).sum(1).to(x.dtype)

class MLP(nn.Module):
    """silu(gate) * up -> down: the shared expert, and the dense layer of a target."""
    def __init__(self, hidden_size, width):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

class MoE(nn.Module):
    """Routed experts, weights fused, and the shared expert, which has weight 1."""
    def __init__(self, config):
        super().__init__()
        E, C, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate = Router(config)
        fused = dict(gate_up_proj=torch.empty(E, 2 * width, C), down_proj=torch.empty(E, C, width))
        self.experts = nn.ParameterDict(fused.items())
        self.shared_experts = MLP(C, config.n_shared_experts * width) if config.n_shared_experts else None

    def forward(self, x):
        """x (B, T, C) -> y (B, T, C), chosen experts (B, T, A)."""
        weights, chosen = self.gate(x.flatten(0, 1))
        routed, fused = ExpertsCPU.apply if x.device.type == "cpu" else experts_grouped, self.experts
        y = routed(x.flatten(0, 1), chosen, weights, fused.gate_up_proj, fused.down_proj).view(x.shape)
        y = y if self.shared_experts is None else y + self.shared_experts(x)
        return y, chosen.view(*x.shape[:2], -1)

@torch.no_grad()
def balance_experts(bias, load, rate):
    """Balancing without a loss, in place: bias += rate * sign(mean load - load), re-centred to mean zero."""
    load = load.to(bias.dtype)
    bias += rate * (load.mean() - load).sign()
    bias -= bias.mean()

# ---- The draft ---------------------------------------------------------------------------------------------

class DecoderLayer(nn.Module):
    """Pre-norm decoder layer: attention, then a MoE (or, with `dense_width`, a plain MLP)."""
    def __init__(self, config, dense_width=None):
        super().__init__()
        self.config, C, eps = config, config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(C, eps=eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(C, eps=eps)
        self.mlp = MLP(C, dense_width) if dense_width else MoE(config)

    def forward(self, z, position_ids, past_k, past_v, docs, attend=attend_sdpa, group=None):
        """z (B, T, C) -> r (B, T, C), past_k, past_v, chosen experts (B, T, A) or None. No final norm."""
        x = self.input_layernorm(z)
        out, past_k, past_v = self.self_attn(x, position_ids, past_k, past_v, docs, attend, group)
        u = z + out
        y = self.mlp(self.post_attention_layernorm(u))
        y, chosen = y if isinstance(y, tuple) else (y, None)
        return u + y, past_k, past_v, chosen

class MTP(DecoderLayer):
    """The draft: fusion of token embedding and hidden state, one decoder layer, final norm. Embedding and
    lm_head are the target's: `set_target` keeps references outside parameters(), state_dict() and .to()."""
    embed_weight = lm_head_weight = None
    def __init__(self, config):
        super().__init__(config)
        C, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = nn.RMSNorm(C, eps=eps), nn.RMSNorm(C, eps=eps)
        self.eh_proj = nn.Linear(2 * C, C, bias=False)
        self.shared_head = nn.ModuleDict({"norm": nn.RMSNorm(C, eps=eps)})
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator=None):
        """From scratch: norms 1, matrices normal(0, initializer_range), biases 0."""
        for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
            if tensor.dim() > 1:
                tensor.normal_(0.0, self.config.initializer_range, generator=generator)
            else:
                tensor.fill_(1.0 if name.endswith("norm.weight") else 0.0)

    def set_target(self, embed_weight, lm_head_weight):
        """The target's embedding and lm_head, both (V, C), any float dtype, on this device. Not copied."""
        shape, device = (self.config.vocab_size, self.config.hidden_size), self.eh_proj.weight.device
        for name, tensor in dict(embed_weight=embed_weight, lm_head_weight=lm_head_weight).items():
            require(tensor.shape == shape, f"{name} is {tuple(tensor.shape)}, expected (V, C) = {shape}")
            require(tensor.device == device, f"{name} is on {tensor.device}, the draft on {device}: move one")
            frozen = tensor.requires_grad_(False) if tensor.is_leaf else tensor.detach()
            object.__setattr__(self, name, frozen)  # past nn.Module's registry

    def embed(self, input_ids):
        return F.embedding(input_ids, self.embed_weight).to(self.eh_proj.weight.dtype)

    def logits(self, n):
        return F.linear(n.to(self.lm_head_weight.dtype), self.lm_head_weight)

    def forward(self, embeds, hidden, position_ids, past_k, past_v, docs, attend=attend_sdpa, group=None):
        """One step. embeds, hidden (B, T, C); position_ids (B, T). Returns n = final_norm(r) and r (B, T, C),
        past_k and past_v with this step's appended, chosen experts (B, T, A)."""
        z = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(hidden)], dim=-1))  # embedding FIRST
        r, past_k, past_v, chosen = super().forward(z, position_ids, past_k, past_v, docs, attend, group)
        return self.shared_head["norm"](r), r, past_k, past_v, chosen

# ---- Loss and the TTT loop ---------------------------------------------------------------------------------

def valid_rows(loss_mask, docs, ttt_length):
    """(K, B, T) bool: row t counts at step k if token t+2+k exists in row t's document and is not masked."""
    mask, T = torch.ones_like(docs.first) if loss_mask is None else loss_mask != 0, docs.run.shape[1]
    return torch.stack([docs.has_later(k + 2) & window(mask, k + 2, k + 2 + T) for k in range(ttt_length)])

def valid_counts(loss_mask, doc_ids, ttt_length, *, batch, length):
    """[K] int64: how many rows of a batch count at each step. Summed over micro-batches and data-parallel
    ranks and passed as ttt_loss(counts=...), they keep any split of a batch from changing its gradient."""
    given = loss_mask if doc_ids is None else doc_ids
    docs = Documents(doc_ids, batch, length, "cpu" if given is None else given.device)
    return valid_rows(loss_mask, docs, ttt_length).sum((1, 2))

LOGITS_HELD = {"cpu": 2 ** 25, "cuda": 2 ** 27}  # elements of one [rows, V] buffer; there are three

def teacher_chunks(valid, size):
    """[(b, start, stop)] of the teacher rows that are read, at most `size` at a time. Row t, step k reads
    teacher row t + 1 + k; a row that counts at step k is judged at all steps before k too."""
    K, B, T = valid.shape
    read, judged = valid.new_zeros(B, T + K), torch.zeros_like(valid[0])
    for k in reversed(range(K)):
        judged = judged | valid[k]
        read[:, k + 1:k + 1 + T] |= judged
    starts = range(1, T + K, size)
    busy = torch.stack([read[:, s:s + size].any(1) for s in starts]).tolist()
    return [(b, s, min(s + size, T + K)) for s, row in zip(starts, busy) for b in range(B) if row[b]]

def row_softmax(x, lm_head, scratch, p):
    """Of rows x (N, C): logits (N, V) less their maximum, softmax (in p), argmax (the first), log-sum-exp."""
    logits = torch.mm(x.to(lm_head.dtype), lm_head.mT, out=scratch[:len(x)]).to(p.dtype)
    top, best = logits.max(dim=-1, keepdim=True)
    p = torch.exp(logits.sub_(top), out=p[:len(x)])
    total = p.sum(-1, keepdim=True)  # torch.softmax is off by 5e-6 at V = 150k on a CPU
    return logits, p.div_(total), best[:, 0], total[:, 0].log()

class ChunkedLoss(torch.autograd.Function):
    """sum_k coeff_k * sum over counted rows of (ce_weight * CE + kl_weight * KL), without holding [T, V].

    lm_head is frozen, so d loss / d n is formed in the forward pass, chunk of teacher rows by chunk:
        d loss / d logits = (ce + kl) q - ce onehot(argmax p) - kl p,     q, p = softmax of draft, of teacher,
    and only d loss / d n [B, T, C] is kept. The logits of a teacher row are computed once for all K steps."""
    @staticmethod
    def forward(ctx, lm_head, hidden, valid, coeff, ce_weight, kl_weight, *ns):
        """lm_head (V, C); hidden (B, T + K, C), target's; valid (K, B, T); coeff [K] float64; ns (B, T, C).
        Returns loss and, without gradient, sums over counted rows [4, K]: CE, KL, right, prefix hits."""
        T, V, wide = ns[0].shape[1], len(lm_head), fp32(lm_head.dtype)
        size = min(max(1, LOGITS_HELD.get(lm_head.device.type, 2 ** 25) // V), hidden.shape[1])
        scratch, p_rows, q_rows = (lm_head.new_empty(size, V, dtype=x) for x in (lm_head.dtype, wide, wide))
        ce, kl, hit = (p_rows.new_zeros(valid.shape, dtype=x) for x in (wide, wide, torch.int))
        grads = [torch.zeros_like(n) for n in ns] if any(ctx.needs_input_grad) else []
        for b, start, stop in teacher_chunks(valid, size):
            logits, p_chunk, labels, lse = row_softmax(hidden[b, start:stop], lm_head, scratch, p_rows)
            plogp = logits.mul_(p_chunk).sum(-1) - lse  # in place; an einsum here errs by 4e-3 at V = 150k
            for k, n in enumerate(ns):
                i, j = max(0, start - 1 - k), min(T, stop - 1 - k)  # draft rows whose teachers these are
                if i >= j:
                    continue
                rows, at = (k, b, slice(i, j)), slice(i + 1 + k - start, j + 1 + k - start)
                p, label = p_chunk[at], labels[at, None]
                logits, q, best, lse = row_softmax(n[b, i:j], lm_head, scratch, q_rows)
                ce[rows] = lse - logits.gather(1, label)[:, 0]
                kl[rows] = plogp[at] - logits.mul_(p).sum(-1) + lse
                hit[rows] = best == labels[at]
                if grads:
                    dlogits = q.mul_(ce_weight + kl_weight).sub_(p, alpha=kl_weight)
                    dlogits.scatter_add_(1, label, torch.full_like(lse, -ce_weight)[:, None])
                    dn = (dlogits.to(lm_head.dtype) @ lm_head).to(n.dtype) * coeff[k]
                    grads[k][b, i:j] = dn.masked_fill_(~valid[rows][:, None], 0)
        ctx.save_for_backward(*grads)
        sums = torch.stack([x.double().where(valid, 0).sum((1, 2)) for x in (ce, kl, hit, hit.cumprod(0))])
        loss = ((ce_weight * sums[0] + kl_weight * sums[1]) * coeff).sum().to(fp32(ns[0].dtype))
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    def backward(ctx, dloss, _):
        return *[None] * 6, *(dloss.to(grad.dtype) * grad for grad in ctx.saved_tensors)

class TTTOutput(NamedTuple):
    """ttt_loss's result. All but loss are [K] and of this call alone (global over `group`)."""
    loss: torch.Tensor         # scalar: sum_k w_k (ce_weight CE_k + kl_weight KL_k); usp: this rank's share
    ce: torch.Tensor           # mean cross-entropy against the teacher's argmax, 0 where no row counts
    kl: torch.Tensor           # mean KL(teacher || draft)
    acc: torch.Tensor          # share of counted rows whose argmax is the teacher's
    count: torch.Tensor        # counted rows
    prefix_hits: torch.Tensor  # counted rows right in steps 0..k; accept_len = 1 + sum_k prefix_hits / count
    expert_load: torch.Tensor  # [E] rows sent to each expert in all steps, without padding and foreign tokens

def ttt_loss(model, input_ids, hidden_states, loss_mask=None, doc_ids=None, *, ttt_length=3, backend="sdpa",
             group=None, ce_weight=1.0, kl_weight=1.0, decay=0.8, recycle="post", zero_first_embedding=False,
             counts=None):
    """Loss of K = ttt_length draft steps from every row, as served: TTTOutput. ValueError for bad input.

    input_ids (B, T); hidden_states (B, T, C): the target's after its final norm; loss_mask (B, T) of the
    PREDICTED token, nonzero counts; doc_ids (B, T), see Documents, padding is never read. counts [K]: divides
    the sums, default this call's own. recycle: what feeds the next step, "post" (n) or "pre" (r).
    zero_first_embedding: that of position 0, as vLLM. backend "usp": every rank of `group` passes the whole
    row; loss is its local sum over the global count, so that gradients SUMMED over ranks are right."""
    check_batch(model, input_ids, hidden_states, loss_mask, doc_ids, ttt_length, backend, group, recycle)
    (B, T), K = input_ids.shape, ttt_length
    P, rank = (dist.get_world_size(group), dist.get_rank(group)) if backend == "usp" else (1, 0)
    if T % P:  # right-pad to equal shards
        doc_ids = F.pad(torch.zeros_like(input_ids) if doc_ids is None else doc_ids, (0, -T % P), value=-1)
        loss_mask = None if loss_mask is None else F.pad(loss_mask, (0, -T % P))
    length = -(-T // P)
    lo, hi = rank * length, (rank + 1) * length
    docs = Documents(doc_ids, B, P * length, input_ids.device)
    valid = valid_rows(loss_mask, docs, K)
    count = valid.sum((1, 2))
    position_ids, padding = docs.position_ids[:, lo:hi], window(docs.run, lo, hi + K) < 0
    ids = window(input_ids, lo, hi + K).masked_fill(padding, 0)  # (B, length + K): a halo of K rows
    hidden = window(hidden_states.detach(), lo, hi + K).masked_fill_(padding[..., None], 0)
    g, past_k, past_v, ns, load = hidden[:, :length].to(model.eh_proj.weight.dtype), [], [], [], 0
    for k in range(K):
        embeds = model.embed(ids[:, k + 1:k + 1 + length])
        if zero_first_embedding:
            embeds = embeds.masked_fill((position_ids + k == 0)[..., None], 0)
        n, r, past_k, past_v, chosen = model(
            embeds, g, position_ids + k, past_k, past_v, docs, BACKENDS[backend], group)
        ns.append(n)
        g = n if recycle == "post" else r
        load = load + expert_load(chosen, docs.has_later(k + 1)[:, lo:hi], model.config.n_routed_experts)
    weight = decay ** torch.arange(K, dtype=torch.float64, device=ids.device)
    divisor = count if counts is None else counts.to(count.device)
    coeff, own = weight / weight.sum() / divisor.clamp(min=1), valid[:, :, lo:hi]
    loss, sums = ChunkedLoss.apply(model.lm_head_weight, hidden, own, coeff, ce_weight, kl_weight, *ns)
    if P > 1:
        dist.all_reduce(sums, group=group)
        dist.all_reduce(load, group=group)
    ce, kl, acc = sums[:3] / count.clamp(min=1)
    return TTTOutput(loss, ce, kl, acc, count, sums[3].round().long(), load)

def check_batch(model, input_ids, hidden_states, loss_mask, doc_ids, ttt_length, backend, group, recycle):
    require(model.lm_head_weight is not None, "the draft has no target: call model.set_target first")
    require(input_ids.dim() == 2, f"input_ids has shape {tuple(input_ids.shape)}, expected (B, T)")
    shape = tuple(input_ids.shape)
    require(hidden_states.shape == (*shape, model.config.hidden_size), f"hidden_states has shape "
            f"{tuple(hidden_states.shape)}, expected (B, T, C) = {(*shape, model.config.hidden_size)}")
    for name, x in dict(loss_mask=loss_mask, doc_ids=doc_ids).items():
        require(x is None or x.shape == shape, f"{name} must have the shape of input_ids, {shape}")
    require(backend in BACKENDS, f"backend {backend!r} is not one of {', '.join(BACKENDS)}")
    require(group is None or backend == "usp", f"backend {backend!r} takes no process group, only usp does")
    require(backend != "usp" or dist.is_initialized(), "backend usp needs torch.distributed: use torchrun")
    require(recycle in ("post", "pre"), f"recycle {recycle!r} is neither 'post' nor 'pre'")
    require(ttt_length > 0, f"ttt_length {ttt_length} must be at least 1")

def expert_load(chosen, counted, n_experts):
    """[E] int64: how often each expert was chosen (B, T, A) in counted rows (B, T)."""
    load = torch.zeros(n_experts, dtype=torch.long, device=chosen.device)
    return load.scatter_add_(0, chosen.flatten(), counted[..., None].expand(chosen.shape).flatten().long())

# ---- Everything above needs only torch and may be copied as is. Below: checkpoints, data, training. --------
