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
  python mtp.py capture --target DIR --data F --out DIR     stored hidden states; also: generate-data, plot

Row t is the root of its own draft chain. What step k = 0..K-1 does in row t (h_t has seen x_0..x_t):

  | embeds    | hidden in       | RoPE position | predicts  | teacher                    | sees keys of
  | x_{t+1+k} | h_t; k > 0: n   | t + k         | x_{t+2+k} | softmax(lm_head h_{t+1+k}) | step 0: rows <= t,
  |           | (or r) of k - 1 |               |           |                            | steps 1..k: row t

Glossary: B batch, T tokens, C hidden_size, V vocab_size, H query heads, G key/value heads, D head_dim, N any
rows, E n_routed_experts, A num_experts_per_tok, F moe_intermediate_size, K ttt_length, P ranks of a sequence.
Attention tensors are (B, T, H, D). "fp32" is at least fp32: a float64 model stays float64.

The method is the MTP drafter of AngelSpec (Tencent, 2026); recycled hidden states go back to EAGLE, the
exchange between ranks to DeepSpeed Ulysses. This file is an independent implementation.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
try:
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
    FLEX_MISSING = None
except ImportError as error:
    FLEX_MISSING = f"torch {torch.__version__} cannot return FlexAttention's lse ({error})"

try:
    import mtp_kernels  # compiled from csrc/; registers torch.ops.mtp_kernels
    KERNELS, NO_KERNELS = True, None
except ImportError as error:  # the functions named _ref serve instead
    KERNELS, NO_KERNELS = False, f"{error}; build them with: python setup.py build_ext --inplace"

def require(holds, message):
    if not holds:
        raise ValueError(message)

# ---- Config ------------------------------------------------------------------------------------------------
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
        H, G, E = self.num_attention_heads, self.num_key_value_heads, self.n_routed_experts
        rotary = int(self.head_dim * self.partial_rotary_factor)
        require(H % G == 0, f"num_attention_heads {H} must be a multiple of num_key_value_heads {G}")
        require(E % self.n_group == 0 and (self.n_group == 1 or E >= 2 * self.n_group),
                f"n_routed_experts {E} cannot be n_group {self.n_group} equal groups of at least two")
        A, usable = self.num_experts_per_tok, E // self.n_group * min(self.topk_group, self.n_group)
        require(1 <= A <= usable, f"num_experts_per_tok {A} is not in 1..{usable}, all topk_group allows")
        require(rotary > 0 and rotary % 2 == 0, f"RoPE turns {rotary} of {self.head_dim} dims, must be even")

# ---- Small operations --------------------------------------------------------------------------------------
def fp32(dtype):  # at least: what norms, routers, softmaxes and sums run in
    return torch.promote_types(dtype, torch.float32)
def halves(x):
    return x[:len(x) // 2], x[len(x) // 2:]
def window(x, start, stop):  # a copy of x[:, start:stop], zeros where x has ended
    part = x[:, start:stop]
    return torch.cat([part, part.new_zeros(len(x), stop - start - part.shape[1], *x.shape[2:])], dim=1)

def rope(x, position_ids, config):
    """Turn the first partial_rotary_factor * D dims of x (B, T, H, D), half-split, by position_ids (B, T)."""
    D, dtype = x.shape[-1], fp32(x.dtype)
    half = int(D * config.partial_rotary_factor) // 2
    frequency = 1.0 / config.rope_theta ** (torch.arange(half, dtype=dtype, device=x.device) / half)
    angle = position_ids.to(dtype)[..., None, None] * frequency  # (B, T, 1, half)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)  # of fp32 angles, as transformers and vLLM
    a, b, rest = x.split([half, half, D - 2 * half], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)

class Documents:
    """Which rows belong together. doc_ids (B, T): a document is a maximal run of equal values, negative is
    padding; None: each row is one. run (B, T): its number from 1, -1 in padding; position_ids (B, T)."""
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
    rows = (*k.shape[:3], q.shape[2] // k.shape[2], q.shape[-1])  # (B, T, G, H/G, D)
    q32, o_0, lse_0 = q.view(rows).to(k.dtype), o_0.view(rows).to(k.dtype), lse_0.view(*rows[:4], 1)
    s = scale * q32 @ k.mT  # (B, T, G, H/G, k)
    lse = torch.cat([lse_0, s], -1).logsumexp(-1, keepdim=True)
    out = (lse_0 - lse).exp() * o_0 + (s - lse).exp() @ v
    return out.view(q.shape).to(q.dtype), lse.view(q.shape[:3])

def merge_backward_ref(dout, q, ks, vs, out, lse, scale, o_0=None, lse_0=None):
    """Backward of merge_ref: dq (the part through s_j), dks, dvs; given o_0 and lse_0 also do_0, dlse_0."""
    k, v = (torch.stack(x, dim=3).to(lse.dtype) for x in (ks, vs))
    rows = (*k.shape[:3], q.shape[2] // k.shape[2], q.shape[-1])
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

def kernels_take(x, *sizes):
    """Do the compiled kernels serve a tensor like x, whose widths are `sizes`?"""
    here = KERNELS and (x.device.type == "cpu" or x.is_cuda and mtp_kernels.cuda and x.dtype != torch.float64)
    return here and all(size % 8 == 0 for size in sizes)
def merge(o_0, lse_0, q, ks, vs, scale):
    if not kernels_take(q, q.shape[-1]) or q.shape[-1] > 256 or len(ks) > 7:
        return merge_ref(o_0, lse_0, q, ks, vs, scale)
    return torch.ops.mtp_kernels.merge(o_0, lse_0, q, ks, vs, scale)
def merge_backward(dout, q, ks, vs, out, lse, scale, o_0=None, lse_0=None):
    if not kernels_take(q, q.shape[-1]) or q.shape[-1] > 256 or len(ks) > 7:
        return merge_backward_ref(dout, q, ks, vs, out, lse, scale, o_0, lse_0)
    *grads, first = torch.ops.mtp_kernels.merge_backward(dout, q, ks, vs, out, lse, scale, o_0, lse_0)
    return *grads, *first

def causal_block_cpu(q, k, v, docs, scale):
    """o (B, T, H, D), lse (B, T, H) by a CPU's only op that gives its lse, private; a call per document."""
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
    bytes_sent = 0  # by this process, to other ranks
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, out = group, torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        AllToAll.bytes_sent += x.nbytes // len(x) * (len(x) - 1)
        return out
    @staticmethod
    def backward(ctx, dout):
        return AllToAll.apply(dout.contiguous(), ctx.group), None

def attend_usp(q, k, v, past_k, past_v, docs, group=None):
    """attend_fa between two all-to-alls (Ulysses): tokens are sharded outside, heads inside; P must divide H.
    T is a rank's share, docs are whole; K, V heads are copied P / gcd(G, P) times, autograd sums those."""
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
    """Sigmoid router, fp32 in a bf16 model too. The bias, for choices only, is moved by balance_experts."""
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

def experts_grouped(x, chosen, weights, gate_up_proj, down_proj):
    """experts_ref by two grouped matmuls over (row, slot) pairs in stable order of their expert. No index
    occurs twice, so that no backward adds in an order that varies; no host sync."""
    flat, order = chosen.flatten().sort(stable=True)
    ends = torch.arange(len(gate_up_proj), device=flat.device)
    ends = torch.searchsorted(flat, ends, right=True, out_int32=True)  # where each expert's pairs end
    rows = x[:, None].expand(*chosen.shape, -1).flatten(0, 1)[order]
    gate, up = F.grouped_mm(rows, gate_up_proj.mT, offs=ends).chunk(2, dim=-1)
    act = F.silu(gate) * up * weights.flatten()[order, None].to(x.dtype)
    out = F.grouped_mm(act, down_proj.mT, offs=ends)  # (N * A, C), sorted by expert
    return out[order.argsort()].view(*chosen.shape, -1).to(weights.dtype).sum(1).to(x.dtype)

def experts(x, chosen, weights, gate_up_proj, down_proj):
    """experts_ref by the fastest way there is for x."""
    if kernels_take(x, x.shape[-1], down_proj.shape[-1]):
        return torch.ops.mtp_kernels.experts_forward(x, chosen, weights, gate_up_proj, down_proj)[0]
    aligned = all(n * x.element_size() % 16 == 0 for n in down_proj.shape[1:])  # as F.grouped_mm wants
    way = experts_grouped if aligned and x.dtype != torch.float64 else experts_ref
    return way(x, chosen, weights, gate_up_proj, down_proj)

class MLP(nn.Module):
    """silu(gate) * up -> down: the shared expert."""
    def __init__(self, hidden_size, width):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden_size, width, bias=False) for _ in range(2))
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
        y = experts(x.flatten(0, 1), chosen, weights, *self.experts.values()).view(x.shape)
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
    """Pre-norm decoder layer: attention, then experts."""
    def __init__(self, config):
        super().__init__()
        self.config, C, eps = config, config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(C, eps=eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(C, eps=eps)
        self.mlp = MoE(config)
    def forward(self, z, position_ids, past_k, past_v, docs, attend=attend_sdpa, group=None):
        """z (B, T, C) -> r (B, T, C), past_k, past_v, chosen experts (B, T, A). No final norm."""
        x = self.input_layernorm(z)
        out, past_k, past_v = self.self_attn(x, position_ids, past_k, past_v, docs, attend, group)
        u = z + out
        y, chosen = self.mlp(self.post_attention_layernorm(u))
        return u + y, past_k, past_v, chosen

@torch.no_grad()
def init_weights(module, std, generator=None):
    """From scratch: norms 1, matrices normal(0, std), biases 0."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.dim() > 1:
            tensor.normal_(0.0, std, generator=generator)
        else:
            tensor.fill_(1.0 if name.endswith("norm.weight") else 0.0)

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
        init_weights(self, config.initializer_range)
    def set_target(self, embed_weight, lm_head_weight):
        """The target's embedding and lm_head, both (V, C), any float dtype, on this device. Not copied."""
        shape, device = (self.config.vocab_size, self.config.hidden_size), self.eh_proj.weight.device
        for name, tensor in dict(embed_weight=embed_weight, lm_head_weight=lm_head_weight).items():
            require(tensor.shape == shape, f"{name} is {tuple(tensor.shape)}, expected (V, C) = {shape}")
            require(tensor.device == device, f"{name} is on {tensor.device}, the draft on {device}: move one")
            frozen = tensor.requires_grad_(False) if tensor.is_leaf else tensor.detach()
            object.__setattr__(self, name, frozen)  # past nn.Module's registry
    def logits(self, n):
        return F.linear(n.to(self.lm_head_weight.dtype), self.lm_head_weight)
    def forward(self, tokens, hidden, position_ids, past_k, past_v, docs, attend=attend_sdpa, group=None,
                zero_first=False):
        """One step. tokens, position_ids (B, T), hidden (B, T, C); zero_first: the embedding at position 0.
        Returns n = final_norm(r) and r (B, T, C), past_k and past_v with this step's, chosen experts."""
        e = F.embedding(tokens, self.embed_weight).to(self.eh_proj.weight.dtype)
        e = e.masked_fill((position_ids == 0)[..., None], 0) if zero_first else e
        z = self.eh_proj(torch.cat([self.enorm(e), self.hnorm(hidden)], dim=-1))  # embedding FIRST
        r, past_k, past_v, chosen = super().forward(z, position_ids, past_k, past_v, docs, attend, group)
        return self.shared_head["norm"](r), r, past_k, past_v, chosen

# ---- Loss and the TTT loop ---------------------------------------------------------------------------------
# Terms of the loss, of N rows of a step, p the teacher's distribution, q the draft's. log_q (N, 2 + n): of
# argmax p, of the data's token, of p's n largest; p_top (N, n): p of those; kl (N,): KL(p || q); a (N,): sum
# min(p, q) = 1 - TV, the chance that a sampled draft token is accepted (Leviathan et al. 2023).
LOSS_TERMS = {
    "ce": lambda log_q, p_top, kl, a: -log_q[:, 0],
    "ce_data": lambda log_q, p_top, kl, a: -log_q[:, 1],
    "kl": lambda log_q, p_top, kl, a: kl,
    "topk_kl": lambda log_q, p_top, kl, a: F.kl_div(
        log_q[:, 2:].log_softmax(1), p_top / p_top.sum(1, True), reduction="none").sum(1),
    "topk_kl_full": lambda log_q, p_top, kl, a: F.kl_div(log_q[:, 2:], p_top, reduction="none").sum(1),
    "tv": lambda log_q, p_top, kl, a: 1 - a,
    "lk": lambda log_q, p_top, kl, a: torch.lerp(1 - a, kl, (-3 * a.detach()).exp()),  # arXiv 2602.23881
    "neglog": lambda log_q, p_top, kl, a: -a.clamp(min=torch.finfo(a.dtype).tiny).log(),  # the same
    "e2e": lambda log_q, p_top, kl, a: 0 * a}  # 1 - sum_j prod_{i <= j} a_i / K of whole chains, 2606.12370

def parse_loss(text):
    """{term: weight} of a sum of LOSS_TERMS like "ce:1+kl:0.5"; a weight left out is 1."""
    terms = {name: weight or "1" for name, _, weight in (x.strip().partition(":") for x in text.split("+"))}
    good = all(t in LOSS_TERMS and x.replace(".", "", 1).isdecimal() and float(x) for t, x in terms.items())
    require(good, f"loss {text!r} is no sum like ce:1+kl:0.5, weights positive, of {', '.join(LOSS_TERMS)}")
    return {name: float(x) for name, x in terms.items()}

def valid_rows(loss_mask, docs, ttt_length):
    """(K, B, T) bool: row t counts at step k if token t+2+k exists in row t's document and is not masked."""
    mask, T = torch.ones_like(docs.first) if loss_mask is None else loss_mask != 0, docs.run.shape[1]
    return torch.stack([docs.has_later(k + 2) & window(mask, k + 2, k + 2 + T) for k in range(ttt_length)])

def valid_counts(loss_mask, doc_ids, ttt_length, *, batch, length):
    """[K + 1] int64: rows of a batch that count at each step, and at every one. Summed over micro-batches and
    data-parallel ranks and passed as ttt_loss(counts=...), they keep any split from changing the gradient."""
    device = getattr(loss_mask if doc_ids is None else doc_ids, "device", "cpu")
    valid = valid_rows(loss_mask, Documents(doc_ids, batch, length, device), ttt_length)
    return torch.cat([valid, valid.all(0)[None]]).sum((1, 2))

LOGITS_HELD = {"cpu": 2 ** 25, "cuda": 2 ** 27}  # elements of one [rows, V] buffer; there are three
def teacher_chunks(valid, size):
    """[(b, start, stop)] of the teacher rows that are read, at most `size` at a time. Row t, step k reads
    teacher row t + 1 + k; a row that counts at step k is judged at all steps before k too."""
    (K, B, T), judged = valid.shape, valid.flip(0).cumsum(0).flip(0) > 0
    read = torch.stack([F.pad(x, (k + 1, K - 1 - k)) for k, x in enumerate(judged)]).any(0)  # (B, T + K)
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

def logit_slopes(value, leaves, spots, p, q, scratch, chances, kl):
    """(N, V): slopes in the logits of value (N,), of leaves log q at spots (N, 2 + n), KL, a (in q); and of a
    (in scratch).  d log q[v] = onehot(v) - q,  d KL = q - p,  d a = q (s - <s, q>), s = [p > q]."""
    d_log_q, d_kl, d_a = torch.autograd.grad(value, leaves, torch.ones_like(value), materialize_grads=True)
    if chances:
        da = torch.gt(p, q, out=scratch).mul_(q)
        da.addcmul_(q, da.sum(-1, keepdim=True), value=-1)
    q.mul_((d_kl - d_log_q.sum(-1))[:, None]).sub_(p, alpha=kl)
    if chances:  # and lk's share of d_kl
        q.addcmul_(p, (d_kl - kl)[:, None], value=-1).addcmul_(da, d_a[:, None])
    for at in (slice(0, 1), slice(1, 2), slice(2, None)):  # no column twice in one call: deterministic
        q.scatter_add_(1, spots[:, at], d_log_q[:, at])
    return q, scratch

def fused_rows(x, teacher, lm_head, scratch, ce_weight, kl_weight):
    """Of draft rows x (N, C), judged by the teacher's logits (N, V): weighted CE + KL, CE, KL, is the argmax
    the teacher's, and slopes in the draft's logits (in scratch). The kernel turns logits into slopes."""
    draft = torch.mm(x.to(lm_head.dtype), lm_head.mT, out=scratch[:len(x)])
    one = draft.new_ones(len(x), dtype=fp32(draft.dtype))
    ce, kl, label, best = torch.ops.mtp_kernels.loss_rows(teacher, draft, one, ce_weight, kl_weight)
    return ce_weight * ce + kl_weight * kl, ce, kl, label == best, draft

class ChunkedLoss(torch.autograd.Function):
    """sum_k coeff_k * sum over counted rows of the weighted terms, without holding [T, V].
    lm_head is frozen, so d loss / d n is formed in the forward pass, chunk of teacher rows by chunk, and only
    that, [B, T, C], is kept. The logits of a teacher row are computed once for all K steps."""
    @staticmethod
    def forward(ctx, lm_head, hidden, valid, coeff, w, topk, tokens, measure, *ns):
        """lm_head (V, C); hidden (B, T + K, C), target's; valid (K, B, T); coeff [K + 1] float64, e2e's last;
        w {term: weight}; tokens (B, T + K + 1); ns (B, T, C). Returns loss and, without gradient, sums over
        counted rows [7, K] (CE, KL, right, prefix hits, with `measure` TV, sampled, greedy hits) and hits."""
        (K, _, T), V, wide = valid.shape, len(lm_head), fp32(lm_head.dtype)
        size = min(max(1, LOGITS_HELD.get(lm_head.device.type, 2 ** 25) // V), hidden.shape[1])
        fused = kernels_take(lm_head) and w.keys() <= {"ce", "kl"} and not measure
        kinds = [lm_head.dtype, lm_head.dtype if fused else wide] + [wide] * (not fused)
        scratch, p_rows, *q_rows = (lm_head.new_empty(size, V, dtype=x) for x in kinds)
        total, ce, kl, a, sure = p_rows.new_zeros(5, *valid.shape, dtype=wide)
        hit, chances = valid.int() * 0, measure or w.keys() & {"tv", "lk", "neglog", "e2e"}
        grads, chains = ([torch.zeros_like(n) for n in ns if x and any(ctx.needs_input_grad)]
                         for x in (True, "e2e" in w))
        for b, start, stop in teacher_chunks(valid, size):
            states = hidden[b, start:stop].to(lm_head.dtype)
            if fused:
                teacher = torch.mm(states, lm_head.mT, out=p_rows[:len(states)])
            else:
                logits, p_chunk, labels, lse = row_softmax(states, lm_head, scratch, p_rows)
                plogp = logits.mul_(p_chunk).sum(-1) - lse  # in place; einsum errs by 4e-3 at V = 150k
                p_top, top = p_chunk.topk(min(topk, V) if w.keys() & {"topk_kl", "topk_kl_full"} else 0)
                spots = torch.cat([labels[:, None], tokens[b, start + 1:stop + 1, None], top], dim=1)
            for k, n in enumerate(ns):
                i, j = max(0, start - 1 - k), max(0, start - 1 - k, min(T, stop - 1 - k))  # their draft rows
                rows, at = (k, b, slice(i, j)), slice(i + 1 + k - start, j + 1 + k - start)
                if fused:
                    total[rows], ce[rows], kl[rows], hit[rows], d = fused_rows(
                        n[b, i:j], teacher[at], lm_head, scratch, w.get("ce", 0.0), w.get("kl", 0.0))
                else:
                    p, (logits, q, best, lse) = p_chunk[at], row_softmax(n[b, i:j], lm_head, scratch, *q_rows)
                    log_q, hit[rows] = logits.gather(1, spots[at]) - lse[:, None], best == labels[at]
                    ce[rows], kl[rows] = -log_q[:, 0], plogp[at] - logits.mul_(p).sum(-1) + lse
                    if chances:
                        a[rows] = torch.minimum(p, q, out=logits).sum(-1)
                        sure[rows] = p.gather(1, best[:, None])[:, 0]
                    with torch.enable_grad():
                        x = [x.clone().requires_grad_() for x in (log_q, kl[rows], a[rows])]
                        value = sum(w[name] * LOSS_TERMS[name](x[0], p_top[at], *x[1:]) for name in w)
                    total[rows] = value.detach()
                    if grads:
                        d, da = logit_slopes(value, x, spots[at], p, q, logits, chances, w.get("kl", 0))
                if grads:
                    dn = (d.to(lm_head.dtype) @ lm_head).to(n.dtype) * coeff[k]
                    grads[k][b, i:j] = dn.masked_fill_(~valid[rows][:, None], 0)
                if chains:  # d a / d n; e2e's slope is one number per row times that, known after all steps
                    chains[k][b, i:j] = (da.to(lm_head.dtype) @ lm_head).to(n.dtype)
        with torch.enable_grad():
            lost = 1 - a.requires_grad_().cumprod(0).sum(0).double() / K
            e2e = w.get("e2e", 0) * coeff[K] * lost.where(valid.all(0), 0).sum()
        for grad, chain, x in zip(grads, chains, torch.autograd.grad(e2e, a)[0]):
            grad.addcmul_(chain, x[..., None].to(grad.dtype))
        ctx.save_for_backward(*grads)
        figures = ce, kl, hit, hit.cumprod(0), 1 - a, a.cumprod(0), sure.cumprod(0), total
        *sums, total = (x.detach().double().where(valid, 0).sum((1, 2)) for x in figures)
        loss, sums, hits = (total * coeff[:K]).sum() + e2e.detach(), torch.stack(sums), hit.bool() & valid
        ctx.mark_non_differentiable(sums, hits)
        return loss.to(fp32(ns[0].dtype)), sums, hits
    @staticmethod
    def backward(ctx, dloss, *_):
        return *[None] * 8, *(dloss.to(grad.dtype) * grad for grad in ctx.saved_tensors)

class TTTOutput(NamedTuple):
    """ttt_loss's result. All but loss are [K] and of this call alone (global over `group`)."""
    loss: torch.Tensor         # scalar: sum_k w_k (weighted terms of step k); usp: this rank's share
    ce: torch.Tensor           # mean cross-entropy against the teacher's argmax, 0 where no row counts
    kl: torch.Tensor           # mean KL(teacher || draft)
    acc: torch.Tensor          # share of counted rows whose argmax is the teacher's
    count: torch.Tensor        # counted rows
    prefix_hits: torch.Tensor  # counted rows right in steps 0..k; accept_len = 1 + sum_k prefix_hits / count
    expert_load: torch.Tensor  # [E] rows sent to each expert in all steps, without padding and foreign tokens
    hits: torch.Tensor         # (K, B, T) bool: the row counts and its argmax is the teacher's
    tv: torch.Tensor | None = None       # with `measure`: mean 1 - a; and the mean chance that a target which
    sampled: torch.Tensor | None = None  # samples accepts steps 0..k of a sampled draft, prod_{i <= k} a_i,
    greedy: torch.Tensor | None = None   # of a greedy draft, prod_{i <= k} p_i[argmax q_i]
    sums: torch.Tensor | None = None     # [8, K]: CE, KL, right, prefix hits, TV, sampled, greedy, counted

def draft_tokens(n, lm_head):
    """(B, T): the draft's own greedy tokens, of n (B, T, C); no more logits at a time than the loss holds."""
    parts = n.detach().flatten(0, 1).split(max(1, LOGITS_HELD.get(n.device.type, 2 ** 25) // len(lm_head)))
    return torch.cat([(x.to(lm_head.dtype) @ lm_head.mT).argmax(-1) for x in parts]).view(n.shape[:2])

def ttt_loss(model, input_ids, hidden_states, loss_mask=None, doc_ids=None, *, ttt_length=3, backend="sdpa",
             group=None, ce_weight=1.0, kl_weight=1.0, decay=0.8, recycle="post", zero_first_embedding=False,
             counts=None, loss=None, topk=10, step_weights=None, rollout="data", measure=False,
             sharded=False, recompute=False):
    """Loss of K = ttt_length draft steps from every row, as served: TTTOutput. ValueError for bad input.
    input_ids (B, T); hidden_states (B, T, C): the target's after its final norm; loss_mask (B, T) of the
    PREDICTED token, nonzero counts; doc_ids (B, T), see Documents, padding is never read. counts, default
    this call's valid_counts, divide the sums. recycle: what feeds a next step, "post" (n), "pre" (r), "both"
    (a row draws one). zero_first_embedding: that of position 0, as vLLM. loss: for parse_loss, overrides both
    weights; topk: its n. step_weights: K, override decay. rollout: from step 1 on, embed the "data" or, as
    served, the "draft"'s own argmax. measure: give tv, sampled, greedy. recompute: a step's activations anew
    in the backward pass, a step keeps g, k and v alone. backend "usp": every rank of `group` passes the whole
    row; loss is its local sum over the global count, so that gradients SUMMED are right. sharded: of
    hidden_states rank r passes rows r L .. (r + 1) L + K alone, L = ceil(T / P), zeros past T."""
    check_batch(model, input_ids, loss_mask, doc_ids, ttt_length, backend, group, recycle, rollout)
    terms = parse_loss(loss) if loss else {"ce": ce_weight, "kl": kl_weight}
    (B, T), K = input_ids.shape, ttt_length
    P, rank = (dist.get_world_size(group), dist.get_rank(group)) if backend == "usp" else (1, 0)
    length, states = -(-T // P), tuple(hidden_states.shape)
    expected = B, length + K if sharded else T, model.config.hidden_size
    require(states == expected, f"hidden_states has shape {states}, expected (B, T, C) = {expected}")
    post = torch.rand(B, T, 1).to(input_ids.device) < 0.5 if recycle == "both" else None
    if T % P:  # right-pad to equal shards
        doc_ids = F.pad(torch.zeros_like(input_ids) if doc_ids is None else doc_ids, (0, -T % P), value=-1)
        loss_mask = None if loss_mask is None else F.pad(loss_mask, (0, -T % P))
    lo, hi = rank * length, (rank + 1) * length
    docs = Documents(doc_ids, B, P * length, input_ids.device)
    valid = valid_rows(loss_mask, docs, K)
    count = torch.cat([valid, valid.all(0)[None]]).sum((1, 2))
    position_ids, padding = docs.position_ids[:, lo:hi], window(docs.run, lo, hi + K + 1) < 0
    ids = window(input_ids, lo, hi + K + 1).masked_fill(padding, 0)  # a halo of K + 1 rows, states of K
    hidden = hidden_states.detach() if sharded else window(hidden_states.detach(), lo, hi + K)
    hidden = hidden.masked_fill(padding[:, :-1, None], 0)
    g, past_k, past_v, ns = hidden[:, :length].to(model.eh_proj.weight.dtype), [], [], []
    load = torch.zeros(model.config.n_routed_experts, dtype=torch.long, device=ids.device)
    step = partial(model, docs=docs, attend=BACKENDS[backend], group=group, zero_first=zero_first_embedding)
    step = partial(checkpoint, step, use_reentrant=False, preserve_rng_state=False) if recompute else step
    for k in range(K):
        own = draft_tokens(ns[-1], model.lm_head_weight) if k and rollout == "draft" else None
        tokens = ids[:, k + 1:k + 1 + length] if own is None else own
        n, r, past_k, past_v, chosen = step(tokens, g, position_ids + k, past_k, past_v)
        ns.append(n)
        g = n if recycle == "post" else r if recycle == "pre" else torch.where(window(post, lo, hi), n, r)
        counted = docs.has_later(k + 1)[:, lo:hi, None].expand(chosen.shape).flatten()
        load.scatter_add_(0, chosen.flatten(), counted.long())
    divisor = (count if counts is None else counts.to(count.device)).clamp(min=1)
    weight = torch.tensor(step_weights or [decay ** k for k in range(K)], dtype=torch.float64)
    require(len(weight) == K == len(divisor) - 1, f"expected {K} step_weights, {K + 1} counts (valid_counts)")
    coeff = F.pad(weight / weight.sum(), (0, 1), value=1.0).to(count.device) / divisor
    loss, sums, hits = ChunkedLoss.apply(
        model.lm_head_weight, hidden, valid[:, :, lo:hi], coeff, terms, topk, ids, measure, *ns)
    if P > 1:
        hits = F.pad(hits, (lo, P * length - hi)).to(torch.uint8)
        for x in (sums, load, hits):
            dist.all_reduce(x, group=group)
    mean, prefix, hits = sums / count[:K].clamp(min=1), sums[3].round().long(), hits[:, :, :T].bool()
    chances, sums = mean[4:] if measure else [None] * 3, torch.cat([sums, count[None, :K]])
    return TTTOutput(loss, *mean[:3], count[:K], prefix, load, hits, *chances, sums)

def check_batch(model, input_ids, loss_mask, doc_ids, ttt_length, backend, group, recycle, rollout):
    require(model.lm_head_weight is not None, "the draft has no target: call model.set_target first")
    require(input_ids.dim() == 2, f"input_ids has shape {tuple(input_ids.shape)}, expected (B, T)")
    shape = tuple(input_ids.shape)
    for name, x in dict(loss_mask=loss_mask, doc_ids=doc_ids).items():
        require(x is None or x.shape == shape, f"{name} must have the shape of input_ids, {shape}")
    for x, known in ((backend, BACKENDS), (recycle, ("post", "pre", "both")), (rollout, ("data", "draft"))):
        require(x in known, f"{x!r} is not one of {', '.join(known)}")
    require(group is None or backend == "usp", f"backend {backend!r} takes no process group, only usp does")
    require(backend != "usp" or dist.is_initialized(), "backend usp needs torch.distributed: use torchrun")
    require(ttt_length > 0, f"ttt_length {ttt_length} must be at least 1")

# ---- Everything above needs only torch and may be copied as is. Below: checkpoints, data, training. --------

import argparse
import contextlib
import hashlib
import inspect
import json
import os
import resource
import shutil
import signal
import sys
import time
import warnings
from bisect import bisect_left, insort
from collections import namedtuple
from dataclasses import asdict, field, fields, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import torch.distributed.checkpoint as dcp
try:
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file
    from tqdm import tqdm

    import convert  # beside this file
    LOST = None
except ImportError as error:
    LOST = f"{error}; pip install transformers safetensors, and keep convert.py beside mtp.py"

# ---- Drafts ------------------------------------------------------------------------------------------------
def save_draft(path, model, meta, rank=0):
    """A draft directory: model.safetensors (state_dict), config.json (MTPConfig and `meta`); on all ranks."""
    path, state = Path(path), {name: whole(x.detach()) for name, x in model.state_dict().items()}
    if rank:
        return
    with atomic(path / "model.safetensors") as aside:
        save_file({name: x.cpu().contiguous() for name, x in state.items()}, aside, metadata={"format": "pt"})
    with atomic(path / "config.json") as aside:
        aside.write_text(json.dumps({**asdict(model.config), **meta, "format": 1}, indent=2) + "\n")

def load_draft(path):
    """(MTP model, config.json's dict) of a draft directory; ValueError if it is not one of ours, complete."""
    meta, state = convert.read_draft(path)
    model = MTP(MTPConfig(**{f.name: meta[f.name] for f in fields(MTPConfig)}))
    model.to(state["eh_proj.weight"].dtype).load_state_dict(state)
    return model, meta

# ---- Targets and data --------------------------------------------------------------------------------------
class Sample(NamedTuple):
    name: str                # file, and line where it has lines: what an error names
    input_ids: torch.Tensor  # (L,) int64
    loss_mask: torch.Tensor  # (L,) bool: tokens to learn
    file: object = None      # where its hidden states are stored, from row `start` on
    start: int = 0
    document: str = ""       # what is held out whole

class Target:
    """A frozen Hugging Face causal LM: gives hidden states, embedding and lm_head, and verifies drafts.
    stored: hidden states come from files, see open_stored; its layers are not loaded."""
    def __init__(self, cfg, path, device, stored=False):
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
        logging.disable_progress_bar()
        logging.set_verbosity_error()  # it lists an MTP layer as unexpected; what is missing is refused below
        self.path, self.device = convert.find_target(path), device
        self.checkpoint = convert.Checkpoint(self.path)
        self.config, self.sha256 = self.checkpoint.config, convert.sha256(self.path / "config.json")
        names, sizes = self.checkpoint.files, {name: getattr(cfg, name, None) for name in convert.SIZES}
        self.draft_config = MTPConfig(**convert.draft_config(self.config, names, sizes))  # before loading
        self.layout = convert.serving_layout(self.config, names)
        options = dict(trust_remote_code=cfg.trust_remote_code, local_files_only=True)
        self.tokenizer = AutoTokenizer.from_pretrained(self.path, **options)
        self.model, info = AutoModelForCausalLM.from_pretrained(
            self.path, dtype=cfg.dtype, device_map=cfg.target_device_map, use_safetensors=True,
            output_loading_info=True, **options, **{"num_hidden_layers": 0} if stored else {})
        lost = sorted(info["missing_keys"])[:5]
        require(not lost, f"{self.path} lacks weights of the target: {', '.join(lost)}")
        self.model.eval().requires_grad_(False)
        if cfg.target_device_map is None:
            self.model.to(device)
        names = inspect.signature(self.model.base_model.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"  # renamed in transformers 5.2x
        self.embed = self.model.get_input_embeddings().weight.detach().to(device)
        self.lm_head = self.model.get_output_embeddings().weight.detach().to(device)
    @torch.no_grad()
    def states(self, samples, spans=None, budget=16384):
        """Last hidden states, normed, of rows start..stop (`spans`) of samples: [(stop - start, C)]."""
        spans = spans or [(0, len(sample.input_ids)) for sample in samples]
        found = [self.read_states(s, *at) if s.file else None for s, at in zip(samples, spans)]
        order = sorted((i for i, x in enumerate(found) if x is None), key=lambda i: spans[i][1])
        while order:
            longest = spans[order[-1]][1]
            order, batch = order[:-max(1, budget // longest)], order[-max(1, budget // longest):]
            ids = nn.utils.rnn.pad_sequence([samples[i].input_ids[:spans[i][1]] for i in batch], True)
            hidden = self.model.base_model(ids.to(self.model.device), use_cache=False).last_hidden_state
            for row, i in zip(hidden.to(self.device), batch):
                found[i] = row[slice(*spans[i])]
        return found
    def read_states(self, sample, start, stop):
        """Rows start..stop of stored states, read alone; those from before the final norm are normed."""
        with safe_open(sample.file, "pt") as file:
            rows, stage = file.get_slice("hidden_states"), (file.metadata() or {}).get("stage", "pre_norm")
            at, last = slice(sample.start + start, sample.start + stop), rows.get_shape()[1] - 1
            rows = rows[at] if len(rows.get_shape()) == 2 else rows[at, last]  # (T, layers, C)
        rows = rows.to(self.model.device)
        return (rows if stage == "post_norm" else self.model.base_model.norm(rows)).to(self.device)

DEMO = dict(vocab_size=4096, hidden_size=256, num_hidden_layers=3, num_attention_heads=8, head_dim=32,
            num_key_value_heads=2, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=128,
            n_shared_experts=1, intermediate_size=512, use_qk_norm=True, max_position_embeddings=4096)

def stdlib_files(every=1):
    """(training, held-out) files of Python's standard library, text every machine has; each 20th held out."""
    root = Path(os.__file__).parent
    skip = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings"}
    files = [path for path in sorted(root.rglob("*.py")) if not skip & set(path.relative_to(root).parts)]
    return [f for i, f in enumerate(files) if i % 20][::every], files[::20][::every]

def build_demo_target(path, steps=800, batch=8, length=128):
    """Train the demo's tokenizer and target, a small GLM-4.x, on the standard library; save both."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, PreTrainedTokenizerFast
    say(f"first run: builds the demo target from Python's standard library, about 3 minutes -> {path}")
    texts, end = [file.read_text(errors="replace") for file in stdlib_files()[0]], "<|endoftext|>"
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=DEMO["vocab_size"], special_tokens=[end], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token=end)
    ids = [i for row in tokenizer(texts)["input_ids"] for i in [*row, tokenizer.eos_token_id]]
    ids = torch.tensor(ids[:len(ids) // length * length]).view(-1, length)
    torch.manual_seed(0)
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**DEMO, eos_token_id=tokenizer.eos_token_id))
    adam = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for step in tqdm(range(steps), desc="demo target", unit="step", mininterval=1):
        rows = ids[torch.randint(len(ids), (batch,))]
        adam.zero_grad()
        model(rows, labels=rows).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.param_groups[0]["lr"] = 4e-3 * min((step + 1) / 30, 1.0, 0.02 + 2 * (1 - step / steps))
        adam.step()
    with atomic(path) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)

def encode_messages(messages, tokenizer):
    """(input_ids, loss_mask of assistant tokens), by the template's markers, else by rendering prefixes."""
    require(tokenizer.chat_template, "--data has messages, the target's tokenizer no chat template: use text")
    template = tokenizer.get_chat_template()
    if "{% generation" in template or "{%- generation" in template:
        out = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        return out["input_ids"], out["assistant_masks"]
    render = partial(tokenizer.apply_chat_template, tokenize=False)
    text, spans = render(messages), []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = render(messages[:i], add_generation_prompt=True), render(messages[:i + 1])
            require(text.startswith(after) and after.startswith(before), f"the chat template renders message "
                    f"{i} differently once others follow; it needs {{% generation %}} markers")
            spans.append((len(before), len(after)))
    out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return out["input_ids"], [any(i < b and j > a for a, b in spans) for i, j in out["offset_mapping"]]

def read_documents(path, target):
    """Yield (name, file or None, input_ids, loss_mask, document), of an unusable one with None and why."""
    if os.path.isdir(path):  # of stored hidden states
        for file in sorted(Path(path).glob("*.safetensors")):
            try:
                yield str(file), file, *open_stored(file, target)
            except Exception as error:  # a broken file raises many kinds
                yield str(file), file, None, str(error), ""
        return
    if not str(path).endswith(".jsonl"):
        ids = target.tokenizer(Path(path).read_text(errors="replace"))["input_ids"]
        yield str(path), None, ids, [True] * len(ids), str(path)
        return
    for number, line in enumerate(open(path, encoding="utf-8", errors="replace"), 1):
        try:
            row = json.loads(line)
            if "messages" in row:
                messages = [{**message, "role": message["role"]} for message in row["messages"]]
                found = encode_messages(messages, target.tokenizer)
            else:
                ids = target.tokenizer("" + row["text"])["input_ids"]
                found = ids, [True] * len(ids)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            found = None, f"neither text nor messages: {type(error).__name__} {error}"
        yield (name := f"{path}:{number}"), None, *found, name

def open_stored(path, target):
    """(input_ids, loss_mask, document) of a file of hidden states, written by `capture` or by vLLM's
    ExampleHiddenStatesConnector (token_ids; [T, layers, C], not normed); ValueError says what is wrong."""
    with safe_open(path, "pt") as file:
        meta, names, C = file.metadata() or {}, sorted(file.keys()), target.draft_config.hidden_size
        known = "token_ids" if "token_ids" in names else "input_ids"
        require({known, "hidden_states"} <= {*names}, f"holds {names}, not input_ids and hidden_states")
        ids, shape = file.get_tensor(known).long(), tuple(file.get_slice("hidden_states").get_shape())
        mask = file.get_tensor("loss_mask") if "loss_mask" in names else torch.ones_like(ids)
        finite = meta.get("finite") == "True" or file.get_tensor("hidden_states").isfinite().all()
    require(shape in [(len(ids), C), (len(ids), *shape[1:2], C)] and mask.shape == ids.shape,
            f"hidden_states is {shape}, expected ({len(ids)}, {C}) of this target")
    require(len(shape) == 3 or meta.get("stage") in ("post_norm", "pre_norm"),
            f"its metadata has stage {meta.get('stage')!r}, neither post_norm nor pre_norm")
    require(meta.get("target_config_sha256", target.sha256) == target.sha256, "comes from another target")
    require(finite, "hidden_states holds nan or inf")
    return ids, mask, meta.get("sample", str(path))

def read_samples(paths, target, seq_len, shortest):
    """[Sample] of at most seq_len tokens; longer documents are cut. What is unusable is counted and named."""
    samples, skipped, V = [], [], target.draft_config.vocab_size
    for path in tqdm(paths, desc="reading", unit="file", leave=False, delay=2):
        for name, file, ids, mask, document in tqdm(read_documents(path, target), leave=False, delay=2):
            ids, mask, why = (ids, mask, f"under {shortest} tokens") if ids is not None else ([], [], mask)
            pieces = zip(*(torch.as_tensor(x).split(seq_len) for x in (ids, mask)))
            kept = [Sample(name, i.long(), m.bool(), file, n * seq_len, document)
                    for n, (i, m) in enumerate(pieces) if len(i) >= shortest and m[2:].any()]
            if any(not 0 <= i.input_ids.min() <= i.input_ids.max() < V for i in kept):
                kept, why = [], f"holds a token id outside the target's vocabulary of {V}"
            samples += kept
            skipped += [] if kept else [f"{name} ({why})"]
    if skipped:
        say(f"{len(skipped)} documents skipped: {'; '.join(skipped[:3])}{'; ..' if len(skipped) > 3 else ''}")
    require(samples, f"no usable document in {', '.join(map(str, paths[:3]))}: each needs {shortest} tokens")
    return samples

def pack(samples, seq_len):
    """Rows (lists of samples) of at most seq_len tokens: best fit, in the order given; no sample is cut."""
    rows, room = [], []  # room: sorted (tokens left, row)
    for sample in samples:
        at = bisect_left(room, (len(sample.input_ids),))
        if at == len(room):
            room.append((seq_len, len(rows)))
            rows.append([])
        left, row = room.pop(at)
        rows[row].append(sample)
        insort(room, (left - len(sample.input_ids), row))
    return rows

@lru_cache(maxsize=2)
def shuffled(n, seed, epoch):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()

def lay_out(rows, length, device):
    """(input_ids, loss_mask, doc_ids) of packed rows, (B, length); doc_ids None if a row is one document."""
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask, docs = torch.zeros_like(ids, dtype=torch.bool), torch.full_like(ids, -1)
    for b, row in enumerate(rows):
        start = 0
        for d, sample in enumerate(row):
            here = slice(start, start := start + len(sample.input_ids))
            ids[b, here], mask[b, here], docs[b, here] = sample.input_ids, sample.loss_mask, d
    return ids.to(device), mask.to(device), None if (docs == 0).all() else docs.to(device)

def gather_states(rows, lo, hi, target):
    """hidden_states (B, hi - lo, C) of positions lo..hi of packed rows; names of samples with nan or inf."""
    hidden, wanted = target.lm_head.new_zeros(len(rows), hi - lo, target.lm_head.shape[1]), []
    for b, row in enumerate(rows):
        start = 0
        for sample in row:
            i, j = max(lo, start), min(hi, start + len(sample.input_ids))
            if i < j:
                wanted.append((sample, (i - start, j - start), (b, slice(i - lo, j - lo))))
            start += len(sample.input_ids)
    samples, spans, places = zip(*wanted) if wanted else ((), (), ())
    for at, states in zip(places, target.states(samples, spans)):
        hidden[at] = states
    return hidden, [s.name for s, at in zip(samples, places) if not hidden[at].isfinite().all()]

def capture(cfg):
    """Store the target's hidden states of --data, a safetensors file per sample, for --hidden-states."""
    require(cfg.target and cfg.data and cfg.out, "--target DIR, --data FILE.. and --out DIR are all needed")
    ranks, out = start_ranks(cfg.device), Path(cfg.out)
    target = open_target(cfg, ranks)
    meta = dict(stage="post_norm", dtype=str(target.lm_head.dtype), target_config_sha256=target.sha256)
    files = []  # named after their content: what an interrupted capture has written stays
    for number, sample in [*enumerate(read_samples(cfg.data, target, cfg.seq_len, 3))][ranks.rank::ranks.dp]:
        key = repr((sample.input_ids.tolist(), sample.loss_mask.tolist(), meta)).encode()
        files.append((out / f"{number:06d}-{hashlib.sha256(key).hexdigest()[:12]}.safetensors", sample))
    with tqdm(total=len(files), disable=ranks.rank > 0) as bar:
        for i in range(0, len(files), 16):  # the same batches when it goes on: the same bits
            part = files[i:i + 16]
            lost = [file for file, _ in part if not file.exists()]
            states = target.states([sample for _, sample in part]) if lost else ()
            for (file, sample), hidden in zip(part, states):
                tensors = dict(input_ids=sample.input_ids, loss_mask=sample.loss_mask, hidden_states=hidden)
                about = {**meta, "sample": sample.name, "finite": str(hidden.isfinite().all().item())}
                if file in lost:
                    with atomic(file) as aside:
                        save_file({name: x.cpu().contiguous() for name, x in tensors.items()}, aside, about)
            bar.update(len(part))
    say(f"hidden states written, a file per sample; train with --target {cfg.target} --hidden-states {out}")

# ---- Distributed -------------------------------------------------------------------------------------------
class Ranks(NamedTuple):
    """Where this process stands: data-parallel (dp) times sequence-parallel (sp) ranks, a `group`."""
    rank: int = 0
    dp: int = 1
    sp: int = 1
    group: object = None  # the sp ranks that share a row
    device: torch.device = torch.device("cpu")
    mesh: object = None   # DeviceMesh of all ranks, for FSDP2
    saver: object = None  # group of all ranks, for saving in the background

def start_ranks(device="auto", backend="sdpa", sp=None):
    """Join the process group that torchrun describes, if any. usp: `sp` ranks (default all) share a row."""
    world, rank, local = (int(os.environ.get(name) or default) for name, default in
                          (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)))
    device, group = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu", None
    if device == "cuda":
        torch.cuda.set_device(local)
    sp = (sp or world) if backend == "usp" else 1
    require(world % sp == 0, f"--sp {sp} does not divide the {world} ranks; start a multiple of it")
    if world > 1 or backend == "usp":
        store, backends = dist.HashStore(), "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        if "RANK" in os.environ:  # torchrun's store outlives its ranks: restarted ones would read addresses
            store = next(dist.rendezvous("env://"))[0]  # of the dead (pytorch 135712; several nodes: README)
            if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
                store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group(backends, store=store, rank=rank, world_size=world)
        mesh = dist.device_mesh.init_device_mesh(device, (world // sp, sp), mesh_dim_names=("dp", "sp"))
        group = mesh["sp"].get_group() if backend == "usp" else None
    several = (mesh["dp", "sp"]._flatten(), dist.new_group(backend="gloo")) if world > 1 else ()
    device = torch.device(device, local if device == "cuda" else None)
    return Ranks(rank, world // sp, sp, group, device, *several)

def all_sum(tensor):  # over all ranks, in place
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor
def barrier(ranks):
    return ranks.dp * ranks.sp > 1 and dist.barrier()
def say(text):
    if int(os.environ.get("RANK", 0)) == 0:  # above the progress bar, if there is one
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()

class TTT(nn.Module):
    """ttt_loss as a module: what FSDP2 wraps, for one gathering of the weights to serve all steps."""
    def __init__(self, draft, **options):
        super().__init__()
        self.draft, self.options = draft, options
    def forward(self, *batch, **more):
        return ttt_loss(self.draft, *batch, **{**self.options, **more})

def shard(ttt, mesh):
    """FSDP2: a rank keeps a slice of the weights and their optimizer state; gradients are summed. The fp32
    router stays whole: weights gathered together have one dtype."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    policy = MixedPrecisionPolicy(reduce_dtype=fp32(ttt.draft.eh_proj.weight.dtype))
    fully_shard(ttt, mesh=mesh, mp_policy=policy, ignored_params={ttt.draft.mlp.gate.weight})
    ttt.set_gradient_divide_factor(1.0)
    ttt.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums

def is_sharded(x):
    return isinstance(x, dist.tensor.DTensor)
def whole(x):  # of a tensor of which each rank holds a slice; all ranks call it
    return x.full_tensor() if is_sharded(x) else x

# ---- Optimizer, checkpoints --------------------------------------------------------------------------------
class MasterAdamW:
    """AdamW on fp32 master copies of the parameters (on the parameters themselves where they are fp32)."""
    def __init__(self, model, weight_decay):
        self.params, groups = dict(model.named_parameters()), {}
        self.masters = {name: p if p.dtype == fp32(p.dtype) else nn.Parameter(p.detach().float())
                        for name, p in self.params.items()}
        for p in self.masters.values():  # fused AdamW takes sharded and whole tensors apart
            groups.setdefault((p.dim() > 1, is_sharded(p)), []).append(p)
        groups = [dict(params=x, weight_decay=weight_decay * matrix) for (matrix, _), x in groups.items()]
        self.adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
        for p in self.masters.values():  # AdamW makes these at its first step; a checkpoint needs them before
            moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
            self.adam.state[p] = {"step": torch.zeros((), device=p.device), **moments}
    def step(self, lr, scale):  # of the gradients
        for group in self.adam.param_groups:
            group["lr"] = lr
        for name, master in self.masters.items():
            master.grad = self.params[name].grad.to(master.dtype) * scale
        self.adam.step()
        self.publish()
    @torch.no_grad()
    def publish(self):
        for name, p in self.params.items():
            if p is not self.masters[name]:
                p.copy_(self.masters[name])

def learning_rate(step, cfg):
    """Linear warm-up over warmup_steps, then a cosine from lr down to lr * lr_floor at the last step."""
    done = (step - cfg.warmup_steps) / max(1, cfg.steps - cfg.warmup_steps)
    cosine = cfg.lr_floor + (1 - cfg.lr_floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, done))))
    return cfg.lr * (cosine if done >= 0 else (step + 1) / cfg.warmup_steps)

@contextlib.contextmanager
def atomic(path, ranks=Ranks()):
    """convert.atomic, all ranks together: rank 0 puts in place what they have written."""
    aside = convert.aside(path)
    barrier(ranks)
    yield aside
    barrier(ranks)
    if ranks.rank == 0:
        convert.put_in_place(aside, path)

def saved_states(out):  # complete ones, oldest first
    found = (path for path in (Path(out) / "checkpoints").glob("step-*") if path.name[5:].isdigit())
    return sorted(found, key=lambda path: int(path.name[5:]))

def training_state(model, optimizer, progress):
    """{name: tensor} of all that a resumed run needs; data order and learning rate follow from the step."""
    warnings.filterwarnings("ignore", message="torch.distributed is .*unavailable")  # one process is meant
    state = {"rng": torch.get_rng_state(), **dict(model.named_buffers())}
    for name, p in optimizer.masters.items():
        state[f"master.{name}"] = p.detach()
        state |= {f"{key}.{name}": x for key, x in optimizer.adam.state[p].items()}
    return state | {f"progress.{key}": torch.tensor(x, dtype=torch.float64) for key, x in progress.items()}

@contextlib.contextmanager
def save_state(cfg, model, optimizer, progress, ranks):
    """Write OUT/checkpoints/step-N, all ranks together; it counts once the body has ended, which, given a
    future, runs meanwhile (--background-save). The newest `keep` stay."""
    path = Path(cfg.out) / "checkpoints" / f"step-{progress['step']:.0f}"
    with atomic(path, ranks) as aside:
        state = training_state(model, optimizer, progress)
        if cfg.background_save:
            writing = dcp.async_save(state, checkpoint_id=aside, process_group=ranks.saver)
            yield writing
            writing.result()
        else:
            dcp.save(state, checkpoint_id=aside)
            yield
    for old in saved_states(cfg.out)[:-cfg.keep] if ranks.rank == 0 else []:
        shutil.rmtree(old)

def load_state(path, model, optimizer, progress):
    """Read a training state; returns its progress. Its .metadata is a pickle: resume only your own runs."""
    state = training_state(model, optimizer, progress)
    dcp.load(state, checkpoint_id=path)
    torch.set_rng_state(state["rng"])
    optimizer.publish()
    return {key: state[f"progress.{key}"].item() for key in progress}

# ---- Options -----------------------------------------------------------------------------------------------
def option(default, help, **more):
    return field(default=default, metadata={"help": help, **more})

@dataclass
class TrainConfig:
    target: str = option(None, "HF directory or hub id; default: the demo's, or --draft's", group="target")
    dtype: str = option("auto", "the target runs in", choices=["auto", "float32", "bfloat16", "float16"])
    device: str = option("auto", "cpu, cuda or auto", choices=["auto", "cpu", "cuda"])
    target_device_map: str = option(None, "transformers' device_map for large targets, e.g. auto")
    trust_remote_code: bool = option(False, "let the target's repository run its own code")
    kernels: str = option("auto", "compiled kernels; auto: if built", choices=["auto", "on", "off"])
    data: list = option(None, ".txt or .jsonl ({text} or {messages}); default: the demo's", group="data")
    hidden_states: list = option(None, "instead: directories of stored hidden states, see capture")
    eval_data: list = option(None, "held-out files, or directories; default: every 20th training document")
    out: str = option("runs/demo", "what to write: draft directory (capture: states; generate-data: .jsonl)")
    init: str = option("auto", "warm (target's MTP layer), scratch, auto or a draft directory", group="draft")
    n_routed_experts: int = option(None, "E, for a dense target (default 8)")
    num_experts_per_tok: int = option(None, "A, for a dense target (default 2)")
    moe_intermediate_size: int = option(None, "F, for a dense target: a divisor of its MLP's width")
    backend: str = option("sdpa", "attention: sdpa dense; fa linear memory; usp fa, rows split over ranks",
                          choices=[*BACKENDS, "auto"], also="--attention-backend", group="attention")
    sp: int = option(None, "usp: ranks that share a row; default all")
    fsdp: str = option("auto", "FSDP2 for the draft; auto: with several ranks", choices=["auto", "on", "off"])
    recompute: bool = option(False, "compute a step's activations again in the backward pass: less memory")
    ttt_length: int = option(3, "K, draft steps trained from every row", group="objective")
    recycle: str = option("post", "given to the next step: README, Serving", choices=["post", "pre", "both"])
    zero_first_embedding: bool = option(False, "zero the embedding at position 0, as vLLM does")
    loss: str = option("ce:1+kl:1", f"sum of weighted terms: {', '.join(LOSS_TERMS)}")
    topk: int = option(10, "how many of the target's most likely tokens the topk terms see")
    decay: float = option(0.8, "step k weighs decay ** k")
    step_weights: str = option(None, "instead: a weight for each step, e.g. 0.5,0.3,0.2")
    rollout: str = option("data", "later steps embed the data, or drafted tokens", choices=["data", "draft"])
    steps: int = option(120, "optimizer steps", group="optimization")
    batch_size: int = option(8, "rows per optimizer step, over all ranks; generate-data: prompts at a time")
    micro_batch_size: int = option(8, "rows per forward pass and rank; smaller saves memory")
    seq_len: int = option(256, "tokens per row (capture: file): longer documents are cut")
    lr: float = option(None, "peak learning rate; default 3e-3 from scratch, 1e-4 warm")
    lr_floor: float = option(0.1, "the cosine ends at lr times this")
    warmup_steps: int = option(20, "steps of linear warm-up")
    weight_decay: float = option(0.01, "AdamW's, on matrices")
    clip: float = option(1.0, "largest global gradient norm")
    balance_rate: float = option(None, "step of the router's bias; default 0.01 from scratch, 0 warm")
    seed: int = option(0, "of initialisation and data order")
    eval_every: int = option(0, "steps between evaluations, best to OUT/best; 0: at both ends", group="run")
    eval_rows: int = option(32, "held-out rows per evaluation")
    save_every: int = option(100, "steps between training states; 0: only at the end")
    background_save: bool = option(False, "go on training while the state is written")
    keep: int = option(2, "training states kept")
    log_every: int = option(10, "steps per line of metrics.jsonl; 0: only the last")
    tensorboard: bool = option(False, "write OUT/tensorboard, too (pip install tensorboard)")
    resume: str = option(None, "auto, never or a checkpoints/step-N; default: auto if torchrun restarts it")

@dataclass
class Options(TrainConfig):  # what other commands take as well
    draft: str = option(None, "draft directory", group="this command's own")
    prompt: str = option(None, "text to continue")
    chat: bool = option(False, "put the prompt through the tokenizer's chat template")
    temperature: float = option(0.0, "of sampling; 0: greedy decoding")
    draft_sampling: str = option("greedy", "how drafts are drawn", choices=["greedy", "probabilistic"])
    prompts: str = option(None, "prompts: .txt, one a line, or .jsonl of {prompt} or {messages}")
    raw: bool = option(False, "continue prompts as plain text even if the tokenizer has a chat template")
    max_new_tokens: int = option(128, "length limit of an answer")
    run: str = option(None, "OUT directory of a training run; the flag's name may be left out")

def check_train_config(cfg):
    """Refuse what cannot work before anything is loaded; returns cfg with `resume` resolved."""
    for name in "steps topk ttt_length batch_size micro_batch_size eval_rows keep".split():
        require(getattr(cfg, name) > 0, f"--{name.replace('_', '-')} {getattr(cfg, name)} must be at least 1")
    require(cfg.seq_len >= cfg.ttt_length + 2, f"--seq-len {cfg.seq_len} has no row that counts: raise it")
    require(bool(cfg.data) + bool(cfg.hidden_states) == bool(cfg.target), "give --target DIR with either "
            "--data FILE.. or --hidden-states DIR.., or none of them: the demo")
    require(not cfg.target or cfg.out != TrainConfig.out, f"--out {cfg.out} is the demo's; give --out DIR")
    require(not cfg.tensorboard or find_spec("tensorboard"), "--tensorboard: pip install tensorboard")
    parse_loss(cfg.loss)
    weights, K = cfg.step_weights and [float(x) for x in cfg.step_weights.split(",")], cfg.ttt_length
    require(not weights or len(weights) == K and min(weights) >= 0 < sum(weights),
            f"--step-weights {cfg.step_weights}: expected {K} numbers, none negative, not all 0")
    known = cfg.init in ("auto", "warm", "scratch") or os.path.isdir(cfg.init)
    require(known, f"--init {cfg.init} is neither auto, warm, scratch nor a draft directory")
    require(not cfg.sp or cfg.backend == "usp", f"--sp {cfg.sp} splits rows over ranks: add --backend usp")
    resume = cfg.resume or ("auto" if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) else "never")
    require(resume in ("auto", "never") or (Path(resume) / ".metadata").exists(),
            f"--resume {resume} is no complete training state: give auto, never or OUT/checkpoints/step-N")
    require(resume != "never" or cfg.out == TrainConfig.out or not saved_states(cfg.out), f"--out {cfg.out} "
            "holds training states: add --resume auto to continue that run, or give another --out")
    return replace(cfg, resume=resume, step_weights=weights)

def choose_backend(name, device, dtype):
    """`name`, or what "auto" stands for here (announced). A backend that cannot run is a ValueError."""
    reason = why_not_fa(device.type, dtype)
    if name == "auto":
        name = "sdpa" if reason else "fa"
        say(f"backend {name}: {f'fa cannot run: {reason}' if reason else 'memory linear in T'}")
    require(name == "sdpa" or not reason, f"--backend {name} cannot run: {reason}. Use --backend sdpa")
    return name

def choose_kernels(asked, device):
    """Turn the compiled kernels on or off for this process, and say which and why."""
    global KERNELS
    lost = NO_KERNELS or (device.type == "cuda" and not mtp_kernels.cuda and "they were built without CUDA; "
                          "anew: MTP_CUDA=1 python setup.py build_ext --inplace")
    require(asked != "on" or not lost, f"--kernels on, but there are none: {lost}")
    KERNELS = asked != "off" and not lost
    if asked == "auto":
        say("kernels on: compiled ones are installed" if KERNELS else f"kernels off, PyTorch only: {lost}")

# ---- Training and evaluation -------------------------------------------------------------------------------
class Run:
    """What training and evaluation share: draft, target, ranks, and how batches and the loss are taken."""
    def __init__(self, model, target, cfg, ranks, backend):
        self.model, self.target, self.cfg, self.ranks = model, target, cfg, ranks
        self.usp, self.board, self.data_seconds = backend == "usp", None, 0.0
        if cfg.tensorboard and ranks.rank == 0:
            from torch.utils.tensorboard import SummaryWriter
            self.board = SummaryWriter(Path(cfg.out) / "tensorboard")
        names = ("ttt_length", "loss", "topk", "decay", "step_weights", "recycle", "zero_first_embedding",
                 "rollout", "recompute")
        self.loss = TTT(model, backend=backend, group=ranks.group, sharded=self.usp,
                        **{name: getattr(cfg, name) for name in names})
    def batches(self, rows):
        """This rank's share of `rows` in micro-batches, as many on every rank: rows, (ids, mask, doc_ids)."""
        cfg, ranks = self.cfg, self.ranks
        rows = (rows + [[]] * (-len(rows) % ranks.dp))[ranks.rank // ranks.sp::ranks.dp]
        for i in range(0, len(rows), cfg.micro_batch_size):
            part = rows[i:i + cfg.micro_batch_size]
            longest = max(1, *(sum(len(sample.input_ids) for sample in row) for row in part))
            length = cfg.seq_len if ranks.device.type == "cuda" else longest  # CUDA compiles for each length
            yield part, lay_out(part, length, ranks.device)
    def states(self, rows, length):
        """hidden_states of packed rows, with usp this rank's share and halo; names of samples not finite."""
        began, share = time.perf_counter(), -(-length // self.ranks.sp)
        lo = self.ranks.rank % self.ranks.sp * share
        hi = lo + share + self.cfg.ttt_length * self.usp
        found = gather_states(rows, lo, hi, self.target)
        self.data_seconds += time.perf_counter() - began
        return found
    def gradients(self, rows):
        """Gradients, summed over all ranks. Returns loss, tally, expert load, names of samples not finite."""
        batches, loss, tally, load, bad, sp = list(self.batches(rows)), 0, 0, 0, [], self.ranks.sp
        counts = sum(valid_counts(mask, docs, self.cfg.ttt_length, batch=len(ids), length=ids.shape[1])
                     for _, (ids, mask, docs) in batches)
        counts = all_sum(counts) // sp  # the ranks of a group count the same rows
        self.model.zero_grad()
        for part, (ids, mask, docs) in batches:
            hidden, names = self.states(part, ids.shape[1])
            out = self.loss(ids, hidden, mask, docs, counts=counts)
            out.loss.backward()
            loss, tally, load = loss + out.loss.detach(), tally + out.sums, load + out.expert_load
            bad += names
        for p in self.model.parameters():
            if not is_sharded(p):  # FSDP2 has summed the others
                all_sum(p.grad)
        return all_sum(loss), all_sum(tally) / sp, all_sum(load) // sp, bad
    @torch.no_grad()
    def evaluate(self, rows):
        """Acceptance over `rows`: means' dict, walk (list [K]), accept_len_walk (serving's rounds), rows."""
        recycle, tally, rounds = "pre" if self.cfg.recycle == "pre" else "post", 0, 0  # both: as post
        for part, (ids, mask, docs) in self.batches(rows):
            hidden, _ = self.states(part, ids.shape[1])
            out = self.loss(ids, hidden, mask, docs, rollout="data", recycle=recycle, measure=True)
            tally = tally + out.sums
            rounds = rounds + walk(out.hits, mask, Documents(docs, *ids.shape, ids.device)).to(ids.device)
        getattr(self.loss, "reshard", int)()  # with FSDP2: slices again
        (n_rounds, *accepted), tally = all_sum(rounds).tolist(), all_sum(tally) / self.ranks.sp
        return {**means(tally), "walk": [n / max(1, n_rounds) for n in accepted], "rows": int(tally[7, 0]),
                "accept_len_walk": 1 + sum(accepted) / max(1, n_rounds)}
    def report(self, rows, progress, label):
        result = self.evaluate(rows)
        say(acceptance_table(label, result))
        self.append({"step": int(progress["step"]), "eval": result})
        if self.cfg.eval_every and label != "before" and result["accept_len"] > progress["best"]:
            progress["best"] = result["accept_len"]
            self.write_draft(Path(self.cfg.out) / "best")
        return result
    def write_draft(self, path):
        cfg, target = self.cfg, self.target
        save_draft(path, self.model, dict(
            ttt_length=cfg.ttt_length, engine="any", recycle=cfg.recycle,
            zero_first_embedding=cfg.zero_first_embedding, target=str(target.path.resolve()),
            target_config_sha256=target.sha256), self.ranks.rank)
    def append(self, line):
        """A line of metrics.jsonl; with --tensorboard its numbers go there, too."""
        if self.ranks.rank == 0:
            with open(Path(self.cfg.out) / "metrics.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
        kind = "eval" if "eval" in line else "train"
        for name, x in line.get("eval", line).items() if self.board and "skipped_samples" not in line else ():
            for k, value in enumerate(x if isinstance(x, list) else [x]):
                self.board.add_scalar(f"{kind}/{name}" + f"_{k}" * isinstance(x, list), value, line["step"])

def means(sums):
    """ce, kl, acc, tv (lists [K]), accept_len and that of a target that samples, of TTTOutput.sums."""
    names = "ce", "kl", "acc", "accept_len", "tv", "accept_len_sampled", "accept_len_greedy"
    found = zip(names, (sums[:7] / sums[7].clamp(min=1)).tolist())
    return {name: 1 + sum(x) if "len" in name else x for name, x in found}

def walk(hits, loss_mask, docs):
    """[1 + K]: rounds, and how many accepted position k, of speculative decoding along each text in turn.
    hits (K, B, T): token k drafted from row t is the target's. A text is a maximal run of unmasked tokens,
    the first root the row before it; after n accepted tokens the next root is n + 1 rows on."""
    accepted, total = hits.long().cumprod(0).sum(0).tolist(), torch.zeros(len(hits) + 1, dtype=torch.float64)
    for at in Documents(docs.run.masked_fill(loss_mask == 0, -1), *docs.run.shape, docs.run.device).segments:
        b, start, stop = at[0].start, at[1].start, at[1].stop
        root = start - int(start > 0 and docs.run[b, start - 1] == docs.run[b, start])
        while root + 2 < stop:  # the first token to draft is x[root + 2]
            n = min(accepted[b][root], stop - root - 2)
            total[0] += 1
            total[1:n + 1] += 1
            root += n + 1
    return total

def acceptance_table(label, row):
    lengths = ("accept_len", "accept_len_walk", "accept_len_sampled", "accept_len_greedy")
    figures = {f"acc_{k}": x for k, x in enumerate(row["acc"])} | {name: row[name] for name in lengths}
    figures = {f"  {name}": f"{x:{len(name) + 2}.3f}" for name, x in figures.items()}
    return f"{'':8}{''.join(figures)}\n{label:8}{''.join(figures.values())}"

def open_target(cfg, ranks):
    """The target of --target, else the demo's, which rank 0 builds in the first run."""
    choose_kernels(cfg.kernels, ranks.device)
    path = cfg.target
    if path is None:
        cache, version = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", sys.version_info[:2]
        path = Path(cache, "mtp", "demo-target-2-python{}.{}".format(*version))
        if ranks.rank == 0 and not path.exists():
            build_demo_target(path)
        barrier(ranks)  # the others wait
    return Target(cfg, path, ranks.device, stored=bool(getattr(cfg, "hidden_states", None)))

def make_draft(cfg, target, ranks):
    """(the draft on its device, with the target's embedding and head; whether it is from scratch)."""
    prefix, given = convert.mtp_prefix(target.config, target.checkpoint.files), os.path.isdir(cfg.init)
    require(prefix or cfg.init != "warm", f"{target.path} has no MTP layer; give --init scratch")
    model = MTP(target.draft_config).to(target.lm_head.dtype)
    init_weights(model, model.config.initializer_range, torch.Generator().manual_seed(cfg.seed))
    if given:
        draft, meta = load_draft(cfg.init)
        same = (meta["target_config_sha256"], draft.config) == (target.sha256, model.config)
        require(same, f"--init {cfg.init} was trained for another target or has other sizes")
        model.load_state_dict(draft.state_dict())
    elif prefix and cfg.init != "scratch":
        convert.read_layer(target.checkpoint, prefix, model.state_dict())
    model.to(ranks.device).set_target(target.embed, target.lm_head)
    return model, not given and (not prefix or cfg.init == "scratch")

def read_rows(cfg, target):
    """(training rows, held-out rows): the demo's files or the user's; no held-out sample is trained on."""
    files, held = (cfg.hidden_states or cfg.data, cfg.eval_data) if cfg.target else stdlib_files(every=6)
    for path in [*files, *(held or [])] if cfg.hidden_states else ():
        require(os.path.isdir(path), f"{path} is no directory of stored hidden states (mtp.py capture)")
    samples, held = (paths and read_samples(paths, target, cfg.seq_len, cfg.ttt_length + 2)
                     for paths in (files, held))
    if not held:
        names = [*dict.fromkeys(sample.document for sample in samples)]  # each of one or more samples
        require(len(names) > 1, "--data holds a single document, none can be held out; give --eval-data FILE")
        apart = {*names[::min(20, len(names))]}
        samples, held = ([s for s in samples if (s.document in apart) == x] for x in (False, True))
    rows = pack([samples[i] for i in shuffled(len(samples), cfg.seed, -1)], cfg.seq_len)
    tokens = sum(len(sample.input_ids) for sample in samples)
    say(f"data: {tokens:,} tokens of {len(samples):,} samples in {len(rows):,} rows of {cfg.seq_len} (fill "
        f"ratio {tokens / len(rows) / cfg.seq_len:.2f}); {len(held):,} samples held out")
    held = pack(held, cfg.seq_len)
    return rows, held[::-(-len(held) // cfg.eval_rows)]

def warm_up(cfg, shape, ranks, dtype):
    """Compile fa before the first collective: a rank that compiles late would make the others time out."""
    B, T, P, D = cfg.micro_batch_size, -(-cfg.seq_len // ranks.sp) * ranks.sp, ranks.sp, shape.head_dim
    q, k = (torch.zeros(B, T, heads // P, D, dtype=dtype, device=ranks.device, requires_grad=True)
            for heads in (shape.num_attention_heads, math.lcm(shape.num_key_value_heads, P)))
    attend_fa(q, k, k, [], [], Documents(None, B, T, ranks.device))[0].sum().backward()

def train(cfg):
    """Train a draft, written to OUT; returns the evaluations {"before": .., "after": ..}."""
    cfg = check_train_config(cfg)
    torch.manual_seed(cfg.seed)
    ranks = start_ranks(cfg.device, cfg.backend, cfg.sp)
    shape = (target := open_target(cfg, ranks)).draft_config
    H, most = shape.num_attention_heads, shape.max_position_embeddings
    require(cfg.seq_len <= most, f"--seq-len exceeds the target's max_position_embeddings {most}")
    require(H % ranks.sp == 0, f"--sp {ranks.sp} does not divide {H} heads; give {math.gcd(H, ranks.sp)}")
    backend = choose_backend(cfg.backend, ranks.device, target.lm_head.dtype)
    if backend == "usp" and ranks.device.type == "cuda":
        warm_up(cfg, shape, ranks, target.lm_head.dtype)
    rows, held = read_rows(cfg, target)
    model, scratch = make_draft(cfg, target, ranks)
    cfg = replace(cfg, lr=cfg.lr or (3e-3 if scratch else 1e-4),
                  balance_rate=0.01 * scratch if cfg.balance_rate is None else cfg.balance_rate)
    say(f"draft: {sum(p.numel() for p in model.parameters()):,} parameters, "
        f"{'scratch' if scratch else 'warm' if cfg.init == 'auto' else cfg.init}, {target.lm_head.dtype} on "
        f"{ranks.dp} x {ranks.sp} {ranks.device.type} ranks (data x sequence), for {target.path}")
    run = Run(model, target, cfg, ranks, backend)
    if cfg.fsdp == "on" or cfg.fsdp == "auto" and ranks.mesh:
        require(ranks.mesh, "--fsdp on needs several ranks: start with torchrun --nproc-per-node N")
        shard(run.loss, ranks.mesh)
    optimizer = MasterAdamW(model, cfg.weight_decay)
    progress, results = start_or_resume(run, optimizer), {}
    if not progress["step"]:
        results["before"] = run.report(held, progress, "before")
        ce, chance = results["before"]["ce"][0], math.log(shape.vocab_size)
        if not scratch and ce > 0.9 * chance:
            say(f"warning: the warm start's step-0 loss {ce:.2f} is near ln V = {chance:.2f}, as if random")
    if stopped := train_loop(run, optimizer, progress, rows, held):
        say(f"stopped by {stopped} after step {progress['step']:.0f}; state saved, --resume auto goes on")
        return results
    results["after"] = run.report(held, progress, "after")
    found = torch.zeros(ranks.dp * ranks.sp, 2, dtype=torch.float64, device=ranks.device)
    found[ranks.rank] = torch.tensor([peak_memory(ranks.device), AllToAll.bytes_sent]) / 2 ** 20
    for i, (peak, sent) in enumerate(all_sum(found).tolist()):
        say(f"rank {i}: peak memory {peak:,.0f} MiB; sent {sent:,.1f} MiB to other ranks in attention")
    say(f"draft written to {cfg.out}; try: python mtp.py generate --draft {cfg.out} --prompt \"import os\"")
    return results

def start_or_resume(run, optimizer):
    """Progress of the run that --resume names, its state loaded; or of a new one, old demo states removed."""
    cfg, out = run.cfg, Path(run.cfg.out)
    progress = dict.fromkeys(("step", "tokens", "skipped", "bad_samples", "skipped_in_a_row", "best"), 0.0)
    path = (saved_states(out) or ["never"])[-1] if cfg.resume == "auto" else cfg.resume
    if path != "never":
        say(f"resuming from {path}")
        meta = json.loads((Path(path).parents[1] / "config.json").read_text())
        require({**meta, **asdict(run.model.config), "target_config_sha256": run.target.sha256} == meta,
                f"{path} is of another target or of a draft of other sizes; give another --out")
        return load_state(path, run.model, optimizer, progress)
    barrier(run.ranks)  # all have looked
    if run.ranks.rank == 0:
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
        (out / "checkpoints").mkdir(parents=True)
        (out / "metrics.jsonl").unlink(missing_ok=True)
        need = 12 * sum(p.numel() for p in run.model.parameters()) * (cfg.keep + 1) / 1e9  # fp32, 2 moments
        room = shutil.disk_usage(out).free / 1e9
        require(room > need, f"{out} has {room:.1f} GB left, the states need {need:.1f} GB: lower --keep")
    return progress

def train_loop(run, optimizer, progress, rows, held):
    """Optimizer steps until cfg.steps; logs, evaluates, saves. Returns a signal that ended it, or None."""
    cfg, model, signals, saving, writing = run.cfg, run.model, [], contextlib.ExitStack(), None
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: signals.append(signal.Signals(number).name))
    bar = tqdm(total=cfg.steps, initial=int(progress["step"]), desc="train", disable=run.ranks.rank > 0)
    since = Interval(run)
    while progress["step"] < cfg.steps:
        step = int(progress["step"])
        batch = [rows[shuffled(len(rows), cfg.seed, i // len(rows))[i % len(rows)]]
                 for i in range(step * cfg.batch_size, (step + 1) * cfg.batch_size)]
        loss, tally, load, bad = run.gradients(batch)
        norms = [whole(p.grad.to(fp32(p.dtype)).norm()) for p in model.parameters()]
        norm, lr = torch.stack(norms).norm().item(), learning_rate(step, cfg)
        flags = not math.isfinite(norm + loss + tally.sum()), signals, writing and not writing.done()
        flags = torch.tensor(list(map(bool, flags)), dtype=torch.float, device=run.ranks.device)
        broken, stop, unsaved = (all_sum(flags) > 0).tolist()  # the same on all ranks
        if broken:
            skip_step(run, progress, bad, batch)
        else:
            optimizer.step(lr, min(1.0, cfg.clip / (norm + 1e-6)))
            if cfg.balance_rate:  # else not even re-centred
                balance_experts(model.mlp.gate.e_score_correction_bias, load, cfg.balance_rate)
            progress["skipped_in_a_row"], since.tally = 0, since.tally + tally.cpu()
            since.losses.append(loss.item())
        since.sizes += [sum(len(sample.input_ids) for sample in row) for row in batch]
        progress["step"], progress["tokens"] = step + 1, progress["tokens"] + sum(since.sizes[-len(batch):])
        last, due = step + 1 == cfg.steps, lambda every: every and (step + 1) % every == 0
        if due(cfg.log_every) or last:
            run.append(line := since.line(progress, load) | dict(grad_norm=norm, lr=lr))
            shown = {x: f"{line[x]:.4g}" for x in ("loss", "accept_len", "tokens_per_second")}
            bar.set_postfix(shown, refresh=False)
            since = Interval(run)
        bar.update()
        if due(cfg.eval_every) and not last:
            run.report(held, progress, f"{step + 1}")
        if due(cfg.save_every) or last or stop:
            saving.close()
            run.write_draft(cfg.out)
            writing = saving.enter_context(save_state(cfg, model, optimizer, progress, run.ranks))
            unsaved = cfg.background_save and not last and not stop
        if not unsaved:  # on any rank
            saving.close()
        if stop and not last:
            return (signals or ["a signal to another rank"])[0]
    bar.close()

class Interval:  # what is logged of the steps since the last line
    def __init__(self, run):
        self.run, self.began, self.data_seconds = run, time.perf_counter(), run.data_seconds
        self.sizes, self.losses, self.tally = [], [], torch.zeros(8, run.cfg.ttt_length)
    def line(self, progress, load):
        run, share, tokens = self.run, load / load.sum().clamp(min=1), sum(self.sizes)
        seconds, data = time.perf_counter() - self.began, run.data_seconds - self.data_seconds
        return {"step": int(progress["step"]), "loss": sum(self.losses) / max(1, len(self.losses)),
                **dict([*means(self.tally).items()][:4]), "tokens_per_second": tokens / seconds,
                "data_seconds": data, "compute_seconds": seconds - data,
                "fill_ratio": tokens / len(self.sizes) / run.cfg.seq_len,
                "top_expert_share": share.max().item(), "low_expert_share": share.min().item(),
                "peak_memory": peak_memory(run.ranks.device), "bytes_sent": AllToAll.bytes_sent,
                **{name: int(progress[name]) for name in ("tokens", "skipped", "bad_samples")}}

def peak_memory(device):  # bytes: allocated on the GPU, or, on a CPU, resident
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)

def skip_step(run, progress, bad, batch):
    """Count a step whose loss or gradient is not finite and name its samples; ten in a row are an error."""
    found = [bad] * (run.ranks.dp * run.ranks.sp)
    if len(found) > 1:
        dist.all_gather_object(found, bad)
    names = sorted({*sum(found, [])}) or [sample.name for row in batch for sample in row]
    for name, n in (("skipped", 1), ("bad_samples", len(names)), ("skipped_in_a_row", 1)):
        progress[name] += n
    say(f"step {progress['step'] + 1:.0f} skipped, its loss or gradient is not finite: {', '.join(names[:4])}"
        f"{', ..' if len(names) > 4 else ''}")
    run.append({"step": int(progress["step"]) + 1, "skipped_samples": names})
    require(progress["skipped_in_a_row"] < 10, "ten steps in a row were skipped: lower --lr")

def plot(cfg):
    """Draw a run's acceptance per step and its loss over the optimizer steps: RUN/plot.png."""
    require(find_spec("matplotlib"), "plot needs matplotlib: pip install matplotlib")
    from matplotlib.figure import Figure
    lines = [json.loads(line) for line in (Path(cfg.run) / "metrics.jsonl").read_text().splitlines()]
    trained, held = [x for x in lines if "loss" in x], [x | x["eval"] for x in lines if "eval" in x]
    left, right = (figure := Figure(figsize=(10, 4), layout="constrained")).subplots(1, 2)
    for k in range(len(trained[0]["acc"]) if trained else 0):
        left.plot([x["step"] for x in trained], [x["acc"][k] for x in trained], f"C{k}", label=f"step {k}")
        left.plot([x["step"] for x in held], [x["acc"][k] for x in held], f"C{k}o")
    right.plot([x["step"] for x in trained], [x["loss"] for x in trained], "k")
    left.legend(title="dots: held out")
    left.set(title="acceptance: the draft's argmax is the target's", xlabel="optimizer step", ylim=(0, 1))
    right.set(title="loss", xlabel="optimizer step")
    figure.savefig(Path(cfg.run) / "plot.png", dpi=120)
    say(f"drew {Path(cfg.run) / 'plot.png'}")

# ---- Speculative decoding ----------------------------------------------------------------------------------
class Drafter:
    """Drafting as engines do it: a cache of draft keys for the verified prefix, rewritten from the target's
    true hidden states after every verification, and one appended key per drafted token."""
    def __init__(self, model, recycle="post", zero_first_embedding=False, temperature=0.0):
        self.model, self.recycle, self.zero_first = model, recycle, zero_first_embedding
        self.past_k, self.past_v, self.temperature = [], [], temperature
    def rows(self, tokens, hidden, start):
        """Run rows start.. of hidden (1, n, C), tokens one on; the last row's n and what it recycles."""
        positions = torch.arange(start, start + len(tokens), device=hidden.device)[None]
        n, r, self.past_k, self.past_v, _ = self.model(
            torch.tensor([tokens], device=hidden.device), hidden.to(self.model.eh_proj.weight.dtype),
            positions, self.past_k, self.past_v, None, attend_decode, zero_first=self.zero_first)
        return n[:, -1:], (r if self.recycle == "pre" else n)[:, -1:]
    def draft(self, tokens, hidden, start, K):
        """K tokens, drawn from q, after `tokens`, verified, from position start + 1; hidden: from `start`."""
        self.past_k, self.past_v = ([x[:, :start] for x in past] for past in (self.past_k, self.past_v))
        drafted, self.q, (n, g) = [], [], self.rows(tokens, hidden, start)
        while True:
            self.q.append(distribution(self.model.logits(n)[0], self.temperature))
            drafted.append(self.q[-1].multinomial(1).item())
            if len(drafted) == K:
                return drafted
            n, g = self.rows(drafted[-1:], g, start + len(tokens) + len(drafted) - 1)

def distribution(logits, temperature):  # (N, V): what tokens are drawn from; 0 is greedy, onehot(argmax)
    if temperature:
        return (logits.float() / temperature).softmax(-1)
    return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()

def verify(p, q, drafted):
    """How many drafted tokens stand, and the token after them, as if drawn from p (K + 1, V). Token x, of q,
    stands with chance min(1, p[x] / q[x]); the first to fall is replaced by one of (p - q)+ (Leviathan)."""
    at = torch.tensor(drafted, dtype=torch.long, device=p.device)[:, None]
    stands = torch.rand(at.shape, device=p.device) * q.gather(1, at) < p[:-1].gather(1, at)
    n = int(stands.cumprod(0).sum())
    rest = (p[n] - q[n]).clamp(min=0) if n < len(drafted) else p[n]
    return n, (rest if rest.any() else p[n]).multinomial(1).item()

# answer: cut at limit or end token; rounds: accepted in each, as vLLM counts; margins: of each best logit
Decoding = namedtuple("Decoding", "ids answer rounds margins speed")

@torch.no_grad()
def decode(target, prompt, max_new_tokens, drafter=None, K=0, eos=(), temperature=0.0):
    """Greedy decoding or sampling after `prompt` (ids), K drafted tokens verified per round; K = 0: plain."""
    from transformers import DynamicCache
    device, began, rounds, margins = target.model.device, time.perf_counter(), [], []
    past, tokens, drafted, start = DynamicCache(config=target.model.config), list(prompt), [], 0
    while True:
        seen, new = past.get_seq_length(), tokens[past.get_seq_length():] + drafted
        positions = torch.arange(seen, seen + len(new), device=device)[None]
        hidden = target.model.base_model(
            torch.tensor([new], device=device), position_ids=positions, use_cache=True,
            **{target.cache_name: past}).last_hidden_state.to(target.device)
        logits = F.linear(hidden[0, -len(drafted) - 1:].to(target.lm_head.dtype), target.lm_head)
        p = distribution(logits, temperature)
        n, token = verify(p, torch.cat(drafter.q) if drafted else p, drafted)
        rounds += [n] if drafted else []
        margins += [(a, a - b) for a, b in logits[:n + 1].float().topk(2).values.tolist()]
        past.crop(n - len(drafted))  # negative: forgets the refused ones
        tokens += drafted[:n] + [token]
        answer = tokens[len(prompt):]
        ends = [i for i, token in enumerate(answer) if token in eos]
        if ends or len(answer) >= max_new_tokens:
            answer = answer[:min([*ends, max_new_tokens])]
            return Decoding(tokens, answer, rounds, margins, len(answer) / (time.perf_counter() - began))
        if K:
            hidden = hidden[:, :hidden.shape[1] - len(drafted) + n]  # of what stands
            drafted, start = drafter.draft(tokens[start + 1:], hidden, start, K), len(tokens) - 1

def open_draft(cfg):
    """(model with its target set, target, ranks, cfg with what the draft decides); its own target only."""
    require(cfg.draft, "--draft DIR is missing: a directory that training wrote, e.g. runs/demo")
    (model, meta), ranks = load_draft(cfg.draft), start_ranks(cfg.device, cfg.backend, cfg.sp)
    target = open_target(replace(cfg, target=cfg.target or meta["target"]), ranks)
    require(target.sha256 == meta["target_config_sha256"], f"{cfg.draft} was trained for another target")
    model.to(target.device, target.lm_head.dtype).set_target(target.embed, target.lm_head)
    chosen = {name: getattr(cfg, name) or meta[name] for name in ("recycle", "ttt_length")}
    return model, target, ranks, replace(cfg, zero_first_embedding=meta["zero_first_embedding"], **chosen)

def evaluate_command(cfg):
    """Print the acceptance table of a draft on held-out text."""
    model, target, ranks, cfg = open_draft(cfg)
    backend = choose_backend(cfg.backend, target.device, target.lm_head.dtype)
    samples = read_samples(cfg.data or stdlib_files(every=6)[1], target, cfg.seq_len, cfg.ttt_length + 2)
    rows = pack(samples, cfg.seq_len)
    result = Run(model, target, cfg, ranks, backend).evaluate(rows[::-(-len(rows) // cfg.eval_rows)])
    say(acceptance_table("draft", result))
    say(f"walk: accepted per position {' '.join(f'{x:.3f}' for x in result['walk'])}; {result['rows']:,} "
        f"positions of {min(cfg.eval_rows, len(rows))} of {len(rows)} rows of {cfg.seq_len} counted")

def generate_command(cfg):
    """Continue a prompt by speculative and by plain decoding; compare tokens (if greedy) and time."""
    require(cfg.prompt and cfg.temperature >= 0, "--prompt TEXT is missing, or --temperature is below 0")
    model, target, _, cfg = open_draft(cfg)
    K, tokenizer, length = cfg.ttt_length, target.tokenizer, cfg.max_new_tokens
    ids = tokenizer(cfg.prompt)["input_ids"] if not cfg.chat else tokenizer.apply_chat_template(
        [{"role": "user", "content": cfg.prompt}], add_generation_prompt=True, return_dict=True)["input_ids"]
    room = target.draft_config.max_position_embeddings - length - K
    require(1 <= len(ids) <= room, f"--prompt has {len(ids)} tokens; --max-new-tokens leaves 1 to {room}")
    ends, drawn = target.model.generation_config.eos_token_id, cfg.draft_sampling == "probabilistic"
    drafter = Drafter(model, cfg.recycle, cfg.zero_first_embedding, cfg.temperature if drawn else 0.0)
    eos = ends if isinstance(ends, list) else [ends]
    plain = decode(target, ids, length, eos=eos, temperature=cfg.temperature)
    fast = decode(target, ids, length, drafter, K, eos, cfg.temperature)
    rounds = max(1, len(fast.rounds))
    stood = [sum(n > k for n in fast.rounds) / rounds for k in range(K)]
    print(f"{tokenizer.decode(ids + fast.answer)}\n\naccept_len_walk {1 + sum(fast.rounds) / rounds:.3f} "
          f"over {len(fast.rounds)} rounds; accepted per position {' '.join(f'{x:.3f}' for x in stood)}\n"
          f"tokens/s, here, where it is a check: {fast.speed:.1f} with drafting, {plain.speed:.1f} without")
    if cfg.temperature:
        return print(f"sampled at temperature {cfg.temperature} with {cfg.draft_sampling} drafts")
    check_lossless(plain, fast, target.lm_head.dtype)

def check_lossless(plain, fast, dtype):
    """Print that drafting changed no token, or where rounding let it; ValueError if it was not rounding."""
    if plain.answer == fast.answer:
        return print("lossless: token for token the target's own greedy answer")
    at = len(os.path.commonprefix([plain.answer, fast.answer]))
    best, lead = plain.margins[at]
    ulps = lead / 2.0 ** math.frexp(best)[1] / torch.finfo(dtype).eps * 2
    print(f"differs from plain greedy decoding from token {at} on: two best logits {ulps:.1f} ulps apart")
    require(ulps <= 2 and dtype.itemsize < 4, "drafted and plain decoding differ by more: report it")

def generate_data(cfg):
    """Write the target's own greedy answers to prompts: the text that a draft will meet in serving."""
    require(cfg.prompts and cfg.out, "--prompts FILE and --out FILE.jsonl are both needed")
    lines = filter(str.strip, Path(cfg.prompts).read_text(encoding="utf-8").splitlines())
    rows = [json.loads(x) if cfg.prompts.endswith(".jsonl") else {"prompt": x} for x in lines]
    wrong = [i for i, row in enumerate(rows, 1) if not row.keys() & {"prompt", "messages"}]
    require(not wrong, f"{cfg.prompts}: prompt {wrong[:1]} has neither \"prompt\" nor \"messages\"")
    target, out = open_target(cfg, start_ranks(cfg.device)), Path(cfg.out)
    model, tokenizer = target.model, target.tokenizer
    out.parent.mkdir(parents=True, exist_ok=True)
    out.touch()
    done = out.read_bytes()
    os.truncate(out, done.rfind(b"\n") + 1)  # a line cut short is written again
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
    chat = tokenizer.chat_template and not cfg.raw
    with open(out, "a") as file, tqdm(total=len(rows), initial=done.count(b"\n"), unit="prompt") as bar:
        for i in range(bar.n, len(rows), cfg.batch_size):
            asked = [row.get("messages") or row["prompt"] for row in rows[i:i + cfg.batch_size]]
            if chat:
                asked = [[{"role": "user", "content": x}] if isinstance(x, str) else x for x in asked]
                batch = tokenizer.apply_chat_template(asked, add_generation_prompt=True, padding=True,
                                                      return_tensors="pt", return_dict=True).to(model.device)
            else:
                batch = tokenizer(asked, padding=True, return_tensors="pt").to(model.device)
            answers = model.generate(batch.input_ids, attention_mask=batch.attention_mask, do_sample=False,
                                     max_new_tokens=cfg.max_new_tokens, pad_token_id=tokenizer.pad_token_id)
            answers = answers[:, batch.input_ids.shape[1]:]
            for x, text in zip(asked, tokenizer.batch_decode(answers, skip_special_tokens=True)):
                answer = [{"role": "assistant", "content": text}]
                file.write(json.dumps({"messages": x + answer} if chat else {"text": x + text}) + "\n")
            file.flush()
            bar.update(len(asked))

# ---- Command line ------------------------------------------------------------------------------------------
# {command: (function, its flags beside `common`, those whose default is None: set elsewhere)}
COMMANDS = {
    "train": (train, " ".join(TrainConfig.__dataclass_fields__), ()),
    "eval": (evaluate_command, "draft data backend sp seq_len eval_rows micro_batch_size recycle ttt_length",
             ("recycle", "ttt_length")),
    "generate": (generate_command, "draft prompt chat max_new_tokens temperature draft_sampling recycle "
                 "ttt_length", ("recycle", "ttt_length")),
    "generate-data": (generate_data, "prompts out max_new_tokens batch_size raw", ("out",)),
    "capture": (capture, "data out seq_len", ("out",)), "plot": (plot, "run", ())}

def parse(command, arguments):
    """The command's Options from flags: a dataclass field is default, type and help of its flag."""
    run, names, unset = COMMANDS[command]
    common = "target dtype device target_device_map trust_remote_code kernels" if command != "plot" else ""
    parser = argparse.ArgumentParser(
        prog=f"mtp.py {command}", usage="%(prog)s [--flag value ..]", allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__ if command == "train" else run.__doc__)
    group, title = lru_cache(parser.add_argument_group), None  # titles: of a field and the ones after it
    titles = {f.name: (title := f.metadata.get("group", title)) for f in fields(Options)}
    for f in (f for f in fields(Options) if f.name in f"{names} {common}".split()):
        flags = ["--" + f.name.replace("_", "-"), *filter(None, [f.metadata.get("also")])]
        default = None if f.name in unset else f.default
        how = dict(action="store_true") if f.type == "bool" else dict(
            type={"int": int, "float": float}.get(f.type, str), choices=f.metadata.get("choices"),
            nargs="+" if f.type == "list" else None)
        text = f.metadata["help"] + ("" if default in (None, False) else f" (default {default})")
        group(titles[f.name]).add_argument(*flags, dest=f.name, default=default, help=text, **how)
    return Options(**dict.fromkeys(unset) | vars(parser.parse_args(arguments)))

def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0][0] != "-" and arguments[0] not in COMMANDS:
        sys.exit(f"mtp.py: error: {arguments[0]!r} is no command; there are {', '.join(COMMANDS)}")
    command, *rest = arguments if arguments and arguments[0] in COMMANDS else ["train", *arguments]
    rest = ["--run", *rest] if command == "plot" and rest and rest[0][0] != "-" else rest
    cfg = parse(command, rest)
    if LOST:
        sys.exit(f"mtp.py: error: {LOST}")
    try:
        COMMANDS[command][0](cfg)
    except KeyboardInterrupt:
        return 130
    except BaseException as error:  # a CheckpointException is no Exception; its last line is the cause
        state, lost = isinstance(error, dcp.api.CheckpointException), "closed by peer" in str(error)
        known = state or lost or isinstance(error, (ValueError, OSError, SafetensorError))
        said = "another rank has failed" if lost else str(error).splitlines()[-1] if state else error
        if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # for torchrun's summary
            Path(report).write_text(json.dumps(dict(message=repr(error), timestamp=int(time.time()))))
        if not known or os.environ.get("MTP_TRACEBACK"):
            raise
        tqdm.write(f"mtp.py: error: {said}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0

if __name__ == "__main__":
    sys.exit(main())
