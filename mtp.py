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
      python mtp.py generate-data --target DIR --prompts F --out O    the target's own answers, to train on

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
from dataclasses import asdict, dataclass, field, fields, replace
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

        Returns loss and, without gradient, sums [2, K] float64 of CE and KL over counted rows, and hits (K, B, T) bool: is the
        draft's argmax the teacher's? False in chunks where no row counts."""
        (B, T, C), K, V = ns[0].shape, len(ns), len(lm_head)
        R = min(T, chunk_rows(V, lm_head.device))
        p = torch.empty(R + K - 1, V, dtype=fp32(lm_head.dtype), device=lm_head.device)
        label, plogp = torch.empty(len(p), dtype=torch.long, device=p.device), p.new_empty(len(p))
        grads = [torch.zeros_like(n) for n in ns] if any(ctx.needs_input_grad) else None
        sums = torch.zeros(2, K, dtype=torch.float64, device=p.device)
        hits = torch.zeros(K, B, T, dtype=torch.bool, device=p.device)
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
                have = K - 1
                for k, n in enumerate(ns):
                    at, here = slice(k, k + rows), valid[k, b, t:t + rows]
                    ce, kl, hits[k, b, t:t + rows], dn = draft_rows(n[b, t:t + rows], lm_head, p[at], label[at], plogp[at],
                                                 ce_weight, kl_weight, grads is not None)
                    sums[:, k] += torch.stack([x.double().masked_fill(~here, 0).sum() for x in (ce, kl)])
                    if grads is not None:
                        grads[k][b, t:t + rows] = (dn * coeff[k]).masked_fill_(~here[:, None], 0)
        ctx.grads = grads
        loss = ((ce_weight * sums[0] + kl_weight * sums[1]) * coeff.double()).sum().to(fp32(ns[0].dtype))
        ctx.mark_non_differentiable(sums, hits)
        return loss, sums, hits

    @staticmethod
    def backward(ctx, dloss, *_):
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
    hits: torch.Tensor         # (K, B, T) bool: the draft's argmax is the teacher's (only meaningful where it exists)


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
    loss, sums, hits = ChunkedLoss.apply(model.lm_head_weight, hidden, valid[:, :, lo:hi], coeff.to(fp32(n.dtype)),
                                   ce_weight, kl_weight, *ns)
    if P > 1:
        dist.all_reduce(sums, group=group)
        dist.all_reduce(load, group=group)
        shards = [torch.empty_like(hits, dtype=torch.uint8) for _ in range(P)]
        dist.all_gather(shards, hits.to(torch.uint8), group=group)
        hits = torch.cat(shards, dim=2).bool()
    right, prefix = (hits & valid).sum((1, 2)), (hits.cumprod(0).bool() & valid).sum((1, 2))
    ce, kl, acc = torch.stack([*sums, right.double()]) / count.clamp(min=1)
    return TTTOutput(loss, ce, kl, acc, count, prefix, load, hits[:, :, :T])


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

import argparse
import contextlib
import hashlib
import inspect
import json
import os
import shutil
import signal
import sys
import time
from bisect import bisect_left, insort
from pathlib import Path


# ---- Checkpoint layouts and initialisation ---------------------------------------------------------------------------

# The draft's own names are glm4_moe's. What other families call the same tensors, in their layer N:
LAYOUTS = {
    "glm4_moe": {},
    "hy_v3": {"shared_head.norm.": "final_layernorm.", "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
              "mlp.gate.weight": "mlp.router.gate.weight", "mlp.shared_experts.": "mlp.shared_mlp."},
    "bailing_moe_v2": {"shared_head.norm.": "final_layernorm.", "self_attn.o_proj": "attention.dense",
                       "self_attn.q_norm": "attention.query_layernorm",
                       "self_attn.k_norm": "attention.key_layernorm", "self_attn.": "attention.",
                       "e_score_correction_bias": "expert_bias"},
}
SCALES = (".weight_scale_inv", ".weight_scale")


def native_views(state, family, prefix):
    """(checkpoint name, view into the draft's state_dict `state`) of each tensor of a layer, experts unfused: copying into
    the views reads a checkpoint, copying out of them writes one."""
    for name, tensor in state.items():
        if name.endswith("mlp.experts.gate_up_proj") or name.endswith("mlp.experts.down_proj"):
            for e, matrix in enumerate(tensor):
                stem = f"{prefix}{name[:name.rindex('.')]}.{e}."
                if name.endswith("down_proj"):
                    yield stem + "down_proj.weight", matrix
                else:
                    yield from zip((stem + "gate_proj.weight", stem + "up_proj.weight"), matrix.chunk(2))
            continue
        for ours, theirs in LAYOUTS[family].items():
            name = name.replace(ours, theirs)
        yield prefix + name, tensor


class Checkpoint:
    """Tensors of a Hugging Face directory, read one at a time from safetensors (never from pickles).

    weights (float8 or int8) with .weight_scale_inv (blocks) or .weight_scale (rows or scalar) come de-quantised, fp32."""

    def __init__(self, path):
        self.path, index = Path(path), Path(path) / "model.safetensors.index.json"
        if index.exists():
            self.files = json.loads(index.read_text())["weight_map"]
        elif (self.path / "model.safetensors").exists():
            from safetensors import safe_open
            with safe_open(self.path / "model.safetensors", "pt") as file:
                self.files = dict.fromkeys(file.keys(), "model.safetensors")
        else:
            raise FileNotFoundError(f"{path} has neither model.safetensors nor model.safetensors.index.json; only "
                                    "safetensors checkpoints are read")
        config = json.loads((self.path / "config.json").read_text())
        self.block = (config.get("quantization_config") or {}).get("weight_block_size")
        self.parts = {}  # bailing_moe_v2 keeps q, k, v in one: name of a part -> (stored name, heads, which)
        G, H = config.get("num_key_value_heads", 1), config.get("num_attention_heads", 1)
        for stored in [name for name in self.files if ".attention.query_key_value." in name]:
            for i, part in enumerate("qkv"):
                self.parts[stored.replace("query_key_value", f"{part}_proj")] = stored, [H, G, G], i

    def _raw(self, name):
        from safetensors import safe_open
        with safe_open(self.path / self.files[name], "pt") as file:
            return file.get_tensor(name)

    def read(self, name):
        if name in self.parts:
            stored, heads, i = self.parts[name]
            tensor = self.read(stored)
            return tensor.split([n * (len(tensor) // sum(heads)) for n in heads])[i]
        tensor, stem = self._raw(name), name.removesuffix(".weight")
        scales = [other for other in self.files if other.startswith(stem + ".") and "scale" in other[len(stem):]]
        if tensor.dtype.itemsize > 1 and not scales:
            return tensor
        if len(scales) != 1 or not scales[0].endswith(SCALES) or tensor.dtype not in (torch.float8_e4m3fn, torch.int8):
            raise ValueError(f"{name} is {tensor.dtype} with scales {scales or 'none'}: cannot be de-quantised here; "
                             "known are float8_e4m3fn or int8 with weight_scale_inv (blocks) or weight_scale (rows)")
        scale = self._raw(scales[0]).float()
        if scales[0].endswith("_inv"):
            if not self.block:
                raise ValueError(f"{scales[0]} exists but config.json has no quantization_config.weight_block_size")
            expected = tuple(-(-size // block) for size, block in zip(tensor.shape, self.block))
            if tuple(scale.shape) != expected:
                raise ValueError(f"{scales[0]} has shape {tuple(scale.shape)}, blocks of {self.block} need {expected}")
            for dim, block in enumerate(self.block):
                scale = scale.repeat_interleave(block, dim).narrow(dim, 0, tensor.shape[dim])
        elif scale.dim() == 1 and scale.numel() > 1:
            scale = scale[:, None]
        return tensor.float() * scale


def mtp_prefix(config, names):
    """'model.layers.N.' if the checkpoint (config dict, tensor names) holds an MTP layer there, else None."""
    N = config["num_hidden_layers"]
    if not any(name.startswith(f"model.layers.{N}.") for name in names):
        return None
    if any(name.startswith(f"model.layers.{N + 1}.") for name in names):
        warnings.warn(f"the checkpoint has more than one MTP layer; the first, layer {N}, is used")
    return f"model.layers.{N}."


SIZES = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")
DENSE = ("llama", "mistral", "qwen2", "qwen3")  # without MTP; convert.py writes them as MoE models


def read_target_config(config, names, **sizes):
    """MTPConfig of a target (config dict, tensor names). `sizes`: SIZES of a dense target's draft."""
    family = config.get("model_type")
    if family == "bailing_moe_v2":
        config = _from_bailing(config)
    elif family in DENSE:
        config = _from_dense(config, names, **sizes)
    elif any(sizes.values()):
        flags = ", ".join("--" + name.replace("_", "-") for name in sizes)
        raise ValueError(f"{flags} are for dense targets ({', '.join(DENSE)}); a {family} target's draft "
                         "has the sizes of the target")
    return replace(MTPConfig.from_hf(config, names), model_type=family)


def _from_bailing(config):
    usual = {"use_bias": False, "score_function": "sigmoid",
             "moe_shared_expert_intermediate_size": config["moe_intermediate_size"]}
    odd = {key: config[key] for key, value in usual.items() if config.get(key) not in (None, value)}
    if odd:
        raise ValueError(f"the bailing_moe_v2 target has {odd}, which the draft layer cannot express")
    rotary = read_rope(config)[1]
    return {**config, "model_type": "glm4_moe", "n_routed_experts": config["num_experts"],
            "n_shared_experts": config.get("num_shared_experts") or 0, "n_group": config.get("n_group") or 1,
            "topk_group": config.get("topk_group") or 1, "attention_bias": bool(config.get("use_qkv_bias")),
            "partial_rotary_factor": 1.0 if rotary is None else rotary}


def _from_dense(config, names, n_routed_experts=None, num_experts_per_tok=None, moe_intermediate_size=None,
                n_shared_experts=None):
    """A dense config as glm4_moe's; the shared expert as wide as the MLP, which convert.py turns into one."""
    family, width, F = config["model_type"], config["intermediate_size"], moe_intermediate_size
    window = config.get("sliding_window") if config.get("use_sliding_window", family == "mistral") else None
    if window or "sliding_attention" in (config.get("layer_types") or []):
        raise ValueError(f"the {family} target has sliding-window attention ({config.get('sliding_window')} "
                         "tokens), which neither the draft nor its serving layouts have")
    if any(name.endswith("o_proj.bias") for name in names):
        raise ValueError(f"the {family} target has o_proj biases, which no serving layout of a draft has")
    shared = n_shared_experts or (max(1, width // F) if F else 4 if width % 128 == 0 else 1)
    F = F or width // shared
    if shared * F != width:
        raise ValueError(f"--n-shared-experts {shared} times --moe-intermediate-size {F} must be the dense "
                         f"target's intermediate_size {width}")
    return {"num_key_value_heads": config["num_attention_heads"], **config, "model_type": "glm4_moe",
            "n_shared_experts": shared, "moe_intermediate_size": F, "n_routed_experts": n_routed_experts or 8,
            "num_experts_per_tok": num_experts_per_tok or 2, "partial_rotary_factor": 1.0,
            "use_qk_norm": any(name.endswith("q_norm.weight") for name in names),
            "attention_bias": any(name.endswith("q_proj.bias") for name in names)}


@torch.no_grad()
def warm_start(model, checkpoint, family, prefix):
    """Copy the target's own MTP layer into `model`. Strict: raises ValueError listing what is missing or misshapen."""
    wrong = []
    for name, view in native_views(model.state_dict(), family, prefix):
        if name not in checkpoint.files and name not in checkpoint.parts:
            wrong.append(f"{name} is missing")
            continue
        tensor = checkpoint.read(name)
        if tensor.shape != view.shape:
            wrong.append(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(view.shape)}")
        elif not tensor.isfinite().all():
            wrong.append(f"{name} holds nan or inf")
        else:
            view.copy_(tensor)
    if wrong:
        shown = "\n  ".join(wrong[:20]) + (f"\n  and {len(wrong) - 20} more" if len(wrong) > 20 else "")
        raise ValueError(f"the MTP layer {prefix}* of {checkpoint.path} cannot be read:\n  {shown}\n"
                         "--init scratch trains a new one instead.")


@contextlib.contextmanager
def atomic(path):
    """Write aside, fsync, rename: `path` (file or folder) is either the old or the complete new one, whenever killed."""
    path = Path(path)
    aside = path.with_name(f".{path.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.unlink(missing_ok=True) if aside.is_file() else None
    yield aside
    for file in [*aside.rglob("*")] if aside.is_dir() else [aside]:
        fsync(file)
    fsync(aside)
    if path.is_dir():
        shutil.rmtree(path)
    os.replace(aside, path)
    fsync(path.parent)


def fsync(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def save_draft(path, model, meta):
    """A draft directory: model.safetensors (state_dict) and config.json (MTPConfig's fields plus `meta`)."""
    from safetensors.torch import save_file
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    with atomic(path / "model.safetensors") as aside:
        save_file(state, aside, metadata={"format": "pt"})
    with atomic(path / "config.json") as aside:
        aside.write_text(json.dumps({**asdict(model.config), **meta, "format": 1}, indent=2) + "\n")


def load_draft(path):
    """(MTP model, config.json as a dict) of a draft directory. Raises ValueError if it is not one of ours, complete."""
    from safetensors.torch import load_file
    path = Path(path)
    if not (path / "config.json").exists() or not (path / "model.safetensors").exists():
        raise FileNotFoundError(f"{path} is no draft directory: config.json and model.safetensors are expected in it")
    meta = json.loads((path / "config.json").read_text())
    if meta.get("format") != 1 or "ttt_length" not in meta:
        raise ValueError(f"{path}/config.json is not a draft's (format {meta.get('format')!r}, expected 1)")
    state = load_file(path / "model.safetensors")
    model = MTP(MTPConfig(**{f.name: meta[f.name] for f in fields(MTPConfig)}))
    model.to(state["eh_proj.weight"].dtype)
    expected = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    found = {name: tuple(t.shape) for name, t in state.items()}
    if expected != found:
        wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise ValueError(f"{path}/model.safetensors does not fit its config.json: {', '.join(wrong[:10])}")
    model.load_state_dict(state)
    return model, meta


# ---- Targets ---------------------------------------------------------------------------------------------------------

class Target:
    """A frozen Hugging Face causal LM: the source of hidden states, embedding, lm_head, and the verifier of drafts."""

    def __init__(self, path, *, dtype="auto", device="cpu", device_map=None, trust_remote_code=False,
                 **draft_sizes):
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
        logging.disable_progress_bar()
        self.path, self.device = find_target(path), torch.device(device)
        raw = (self.path / "config.json").read_bytes()
        self.config, self.sha256 = json.loads(raw), hashlib.sha256(raw).hexdigest()
        self.checkpoint = Checkpoint(self.path)
        self.draft_config = read_target_config(self.config, self.checkpoint.files, **draft_sizes)  # or fail
        options = dict(trust_remote_code=trust_remote_code, local_files_only=True)
        self.tokenizer = AutoTokenizer.from_pretrained(self.path, **options)
        self.model = AutoModelForCausalLM.from_pretrained(
            self.path, dtype=dtype, device_map=device_map, use_safetensors=True, **options).eval().requires_grad_(False)
        if device_map is None:
            self.model.to(self.device)
        names = inspect.signature(self.model.base_model.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"  # renamed in transformers 5.2x
        self.embed = self.model.get_input_embeddings().weight.detach().to(self.device)
        self.lm_head = self.model.get_output_embeddings().weight.detach().to(self.device)

    @torch.no_grad()
    def states(self, documents, budget=16384):
        """Last hidden states after the final norm: a list of (L, C), for a list of token tensors (L,), each on its own."""
        order = sorted(range(len(documents)), key=lambda i: len(documents[i]))
        found = [None] * len(documents)
        while order:
            longest = len(documents[order[-1]])
            batch, order = order[-max(1, budget // longest):], order[:-max(1, budget // longest)]
            ids = torch.zeros(len(batch), longest, dtype=torch.long, device=self.model.device)
            for row, i in zip(ids, batch):  # padding on the right: no causal model's real rows can see it
                row[:len(documents[i])] = documents[i]
            hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state.to(self.device)
            for row, i in zip(hidden, batch):
                found[i] = row[:len(documents[i])]
        return found


def find_target(path):
    """Path of a target's directory; what is not a directory is taken as a hub id and looked up (downloaded if need be)."""
    if not os.path.isdir(path):
        from huggingface_hub import snapshot_download
        try:
            path = snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"])
        except Exception as error:  # the hub client raises a family of its own
            raise FileNotFoundError(f"target {str(path)!r} is no directory, and as a hub id it cannot be had: "
                                    f"{str(error).splitlines()[0]}") from None
    if not (Path(path) / "config.json").exists():
        raise FileNotFoundError(f"target {path} has no config.json: a Hugging Face checkpoint directory is expected")
    return Path(path)


class DemoTarget(nn.Module):
    """A small glm4_moe language model of this file's own layers: dense first layer, MoE after."""

    def __init__(self, config, n_layers, dense_width):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, dense_width if i == 0 else None) for i in range(n_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids):
        docs = Documents(None, *input_ids.shape, input_ids.device)
        x, chosen = self.embed_tokens(input_ids), []
        for layer in self.layers:
            x, _, _, experts_of_layer = layer(x, docs.position_ids, [], [], docs, attend_fa)
            chosen.append(experts_of_layer)
        return self.norm(x), chosen


DEMO = MTPConfig(vocab_size=4096, hidden_size=256, num_attention_heads=8, num_key_value_heads=2, head_dim=32,
                 n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, partial_rotary_factor=0.5,
                 max_position_embeddings=4096)
DEMO_LAYERS, DEMO_DENSE, DEMO_STEPS, DEMO_BATCH, DEMO_LENGTH = 3, 512, 400, 8, 128


def stdlib_files():
    """(training, held-out) files of the Python standard library, text every machine has; every 20th is held out."""
    import sysconfig
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "turtledemo", "__pycache__"}
    files = [path for path in sorted(root.rglob("*.py")) if not skip & set(path.relative_to(root).parts)]
    return [f for i, f in enumerate(files) if i % 20], files[::20]


def demo_folder():
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "mtp" / f"demo-target-{sys.version_info.major}.{sys.version_info.minor}-1"


def build_demo_target(path):
    """Train the demo's tokenizer and language model on the standard library's source; save them as a HF checkpoint."""
    from tokenizers import ByteLevelBPETokenizer
    from tqdm import tqdm
    from transformers import PreTrainedTokenizerFast
    print(f"first run: building the demo target on the Python standard library's source, about 90 s -> {path}", flush=True)
    texts = [file.read_text(errors="replace") for file in stdlib_files()[0]]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=DEMO.vocab_size, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token="<|endoftext|>")
    ids = [i for row in tokenizer(texts)["input_ids"] for i in [*row, tokenizer.eos_token_id]]
    ids = torch.tensor(ids[:len(ids) // DEMO_LENGTH * DEMO_LENGTH]).view(-1, DEMO_LENGTH)

    generator = torch.Generator().manual_seed(0)
    model = DemoTarget(DEMO, DEMO_LAYERS, DEMO_DENSE)
    init_matrices(model, DEMO.initializer_range, generator)
    adam = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    bar = tqdm(range(DEMO_STEPS), desc="demo target", unit="step", mininterval=1)
    for step in bar:
        rows = ids[torch.randint(len(ids), (DEMO_BATCH,), generator=generator)]
        n, chosen = model(rows)
        loss = F.cross_entropy(model.lm_head(n[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        adam.zero_grad()
        loss.backward()
        adam.param_groups[0]["lr"] = 4e-3 * min(1.0, (step + 1) / 30, 0.02 + (DEMO_STEPS - step) / (0.5 * DEMO_STEPS))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        for layer, experts_of_layer in zip(model.layers, chosen):
            if experts_of_layer is not None:
                load = expert_load(experts_of_layer, torch.ones_like(rows, dtype=torch.bool), DEMO.n_routed_experts)
                balance_experts(layer.mlp.gate.e_score_correction_bias, load, 0.01)
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    save_demo_target(path, model, tokenizer)


@torch.no_grad()
def init_matrices(module, std, generator):
    """Matrices normal(0, std), norms 1, biases 0."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.dim() > 1:
            tensor.normal_(0.0, std, generator=generator)
        else:
            tensor.fill_(1.0 if name.endswith("norm.weight") else 0.0)


def save_demo_target(path, model, tokenizer):
    from safetensors.torch import save_file
    state = {}
    for i, layer in enumerate(model.layers):
        state |= {name: x.clone() for name, x in native_views(layer.state_dict(), "glm4_moe", f"model.layers.{i}.")}
    state |= {"model.embed_tokens.weight": model.embed_tokens.weight.detach(),
              "model.norm.weight": model.norm.weight.detach(), "lm_head.weight": model.lm_head.weight.detach()}
    config = {**asdict(DEMO), "architectures": ["Glm4MoeForCausalLM"], "dtype": "float32", "hidden_act": "silu",
              "intermediate_size": DEMO_DENSE, "num_hidden_layers": DEMO_LAYERS, "first_k_dense_replace": 1,
              "num_nextn_predict_layers": 0, "tie_word_embeddings": False, "attention_dropout": 0.0,
              "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as aside:
        aside.mkdir()
        tokenizer.save_pretrained(aside)
        save_file(state, aside / "model.safetensors", metadata={"format": "pt"})
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n")


# ---- Data ------------------------------------------------------------------------------------------------------------

class Sample(NamedTuple):
    name: str                # file, and line where it has lines: what an error names
    input_ids: torch.Tensor  # (L,) int64
    loss_mask: torch.Tensor  # (L,) bool: tokens to learn


def encode_messages(messages, tokenizer):
    """(input_ids, loss_mask) of a conversation: the chat template's text, loss on assistant tokens only.

    By the template's generation markers where it has them, else by rendering prefixes: what message i adds after the generation
    prompt. Raises ValueError if the template's prefixes do not match."""
    template = tokenizer.chat_template
    if template is None:
        raise ValueError(f"the tokenizer of {tokenizer.name_or_path} has no chat template; give {{\"text\": ...}} lines")
    if "generation %}" in template or "generation -%}" in template:
        out = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return out["input_ids"], out["assistant_masks"]
    render = partial(tokenizer.apply_chat_template, tokenize=False)
    text, spans = render(messages), []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = render(messages[:i], add_generation_prompt=True), render(messages[:i + 1])
            if not (text.startswith(after) and after.startswith(before)):
                raise ValueError(f"the chat template renders message {i} differently once more follow, so assistant tokens "
                                 "cannot be told apart; use a template with {% generation %} markers")
            spans.append((len(before), len(after)))
    out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [any(start < b and end > a for a, b in spans) for start, end in out["offset_mapping"]]
    return out["input_ids"], mask


def read_file(path, tokenizer):
    """Yield (name, input_ids, loss_mask) of each document of a .txt or .jsonl file; all-ones mask for text."""
    path = Path(path)
    if path.suffix != ".jsonl":
        ids = tokenizer(path.read_text(errors="replace"))["input_ids"]
        yield str(path), ids, [True] * len(ids)
        return
    for number, line in enumerate(path.open(encoding="utf-8"), 1):
        if not line.strip():
            continue
        name = f"{path}:{number}"
        try:
            row = json.loads(line)
            if "messages" in row:
                yield name, *encode_messages(row["messages"], tokenizer)
            else:
                ids = tokenizer(row["text"])["input_ids"]
                yield name, ids, [True] * len(ids)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            yield name, None, f"{type(error).__name__}: {error}"


def read_samples(paths, tokenizer, seq_len, shortest):
    """Samples of at most seq_len tokens; longer documents are cut into pieces. What cannot be used is counted and named."""
    from tqdm import tqdm
    samples, skipped = [], []
    for path in tqdm(paths, desc="reading", unit="file", disable=len(paths) < 20, leave=False):
        if not os.path.isfile(path):
            raise FileNotFoundError(f"data file {path} does not exist")
        for name, ids, mask in read_file(path, tokenizer):
            if ids is None:
                skipped.append(f"{name} ({mask})")
                continue
            ids, mask = torch.tensor(ids, dtype=torch.long), torch.tensor(mask, dtype=torch.bool)
            pieces = list(zip(ids.split(seq_len), mask.split(seq_len)))
            kept = [Sample(name, *piece) for piece in pieces if len(piece[0]) >= shortest and piece[1][2:].any()]
            samples += kept
            if not kept:
                skipped.append(f"{name} (fewer than {shortest} tokens, or none to learn)")
    if skipped:
        shown = "; ".join(skipped[:3]) + ("; ..." if len(skipped) > 3 else "")
        say(f"{len(skipped)} of {len(skipped) + len(samples)} samples skipped: {shown}")
    if not samples:
        raise ValueError(f"no usable sample in {len(paths)} data file(s): each needs {shortest} tokens or more")
    return samples


def pack(samples, seq_len):
    """Rows (lists of samples) of at most seq_len tokens, best fit in the order given: no sample is cut."""
    rows, room = [], []  # room: sorted (tokens left, row)
    for sample in samples:
        at = bisect_left(room, (len(sample.input_ids), -1))
        left, row = room.pop(at) if at < len(room) else (seq_len, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(sample)
        left -= len(sample.input_ids)
        if left:
            insort(room, (left, row))
    return rows


class Rows:
    """An endless, seeded order of packed rows: row i is the same in every run, whatever ran before."""

    def __init__(self, samples, seq_len, seed):
        self.samples, self.seq_len, self.seed, self.epoch = samples, seq_len, seed, None
        self.per_epoch = len(self._rows(0))

    def _rows(self, epoch):
        if self.epoch != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order = torch.randperm(len(self.samples), generator=generator).tolist()
            self.rows, self.epoch = pack([self.samples[i] for i in order], self.seq_len), epoch
        return self.rows

    def __getitem__(self, i):
        """Row i, counted through epochs of `per_epoch` rows (epochs pack alike, a row more or less: it wraps around)."""
        rows = self._rows(i // self.per_epoch)
        return rows[i % self.per_epoch % len(rows)]


def collate(rows, length, device):
    """(input_ids, loss_mask, doc_ids) each (B, length) of packed rows; doc_ids -1 in padding, None if there is none."""
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask, docs = torch.zeros_like(ids, dtype=torch.bool), torch.full_like(ids, -1)
    for b, row in enumerate(rows):
        at = 0
        for d, sample in enumerate(row):
            here = slice(at, at + len(sample.input_ids))
            ids[b, here], mask[b, here], docs[b, here] = sample.input_ids, sample.loss_mask, d
            at = here.stop
    docs = None if (docs == 0).all() else docs.to(device)
    return ids.to(device), mask.to(device), docs


def packed_states(rows, length, target):
    """(B, length, C) hidden states of packed rows, each document seen by the target on its own."""
    states = iter(target.states([sample.input_ids for row in rows for sample in row]))
    out = None
    for b, row in enumerate(rows):
        at = 0
        for sample in row:
            state = next(states)
            out = state.new_zeros(len(rows), length, state.shape[-1]) if out is None else out
            out[b, at:at + len(state)] = state
            at += len(state)
    return out


# ---- Distributed -----------------------------------------------------------------------------------------------------

class Ranks(NamedTuple):
    """Where this process stands: data parallel (dp) times sequence parallel (sp, one row split over `group`)."""
    rank: int = 0
    world: int = 1
    sp: int = 1
    group: object = None
    device: torch.device = torch.device("cpu")

    @property
    def dp(self):
        return self.world // self.sp

    @property
    def dp_rank(self):
        return self.rank // self.sp


def start_ranks(cfg):
    """Join the process group that torchrun describes (or none); sp is the whole world under usp, else 1."""
    device = cfg.device if cfg.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    world, rank, local = (int(os.environ.get(name, default)) for name, default in
                          (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)))
    if device == "cuda":
        torch.cuda.set_device(local)
        device = f"cuda:{local}"
    backend = "nccl" if device.startswith("cuda") else "gloo"
    if not dist.is_initialized() and (world > 1 or cfg.backend == "usp"):
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    sp = world if cfg.backend == "usp" else 1
    return Ranks(rank, world, sp, dist.group.WORLD if cfg.backend == "usp" else None, torch.device(device))


def all_sum(tensor, ranks):
    """Sum over all ranks, in place; nothing to do for one."""
    if ranks.world > 1:
        dist.all_reduce(tensor)
    return tensor


def any_rank(flag, ranks):
    """True on every rank if it is on one."""
    return bool(all_sum(torch.tensor(float(flag), device=ranks.device), ranks) > 0)


def barrier(ranks):
    all_sum(torch.zeros((), device=ranks.device), ranks)


def say(text):
    """Print on rank 0, above a progress bar if there is one."""
    if int(os.environ.get("RANK", 0)) == 0:
        from tqdm import tqdm
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()


# ---- Optimizer, checkpoints ------------------------------------------------------------------------------------------

class MasterAdamW:
    """AdamW on fp32 master copies of the parameters (the parameters themselves where they are fp32 already)."""

    def __init__(self, model, weight_decay, betas=(0.9, 0.95)):
        self.params = dict(model.named_parameters())
        self.masters = {name: p if p.dtype == fp32(p.dtype) else nn.Parameter(p.detach().float())
                        for name, p in self.params.items()}
        decayed = [p for p in self.masters.values() if p.dim() > 1]
        rest = [p for p in self.masters.values() if p.dim() <= 1]
        self.adam = torch.optim.AdamW([{"params": decayed, "weight_decay": weight_decay},
                                       {"params": rest, "weight_decay": 0.0}], lr=0.0, betas=betas, fused=True)
        for p in self.masters.values():  # as AdamW makes them at its first step; here so that a checkpoint can be loaded
            self.adam.state[p] = {"step": torch.zeros((), device=p.device), "exp_avg": torch.zeros_like(p),
                                  "exp_avg_sq": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self, lr, grad_scale):
        for name, p in self.params.items():
            master = self.masters[name]
            master.grad = p.grad.to(master.dtype).mul_(grad_scale)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        for name, p in self.params.items():
            if p is not self.masters[name]:
                p.copy_(self.masters[name])

    def state(self):
        """{name: tensor}, the live ones: what a checkpoint saves and loads in place."""
        found = {f"master.{name}": p.detach() for name, p in self.masters.items()}
        for name, p in self.masters.items():
            found |= {f"{key}.{name}": value for key, value in self.adam.state[p].items()}
        return found


def learning_rate(step, cfg):
    """Linear warm-up over warmup_steps, then a cosine from lr down to lr * lr_floor at the last step."""
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    done = (step - cfg.warmup_steps) / max(1, cfg.steps - cfg.warmup_steps)
    return cfg.lr * (cfg.lr_floor + (1 - cfg.lr_floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def training_state(model, optimizer, progress):
    """Everything that a resumed run needs, as tensors by name: DCP writes them and reads them in place."""
    state = {**optimizer.state(), "rng": torch.get_rng_state()}
    state |= {name: buffer for name, buffer in model.named_buffers()}
    return state | {"progress": torch.tensor([progress[key] for key in sorted(progress)], dtype=torch.float64)}


def save_state(folder, model, optimizer, progress, keep, ranks):
    """Write folder/step-N aside by torch.distributed.checkpoint, rename it, drop all but the newest `keep`."""
    import torch.distributed.checkpoint as dcp
    final = Path(folder) / f"step-{progress['step']}"
    aside = final.with_name(f".{final.name}.partial")
    if ranks.rank == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    barrier(ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dcp announces that it saves from a single process
        dcp.save(training_state(model, optimizer, progress), checkpoint_id=aside)
    if ranks.rank == 0:
        for path in [*aside.iterdir(), aside]:
            fsync(path)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(aside, final)
        fsync(final.parent)
        for old in saved_states(folder)[:-keep]:
            shutil.rmtree(old)
    barrier(ranks)


def saved_states(folder):
    """Complete training states in `folder`, oldest first."""
    found = [path for path in Path(folder).glob("step-*") if path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def load_state(path, model, optimizer, progress):
    """Read a training state in place: weights, moments, bias, RNG; returns `progress`. Its .metadata is a pickle: own runs
    only."""
    import torch.distributed.checkpoint as dcp
    state = training_state(model, optimizer, progress)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path)
    torch.set_rng_state(state["rng"])
    with torch.no_grad():
        for name, p in optimizer.params.items():
            p.copy_(optimizer.masters[name])
    return dict(zip(sorted(progress), state["progress"].tolist()))


# ---- Training and evaluation -----------------------------------------------------------------------------------------

def option(default, help, **more):
    return field(default=default, metadata={"help": help, **more})


@dataclass
class ModelOptions:
    target: str = option(None, "HF checkpoint directory or hub id (glm4_moe, hy_v3, llama..); default: demo")
    dtype: str = option("auto", "dtype the target runs in", choices=["auto", "float32", "bfloat16", "float16"])
    device: str = option("auto", "cpu, cuda or auto", choices=["auto", "cpu", "cuda"])
    target_device_map: str = option(None, "passed to transformers as device_map, e.g. auto, for large targets")
    trust_remote_code: bool = option(False, "let the target's repository run its own code")


@dataclass
class TrainConfig(ModelOptions):
    data: list = option(None, "training files, .txt or .jsonl ({\"text\"} or {\"messages\"}); default: the demo's", type=str)
    eval_data: list = option(None, "held-out files; default: every 20th sample of --data", type=str)
    out: str = option("runs/demo", "draft directory to write; checkpoints/ and metrics.jsonl go there too")
    init: str = option("auto", "warm: the target's own MTP layer; scratch: random; auto: warm if it has one",
                       choices=["auto", "warm", "scratch"])
    backend: str = option("sdpa", "attention: sdpa dense; fa linear memory; usp = fa, row split over all ranks; "
                          "auto = fa where it runs", choices=["sdpa", "fa", "usp", "auto"], also="--attention-backend")
    ttt_length: int = option(3, "K: draft steps trained per row")
    n_routed_experts: int = option(None, "dense target: E, experts of its draft (8)")
    num_experts_per_tok: int = option(None, "dense target: A, experts per token (2)")
    moe_intermediate_size: int = option(None, "dense target: F, expert width")
    n_shared_experts: int = option(None, "dense target: shared experts, times F = intermediate_size (4)")
    recycle: str = option("post", "hidden state fed to the next step: post (after the final norm) or pre; README, Serving",
                          choices=["post", "pre"])
    zero_first_embedding: bool = option(False, "zero the embedding at position 0, as vLLM does")
    ce_weight: float = option(1.0, "weight of the cross-entropy against the target's argmax")
    kl_weight: float = option(1.0, "weight of KL(target || draft)")
    decay: float = option(0.8, "step k weighs decay ** k")
    steps: int = option(200, "optimizer steps")
    batch_size: int = option(8, "rows per optimizer step, over all ranks")
    micro_batch_size: int = option(None, "rows per forward pass and rank; default: all of a rank's; smaller saves memory")
    seq_len: int = option(256, "tokens per row; documents are packed into rows, longer ones cut")
    lr: float = option(None, "peak learning rate; default 3e-3 from scratch, 1e-4 warm")
    lr_floor: float = option(0.1, "the cosine ends at lr times this")
    warmup_steps: int = option(20, "linear warm-up")
    weight_decay: float = option(0.01, "AdamW's, on matrices")
    clip: float = option(1.0, "largest global gradient norm")
    balance_rate: float = option(None, "step of the router bias; default 0.01 from scratch, 0 warm")
    seed: int = option(0, "initialisation and data order")
    eval_every: int = option(0, "evaluate every N steps and keep the best draft in OUT/best; 0: at the end only")
    eval_rows: int = option(32, "held-out rows per evaluation")
    save_every: int = option(100, "save the training state every N steps, and at the end")
    keep: int = option(2, "training states kept")
    log_every: int = option(10, "steps per line of metrics.jsonl")
    resume: str = option(None, "auto: the newest state in OUT, if any; never; or a checkpoints/step-N folder; "
                         "default: auto when torchrun restarts, else never")


def check_train_config(cfg):
    """Fill in defaults and refuse what cannot work, before anything is loaded. Raises ValueError with the remedy."""
    for name in ("ttt_length", "steps", "batch_size", "seq_len", "eval_rows", "save_every", "keep", "log_every"):
        if getattr(cfg, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(cfg, name)}, must be at least 1")
    if cfg.seq_len < cfg.ttt_length + 2:
        raise ValueError(f"--seq-len {cfg.seq_len} leaves no row that counts at every step; give at least --ttt-length + 2 = "
                         f"{cfg.ttt_length + 2}")
    if cfg.data and not cfg.target:
        raise ValueError("--data without --target: the demo target knows the standard library only; give --target DIR")
    if cfg.target and not cfg.data:
        raise ValueError("--target without --data: give --data FILE... (.txt or .jsonl)")
    if cfg.target and cfg.out == TrainConfig.out:
        raise ValueError(f"--out {cfg.out} is the demo's folder; give --out DIR")
    if cfg.ce_weight < 0 or cfg.kl_weight < 0 or cfg.ce_weight + cfg.kl_weight == 0:
        raise ValueError(f"--ce-weight {cfg.ce_weight} and --kl-weight {cfg.kl_weight}: at least one must be positive")
    resume = cfg.resume or ("auto" if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) else "never")
    if resume not in ("auto", "never") and not (Path(resume) / ".metadata").exists():
        raise ValueError(f"--resume {resume} is no complete training state; give auto, never or OUT/checkpoints/step-N")
    held = saved_states(Path(cfg.out) / "checkpoints")
    if held and resume == "never" and cfg.out != TrainConfig.out:
        raise ValueError(f"--out {cfg.out} already holds checkpoints up to {held[-1].name}: add --resume auto to continue "
                         "that run, or give another --out")
    return replace(cfg, resume=resume)


def choose_backend(cfg, ranks, dtype):
    """The name of the attention backend, `auto` resolved and announced; asking for what cannot run is an error."""
    reason = why_not_fa(ranks.device.type, dtype)
    if cfg.backend == "auto":
        chosen = "sdpa" if reason else "fa"
        say(f"backend: {chosen} (" + (f"fa cannot run: {reason})" if reason else f"fa runs on this {ranks.device.type})"))
        return chosen
    if cfg.backend != "sdpa" and reason:
        raise ValueError(f"--backend {cfg.backend} cannot run: {reason}. Use --backend sdpa.")
    return cfg.backend


def make_draft(cfg, target, ranks):
    """(model, "warm" or "scratch"): the draft on its device, with the target's embedding and head."""
    prefix = mtp_prefix(target.config, target.checkpoint.files)
    if cfg.init == "warm" and prefix is None:
        raise ValueError(f"--init warm: {target.path} has no MTP layer model.layers.{target.config['num_hidden_layers']}.*; "
                         "use --init scratch")
    init = "warm" if prefix and cfg.init != "scratch" else "scratch"
    model = MTP(target.draft_config).to(target.lm_head.dtype)
    model.reset_parameters(torch.Generator().manual_seed(cfg.seed))
    if init == "warm":
        warm_start(model, target.checkpoint, target.config["model_type"], prefix)
    model.to(ranks.device).set_target(target.embed, target.lm_head)
    return model, init


def read_data(cfg, target):
    """(training rows, held-out rows): the demo's files or the user's, held-out samples never among the training ones."""
    files, held = (cfg.data, cfg.eval_data) if cfg.target else stdlib_files()
    if not cfg.target:
        files, held = files[::6], held[::6]  # the demo uses 100k tokens: no need to read ten million
    samples = read_samples(files, target.tokenizer, cfg.seq_len, cfg.ttt_length + 2)
    if held:
        held = read_samples(held, target.tokenizer, cfg.seq_len, cfg.ttt_length + 2)
    elif len(samples) < 2:
        raise ValueError("--data has a single sample, so none can be held out; give --eval-data FILE")
    else:
        step = min(20, len(samples))
        samples, held = [s for i, s in enumerate(samples) if i % step], samples[::step]
    rows = Rows(samples, cfg.seq_len, cfg.seed)
    tokens = sum(len(s.input_ids) for s in samples)
    say(f"data: {len(samples)} samples, {tokens:,} tokens in {rows.per_epoch} rows of {cfg.seq_len} (fill ratio "
        f"{tokens / rows.per_epoch / cfg.seq_len:.2f}), {len(held)} samples held out")
    return rows, spread(pack(held, cfg.seq_len), cfg.eval_rows)


def spread(rows, most):
    """At most `most` rows, evenly spread."""
    return rows if len(rows) <= most else [rows[i * len(rows) // most] for i in range(most)]


def row_length(rows, cfg, device):
    """What rows are padded to: the longest; always seq_len on CUDA, where each new length compiles kernels anew."""
    return cfg.seq_len if device.type == "cuda" else max(sum(len(s.input_ids) for s in row) for row in rows)


def loss_options(cfg):
    return {name: getattr(cfg, name) for name in
            ("ttt_length", "ce_weight", "kl_weight", "decay", "recycle", "zero_first_embedding")}


def train_step(model, rows, target, cfg, ranks, backend):
    """Forward and backward of one optimizer step over this rank's rows, gradients summed over all ranks.

    Returns sums [5, K] float64 (CE, KL, right, count, prefix hits, over all ranks), expert load [E], tokens, and the names of
    samples whose hidden states are not finite."""
    size = cfg.micro_batch_size or max(1, len(rows))
    parts = [rows[i:i + size] for i in range(0, len(rows), size)]
    batches = [(part, collate(part, row_length(part, cfg, ranks.device), ranks.device)) for part in parts]
    counts = torch.zeros(cfg.ttt_length, dtype=torch.long, device=ranks.device)
    for part, (ids, mask, docs) in batches:
        counts += valid_counts(mask, docs, cfg.ttt_length, batch=ids.shape[0], length=ids.shape[1])
    if ranks.sp < ranks.world:
        all_sum(counts, ranks)
    sums, load, bad = torch.zeros(5, cfg.ttt_length, dtype=torch.float64, device=ranks.device), 0, []
    model.zero_grad(set_to_none=False)
    for part, (ids, mask, docs) in batches:
        hidden = packed_states(part, ids.shape[1], target)
        if not hidden.isfinite().all():
            states = target.states([s.input_ids for row in part for s in row])
            bad += [s.name for s, h in zip([s for row in part for s in row], states) if not h.isfinite().all()]
        out = ttt_loss(model, ids, hidden, mask, docs, backend=backend, group=ranks.group, counts=counts,
                       **loss_options(cfg))
        out.loss.backward()
        n = out.count.double()
        sums += torch.stack([out.ce * n, out.kl * n, out.acc * n, n, out.prefix_hits.double()])
        load = load + out.expert_load
    if ranks.world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)  # summed, never averaged: the loss is already divided by the global count
    if ranks.sp < ranks.world:
        all_sum(sums, ranks), all_sum(load, ranks)
    return sums, load, sum(len(s.input_ids) for row in rows for s in row), bad


@torch.no_grad()
def evaluate(model, rows, target, cfg, ranks, backend):
    """Acceptance over held-out rows, sums first, one division at the end: a dict of ce, kl, acc, walk (lists [K]) and
    accept_len (all counted rows), accept_len_walk (the rounds that serving would run), rows."""
    K, size = cfg.ttt_length, cfg.micro_batch_size or 8
    sums, rounds = torch.zeros(5, K, dtype=torch.float64, device=ranks.device), torch.zeros(K + 1, dtype=torch.float64)
    mine = rows[ranks.dp_rank::ranks.dp]
    for i in range(0, len(mine), size):
        part = mine[i:i + size]
        length = row_length(part, cfg, ranks.device)
        ids, mask, docs = collate(part, length, ranks.device)
        out = ttt_loss(model, ids, packed_states(part, length, target), mask, docs, backend=backend, group=ranks.group,
                       **loss_options(cfg))
        n = out.count.double()
        sums += torch.stack([out.ce * n, out.kl * n, out.acc * n, n, out.prefix_hits.double()])
        rounds += walk(out.hits, mask, Documents(docs, *ids.shape, ids.device))
    rounds = rounds.to(ranks.device)
    if ranks.sp < ranks.world:
        all_sum(sums, ranks), all_sum(rounds, ranks)
    n = sums[3].clamp(min=1)
    return {"ce": (sums[0] / n).tolist(), "kl": (sums[1] / n).tolist(), "acc": (sums[2] / n).tolist(),
            "accept_len": 1 + (sums[4] / n).sum().item(), "walk": (rounds[1:] / rounds[0].clamp(min=1)).tolist(),
            "accept_len_walk": 1 + (rounds[1:].sum() / rounds[0].clamp(min=1)).item(), "rows": int(sums[3, 0])}


def walk(hits, loss_mask, docs):
    """[1 + K]: rounds, and rounds that accepted position k, of speculative decoding along each text in turn.

    hits (K, B, T): drafted token k of row t is the target's. A text is a maximal run of unmasked tokens s..e-1; its first token
    came from the prefill, so the first root is row s - 1; a round accepts n tokens and the next root is n + 1 rows on."""
    K, B, T = hits.shape
    total = [0] * (K + 1)
    accepted = hits.long().cumprod(0).tolist()
    for b in range(B):
        runs, mask = docs.run[b].tolist(), (loss_mask[b] != 0).tolist()
        t = 0
        while t < T:
            if not mask[t] or runs[t] < 0:
                t += 1
                continue
            end = t
            while end < T and mask[end] and runs[end] == runs[t]:
                end += 1
            root = t - 1 if t and runs[t - 1] == runs[t] else t
            while root + 2 < end:
                n = 0
                while n < K and root + 2 + n < end and accepted[n][b][root]:
                    n += 1
                    total[n] += 1
                total[0] += 1
                root += n + 1
            t = end
    return torch.tensor(total, dtype=torch.float64)


def acceptance_table(rows):
    """Lines of a table of {label: evaluate()'s result}."""
    K = len(next(iter(rows.values()))["acc"])
    head = "".join(f"{f'acc_{k}':>8}" for k in range(K)) + f"{'accept_len':>12}{'accept_len_walk':>17}"
    return [f"{'':8}{head}"] + [
        f"{label:8}" + "".join(f"{a:8.3f}" for a in row["acc"]) + f"{row['accept_len']:12.3f}{row['accept_len_walk']:17.3f}"
        for label, row in rows.items()]


def draft_meta(cfg, target):
    return dict(ttt_length=cfg.ttt_length, recycle=cfg.recycle, zero_first_embedding=cfg.zero_first_embedding,
                target=str(Path(target.path).resolve()), target_config_sha256=target.sha256)


class Stop:
    """Set by SIGINT or SIGTERM: the step in progress ends, its state is saved, the run exits cleanly."""

    def __init__(self):
        self.signal = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self)

    def __call__(self, number, frame):
        self.signal = self.signal or signal.Signals(number).name


def open_demo(ranks):
    path = demo_folder()
    if ranks.rank == 0 and not (path / "config.json").exists():
        build_demo_target(path)
    barrier(ranks)
    return path


def open_target(cfg, ranks, path=None):
    path = path or cfg.target or open_demo(ranks)
    dtype = cfg.dtype if cfg.dtype == "auto" else getattr(torch, cfg.dtype)
    return Target(path, dtype=dtype, device=ranks.device, device_map=cfg.target_device_map,
                  trust_remote_code=cfg.trust_remote_code, **{key: getattr(cfg, key, None) for key in SIZES})


def train(cfg):
    """Train a draft; writes OUT/model.safetensors, config.json, metrics.jsonl, checkpoints/. Returns before/after results."""
    cfg = check_train_config(cfg)
    ranks = start_ranks(cfg)
    target = open_target(cfg, ranks)
    if cfg.seq_len > target.draft_config.max_position_embeddings:
        raise ValueError(f"--seq-len {cfg.seq_len} exceeds the target's max_position_embeddings "
                         f"{target.draft_config.max_position_embeddings}")
    backend = choose_backend(cfg, ranks, target.lm_head.dtype)
    H = target.draft_config.num_attention_heads
    if H % ranks.sp:
        raise ValueError(f"--backend usp: {ranks.sp} ranks do not divide {H} attention heads; start "
                         f"{math.gcd(H, ranks.sp)} ranks")
    rows, held = read_data(cfg, target)
    model, init = make_draft(cfg, target, ranks)
    cfg = replace(cfg, lr=cfg.lr or (3e-3 if init == "scratch" else 1e-4),
                  balance_rate=(0.01 if init == "scratch" else 0.0) if cfg.balance_rate is None else cfg.balance_rate)
    say(f"draft: {sum(p.numel() for p in model.parameters()):,} parameters, {init} from {target.path}, "
        f"{str(model.eh_proj.weight.dtype)[6:]} on {ranks.device}, {ranks.dp} x {ranks.sp} ranks (data x sequence)")
    optimizer = MasterAdamW(model, cfg.weight_decay)
    progress = resume_run(cfg, model, optimizer, ranks)
    run = partial(evaluate, model, held, target, cfg, ranks, backend)
    results = {"before": run()} if progress["step"] == 0 else {}
    if results:
        say("\n".join(acceptance_table(results)))
        if init == "warm" and results["before"]["ce"][0] > 0.9 * math.log(model.config.vocab_size):
            say(f"warning: warm start, yet the step-0 loss {results['before']['ce'][0]:.2f} is near ln V = "
                f"{math.log(model.config.vocab_size):.2f}, that of a random layer: is this the right MTP layer?")
    stopped = train_loop(cfg, model, optimizer, progress, rows, target, ranks, backend, run)
    if stopped:
        say(f"stopped by {stopped} after step {progress['step']:.0f}, state saved; continue with --resume auto")
        return results
    results["after"] = run()
    say("\n".join(acceptance_table(results)))
    if progress["skipped"]:
        say(f"{progress['skipped']:.0f} steps were skipped: loss or gradient not finite; metrics.jsonl names the samples")
    if ranks.rank == 0:
        save_draft(cfg.out, model, draft_meta(cfg, target))
    say(f"draft written to {cfg.out}; try: python mtp.py generate --draft {cfg.out} --prompt \"def main():\"")
    return results


def resume_run(cfg, model, optimizer, ranks):
    """Progress of the run to continue (its state loaded), or of a new one (the demo's old states removed)."""
    progress, folder = {"step": 0, "skipped": 0, "skipped_in_a_row": 0, "best": 0.0}, Path(cfg.out) / "checkpoints"
    held = saved_states(folder)
    if cfg.resume == "never" and ranks.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        Path(cfg.out).mkdir(parents=True, exist_ok=True)
        (Path(cfg.out) / "metrics.jsonl").unlink(missing_ok=True)
    barrier(ranks)
    path = cfg.resume if cfg.resume not in ("auto", "never") else held[-1] if held and cfg.resume == "auto" else None
    if path:
        progress = load_state(path, model, optimizer, progress)
        say(f"resumed from {path}")
    return progress


def train_loop(cfg, model, optimizer, progress, rows, target, ranks, backend, run):
    """Optimizer steps from progress["step"] to cfg.steps; returns the signal that ended it early, or None."""
    from tqdm import tqdm
    stop, clock, since = Stop(), time.perf_counter(), {"tokens": 0, "sums": 0}
    bar = tqdm(total=cfg.steps, initial=int(progress["step"]), desc="train", unit="step", disable=ranks.rank > 0, mininterval=1)
    while progress["step"] < cfg.steps:
        step = int(progress["step"])
        mine = [rows[step * cfg.batch_size + i] for i in range(ranks.dp_rank, cfg.batch_size, ranks.dp)]
        sums, load, tokens, bad = train_step(model, mine, target, cfg, ranks, backend)
        norm = torch.stack([p.grad.float().norm() for p in model.parameters()]).norm().item()
        lr = learning_rate(step, cfg)
        if any_rank(not (math.isfinite(norm) and sums.isfinite().all()), ranks):
            skip_step(progress, bad or [s.name for row in mine for s in row], cfg, ranks)
        else:
            optimizer.step(lr, min(1.0, cfg.clip / (norm + 1e-6)))
            if cfg.balance_rate:
                balance_experts(model.mlp.gate.e_score_correction_bias, load, cfg.balance_rate)
            progress["skipped_in_a_row"] = 0
            since["sums"] = since["sums"] + sums
        progress["step"] = step + 1
        since["tokens"] += tokens * ranks.dp
        done, signalled = step + 1 == cfg.steps, any_rank(bool(stop.signal), ranks)
        if (step + 1) % cfg.log_every == 0 or done:
            now = time.perf_counter()
            log_metrics(cfg, progress, since, load, norm, lr, now - clock, bar, ranks)
            clock, since = now, {"tokens": 0, "sums": 0}
        bar.update()
        if cfg.eval_every and (step + 1) % cfg.eval_every == 0 and not done:
            keep_best(cfg, model, target, run(), progress, ranks)
        if (step + 1) % cfg.save_every == 0 or done or signalled:
            save_state(Path(cfg.out) / "checkpoints", model, optimizer, progress, cfg.keep, ranks)
            if ranks.rank == 0:
                save_draft(cfg.out, model, draft_meta(cfg, target))
        if signalled and not done:
            bar.close()
            return stop.signal or "a signal to another rank"
    bar.close()
    return None


def skip_step(progress, names, cfg, ranks):
    """Count a step whose loss or gradient is not finite, name its samples; ten in a row are an error."""
    progress["skipped"] += 1
    progress["skipped_in_a_row"] += 1
    append_line(cfg, {"step": int(progress["step"]) + 1, "skipped": names}, ranks)
    say(f"step {progress['step'] + 1:.0f} skipped, loss or gradient not finite: {', '.join(names[:4])}")
    if progress["skipped_in_a_row"] >= 10:
        raise ValueError("ten steps in a row had a loss or gradient that is not finite; the last samples: "
                         f"{', '.join(names[:4])}. Lower --lr, or remove those samples.")


def keep_best(cfg, model, target, result, progress, ranks):
    say("\n".join(acceptance_table({f"{progress['step']:.0f}": result})))
    if result["accept_len"] > progress["best"]:
        progress["best"] = result["accept_len"]
        if ranks.rank == 0:
            save_draft(Path(cfg.out) / "best", model, draft_meta(cfg, target))


def append_line(cfg, line, ranks):
    if ranks.rank == 0:
        with open(Path(cfg.out) / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")


def log_metrics(cfg, progress, since, load, norm, lr, seconds, bar, ranks):
    """One line of metrics.jsonl: means over the steps since the last one; and the progress bar's figures."""
    if not torch.is_tensor(since["sums"]):
        return
    ce, kl, right, n, prefix = since["sums"]
    n = n.clamp(min=1)
    weight = cfg.decay ** torch.arange(cfg.ttt_length, dtype=torch.float64, device=n.device)
    loss = (weight / weight.sum() * (cfg.ce_weight * ce + cfg.kl_weight * kl) / n).sum().item()
    line = {"step": int(progress["step"]), "loss": loss, "ce": (ce / n).tolist(), "kl": (kl / n).tolist(),
            "acc": (right / n).tolist(), "accept_len": 1 + (prefix / n).sum().item(), "grad_norm": norm, "lr": lr,
            "tokens_per_second": since["tokens"] / seconds, "top_expert_share": (load.max() / load.sum().clamp(min=1)).item(),
            "skipped": int(progress["skipped"])}
    append_line(cfg, line, ranks)
    bar.set_postfix(loss=f"{loss:.3f}", accept_len=f"{line['accept_len']:.2f}",
                    tok_s=f"{line['tokens_per_second']:.0f}", refresh=False)


# ---- Speculative decoding --------------------------------------------------------------------------------------------

class Decoding(NamedTuple):
    ids: list        # prompt and everything verified, the last round whole, even past the length limit or the end token
    n_prompt: int
    rounds: list     # accepted tokens of each round
    margins: list    # of each token the first round onwards: the target's best logit and its lead over the second
    seconds: float


class Drafter:
    """The serving scheme: a growing cache of draft keys for the verified prefix, rewritten from the target's true hidden states
    after every verification, and one appended key per drafted token."""

    def __init__(self, model, recycle, zero_first_embedding):
        self.model, self.recycle, self.zero_first = model, recycle, zero_first_embedding
        self.past_k, self.past_v = [], []

    def rows(self, tokens, hidden, start):
        """Run rows start.. (token ids of the NEXT positions, hidden states (1, n, C)); returns the last row's n and r."""
        ids = torch.tensor([tokens], device=hidden.device)
        positions = torch.arange(start, start + len(tokens), device=hidden.device)[None]
        embeds = self.model.embed(ids)
        if self.zero_first:
            embeds = embeds.masked_fill((positions == 0)[..., None], 0)
        n, r, self.past_k, self.past_v, _ = self.model(embeds, hidden.to(embeds.dtype), positions, self.past_k, self.past_v,
                                                       None, attend_decode)
        return n[:, -1:], r[:, -1:]

    def draft(self, tokens, hidden, start, K):
        """K greedy draft tokens. `tokens`: the verified ones from position start + 1, hidden: true states from `start`."""
        self.past_k, self.past_v = ([x[:, :start] for x in past] for past in (self.past_k, self.past_v))
        drafted, end = [], start + len(tokens)
        n, r = self.rows(tokens, hidden, start)
        for k in range(K):
            drafted.append(self.model.logits(n).argmax(-1).item())
            if k < K - 1:
                n, r = self.rows(drafted[-1:], n if self.recycle == "post" else r, end + k)
        return drafted


@torch.no_grad()
def decode(target, ids, max_new_tokens, drafter=None, K=0, eos=()):
    """Greedy decoding of `ids` (a list) by the target, with K drafted tokens verified per round (K = 0: plain). Lossless."""
    from transformers import DynamicCache
    began, cache, tokens, n_prompt = time.perf_counter(), DynamicCache(config=target.model.config), list(ids), len(ids)
    rounds, margins, new, hidden, start = [], [], list(ids), None, 0
    while True:
        positions = torch.arange(len(tokens) - len(new), len(tokens), device=target.model.device)[None]
        out = target.model.base_model(torch.tensor([new], device=target.model.device), position_ids=positions,
                                      use_cache=True, **{target.cache_name: cache}).last_hidden_state.to(target.device)
        drafted = new[1:] if rounds or hidden is not None else []
        logits = F.linear(out[0, len(new) - len(drafted) - 1:].to(target.lm_head.dtype), target.lm_head)
        greedy, n = logits.argmax(-1).tolist(), 0
        while n < len(drafted) and drafted[n] == greedy[n]:
            n += 1
        if hidden is not None:
            rounds.append(n)
        for row in logits[:n + 1].float().topk(2).values.tolist():
            margins.append((row[0], row[0] - row[1]))
        tokens = tokens[:len(tokens) - len(drafted) + n] + [greedy[n]]
        cache.crop(n - len(drafted))  # negative: forget the refused ones
        fresh = greedy[:n + 1] if hidden is not None else [greedy[0]]
        hidden, first = out[:, :len(new) - len(drafted) + n], start
        start = len(tokens) - 1
        if len(tokens) - n_prompt >= max_new_tokens or any(token in eos for token in fresh):
            return Decoding(tokens, n_prompt, rounds, margins, time.perf_counter() - began)
        drafted = drafter.draft(tokens[first + 1:], hidden, first, K) if K else []
        new = tokens[-1:] + drafted
        tokens = tokens + drafted


def trimmed(result, max_new_tokens, eos):
    """The answer's tokens: cut at the length limit, and before the end token."""
    answer = result.ids[result.n_prompt:][:max_new_tokens]
    ends = [i for i, token in enumerate(answer) if token in eos]
    return answer[:ends[0]] if ends else answer


@dataclass
class GenerateConfig(ModelOptions):
    draft: str = option(None, "draft directory")
    prompt: str = option(None, "text to continue")
    max_new_tokens: int = option(128, "length limit of the answer")
    chat: bool = option(False, "put the prompt through the tokenizer's chat template")
    k: int = option(None, "drafted tokens per round; default: the draft's ttt_length")


@dataclass
class EvalConfig(ModelOptions):
    draft: str = option(None, "draft directory")
    data: list = option(None, "held-out files, .txt or .jsonl; default: the demo's", type=str)
    backend: str = option("sdpa", "attention backend", choices=["sdpa", "fa", "auto"], also="--attention-backend")
    ttt_length: int = option(None, "steps to evaluate; default: the draft's")
    seq_len: int = option(256, "tokens per row")
    eval_rows: int = option(32, "rows evaluated")
    micro_batch_size: int = option(8, "rows per forward pass")


def open_draft(cfg, ranks):
    """(model with its target set, target, config.json of the draft); a target that is not the draft's is refused."""
    if not cfg.draft:
        raise ValueError("--draft DIR is required: a directory that training wrote, e.g. runs/demo")
    model, meta = load_draft(cfg.draft)
    if not cfg.target and not os.path.isdir(meta["target"]):
        raise FileNotFoundError(f"the draft's target {meta['target']} is not there any more; give --target DIR")
    target = open_target(cfg, ranks, cfg.target or meta["target"])
    if target.sha256 != meta["target_config_sha256"]:
        raise ValueError(f"the draft was trained for another target: config.json of {target.path} has sha256 "
                         f"{target.sha256[:12]}.., the draft expects {meta['target_config_sha256'][:12]}..")
    model.to(ranks.device).set_target(target.embed, target.lm_head)
    return model, target, meta


def evaluate_command(cfg):
    """`mtp.py eval`: the acceptance table of a draft on held-out text."""
    ranks = start_ranks(cfg)
    model, target, meta = open_draft(cfg, ranks)
    defaults = {f.name: f.default for f in fields(TrainConfig)}
    cfg = argparse.Namespace(**{**defaults, **meta, **vars(cfg), "ttt_length": cfg.ttt_length or meta["ttt_length"]})
    samples = read_samples(cfg.data or stdlib_files()[1][::6], target.tokenizer, cfg.seq_len, cfg.ttt_length + 2)
    result = evaluate(model, spread(pack(samples, cfg.seq_len), cfg.eval_rows), target, cfg, ranks,
                      choose_backend(cfg, ranks, target.lm_head.dtype))
    say("\n".join(acceptance_table({"draft": result})))
    say(f"walk acceptance per position: {' '.join(f'{x:.3f}' for x in result['walk'])} ({result['rows']} rows)")


def generate_command(cfg):
    """`mtp.py generate`: speculative and plain greedy decoding of one prompt, compared token for token and in time."""
    if not cfg.prompt:
        raise ValueError("--prompt TEXT is required")
    ranks = start_ranks(argparse.Namespace(**vars(cfg), backend="sdpa"))
    model, target, meta = open_draft(cfg, ranks)
    tokenizer, K = target.tokenizer, cfg.k or meta["ttt_length"]
    if cfg.chat:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": cfg.prompt}], add_generation_prompt=True)["input_ids"]
    else:
        ids = tokenizer(cfg.prompt)["input_ids"]
    room = target.draft_config.max_position_embeddings - K - 1
    if not 1 <= len(ids) < room:
        raise ValueError(f"--prompt has {len(ids)} tokens, the target takes 1 to {room - 1}")
    eos = target.model.generation_config.eos_token_id if target.model.generation_config else None
    eos = eos if isinstance(eos, list) else [] if eos is None else [eos]
    length = min(cfg.max_new_tokens, room - len(ids))
    drafter = Drafter(model, meta["recycle"], meta["zero_first_embedding"])
    decode(target, ids, 4, eos=eos)  # warm up
    plain = decode(target, ids, length, eos=eos)
    fast = decode(target, ids, length, drafter, K, eos)
    a, b = trimmed(plain, length, eos), trimmed(fast, length, eos)
    print(tokenizer.decode(ids + b))
    rounds = max(1, len(fast.rounds))
    print(f"\naccept_len_walk {1 + sum(fast.rounds) / rounds:.3f} over {len(fast.rounds)} rounds; accepted per position "
          + " ".join(f"{sum(n > k for n in fast.rounds) / rounds:.3f}" for k in range(K)))
    print(f"tokens/s: {len(b) / fast.seconds:.1f} drafting, {len(a) / plain.seconds:.1f} plain")
    same = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)
    if same is None and len(a) == len(b):
        print("lossless: the same tokens as plain greedy decoding")
        return
    top, lead = plain.margins[same if same is not None else min(len(a), len(b))]
    ulp = 2.0 ** (math.floor(math.log2(max(abs(top), 1e-30))) - (7 if target.lm_head.dtype == torch.bfloat16 else 23))
    print(f"first divergence from plain greedy decoding at token {same}: its two best logits differ by {lead / ulp:.1f} ulps")
    if lead > 2 * ulp:
        raise ValueError("drafted and plain decoding differ by more than rounding: this is a fault, please report it")


@dataclass
class DataConfig(ModelOptions):
    prompts: str = option(None, "prompts: .txt, one a line, or .jsonl with {\"prompt\"} or {\"messages\"}")
    out: str = option(None, ".jsonl to write, a line per prompt; an interrupted run goes on where it stopped")
    max_new_tokens: int = option(256, "length limit of an answer")
    batch_size: int = option(16, "prompts answered at a time")


def generate_data(cfg):
    """`mtp.py generate-data`: the target's own greedy answers to a file of prompts, to train a draft on."""
    from tqdm import tqdm
    if not cfg.prompts or not cfg.out:
        raise ValueError("--prompts FILE and --out FILE.jsonl are required")
    rows = [line for line in Path(cfg.prompts).read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = [json.loads(line) if cfg.prompts.endswith(".jsonl") else {"prompt": line} for line in rows]
    target = open_target(cfg, start_ranks(argparse.Namespace(**vars(cfg), backend="sdpa")))
    known = {"prompt", "messages"} if target.tokenizer.chat_template else {"prompt"}
    if not all(isinstance(row, dict) and row.keys() & known for row in rows):
        raise ValueError(f"{cfg.prompts}: each line must be an object with {' or '.join(sorted(known))}; "
                         "messages need a tokenizer with a chat template")
    out = Path(cfg.out)
    done = out.read_bytes() if out.exists() else b""
    done = done[:done.rfind(b"\n") + 1]  # a line cut short is written again
    out.parent.mkdir(parents=True, exist_ok=True)
    bar = tqdm(total=len(rows), initial=done.count(b"\n"), desc="answers", unit="prompt", mininterval=1)
    with open(out, "ab") as file, bar:
        file.truncate(len(done))
        for i in range(bar.n, len(rows), cfg.batch_size):
            for line in answers(target, rows[i:i + cfg.batch_size], cfg.max_new_tokens):
                file.write(json.dumps(line).encode() + b"\n")
                bar.update()
            file.flush()


def answers(target, rows, max_new_tokens):
    """Greedy answers to prompts, a batch padded on the left; {"messages"} if there is a chat template."""
    tokenizer, device = target.tokenizer, target.model.device
    chat = tokenizer.chat_template
    if chat:
        rows = [row.get("messages") or [{"role": "user", "content": row["prompt"]}] for row in rows]
        ids = [tokenizer.apply_chat_template(row, add_generation_prompt=True)["input_ids"] for row in rows]
    else:
        rows = [row["prompt"] for row in rows]
        ids = [tokenizer(text)["input_ids"] for text in rows]
    longest = max(map(len, ids))
    batch = torch.tensor([[0] * (longest - len(row)) + row for row in ids], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids], device=device)
    out = target.model.generate(batch, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens,
                                pad_token_id=tokenizer.pad_token_id or 0)
    texts = tokenizer.batch_decode(out[:, longest:], skip_special_tokens=True)
    return [{"messages": [*row, {"role": "assistant", "content": text}]} if chat else {"text": row + text}
            for row, text in zip(rows, texts)]


# ---- Command line ----------------------------------------------------------------------------------------------------

COMMANDS = {"train": (TrainConfig, train), "eval": (EvalConfig, evaluate_command),
            "generate": (GenerateConfig, generate_command), "generate-data": (DataConfig, generate_data)}


def parse(kind, arguments, prog):
    """A config dataclass from flags: one field is default, type and help of its flag."""
    parser = argparse.ArgumentParser(prog=prog, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     description=__doc__ if kind is TrainConfig else COMMANDS_HELP[kind])
    for f in fields(kind):
        names = ["--" + f.name.replace("_", "-"), *([f.metadata["also"]] if "also" in f.metadata else [])]
        text = f.metadata["help"] + ("" if f.default in (None, False) else f" (default {f.default})")
        if f.type == "bool":
            parser.add_argument(*names, action="store_true", dest=f.name, help=text)
        else:
            parser.add_argument(*names, dest=f.name, default=f.default, help=text, choices=f.metadata.get("choices"),
                                type={"int": int, "float": float}.get(f.type, str), nargs="+" if f.type == "list" else None)
    return kind(**vars(parser.parse_args(arguments)))


COMMANDS_HELP = {kind: run.__doc__ for kind, run in COMMANDS.values()}


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    command = arguments[0] if arguments and arguments[0] in COMMANDS else "train"
    kind, run = COMMANDS[command]
    cfg = parse(kind, arguments[1:] if arguments[:1] == [command] else arguments, f"mtp.py {command}")
    try:
        run(cfg)
    except (ValueError, OSError) as error:
        if os.environ.get("MTP_TRACEBACK"):
            raise
        print(f"mtp.py: error: {error}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
