"""mtp.py - train multi-token-prediction (MTP) drafters exactly as serving engines run them.

A draft is one decoder layer that proposes the next few tokens of a frozen target. One step, all rows t:

  x[t+1+k] -> embed* -> enorm -.
                               cat -> eh_proj -> z -> + attention -> + MoE -> r -> norm -> n -> lm_head*
  g[t]     -----------> hnorm -'                      GQA, QK-norm,   sigmoid              |  logits of
   ^                                                  RoPE at t+k     router               |  x[t+2+k]
   '-- step 0: h[t], the target's last hidden state; step k: n (or r) of step k-1 ---------'  * frozen

Training is test-time training (TTT): K such steps in a row, each fed with the output of the one
before, the keys and values of all steps kept. What is trained is what is later served.

  torchrun mtp.py                                           demo on a CPU: target, draft, acceptance
  torchrun mtp.py --target DIR --data F.jsonl --backend fa  one GPU, a GLM-4.x or Hunyuan 3 checkpoint
  torchrun --nproc-per-node 8 mtp.py --backend usp ...      one long sequence split over 8 GPUs
  python mtp.py eval --draft DIR                            acceptance on held-out text
  python mtp.py generate --draft DIR --prompt TEXT          lossless speculative decoding
  python mtp.py capture --target DIR --data F --out DIR     stored states; also: generate-data, plot

Row t is the root of its own draft chain. What step k = 0..K-1 does in row t (h_t has seen x_0..x_t):

  | embeds    | hidden state in  | RoPE at | predicts  | teacher                 | sees keys of
  | x_{t+1+k} | h_t; k > 0: n    | t + k   | x_{t+2+k} | softmax(lm_head         | step 0: rows <= t,
  |           | (or r) of k - 1  |         |           |         h_{t+1+k})      | steps 1..k: row t

Glossary: B batch, T tokens, C hidden_size, V vocab_size, H query heads, G key/value heads, D head_dim,
N any rows, E n_routed_experts, A num_experts_per_tok, F moe_intermediate_size, K ttt_length, P ranks
of a sequence, L rows of a rank. Attention tensors are (B, T, H, D). "fp32" is at least fp32.

To find your way: the mask is drawn above `class Attention`, the loop is `ttt_steps`. Add a loss term in
LOSS_TERMS, a family or an engine in convert.py's tables. Copy down to `# ---- Everything above`.

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
    NO_KERNELS = None
except ImportError as error:  # the functions named _ref serve instead
    NO_KERNELS = f"{error}; build them with: python setup.py build_ext --inplace"
KERNELS = NO_KERNELS is None  # are they used?

def require(holds, message):
    if not holds:
        raise ValueError(message)

# ---- Config --------------------------------------------------------------------------------------

@dataclass
class MTPConfig:
    """Shape of a draft layer, in glm4_moe's spelling for every family. n_routed_experts 0: instead of
    experts a dense MLP of intermediate_size; the two numbers after it are 0 then, too."""
    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    n_shared_experts: int = 1                 # each moe_intermediate_size wide
    shared_expert_intermediate_size: int = 0  # instead: the width of one with a gate (Qwen)
    intermediate_size: int = 0
    scoring_func: str = "sigmoid"             # of the router, or softmax, which has no bias
    partial_rotary_factor: float = 1.0
    use_qk_norm: bool = True
    attn_output_gate: bool = False
    zero_centered_norm: bool = False          # norms multiply by 1 + weight
    attention_bias: bool = False
    rope_theta: float = 10000.0
    rope_scaling: dict = None                 # of rope_type llama3 or yarn, see rope_frequencies
    rms_norm_eps: float = 1e-5
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True
    n_group: int = 1
    topk_group: int = 1
    initializer_range: float = 0.02
    max_position_embeddings: int = 131072
    model_type: str = "glm4_moe"

    def __post_init__(self):
        H, G = self.num_attention_heads, self.num_key_value_heads
        require(H % G == 0, f"num_attention_heads {H} must be a multiple of num_key_value_heads {G}")

        rotary = int(self.head_dim * self.partial_rotary_factor)
        require(rotary > 0 and rotary % 2 == 0,
                f"RoPE turns {rotary} of {self.head_dim} dims, must be even")

        E, groups = self.n_routed_experts, self.n_group
        if E == 0:
            require(self.intermediate_size > 0, "n_routed_experts is 0, but so is intermediate_size")
            return
        require(E % groups == 0 and (groups == 1 or E >= 2 * groups),
                f"n_routed_experts {E} cannot be n_group {groups} equal groups of at least two")
        A = self.num_experts_per_tok
        usable = E // groups * min(self.topk_group, groups)
        require(1 <= A <= usable,
                f"num_experts_per_tok {A} is not in 1..{usable}, all topk_group allows")

# ---- Small operations ----------------------------------------------------------------------------

def fp32(dtype):
    """What norms, routers, softmaxes and sums run in: fp32, or float64 for a float64 model."""
    return torch.promote_types(dtype, torch.float32)

def window(x, start, stop):
    """A copy of x[:, start:stop], with zeros where x (B, T, ..) has ended."""
    part = x[:, start:stop]
    missing = part.new_zeros(len(x), stop - start - part.shape[1], *x.shape[2:])
    return torch.cat([part, missing], dim=1)

def rope(x, position_ids, config):
    """Turn the first partial_rotary_factor * D dims of x (B, T, H, D) by position_ids (B, T)."""
    D = x.shape[-1]
    half = int(D * config.partial_rotary_factor) // 2
    frequency, factor = rope_frequencies(config, half, fp32(x.dtype), x.device)

    # (B, T, 1, half), in fp32 and then cast, as transformers and vLLM have it
    angle = position_ids.to(frequency.dtype)[..., None, None] * frequency
    cos = (angle.cos() * factor).to(x.dtype)
    sin = (angle.sin() * factor).to(x.dtype)

    a, b, rest = x.split([half, half, D - 2 * half], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)

class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm; with zero_centered_norm x / rms(x) * (1 + weight), in fp32 and then cast (Qwen). The
    weight is kept as stored: 1 + weight has fewer of its bits."""
    def __init__(self, width, config):
        super().__init__(width, eps=config.rms_norm_eps)
        self.zero_centered = config.zero_centered_norm

    def forward(self, x):
        if not self.zero_centered:
            return super().forward(x)
        dtype = fp32(x.dtype)
        weight = 1 + self.weight.to(dtype)
        return F.rms_norm(x.to(dtype), x.shape[-1:], weight, self.eps).to(x.dtype)

class Documents:
    """Which rows belong together. doc_ids (B, T): a document is a maximal run of equal values,
    negative is padding; None: each sequence is one document.

    document (B, T): its number, from 1; 0 in padding. position_ids (B, T): from its first row."""
    def __init__(self, doc_ids, batch, length, device):
        rows = torch.arange(length, device=device).expand(batch, length)
        self.whole = doc_ids is None
        if self.whole:
            doc_ids = torch.zeros_like(rows)

        first = F.pad(doc_ids[:, 1:] != doc_ids[:, :-1], (1, 0), value=True)
        self.document = first.cumsum(1).masked_fill(doc_ids < 0, 0)
        # A row's number less that of the row where its document begins.
        self.position_ids = rows - torch.where(first, rows, 0).cummax(1).values

    def has_later(self, by):
        """(B, T) bool: does row t + by exist and lie in row t's document?"""
        later = window(self.document, by, by + self.document.shape[1])
        return (self.document > 0) & (later == self.document)

    @cached_property
    def causal(self):
        """(B, T, T) bool: may row i see the step-0 key of row j?"""
        same = self.document[:, :, None] == self.document[:, None, :]
        return (same & (self.document > 0)[:, None, :]).tril()

    @cached_property
    def block_mask(self):
        """`causal` as FlexAttention's BlockMask. One head: the mask is the same for all of them."""
        document = self.document
        B, T = document.shape

        def visible(b, h, i, j):
            return (i >= j) & (document[b, i] == document[b, j]) & (document[b, j] > 0)

        return create_block_mask(visible, B, None, T, T, device=document.device,
                                 _compile=document.is_cuda)

def kernels_take(x, *widths):
    """Do the compiled kernels run for x's device and dtype? They want `widths` divisible by 8."""
    if not KERNELS or any(width % 8 for width in widths):
        return False
    return x.device.type == "cpu" or (x.is_cuda and mtp_kernels.cuda and x.dtype != torch.float64)

# ---- Attention -----------------------------------------------------------------------------------
#
# The mask of the TTT attention, rows t down, keys across (T = 4, step k = 2). A query of row t sees
# the keys of step 0 of rows <= t of its document and, of each later step, only the key of its own
# row: its own chain.
#
#        step 0     step 1     step 2         Block 0 is ordinary causal attention, o_0 and lse_0. What steps
#     t: 0 1 2 3    0 1 2 3    0 1 2 3        1..k add is one score per row, s_j = scale * <q, k_j[t]>:
#     0  x . . .    x . . .    x . . .
#     1  x x . .    . x . .    . x . .             lse = logsumexp(lse_0, s_1, .., s_k)
#     2  x x x .    . . x .    . . x .             out = exp(lse_0 - lse) o_0 + sum_j exp(s_j - lse) v_j[t]
#     3  x x x x    . . . x    . . . x
#
# which is what a serving engine computes when it drafts k tokens after a verified prefix.
#
# Backward, with the MERGED out and lse and w_j = exp(s_j - lse):
#
#     dv_j = w_j dO,   ds_j = w_j <dO, v_j - out>,   dk_j = scale ds_j q,   dq += scale ds_j k_j
#
# where dk_j and dv_j are summed over the query heads that share a key/value head. Block 0 needs no
# more than its own backward, if that is given the merged out and lse: then dq, dK_0 and dV_0 are exact.
# (Given its own out and lse, dq and dK_0 are wrong and dV_0 is right, which is why that bug hides.)
#
# Every backend: attend(q, k, v, past_k, past_v, docs, group) -> (out, past_k, past_v).
# q, out (B, T, H, D); k, v (B, T, G, D) of this step; past_k, past_v: lists of those of earlier steps,
# returned with this step's added. Rows of padding see nothing in block 0: o_0 = 0, lse_0 = -inf.

class Attention(nn.Module):
    """Grouped-query attention; with use_qk_norm, RMSNorm of each q and k head BEFORE RoPE. With
    attn_output_gate each head's rows of q_proj are q's D and then D of a gate for its output."""
    def __init__(self, config):
        super().__init__()
        self.config = config
        C, D = config.hidden_size, config.head_dim
        H, G = config.num_attention_heads, config.num_key_value_heads
        gate = H * D if config.attn_output_gate else 0
        self.q_proj = nn.Linear(C, H * D + gate, bias=config.attention_bias)
        self.k_proj = nn.Linear(C, G * D, bias=config.attention_bias)
        self.v_proj = nn.Linear(C, G * D, bias=config.attention_bias)
        self.o_proj = nn.Linear(H * D, C, bias=False)
        if config.use_qk_norm:
            self.q_norm = RMSNorm(D, config)
            self.k_norm = RMSNorm(D, config)

    def forward(self, x, position_ids, past_k, past_v, docs, attend, group=None):
        """x (B, T, C) -> out (B, T, C), past_k, past_v; `attend` is one of BACKENDS, below."""
        B, T, _ = x.shape
        D = self.config.head_dim
        q = self.q_proj(x)
        if self.config.attn_output_gate:
            q, gate = q.view(B, T, -1, 2 * D).chunk(2, dim=-1)  # (B, T, H, D) each
        q = q.reshape(B, T, -1, D)            # (B, T, H, D)
        k = self.k_proj(x).view(B, T, -1, D)  # (B, T, G, D)
        v = self.v_proj(x).view(B, T, -1, D)  # (B, T, G, D)
        if self.config.use_qk_norm:
            q = self.q_norm(q)
            k = self.k_norm(k)
        q = rope(q, position_ids, self.config)
        k = rope(k, position_ids, self.config)

        out, past_k, past_v = attend(q, k, v, past_k, past_v, docs, group)
        if self.config.attn_output_gate:
            out = out * gate.sigmoid()
        return self.o_proj(out.flatten(2)), past_k, past_v

def by_group(x, G, dtype):
    """(B, T, H, D) -> (B, T, G, H/G, D): the query heads that share a key/value head, side by side."""
    return x.unflatten(2, (G, -1)).to(dtype)

def merge_ref(o_0, lse_0, q, ks, vs, scale):
    """Merge block 0's attention with one key per row and later step, S of them, see above. o_0, q
    (B, T, H, D); lse_0 (B, T, H), natural log, fp32; ks, vs: S of (B, T, G, D). Returns out, lse."""
    G, dtype = ks[0].shape[2], lse_0.dtype
    k = torch.stack(ks, dim=3).to(dtype)                 # (B, T, G, S, D)
    v = torch.stack(vs, dim=3).to(dtype)                 # (B, T, G, S, D)
    lse_0 = by_group(lse_0[..., None], G, dtype)         # (B, T, G, H/G, 1)

    s = scale * by_group(q, G, dtype) @ k.mT             # (B, T, G, H/G, S)
    lse = torch.cat([lse_0, s], -1).logsumexp(-1, keepdim=True)
    out = (lse_0 - lse).exp() * by_group(o_0, G, dtype) + (s - lse).exp() @ v
    return out.flatten(2, 3).to(q.dtype), lse.flatten(2)  # (B, T, H, D), (B, T, H)

def merge_backward_ref(dout, q, ks, vs, out, lse, scale):
    """The gradient of merge_ref through the scores of the later steps, see above: dq, dks, dvs."""
    G, dtype = ks[0].shape[2], lse.dtype
    k = torch.stack(ks, dim=3).to(dtype)                 # (B, T, G, S, D)
    v = torch.stack(vs, dim=3).to(dtype)                 # (B, T, G, S, D)
    q_heads = by_group(q, G, dtype)                      # (B, T, G, H/G, D)
    dout = by_group(dout, G, dtype)
    out = by_group(out, G, dtype)
    lse = by_group(lse[..., None], G, dtype)             # (B, T, G, H/G, 1)

    w = (scale * q_heads @ k.mT - lse).exp()             # (B, T, G, H/G, S)
    ds = scale * w * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
    dq = (ds @ k).flatten(2, 3).to(q.dtype)              # (B, T, H, D)
    dk = (ds.mT @ q_heads).to(q.dtype)                   # (B, T, G, S, D)
    dv = (w.mT @ dout).to(q.dtype)                       # (B, T, G, S, D)
    return dq, list(dk.unbind(3)), list(dv.unbind(3))

def kernels_merge(q, ks):
    return kernels_take(q, q.shape[-1]) and q.shape[-1] <= 256 and len(ks) <= 7

def merge(o_0, lse_0, q, ks, vs, scale):
    """merge_ref by the compiled kernel, which has a gradient of its own."""
    if kernels_merge(q, ks):
        return torch.ops.mtp_kernels.merge(o_0, lse_0, q, ks, vs, scale)
    return merge_ref(o_0, lse_0, q, ks, vs, scale)

def merge_backward(dout, q, ks, vs, out, lse, scale):
    """merge_backward_ref by the compiled kernel."""
    if kernels_merge(q, ks):
        dq, dks, dvs, _ = torch.ops.mtp_kernels.merge_backward(
            dout, q, ks, vs, out, lse, scale, None, None)
        return dq, dks, dvs
    return merge_backward_ref(dout, q, ks, vs, out, lse, scale)

def halves(tensors):
    return tensors[:len(tensors) // 2], tensors[len(tensors) // 2:]

def cpu_pieces(docs):
    """Index of what one call of the CPU's flash attention takes: all at once, or a document each."""
    if docs.whole:
        return [(slice(None), slice(None))]
    return [(slice(b, b + 1), slice(start, stop)) for b, start, stop in spans(docs)]

class AttendCPU(torch.autograd.Function):
    """Block 0 and the merge as one. Block 0 takes the only CPU op that returns an lse, a private one;
    its backward, given the MERGED out and lse, is exact, see above."""
    @staticmethod
    def forward(ctx, docs, scale, q, *keys_and_values):
        ks, vs = halves(keys_and_values)
        out = torch.zeros_like(q)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=fp32(q.dtype))
        for at in cpu_pieces(docs):
            heads_first = [x[at].transpose(1, 2) for x in (q, ks[0], vs[0])]  # (B, H, T, D)
            part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *heads_first, 0.0, True, scale=scale)
            out[at] = part[0].transpose(1, 2)  # (B, T, H, D)
            lse[at] = part[1].transpose(1, 2)  # (B, T, H)

        if len(ks) > 1:
            out, lse = merge(out, lse, q, ks[1:], vs[1:], scale)
        ctx.docs, ctx.scale = docs, scale
        ctx.save_for_backward(q, out, lse, *keys_and_values)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, out, lse, *keys_and_values = ctx.saved_tensors
        ks, vs = halves(keys_and_values)
        dout = dout.contiguous()
        dq = torch.zeros_like(q)
        dk = torch.zeros_like(ks[0])
        dv = torch.zeros_like(vs[0])
        for at in cpu_pieces(ctx.docs):
            saved = (dout, q, ks[0], vs[0], out, lse)
            heads_first = [x[at].transpose(1, 2) for x in saved]  # (B, H, T, ..)
            part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *heads_first, 0.0, True, scale=ctx.scale)
            for grad, x in zip((dq, dk, dv), part):
                grad[at] = x.transpose(1, 2)  # (B, T, H, D)

        if len(ks) == 1:
            return None, None, dq, dk, dv
        dq_later, dks, dvs = merge_backward(dout, q, ks[1:], vs[1:], out, lse, ctx.scale)
        return None, None, dq + dq_later, dk, *dks, dv, *dvs

compiled_flex_attention = cache(lambda: torch.compile(flex_attention, dynamic=False))

def causal_block_flex(q, k, v, docs, scale):
    """o_0 (B, T, H, D), lse_0 (B, T, H) by FlexAttention; on CUDA its autograd takes lse's gradient."""
    D = q.shape[-1]
    # Compiled kernels take head dims that are powers of two; zeros change no score.
    width = max(16, 1 << (D - 1).bit_length())
    heads_first = [F.pad(x, (0, width - D)).transpose(1, 2) for x in (q, k, v)]  # (B, H, T, width)
    attention = compiled_flex_attention() if q.is_cuda else flex_attention
    out, aux = attention(*heads_first, block_mask=docs.block_mask, scale=scale, enable_gqa=True,
                         return_aux=AuxRequest(lse=True))
    out = out[..., :D].transpose(1, 2)  # (B, T, H, D)
    lse = aux.lse.transpose(1, 2)       # (B, T, H)
    return out.contiguous(), lse.contiguous()

def attend_sdpa(q, k, v, past_k, past_v, docs, group=None):
    """The drawing as it stands: the keys of all steps, the mask, one call. Memory grows with T * T."""
    past_k = past_k + [k]
    past_v = past_v + [v]
    B, T = q.shape[:2]
    own_row = torch.eye(T, dtype=torch.bool, device=q.device).expand(B, T, T)
    mask = torch.cat([docs.causal] + [own_row] * (len(past_k) - 1), dim=-1)   # (B, T, steps * T)

    # (B, T, H, D) -> (B, H, T, D) and back
    heads_first = [x.transpose(1, 2) for x in (q, torch.cat(past_k, 1), torch.cat(past_v, 1))]
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=mask[:, None], enable_gqa=True)
    return out.transpose(1, 2), past_k, past_v  # (B, T, H, D)

def attend_fa(q, k, v, past_k, past_v, docs, group=None):
    """Block 0 by a flash kernel with its lse, later steps merged in. Memory grows with T."""
    reason = why_not_fa(q.device.type, q.dtype)
    require(not reason, f"backend fa cannot run: {reason}. Use --backend sdpa.")
    past_k = past_k + [k]
    past_v = past_v + [v]
    scale = q.shape[-1] ** -0.5
    if q.device.type == "cpu":
        return AttendCPU.apply(docs, scale, q, *past_k, *past_v), past_k, past_v

    out, lse = causal_block_flex(q, past_k[0], past_v[0], docs, scale)
    if len(past_k) > 1:
        out, _ = merge(out, lse, q, past_k[1:], past_v[1:], scale)
    return out, past_k, past_v

def attend_usp(q, k, v, past_k, past_v, docs, group=None):
    """attend_fa between two exchanges (Ulysses): outside, rows are split over ranks, inside heads are.
    L is a rank's rows, docs are of all P L. Where P does not divide G, key/value heads are repeated."""
    P = dist.get_world_size(group)
    H, G = q.shape[2], k.shape[2]
    require(H % P == 0, f"backend usp: {P} ranks do not divide {H} query heads; "
                        f"use {math.gcd(H, P)} ranks")
    copies = P // math.gcd(G, P)
    k = k.repeat_interleave(copies, dim=2)       # (B, L, copies G, D); autograd sums their gradients
    v = v.repeat_interleave(copies, dim=2)

    q = to_heads(q, group)                       # (B, L, H, D) -> (B, P L, H / P, D)
    k = to_heads(k, group)                       # (B, L, copies G, D) -> (B, P L, copies G / P, D)
    v = to_heads(v, group)
    out, past_k, past_v = attend_fa(q, k, v, past_k, past_v, docs)
    return to_tokens(out, group), past_k, past_v  # (B, P L, H / P, D) -> (B, L, H, D)

BACKENDS = {"sdpa": attend_sdpa, "fa": attend_fa, "usp": attend_usp}

# ---- Mixture of experts --------------------------------------------------------------------------

class Routing(NamedTuple):
    chosen: torch.Tensor  # (.., A) int64, the experts of each row
    scores: torch.Tensor  # (.., E) of a softmax router, for a loss that balances it; else (.., 0)

class Router(nn.Module):
    """Scores experts, in fp32 in a bf16 model too. A sigmoid router has a bias, which only chooses;
    balance_experts moves it. A softmax router has none; balancing_loss acts on its scores."""
    def __init__(self, config):
        super().__init__()
        self.config = config
        E, C = config.n_routed_experts, config.hidden_size
        dtype = fp32(torch.get_default_dtype())
        self.weight = nn.Parameter(torch.empty(E, C, dtype=dtype))
        if config.scoring_func == "sigmoid":
            self.register_buffer("e_score_correction_bias", torch.zeros(E, dtype=dtype))
        else:  # each expert's share of the rows in the last training step; not of the draft's file
            self.register_buffer("expert_share", torch.zeros(E, dtype=dtype), persistent=False)

    def _apply(self, fn, recurse=True):
        """What .to() and .bfloat16() call: they may move these tensors, not round them."""
        def keep_fp32(tensor):
            moved = fn(tensor)
            return moved if moved.dtype == fp32(moved.dtype) else tensor.to(moved.device)
        return super()._apply(keep_fp32, recurse)

    def forward(self, x):
        """x (N, C) -> weights (N, A) at least fp32, Routing."""
        cfg = self.config
        logits = F.linear(x.to(self.weight.dtype), self.weight)            # (N, E)
        if cfg.scoring_func == "softmax":
            scores = balanced = logits.softmax(-1)
            choice = scores.detach()
        else:
            scores = logits.sigmoid()
            balanced = scores.new_empty(len(x), 0)
            choice = scores.detach() + self.e_score_correction_bias
        if cfg.n_group > 1:
            choice = best_groups_only(choice, cfg)
        chosen = choice.topk(cfg.num_experts_per_tok, dim=-1).indices      # (N, A)

        # The bias has a say in the choice, not in the weights.
        weights = scores.gather(1, chosen)
        if cfg.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * cfg.routed_scaling_factor, Routing(chosen, balanced)

def experts_ref(x, chosen, weights, gate_up_proj, down_proj):
    """y[n] = sum_a weights[n, a] * down[e] (silu(gate[e] x[n]) * up[e] x[n]), e = chosen[n, a], one
    expert after another. x (N, C); chosen, weights (N, A); gate_up_proj (E, 2F, C), gate rows first;
    down_proj (E, C, F)."""
    y = torch.zeros_like(x, dtype=weights.dtype)
    for e in range(len(gate_up_proj)):
        row, slot = (chosen == e).nonzero(as_tuple=True)
        gate, up = F.linear(x[row], gate_up_proj[e]).chunk(2, dim=-1)
        out = F.linear(F.silu(gate) * up, down_proj[e])
        y = y.index_add(0, row, out.to(y.dtype) * weights[row, slot, None])
    return y.to(x.dtype)

def experts_grouped(x, chosen, weights, gate_up_proj, down_proj):
    """experts_ref by two grouped matmuls over the N * A pairs (row, slot) in stable order of their
    expert. No index occurs twice, so no backward adds in an order that varies; no host sync."""
    N, A = chosen.shape
    expert, order = chosen.flatten().sort(stable=True)
    numbers = torch.arange(len(gate_up_proj), device=expert.device)
    ends = torch.searchsorted(expert, numbers, right=True, out_int32=True)  # (E,) where its pairs end

    pairs = x[:, None].expand(N, A, -1).flatten(0, 1)[order]                # (N * A, C)
    gate_up = F.grouped_mm(pairs, gate_up_proj.mT, offs=ends)               # (N * A, 2F)
    gate, up = gate_up.chunk(2, dim=-1)
    act = F.silu(gate) * up * weights.flatten()[order, None].to(x.dtype)
    out = F.grouped_mm(act, down_proj.mT, offs=ends)                        # (N * A, C)

    out = out[order.argsort()].view(N, A, -1)                               # (N, A, C)
    return out.to(weights.dtype).sum(1).to(x.dtype)

def experts(x, chosen, weights, gate_up_proj, down_proj):
    """experts_ref by the fastest way there is for x."""
    if kernels_take(x, x.shape[-1], down_proj.shape[-1]):
        y, *_ = torch.ops.mtp_kernels.experts_forward(x, chosen, weights, gate_up_proj, down_proj)
        return y
    # F.grouped_mm wants rows of 16 bytes, has no float64 and, under torch.compile, bf16 alone.
    aligned = all(width * x.element_size() % 16 == 0 for width in down_proj.shape[1:])
    traced = torch.compiler.is_compiling() and x.dtype != torch.bfloat16
    if aligned and not traced and x.dtype != torch.float64:
        return experts_grouped(x, chosen, weights, gate_up_proj, down_proj)
    return experts_ref(x, chosen, weights, gate_up_proj, down_proj)

class MLP(nn.Module):
    """silu(gate) * up -> down: a shared expert, or what a dense layer has instead of experts."""
    def __init__(self, hidden_size, width):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

class MoE(nn.Module):
    """Routed experts, weights fused, and the shared expert, times 1 or a gate's sigmoid."""
    def __init__(self, config):
        super().__init__()
        E, C = config.n_routed_experts, config.hidden_size
        width = config.moe_intermediate_size
        self.gate = Router(config)
        self.experts = nn.ParameterDict([  # the keys of a dict would be sorted
            ("gate_up_proj", torch.empty(E, 2 * width, C)), ("down_proj", torch.empty(E, C, width))])
        self.shared_experts = self.shared_expert_gate = None
        if config.shared_expert_intermediate_size:
            self.shared_experts = MLP(C, config.shared_expert_intermediate_size)
            self.shared_expert_gate = nn.Linear(C, 1, bias=False)
        elif config.n_shared_experts:
            self.shared_experts = MLP(C, config.n_shared_experts * width)

    def forward(self, x):
        """x (B, T, C) -> y (B, T, C), Routing (B, T, ..)."""
        B, T, C = x.shape
        with torch.autocast(x.device.type, enabled=False):  # router in fp32, experts in their dtype
            rows = x.flatten(0, 1).to(self.experts["down_proj"].dtype)  # (N, C)
            weights, routing = self.gate(rows)
            y = experts(rows, routing.chosen, weights, *self.experts.values())
        y = y.view(B, T, C)                    # (B, T, C)
        if self.shared_expert_gate is not None:
            y = y + self.shared_expert_gate(x).sigmoid() * self.shared_experts(x)
        elif self.shared_experts is not None:
            y = y + self.shared_experts(x)
        return y, Routing(*(x.unflatten(0, (B, T)) for x in routing))  # (B, T, A), (B, T, E)

# ---- The draft -----------------------------------------------------------------------------------

class DecoderLayer(nn.Module):
    """Pre-norm decoder layer: attention, then experts or a dense MLP."""
    def __init__(self, config):
        super().__init__()
        self.config = config
        C = config.hidden_size
        self.input_layernorm = RMSNorm(C, config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(C, config)
        self.mlp = MoE(config) if config.n_routed_experts else MLP(C, config.intermediate_size)

    def forward(self, z, position_ids, past_k, past_v, docs, attend=attend_sdpa, group=None):
        """z (B, T, C) -> r (B, T, C), past_k, past_v, Routing (B, T, ..). No final norm."""
        x = self.input_layernorm(z)
        out, past_k, past_v = self.self_attn(x, position_ids, past_k, past_v, docs, attend, group)
        u = z + out
        x = self.post_attention_layernorm(u)
        if self.config.n_routed_experts:
            y, routing = self.mlp(x)
        else:
            y = self.mlp(x)
            none = x[..., :0]
            routing = Routing(none.long(), none)
        return u + y, past_k, past_v, routing

class MTP(DecoderLayer):
    """The draft: fusion of token embedding and hidden state, one decoder layer, final norm. Embedding
    and lm_head are the target's: `set_target` keeps references outside parameters() and state_dict()."""
    embed_weight = lm_head_weight = None

    def __init__(self, config):
        super().__init__(config)
        C = config.hidden_size
        self.enorm = RMSNorm(C, config)
        self.hnorm = RMSNorm(C, config)
        self.eh_proj = nn.Linear(2 * C, C, bias=False)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(C, config)})
        init_weights(self, config.initializer_range)

    def set_target(self, embed_weight, lm_head_weight):
        """The target's embedding and lm_head, (V, C), any float dtype, on this device. Neither copied nor
        changed; the draft gives them no gradient."""
        shape = (self.config.vocab_size, self.config.hidden_size)
        device = self.eh_proj.weight.device
        for name, tensor in {"embed_weight": embed_weight, "lm_head_weight": lm_head_weight}.items():
            require(tensor.shape == shape,
                    f"{name} is {tuple(tensor.shape)}, expected (V, C) = {shape}")
            require(tensor.device == device,
                    f"{name} is on {tensor.device}, the draft on {device}: move one")
            object.__setattr__(self, name, tensor.detach())  # past nn.Module's registry

    def forward(self, tokens, hidden, position_ids, past_k, past_v, docs, attend=attend_sdpa,
                group=None, zero_first=False):
        """One step. tokens, position_ids (B, T), hidden (B, T, C); zero_first: zero the embedding at
        position 0. Returns n = final_norm(r) and r, (B, T, C), past_k and past_v with this step's
        added, Routing (B, T, ..)."""
        e = F.embedding(tokens, self.embed_weight).to(self.eh_proj.weight.dtype)
        if zero_first:
            e = e.masked_fill((position_ids == 0)[..., None], 0)

        # The embedding comes FIRST, then the hidden state.
        z = self.eh_proj(torch.cat([self.enorm(e), self.hnorm(hidden)], dim=-1))
        r, past_k, past_v, routing = super().forward(
            z, position_ids, past_k, past_v, docs, attend, group)
        return self.shared_head["norm"](r), r, past_k, past_v, routing

# ---- The TTT loop --------------------------------------------------------------------------------

def ttt_steps(model, ids, hidden, position_ids, docs, ttt_length, attend, group=None,
              recycle="post", zero_first=False):
    """The TTT loop. Step k embeds x[t + 1 + k], is given what step k - 1 put out and sees the keys of
    all steps so far. ids (B, L + K), hidden (B, L, C), position_ids (B, L). Returns lists of each step's
    n (B, L, C) and Routing (B, L, ..)."""
    L = hidden.shape[1]
    g = hidden
    past_k, past_v = [], []
    ns, routings = [], []
    for k in range(ttt_length):
        tokens = ids[:, k + 1:k + 1 + L]
        n, r, past_k, past_v, routing = model(
            tokens, g, position_ids + k, past_k, past_v, docs, attend, group, zero_first)
        g = recycled(n, r, recycle)
        ns.append(n)
        routings.append(routing)
    return ns, routings

def recycled(n, r, recycle):
    """What feeds the next step: "post" n, "pre" r, before the final norm; a (B, L, 1) bool: n where it
    is True."""
    if recycle == "post":
        return n
    if recycle == "pre":
        return r
    return torch.where(recycle, n, r)

def row_share(length, group=None):
    """(start, stop): which rows of a sequence this rank computes: ceil(length / P) each, so that the
    last ranks' may lie past its end. Without a group: all of them."""
    if group is None:
        return 0, length
    rows = -(-length // dist.get_world_size(group))
    start = dist.get_rank(group) * rows
    return start, start + rows

class Share(NamedTuple):
    """A rank's rows of a batch, and what their chains read beyond them. Padding holds zeros."""
    ids: torch.Tensor           # (B, L + K + 1)
    hidden: torch.Tensor        # (B, L + K, C), the target's
    position_ids: torch.Tensor  # (B, L)
    valid: torch.Tensor         # (K, B, L) bool: the row counts at step k
    embedded: torch.Tensor      # (K, B, L) bool: the token that step k embeds is of the row's document
    count: torch.Tensor         # [K] counted rows, of all ranks
    docs: Documents             # of all P L rows

def share_rows(input_ids, hidden_states, loss_mask, doc_ids, ttt_length, group=None):
    """This rank's Share of a batch, see ttt_loss for the arguments."""
    B, T = input_ids.shape
    K = ttt_length
    start, stop = row_share(T, group)
    padded = T if group is None else (stop - start) * dist.get_world_size(group)
    if padded > T:  # equal shares
        doc_ids = torch.zeros_like(input_ids) if doc_ids is None else doc_ids
        doc_ids = F.pad(doc_ids, (0, padded - T), value=-1)
        loss_mask = None if loss_mask is None else F.pad(loss_mask, (0, padded - T))

    docs = Documents(doc_ids, B, padded, input_ids.device)
    valid = valid_rows(loss_mask, docs, K)
    embedded = torch.stack([docs.has_later(k + 1) for k in range(K)])

    # What the rows' chains read lies up to K + 1 rows past them, on other ranks: a halo.
    padding = window(docs.document, start, stop + K + 1) == 0  # (B, L + K + 1)
    ids = window(input_ids, start, stop + K + 1).masked_fill(padding, 0)
    hidden = hidden_states.detach()
    if group is None:
        hidden = window(hidden, 0, T + K)
    hidden = hidden.masked_fill(padding[:, :-1, None], 0)
    return Share(ids=ids, hidden=hidden, position_ids=docs.position_ids[:, start:stop],
                 valid=valid[:, :, start:stop], embedded=embedded[:, :, start:stop],
                 count=valid.sum((1, 2)), docs=docs)

def valid_rows(loss_mask, docs, ttt_length):
    """(K, B, T) bool: row t counts at step k if token t + 2 + k exists in row t's document, unmasked."""
    T = docs.document.shape[1]
    if loss_mask is None:
        loss_mask = torch.ones_like(docs.document)
    rows = []
    for k in range(ttt_length):
        unmasked = window(loss_mask, k + 2, k + 2 + T) != 0
        rows.append(docs.has_later(k + 2) & unmasked)
    return torch.stack(rows)

def valid_counts(loss_mask, doc_ids, ttt_length, *, batch, length):
    """[K] int64: rows of a batch that count at each step. Summed over micro-batches and data-parallel
    ranks and passed as ttt_loss(counts=...), they keep any split from changing the gradient."""
    given = [x for x in (loss_mask, doc_ids) if x is not None]
    docs = Documents(doc_ids, batch, length, given[0].device if given else "cpu")
    return valid_rows(loss_mask, docs, ttt_length).sum((1, 2))

# ---- The exchange between ranks ------------------------------------------------------------------

class AllToAll(torch.autograd.Function):
    """x[i] goes to rank i of the group, what comes from rank i becomes out[i]; its own backward."""
    bytes_sent = 0  # by this process, to other ranks

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        AllToAll.bytes_sent += x.nbytes // len(x) * (len(x) - 1)
        return out

    @staticmethod
    def backward(ctx, dout):
        return AllToAll.apply(dout.contiguous(), ctx.group), None

def to_heads(x, group):
    """All heads of this rank's rows -> all rows of its heads: (B, L, H, D) -> (B, P L, H / P, D)."""
    B, L, H, D = x.shape
    P = dist.get_world_size(group)
    x = x.view(B, L, P, H // P, D).permute(2, 0, 1, 3, 4)    # (P, B, L, H / P, D): x[i] is for rank i
    x = AllToAll.apply(x.contiguous(), group)                # the same shape: x[i] is rank i's rows
    return x.transpose(0, 1).reshape(B, P * L, H // P, D)    # (B, P L, H / P, D)

def to_tokens(x, group):
    """The way back: (B, P L, H / P, D) -> (B, L, H, D)."""
    B, rows, heads, D = x.shape
    P = dist.get_world_size(group)
    x = x.view(B, P, rows // P, heads, D).transpose(0, 1)    # (P, B, L, H / P, D): x[i] is for rank i
    x = AllToAll.apply(x.contiguous(), group)                # the same shape: x[i] is rank i's heads
    return x.permute(1, 2, 0, 3, 4).reshape(B, rows // P, P * heads, D)  # (B, L, H, D)

# ---- The loss ------------------------------------------------------------------------------------
#
# A term of the loss is a plain function of the teacher's and the draft's logits, both (N, V) fp32, to
# (N,). To add one, write it and name it in LOSS_TERMS: then `--loss ce:1+mine:0.5` knows it, and
# ttt_loss(loss={"ce": 1.0, "mine": 0.5}). The teacher is a constant. ce and kl alone have a closed form
# and a kernel; any other term has the slope of the whole sum computed by autograd. p is the teacher's
# distribution, q the draft's.

def ce(teacher, draft):
    """Cross-entropy against the teacher's argmax."""
    return F.cross_entropy(draft, teacher.argmax(-1), reduction="none")

def kl(teacher, draft):
    """KL(p || q)."""
    log_p = teacher.log_softmax(-1)
    log_q = draft.log_softmax(-1)
    return F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)

def tv(teacher, draft):
    """Total variation, 1 - sum min(p, q): the chance that a drafted token is refused if both sample."""
    return 1 - torch.minimum(teacher.softmax(-1), draft.softmax(-1)).sum(-1)

def lk(teacher, draft):
    """From KL, while few drafts are accepted, to TV: arXiv 2602.23881."""
    refused = tv(teacher, draft)
    return torch.lerp(refused, kl(teacher, draft), torch.exp(-3 * (1 - refused.detach())))

LOSS_TERMS = {"ce": ce, "kl": kl, "tv": tv, "lk": lk}

def parse_loss(text):
    """{term: weight} of a sum of LOSS_TERMS like "ce:1+kl:0.5"; a weight left out is 1."""
    terms = {}
    for part in text.split("+"):
        name, _, weight = part.strip().partition(":")
        weight = weight or "1"
        known = name in LOSS_TERMS and name not in terms
        require(known and weight.replace(".", "", 1).isdecimal() and float(weight) > 0,
                f"loss {text!r} is no sum like ce:1+kl:0.5, weights positive, of "
                f"{', '.join(LOSS_TERMS)}")
        terms[name] = float(weight)
    return terms

# How draft logits (N, V) are judged by the teacher's: judge_ce_kl for sums of ce and kl, judge_terms for
# all others. Each returns figures (4, N) fp32 - the weighted sum of the terms, CE, KL, is the draft's
# argmax the teacher's? - and OVERWRITES `draft` with the gradient of that sum in the draft's logits.

def judge_ce_kl_ref(teacher, draft, weights):
    """ce and kl in closed form: slope = (ce_weight + kl_weight) q - ce_weight onehot - kl_weight p."""
    ce_weight = weights.get("ce", 0.0)
    kl_weight = weights.get("kl", 0.0)
    label = teacher.argmax(-1, keepdim=True)
    hit = draft.argmax(-1, keepdim=True) == label
    log_p = teacher.to(fp32(teacher.dtype)).log_softmax(-1)
    log_q = draft.to(log_p.dtype).log_softmax(-1)

    p = log_p.exp()
    CE = -log_q.gather(-1, label)[:, 0]
    KL = (log_p - log_q).mul_(p).sum(-1)

    slope = log_q.exp_().mul_(ce_weight + kl_weight).sub_(p, alpha=kl_weight)
    slope.scatter_add_(-1, label, slope.new_full(label.shape, -ce_weight))
    draft.copy_(slope)
    return torch.stack([ce_weight * CE + kl_weight * KL, CE, KL, hit[:, 0].to(CE.dtype)])

def judge_terms(teacher, draft, weights):
    """Any terms; their slope is autograd's."""
    hit = draft.argmax(-1) == teacher.argmax(-1)
    teacher = teacher.to(fp32(teacher.dtype))
    z = draft.to(teacher.dtype, copy=True).requires_grad_()
    with torch.enable_grad():
        value = sum(weight * LOSS_TERMS[name](teacher, z) for name, weight in weights.items())
        slope, = torch.autograd.grad(value.sum(), z)
    draft.copy_(slope)
    return torch.stack([value.detach(), ce(teacher, z), kl(teacher, z), hit.to(z.dtype)])

def judge_ce_kl(teacher, draft, weights):
    """judge_ce_kl_ref by the compiled kernel."""
    if not kernels_take(draft):
        return by_blocks(judge_ce_kl_ref, teacher, draft, weights)
    ce_weight = weights.get("ce", 0.0)
    kl_weight = weights.get("kl", 0.0)
    ones = torch.ones(len(draft), dtype=fp32(draft.dtype), device=draft.device)
    CE, KL, label, best = torch.ops.mtp_kernels.loss_rows(teacher, draft, ones, ce_weight, kl_weight)
    return torch.stack([ce_weight * CE + kl_weight * KL, CE, KL, (label == best).to(CE.dtype)])

# Elements of EACH of the two buffers of logits, (N, V), and of the blocks of them that are judged at a
# time: few enough for a CPU's caches.
LOGITS_HELD = {"cpu": 2 ** 25, "cuda": 2 ** 27}
BLOCK = {"cpu": 2 ** 19, "cuda": 2 ** 27}

def by_blocks(judge, teacher, draft, *arguments):
    """judge's figures (.., N), a few rows at a time, so that its temporaries stay small."""
    size = max(1, BLOCK.get(draft.device.type, 2 ** 27) // draft.shape[1])
    blocks = zip(teacher.split(size), draft.split(size))
    return torch.cat([judge(*block, *arguments) for block in blocks], dim=-1)

def logit_chunks(lm_head, hidden, ns, valid):
    """Yield (k, b, rows, teacher, draft): logits (N, V) of every step, for each chunk of draft rows of
    sequence b that holds a counted one. Row t of step k is judged by teacher row t + 1 + k, so the
    chunk's N + K - 1 teacher rows serve all steps. Both are views of buffers that are used again."""
    K, B, L = valid.shape
    V = len(lm_head)
    size = min(max(1, LOGITS_HELD.get(lm_head.device.type, 2 ** 25) // V), L)
    teacher_buffer = lm_head.new_empty(size + K - 1, V)
    draft_buffer = lm_head.new_empty(size, V)

    starts = range(0, L, size)
    counted = torch.stack([valid[:, :, start:start + size].any(2).any(0) for start in starts]).tolist()
    for start, sequences in zip(starts, counted):
        stop = min(start + size, L)
        N = stop - start
        for b in range(B):
            if not sequences[b]:
                continue
            states = hidden[b, start + 1:stop + K].to(lm_head.dtype)  # (N + K - 1, C)
            teacher = torch.mm(states, lm_head.mT, out=teacher_buffer[:len(states)])
            for k, n in enumerate(ns):
                states = n[b, start:stop].to(lm_head.dtype)           # (N, C)
                draft = torch.mm(states, lm_head.mT, out=draft_buffer[:N])
                yield k, b, slice(start, stop), teacher[k:k + N], draft

class ChunkedLoss(torch.autograd.Function):
    """sum_k weight_k * sum over counted rows of the weighted terms, never holding (T, V).

    lm_head is frozen, so d loss / d n is all that backward needs, and it is no larger than n: it is
    formed here, chunk by chunk, while the logits exist, and only that is kept."""
    @staticmethod
    def forward(ctx, lm_head, hidden, valid, weight, terms, *ns):
        """lm_head (V, C); hidden (B, L + K, C), the target's; valid (K, B, L) bool; weight [K] float64;
        terms {name: weight}; ns: K times (B, L, C). Returns the loss and, without gradient, sums over
        counted rows [4, K] float64 (CE, KL, right, prefix hits) and hits (K, B, L) bool."""
        judge = judge_ce_kl if terms.keys() <= {"ce", "kl"} else partial(by_blocks, judge_terms)
        figures = torch.zeros(4, *valid.shape, dtype=fp32(lm_head.dtype), device=valid.device)
        grads = [torch.zeros_like(n) for n in ns]

        for k, b, rows, teacher, draft in logit_chunks(lm_head, hidden, ns, valid):
            figures[:, k, b, rows] = judge(teacher, draft, terms)
            if any(ctx.needs_input_grad):
                slope = draft  # the judge has written it there
                dn = (slope @ lm_head).to(grads[k].dtype) * weight[k]  # (N, C)
                grads[k][b, rows] = dn.masked_fill_(~valid[k, b, rows, None], 0)
        ctx.save_for_backward(*grads)

        value, CE, KL, hit = figures.double()
        sums = torch.stack([CE, KL, hit, hit.cumprod(0)]).where(valid, 0).sum((2, 3))
        loss = (weight * value.where(valid, 0).sum((1, 2))).sum()
        hits = (hit > 0) & valid
        ctx.mark_non_differentiable(sums, hits)
        return loss.to(fp32(ns[0].dtype)), sums, hits

    @staticmethod
    def backward(ctx, dloss, *_):
        grads = [dloss.to(grad.dtype) * grad for grad in ctx.saved_tensors]
        return None, None, None, None, None, *grads

class TTTOutput(NamedTuple):
    """ttt_loss's result. All but loss and scores are global over `group` and have no gradient; [K]
    unless said."""
    loss: torch.Tensor         # scalar: sum_k w_k (weighted terms of step k); usp: this rank's share
    ce: torch.Tensor           # mean cross-entropy against the teacher's argmax; 0 if no row counts
    kl: torch.Tensor           # mean KL(teacher || draft)
    acc: torch.Tensor          # share of counted rows whose argmax is the teacher's
    count: torch.Tensor        # counted rows
    prefix_hits: torch.Tensor  # counted rows right in steps 0..k; accept_len = 1 + sum of these / count
    expert_load: torch.Tensor  # [E] rows sent to each expert; none that embeds padding or a foreign token
    hits: torch.Tensor         # (K, B, T) bool: the row counts and its argmax is the teacher's
    sums: torch.Tensor         # [5, K] float64: CE, KL, right, prefix hits, counted; not divided
    scores: torch.Tensor       # [E] a softmax router's, summed over counted rows; usp: this rank's share

def ttt_loss(model, input_ids, hidden_states, loss_mask=None, doc_ids=None, *, ttt_length=3,
             backend="sdpa", group=None, loss="ce:1+kl:1", decay=0.8, recycle="post",
             zero_first_embedding=False, counts=None, recompute=False):
    """Loss of K = ttt_length draft steps from every row, as served: a TTTOutput. Bad input: ValueError.

    input_ids      (B, T)
    hidden_states  (B, T, C), the target's after its final norm
    loss_mask      (B, T) of the PREDICTED token, nonzero counts; default: all count
    doc_ids        (B, T), see Documents; padding is never read
    backend        of the attention. With "usp" every rank of `group` passes ids, mask and doc_ids of all
                   rows and, of hidden_states, rows start .. stop + K of its row_share, zeros past T; its
                   loss is a local sum over the global count: gradients SUMMED over ranks are right
    loss           sum of LOSS_TERMS: "ce:1+kl:1" or {"ce": 1.0, "kl": 1.0}
    decay          step k weighs w_k = decay ** k / sum_j decay ** j
    recycle        what feeds a next step: "post" (n), "pre" (r), "both": each row draws one, from torch's
                   CPU generator, which must be in one state on all ranks of `group`
    zero_first_embedding   zero the embedding at position 0, as vLLM does
    counts         [K], divide the sums; default: this call's valid_counts
    recompute      compute a step's activations again in backward: a step keeps g, k and v alone"""
    if backend == "usp" and group is None and dist.is_initialized():
        group = dist.group.WORLD
    check_batch(model, input_ids, hidden_states, loss_mask, doc_ids, ttt_length, backend, group, recycle)
    terms = parse_loss(loss) if isinstance(loss, str) else loss
    require(terms.keys() <= LOSS_TERMS.keys(),
            f"loss has terms {', '.join(terms)}; known are {', '.join(LOSS_TERMS)}")
    B, T = input_ids.shape
    start, stop = row_share(T, group)
    share = share_rows(input_ids, hidden_states, loss_mask, doc_ids, ttt_length, group)
    if recycle == "both":
        recycle = window(torch.rand(B, T, 1) < 0.5, start, stop).to(input_ids.device)

    g = share.hidden[:, :stop - start].to(model.eh_proj.weight.dtype)
    step = model
    if recompute:
        step = partial(checkpoint, model, use_reentrant=False, preserve_rng_state=False)
    ns, routings = ttt_steps(step, share.ids, g, share.position_ids, share.docs, ttt_length,
                           BACKENDS[backend], group, recycle, zero_first_embedding)

    # Step k weighs w_k; its terms are means over the counted rows of all micro-batches and ranks.
    weight = decay ** torch.arange(ttt_length, dtype=torch.float64, device=input_ids.device)
    divisor = share.count if counts is None else counts.to(share.count.device)
    require(len(divisor) == ttt_length,
            f"counts has {len(divisor)} numbers, expected valid_counts' {ttt_length}")
    weight = weight / weight.sum() / divisor.clamp(min=1)
    value, sums, hits = ChunkedLoss.apply(
        model.lm_head_weight, share.hidden, share.valid, weight, terms, *ns)

    load = expert_load(routings, share.embedded, model.config.n_routed_experts)

    # For balancing_loss, of the rows that count; empty unless the router is a softmax.
    scores = sum(torch.where(valid[..., None], routing.scores, 0).sum((0, 1))
                 for routing, valid in zip(routings, share.valid))
    if group is not None:
        hits = gather_rows(hits, T, group)
        dist.all_reduce(sums, group=group)
        dist.all_reduce(load, group=group)
    CE, KL, right, _ = sums / share.count.clamp(min=1)
    prefix_hits = sums[3].round().long()
    return TTTOutput(value, CE, KL, right, share.count, prefix_hits, load, hits,
                     torch.cat([sums, share.count[None]]), scores)

def expert_load(routings, embedded, n_routed_experts):
    """[E] int64: rows sent to each expert. routings: K times (B, L, ..); embedded (K, B, L): which count."""
    load = torch.zeros(n_routed_experts, dtype=torch.long, device=embedded.device)
    for (chosen, _), counts in zip(routings, embedded):
        counts = counts[..., None].expand(chosen.shape)  # (B, L, A)
        load.scatter_add_(0, chosen.flatten(), counts.flatten().long())
    return load

def gather_rows(hits, length, group):
    """(K, B, L) bool of each rank's rows -> (K, B, T) of all of them."""
    ranks = range(dist.get_world_size(group))
    parts = [torch.empty_like(hits, dtype=torch.uint8) for _ in ranks]
    dist.all_gather(parts, hits.to(torch.uint8), group=group)
    return torch.cat(parts, dim=-1)[..., :length].bool()

def check_batch(model, input_ids, hidden_states, loss_mask, doc_ids, ttt_length, backend, group,
                recycle):
    """Refuse what ttt_loss cannot take."""
    require(model.lm_head_weight is not None, "the draft has no target: call model.set_target first")
    require(ttt_length > 0, f"ttt_length {ttt_length} must be at least 1")
    require(backend in BACKENDS, f"backend {backend!r} is not one of {', '.join(BACKENDS)}")
    require(recycle in ("post", "pre", "both"), f"recycle {recycle!r} is not one of post, pre, both")
    require(backend != "usp" or dist.is_initialized(),
            "backend usp needs torch.distributed: use torchrun")
    require(group is None or backend == "usp",
            f"backend {backend!r} takes no process group, only usp does")

    require(input_ids.dim() == 2, f"input_ids has shape {tuple(input_ids.shape)}, expected (B, T)")
    B, T = input_ids.shape
    for name, x in {"loss_mask": loss_mask, "doc_ids": doc_ids}.items():
        require(x is None or x.shape == (B, T),
                f"{name} must have the shape of input_ids, {(B, T)}")
    start, stop = row_share(T, group)
    rows = T if group is None else stop - start + ttt_length
    shape, expected = tuple(hidden_states.shape), (B, rows, model.config.hidden_size)
    require(shape == expected,
            f"hidden_states has shape {shape}, expected (B, rows, C) = {expected}")

# ---- What some families need: experts in groups, RoPE of longer contexts -------------------------

def best_groups_only(choice, config):
    """Shut the experts outside the best topk_group groups; a group's score: its two best, added."""
    groups = choice.view(len(choice), config.n_group, -1)  # (N, groups, E / groups)
    scores = groups.topk(2, dim=-1).values.sum(-1)         # (N, groups)
    best = scores.topk(config.topk_group, dim=-1).indices
    shut = torch.ones_like(scores, dtype=torch.bool).scatter_(1, best, False)
    return groups.masked_fill(shut[..., None], -torch.inf).flatten(1)  # (N, E)

def rope_frequencies(config, half, dtype, device):
    """(half,) by how much dim i turns per position, together with dim i + half, and a factor of cos
    and sin. rope_scaling stretches a context of original_max_position_embeddings by `factor`: slow
    dims turn slower, fast ones as ever, others in between (Llama 3.1; YaRN, arXiv 2309.00071)."""
    dims = torch.arange(half, dtype=dtype, device=device)
    frequency = 1.0 / config.rope_theta ** (dims / half)
    scaling = config.rope_scaling
    if not scaling:
        return frequency, 1.0

    length = scaling["original_max_position_embeddings"]
    slower = 1.0 / scaling["factor"]
    if scaling["rope_type"] == "llama3":
        turns = length * frequency / (2 * math.pi)  # of each dim over the original context
        low = scaling["low_freq_factor"]
        kept = (turns - low) / (scaling["high_freq_factor"] - low)
        return frequency * (slower + (1 - slower) * kept.clamp(0, 1)), 1.0

    def dim_of(turns):  # the dim, a fraction, that turns so often over the original context
        return half * math.log(length / (turns * 2 * math.pi)) / math.log(config.rope_theta)

    first = max(math.floor(dim_of(scaling.get("beta_fast", 32))), 0)
    last = min(math.ceil(dim_of(scaling.get("beta_slow", 1))), 2 * half - 1)
    slowed = (dims - first) / max(last - first, 0.001)
    factor = 0.1 * math.log(scaling["factor"]) + 1.0
    return frequency * (1 + (slower - 1) * slowed.clamp(0, 1)), factor

# ---- What a trainer needs besides ----------------------------------------------------------------

def spans(docs):
    """[(b, start, stop)] of every document of a Documents. Reads the tensors: for a CPU."""
    found = []
    for b, row in enumerate(docs.document.cpu()):
        numbers, lengths = row.unique_consecutive(return_counts=True)
        stop = 0
        for number, length in zip(numbers.tolist(), lengths.tolist()):
            start, stop = stop, stop + length
            if number > 0:
                found.append((b, start, stop))
    return found

@torch.no_grad()
def init_weights(module, std, generator=None):
    """From scratch: norms multiply by 1, matrices normal(0, std), biases 0."""
    one = 0.0 if module.config.zero_centered_norm else 1.0
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.dim() > 1:
            tensor.normal_(0.0, std, generator=generator)
        else:
            tensor.fill_(one if name.endswith("norm.weight") else 0.0)

@torch.no_grad()
def balance_experts(bias, load, rate):
    """Balancing without a loss, in place: bias += rate * sign(mean load - load), re-centred to mean zero."""
    load = load.to(bias.dtype)
    bias += rate * (load.mean() - load).sign()
    bias -= bias.mean()

def why_not_fa(device_type, dtype):
    """None where attend_fa runs, else the reason."""
    if device_type == "cpu":
        op = "_scaled_dot_product_flash_attention_for_cpu_backward"
        return None if hasattr(torch.ops.aten, op) else f"torch {torch.__version__} has no aten::{op}"
    if device_type != "cuda":
        return f"neither a CPU nor a CUDA device but {device_type}"
    return "FlexAttention has no float64 kernels" if dtype == torch.float64 else FLEX_MISSING

# ---- Everything above needs only torch and may be copied as is. Below: data, distributed, training. ----

import argparse
import copy
import gzip
import hashlib
import http.client
import inspect
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
import urllib.error
import urllib.request
import warnings
from bisect import bisect_left, insort
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import MISSING, asdict, astuple, field, fields, replace
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
try:
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file
    from tqdm import tqdm

    import convert  # beside this file
    LOST = None
    release = version("transformers")
    if tuple(map(int, release.split(".")[:2])) < (5, 12):
        LOST = f"transformers {release} is installed, 5.12 or newer is needed: pip install -U transformers"
except ImportError as error:
    LOST = f"{error}; pip install transformers safetensors, and keep convert.py beside mtp.py"

# ---- Targets and data ----------------------------------------------------------------------------

class Sample(NamedTuple):
    """A document, or a piece of one, to train on."""
    name: str                # file, and line where it has lines: what an error names; set by cut
    input_ids: torch.Tensor  # (L,) int64
    loss_mask: torch.Tensor  # (L,) bool: tokens to learn
    file: object = None      # where its hidden states are stored, from row `start` on
    start: int = 0
    document: str = ""       # what is held out whole

ENGINE_ONLY = "A target that only an engine runs: --hidden-states with states that it stored"

class Target:
    """A frozen Hugging Face causal LM: gives hidden states, embedding and lm_head; verifies drafts.
    stored: hidden states come from files, see open_stored; its layers are not loaded."""
    def __init__(self, cfg, path, device, stored=False):
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
        logging.disable_progress_bar()
        logging.set_verbosity_error()  # it lists an MTP layer as unexpected; missing weights: below

        self.path = convert.find_target(path, cfg.trust_remote_code)
        self.device = device
        self.stored = stored
        self.checkpoint = convert.Checkpoint(self.path)
        self.config = self.checkpoint.config
        self.identity = convert.identity(self.checkpoint)
        self.another = cfg.other_target  # may drafts and states be of another target?

        names = self.checkpoint.files
        sizes = {name: getattr(cfg, name, None) for name in convert.SIZES}  # only training has them
        self.draft_config = MTPConfig(**convert.draft_config(self.config, names, sizes))
        self.layout = convert.serving_layout(self.config, names)

        options = dict(trust_remote_code=cfg.trust_remote_code, local_files_only=True)
        self.tokenizer = self.attempt(AutoTokenizer.from_pretrained, self.path, **options)
        if stored:  # without layers no quantisation matters
            options["config"] = config = self.attempt(AutoConfig.from_pretrained, self.path, **options)
            vars(config).pop("quantization_config", None)
            config.get_text_config().num_hidden_layers = 0
        self.model, loading = self.attempt(
            AutoModelForCausalLM.from_pretrained, self.path, dtype=cfg.dtype,
            device_map=cfg.target_device_map, use_safetensors=True, ignore_mismatched_sizes=True,
            output_loading_info=True, **options)
        missing = sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]]))[:5]
        require(not missing, f"{self.path} lacks weights of the target, or they have other sizes than "
                f"its config.json says: {', '.join(missing)}. {ENGINE_ONLY}")

        self.model.eval().requires_grad_(False)
        if self.config.get("quantization_config") and not stored:
            # A first call: hooks of compressed-tensors decompress in it, and base_model has none.
            ids = torch.zeros(1, 1, dtype=torch.long, device=self.model.device)
            self.attempt(self.model, ids)
        if cfg.target_device_map is None:
            self.model.to(device)
        ends = self.model.generation_config.eos_token_id  # one, several or None
        self.ends = ends if isinstance(ends, list) else [ends]
        self.embed = self.model.get_input_embeddings().weight.detach().to(device)     # (V, C)
        self.lm_head = self.model.get_output_embeddings().weight.detach().to(device)  # (V, C)
        for name, weight in {"embedding": self.embed, "lm_head": self.lm_head}.items():
            usable = weight.is_floating_point() and weight.isfinite().all()
            require(usable, f"the {name} of {self.path}, {weight.dtype}, is no matrix of finite floats")

        self.cache_name = "past_key_values"
        if "cache" in inspect.signature(self.model.base_model.forward).parameters:
            self.cache_name = "cache"  # since transformers 5.2x

    def attempt(self, function, *inputs, **options):
        """What transformers' function gives; its errors, of many kinds, become a ValueError."""
        try:
            return function(*inputs, **options)
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"transformers cannot run {self.path}: {reason}. {ENGINE_ONLY}") from None

    def check_same(self, identity, what):
        """Refuse what was made for another target, unless that is meant."""
        if not self.another:
            convert.require_same_target(self.identity, identity, what)

    @torch.no_grad()
    def states(self, samples, spans=None, budget=16384):
        """[(stop - start, C)]: last hidden states, after the final norm, of rows start..stop of each
        sample; without `spans`, of all rows. A forward pass takes at most `budget` tokens."""
        if spans is None:
            spans = [(0, len(sample.input_ids)) for sample in samples]

        states = [None] * len(samples)
        stops = {}  # of the samples to compute; what comes after a stop changes nothing before it
        for i, (sample, (start, stop)) in enumerate(zip(samples, spans)):
            if sample.file:
                states[i] = self.read_states(sample, start, stop)
            else:
                stops[i] = stop

        for batch in batches_by_length(stops, budget):
            ids = [samples[i].input_ids[:stops[i]] for i in batch]
            ids = nn.utils.rnn.pad_sequence(ids, batch_first=True)  # (B, longest)
            hidden = self.model.base_model(ids.to(self.model.device), use_cache=False)
            for i, rows in zip(batch, hidden.last_hidden_state.to(self.device)):
                start, stop = spans[i]
                states[i] = rows[start:stop]
        return states

    def read_states(self, sample, start, stop):
        """Rows start..stop of a sample's stored states, normed if they are from before the norm."""
        rows = slice(sample.start + start, sample.start + stop)
        with safe_open(sample.file, "pt") as file:
            stage = (file.metadata() or {}).get("stage", "pre_norm")
            stored = file.get_slice("hidden_states")
            shape = stored.get_shape()
            if len(shape) == 2:
                states = stored[rows]                # of (T, C)
            else:
                states = stored[rows, shape[1] - 1]  # of (T, layers, C), the last layer's

        states = states.to(self.model.device)
        if stage != "post_norm":
            states = self.model.base_model.norm(states)
        return states.to(self.device)

def batches_by_length(lengths, budget):
    """Yield the keys of {key: length} in batches of similar length, the longest first. A batch is a
    single key, or at most `budget` tokens once padded."""
    order = sorted(lengths, key=lengths.get)
    while order:
        size = max(1, budget // lengths[order[-1]])
        yield order[-size:]
        del order[-size:]

def open_target(cfg, ranks, stored=False):
    """The target of --target, else the demo's, which rank 0 builds in the first run."""
    choose_kernels(cfg.kernels, ranks.device)
    path = cfg.target
    if path is None:
        path = demo_path()
        if ranks.rank == 0 and not path.exists():
            build_demo_target(path)
        barrier(ranks)  # the others wait
    return Target(cfg, path, ranks.device, stored=stored)

# The demo: a small GLM-4.x, and as data Python's standard library, text that every machine has.

DEMO = dict(vocab_size=4096, hidden_size=256, num_hidden_layers=3, num_attention_heads=8,
            num_key_value_heads=2, head_dim=32, intermediate_size=512, n_routed_experts=8,
            num_experts_per_tok=2, moe_intermediate_size=128, n_shared_experts=1, use_qk_norm=True,
            max_position_embeddings=4096)

def demo_path():
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "mtp", "demo-target-2-python%d.%d" % sys.version_info[:2])

def stdlib_files(every=1):
    """(training, held-out) files: each 20th is held out. Of both, only each `every`-th."""
    root = Path(os.__file__).parent
    skip = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings"}
    files = [path for path in sorted(root.rglob("*.py"))
             if skip.isdisjoint(path.relative_to(root).parts)]
    training = [path for i, path in enumerate(files) if i % 20]
    return training[::every], files[::20][::every]

def build_demo_target(path, steps=800, batch_size=8, length=128):
    """Train the demo's tokenizer and target; save both."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, PreTrainedTokenizerFast
    say("first run: builds the demo target from Python's standard library, about 3 minutes "
        f"-> {path}")

    end = "<|endoftext|>"
    texts = [file.read_text(errors="replace") for file in stdlib_files()[0]]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, DEMO["vocab_size"], special_tokens=[end], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token=end)

    ids = []
    for text_ids in tokenizer(texts)["input_ids"]:
        ids += [*text_ids, tokenizer.eos_token_id]
    ids = torch.tensor(ids[:len(ids) // length * length]).view(-1, length)  # (N, length)

    torch.manual_seed(0)
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**DEMO, eos_token_id=tokenizer.eos_token_id))
    adam = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for step in tqdm(range(steps), desc="demo target"):
        batch = ids[torch.randint(len(ids), (batch_size,))]  # (B, length)
        adam.zero_grad()
        model(batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.param_groups[0]["lr"] = 4e-3 * min((step + 1) / 30, 1.0, 0.02 + 2 * (1 - step / steps))
        adam.step()

    with convert.atomic(path) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)

# From files to documents: a source yields (name, load), and load() returns the document's Sample or
# raises a ValueError that says why it cannot be used.

ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}  # ShareGPT's names

def list_documents(path, target):
    """Yield (name, load) of each document of a file, or of a directory of stored states."""
    if os.path.isdir(path):
        for file in stored_files(path):
            yield str(file), partial(open_stored, file, target)
        return

    require(not target.stored, f"{path} is no directory of stored hidden states (mtp.py capture)")
    for name, row in read_rows(path):
        yield name, partial(read_row, row, target.tokenizer, target.ends)

def stored_files(folder):
    """Files of stored hidden states: those of the folder's last capture, or all if it had none."""
    files = sorted(Path(folder).glob("*.safetensors"))
    manifest = Path(folder, MANIFEST)
    if manifest.exists():
        listed = convert.read_json(manifest).get("files", [])
        others = {file.name for file in files}.difference(listed)
        if others:
            say(f"{folder}: {len(others)} files that its {MANIFEST} does not list are not read, "
                f"such as {min(others)}")
        files = [Path(folder, name) for name in listed]
        lost = [file.name for file in files if not file.exists()]
        require(not lost, f"{folder} lacks {len(lost)} files that its {MANIFEST} lists, such as "
                f"{lost[:1]}: its capture was interrupted, run it again")
    return files

def read_bytes(path):
    """What a file holds, unpacked if it is gzip; a list of dicts if it is parquet."""
    with open(path, "rb") as file:
        content = file.read()
    try:
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
        if content.startswith(b"PAR1"):
            from pyarrow import BufferReader, parquet
            return parquet.read_table(BufferReader(content)).to_pylist()
    except ImportError:
        raise ValueError(f"{path} is parquet: pip install pyarrow, or give .jsonl") from None
    except Exception as error:  # gzip and pyarrow raise many kinds
        raise ValueError(f"{path} is damaged: {error}") from None
    require(b"\0" not in content, f"{path} is no text in UTF-8: give text, JSON or parquet")
    return content.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")

def read_rows(path, by_line=False):
    """[(name, row)] of a file, told by its content: a row is a dict, or a line of JSON, bytes. Text
    is a row {"text": all of it}, or by_line a row {"prompt": line} for each line."""
    rows = read_bytes(path)
    if isinstance(rows, bytes):
        content = re.sub(rb'(?m)^{"answers_to": .*$', b"", rows)  # see generate_data
        rows = content.split(b"\n")  # of bytes: nothing else ends a line
        as_json = ".json" in os.path.basename(path).lower() or re.match(rb'\s*{\s*"', content)
        with suppress(ValueError, RecursionError):
            if content.lstrip().startswith(b"["):
                rows = json.loads(content)
                as_json = True
        if not as_json:
            text = content.decode(errors="surrogateescape")  # not UTF-8: refused in encode_text
            if not by_line:
                return [(str(path), {"text": text})]
            rows = [line.strip() and {"prompt": line} for line in text.split("\n")]
    return [(f"{path}:{number}", row) for number, row in enumerate(rows, 1) if row]

def as_dict(row):
    return json.loads(row) if isinstance(row, bytes) else row

def read_row(row, tokenizer, ends):
    """The Sample of {"text": ..}, {"messages": [{"role": .., "content": ..}]}, ShareGPT's
    {"conversations": [{"from": .., "value": ..}]}, or the token ids that generate-data keeps."""
    row = as_dict(row)
    turns = row.get("messages", row.get("conversations"))
    if row.get("input_ids"):
        ids, mask = row["input_ids"], row["loss_mask"]
    elif turns is not None:
        ids, mask = encode_messages(as_messages(turns), tokenizer, row.get("tools"), ends)
    else:
        require(isinstance(row.get("text"), str), "neither text nor messages")
        return encode_text(row["text"], tokenizer)

    ids = torch.tensor(ids)
    mask = torch.tensor(mask).bool()
    require(ids.dtype == torch.long and ids.shape == mask.shape == (len(ids),),
            "input_ids and loss_mask are not two lists of integers of one length")
    return Sample("", ids, mask)

def encode_text(text, tokenizer):
    text.encode()  # a lone surrogate is an error that says so
    ids = torch.tensor(tokenizer(text)["input_ids"])
    return Sample("", ids, torch.ones_like(ids).bool())

def as_messages(turns):
    """Messages as chat templates expect them: of ShareGPT's turns as well; without nulls; arguments
    of tool calls, which OpenAI writes as JSON text, as dicts."""
    messages = []
    for turn in turns:
        message = {key: value for key, value in turn.items() if value is not None}
        if "from" in message:
            role = message["from"]
            message = {"role": ROLES.get(role, role), "content": message.get("value")}
        for call in message.get("tool_calls", []):
            message.setdefault("content", "")
            function = call.get("function", call)
            if isinstance(function["arguments"], str):
                function["arguments"] = json.loads(function["arguments"] or "{}")
        require(message.get("role") and isinstance(message.get("content"), (str, list)),
                f"message {len(messages)} lacks its role or content")
        messages.append(message)

    require(messages and messages[0]["role"] != "assistant",
            "its messages are none, or begin with the assistant's")
    json.dumps(messages, ensure_ascii=False).encode()  # as in encode_text
    return messages

@cache
def say_once(text):
    say(text)

def encode_messages(messages, tokenizer, tools=None, ends=()):
    """(input_ids, loss_mask) of a chat, lists. Learnt is each turn of the assistant that the chat
    renders as it was asked for and answered (templates may rewrite earlier ones), and the token after
    it if that is one of `ends`, by which the target ends an answer: of GLM, that of the next role."""
    require(tokenizer.chat_template,
            "--data has messages, the target's tokenizer no chat template: use text")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    render = partial(tokenizer.apply_chat_template, tools=tools or None, tokenize=False)
    text = render(messages)
    answers = []  # (start, stop) in characters of the text
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before = render(messages[:i], add_generation_prompt=True)
            after = render(messages[:i + 1])
            if text.startswith(after) and after.startswith(before):
                answers.append((len(before), len(after)))
            else:
                say_once("the chat template rewrites turns once others follow: learnt are only "
                         "those that stay as they were answered")
    require(answers, "no turn of the assistant, or its chat template renders it differently from "
            "how it is asked for")

    out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = []
    before = None
    for token, (start, stop) in zip(out["input_ids"], out["offset_mapping"]):
        inside = any(start < last and stop > first for first, last in answers)
        ends_it = token in ends and before not in ends and mask[-1:] == [True]
        mask.append(inside or ends_it)
        before = token
    return out["input_ids"], mask

def open_stored(path, target):
    """A file of hidden states, which are not held. `capture` writes such files, so does vLLM's
    ExampleHiddenStatesConnector: token_ids, states (T, layers, C) before the final norm."""
    with safe_open(path, "pt") as file:
        meta = file.metadata() or {}
        names = sorted(file.keys())
        known = "token_ids" if "token_ids" in names else "input_ids"
        require(known in names and "hidden_states" in names,
                f"holds {names}, not input_ids and hidden_states")

        ids = file.get_tensor(known).long()
        mask = torch.ones_like(ids)
        if "loss_mask" in names:
            mask = file.get_tensor("loss_mask")
        shape = file.get_slice("hidden_states").get_shape()
        finite = meta.get("finite") == "True" or file.get_tensor("hidden_states").isfinite().all()

    T = len(ids)
    C = target.draft_config.hidden_size
    layers = shape[1:-1]  # [] or [their number]
    require(len(layers) < 2 and shape == [T, *layers, C] and mask.shape == ids.shape,
            f"hidden_states is {shape}, expected ({T}, {C}) of this target")
    stage = meta.get("stage")
    require(layers or stage in ("post_norm", "pre_norm"),
            f"its metadata has stage {stage!r}, neither post_norm nor pre_norm")
    if "target_identity" in meta:
        target.check_same(json.loads(meta["target_identity"]), "it")
    require(finite, "hidden_states holds nan or inf")
    return Sample("", ids, mask.bool(), path,
                  document=meta.get("document", meta.get("sample", "")))

# From documents to packed sequences.

def cut(document, name, seq_len, shortest, vocab_size):
    """[Sample]: pieces of at most seq_len tokens, without those of less than `shortest`."""
    require(len(document.input_ids) >= shortest, f"under {shortest} tokens")
    known = document.document or hash_of(document.input_ids.tolist())
    samples = []
    pieces = zip(document.input_ids.split(seq_len), document.loss_mask.split(seq_len))
    for i, (ids, mask) in enumerate(pieces):
        if len(ids) >= shortest and mask[2:].any():  # the first token to draft is the third
            require(0 <= ids.min() and ids.max() < vocab_size,
                    f"holds a token id outside the target's vocabulary of {vocab_size}")
            samples.append(Sample(name, ids, mask, document.file, i * seq_len, known))
    require(samples, f"no piece of {shortest} to {seq_len} tokens has one to learn")
    return samples

def hash_of(content):
    """Of anything that repr writes out whole."""
    return hashlib.sha256(repr(content).encode()).hexdigest()

def load_each(documents, use, paths):
    """[x, ..] of use(load(), name), lists, of all (name, load). What cannot be used is counted and
    named; ValueError if that is all."""
    found = []
    skipped = []
    for name, load in tqdm(documents, desc="reading", leave=False, delay=2):
        try:
            found += use(load(), name)
        except OSError:
            raise  # a file that is not there
        except Exception as error:  # chat templates and broken files raise many kinds
            reason = error if isinstance(error, ValueError) else repr(error)
            skipped.append(f"{name} ({reason})")

    named = " ".join("; ".join(skipped[:3]).split())
    if skipped:
        say(f"{len(skipped)} documents skipped: {named}")
    require(found, f"no usable document in {', '.join(map(str, paths[:3]))}: {named or 'empty'}")
    return found

def read_samples(paths, target, seq_len, shortest):
    """[Sample] of all paths' documents. Documents that cannot be used are counted and named."""
    documents = (document for path in paths for document in list_documents(path, target))
    use = partial(cut, seq_len=seq_len, shortest=shortest,
                  vocab_size=target.draft_config.vocab_size)
    return load_each(documents, use, paths)

def hold_out(samples):
    """(training, held-out) samples: one document in 20 is held out, whole, wherever and in whatever
    order they lie: those whose tokens have the least hashes."""
    documents = sorted({sample.document for sample in samples})
    require(len(documents) > 1,
            "--data holds a single document, none can be held out; give --eval-data FILE")
    held = set(documents[:math.ceil(len(documents) / 20)])
    training = [sample for sample in samples if sample.document not in held]
    return training, [sample for sample in samples if sample.document in held]

def token_count(sequences):
    return sum(len(sample.input_ids) for sequence in sequences for sample in sequence)

def pack(samples, seq_len):
    """Packed sequences: lists of samples, seq_len tokens at most. Best fit, in the order given."""
    sequences = []
    room = []  # (tokens left, index) of each sequence, sorted
    for sample in samples:
        length = len(sample.input_ids)
        tightest = bisect_left(room, (length,))
        if tightest == len(room):
            room.append((seq_len, len(sequences)))
            sequences.append([])
        left, index = room.pop(tightest)
        sequences[index].append(sample)
        insort(room, (left - length, index))
    return sequences

@lru_cache(maxsize=2)
def shuffled(n, seed, epoch):
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(n, generator=generator).tolist()

def spread(sequences, most):
    """At most `most` of the sequences, evenly apart."""
    return sequences[::math.ceil(len(sequences) / most)]

def read_sequences(cfg, target):
    """(training, held-out) packed sequences, of the user's files or the demo's."""
    paths = cfg.hidden_states or cfg.data
    eval_paths = cfg.eval_data
    if not cfg.target:
        paths, eval_paths = stdlib_files(every=6)

    shortest = cfg.ttt_length + 2
    samples = read_samples(paths, target, cfg.seq_len, shortest)
    if eval_paths:
        held = read_samples(eval_paths, target, cfg.seq_len, shortest)
    else:
        samples, held = hold_out(samples)

    order = shuffled(len(samples), cfg.seed, -1)
    sequences = pack([samples[i] for i in order], cfg.seq_len)
    tokens = token_count(sequences)
    fill_ratio = tokens / len(sequences) / cfg.seq_len
    say(f"data: {tokens:,} tokens of {len(samples):,} samples in {len(sequences):,} sequences of "
        f"{cfg.seq_len} (fill ratio {fill_ratio:.2f}); {len(held):,} samples held out")
    return sequences, spread(pack(held, cfg.seq_len), cfg.eval_size)

def identity_of_data(sequences):
    """sha256 of all tokens, and of which are to be learned, in their order."""
    digest = hashlib.sha256()
    for sample in chain(*sequences):
        digest.update(sample.input_ids.numpy())
        digest.update(sample.loss_mask.numpy())
    return digest.hexdigest()

# From packed sequences to batches.

def places(sequence):
    """Yield (sample, start, stop): the rows that each sample of a packed sequence takes."""
    start = 0
    for sample in sequence:
        stop = start + len(sample.input_ids)
        yield sample, start, stop
        start = stop

def lay_out(sequences, length, device):
    """(input_ids, loss_mask, doc_ids) of packed sequences, (B, length) each. doc_ids number the
    samples of a sequence, -1 is padding; None if each sequence is one sample without padding."""
    input_ids = torch.zeros(len(sequences), length, dtype=torch.long)
    loss_mask = torch.zeros_like(input_ids, dtype=torch.bool)
    doc_ids = torch.full_like(input_ids, -1)
    for b, sequence in enumerate(sequences):
        for number, (sample, start, stop) in enumerate(places(sequence)):
            input_ids[b, start:stop] = sample.input_ids
            loss_mask[b, start:stop] = sample.loss_mask
            doc_ids[b, start:stop] = number

    whole = (doc_ids == 0).all()
    return input_ids.to(device), loss_mask.to(device), None if whole else doc_ids.to(device)

def gather_states(sequences, start, stop, target):
    """hidden_states (B, stop - start, C) of rows start..stop of packed sequences, else zeros."""
    C = target.lm_head.shape[1]
    hidden_states = target.lm_head.new_zeros(len(sequences), stop - start, C)
    samples = []
    spans = []    # the rows of each sample that the window shows
    found = []    # views of hidden_states: where they go
    for rows, sequence in zip(hidden_states, sequences):
        for sample, first, last in places(sequence):
            low = max(start, first)
            high = min(stop, last)
            if low < high:
                samples.append(sample)
                spans.append((low - first, high - first))
                found.append(rows[low - start:high - start])

    for place, states in zip(found, target.states(samples, spans)):
        place.copy_(states)
    return hidden_states

# Data that the target makes itself: stored hidden states, answers to prompts.

MANIFEST = "manifest.json"  # {"files": [names]}: what the last capture into a directory is of
SERVER_WAITS = 1, 2, 4, 8, 16, 32  # seconds after a server's failures

def capture(cfg):
    """Store the target's hidden states of --data, a file per sample, for --hidden-states."""
    require(cfg.target and cfg.data and cfg.out,
            "--target DIR, --data FILE.. and --out DIR are all needed")
    out = Path(cfg.out)
    ours = re.compile(r"\.?(manifest\.json|[0-9a-f]{16}\.safetensors)(\.partial)?")
    foreign = [path.name for path in out.glob("*") if not ours.fullmatch(path.name)]
    require(not foreign, f"--out {out} holds {foreign[:1]}, which no capture wrote: give a new DIR")
    ranks = start_ranks(cfg.device)
    target = open_target(cfg, ranks)
    meta = dict(stage="post_norm", dtype=str(target.lm_head.dtype),
                target_identity=json.dumps(target.identity))

    files = {}  # path: sample
    for sample in read_samples(cfg.data, target, cfg.seq_len, shortest=3):
        # Named after its content: what an earlier capture has written stays.
        content = (sample.input_ids.tolist(), sample.loss_mask.tolist(), sample.document, meta)
        files[out / f"{hash_of(content)[:16]}.safetensors"] = sample
    if ranks.rank == 0:
        with convert.atomic(out / MANIFEST) as aside:
            aside.write_text(json.dumps({"files": [path.name for path in files]}))

    files = list(files.items())[ranks.rank::ranks.dp]
    for i in tqdm(range(0, len(files), 16), disable=ranks.rank > 0):
        batch = files[i:i + 16]  # the same samples, whichever are already written: the same bits
        if all(path.exists() for path, _ in batch):
            continue
        states = target.states([sample for _, sample in batch])
        for (path, sample), hidden_states in zip(batch, states):
            if not path.exists():
                write_states(path, sample, hidden_states.cpu(), meta)
    say(f"hidden states written, a file per sample; train with --target {cfg.target} "
        f"--hidden-states {cfg.out}")

def write_states(path, sample, hidden_states, meta):
    tensors = dict(input_ids=sample.input_ids, loss_mask=sample.loss_mask,
                   hidden_states=hidden_states)
    meta = {**meta, "sample": sample.name, "document": sample.document,
            "finite": str(hidden_states.isfinite().all().item())}
    with convert.atomic(path) as aside:
        save_file(tensors, aside, meta)

def as_prompt(prompt, tokenizer):
    """Messages stay; a text becomes a list of them, or, without a chat template, is to be continued."""
    if not tokenizer.chat_template or not isinstance(prompt, str):
        return prompt
    return [{"role": "user", "content": prompt}]

def encode_prompt(prompt, tokenizer, tools=None):
    """input_ids, a list, of a text or of messages to answer."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    return tokenizer.apply_chat_template(
        prompt, tools=tools, add_generation_prompt=True, return_dict=True)["input_ids"]

def questions(messages):
    """[[message]]: what the assistant is asked, one answer after the other. Its own turns are left out,
    but for those that called a tool, since the tool has answered them."""
    while messages[-1]["role"] == "assistant":
        messages.pop()
    asked = [[]]
    for message in messages:
        if message["role"] != "assistant" or message.get("tool_calls"):
            asked[-1].append(message)
        elif asked[-1]:
            asked.append([])
    return asked

class Dialogue:
    """What is asked of the target: a text to go on with, or messages whose answers are left out and
    asked for anew, one after the other. ids: the tokens to answer; mask: which of them are answers."""
    exact = True    # are the ids of all answers known?
    refused = None  # why a server did not answer

    def __init__(self, row, target, cfg):
        row = as_dict(row)
        prompt = row.get("messages") or row.get("conversations")
        if not prompt and row.get("prompt"):
            prompt = as_prompt(row["prompt"], target.tokenizer)
        prompt = prompt or row.get("text")
        require(prompt, 'has no "prompt", "messages" or "text"')
        self.target = target
        self.max_new_tokens = cfg.max_new_tokens
        self.tools = row.get("tools") or None
        self.ids = []
        self.mask = []
        if isinstance(prompt, str):
            prompt.encode()  # as in encode_text
            first = prompt
            self.coming = []
        else:
            first, *self.coming = questions(as_messages(prompt))
        self.ask(first)

    def ask(self, said):
        """Text or messages, all so far, to be answered next."""
        ids = encode_prompt(said, self.target.tokenizer, self.tools)
        room = self.target.draft_config.max_position_embeddings - self.max_new_tokens
        require(1 <= len(ids) <= room,
                f"has {len(ids)} tokens; --max-new-tokens {self.max_new_tokens} leaves 1 to {room}")
        if ids[:len(self.ids)] != self.ids:
            self.mask = []  # the chat template has rewritten earlier answers: they are not learnt
        self.mask = self.mask + [0] * (len(ids) - len(self.mask))
        self.ids = ids
        self.said = said

    def add(self, ids, text=None):
        """An answer: its ids, whatever follows its end, or its text, where a server does not tell ids.
        Returns whether there is more to answer."""
        if ids is None:
            self.exact = False
        else:
            ended = [i for i, token in enumerate(ids) if token in self.target.ends]
            last = min(ended, default=len(ids))
            text = self.target.tokenizer.decode(ids[:last])
            ids = ids[:last + 1]
            self.ids = self.ids + ids
            self.mask = self.mask + [1] * len(ids)

        if isinstance(self.said, str):
            self.said += text
            return False
        self.said = [*self.said, {"role": "assistant", "content": text}]
        if not self.coming:
            return False
        try:
            self.ask(self.said + self.coming.pop(0))
        except Exception:  # it has become too long, or its chat template raises: it ends here
            return False
        return True

    def row(self):
        """What is written. An answer without ids is tokenized when it is read."""
        if self.refused:
            return {"refused": self.refused}
        written = {"text": self.said}
        if not isinstance(self.said, str):
            written = {"messages": self.said, "tools": self.tools}
        return {**written, "input_ids": self.ids, "loss_mask": self.mask} if self.exact else written

def answer_prompts(target, prompts, cfg):
    """The target's answers to prompts, all lists of ids; of an answer that has ended, more may follow."""
    from transformers import GenerationConfig
    model = target.model
    end = model.generation_config.eos_token_id
    # Greedy or sampled as asked, whatever penalties and beams generation_config.json asks for.
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=0)
    sampling = dict(do_sample=True, temperature=cfg.temperature, top_k=0) if cfg.temperature else {}
    target.tokenizer.pad_token_id = 0  # masked: any id of the vocabulary
    batch = target.tokenizer.pad(
        {"input_ids": prompts}, padding_side="left", return_tensors="pt").to(model.device)
    answers = model.generate(**batch, max_new_tokens=cfg.max_new_tokens, **sampling)
    return answers[:, batch.input_ids.shape[1]:].tolist()

def answers_of_target(dialogues, target, cfg):
    """The dialogues in their order, answered by transformers, --batch-size at a time."""
    for i in range(0, len(dialogues), cfg.batch_size):
        batch = dialogues[i:i + cfg.batch_size]
        torch.manual_seed(seed_of(batch[0]))
        asking = batch
        while asking:
            answers = answer_prompts(target, [dialogue.ids for dialogue in asking], cfg)
            asking = [dialogue for dialogue, ids in zip(asking, answers) if dialogue.add(ids)]
        yield from batch

def seed_of(dialogue):
    return int(hash_of(dialogue.ids)[:8], 16) >> 1

class Refused(ValueError):
    """A server does not take this one request."""

def ask_server(url, body=None):
    """The JSON that an OpenAI-compatible server answers; without a body a GET. One that is away or busy
    is asked again for about a minute."""
    key = os.environ.get("OPENAI_API_KEY", "none")
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    data = None if body is None else json.dumps(body).encode()
    for wait in SERVER_WAITS:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=3600) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            reason = f"{error.code} {' '.join(error.read().decode(errors='replace').split())[:300]}"
            if error.code in (400, 413, 422):
                raise Refused(reason) from None
            require(error.code == 429 or error.code >= 500, f"--endpoint: {url} answers {reason}")
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            reason = error
        time.sleep(wait)
    raise ValueError(f"--endpoint: {url} does not answer ({reason}). What it has answered is in --out, and "
                     "the same command goes on there")

def answers_of_server(dialogues, target, cfg):
    """The dialogues in their order, answered by the server of --endpoint, --batch-size at a time."""
    url = cfg.endpoint.rstrip("/").removesuffix("/v1") + "/v1"
    # Sampling as asked here, not as the served model's generation_config.json has it.
    options = dict(model=ask_server(f"{url}/models")["data"][0]["id"], max_tokens=cfg.max_new_tokens,
                   temperature=cfg.temperature, top_p=1.0, top_k=-1, repetition_penalty=1.0,
                   return_token_ids=True)

    def answer(dialogue):
        more = True
        try:
            while more:
                body = dict(options, prompt=dialogue.ids, seed=seed_of(dialogue))
                choice = ask_server(f"{url}/completions", body)["choices"][0]
                more = dialogue.add(choice.get("token_ids"), choice["text"])
        except Refused as error:
            dialogue.refused = str(error)
        return dialogue

    pool = ThreadPoolExecutor(cfg.batch_size)
    try:
        yield from pool.map(answer, dialogues)
    finally:
        pool.shutdown(cancel_futures=True)

def generate_data(cfg):
    """Write the target's own answers to prompts: what a draft will meet in serving."""
    require(cfg.prompts and cfg.out, "--prompts FILE and --out FILE.jsonl are both needed")
    require(variable("WORLD_SIZE", 1) == 1, "generate-data is one process: start it by python")
    rows = read_rows(cfg.prompts, by_line=True)
    target = open_target(cfg, start_ranks(cfg.device), stored=bool(cfg.endpoint))
    about = dict(prompts=convert.sha256(cfg.prompts), dtype=cfg.dtype, max_new_tokens=cfg.max_new_tokens,
                 temperature=cfg.temperature, target_identity=target.identity)
    header = json.dumps({"answers_to": about}).encode() + b"\n"
    out = Path(cfg.out)
    written = out.read_bytes() if out.exists() else b""
    require(written[:len(header)] == header[:len(written)], f"--out {out} does not begin as answers "
            f"to these prompts of this target do, {header[:-1].decode()}: give another --out")

    loads = [(name, partial(Dialogue, row, target, cfg)) for name, row in rows]
    dialogues = load_each(loads, lambda found, name: [found], [cfg.prompts])
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = written.count(b"\n")
    left = dialogues[max(0, lines - 1):]
    answers = answers_of_server if cfg.endpoint else answers_of_target
    with open(out, "ab") as file:
        file.truncate(written.rfind(b"\n") + 1)  # a line cut short is written again
        if not lines:
            file.write(header)
        for dialogue in tqdm(answers(left, target, cfg), total=len(left)):
            file.write(json.dumps(dialogue.row()).encode() + b"\n")
            file.flush()
    refused = [dialogue.refused for dialogue in left if dialogue.refused]
    if refused:
        say(f"{len(refused)} prompts refused by the server: {refused[0]}")

# ---- Distributed ---------------------------------------------------------------------------------

class Ranks(NamedTuple):
    """Where this process stands among dp * sp ranks."""
    rank: int = 0
    dp: int = 1           # groups of ranks that train on different sequences
    sp: int = 1           # ranks of a group, which share each sequence
    group: object = None  # the process group of those, with backend usp
    device: torch.device = torch.device("cpu")
    mesh: object = None   # DeviceMesh of all ranks, for FSDP2; None for a single rank

def variable(name, default=0):
    """An integer that torchrun sets."""
    return int(os.environ.get(name, default))

def start_ranks(device="auto", backend="sdpa", sp=None):
    """Join the process group that torchrun describes, if any. usp: `sp` ranks (default all) share a
    sequence."""
    rank = variable("RANK")
    world = variable("WORLD_SIZE", 1)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        found = torch.cuda.device_count()
        require(variable("LOCAL_RANK") < found, f"--device cuda: torch finds {found} CUDA devices, "
                "fewer than ranks: start as many ranks, or give --device cpu")
        torch.cuda.set_device(variable("LOCAL_RANK"))

    if world == 1 and backend != "usp":
        return Ranks(device=torch.device(device))
    sp = (sp or world) if backend == "usp" else 1
    require(world % sp == 0, f"--sp {sp} does not divide the {world} ranks; start a multiple of it")

    backends = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backends, store=meeting_point(), rank=rank, world_size=world)
    mesh = init_device_mesh(device, (world // sp, sp), mesh_dim_names=("dp", "sp"))
    group = mesh.get_group("sp") if backend == "usp" else None
    everyone = mesh._flatten() if world > 1 else None
    return Ranks(rank, world // sp, sp, group, torch.device(device), everyone)

def meeting_point():
    """The store through which ranks find each other."""
    if "RANK" not in os.environ:  # a single process, started without torchrun
        return dist.HashStore()
    store, _, _ = next(dist.rendezvous("env://"))
    if variable("GROUP_WORLD_SIZE", 1) > 1:
        return store  # of several nodes: see the README

    # torchrun's store outlives its ranks. Under a prefix of its own, a restarted rank does not
    # read the addresses of the dead (pytorch issue 135712).
    return dist.PrefixStore(str(variable("TORCHELASTIC_RESTART_COUNT")), store)

def all_sum(tensor):
    """Sum over all ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor

def barrier(ranks):
    if ranks.dp * ranks.sp > 1:
        dist.barrier()

def say(text):
    """Print on rank 0, above the progress bar if there is one."""
    if variable("RANK") == 0:
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()

class TTT(nn.Module):
    """Calls function(draft, ..), for example ttt_loss, as a module: FSDP2 then gathers the weights
    once for all steps."""
    def __init__(self, draft):
        super().__init__()
        self.draft = draft

    def forward(self, function, *batch, **options):
        return function(self.draft, *batch, **options)

def shard(ttt, mesh):
    """FSDP2: a rank keeps a slice of the weights and of their optimizer state; gradients are
    summed. The fp32 router stays whole: weights that are gathered together have one dtype."""
    policy = MixedPrecisionPolicy(reduce_dtype=fp32(ttt.draft.eh_proj.weight.dtype))
    routers = {p for name, p in ttt.draft.named_parameters() if name == "mlp.gate.weight"}
    fully_shard(ttt, mesh=mesh, mp_policy=policy, ignored_params=routers)
    ttt.set_gradient_divide_factor(1.0)
    ttt.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums

def is_sharded(x):
    return isinstance(x, DTensor)

def full_tensor(x):
    """Gather a tensor if it is sharded; a collective, every rank must call it."""
    return x.full_tensor() if is_sharded(x) else x

# ---- Optimizer, drafts and training states -------------------------------------------------------

WEIGHT_DECAY = 0.01  # of matrices
MOMENTUM = 0.95      # of Muon
ADAM_SHARE = 0.05    # of the learning rate, for what Muon does not take
LEARNING_RATE = {"muon": (0.03, 0.01), "adamw": (3e-3, 1e-4)}  # from scratch, warm
LR_FLOOR = 0.1       # where the cosine ends, as a share of the peak learning rate
LARGEST_NORM = 1.0   # of the gradient; larger ones are clipped
BALANCE_RATE = 0.01  # step of a sigmoid router's bias, from scratch; a warm start keeps its bias
BALANCE_LOSS = 1e-3  # of a softmax router, from scratch
KEPT_STATES = 2      # training states of a run; older ones are removed

class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised (Jordan et al., 2024), for matrices (m, n) and stacks of them, such as
    all experts. torch.optim.Muon takes single matrices only, and whole ones."""
    def __init__(self, groups):
        super().__init__(groups, dict(lr=0.0))
        for group in self.param_groups:
            p, = group["params"]
            self.state[p] = dict(momentum=torch.zeros_like(p))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            p, = group["params"]
            momentum = self.state[p]["momentum"]
            momentum.mul_(MOMENTUM).add_(p.grad, alpha=1 - MOMENTUM)
            nesterov = MOMENTUM * momentum + (1 - MOMENTUM) * p.grad
            p.mul_(1 - group["lr"] * WEIGHT_DECAY)
            p.sub_(muon_update(nesterov, group["name"]), alpha=group["lr"])

def muon_update(x, name):
    """x, orthogonalised: matrices (m, n) that were fused each on its own, times sqrt(m / n) if m > n,
    so that one learning rate serves every width, as Jordan's does. A sharded stack's matrices are
    whole on their rank; a sharded matrix is gathered."""
    if is_sharded(x):
        stack = x.to_local() if x.dim() == 3 else x.full_tensor()
        update = muon_update(stack, name)
        if x.dim() == 3:
            return DTensor.from_local(update, x.device_mesh, x.placements, run_check=False,
                                      shape=x.shape, stride=x.stride())
        return distribute_tensor(update, x.device_mesh, x.placements, src_data_rank=None)

    if name.endswith("gate_up_proj"):  # (E, 2F, C)
        parts = x.unflatten(1, (2, -1))  # (E, 2, F, C)
    elif name == "eh_proj.weight":     # (C, 2C)
        parts = x.unflatten(1, (2, -1)).transpose(0, 1)  # (2, C, C)
    else:
        parts = x
    m, n = parts.shape[-2:]
    parts = max(1, m / n) ** 0.5 * orthogonal(parts).to(x.dtype)
    if name == "eh_proj.weight":
        parts = parts.transpose(0, 1)
    return parts.reshape(x.shape)

def orthogonal(x):
    """About U V^T of x = U S V^T, (.., m, n), by five Newton-Schulz steps, which take singular values
    of x / |x| to between 0.7 and 1.2; in bf16 on a GPU."""
    if x.is_cuda:
        x = x.bfloat16()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x.mT if tall else x

class MasterOptimizer:
    """Muon for the matrices and AdamW for the rest, or AdamW for all, on fp32 master copies of the
    parameters; those of fp32 parameters share their memory."""
    def __init__(self, model, kind):
        self.params = dict(model.named_parameters())
        self.masters = {}
        muon, adam = [], []  # a group for each: fused AdamW does not mix sharded and whole tensors
        for name, p in self.params.items():
            if p.dtype != fp32(p.dtype):
                p = nn.Parameter(p.detach().float())
            self.masters[name] = p
            matrix = p.dim() > 1
            if kind == "muon" and matrix:
                muon.append(dict(params=[p], name=name, share=1.0))
            else:
                adam.append(dict(params=[p], weight_decay=WEIGHT_DECAY if matrix else 0.0,
                                 share=ADAM_SHARE if kind == "muon" else 1.0))

        self.optimizers = [torch.optim.AdamW(adam, betas=(0.9, 0.95), fused=True)]
        self.state = self.optimizers[0].state  # {master: {name: tensor}}
        for group in adam:  # made at the first step; a training state is read before
            p, = group["params"]
            self.state[p] = dict(step=torch.zeros((), device=p.device),
                                 exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        if muon:
            self.optimizers.append(Muon(muon))
            self.state = {**self.state, **self.optimizers[1].state}

    def step(self, lr, scale):
        """Step with the parameters' gradients times `scale`."""
        for name, master in self.masters.items():
            master.grad = self.params[name].grad.to(master.dtype) * scale
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["share"]
            optimizer.step()
        self.publish()

    @torch.no_grad()
    def publish(self):
        """Round the masters into the parameters."""
        for name, p in self.params.items():
            p.copy_(self.masters[name])

def learning_rate(step, cfg):
    """Linear warm-up to lr over warmup_steps, then a cosine to LR_FLOOR of it at the end."""
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    done = (step - cfg.warmup_steps) / (cfg.steps - cfg.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return cfg.lr * (LR_FLOOR + (1 - LR_FLOOR) * cosine)

def save_draft(path, model, meta, rank=0):
    """Write a draft directory: model.safetensors (the state_dict), config.json (MTPConfig and
    `meta`). A collective if the model is sharded; rank 0 writes."""
    tensors = {name: full_tensor(x.detach()) for name, x in model.state_dict().items()}
    if rank > 0:
        return

    tensors = {name: x.cpu().contiguous() for name, x in tensors.items()}
    with convert.atomic(Path(path) / "model.safetensors") as fresh:
        save_file(tensors, fresh, metadata={"format": "pt"})
    config = {**asdict(model.config), **meta, "format": 2}
    with convert.atomic(Path(path) / "config.json") as fresh:
        fresh.write_text(json.dumps(config, indent=2) + "\n")

def load_draft(path):
    """The model of a draft directory, and its config.json's dict."""
    meta, tensors = convert.read_draft(path)
    model = MTP(MTPConfig(**{f.name: meta[f.name] for f in fields(MTPConfig)}))
    model.to(tensors["eh_proj.weight"].dtype).load_state_dict(tensors)
    return model, meta

@dataclass
class Progress:
    """What a run counts; part of its training state."""
    step: int = 0
    tokens: int = 0
    skipped: int = 0           # steps whose loss or gradient was not finite
    skipped_in_a_row: int = 0
    best: float = 0.0          # accept_len of OUT/best; the last field, see load_state

def saved_states(out):
    """Complete training states of a run, oldest first."""
    found = Path(out).glob("checkpoints/step-*")
    states = [path for path in found if path.name[5:].isdigit()]
    return sorted(states, key=lambda path: int(path.name[5:]))

def training_state(model, optimizer, progress):
    """{name: tensor} of all that a resumed run needs; data order and learning rate follow from the
    step."""
    state = {"rng": torch.get_rng_state(), **dict(model.named_buffers())}
    for name, p in optimizer.masters.items():
        state[f"master.{name}"] = p.detach()
        for key, x in optimizer.state[p].items():
            state[f"{key}.{name}"] = x
    state["progress"] = torch.tensor(astuple(progress), dtype=torch.float64)
    return state

def save_state(out, model, optimizer, progress, ranks):
    """Write OUT/checkpoints/step-N, all ranks together: aside first, then renamed, so that it is
    whole or not there. Beside each file stands its sha256."""
    path = Path(out) / "checkpoints" / f"step-{progress.step}"
    fresh = convert.aside(path)
    barrier(ranks)  # all have removed what an interrupted save left
    dcp.save(training_state(model, optimizer, progress), checkpoint_id=fresh)

    if ranks.rank == 0:
        for file in list(fresh.iterdir()):
            Path(f"{file}.sha256").write_text(convert.sha256(file))
        convert.put_in_place(fresh, path)
        for old in saved_states(out)[:-KEPT_STATES]:
            shutil.rmtree(old)

def load_state(path, model, optimizer):
    """Read a training state; returns its Progress. Its .metadata is a pickle: resume only your own
    runs."""
    state = training_state(model, optimizer, Progress())
    dcp.load(state, checkpoint_id=path)
    torch.set_rng_state(state["rng"])
    optimizer.publish()
    *counts, best = state["progress"].tolist()
    return Progress(*map(int, counts), best)

# ---- Options -------------------------------------------------------------------------------------
# A class of options for each command. A field is a flag: its name, type, default and help; a field
# without a default is a positional argument.
command_options = dataclass(frozen=True)

def flag(default, help, **more):
    """A field whose flag has this help; more: `choices`, the `group` that begins with it, or bounds of
    its value: `least` and `most`, or `above`."""
    words = {"above": "above", "least": "at least", "most": "at most"}
    bounds = [f"{words[key]} {more[key]}" for key in words if key in more]
    about = {"help": ", ".join([help, *bounds]), "bounds": ", ".join(bounds), **more}
    return field(default=default, metadata=about)

@command_options
class TargetOptions:
    """What every command that loads a target takes."""
    target: str = flag(
        None, "HF directory or hub id; default: the demo's, or --draft's", group="target")
    dtype: str = flag(
        "auto", "the target runs in", choices=["auto", "float32", "bfloat16", "float16"])
    device: str = flag("auto", "where to run", choices=["auto", "cpu", "cuda"])
    target_device_map: str = flag(None, "transformers' device_map for large targets, e.g. auto")
    trust_remote_code: bool = flag(False, "let the target's repository run its own code")
    other_target: bool = flag(False, "use a draft or states that were made for another target")
    kernels: str = flag(
        "auto", "compiled kernels; auto: if they are built", choices=["auto", "on", "off"])

@command_options
class BatchOptions(TargetOptions):
    """How sequences go through the draft, in training and evaluation."""
    seq_len: int = flag(
        256, "tokens per packed sequence; longer documents are cut", group="sequences", least=3)
    micro_batch_size: int = flag(
        8, "sequences per forward pass and rank; smaller saves memory", least=1)
    eval_size: int = flag(32, "held-out sequences per evaluation", least=1)
    backend: str = flag(
        "sdpa", "attention: sdpa dense; fa linear memory; usp fa, sequences split over ranks",
        choices=["sdpa", "fa", "usp"])
    sp: int = flag(None, "usp: ranks that share a sequence; default all", least=1)

@command_options
class TrainConfig(BatchOptions):
    data: list = flag(
        None, "texts, or rows of {text} or {messages} (JSON lines or array, parquet, gzipped); "
        "default: the demo's", group="data")
    hidden_states: list = flag(None, "instead: directories of stored hidden states, see capture")
    eval_data: list = flag(
        None, "held-out files or directories; default: one training document in 20")
    out: str = flag("runs/demo", "draft directory to write")

    init: str = flag(
        "auto", "warm (the target's MTP layer), scratch, auto, a draft or a checkpoint with such a layer",
        group="draft")
    n_routed_experts: int = flag(None, "E, for a dense target (default 8)", least=1)
    num_experts_per_tok: int = flag(None, "A, for a dense target (default 2)", least=1)
    moe_intermediate_size: int = flag(
        None, "F, for a dense target; divides its MLP's width", least=1)

    ttt_length: int = flag(
        3, "K, draft steps trained from every row", group="objective", least=1)
    engine: str = flag(
        "vllm", "what will serve the draft, which decides what its steps are fed",
        choices=["vllm", "sglang", "transformers", "any"])
    loss: str = flag("ce:1+kl:1", f"sum of weighted terms: {', '.join(LOSS_TERMS)}")
    decay: float = flag(0.8, "step k weighs decay ** k", least=0, most=1)
    recompute: bool = flag(
        False, "compute a step's activations again in the backward pass: less memory")

    steps: int = flag(120, "optimizer steps", group="optimization", least=1)
    batch_size: int = flag(8, "sequences per optimizer step, over all ranks", least=1)
    optimizer: str = flag("muon", "of matrices; the rest always has AdamW", choices=["muon", "adamw"])
    lr: float = flag(
        None, "peak learning rate; default from scratch 0.03 (adamw 3e-3), warm 0.01 (1e-4)", above=0)
    warmup_steps: int = flag(20, "steps of linear warm-up", least=0)
    seed: int = flag(0, "of initialisation and data order", least=0, most=2 ** 32)

    eval_every: int = flag(
        0, "steps between evaluations, best to OUT/best; 0: at both ends", group="run", least=0)
    save_every: int = flag(100, "steps between training states; 0: only at the end", least=0)
    resume: str = flag(
        None, "auto, never or a checkpoints/step-N; default: auto if torchrun restarts it")

@command_options
class DraftOptions(TargetOptions):
    """What the commands that use a trained draft take."""
    draft: str = flag(None, "draft directory", group="draft")
    engine: str = flag(
        None, "draft as this engine does; default: the one it was trained for",
        choices=["vllm", "sglang", "transformers"])
    ttt_length: int = flag(
        None, "K, drafted tokens; default: as many as were trained", least=1)

@command_options
class EvalConfig(DraftOptions, BatchOptions):
    data: list = flag(None, "held-out files, or directories of stored states; default: the demo's")

@command_options
class AnswerOptions(TargetOptions):
    """How the target answers prompts."""
    max_new_tokens: int = flag(128, "length limit of an answer", group="answers", least=1)

@command_options
class GenerateConfig(DraftOptions, AnswerOptions):
    prompt: str = flag(None, "text to continue")

@command_options
class GenerateDataConfig(AnswerOptions):
    prompts: str = flag(
        None, "text, a prompt a line, or rows of {prompt}, {messages} or {text} to continue", group="data")
    out: str = flag(None, ".jsonl to write")
    batch_size: int = flag(8, "prompts at a time", least=1)
    endpoint: str = flag(
        None, "URL of an OpenAI-compatible server of the target (vLLM, SGLang), which is asked instead of "
        "transformers; the variable OPENAI_API_KEY, if set, is its key")
    temperature: float = flag(0.0, "of sampling; 0: greedy", least=0)

@command_options
class CaptureConfig(TargetOptions):
    data: list = flag(None, "texts, or rows of {text} or {messages}, as for train", group="data")
    out: str = flag(None, "directory to write")
    seq_len: int = flag(256, "tokens per file; longer documents are cut", least=3)

@command_options
class PlotConfig:
    run: str = field(metadata={"help": "OUT directory of a training run"})

def check_train_config(cfg):
    """Refuse options that do not go together before anything is loaded."""
    require(cfg.seq_len >= cfg.ttt_length + 2,
            f"--seq-len {cfg.seq_len} has no row that counts: raise it")
    lacking = (cfg.data, cfg.hidden_states).count(None)
    require(lacking == (1 if cfg.target else 2), "give --target DIR with either --data FILE.. or "
            "--hidden-states DIR.., or none of them: the demo")
    require(cfg.target or not cfg.eval_data,
            "--eval-data is not read without --target DIR: the demo holds out its own")
    require(not cfg.target or cfg.out != TrainConfig.out,
            f"--out {cfg.out} is the demo's; give --out DIR")

    parse_loss(cfg.loss)
    known = cfg.init in ("auto", "warm", "scratch") or os.path.isdir(cfg.init)
    require(known, f"--init {cfg.init} is neither auto, warm, scratch nor a directory")
    require(not cfg.sp or cfg.backend == "usp",
            f"--sp {cfg.sp} splits sequences: add --backend usp")
    check_out(cfg.out)

RUN_FILES = {"config.json", "model.safetensors", "settings.json", "metrics.jsonl", "plot.png",
             "checkpoints", "best"}

def check_out(out):
    """Refuse an OUT that cannot be written, or has what no run wrote: a target, another's model."""
    there = Path(out).absolute()
    while not there.exists():
        there = there.parent
    require(there.is_dir() and os.access(there, os.W_OK),
            f"--out {out} cannot be written: {there} is no directory that you may write to")
    found = os.listdir(out) if os.path.exists(out) else []
    names = {name.removeprefix(".").removesuffix(".partial") for name in found}
    if "settings.json" in names or convert.is_draft(out):
        names -= RUN_FILES
    require(not names, f"--out {out} holds {', '.join(sorted(names)[:4])}, which no training run "
            "wrote: give a new folder, or that of a run")

# What a resumed run may change: how long and where it runs, what it writes, what only rounds otherwise.
MAY_CHANGE = {"target", "out", "resume", "steps", "eval_every", "save_every", "eval_size", "backend", "sp",
              "micro_batch_size", "recompute", "device", "kernels", "target_device_map",
              "trust_remote_code", "other_target"}

def settings_of_run(state):
    """The settings.json of the run that a training state is of."""
    file = state.parent.parent / "settings.json"
    require(file.exists(), f"{file} of the run is lost: restore it, or give another --out")
    return convert.read_json(file)

def check_settings(state, settings):
    """Refuse to go on with other settings than the run of a training state began with."""
    began = settings_of_run(state)
    others = [f"--{name.replace('_', '-')} {began.get(name)}, not {value}"
              for name, value in settings.items() if began.get(name) != value and name not in MAY_CHANGE]
    require(not others, f"{state} is of a run with {', and with '.join(others)}: give what it began with, "
            "or another --out")

def check_files(state):
    """Refuse a training state with a file that is not what was written."""
    out = state.parent.parent
    others = [str(other) for other in saved_states(out) if other.name != state.name]
    for name in sorted({path.name.removesuffix(".sha256") for path in state.iterdir()}):
        file, digest = state / name, state / f"{name}.sha256"
        whole = file.exists() and digest.exists() and convert.sha256(file) == digest.read_text()
        require(whole, f"{file} is damaged or lost, or its .sha256: give --resume "
                f"{' or '.join(others) or 'never and another --out'}")

def state_to_resume(cfg):
    """The training state that --resume names; None for a new run."""
    resume = cfg.resume or ("auto" if variable("TORCHELASTIC_RESTART_COUNT") else "never")
    states = saved_states(cfg.out)
    require(resume != "never" or not states or cfg.out == TrainConfig.out, f"--out {cfg.out} holds "
            "training states: add --resume auto to continue that run, or give another --out")
    if resume == "auto":
        resume = states[-1] if states else "never"
    if resume == "never":
        return None

    state = Path(resume)
    whole = re.fullmatch(r"step-\d+", state.name) and (state / ".metadata.sha256").exists()
    require(whole, f"--resume {resume} is no complete training state: "
            "give auto, never or OUT/checkpoints/step-N")
    require(not states or os.path.samefile(state.parent.parent, cfg.out),
            f"--out {cfg.out} holds states of another run than {state}: give another --out")
    require(int(state.name[5:]) <= cfg.steps, f"{state} is past --steps {cfg.steps}: give more steps, or "
            "an earlier state")
    asked = asdict(cfg)
    if cfg.lr is None:
        del asked["lr"]  # that of the run
    check_settings(state, asked)
    if variable("RANK") == 0:
        check_files(state)
    return state

def check_backend(name, target):
    reason = why_not_fa(target.device.type, target.lm_head.dtype)
    require(name == "sdpa" or not reason,
            f"--backend {name} cannot run: {reason}. Use --backend sdpa")

def choose_kernels(asked, device):
    """Turn the compiled kernels on or off for this process, and say which and why."""
    global KERNELS
    missing = NO_KERNELS
    if not missing and device.type == "cuda" and not mtp_kernels.cuda:
        missing = ("they were built without CUDA; anew: MTP_CUDA=1 python setup.py build_ext "
                   "--inplace")
    require(asked != "on" or not missing, f"--kernels on, but there are none: {missing}")

    KERNELS = asked != "off" and not missing
    if asked == "auto":
        say("kernels on: compiled ones are installed" if KERNELS else
            f"kernels off, PyTorch only: {missing}")

# ---- Training and evaluation ---------------------------------------------------------------------

def judge_acceptance(teacher, draft):
    """Figures (5, N) of logits (N, V): CE, KL, is the draft's argmax the teacher's, and the chances that
    a target which samples accepts a sampled draft token, sum min(p, q), and the draft's argmax."""
    best = draft.argmax(-1, keepdim=True)
    hit = best == teacher.argmax(-1, keepdim=True)
    teacher = teacher.to(fp32(teacher.dtype))
    draft = draft.to(teacher.dtype)
    sure = teacher.softmax(-1).gather(-1, best)
    return torch.stack([ce(teacher, draft), kl(teacher, draft), hit[:, 0].to(sure.dtype),
                        1 - tv(teacher, draft), sure[:, 0]])

@torch.no_grad()
def acceptance_sums(model, input_ids, hidden_states, loss_mask=None, doc_ids=None, *, ttt_length=3,
                    backend="sdpa", group=None, recycle="post", zero_first_embedding=False):
    """What evaluation wants to know of a batch; arguments as ttt_loss has them. Returns sums [8, K]
    float64 over counted rows (CE, KL, right, prefix hits, total variation, chances that steps 0..k of a
    sampled and of a greedy draft are accepted by a target that samples, 1) and hits (K, B, T) bool."""
    share = share_rows(input_ids, hidden_states, loss_mask, doc_ids, ttt_length, group)
    g = share.hidden[:, :share.position_ids.shape[1]].to(model.eh_proj.weight.dtype)
    ns, _ = ttt_steps(model, share.ids, g, share.position_ids, share.docs, ttt_length, BACKENDS[backend],
                      group, recycle, zero_first_embedding)

    valid, lm_head = share.valid, model.lm_head_weight
    figures = torch.zeros(5, *valid.shape, dtype=fp32(lm_head.dtype), device=valid.device)
    for k, b, rows, teacher, draft in logit_chunks(lm_head, share.hidden, ns, valid):
        figures[:, k, b, rows] = by_blocks(judge_acceptance, teacher, draft)

    CE, KL, hit, overlap, sure = figures.double()
    of_rows = [CE, KL, hit, hit.cumprod(0), 1 - overlap, overlap.cumprod(0), sure.cumprod(0), valid.double()]
    sums = torch.stack(of_rows).where(valid, 0).sum((2, 3))
    hits = (hit > 0) & valid
    if group is not None:
        dist.all_reduce(sums, group=group)
        hits = gather_rows(hits, input_ids.shape[1], group)
    return sums, hits

def balancing_loss(gate, scores, count):
    """E sum_e f_e P_e of a softmax router, transformers' load_balancing_loss_func. P_e: mean score over
    `count` rows, whose sum is `scores`; f_e: how often a row is sent to expert e, in the step before, so
    that this is a sum over rows, and no split of a batch changes its gradient."""
    per_row = gate.expert_share * gate.config.num_experts_per_tok
    return len(scores) * (per_row * scores).sum() / count.clamp(min=1)

class Run:
    """A draft and its target on these ranks: micro-batches, their hidden states, gradients.
    cfg: BatchOptions; drafting: ttt_length, recycle, zero_first_embedding."""
    def __init__(self, model, target, cfg, ranks, backend, **drafting):
        self.model = model
        self.target = target
        self.cfg = cfg
        self.ranks = ranks
        self.ttt = TTT(model)
        self.drafting = drafting
        self.options = dict(backend=backend, group=ranks.group, **drafting)
        self.data_seconds = 0.0  # spent on hidden states
        self.balance = False     # are the experts balanced?

    def batches(self, sequences):
        """This rank's share of packed sequences, in as many micro-batches on every rank: [(part of
        the sequences, input_ids, loss_mask, doc_ids)]."""
        ranks = self.ranks
        padded = sequences + [[]] * (-len(sequences) % ranks.dp)  # an empty one counts nowhere
        mine = padded[ranks.rank // ranks.sp::ranks.dp]

        batches = []
        size = self.cfg.micro_batch_size
        for i in range(0, len(mine), size):
            part = mine[i:i + size]
            length = max(1, *(token_count([sequence]) for sequence in part))
            if ranks.device.type == "cuda":
                length = self.cfg.seq_len  # CUDA compiles anew for each length
            batches.append((part, *lay_out(part, length, ranks.device)))
        return batches

    def apply(self, function, part, input_ids, *batch, **options):
        """ttt_loss or acceptance_sums of a micro-batch, with its hidden states: with usp those of
        this rank's rows and the K rows after them."""
        began = time.perf_counter()
        group = self.ranks.group
        start, stop = row_share(input_ids.shape[1], group)
        halo = 0 if group is None else self.options["ttt_length"]
        hidden = gather_states(part, start, stop + halo, self.target)
        self.data_seconds += time.perf_counter() - began
        return self.ttt(function, input_ids, hidden, *batch, **{**self.options, **options})

    def gradients(self, sequences, **loss_options):
        """Gradients of a batch, summed over all ranks. Returns its loss, TTTOutput's sums and
        expert load."""
        batches = self.batches(sequences)
        K = self.options["ttt_length"]
        sp = self.ranks.sp
        counts = sum(valid_counts(mask, doc_ids, K, batch=len(ids), length=ids.shape[1])
                     for _, ids, mask, doc_ids in batches)
        counts = all_sum(counts) // sp  # each rank of a group has counted the same rows

        self.model.zero_grad()
        loss = 0.0
        sums = 0.0
        load = 0
        for batch in batches:
            out = self.apply(ttt_loss, *batch, counts=counts, **loss_options)
            balancing = 0.0
            if self.balance and len(out.scores):
                balancing = BALANCE_LOSS * balancing_loss(self.model.mlp.gate, out.scores, counts.sum())
            (out.loss + balancing).backward()
            loss = loss + out.loss.detach()
            sums = sums + out.sums
            load = load + out.expert_load

        for p in self.model.parameters():
            if not is_sharded(p):  # FSDP2 has summed the others
                all_sum(p.grad)
        return all_sum(loss), all_sum(sums) / sp, all_sum(load) // sp

@torch.no_grad()
def evaluate(run, sequences):
    """Acceptance over packed sequences: the field `eval` of metrics.jsonl."""
    sums = 0.0
    rounds = 0.0
    for batch in run.batches(sequences):
        more, hits = run.apply(acceptance_sums, *batch, recycle=as_drafted(run.options["recycle"]))
        _, ids, mask, doc_ids = batch
        sums = sums + more
        rounds = rounds + walk(hits, mask, Documents(doc_ids, *ids.shape, ids.device))
    if isinstance(run.ttt, FSDPModule):
        run.ttt.reshard()

    sums = all_sum(sums) / run.ranks.sp
    n_rounds, *accepted = all_sum(rounds).tolist()
    walked = [n / max(1, n_rounds) for n in accepted]
    return {**acceptance(sums), "walk": walked, "accept_len_walk": 1 + sum(walked),
            "rows": int(sums[-1, 0])}

def as_drafted(recycle):
    """The setting to draft with: a draft that was trained with "both" is judged, and drafts, with "post"."""
    return "post" if recycle == "both" else recycle

def acceptance(sums):
    """Figures of metrics.jsonl, of sums [.., K]: CE, KL, right, prefix hits; in evaluations TV and
    the hits expected of sampled and of greedy drafts; counted rows."""
    names = ("ce", "kl", "acc", "accept_len", "tv", "accept_len_sampled", "accept_len_greedy")
    means = sums[:-1] / sums[-1].clamp(min=1)
    return {name: 1 + sum(x) if "accept" in name else x for name, x in zip(names, means.tolist())}

def walk(hits, loss_mask, docs):
    """[1 + K]: rounds, and how many accepted position k, of speculative decoding along each text.
    hits (K, B, T): token k drafted from row t is the target's. A text is a maximal run of unmasked
    tokens, the first root the row before it; after n accepted tokens the next root is n + 1 on."""
    accepted = hits.long().cumprod(0).sum(0).tolist()  # (B, T)
    total = torch.zeros(len(hits) + 1, dtype=torch.float64)

    document = docs.document - 1  # -1 in padding
    texts = document.masked_fill(loss_mask == 0, -1)
    for b, start, stop in spans(Documents(texts, *texts.shape, texts.device)):
        follows = start > 0 and document[b, start - 1] == document[b, start]
        root = start - 1 if follows else start
        while root + 2 < stop:  # the first token to draft is x[root + 2]
            n = min(accepted[b][root], stop - root - 2)
            total[:n + 1] += 1
            root += n + 1
    return total.to(hits.device)

def acceptance_line(label, result):
    lengths = ("accept_len", "accept_len_walk", "accept_len_sampled", "accept_len_greedy")
    found = "; ".join(f"{name} {result[name]:.3f}" for name in lengths)
    return f"{label}: acc {decimals(result['acc'])}; {found}"

def decimals(numbers):
    return " ".join(f"{x:.3f}" for x in numbers)

def log(run, line):
    """Add a line to OUT/metrics.jsonl."""
    if run.ranks.rank == 0:
        with open(Path(run.cfg.out) / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

def make_draft(cfg, target, ranks):
    """The draft on its device, with the target's embedding and head; whether it is from scratch."""
    source = target.checkpoint
    of_draft = convert.is_draft(cfg.init)
    if os.path.isdir(cfg.init) and not of_draft:
        source = convert.Checkpoint(cfg.init)
        found = convert.draft_config(source.config, source.files)
        odd = [name for name, value in asdict(target.draft_config).items() if found[name] != value]
        require(not odd, f"--init {cfg.init} has another {', '.join(odd)} than {target.path}")
    prefix = convert.mtp_prefix(source.config, source.files)
    known = of_draft or cfg.init in ("auto", "scratch")
    require(prefix or known, f"{source.path} has no MTP layer; give --init scratch")
    lost = convert.unlisted_layer(target.checkpoint)
    require(not lost or cfg.init != "auto", f"{target.path} has an MTP layer in {lost}, which its index "
            "does not name: add it there, or give --init scratch")
    dtype = target.lm_head.dtype
    if dtype == torch.float16:
        dtype = torch.float32
        say("the target is fp16: its draft is trained in fp32, whose gradients do not underflow")
    model = MTP(target.draft_config).to(dtype)
    init_weights(model, model.config.initializer_range, torch.Generator().manual_seed(cfg.seed))

    scratch = False
    if of_draft:
        draft, meta = load_draft(cfg.init)
        target.check_same(meta["target_identity"], f"--init {cfg.init}")
        require(draft.config == model.config, f"--init {cfg.init} has other sizes than this draft")
        model.load_state_dict(draft.state_dict())
    elif prefix and cfg.init != "scratch":
        convert.read_layer(source, prefix, model.state_dict())
    else:
        scratch = True
    model.to(ranks.device).set_target(target.embed.to(dtype), target.lm_head.to(dtype))
    return model, scratch

def train(cfg):
    """Train a draft, written to OUT; returns the evaluations {"before": .., "after": ..}."""
    check_train_config(cfg)
    state = state_to_resume(cfg)
    warnings.filterwarnings("ignore", message="torch.distributed is .*unavailable")  # one rank
    torch.manual_seed(cfg.seed)
    ranks = start_ranks(cfg.device, cfg.backend, cfg.sp)
    target = open_target(cfg, ranks, stored=bool(cfg.hidden_states))
    H = target.draft_config.num_attention_heads
    P = ranks.sp
    longest = target.draft_config.max_position_embeddings
    require(cfg.seq_len <= longest,
            f"--seq-len {cfg.seq_len} exceeds the target's max_position_embeddings {longest}")
    require(H % P == 0, f"--sp {P} does not divide {H} heads; give {math.gcd(H, P)}")
    check_backend(cfg.backend, target)

    recycle, zero_first = convert.engine_setting(target.layout, cfg.engine)
    say(f"engine {cfg.engine} ({target.layout} layout): recycle {recycle}, "
        f"zero_first_embedding {zero_first}")
    sequences, held = read_sequences(cfg, target)
    model, scratch = make_draft(cfg, target, ranks)
    say(f"draft: {sum(p.numel() for p in model.parameters()):,} parameters, "
        f"{'from scratch' if scratch else 'warm'}, {model.lm_head_weight.dtype} on {ranks.dp} x {P} "
        f"{ranks.device.type} ranks (data x sequence)")
    if cfg.lr is None:
        began = settings_of_run(state) if state else {}
        cfg = replace(cfg, lr=began.get("lr") or LEARNING_RATE[cfg.optimizer][0 if scratch else 1])
    settings = {**asdict(cfg), "target_identity": target.identity,
                "data_identity": identity_of_data(sequences)}

    run = Run(model, target, cfg, ranks, cfg.backend, ttt_length=cfg.ttt_length, recycle=recycle,
              zero_first_embedding=zero_first)
    run.balance = scratch
    if ranks.mesh is not None:
        shard(run.ttt, ranks.mesh)
    optimizer = MasterOptimizer(model, cfg.optimizer)
    progress = start_or_resume(run, optimizer, state, settings)

    results = {}
    if progress.step == 0:
        results["before"] = report(run, held, progress, "before")
        if not scratch and results["before"]["ce"][0] > 0.9 * math.log(len(target.lm_head)):
            say("warning: the warm start's cross-entropy is at or above a random draft's")
    if train_loop(run, optimizer, progress, sequences, held):
        say(f"stopped by a signal after step {progress.step}; state saved, --resume auto continues")
        return results
    results["after"] = report(run, held, progress, "after")
    write_draft(cfg.out, run)
    say(f"draft written to {cfg.out}, peak memory {peak_memory(ranks.device) >> 20:,} MiB; try: "
        f"python mtp.py generate --draft {cfg.out} --prompt \"import os\"")
    return results

def start_or_resume(run, optimizer, state, settings):
    """Progress of the run whose training state is given, or of a new one. What OUT has of later steps
    goes: of a new run, which only the demo starts over another, all."""
    progress = Progress()
    if state is not None:
        say(f"resuming from {state}")
        began = settings_of_run(state)
        run.target.check_same(began["target_identity"], str(state))
        require(began.get("data_identity") == settings["data_identity"],
                f"{state} is of a run on other data: give the files as they were, or another --out")
        progress = load_state(state, run.model, optimizer)

    barrier(run.ranks)  # all have looked for states
    if run.ranks.rank == 0:
        out = Path(run.cfg.out)
        with convert.atomic(out / "settings.json") as fresh:
            fresh.write_text(json.dumps(settings, indent=2))
        for path in saved_states(out):
            if int(path.name[5:]) > progress.step:
                shutil.rmtree(path)
        if state is None:
            shutil.rmtree(out / "best", ignore_errors=True)
        if (out / "metrics.jsonl").exists():
            cut_metrics(out / "metrics.jsonl", progress.step, run.cfg.steps)
    return progress

def cut_metrics(file, step, steps):
    """Keep what a run that goes on from `step` does not write again, and no line that was cut in half."""
    again = f"(?!{steps if step else 0}, \"eval)"  # the evaluation at the end; of a new run, at the start
    lines = re.finditer(rf'{{"step": {again}(\d+), .*\n', file.read_text())
    kept = [line[0] for line in lines if int(line[1]) <= step]
    with convert.atomic(file) as fresh:
        fresh.write_text("".join(kept))

def train_loop(run, optimizer, progress, sequences, held):
    """Optimizer steps until cfg.steps: log, evaluate, save. Returns whether SIGINT or SIGTERM, which do
    not end the process here, ended the loop on any rank."""
    cfg = run.cfg
    signals = []

    def note(*signal_and_frame):
        signals.append(signal_and_frame)

    handlers = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    bar = tqdm(total=cfg.steps, initial=progress.step, desc="train", disable=run.ranks.rank > 0)
    stop = False
    try:
        while progress.step < cfg.steps and not stop:
            train_step(run, optimizer, progress, sequences, bar)
            bar.update()
            step = progress.step
            last = step == cfg.steps
            require(not last or progress.skipped < step,
                    f"nothing was learned: all {step} steps were skipped; no draft is written")

            if is_due(cfg.eval_every, step) and not last:
                report(run, held, progress, str(step))
            stop = all_sum(torch.tensor(len(signals), device=run.ranks.device)) > 0
            if is_due(cfg.save_every, step) or last or stop:
                if progress.skipped < step and not last:  # the last one is evaluated first
                    write_draft(cfg.out, run)
                save_state(cfg.out, run.model, optimizer, progress, run.ranks)
    finally:
        bar.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return stop

def train_step(run, optimizer, progress, sequences, bar):
    """An optimizer step and its line of metrics.jsonl; it is skipped if its loss or gradient is not
    finite, and ten such steps in a row are an error."""
    cfg = run.cfg
    began = time.perf_counter()
    run.data_seconds = 0.0
    batch = batch_of_step(progress.step, sequences, cfg)
    lr = learning_rate(progress.step, cfg)
    loss, sums, load = run.gradients(
        batch, loss=cfg.loss, decay=cfg.decay, recompute=cfg.recompute)
    norm = gradient_norm(run.model)

    tokens = token_count(batch)
    progress.step += 1
    progress.tokens += tokens
    if not math.isfinite(norm + loss + sums.sum()):
        names = sorted({sample.name for sequence in batch for sample in sequence})
        progress.skipped += 1
        progress.skipped_in_a_row += 1
        say(f"step {progress.step} skipped, its loss or gradient is not finite; its samples: "
            f"{', '.join(names)}")
        log(run, {"step": progress.step, "skipped_samples": names})
        require(progress.skipped_in_a_row < 10, "ten steps in a row were skipped: lower --lr")
        return

    progress.skipped_in_a_row = 0
    optimizer.step(lr, min(1.0, LARGEST_NORM / (norm + 1e-6)))
    share = load / load.sum().clamp(min=1)  # [] of a dense draft
    for name, buffer in run.model.named_buffers():  # the router's, of a draft with experts
        if run.balance and name.endswith("e_score_correction_bias"):
            balance_experts(buffer, load, BALANCE_RATE)
        if name.endswith("expert_share"):
            buffer.copy_(share)

    seconds = time.perf_counter() - began
    figures = acceptance(sums)
    log(run, dict(
        step=progress.step, loss=loss.item(), **figures, tokens_per_second=tokens / seconds,
        data_seconds=run.data_seconds, compute_seconds=seconds - run.data_seconds,
        top_expert_share=max(share.tolist(), default=0), peak_memory=peak_memory(run.ranks.device),
        bytes_sent=AllToAll.bytes_sent, tokens=progress.tokens, skipped=progress.skipped,
        grad_norm=norm, lr=lr))
    bar.set_postfix(loss=loss.item(), accept_len=figures["accept_len"], refresh=False)

def batch_of_step(step, sequences, cfg):
    """The packed sequences of an optimizer step; each epoch has an order of its own."""
    batch = []
    n = len(sequences)
    for i in range(step * cfg.batch_size, (step + 1) * cfg.batch_size):
        epoch, at = divmod(i, n)
        batch.append(sequences[shuffled(n, cfg.seed, epoch)[at]])
    return batch

def gradient_norm(model):
    norms = [full_tensor(p.grad.to(fp32(p.dtype)).norm()) for p in model.parameters()]
    return torch.stack(norms).norm().item()

def is_due(every, step):
    return every > 0 and step % every == 0

def report(run, held, progress, label):
    """Evaluate on held-out sequences; print and log it, keep the best draft in OUT/best."""
    result = evaluate(run, held)
    say(acceptance_line(label, result))
    log(run, {"step": progress.step, "eval": result})
    require(math.isfinite(sum(result["kl"])),
            f"the evaluation at step {progress.step} is not finite: look at the held-out texts")
    accept_len = result["accept_len"]
    if run.cfg.eval_every and label != "before" and accept_len > progress.best:
        progress.best = accept_len
        write_draft(Path(run.cfg.out) / "best", run)
    return result

def write_draft(path, run):
    meta = dict(**run.drafting, engine=run.cfg.engine, target=str(run.target.path.resolve()),
                target_identity=run.target.identity)
    save_draft(path, run.model, meta, run.ranks.rank)

def peak_memory(device):
    """Bytes: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def plot(cfg):
    """Draw a run's acc of each draft step (dots: held out) and its loss to RUN/plot.png."""
    require(find_spec("matplotlib"), "plot needs matplotlib: pip install matplotlib")
    from matplotlib.figure import Figure
    lines = [json.loads(line) for line in open(Path(cfg.run, "metrics.jsonl"))]
    trained = [line for line in lines if "loss" in line]
    held = [line for line in lines if "eval" in line]

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axis, name in zip(figure.subplots(1, 2), ("acc", "loss")):
        axis.plot([line["step"] for line in trained], [line[name] for line in trained])
        axis.set_title(f"{name} over optimizer steps")
    dots = [line["eval"]["acc"] for line in held]
    figure.axes[0].plot([line["step"] for line in held], dots, "k.")
    file = Path(cfg.run, "plot.png")
    figure.savefig(file, dpi=120)
    say(f"drew {file}")

# ---- Speculative decoding ------------------------------------------------------------------------

def attend_decode(q, k, v, past_k, past_v, docs=None, group=None):
    """Serving: T new rows attend causally to a growing cache (past_k, past_v: empty or one tensor)."""
    k = torch.cat([*past_k, k], dim=1)  # (B, S, G, D)
    v = torch.cat([*past_v, v], dim=1)
    T, S = q.shape[1], k.shape[1]
    mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]  # (B, H, T or S, D)
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2), [k], [v]  # (B, T, H, D)

class Drafter:
    """Drafting as engines do it: a cache of draft keys for the verified prefix, rewritten from the
    target's true hidden states after every verification, and one appended key per drafted token."""
    def __init__(self, model, recycle="post", zero_first_embedding=False):
        self.model = model
        self.recycle = recycle
        self.zero_first = zero_first_embedding
        self.past_k = []
        self.past_v = []

    def rows(self, tokens, hidden, start):
        """Run rows start.. of hidden (1, n, C), tokens one on. Returns the last row's most likely
        token and the state that the next step is fed."""
        device = hidden.device
        positions = torch.arange(start, start + len(tokens), device=device)[None]
        hidden = hidden.to(self.model.eh_proj.weight.dtype)
        n, r, self.past_k, self.past_v, _ = self.model(
            torch.tensor([tokens], device=device), hidden, positions, self.past_k, self.past_v,
            None, attend_decode, zero_first=self.zero_first)
        fed = r if self.recycle == "pre" else n
        logits = F.linear(n[0, -1].to(self.model.lm_head_weight.dtype), self.model.lm_head_weight)
        return logits.argmax().item(), fed[:, -1:]

    def draft(self, tokens, hidden, start, K):
        """K tokens to follow `tokens`, verified, the first at position start + 1; hidden: from row
        `start` on."""
        self.past_k = [x[:, :start] for x in self.past_k]
        self.past_v = [x[:, :start] for x in self.past_v]
        token, fed = self.rows(tokens, hidden, start)
        drafted = [token]
        while len(drafted) < K:
            token, fed = self.rows([token], fed, start + len(tokens) + len(drafted) - 1)
            drafted.append(token)
        return drafted

class Decoding(NamedTuple):
    ids: list      # prompt and all that was decoded
    answer: list   # what was decoded, cut at the limit or the end token
    rounds: list   # drafted tokens that stood in each round, as vLLM counts
    speed: float   # tokens of the answer per second

@torch.no_grad()
def decode(target, prompt, max_new_tokens, drafter=None, K=0, eos=()):
    """Greedy decoding after `prompt` (ids), K drafted tokens verified per round; K = 0: plain."""
    from transformers import DynamicCache
    began = time.perf_counter()
    device = target.model.device
    past = DynamicCache(config=target.model.config)
    recurrent = "linear_attention" in target.config.get("layer_types", ())
    tokens = list(prompt)  # all that is verified
    drafted = []           # a guess of what follows
    rounds = []
    start = 0              # the drafter has run the rows before
    cached = 0             # the target has, too, and the cache holds them

    while True:
        new = tokens[cached:] + drafted
        before = copy.deepcopy(past) if recurrent and drafted else None
        hidden = target.model.base_model(
            torch.tensor([new], device=device), use_cache=True,
            **{target.cache_name: past}).last_hidden_state.to(target.device)
        judged = hidden[0, -len(drafted) - 1:].to(target.lm_head.dtype)
        chosen = F.linear(judged, target.lm_head).argmax(-1).tolist()  # after each of `new`'s last tokens
        n = len(os.path.commonprefix([drafted, chosen]))
        if drafted:
            rounds.append(n)
        hidden = hidden[:, start - cached:len(tokens) + n - cached]
        refused = len(drafted) - n
        if refused and recurrent:  # a state that cannot forget: go back, run what stands again
            past = before
        else:
            cached = len(tokens) + n
            if refused:
                past.crop(-refused)
        tokens += drafted[:n] + [chosen[n]]

        answer = tokens[len(prompt):]
        ends = [i for i, x in enumerate(answer) if x in eos]
        if ends or len(answer) >= max_new_tokens:
            answer = answer[:min([*ends, max_new_tokens])]
            return Decoding(tokens, answer, rounds, len(answer) / (time.perf_counter() - began))
        if K:
            drafted = drafter.draft(tokens[start + 1:], hidden, start, K)
            start = len(tokens) - 1

def open_draft(cfg, backend="sdpa", sp=None):
    """Open --draft and its target, which must be the one that it was trained for. Returns the
    model, target, ranks, and {ttt_length, recycle, zero_first_embedding}: those it was trained
    with unless flags say otherwise."""
    require(cfg.draft, "--draft DIR is missing: a directory that training wrote, e.g. runs/demo")
    model, meta = load_draft(cfg.draft)
    ranks = start_ranks(cfg.device, backend, sp)
    target = open_target(replace(cfg, target=cfg.target or meta["target"]), ranks)
    target.check_same(meta["target_identity"], cfg.draft)
    model.to(target.device, target.lm_head.dtype).set_target(target.embed, target.lm_head)

    recycle = meta["recycle"]
    zero_first = meta["zero_first_embedding"]
    if cfg.engine:
        recycle, zero_first = convert.engine_setting(target.layout, cfg.engine)
    K = meta["ttt_length"] if cfg.ttt_length is None else cfg.ttt_length
    options = dict(ttt_length=K, recycle=as_drafted(recycle),
                   zero_first_embedding=zero_first)
    return model, target, ranks, options

def evaluate_command(cfg):
    """Print the acceptance table of a draft on held-out text."""
    model, target, ranks, options = open_draft(cfg, cfg.backend, cfg.sp)
    check_backend(cfg.backend, target)
    files = cfg.data or stdlib_files(every=6)[1]
    shortest = options["ttt_length"] + 2
    sequences = pack(read_samples(files, target, cfg.seq_len, shortest), cfg.seq_len)
    run = Run(model, target, cfg, ranks, cfg.backend, **options)
    result = evaluate(run, spread(sequences, cfg.eval_size))
    say(acceptance_line("draft", result))
    say(f"walk: accepted per position {decimals(result['walk'])}; {result['rows']:,} rows counted")

def generate_command(cfg):
    """Continue a prompt greedily, by speculative and by plain decoding; compare tokens and time."""
    require(cfg.prompt, "--prompt TEXT is missing")
    model, target, _, options = open_draft(cfg)
    K = options.pop("ttt_length")
    tokenizer = target.tokenizer
    length = cfg.max_new_tokens
    ids = encode_prompt(as_prompt(cfg.prompt, tokenizer), tokenizer)
    room = target.draft_config.max_position_embeddings - length - K
    require(1 <= len(ids) <= room,
            f"--prompt has {len(ids)} tokens; --max-new-tokens leaves 1 to {room}")

    plain = decode(target, ids, length, eos=target.ends)
    fast = decode(target, ids, length, Drafter(model, **options), K, target.ends)

    rounds = max(1, len(fast.rounds))
    stood = [sum(n > k for n in fast.rounds) / rounds for k in range(K)]
    print(f"{tokenizer.decode(ids + fast.answer)}\n\naccept_len_walk {1 + sum(stood):.3f} over "
          f"{len(fast.rounds)} rounds; accepted per position {decimals(stood)}\n"
          f"tokens/s, here, where it is a check: {fast.speed:.1f} with drafting, "
          f"{plain.speed:.1f} without")
    check_lossless(target, ids, plain.answer, fast.answer)

@torch.no_grad()
def check_lossless(target, prompt, plain, fast):
    """Print that drafting changed no token, or where rounding let it; ValueError if it was not
    rounding."""
    if plain == fast:
        print("lossless: token for token the target's own greedy answer")
        return
    at = len(os.path.commonprefix([plain, fast]))
    ids = torch.tensor([prompt + plain[:at]], device=target.model.device)
    logits = target.model(ids).logits[0, -1]
    best, second = logits.float().topk(2).values.tolist()

    ulp = 2.0 ** (math.frexp(best)[1] - 1) * torch.finfo(logits.dtype).eps
    apart = (best - second) / ulp
    print(f"differs from plain greedy decoding from token {at} on: two best logits {apart:.1f} "
          "ulps apart")
    require(apart <= 2 and logits.dtype.itemsize < 4,
            "drafted and plain decoding differ by more: report it")

# ---- Command line --------------------------------------------------------------------------------

COMMANDS = {  # the function, and the class of its options
    "train": (train, TrainConfig),
    "eval": (evaluate_command, EvalConfig),
    "generate": (generate_command, GenerateConfig),
    "generate-data": (generate_data, GenerateDataConfig),
    "capture": (capture, CaptureConfig),
    "plot": (plot, PlotConfig)}

def nonempty(text):
    require(text, "empty")  # argparse names the flag
    return text

def check_number(f, value):
    """Refuse a number that is not finite or out of its option's bounds."""
    above = f.metadata.get("above", -math.inf)
    least = f.metadata.get("least", above)
    fits = least <= value <= f.metadata.get("most", sys.float_info.max)
    require(fits and value != above,
            f"--{f.name.replace('_', '-')} {value} must be {f.metadata['bounds']}")

def add_flags(parser, options):
    """A flag for each field of a class of options."""
    kinds = {"str": {"type": nonempty}, "list": {"type": nonempty, "nargs": "+"}, "int": {"type": int},
             "float": {"type": float}, "bool": {"action": "store_true"}}
    group = parser
    for f in fields(options):
        about = f.metadata
        if "group" in about:
            group = parser.add_argument_group(about["group"])
        shown = about["help"]
        if type(f.default) in (int, float, str):
            shown += f" (default {f.default})"
        name = f.name if f.default is MISSING else "--" + f.name.replace("_", "-")
        added = group.add_argument(name, default=f.default, help=shown, **kinds[f.type])
        added.choices = about.get("choices")

def parse(arguments):
    """The function and the options of a command line; flags without a command are train's."""
    parser = argparse.ArgumentParser(
        prog="mtp.py", description=__doc__, epilog="COMMAND --help lists a command's flags",
        formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, (function, options) in COMMANDS.items():
        about = function.__doc__
        command = commands.add_parser(name, help=about, description=about, allow_abbrev=False,
                                      usage="%(prog)s [--flag value ..]")
        add_flags(command, options)

    first = arguments[0] if arguments else "--"
    if first.startswith("-") and first not in ("-h", "--help"):
        arguments = ["train", *arguments]
    values = vars(parser.parse_args(arguments))
    function, options = COMMANDS[values.pop("command")]
    for f in fields(options):
        if type(values[f.name]) in (int, float):
            check_number(f, values[f.name])
    return function, options(**values)

def explain(error):
    """A line on what the user or the machine has done; None for a fault of this file."""
    said = str(error)
    if "closed by peer" in said:  # gloo's, once a rank has ended
        return "another rank has failed"
    if isinstance(error, dcp.api.CheckpointException):  # of several ranks; the last line tells
        said = said.splitlines()[-1]
    if re.search("No space left|File too large|inline_container|while serializing", said):  # of writers
        return (f"is the disk of --out full? ({said}) Make room, then go on, a training run with "
                "--resume auto")
    if isinstance(error, (ValueError, OSError, SafetensorError, dcp.api.CheckpointException)):
        return said
    return None

def first_to_fail():
    """Is this the first of the ranks that torchrun started on this node? Their error files are side by
    side, and so is a file that only the first can make."""
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    try:
        if report:
            (Path(report).parents[1] / "said").touch(exist_ok=False)
        return True
    except FileExistsError:
        return False

def main(arguments):
    if LOST:
        sys.exit(f"mtp.py: error: {LOST}")
    try:
        function, cfg = parse(arguments)
        function(cfg)
        return 0
    except KeyboardInterrupt:
        return 130
    except (Exception, dcp.api.CheckpointException) as error:
        get_error_handler().record_exception(error)  # torchrun's summary quotes it
        line = explain(error)
        if line is None:
            raise
        if first_to_fail():
            tqdm.write(f"mtp.py: error: {line}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
