"""mtp.py - train multi-token-prediction (MTP) drafters exactly as serving engines run them.

An MTP draft is one decoder layer that proposes the next few tokens of a frozen target model. One step, for all rows t:

      x[t+1+k] -> embed* -> enorm -.
                                   cat -> eh_proj -> z -> + attention -> + MoE -> r -> final norm -> n -> lm_head*
      g[t]     ---------->  hnorm -'                      GQA, QK-norm,   sigmoid                     |     |
        ^                                                 RoPE at t+k     router                      |   logits of
        |                                                                                             |   x[t+2+k]
        '--- step 0: h[t], the target's last hidden state;  step k: n (or r) of step k-1 <------------'
                                                                                    * the target's, frozen
Training is test-time training (TTT): K such steps in a row, each fed with the output of the one before, the keys and
values of all steps kept, so that what is trained is what is later served, token by token.

      torchrun mtp.py                                             demo on a CPU: builds a small target, trains, evaluates
      torchrun mtp.py --target DIR --data F.jsonl --backend fa    one GPU, a GLM-4.x or Hunyuan 3 checkpoint
      torchrun --nproc-per-node 8 mtp.py --backend usp ...        one long sequence split over 8 GPUs
      python mtp.py eval --draft DIR                              acceptance on held-out text
      python mtp.py generate --draft DIR --prompt TEXT            lossless speculative decoding

Row t is the root of its own draft chain. What step k = 0..K-1 does in row t (h_t has seen x_0..x_t):

      | embeds    | hidden in      | RoPE position | predicts  | teacher                     | keys it sees
      | x_{t+1+k} | h_t or d_t^k-1 | t + k         | x_{t+2+k} | softmax(lm_head h_{t+1+k})  | step 0: rows <= t;
      |           |                |               |           |                             | steps 1..k: row t only

Glossary, code name = symbol: B batch, T tokens, C hidden_size, V vocab_size, H query heads, G key/value heads, D head_dim,
E n_routed_experts, A num_experts_per_tok, F moe_intermediate_size, K ttt_length, P ranks of a sequence group. Attention
tensors are (B, T, H, D) throughout. "fp32" means at least fp32: a float64 model is float64 everywhere.

The method is the MTP drafter of AngelSpec (Tencent, 2026); recycled-hidden training goes back to EAGLE, sequence exchange
to DeepSpeed Ulysses. This file is an independent implementation.
"""
from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


# ---- Config -----------------------------------------------------------------------------------------------------------

UNFIT = {"deepseek_v3": "MLA attention", "deepseek_v32": "MLA attention", "glm4_moe_lite": "MLA attention",
         "qwen3_next": "a softmax router and gated attention", "mimo": "a dense MTP layer",
         "bailing_hybrid": "linear attention"}


@dataclass
class MTPConfig:
    """Shape of a draft layer, in glm4_moe's spelling for every family. `from_hf` reads a target's config.json."""
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
        rotary = int(self.head_dim * self.partial_rotary_factor)
        for bad, what in ((H % G, f"num_attention_heads {H} must be a multiple of num_key_value_heads {G}"),
                          (not 1 <= A <= E, f"num_experts_per_tok {A} must lie in 1..n_routed_experts ({E})"),
                          (E % self.n_group, f"n_routed_experts {E} must be a multiple of n_group {self.n_group}"),
                          (self.n_group > 1 and E // self.n_group < 2, "a router group needs two experts or more"),
                          (A > E // self.n_group * self.topk_group,
                           f"topk_group {self.topk_group} leaves fewer than num_experts_per_tok {A} experts"),
                          (rotary % 2 or rotary < 2, f"RoPE turns {rotary} of {self.head_dim} dims: must be even")):
            if bad:
                raise ValueError(f"MTPConfig: {what}")

    @classmethod
    def from_hf(cls, config, names=None):
        """Read a target's config.json (a dict) of family glm4_moe or hy_v3.

        `names`: names of the checkpoint's tensors, where known: they decide whether a hy_v3 layer has QK-norm when
        its config does not say. Raises ValueError for a family or RoPE type that this layer cannot express."""
        family = config.get("model_type")
        if family not in ("glm4_moe", "hy_v3"):
            raise ValueError(f"model_type {family!r} has no MTP layer of this shape"
                             + (f" (it has {UNFIT[family]})" if family in UNFIT else "")
                             + "; supported: glm4_moe, hy_v3")
        if config.get("hidden_act", "silu") != "silu" or config.get("mlp_bias"):
            raise ValueError(f"experts must be silu(gate) * up without bias, the config has hidden_act "
                             f"{config.get('hidden_act')!r}, mlp_bias {config.get('mlp_bias')!r}")
        same = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "num_experts_per_tok",
                "rms_norm_eps", "initializer_range", "max_position_embeddings", "model_type", "attention_bias")
        values = {name: config[name] for name in same if config.get(name) is not None}
        theta, rotary = read_rope(config)
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        values |= dict(head_dim=head_dim, rope_theta=theta)
        read = _from_glm4_moe if family == "glm4_moe" else _from_hy_v3
        values |= {name: value for name, value in read(config, rotary, names).items() if value is not None}
        missing = [f.name for f in fields(cls) if f.default is f.default_factory and f.name not in values]
        if missing:
            raise ValueError(f"the {family} config has no value for {', '.join(missing)}")
        return cls(**values)


def _from_glm4_moe(config, rotary, names):
    same = ("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "routed_scaling_factor",
            "norm_topk_prob", "n_group", "topk_group")
    return {name: config.get(name) for name in same} | dict(
        partial_rotary_factor=0.5 if rotary is None else rotary, use_qk_norm=bool(config.get("use_qk_norm", False)))


def _from_hy_v3(config, rotary, names):
    qk_norm = config.get("qk_norm")
    if qk_norm is None:  # transformers' HYV3Config has no such key and always norms; vLLM reads a missing one as False
        qk_norm = True if names is None else any(name.endswith("self_attn.q_norm.weight") for name in names)
        warnings.warn(f"hy_v3 config without qk_norm: taken as {qk_norm}"
                      + (", as transformers does" if names is None else ", by the checkpoint's q_norm tensors"))
    if config.get("route_norm") is None:
        warnings.warn("hy_v3 config without route_norm: taken as True, as transformers does")
    width = config.get("expert_hidden_dim") or config.get("moe_intermediate_size")
    return dict(n_routed_experts=config.get("num_experts"), n_shared_experts=config.get("num_shared_experts"),
                moe_intermediate_size=width, routed_scaling_factor=config.get("router_scaling_factor"),
                norm_topk_prob=config.get("route_norm", True), use_qk_norm=bool(qk_norm),
                partial_rotary_factor=1.0 if rotary is None else rotary)


def read_rope(config):
    """(rope_theta, partial_rotary_factor or None) from the top level or from rope_parameters / rope_scaling."""
    nested = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = nested.get("rope_type", nested.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope_type {kind!r} is not supported; only 'default' (plain RoPE) is")
    found = []
    for name in ("rope_theta", "partial_rotary_factor"):
        values = {float(place[name]) for place in (config, nested) if place.get(name) is not None}
        if len(values) > 1:
            raise ValueError(f"{name} has two values in the config: {sorted(values)}")
        found.append(values.pop() if values else None)
    if found[0] is None:
        raise ValueError("the config has no rope_theta, neither at the top level nor in rope_parameters")
    return found


# ---- Small operations -------------------------------------------------------------------------------------------------

def fp32(dtype):
    """At least float32: what norms, routers, softmaxes and sums run in."""
    return torch.promote_types(dtype, torch.float32)


def rope_tables(position_ids, config, dtype):
    """cos, sin (B, T, 1, rotary / 2) of RoPE for positions (B, T); angles at least fp32, then cast to `dtype`."""
    rotary = int(config.head_dim * config.partial_rotary_factor)
    exponent = torch.arange(0, rotary, 2, dtype=fp32(dtype), device=position_ids.device) / rotary
    angle = position_ids.to(fp32(dtype))[..., None, None] * (1.0 / config.rope_theta ** exponent)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def apply_rope(x, cos, sin):
    """Half-split rotation of the first 2 * cos.shape[-1] dims of x (B, T, H, D); the rest passes through."""
    half = cos.shape[-1]
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


class Documents:
    """Which rows of a batch belong together. doc_ids (B, T), any integers: a document is a maximal run of equal values;
    negative = padding. None = every row of the batch is one document.

    run (B, T) numbers the documents, -1 in padding; position_ids (B, T) counts from each document's start."""

    def __init__(self, doc_ids, batch, length, device):
        self.whole = doc_ids is None
        rows = torch.arange(length, device=device).expand(batch, length)
        if self.whole:
            self.run, self.position_ids = torch.zeros_like(rows), rows
            return
        first = torch.ones(batch, length, dtype=torch.bool, device=device)
        first[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
        self.run = first.cumsum(1).masked_fill(doc_ids < 0, -1)
        self.position_ids = rows - torch.where(first, rows, 0).cummax(1).values

    @cached_property
    def segments(self):
        """[(b, start, stop)] of all documents, for kernels that take one at a time (reads the tensor: CPU only)."""
        found = []
        for b, run in enumerate(self.run):
            _, sizes = torch.unique_consecutive(run, return_counts=True)
            stops = sizes.cumsum(0).tolist()
            found += [(b, start, stop) for start, stop in zip([0] + stops, stops) if run[start] >= 0]
        return found

    def visible(self):
        """(B, T, T) bool: may row i see the step-0 key of row j?"""
        T = self.run.shape[1]
        causal = torch.ones(T, T, dtype=torch.bool, device=self.run.device).tril()
        same = (self.run[:, :, None] == self.run[:, None, :]) & (self.run >= 0)[:, None, :]
        return causal if self.whole else causal & same

    @cached_property
    def block_mask(self):
        """FlexAttention's BlockMask. One head: the mask is the same for all of them."""
        from torch.nn.attention.flex_attention import create_block_mask
        run, (B, T) = self.run, self.run.shape

        def causal(b, h, i, j):
            return i >= j

        def document(b, h, i, j):
            return (i >= j) & (run[b, i] == run[b, j]) & (run[b, j] >= 0)

        return create_block_mask(causal if self.whole else document, None if self.whole else B, None, T, T,
                                 device=run.device, _compile=run.is_cuda)


# ---- Attention --------------------------------------------------------------------------------------------------------
#
# The mask of the TTT attention, rows t down, keys across (T = 4, step k = 2). A query of row t sees the step-0 keys of rows
# <= t of its document and, of each later step, only the key of its own row: its own chain.
#
#            step 0     step 1     step 2            Block 0 is ordinary causal attention, o_0 and lse_0. What steps
#         t: 0 1 2 3    0 1 2 3    0 1 2 3           1..k add is one score per row, s_j = scale * <q, k_j[t]>:
#         0  x . . .    x . . .    x . . .
#         1  x x . .    . x . .    . x . .               lse = logsumexp(lse_0, s_1, .., s_k)
#         2  x x x .    . . x .    . . x .               out = exp(lse_0 - lse) o_0 + sum_j exp(s_j - lse) v_j[t]
#         3  x x x x    . . . x    . . . x
#
# which is what a serving engine computes when it drafts k tokens after a verified prefix. Backward, with the MERGED out and
# lse and w_j = exp(s_j - lse): dv_j = w_j dO, ds_j = w_j <dO, v_j - out>, dq += scale ds_j k_j, dk_j = scale ds_j q, the last
# two summed over the query heads that share a key/value head. Block 0 likewise: its ordinary backward, given the merged out
# and lse, yields exact dq, dK_0, dV_0 (given its own out and lse it yields a wrong dq and dK_0 and a right dV_0).
#
# Every backend: attend(q, k, v, past_k, past_v, docs, group) -> (out, past_k, past_v). q (B, T, H, D), k and v (B, T, G, D) of
# this step; past_k, past_v lists of the steps before (this step's are appended in what is returned); out (B, T, H, D).
# Rows of padding see nothing in block 0: o_0 = 0, lse_0 = -inf.

def attend_sdpa(q, k, v, past_k, past_v, docs, group=None):
    """Dense masked scores over the step-0 keys, the diagonals of later steps appended. Memory grows with T * T."""
    past_k, past_v = past_k + [k], past_v + [v]
    B, T, H, D = q.shape
    grouped = q.view(B, T, k.shape[2], -1, D)  # (B, T, G, H/G, D)
    scores = torch.einsum("btgrd,bsgd->bgrts", grouped, past_k[0]).to(fp32(q.dtype)) * D ** -0.5
    hidden = ~docs.visible()
    scores = scores.masked_fill(hidden if hidden.dim() == 2 else hidden[:, None, None], -torch.inf)
    chain = [torch.einsum("btgrd,btgd->bgrt", grouped, key).to(scores.dtype)[..., None] * D ** -0.5
             for key in past_k[1:]]
    scores = torch.cat([scores, *chain], dim=-1)  # (B, G, H/G, T, T + k)
    empty = (scores == -torch.inf).all(-1, keepdim=True)  # softmax of nothing is nan: such rows give 0
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0).to(q.dtype)
    out = torch.einsum("bgrts,bsgd->btgrd", weights[..., :T], past_v[0])
    for j, value in enumerate(past_v[1:]):
        out = out + weights[..., T + j].permute(0, 3, 1, 2)[..., None] * value[:, :, :, None]
    return out.reshape(B, T, H, D), past_k, past_v


def merge_ref(o_0, lse_0, q, ks, vs, scale):
    """Merge block 0's attention with one key per row and later step; formula above.

    o_0, q (B, T, H, D); lse_0 (B, T, H) natural log, at least fp32; ks, vs lists of (B, T, G, D).
    Returns out (B, T, H, D) in q's dtype and lse (B, T, H)."""
    B, T, H, D = q.shape
    k, v = (torch.stack(x, dim=3).to(lse_0.dtype) for x in (ks, vs))  # (B, T, G, k, D)
    s = scale * (q.view(B, T, k.shape[2], -1, D).to(k.dtype) @ k.mT)  # (B, T, G, H/G, k)
    lse_0 = lse_0.view(s.shape[:-1])
    lse = torch.logsumexp(torch.cat([lse_0[..., None], s], -1), -1)
    out = (s - lse[..., None]).exp() @ v + (lse_0 - lse).exp()[..., None] * o_0.view(*s.shape[:-1], D).to(k.dtype)
    return out.to(q.dtype).view(B, T, H, D), lse.view(B, T, H)


def merge_backward_ref(dout, q, ks, vs, out, lse, scale, o_0=None, lse_0=None):
    """Backward of merge_ref: (dq, dks, dvs), dq being the part through s_j. Given o_0 and lse_0 also (do_0, dlse_0)."""
    B, T, H, D = q.shape
    k, v = (torch.stack(x, dim=3).to(lse.dtype) for x in (ks, vs))
    rows = (B, T, k.shape[2], -1, D)
    q32, dout32, out32 = (x.view(rows).to(lse.dtype) for x in (q, dout, out))
    w = (scale * (q32 @ k.mT) - lse.view(*q32.shape[:-1], 1)).exp()  # (B, T, G, H/G, k)
    delta = (dout32 * out32).sum(-1, keepdim=True)
    ds = scale * w * (dout32 @ v.mT - delta)
    dks, dvs = ((x.mT @ y).to(q.dtype).unbind(3) for x, y in ((ds, q32), (w, dout32)))
    grads = (ds @ k).to(q.dtype).view(B, T, H, D), list(dks), list(dvs)
    if o_0 is None:
        return grads
    w_0 = (lse_0 - lse).exp()
    dlse_0 = w_0 * ((dout32 * o_0.view(dout32.shape).to(lse.dtype)).sum(-1, keepdim=True) - delta).view(w_0.shape)
    return *grads, (w_0[..., None] * dout.to(lse.dtype)).to(q.dtype), dlse_0


merge, merge_backward = merge_ref, merge_backward_ref


def causal_block_cpu(q, k, v, scale):
    """o (B, T, H, D), lse (B, T, H) of causal attention. A private op, the only CPU attention that gives its lse."""
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, True, scale=scale)
    return o.transpose(1, 2), lse.transpose(1, 2)


def causal_block_cpu_backward(dout, q, k, v, out, lse, scale):
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(x.transpose(1, 2) for x in (dout, q, k, v, out, lse)), 0.0, True, scale=scale)
    return [x.transpose(1, 2) for x in grads]


class AttendCPU(torch.autograd.Function):
    """Block 0 and the merge as one function: the block's backward is given the merged out and lse, which makes it exact.
    The op has no document mask that is linear in T, so packed documents are one call each."""

    @staticmethod
    def forward(ctx, docs, scale, q, *kv):
        ks, vs = kv[:len(kv) // 2], kv[len(kv) // 2:]
        if docs.whole:
            out, lse = causal_block_cpu(q, ks[0], vs[0], scale)
        else:
            out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf, dtype=fp32(q.dtype))
            for b, i, j in docs.segments:
                at = slice(b, b + 1), slice(i, j)
                out[at], lse[at] = causal_block_cpu(q[at], ks[0][at], vs[0][at], scale)
        if len(ks) > 1:
            out, lse = merge(out.contiguous(), lse.contiguous(), q, ks[1:], vs[1:], scale)
        ctx.docs, ctx.scale = docs, scale
        ctx.save_for_backward(q, out, lse, *kv)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, out, lse, *kv = ctx.saved_tensors
        ks, vs, docs, scale = kv[:len(kv) // 2], kv[len(kv) // 2:], ctx.docs, ctx.scale
        dout = dout.contiguous()
        if docs.whole:
            dq, dk, dv = causal_block_cpu_backward(dout, q, ks[0], vs[0], out, lse, scale)
        else:
            dq, dk, dv = (torch.zeros_like(x) for x in (q, ks[0], vs[0]))
            for b, i, j in docs.segments:
                at = slice(b, b + 1), slice(i, j)
                dq[at], dk[at], dv[at] = causal_block_cpu_backward(
                    *(x[at] for x in (dout, q, ks[0], vs[0], out, lse)), scale)
        dks, dvs = [], []
        if len(ks) > 1:
            dq_chain, dks, dvs = merge_backward(dout, q, ks[1:], vs[1:], out, lse, scale)
            dq = dq + dq_chain
        return None, None, dq, dk, *dks, dv, *dvs


class Merge(torch.autograd.Function):
    """The merge outside a block whose own autograd takes a gradient for its lse (FlexAttention)."""

    @staticmethod
    def forward(ctx, scale, o_0, lse_0, q, *kv):
        out, lse = merge(o_0, lse_0, q, kv[:len(kv) // 2], kv[len(kv) // 2:], scale)
        ctx.scale = scale
        ctx.save_for_backward(o_0, lse_0, q, out, lse, *kv)
        return out

    @staticmethod
    def backward(ctx, dout):
        o_0, lse_0, q, out, lse, *kv = ctx.saved_tensors
        dq, dks, dvs, do_0, dlse_0 = merge_backward(dout.contiguous(), q, kv[:len(kv) // 2], kv[len(kv) // 2:],
                                                    out, lse, ctx.scale, o_0, lse_0)
        return None, do_0, dlse_0, dq, *dks, *dvs


@lru_cache(maxsize=None)
def compiled_flex_attention():
    from torch.nn.attention.flex_attention import flex_attention
    return torch.compile(flex_attention, dynamic=False)


def causal_block_flex(q, k, v, docs, scale):
    """o (B, T, H, D), lse (B, T, H) by FlexAttention: compiled on CUDA, where its autograd takes a gradient for lse."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention
    D = q.shape[-1]
    width = max(16, 1 << (D - 1).bit_length())  # compiled kernels take powers of two from 16; zeros change no score
    q, k, v = (F.pad(x, (0, width - D)).transpose(1, 2) for x in (q, k, v))
    attention = compiled_flex_attention() if q.is_cuda else flex_attention
    o, aux = attention(q, k, v, block_mask=docs.block_mask, scale=scale, enable_gqa=True,
                       return_aux=AuxRequest(lse=True))
    return o[..., :D].transpose(1, 2), aux.lse.transpose(1, 2)


def why_not_fa(device_type, dtype):
    """None where attend_fa runs, else the reason."""
    if device_type == "cpu":
        names = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")
        lost = [name for name in names if not hasattr(torch.ops.aten, name)]
        return f"torch {torch.__version__} has no aten::{lost[0]}" if lost else None
    if device_type != "cuda":
        return f"neither a CPU nor a CUDA device but {device_type}"
    if dtype == torch.float64:
        return "FlexAttention has no float64 kernels"
    try:
        from torch.nn.attention.flex_attention import AuxRequest  # noqa: F401
    except ImportError as error:
        return f"torch {torch.__version__} cannot return FlexAttention's lse ({error}); 2.11 or newer can"
    return None


def attend_fa(q, k, v, past_k, past_v, docs, group=None):
    """Block 0 through a flash kernel with its lse, later steps merged in. Memory linear in T."""
    reason = why_not_fa(q.device.type, q.dtype)
    if reason:
        raise RuntimeError(f"backend fa cannot run: {reason}. Use --backend sdpa.")
    past_k, past_v = past_k + [k], past_v + [v]
    scale = q.shape[-1] ** -0.5
    if q.device.type == "cpu":
        return AttendCPU.apply(docs, scale, q, *past_k, *past_v), past_k, past_v
    out, lse = causal_block_flex(q, past_k[0], past_v[0], docs, scale)
    if len(past_k) > 1:
        out = Merge.apply(scale, out.contiguous(), lse.contiguous(), q, *past_k[1:], *past_v[1:])
    return out, past_k, past_v


class AllToAll(torch.autograd.Function):
    """Block i of x (P, ...) goes to rank i of the group; its own backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad.contiguous(), ctx.group), None


def attend_usp(q, k, v, past_k, past_v, docs, group=None):
    """attend_fa between two all-to-alls (Ulysses): tokens are sharded outside, heads inside; P must divide H.

    q (B, T/P, H, D), k and v (B, T/P, G, D); docs describe the whole row. The cache stays sharded by heads. Each of K's and V's
    heads is repeated P / gcd(G, P) times so that every rank gets the ones its query heads read; autograd sums the copies."""
    P = dist.get_world_size(group)
    B, T, H, D = q.shape
    if H % P:
        raise ValueError(f"backend usp: {P} ranks do not divide {H} attention heads; use a group of "
                         f"{math.gcd(H, P)} ranks")
    copies = P // math.gcd(k.shape[2], P)
    k, v = (x.repeat_interleave(copies, dim=2) for x in (k, v))
    heads = torch.cat([x.reshape(B, T, P, -1, D) for x in (q, k, v)], dim=3)  # (B, T/P, P, (H + 2Gf) / P, D)
    heads = AllToAll.apply(heads.permute(2, 0, 1, 3, 4).contiguous(), group)  # (P, B, T/P, ...), sharded by heads
    heads = heads.transpose(0, 1).reshape(B, P * T, -1, D)
    sizes = [H // P, k.shape[2] // P, v.shape[2] // P]
    q, k, v = (x.contiguous() for x in heads.split(sizes, dim=2))
    out, past_k, past_v = attend_fa(q, k, v, past_k, past_v, docs)
    out = out.reshape(B, P, T, H // P, D).transpose(0, 1).contiguous()
    return AllToAll.apply(out, group).permute(1, 2, 0, 3, 4).reshape(B, T, H, D), past_k, past_v


BACKENDS = {"sdpa": attend_sdpa, "fa": attend_fa, "usp": attend_usp}


def attend_decode(q, k, v, past_k, past_v, docs=None, group=None):
    """Serving: the T new rows attend causally to one growing cache (past_k, past_v: lists of one tensor, or empty)."""
    k, v = (torch.cat([*past, new], dim=1) for past, new in ((past_k, k), (past_v, v)))
    T, S = q.shape[1], k.shape[1]
    mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2), [k], [v]


class Attention(nn.Module):
    """Grouped-query attention; RMSNorm of each q and k head BEFORE RoPE where the config has use_qk_norm."""

    def __init__(self, config):
        super().__init__()
        C, H, G, D = (config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.config = config
        self.q_proj = nn.Linear(C, H * D, bias=config.attention_bias)
        self.k_proj = nn.Linear(C, G * D, bias=config.attention_bias)
        self.v_proj = nn.Linear(C, G * D, bias=config.attention_bias)
        self.o_proj = nn.Linear(H * D, C, bias=False)
        if config.use_qk_norm:
            self.q_norm = nn.RMSNorm(D, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(D, eps=config.rms_norm_eps)

    def forward(self, x, position_ids, past_k, past_v, docs, attend, group=None):
        B, T, _ = x.shape
        q, k, v = (proj(x).view(B, T, -1, self.config.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.config.use_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = rope_tables(position_ids, self.config, x.dtype)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        out, past_k, past_v = attend(q, k, v, past_k, past_v, docs, group)
        return self.o_proj(out.reshape(B, T, -1)), past_k, past_v


# ---- Mixture of experts -----------------------------------------------------------------------------------------------

class Router(nn.Module):
    """Sigmoid router, always at least fp32: .to(bfloat16) of the model leaves its weight and bias in fp32.

    The bias steers the choice only and gets no gradient: `balance_experts` moves it."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        dtype = fp32(torch.get_default_dtype())
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
    """Reference: one expert after another. y[n] = sum_a weights[n, a] * down[e] (silu(gate[e] x[n]) * up[e] x[n]).

    x (N, C); chosen (N, A) int64; weights (N, A); gate_up_proj (E, 2F, C), gate rows first; down_proj (E, C, F)."""
    y = torch.zeros_like(x, dtype=weights.dtype)
    for e in range(len(gate_up_proj)):
        row, slot = (chosen == e).nonzero(as_tuple=True)
        gate, up = F.linear(x[row], gate_up_proj[e]).chunk(2, dim=-1)
        out = F.linear(F.silu(gate) * up, down_proj[e])
        y = y.index_add(0, row, out.to(y.dtype) * weights[row, slot, None])
    return y.to(x.dtype)


def sort_by_expert(chosen, n_experts):
    """order (N*A,): the (row, slot) pairs, flattened, in stable order of their expert; ends (E,): where each expert's stop."""
    flat = chosen.flatten()
    ends = F.one_hot(flat, n_experts).sum(0).cumsum(0) if flat.is_cuda else flat.bincount(minlength=n_experts).cumsum(0)
    return flat.argsort(stable=True), ends


class ExpertsCPU(torch.autograd.Function):
    """Pairs sorted by expert, each expert's rows worked on while they are in the cache. Saves x and gate_up's output; the
    gradient of a routing weight is <act, dO W_down>, so no expert's output is kept. No [N * A, C] tensor exists."""

    @staticmethod
    def forward(ctx, x, chosen, weights, gate_up_proj, down_proj):
        order, ends = sort_by_expert(chosen, len(gate_up_proj))
        rows, ends = order // chosen.shape[1], ends.tolist()
        hidden = x.new_empty(len(order), gate_up_proj.shape[1])
        y = torch.zeros_like(x, dtype=weights.dtype)
        scale = weights.flatten()[order, None]
        for e, (i, j) in enumerate(zip([0] + ends, ends)):
            if i < j:
                torch.mm(x[rows[i:j]], gate_up_proj[e].mT, out=hidden[i:j])
                gate, up = hidden[i:j].chunk(2, dim=-1)
                act = (F.silu(gate) * up).mul_(scale[i:j])
                y.index_add_(0, rows[i:j], (act @ down_proj[e].mT).to(y.dtype))  # a row occurs once per expert
        ctx.ends = ends
        ctx.save_for_backward(x, weights, gate_up_proj, down_proj, order, hidden)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, weights, gate_up_proj, down_proj, order, hidden = ctx.saved_tensors
        rows, scale = order // weights.shape[1], weights.flatten()[order, None]
        dx, dscale = torch.zeros_like(x, dtype=weights.dtype), torch.empty_like(scale)
        dgate_up, ddown = torch.zeros_like(gate_up_proj), torch.zeros_like(down_proj)  # an unused expert's is 0
        for e, (i, j) in enumerate(zip([0] + ctx.ends, ctx.ends)):
            if i == j:
                continue
            dout = dy[rows[i:j]]
            dact = (dout @ down_proj[e]).to(scale.dtype)
            gate, up = hidden[i:j].to(scale.dtype).chunk(2, dim=-1)
            sig = gate.sigmoid()
            silu = gate * sig
            act = silu * up
            torch.sum(act * dact, dim=-1, keepdim=True, out=dscale[i:j])
            torch.mm(dout.mT, (act * scale[i:j]).to(x.dtype), out=ddown[e])
            dact *= scale[i:j]
            dgate = dact * up * (sig + silu * (1 - sig))
            dhidden = torch.cat([dgate, dact * silu], dim=-1).to(x.dtype)
            torch.mm(dhidden.mT, x[rows[i:j]], out=dgate_up[e])
            dx.index_add_(0, rows[i:j], (dhidden @ gate_up_proj[e]).to(dx.dtype))
        dweights = torch.empty_like(weights).view(-1).index_copy_(0, order, dscale[:, 0]).view(weights.shape)
        return dx.to(x.dtype), None, dweights, dgate_up, ddown


def experts_grouped(x, chosen, weights, gate_up_proj, down_proj):
    """experts_ref by two grouped matmuls over pairs sorted by expert: no host synchronisation, made for CUDA."""
    order, ends = sort_by_expert(chosen, len(gate_up_proj))
    ends = ends.to(torch.int32)
    gate, up = F.grouped_mm(x[order // chosen.shape[1]], gate_up_proj.mT, offs=ends).chunk(2, dim=-1)
    act = F.silu(gate) * up * weights.flatten()[order, None].to(x.dtype)
    out = F.grouped_mm(act, down_proj.mT, offs=ends)  # (N * A, C), sorted by expert
    back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=x.device))
    return out[back].view(*chosen.shape, -1).to(weights.dtype).sum(1).to(x.dtype)


def experts(x, chosen, weights, gate_up_proj, down_proj):
    if x.device.type == "cpu":
        return ExpertsCPU.apply(x, chosen, weights, gate_up_proj, down_proj)
    return experts_grouped(x, chosen, weights, gate_up_proj, down_proj)


class Experts(nn.Module):
    """The routed experts' weights, fused."""

    def __init__(self, config):
        super().__init__()
        E, C, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * width, C))
        self.down_proj = nn.Parameter(torch.empty(E, C, width))


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
    def __init__(self, config):
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        width = config.n_shared_experts * config.moe_intermediate_size
        self.shared_experts = MLP(config.hidden_size, width) if width else None

    def forward(self, x):
        """x (B, T, C) -> y (B, T, C), chosen experts (B, T, A)."""
        rows = x.flatten(0, 1)
        weights, chosen = self.gate(rows)
        y = experts(rows, chosen, weights, self.experts.gate_up_proj, self.experts.down_proj).view(x.shape)
        return y if self.shared_experts is None else y + self.shared_experts(x), chosen.view(*x.shape[:2], -1)


@torch.no_grad()
def balance_experts(bias, load, rate):
    """Auxiliary-loss-free balancing: bias += rate * sign(mean load - load), then re-centred to mean zero. In place."""
    load = load.to(bias.dtype)
    bias += rate * (load.mean() - load).sign()
    bias -= bias.mean()


# ---- The draft --------------------------------------------------------------------------------------------------------

class DecoderLayer(nn.Module):
    """Pre-norm decoder layer: attention, then a MoE (or, with `dense_width`, a plain MLP)."""

    def __init__(self, config, dense_width=None):
        super().__init__()
        self.config = config
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, dense_width) if dense_width else MoE(config)

    def forward(self, z, position_ids, past_k, past_v, docs, attend=attend_sdpa, group=None):
        """z (B, T, C) -> r (B, T, C), past_k, past_v, chosen experts (B, T, A) or None. No final norm."""
        out, past_k, past_v = self.self_attn(self.input_layernorm(z), position_ids, past_k, past_v, docs, attend, group)
        u = z + out
        y = self.mlp(self.post_attention_layernorm(u))
        y, chosen = y if isinstance(y, tuple) else (y, None)
        return u + y, past_k, past_v, chosen


class MTP(DecoderLayer):
    """The draft: fusion of token embedding and hidden state, one decoder layer, final norm. Embedding and lm_head are the
    target's: `set_target` keeps them by reference, frozen, outside parameters(), buffers(), state_dict() and .to()."""

    def __init__(self, config):
        super().__init__(config)
        C = config.hidden_size
        self.enorm = nn.RMSNorm(C, eps=config.rms_norm_eps)
        self.hnorm = nn.RMSNorm(C, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * C, C, bias=False)
        self.shared_head = nn.ModuleDict({"norm": nn.RMSNorm(C, eps=config.rms_norm_eps)})
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
        """The target's embedding and lm_head, both (V, C), on this model's device, any float dtype. Frozen, not copied."""
        shape, device = (self.config.vocab_size, self.config.hidden_size), self.eh_proj.weight.device
        kept = []
        for name, tensor in (("embed_weight", embed_weight), ("lm_head_weight", lm_head_weight)):
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected (vocab_size, hidden_size) = {shape}")
            if tensor.device != device:
                raise ValueError(f"{name} is on {tensor.device}, the draft on {device}; move one of them first")
            kept.append(tensor.requires_grad_(False) if tensor.is_leaf else tensor.detach())
        object.__setattr__(self, "_target", tuple(kept))  # past nn.Module's registry

    def _target_weight(self, index):
        if not hasattr(self, "_target"):
            raise RuntimeError("the draft has no target yet: call model.set_target(embed_weight, lm_head_weight)")
        return self._target[index]

    @property
    def embed_weight(self):
        return self._target_weight(0)

    @property
    def lm_head_weight(self):
        return self._target_weight(1)

    def embed(self, input_ids):
        return F.embedding(input_ids, self.embed_weight).to(self.eh_proj.weight.dtype)

    def logits(self, n):
        return F.linear(n.to(self.lm_head_weight.dtype), self.lm_head_weight)

    def forward(self, embeds, hidden, position_ids, past_k, past_v, docs, attend=attend_sdpa, group=None):
        """One step. embeds, hidden (B, T, C); position_ids (B, T).

        Returns n = final_norm(r) and r (B, T, C), past_k, past_v with this step's appended, chosen experts (B, T, A)."""
        z = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(hidden)], dim=-1))  # embedding FIRST
        r, past_k, past_v, chosen = super().forward(z, position_ids, past_k, past_v, docs, attend, group)
        return self.shared_head["norm"](r), r, past_k, past_v, chosen


# ---- Loss and the TTT loop --------------------------------------------------------------------------------------------

def shifted(x, by):
    """x[:, by:] at x's own length, zeros behind."""
    return F.pad(x[:, by:], (0, min(by, x.shape[1])))


def valid_rows(loss_mask, docs, ttt_length):
    """(K, B, T) bool: row t counts at step k if token t+2+k exists, lies in row t's document and is not masked."""
    mask = docs.run >= 0 if loss_mask is None else (loss_mask != 0) & (docs.run >= 0)
    return torch.stack([shifted(mask, k + 2) & (shifted(docs.run, k + 2) == docs.run) for k in range(ttt_length)])


def valid_counts(loss_mask, doc_ids, ttt_length, *, batch, length):
    """[K] int64: how many rows of a batch count at each step. Sum these over micro-batches and data-parallel ranks and pass
    the result as ttt_loss(counts=...): then no split of a batch changes its gradient."""
    given = loss_mask if doc_ids is None else doc_ids
    device = given.device if given is not None else torch.device("cpu")
    return valid_rows(loss_mask, Documents(doc_ids, batch, length, device), ttt_length).sum((1, 2))


def chunk_rows(vocab_size, device):
    """Rows of logits held at a time: three fp32 buffers of about 128 MiB on a CPU, 512 MiB on a GPU."""
    budget, most = (2 ** 25, 256) if device.type == "cpu" else (2 ** 27, 2048)
    return max(16, min(most, budget // vocab_size))


class ChunkedLoss(torch.autograd.Function):
    """sum_k coeff_k * sum over counted rows of (ce_weight * CE + kl_weight * KL), without ever holding [T, V].

    lm_head is frozen, so d loss / d n is formed in the forward pass, chunk of rows by chunk of rows:
        d loss / d logits = (ce + kl) q - ce onehot(argmax p) - kl p,      q, p = softmax of draft and teacher,
    and only d loss / d n [B, T, C] is kept. A teacher row serves all K steps (row t, step k reads teacher row t + 1 + k): its
    logits are computed once, and the K - 1 rows that two chunks share are carried over."""

    @staticmethod
    def forward(ctx, lm_head, hidden, valid, coeff, ce_weight, kl_weight, *ns):
        """lm_head (V, C); hidden (B, T + K, C) the target's; valid (K, B, T); coeff [K]; ns: K x (B, T, C).

        Returns loss and, without gradient, sums over counted rows [4, K] float64: CE, KL, right, prefix hits."""
        (B, T, C), K, V = ns[0].shape, len(ns), len(lm_head)
        R = min(T, chunk_rows(V, lm_head.device))
        p = torch.empty(R + K - 1, V, dtype=fp32(lm_head.dtype), device=lm_head.device)
        label, plogp = torch.empty(len(p), dtype=torch.long, device=p.device), p.new_empty(len(p))
        grads = [torch.zeros_like(n) for n in ns] if any(ctx.needs_input_grad) else None
        sums = torch.zeros(4, K, dtype=torch.float64, device=p.device)
        starts = range(0, T, R)
        busy = torch.stack([valid[:, :, t:t + R].any(2).any(0) for t in starts], 1).tolist()  # one synchronisation
        for b in range(B):
            have = 0  # teacher rows at the front of p that the chunk before left
            for t, work in zip(starts, busy[b]):
                rows = min(R, T - t)
                if not work:
                    have = 0
                    continue
                if have:
                    for x in (p, label, plogp):
                        x[:have] = x[R:R + have].clone()
                teacher_rows(hidden[b, t + 1 + have:t + rows + K], lm_head, p[have:], label[have:], plogp[have:])
                have, right = K - 1, torch.ones(rows, dtype=torch.bool, device=p.device)
                for k, n in enumerate(ns):
                    at, here = slice(k, k + rows), valid[k, b, t:t + rows]
                    ce, kl, hit, dn = draft_rows(n[b, t:t + rows], lm_head, p[at], label[at], plogp[at],
                                                 ce_weight, kl_weight, grads is not None)
                    right = right & hit
                    sums[:, k] += torch.stack([x.double().masked_fill(~here, 0).sum() for x in (ce, kl, hit, right)])
                    if grads is not None:
                        grads[k][b, t:t + rows] = (dn * coeff[k]).masked_fill_(~here[:, None], 0)
        ctx.grads = grads
        loss = ((ce_weight * sums[0] + kl_weight * sums[1]) * coeff.double()).sum().to(fp32(ns[0].dtype))
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    def backward(ctx, dloss, _):
        return *[None] * 6, *(dloss.to(grad.dtype) * grad for grad in ctx.grads)


def teacher_rows(hidden, lm_head, p, label, plogp):
    """Fill p (>= rows, V) with the teacher's softmax, label with its argmax, plogp with sum p log p; hidden (rows, C)."""
    logits = F.linear(hidden.to(lm_head.dtype), lm_head)
    rows = len(logits)
    top, label[:rows] = logits.max(dim=-1)  # ties: the lowest index, as torch.argmax
    p = torch.softmax(logits, dim=-1, dtype=p.dtype, out=p[:rows])
    logits = logits.to(p.dtype)
    lse = top.to(p.dtype) - p.gather(1, label[:rows, None])[:, 0].log()
    plogp[:rows] = torch.einsum("rv,rv->r", p, logits) - lse


def draft_rows(n, lm_head, p, label, plogp, ce_weight, kl_weight, want_grad):
    """Of rows n (rows, C): CE, KL, whether the argmax is the teacher's, and d (ce * CE + kl * KL) / d n or None."""
    logits = F.linear(n.to(lm_head.dtype), lm_head).to(p.dtype)
    top, best = logits.max(dim=-1)
    dot, at_label = torch.einsum("rv,rv->r", p, logits), logits.gather(1, label[:, None])[:, 0]
    q = torch.softmax(logits, dim=-1, out=logits)
    lse = top - q.gather(1, best[:, None])[:, 0].log()
    ce, kl, dn = lse - at_label, plogp - dot + lse, None
    if want_grad:
        dlogits = q.mul_(ce_weight + kl_weight).sub_(p, alpha=kl_weight)
        dlogits.scatter_add_(1, label[:, None], torch.full_like(label, -ce_weight, dtype=p.dtype)[:, None])
        dn = (dlogits.to(lm_head.dtype) @ lm_head).to(n.dtype)
    return ce, kl, best == label, dn


class TTTOutput(NamedTuple):
    """ttt_loss's result. All but loss [K] and of this call alone (global over `group`)."""
    loss: torch.Tensor         # scalar: sum_k w_k (ce_weight * CE_k + kl_weight * KL_k) / counts; under usp this rank's share
    ce: torch.Tensor           # mean cross-entropy against the teacher's argmax, 0 where no row counts
    kl: torch.Tensor           # mean KL(teacher || draft)
    acc: torch.Tensor          # share of counted rows whose argmax is the teacher's
    count: torch.Tensor        # counted rows
    prefix_hits: torch.Tensor  # counted rows right at this step and all before; 1 + sum_k prefix_hits / count = accept_len
    expert_load: torch.Tensor  # [E] rows routed to each expert, all steps, padding and foreign tokens excluded


def ttt_loss(model, input_ids, hidden_states, loss_mask=None, doc_ids=None, *, ttt_length=3, backend="sdpa", group=None,
             ce_weight=1.0, kl_weight=1.0, decay=0.8, recycle="post", zero_first_embedding=False, counts=None):
    """Loss of K = ttt_length draft steps from every row, as served.

    input_ids (B, T); hidden_states (B, T, C): the target's after its final norm; loss_mask (B, T), of the PREDICTED token, any
    dtype, nonzero counts; doc_ids (B, T), see Documents. counts [K]: what the sums are divided by, default this call's own.
    recycle: what feeds the next step, "post" (n) or "pre" (r); zero_first_embedding: as vLLM, zero it at position 0.
    backend "usp": every rank of `group` passes the whole row; the loss is the rank's local sum over the global count, so that
    gradients SUMMED over ranks are those of the whole row. Returns TTTOutput; raises ValueError for shapes that do not fit."""
    check_batch(model, input_ids, hidden_states, loss_mask, doc_ids, ttt_length, backend, group, recycle)
    (B, T), K = input_ids.shape, ttt_length
    P, rank = (dist.get_world_size(group), dist.get_rank(group)) if backend == "usp" else (1, 0)
    if T % P:  # right-pad to equal shards
        doc_ids = torch.zeros_like(input_ids) if doc_ids is None else doc_ids
        doc_ids = F.pad(doc_ids, (0, -T % P), value=-1)
        loss_mask = None if loss_mask is None else F.pad(loss_mask, (0, -T % P))
    length = -(-T // P)
    lo, hi = rank * length, (rank + 1) * length
    docs = Documents(doc_ids, B, P * length, input_ids.device)
    valid = valid_rows(loss_mask, docs, K)
    count = valid.sum((1, 2))
    ids = halo(input_ids, lo, hi + K)      # (B, length + K)
    hidden = halo(hidden_states, lo, hi + K)
    position_ids, run = docs.position_ids[:, lo:hi], docs.run

    g, past_k, past_v, ns, load = hidden[:, :length].to(model.eh_proj.weight.dtype), [], [], [], 0
    for k in range(K):
        embeds = model.embed(ids[:, k + 1:k + 1 + length])
        if zero_first_embedding:
            embeds = embeds.masked_fill((position_ids + k == 0)[..., None], 0)
        n, r, past_k, past_v, chosen = model(embeds, g, position_ids + k, past_k, past_v, docs, BACKENDS[backend], group)
        ns.append(n)
        g = n if recycle == "post" else r
        own = (shifted(run, k + 1) == run) & (run >= 0)
        load = load + expert_load(chosen, own[:, lo:hi], model.config.n_routed_experts)
    weight = decay ** torch.arange(K, dtype=torch.float64, device=ids.device)
    divisor = (count if counts is None else counts.to(ids.device)).double()
    coeff = weight / weight.sum() / divisor.clamp(min=1)
    loss, sums = ChunkedLoss.apply(model.lm_head_weight, hidden, valid[:, :, lo:hi], coeff.to(fp32(n.dtype)),
                                   ce_weight, kl_weight, *ns)
    if P > 1:
        dist.all_reduce(sums, group=group)
        dist.all_reduce(load, group=group)
    ce, kl, acc = sums[:3] / count.clamp(min=1)
    return TTTOutput(loss, ce, kl, acc, count, sums[3].round().long(), load)


def check_batch(model, input_ids, hidden_states, loss_mask, doc_ids, ttt_length, backend, group, recycle):
    """Raise ValueError naming what was passed and what ttt_loss expects."""
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}, expected (B, T)")
    shape = tuple(input_ids.shape)
    for name, tensor, expected in (("hidden_states", hidden_states, (*shape, model.config.hidden_size)),
                                   ("loss_mask", loss_mask, shape), ("doc_ids", doc_ids, shape)):
        if tensor is not None and tuple(tensor.shape) != expected:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {expected}")
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not one of {', '.join(BACKENDS)}")
    if group is not None and backend != "usp":
        raise ValueError(f"a process group was given to backend {backend!r}; only usp splits a row over ranks")
    if backend == "usp" and not dist.is_initialized():
        raise ValueError("backend usp needs torch.distributed: start with torchrun, or call init_process_group")
    if recycle not in ("post", "pre"):
        raise ValueError(f"recycle {recycle!r} is neither 'post' nor 'pre'")
    if ttt_length < 1:
        raise ValueError(f"ttt_length {ttt_length} must be at least 1")


def halo(x, start, stop):
    """A copy of x[:, start:stop] (B, stop - start, ...), zeros where x has ended."""
    part = x[:, start:stop]
    out = x.new_zeros(x.shape[0], stop - start, *x.shape[2:])
    out[:, :part.shape[1]] = part
    return out


def expert_load(chosen, counted, n_experts):
    """[E] int64: how often each expert was chosen (B, T, A) in counted rows (B, T)."""
    load = torch.zeros(n_experts, dtype=torch.long, device=chosen.device)
    return load.scatter_add_(0, chosen.flatten(), counted[..., None].expand(chosen.shape).flatten().long())


# ---- Everything above needs only torch and may be copied as is. Below: checkpoints, data, distributed, training. -------
