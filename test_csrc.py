"""The compiled kernels against PyTorch: on the CPU, as emulated CUDA source, and on a GPU where there is one.

    pytest test_csrc.py                        quick: CPU kernels, emulated CUDA kernels in 4 thread orders
    pytest test_csrc.py -m slow_kernels        sanitizer builds, planted faults, nvcc for three architectures
    python test_csrc.py --bench [moe merge loss]     tables: ours, peers, floors, both malloc settings
    python test_csrc.py --gpu [out.json]       on a GPU: checks, compute-sanitizer, timings against floors

The rule for every kernel and dtype: its error against float64 is at most twice PyTorch's own in that dtype.
"""

import ctypes
import functools
import itertools
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import pytest
import torch
import torch.nn.functional as F

try:
    import mtp_kernels
except ImportError as error:
    mtp_kernels, missing = None, error

HERE = pathlib.Path(__file__).resolve().parent
CUDA = mtp_kernels is not None and mtp_kernels.cuda and torch.cuda.is_available()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
needs_kernels = pytest.mark.skipif(
    mtp_kernels is None, reason="build them: python setup.py build_ext --inplace"
)
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a GPU and kernels built for it")]


def wide(dtype):
    return torch.promote_types(dtype, torch.float32)


# ---- references ------------------------------------------------------------------------------------------
def merge_ref(o_0, lse_0, q, ks, vs, scale):
    """Attention over k cached keys of the own row, merged into (o_0, lse_0). (B,T,H,D), kv (B,T,G,D)."""
    group = q.shape[2] // ks[0].shape[2]
    k, v = (torch.stack([x.repeat_interleave(group, 2) for x in xs]) for xs in (ks, vs))
    s = torch.cat([lse_0[None], (q * k).sum(-1).to(lse_0.dtype) * scale])
    lse = torch.logsumexp(s, 0)
    w = torch.exp(s - lse)[..., None]
    out = torch.where(w[0] == 0, torch.zeros_like(o_0), w[0].to(q.dtype) * o_0) + (w[1:].to(q.dtype) * v).sum(
        0
    )
    return out, lse


def merge_backward_ref(dout, q, ks, vs, out, lse, scale, o_0=None, lse_0=None):
    B, T, H, D = q.shape
    G = ks[0].shape[2]
    fold = lambda x: x.reshape(B, T, G, H // G, D).sum(3)
    d, o, x = dout.to(lse.dtype), out.to(lse.dtype), q.to(lse.dtype)
    dq, dks, dvs, delta = torch.zeros_like(x), [], [], (d * o).sum(-1)
    for k, v in zip(ks, vs):
        k, v = (y.to(lse.dtype).repeat_interleave(H // G, 2) for y in (k, v))
        w = torch.exp(scale * (x * k).sum(-1) - lse)
        ds = (scale * w * ((d * v).sum(-1) - delta))[..., None]
        dq = dq + ds * k
        dks.append(fold(ds * x).to(q.dtype))
        dvs.append(fold(w[..., None] * d).to(q.dtype))
    if o_0 is None:
        return dq.to(q.dtype), dks, dvs
    w_0 = torch.exp(lse_0 - lse)
    dlse_0 = torch.where(w_0 == 0, w_0, w_0 * ((d * o_0.to(lse.dtype)).sum(-1) - delta))
    return dq.to(q.dtype), dks, dvs, (w_0[..., None] * d).to(q.dtype), dlse_0


def experts_ref(x, topk_indices, topk_weights, gate_up_proj, down_proj):
    """y[n] = sum_a w[n, a] down[e] @ (silu(gate) * up); (N, C), (N, A), (N, A), (E, 2F, C), (E, C, F)."""
    y = torch.zeros_like(x)
    for e in range(len(down_proj)):
        n, a = (topk_indices == e).nonzero(as_tuple=True)
        gate, up = (x[n] @ gate_up_proj[e].t()).chunk(2, -1)
        out = (F.silu(gate) * up) @ down_proj[e].t()
        y = y.index_add(0, n, (out * topk_weights[n, a, None]).to(x.dtype))
    return y


def loss_rows_ref(teacher, draft, coeff, ce_weight, kl_weight):
    """(ce, kl, argmax teacher, argmax draft); draft <- gradient of coeff (ce_weight ce + kl_weight kl)."""
    t, d = teacher.to(coeff.dtype), draft.to(coeff.dtype)
    log_p, log_q = t.log_softmax(-1), d.log_softmax(-1)
    p, gold, choice = log_p.exp(), t.argmax(-1), d.argmax(-1)
    kl = torch.where(p == 0, p, p * (log_p - log_q)).sum(-1)
    g = (ce_weight + kl_weight) * log_q.exp() - kl_weight * p
    g.scatter_add_(1, gold[:, None], torch.full_like(g[:, :1], -ce_weight))
    draft.copy_(coeff[:, None] * g)
    return -log_q.gather(1, gold[:, None])[:, 0], kl, gold, choice


# ---- three ways to call the kernels ----------------------------------------------------------------------
class Compiled:
    """The ops as mtp.py calls them, on one device."""

    def __init__(self, device):
        self.device = device

    def merge(self, *args):
        return torch.ops.mtp_kernels.merge(*args)

    def merge_backward(self, *args):
        dq, dks, dvs, first = torch.ops.mtp_kernels.merge_backward(*args)
        return dq, dks, dvs, *first

    def experts(self, dy, x, index, w, gate_up, down):
        y, order, offsets, pre = torch.ops.mtp_kernels.experts_forward(x, index, w, gate_up, down)
        return y, *torch.ops.mtp_kernels.experts_backward(dy, x, w, gate_up, down, order, offsets, pre)

    def loss_rows(self, *args):
        return torch.ops.mtp_kernels.loss_rows(*args)


def build(folder, flags=(), edits=(), name="emulated", driver=None):
    """kernels.cu as C++: a library, or with `driver` a program. edits: (old, new) pairs, to plant a fault."""
    source = (HERE / "csrc/kernels.cu").read_text()
    for old, new in edits:
        assert old in source, f"kernels.cu no longer has {old!r}"
        source = source.replace(old, new)
    path, out = pathlib.Path(folder) / f"{name}.cpp", pathlib.Path(folder) / name
    path.write_text(source + (driver or ""))
    kind = [] if driver else ["-shared", "-fPIC"]
    command = [
        "g++",
        "-std=c++20",
        "-g",
        "-DMTP_EMULATE",
        f"-I{HERE / 'csrc'}",
        "-Wno-unknown-pragmas",
        *kind,
        *flags,
    ]
    done = subprocess.run([*command, str(path), "-o", str(out), "-pthread"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def pointer(x):
    if isinstance(x, list):
        return (ctypes.c_void_p * len(x))(*[t.data_ptr() for t in x])
    return ctypes.c_void_p(x.data_ptr()) if isinstance(x, torch.Tensor) else x


def grouped_mm(rows, weights, offsets):
    """What at::_grouped_mm computes; groups without rows are left as NaN, as a GEMM may leave them."""
    ends = offsets.tolist()
    spans = list(zip([0, *ends], ends))
    if weights.dim() == 3:
        return torch.cat([rows[a:b] @ weights[e] for e, (a, b) in enumerate(spans)])
    empty = torch.full((len(rows), weights.shape[1]), float("nan"), dtype=rows.dtype)
    return torch.stack([rows[:, a:b] @ weights[a:b] if b > a else empty for a, b in spans])


class Emulated:
    """The CUDA launchers from the emulated library, composed as bind.cpp composes them."""

    device = "cpu"

    def __init__(self, library, order=0):
        self.lib, self.order = ctypes.CDLL(str(library)), order
        self.lib.mtp_emulate_error.restype = ctypes.c_char_p

    def call(self, name, *args):
        self.lib.mtp_emulate_order(self.order)
        kinds = {int: ctypes.c_int64, float: ctypes.c_double}
        values = [kinds[type(a)](a) if type(a) in kinds else pointer(a) for a in args]
        status = getattr(self.lib, f"mtp_cuda_{name}")(*values, None)
        error = self.lib.mtp_emulate_error().decode()
        assert status == 0 and not error, error

    def merge(self, o_0, lse_0, q, ks, vs, scale):
        B, T, H, D = q.shape
        out, lse = torch.empty_like(q), torch.empty_like(lse_0)
        self.call(
            "merge_forward",
            DTYPES.index(q.dtype),
            B * T,
            H,
            ks[0].shape[2],
            D,
            len(ks),
            scale,
            o_0,
            lse_0,
            q,
            ks,
            vs,
            out,
            lse,
        )
        return out, lse

    def merge_backward(self, dout, q, ks, vs, out, lse, scale, o_0=None, lse_0=None):
        B, T, H, D = q.shape
        dq, dks, dvs = (
            torch.empty_like(q),
            [torch.empty_like(k) for k in ks],
            [torch.empty_like(v) for v in vs],
        )
        first = () if o_0 is None else (torch.empty_like(q), torch.empty_like(lse))
        self.call(
            "merge_backward",
            DTYPES.index(q.dtype),
            B * T,
            H,
            ks[0].shape[2],
            D,
            len(ks),
            scale,
            dout,
            q,
            ks,
            vs,
            out,
            lse,
            o_0,
            lse_0,
            dq,
            dks,
            dvs,
            *(first or (None, None)),
            torch.empty_like(q, dtype=lse.dtype),
        )
        return dq, dks, dvs, *first

    def experts(self, dy, x, index, w, gate_up, down):
        (N, C), A, (E, _, width), code = x.shape, w.shape[1], down.shape, DTYPES.index(x.dtype)
        pairs, new = N * A, lambda *shape: torch.full(shape, float("nan"), dtype=x.dtype)
        order, offsets = torch.empty(2, pairs, dtype=torch.int32), torch.empty(E, dtype=torch.int32)
        self.call("sort", index, pairs, E, order, offsets, torch.empty(E * 257, dtype=torch.int32))
        xs, dys, a, y, dx, dh = (
            new(*s) for s in [(pairs, C)] * 2 + [(pairs, width)] + [(N, C)] * 2 + [(pairs, 2 * width)]
        )
        self.call("gather", code, x, order, pairs, A, C, xs)
        pre = grouped_mm(xs, gate_up.transpose(1, 2), offsets)
        self.call("act", code, pre, pairs, width, a)
        self.call("combine", code, grouped_mm(a, down.transpose(1, 2), offsets), order[1], w, N, A, C, y)
        self.call("gather", code, dy, order, pairs, A, C, dys)
        g, dw = grouped_mm(dys, down, offsets), torch.empty_like(w)
        self.call("act_backward", code, pre, g, order, w, pairs, width, dh, dw)
        ddown, dgate_up = grouped_mm(dys.t(), g, offsets), grouped_mm(dh.t(), xs, offsets)
        for d in (ddown, dgate_up):
            self.call("zero_empty", code, offsets, E, d[0].numel(), d)
        self.call("combine", code, grouped_mm(dh, gate_up, offsets), order[1], None, N, A, C, dx)
        return y, dx, dw, dgate_up, ddown

    def loss_rows(self, teacher, draft, coeff, ce_weight, kl_weight):
        ce, kl = torch.empty_like(coeff), torch.empty_like(coeff)
        t, d = torch.empty(len(coeff), dtype=torch.int64), torch.empty(len(coeff), dtype=torch.int64)
        self.call(
            "loss_rows",
            DTYPES.index(draft.dtype),
            *draft.shape,
            teacher,
            draft,
            coeff,
            ce_weight,
            kl_weight,
            ce,
            kl,
            t,
            d,
        )
        return ce, kl, t, d


@functools.cache
def emulated_library():
    return build(tempfile.mkdtemp(), ["-O1"])


def kernels(how):
    if how == "cpu":
        if mtp_kernels is None:
            pytest.skip("build the kernels: python setup.py build_ext --inplace")
        return Compiled("cpu")
    if how == "cuda":
        return Compiled("cuda")
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    return Emulated(emulated_library())


WAYS = ["cpu", "emulated", pytest.param("cuda", marks=gpu)]
CPU_OR_GPU = ["cpu", pytest.param("cuda", marks=gpu)]


# ---- the twice-PyTorch rule ------------------------------------------------------------------------------
def flatten(xs):
    return [t for x in xs for t in (flatten(x) if isinstance(x, (list, tuple)) else [x])]


def to(xs, f):
    return [
        to(x, f) if isinstance(x, (list, tuple)) else f(x) if isinstance(x, torch.Tensor) else x for x in xs
    ]


def check_twice(runs, dtype):
    """runs: (ours, PyTorch's, float64's outputs) per seed. RMS error against float64 at most twice PyTorch's;
    where PyTorch's few numbers are exact by luck, 4 fp32 roundings. A list counts as one output."""
    joined = lambda x: torch.cat([t.flatten() for t in x]) if isinstance(x, (list, tuple)) else x
    for i, outputs in enumerate(zip(*[zip(*run, strict=True) for run in runs])):
        mine = torchs = size = 0.0
        for ours, theirs, exact in outputs:
            a, b, e = (joined(x) for x in (ours, theirs, exact))
            assert a.shape == e.shape and a.dtype == b.dtype, (i, a.shape, e.shape, a.dtype, b.dtype)
            if not a.is_floating_point():
                assert torch.equal(a.cpu(), b), f"output {i}"
                continue
            assert a.isfinite().all(), f"output {i} is not finite"
            mine += (a.cpu().double() - e).square().sum().item()
            torchs += (b.double() - e).square().sum().item()
            size += e.square().sum().item()
        bound = max(2 * torchs**0.5, 4 * torch.finfo(torch.float32).eps * size**0.5)
        assert mine**0.5 <= bound, (
            f"output {i}: error {mine**0.5:.3g}, PyTorch's {torchs**0.5:.3g}, size {size**0.5:.3g}"
        )


def double(x):
    return x.double() if x.is_floating_point() else x


def run_twice(kernel, ref, make, dtype, device):
    """make(seed) -> inputs. Few numbers make a poor RMS, so small shapes are run with several seeds."""
    runs = []
    for seed in itertools.count():
        inputs = make(seed)
        theirs, exact = ref(*to(inputs, torch.clone)), ref(*to(inputs, double))
        runs.append((kernel(*to(inputs, lambda x: x.to(device, copy=True))), theirs, exact))
        seeds = max(1, min(8, 2000 // max(1, exact[0].numel())))
        if seed + 1 >= seeds:
            break
    check_twice(runs, dtype)


MERGE_SHAPES = [  # B, T, H, G, D, k
    (1, 1, 1, 1, 8, 1),
    (2, 5, 6, 2, 24, 2),
    (1, 33, 8, 2, 128, 3),
    (1, 9, 12, 3, 64, 4),
    (2, 3, 5, 5, 40, 5),
    (1, 7, 8, 1, 16, 7),
    (1, 5, 4, 2, 256, 8),
    (1, 4, 4, 4, 136, 15),
    (1, 0, 2, 1, 16, 2),
    (3, 2, 16, 1, 72, 6),
]


def merge_inputs(B, T, H, G, D, k, dtype, masked=True, seed=0):
    torch.manual_seed(seed)
    make = lambda heads: torch.randn(B, T, heads, D).to(dtype)
    o_0, q, dout, lse_0 = make(H), make(H), make(H), torch.randn(B, T, H).to(wide(dtype))
    if masked and T:
        lse_0[:, 0], o_0[:, 0] = -torch.inf, 0  # a fully masked row of block 0
    return o_0, lse_0, q, [make(G) for _ in range(k)], [make(G) for _ in range(k)], D**-0.5, dout


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", MERGE_SHAPES, ids=str)
def test_merge(shape, dtype, how):
    kernel = kernels(how)
    if how == "emulated" and not shape[1]:
        pytest.skip("T = 0 never reaches a launch")
    make = lambda seed: merge_inputs(*shape, dtype, seed=seed)
    run_twice(kernel.merge, merge_ref, lambda seed: make(seed)[:-1], dtype, kernel.device)

    def backward_inputs(seed, first):
        o_0, lse_0, q, ks, vs, scale, dout = make(seed)
        out, lse = merge_ref(o_0, lse_0, q, ks, vs, scale)
        return [dout, q, ks, vs, out, lse, scale, *((o_0, lse_0) if first else ())]

    for first in (False, True):
        run_twice(
            kernel.merge_backward,
            merge_backward_ref,
            lambda seed: backward_inputs(seed, first),
            dtype,
            kernel.device,
        )


EXPERT_SHAPES = [  # N, C, A, E, F
    (37, 24, 3, 5, 16),
    (1, 8, 1, 1, 8),
    (0, 16, 2, 4, 8),
    (150, 16, 16, 20, 8),
    (65, 32, 2, 512, 24),
    (600, 8, 4, 7, 8),
    (40, 64, 6, 8, 264),
]


def expert_inputs(N, C, A, E, width, dtype, routing="random", seed=0):
    torch.manual_seed(seed)
    index = torch.rand(N, E).topk(A, -1)[1]
    if (
        routing == "one"
    ):  # every token's first choice is expert 0, the rest are the last experts: most are empty
        index = torch.arange(A).neg().remainder(E).expand(N, A).clone()
    x, dy, w = torch.randn(N, C).to(dtype), torch.randn(N, C).to(dtype), torch.rand(N, A).to(wide(dtype))
    return (
        dy,
        x,
        index,
        w,
        torch.randn(E, 2 * width, C).div(C**0.5).to(dtype),
        torch.randn(E, C, width).to(dtype),
    )


def experts_with_gradients(dy, x, index, w, gate_up, down):
    leaves = [t.clone().requires_grad_() for t in (x, w, gate_up, down)]
    y = experts_ref(leaves[0], index, *leaves[1:])
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routing", ["random", "one"])
@pytest.mark.parametrize("shape", EXPERT_SHAPES, ids=str)
def test_experts(shape, routing, dtype, how):
    kernel = kernels(how)
    if how == "emulated" and not shape[0]:
        pytest.skip("N = 0 never reaches a launch")
    run_twice(
        kernel.experts,
        experts_with_gradients,
        lambda seed: expert_inputs(*shape, dtype, routing, seed),
        dtype,
        kernel.device,
    )


@needs_kernels
@pytest.mark.parametrize("C, width", [(7, 5), (20, 12), (9, 33)])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_experts_odd_widths_on_cpu(C, width, dtype):
    run_twice(
        Compiled("cpu").experts,
        experts_with_gradients,
        lambda seed: expert_inputs(31, C, 2, 4, width, dtype, seed=seed),
        dtype,
        "cpu",
    )


def loss_inputs(R, V, dtype, spread=3.0, seed=0):
    torch.manual_seed(seed)
    teacher, draft = (torch.randn(R, V).mul(spread).to(dtype) for _ in range(2))
    teacher[0, V // 2 :] = teacher[0].max()  # ties: the lowest index wins
    if R > 2 and V > 20:
        teacher[1, :9] = -torch.inf  # a padded vocabulary
    return teacher, draft, torch.arange(R).to(wide(dtype)) / R, 0.7, 1.3


def loss_and_gradient(kernel):
    def run(teacher, draft, *rest):
        result = kernel(teacher, draft, *rest)
        return draft, *result

    return run


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("R, V", [(3, 37), (1, 1), (5, 1000), (2, 1003), (2, 8192)])
def test_loss_rows(R, V, dtype, how):
    kernel = kernels(how)
    run_twice(
        loss_and_gradient(kernel.loss_rows),
        loss_and_gradient(loss_rows_ref),
        lambda seed: loss_inputs(R, V, dtype, seed=seed),
        dtype,
        kernel.device,
    )


def every_output(kernel, dtype):
    """All kernels once, the long chain and the many experts included; for bitwise comparisons."""
    outputs = []
    for shape in [(1, 3, 4, 2, 64, 3), (1, 2, 6, 2, 24, 9)]:
        o_0, lse_0, q, ks, vs, scale, dout = to(merge_inputs(*shape, dtype), lambda t: t.to(kernel.device))
        out, lse = kernel.merge(o_0, lse_0, q, ks, vs, scale)
        outputs += [out, lse, kernel.merge_backward(dout, q, ks, vs, out, lse, scale, o_0, lse_0)]
    for shape in [(600, 8, 4, 7, 8), (20, 16, 2, 40, 24)]:
        outputs.append(kernel.experts(*to(expert_inputs(*shape, dtype), lambda t: t.to(kernel.device))))
    for shape in [(3, 1003), (2, 4096)]:
        loss = to(loss_inputs(*shape, dtype), lambda t: t.to(kernel.device))
        outputs.append(loss_and_gradient(kernel.loss_rows)(loss[0], loss[1].clone(), *loss[2:]))
    return flatten(outputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_emulated_thread_order_changes_no_bit(dtype):
    kernel = kernels("emulated")
    first = every_output(kernel, dtype)
    for kernel.order in (1, 2, 3):
        assert all(torch.equal(a, b) for a, b in zip(first, every_output(kernel, dtype), strict=True))


# ---- gradients, tracing, refusals, determinism -----------------------------------------------------------
def merge_op(o_0, lse_0, q, scale, *kv):
    k = len(kv) // 2
    return torch.ops.mtp_kernels.merge(o_0, lse_0, q, kv[:k], kv[k:], scale)[0]


@needs_kernels
def test_gradcheck():
    o_0, lse_0, q, ks, vs, scale, _ = merge_inputs(1, 3, 4, 2, 8, 5, torch.float64, masked=False)
    leaves = [t.requires_grad_() for t in (o_0, lse_0, q, *ks, *vs)]
    assert torch.autograd.gradcheck(lambda *t: merge_op(*t[:3], scale, *t[3:]), leaves)
    dy, x, index, w, gate_up, down = expert_inputs(5, 4, 2, 3, 3, torch.float64)
    leaves = [t.requires_grad_() for t in (x, w, gate_up, down)]
    op = torch.ops.mtp_kernels.experts_forward
    assert torch.autograd.gradcheck(lambda a, b, c, d: op(a, index, b, c, d)[0], leaves)


@needs_kernels
def test_float64_matches_the_references():
    *inputs, dout = merge_inputs(2, 5, 6, 2, 24, 9, torch.float64)
    torch.testing.assert_close(Compiled("cpu").merge(*inputs), merge_ref(*inputs), rtol=1e-12, atol=1e-12)
    o_0, lse_0, q, ks, vs, scale = inputs
    args = dout, q, ks, vs, *merge_ref(*inputs), scale, o_0, lse_0
    torch.testing.assert_close(
        flatten(Compiled("cpu").merge_backward(*args)),
        flatten(merge_backward_ref(*args)),
        rtol=1e-11,
        atol=1e-12,
    )
    teacher, draft, *rest = loss_inputs(4, 77, torch.float64)
    ours, theirs = (
        loss_and_gradient(f)(teacher, draft.clone(), *rest)
        for f in (Compiled("cpu").loss_rows, loss_rows_ref)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@needs_kernels
@pytest.mark.parametrize("device", CPU_OR_GPU)
def test_opcheck(device):
    grad = lambda xs: to(xs, lambda t: t.to(device, copy=True).requires_grad_(t.is_floating_point()))
    *inputs, dout = to(merge_inputs(1, 3, 4, 2, 8, 2, torch.float32, masked=False), lambda t: t.to(device))
    o_0, lse_0, q, ks, vs, scale = inputs
    ops = torch.ops.mtp_kernels
    torch.library.opcheck(ops.merge.default, grad(inputs))
    out, lse = ops.merge(*inputs)
    backward = (dout, q, ks, vs, out, lse, scale)
    torch.library.opcheck(ops.merge_backward.default, backward)
    torch.library.opcheck(ops.merge_backward.default, (*backward, o_0, lse_0))
    dy, *rest = to(expert_inputs(9, 8, 2, 4, 8, torch.float32), lambda t: t.to(device))
    torch.library.opcheck(ops.experts_forward.default, grad(rest))
    x, index, w, gate_up, down = rest
    _, order, offsets, pre = ops.experts_forward(*rest)
    torch.library.opcheck(ops.experts_backward.default, (dy, x, w, gate_up, down, order, offsets, pre))
    torch.library.opcheck(
        ops.loss_rows.default, tuple(to(loss_inputs(3, 37, torch.float32), lambda t: t.to(device)))
    )


@needs_kernels
@pytest.mark.parametrize("device", CPU_OR_GPU)
def test_same_bits_every_run(device):
    for dtype in DTYPES:
        first = every_output(Compiled(device), dtype)
        for _ in range(2):
            assert all(
                torch.equal(a, b) for a, b in zip(first, every_output(Compiled(device), dtype), strict=True)
            )


@needs_kernels
def test_thread_count_changes_no_bit_of_merge_and_loss():
    def run():
        *inputs, dout = merge_inputs(1, 200, 8, 2, 64, 3, torch.bfloat16)
        out, lse = kernels("cpu").merge(*inputs)
        grads = kernels("cpu").merge_backward(dout, *inputs[2:5], out, lse, *inputs[5:], *inputs[:2])
        return flatten(
            [
                out,
                lse,
                grads,
                loss_and_gradient(kernels("cpu").loss_rows)(*loss_inputs(40, 1000, torch.bfloat16)),
            ]
        )

    threads, many = torch.get_num_threads(), run()
    try:
        torch.set_num_threads(1)
        assert all(torch.equal(a, b) for a, b in zip(many, run(), strict=True))
    finally:
        torch.set_num_threads(threads)


@needs_kernels
@pytest.mark.parametrize("device", CPU_OR_GPU)
def test_strided_and_misaligned_inputs(device):
    strided = lambda t: torch.stack([t, t], -1).to(device)[..., 0]
    shifted = lambda t: torch.cat([t.flatten()[:1], t.flatten()]).to(device)[1:].view(t.shape)
    *inputs, dout = merge_inputs(1, 5, 4, 2, 16, 2, torch.float32)
    plain = Compiled(device).merge(*to(inputs, lambda t: t.to(device)))
    for change in (strided, shifted):
        for a, b in zip(plain, Compiled(device).merge(*to(inputs, change)), strict=True):
            assert torch.equal(a, b)
    experts = expert_inputs(20, 8, 2, 4, 8, torch.float32)
    plain = Compiled(device).experts(*to(experts, lambda t: t.to(device)))
    for change in (strided, shifted):
        for a, b in zip(plain, Compiled(device).experts(*to(experts, change)), strict=True):
            assert torch.equal(a, b)


@needs_kernels
def test_masked_row_may_hold_anything():
    o_0, lse_0, q, ks, vs, scale, dout = merge_inputs(1, 4, 2, 1, 8, 2, torch.float32)
    o_0[:, 0] = torch.nan
    out, lse = torch.ops.mtp_kernels.merge(o_0, lse_0, q, ks, vs, scale)
    grads = Compiled("cpu").merge_backward(dout, q, ks, vs, out, lse, scale, o_0, lse_0)
    assert all(t.isfinite().all() for t in flatten([out, lse, grads]))
    assert grads[-1][:, 0].eq(0).all() and grads[-2][:, 0].eq(0).all()


@needs_kernels
def test_bad_input_is_refused_by_name():
    o_0, lse_0, q, ks, vs, scale, _ = merge_inputs(1, 4, 4, 2, 8, 2, torch.float32)
    merge, ops = torch.ops.mtp_kernels.merge, torch.ops.mtp_kernels
    with pytest.raises(RuntimeError, match="1 to 15"):
        merge(o_0, lse_0, q, [], [], scale)
    with pytest.raises(RuntimeError, match=r"lse \(lse_0\) is BFloat16"):
        merge(o_0, lse_0.bfloat16(), q, ks, vs, scale)
    with pytest.raises(RuntimeError, match="head dim 6"):
        merge(o_0[..., :6], lse_0, q[..., :6], [k[..., :6] for k in ks], [v[..., :6] for v in vs], scale)
    with pytest.raises(RuntimeError, match="vs has shape"):
        merge(o_0, lse_0, q, ks, [vs[0], vs[1][:, :3]], scale)
    _, x, index, w, gate_up, down = expert_inputs(5, 8, 2, 3, 8, torch.float32)
    with pytest.raises(RuntimeError, match="expert index"):
        ops.experts_forward(x, index + 2, w, gate_up, down)
    with pytest.raises(RuntimeError, match="gate_up_proj has shape"):
        ops.experts_forward(x, index, w, gate_up[:, :8], down)
    with pytest.raises(RuntimeError, match="contiguous"):
        ops.loss_rows(torch.randn(8, 4).t(), torch.randn(8, 4).t(), torch.ones(4), 1.0, 1.0)


@needs_kernels
def test_no_wide_tensor_is_saved_for_backward():
    dy, x, index, w, gate_up, down = expert_inputs(64, 32, 4, 8, 16, torch.float32)
    saved, inputs = [], {t.data_ptr() for t in (x, w, gate_up, down)}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        torch.ops.mtp_kernels.experts_forward(
            *(t.requires_grad_(t.is_floating_point()) for t in (x, index, w, gate_up, down))
        )
    extra = sum(t.nbytes for t in saved if t.data_ptr() not in inputs)
    assert extra == 64 * 4 * (2 * 16 * 4 + 2 * 4) + 8 * 4  # pre-activations, order and its inverse, offsets


# ---- slow: sanitizers, planted faults, compilers ---------------------------------------------------------
# Every launcher on small sizes; several chunks in the sort, several launches in the backward, ragged last
# warps.
DRIVER = r"""
#include <numeric>
template <class T> struct Array {  // exactly its size, so that AddressSanitizer sees the first byte outside
  T* p;
  explicit Array(size_t n) : p((T*)std::aligned_alloc(16, (n * sizeof(T) + 15) / 16 * 16)) {
    for (size_t i = 0; i < n; i++) p[i] = (T)(i * 7 % 13);
  }
  ~Array() { std::free(p); }
  operator T*() const { return p; }
};
int main(int, char** argv) {
#ifndef MTP_EMULATE_THREADS
  mtp_emulate_order(argv[1][0] - '0');
#endif
  const int64_t N = 550, A = 2, E = 3, P = N * A, C = 16, W = 8, H = 6, G = 2, D = 24, R = 3, K = 5;
  for (int dtype = 0; dtype < 2 && !LAUNCH_ERROR(); dtype++) {
    const size_t unit = dtype ? 1 : 2;  // in 16-bit words
    auto data = [&](size_t n) { return Array<uint16_t>(n * unit); };
    Array<int64_t> index(P);
    for (int64_t i = 0; i < P; i++) index[i] = i * i % 7 % E;
    Array<int> order(2 * P), offsets(E), scratch(E * 257);
    Array<float> w(P), dw(P);
    auto x = data(N * C), xs = data(P * C), y = data(N * C);
    auto h = data(P * 2 * W), dh = data(P * 2 * W), a = data(P * W);
    auto weights = data(E * W * C);
    mtp_cuda_sort(index, P, E, order, offsets, scratch, nullptr);
    for (int64_t i = 1; i < P; i++)
      if (index[order[i - 1]] * P + order[i - 1] > index[order[i]] * P + order[i])
        return std::puts("not a stable sort"), 7;
    mtp_cuda_gather(dtype, x, order, P, A, C, xs, nullptr);
    mtp_cuda_act(dtype, h, P, W, a, nullptr);
    mtp_cuda_act_backward(dtype, h, a, order, w, P, W, dh, dw, nullptr);
    mtp_cuda_combine(dtype, xs, order + P, w, N, A, C, y, nullptr);
    offsets[1] = offsets[0];
    mtp_cuda_zero_empty(dtype, offsets, E, W * C, weights, nullptr);
    for (int64_t k = 1; k <= K; k += 4) {
      auto q = data(R * H * D), o = data(R * H * D), out = data(R * H * D);
      auto d = data(R * H * D), dq = data(R * H * D);
      auto cache = data(R * G * D * K * 4), first = data(R * H * D);
      Array<float> lse_0(R * H), lse(R * H), dlse(R * H), sum(R * H * D);
      void *ks[K], *vs[K], *dks[K], *dvs[K];
      for (int64_t j = 0; j < K; j++) {
        uint16_t* at = cache + R * G * D * unit * 4 * j;
        ks[j] = at, vs[j] = at + R * G * D * unit;
        dks[j] = at + 2 * R * G * D * unit, dvs[j] = at + 3 * R * G * D * unit;
      }
      mtp_cuda_merge_forward(dtype, R, H, G, D, k, 0.2, o, lse_0, q, ks, vs, out, lse, nullptr);
      mtp_cuda_merge_backward(dtype, R, H, G, D, k, 0.2, d, q, ks, vs, out, lse, o, lse_0, dq, dks, dvs,
                              first, dlse, sum, nullptr);
    }
    for (int64_t V : {37, 64}) {
      auto t = data(R * V), d = data(R * V);
      Array<float> c(R), ce(R), kl(R);
      Array<int64_t> ti(R), di(R);
      mtp_cuda_loss_rows(dtype, R, V, t, d, c, 1, 1, ce, kl, ti, di, nullptr);
    }
  }
#ifndef MTP_EMULATE_THREADS
  if (!emulation::error.empty()) return std::puts(emulation::error.c_str()), 8;
#endif
  return 0;
}
"""
SMALLER = [
    ("FORWARD_K = 7", "FORWARD_K = 1"),
    ("BACKWARD_K = 4", "BACKWARD_K = 2"),
    ("  if (dtype == 2) f(Fp16());\n", ""),
]
ENGINES = {
    "fibers": ["-O1"],
    "thread": ["-O1", "-DMTP_EMULATE_THREADS", "-fsanitize=thread"],
    "address": ["-O1", "-DMTP_EMULATE_THREADS", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}
FAULTS = {  # name: (who sees it, what it says, the edit)
    "barrier whose absence changes a value": (
        "fibers",
        "not a stable sort",
        ("    __syncthreads();  // everyone has read\n", ""),
    ),
    "divergent barrier": (
        "fibers",
        "divergent barrier",
        (
            "[threadIdx.x / 32] = kl;\n  __syncthreads();",
            "[threadIdx.x / 32] = kl;\n  if (threadIdx.x > 6) __syncthreads();",
        ),
    ),
    "race whose effect cancels": (
        "thread",
        "data race",
        ("  if (threadIdx.x == 0) {\n    float x[8];", "  {\n    float x[8];"),
    ),
    "write past the end": (
        "address",
        "heap-buffer-overflow",
        (
            "if (i >= pairs * per_row) return;\n  const int64_t place",
            "if (i > pairs * per_row) return;\n  const int64_t place",
        ),
    ),
    "index outside __shared__": (
        "address",
        "out of bounds",
        ("SHARED(int, total, SCAN)", "SHARED(int, total, SCAN - 1)"),
    ),
}
slow_kernels = pytest.mark.slow_kernels
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def run_driver(folder, engine, edits=()):
    """Exit statuses and output of the driver, once per thread order where the engine has them."""
    program = build(folder, ENGINES[engine], [*SMALLER, *edits], "driver", DRIVER)
    runs = [
        subprocess.run([str(program), str(order)], capture_output=True, text=True, timeout=300)
        for order in range(4 if engine == "fibers" else 1)
    ]
    return [r.returncode for r in runs], "".join(r.stdout + r.stderr for r in runs)


@slow_kernels
@needs_gxx
@pytest.mark.parametrize("engine", ENGINES)
def test_engine_finds_nothing(engine, tmp_path):
    statuses, said = run_driver(tmp_path, engine)
    assert not any(statuses), said[-3000:]


@slow_kernels
@needs_gxx
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_seen(fault, tmp_path):
    engine, what, edit = FAULTS[fault]
    statuses, said = run_driver(tmp_path, engine, (edit,))
    assert any(statuses) and what in said, said[-3000:]


@slow_kernels
def test_nvcc_three_architectures_without_spills(tmp_path):
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not os.path.exists(nvcc):
        pytest.skip("no nvcc")
    archs = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in (80, 90, 100)]
    done = subprocess.run(
        [
            nvcc,
            "-std=c++17",
            "-O3",
            "--threads=2",
            "-Xptxas=-v",
            *archs,
            "-c",
            str(HERE / "csrc/kernels.cu"),
            "-o",
            str(tmp_path / "kernels.o"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    spills = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr
    )
    registers = [int(r) for r in re.findall(r"Used (\d+) registers", done.stderr)]
    assert len(spills) >= 3 * 50 and all(s == ("0", "0", "0") for s in spills), set(spills)
    print(f"{len(spills)} kernels, at most {max(registers)} registers, no spills")


@slow_kernels
@needs_gxx
def test_cuda_half_of_the_binding_compiles(tmp_path):
    from torch.utils.cpp_extension import include_paths
    import sysconfig

    toolkit = pathlib.Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    if not (toolkit / "cuda_runtime_api.h").exists():
        pytest.skip("no CUDA toolkit")
    folders = [f"-I{p}" for p in (*include_paths(), sysconfig.get_paths()["include"], toolkit)]
    done = subprocess.run(
        [
            "g++",
            "-std=c++20",
            "-O0",
            "-fPIC",
            "-DMTP_CUDA",
            "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE",
            *folders,
            "-c",
            str(HERE / "csrc/bind.cpp"),
            "-o",
            str(tmp_path / "bind.o"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


# ---- benchmarks ------------------------------------------------------------------------------------------
TUNED = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def medians(candidates, seconds=20.0):
    """Milliseconds of each candidate; they take turns, so that a slow spell of the machine hits all."""
    times = {name: [] for name in candidates}
    stop = time.perf_counter() + seconds
    for turn in itertools.count():
        for name, f in candidates.items():
            start = time.perf_counter()
            f()
            times[name].append(1e3 * (time.perf_counter() - start))
        if turn >= 3 and time.perf_counter() > stop:
            return {name: statistics.median(t[1:]) for name, t in times.items()}


def table(title, rows, floor, note):
    print(f"\n{title}; {note}")
    for name, ms in rows.items():
        print(f"  {name:42s} {ms:9.1f} ms  {ms / floor:6.2f}x", flush=True)


def copy_bandwidth(floats=32 << 20):
    """Bytes per second of y = x, read and write counted, in buffers that exist already."""
    x, y = torch.ones(floats), torch.ones(floats)
    ms = medians({"copy": lambda: y.copy_(x)}, 1)["copy"]
    return 2 * x.nbytes / ms * 1e3


def backward_of(f, inputs, grad):
    def run():
        out = f(*inputs)
        return torch.autograd.grad(
            out, [t for t in flatten(inputs) if isinstance(t, torch.Tensor) and t.requires_grad], grad
        )

    return run


def bench_moe(C=1024, width=512, E=64, A=8, T=4096):
    for dtype in (torch.float32, torch.bfloat16):
        dy, x, index, w, gate_up, down = expert_inputs(T, C, A, E, width, dtype)
        leaves = [t.requires_grad_() for t in (x, w, gate_up, down)]
        rows, act = torch.randn(T * A, C, dtype=dtype), torch.randn(T * A, width, dtype=dtype)
        w1, w2, h = gate_up[0].detach(), down[0].detach(), torch.randn(T * A, 2 * width, dtype=dtype)
        o1, o2, o3 = torch.empty_like(h), torch.empty_like(rows), torch.empty_like(act)
        g1, g2 = torch.empty_like(w1), torch.empty_like(w2)

        def dense(backward):
            torch.mm(rows, w1.t(), out=o1)
            torch.mm(act, w2.t(), out=o2)
            if backward:
                torch.mm(rows, w2, out=o3)
                torch.mm(rows.t(), act, out=g2)
                torch.mm(h, w1, out=o2)
                torch.mm(h.t(), rows, out=g1)

        def grouped(x, w, gate_up, down):
            order = index.flatten().argsort(stable=True)
            ends = index.flatten().bincount(minlength=E).cumsum(0).int()
            gate, up = F.grouped_mm(x[order // A], gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
            out = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends) * w.flatten()[
                order, None
            ].to(dtype)
            return torch.zeros_like(x).index_add_(0, order // A, out)

        ours = lambda x, w, gate_up, down: torch.ops.mtp_kernels.experts_forward(x, index, w, gate_up, down)[
            0
        ]
        with torch.no_grad():
            found = medians(
                {
                    "dense matmuls (floor)": lambda: dense(False),
                    "ours": lambda: ours(*leaves),
                    "F.grouped_mm": lambda: grouped(*leaves),
                }
            )
        note = f"C={C} F={width} E={E} A={A} T={T}, {dtype}"
        table("MoE forward", found, found["dense matmuls (floor)"], note)
        found = medians(
            {
                "dense matmuls (floor)": lambda: dense(True),
                "ours": backward_of(ours, leaves, dy),
                "F.grouped_mm": backward_of(grouped, leaves, dy),
            },
            40,
        )
        table("MoE forward + backward", found, found["dense matmuls (floor)"], note)


def bench_merge(B=1, H=32, G=4, T=8192, D=128, k=3):
    bandwidth = copy_bandwidth()
    for dtype in (torch.float32, torch.bfloat16):
        o_0, lse_0, q, ks, vs, scale, dout = merge_inputs(B, T, H, G, D, k, dtype)
        N, s, r = B * H * T, q.element_size(), H // G
        forward, backward = s * N * D * (3 + 2 * k / r) + 8 * N, s * N * D * (4 + 4 * k / r) + 16 * N
        op, op_backward = torch.ops.mtp_kernels.merge, torch.ops.mtp_kernels.merge_backward
        leaves = [t.clone().requires_grad_() for t in (q, *ks, *vs)]
        eager = lambda q, *kv: merge_ref(o_0, lse_0, q, kv[:k], kv[k:], scale)[0]

        def both():
            out, lse = op(o_0, lse_0, q, ks, vs, scale)
            return op_backward(dout, q, ks, vs, out, lse, scale)

        note = (
            f"B={B} H={H} G={G} T={T} D={D} k={k}, {dtype}, floor at the measured {bandwidth / 1e9:.0f} GB/s"
        )
        found = medians({"ours": lambda: op(o_0, lse_0, q, ks, vs, scale)}, 5)
        floor = forward / bandwidth * 1e3
        table("merge forward", {"bytes floor": floor, **found}, floor, note)
        floor = (forward + backward) / bandwidth * 1e3
        found = medians({"ours": both, "eager merge_ref": backward_of(eager, leaves, dout)}, 15)
        table("merge forward + backward", {"bytes floor": floor, **found}, floor, note)


def bench_loss(T=1024, C=512, chunk=256):
    for V, dtype in itertools.product((32000, 151936), (torch.float32, torch.bfloat16)):
        n, h, W = (torch.randn(*s).to(dtype) for s in ((T, C), (T, C), (V, C)))
        teacher, draft, dn = (
            torch.empty(chunk, V, dtype=dtype),
            torch.empty(chunk, V, dtype=dtype),
            torch.empty_like(n),
        )
        coeff = torch.full((chunk,), 1 / T)

        def walk(rows):
            for i in range(0, T, chunk):
                torch.mm(h[i : i + chunk], W.t(), out=teacher)
                torch.mm(n[i : i + chunk], W.t(), out=draft)
                rows(teacher, draft, coeff, 1.0, 1.0)
                torch.mm(draft, W, out=dn[i : i + chunk])

        found = medians(
            {
                "three GEMMs (floor)": lambda: walk(lambda *_: None),
                "ours": lambda: walk(torch.ops.mtp_kernels.loss_rows),
                "loss_rows_ref": lambda: walk(loss_rows_ref),
            },
            15,
        )
        table("loss rows", found, found["three GEMMs (floor)"], f"T={T} C={C} V={V} chunk={chunk}, {dtype}")


BENCHES = {"moe": bench_moe, "merge": bench_merge, "loss": bench_loss}


def bench(names):
    if mtp_kernels is None:
        sys.exit(f"mtp_kernels is not built ({missing}); run: python setup.py build_ext --inplace")
    for name in names or BENCHES:
        for setting, extra in (("default malloc", {}), ("tuned malloc", TUNED)):
            print(f"\n==== {name}, {setting}, {torch.get_num_threads()} threads", flush=True)
            subprocess.run(
                [sys.executable, __file__, "--table", name], env={**os.environ, **extra}, check=True
            )


# ---- on a GPU --------------------------------------------------------------------------------------------
def gpu_ms(f, turns=30):
    """Median milliseconds by CUDA events, the L2 cache overwritten before every run."""
    flush, times = torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), []
    for _ in range(turns):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        f()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def gpu_bandwidth():
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.nbytes / gpu_ms(lambda: y.copy_(x)) * 1e3


def gpu_merge(rows, bandwidth, B=1, H=32, G=4, T=8192, D=128):
    op, op_backward = torch.ops.mtp_kernels.merge, torch.ops.mtp_kernels.merge_backward
    for k, dtype in itertools.product((1, 3, 7), (torch.bfloat16, torch.float32)):
        o_0, lse_0, q, ks, vs, scale, dout = to(merge_inputs(B, T, H, G, D, k, dtype), lambda t: t.cuda())
        N, s, r = B * H * T, q.element_size(), H // G
        out, lse = op(o_0, lse_0, q, ks, vs, scale)
        eager = torch.compile(lambda *kv: merge_ref(o_0, lse_0, q, kv[:k], kv[k:], scale))
        rows += [
            (
                f"merge forward k={k} {dtype}",
                gpu_ms(lambda: op(o_0, lse_0, q, ks, vs, scale)),
                (s * N * D * (3 + 2 * k / r) + 8 * N) / bandwidth * 1e3,
                gpu_ms(lambda: eager(*ks, *vs)),
            ),
            (
                f"merge backward k={k} {dtype}",
                gpu_ms(lambda: op_backward(dout, q, ks, vs, out, lse, scale)),
                (s * N * D * (4 + 4 * k / r) + 16 * N) / bandwidth * 1e3,
                gpu_ms(lambda: merge_backward_ref(dout, q, ks, vs, out, lse, scale)),
            ),
        ]


def gpu_moe(rows, C=1024, width=512, E=64, A=8, T=4096):
    dtype = torch.bfloat16
    dy, x, index, w, gate_up, down = to(expert_inputs(T, C, A, E, width, dtype), lambda t: t.cuda())
    op, op_backward = torch.ops.mtp_kernels.experts_forward, torch.ops.mtp_kernels.experts_backward
    _, order, offsets, pre = op(x, index, w, gate_up, down)
    xs, a = x.repeat(A, 1), pre[:, :width].contiguous()
    gemm = lambda: (
        F.grouped_mm(xs, gate_up.transpose(1, 2), offs=offsets),
        F.grouped_mm(a, down.transpose(1, 2), offs=offsets),
    )

    def torch_forward():
        places = index.flatten().argsort(stable=True)
        ends = index.flatten().bincount(minlength=E).cumsum(0).int()
        gate, up = F.grouped_mm(x[places // A], gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
        y = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends) * w.flatten()[places, None].to(
            dtype
        )
        return torch.zeros_like(x).index_add_(0, places // A, y)

    rows += [
        (
            "experts forward bf16 (floor: its GEMMs)",
            gpu_ms(lambda: op(x, index, w, gate_up, down)),
            gpu_ms(gemm),
            gpu_ms(torch_forward),
        ),
        (
            "experts backward bf16 (floor: twice that)",
            gpu_ms(lambda: op_backward(dy, x, w, gate_up, down, order, offsets, pre)),
            2 * gpu_ms(gemm),
            None,
        ),
    ]


def gpu_loss(rows, bandwidth, R=256):
    for V, dtype in itertools.product((32000, 151936), (torch.bfloat16, torch.float32)):
        teacher, draft, coeff, *weights = to(loss_inputs(R, V, dtype), lambda t: t.cuda())
        rows.append(
            (
                f"loss rows V={V} R={R} {dtype}",
                gpu_ms(lambda: torch.ops.mtp_kernels.loss_rows(teacher, draft, coeff, *weights)),
                3 * draft.nbytes / bandwidth * 1e3,
                gpu_ms(lambda: loss_rows_ref(teacher, draft, coeff, *weights)),
            )
        )


def run_on_gpu(path):
    """Checks, compute-sanitizer, timings; a table and JSON. Nothing is timed before it is right."""
    if not CUDA:
        sys.exit(
            f"no GPU, or kernels without CUDA code ({missing if mtp_kernels is None else torch.__version__})"
        )
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:warnings", __file__, "-k", "cuda"]
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "checks": subprocess.run(tests, timeout=150).returncode,
    }
    if report["checks"]:
        sys.exit("the checks fail, so nothing is timed")
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    for tool in ("memcheck", "racecheck") if os.path.exists(sanitizer) else ():
        command = [sanitizer, f"--tool={tool}", "--error-exitcode=9", sys.executable, __file__, "--once"]
        try:
            report[tool] = subprocess.run(command, timeout=70).returncode
        except subprocess.TimeoutExpired:
            report[tool] = "not finished in 70 s"
    rows, bandwidth = [], gpu_bandwidth()
    gpu_merge(rows, bandwidth)
    gpu_moe(rows)
    gpu_loss(rows, bandwidth)
    report |= {
        "bandwidth": bandwidth,
        "rows": [dict(zip(("op", "ms", "floor_ms", "torch_ms"), r)) for r in rows],
    }
    print(
        f"{report['device']}, copy {bandwidth / 1e12:.2f} TB/s, "
        f"memcheck {report.get('memcheck', 'not installed')}, "
        f"racecheck {report.get('racecheck', 'not installed')}"
    )
    for name, ms, floor, other in rows:
        print(
            f"  {name:44s} {ms:8.3f} ms  {ms / floor:5.2f}x floor"
            + (f"  torch {other:8.3f} ms" if other else "")
        )
    pathlib.Path(path).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--bench"]:
        bench(sys.argv[2:])
    elif sys.argv[1:2] == ["--table"]:
        BENCHES[sys.argv[2]]()
    elif sys.argv[1:2] == ["--gpu"]:
        run_on_gpu(*(sys.argv[2:] or ["gpu.json"]))
    elif sys.argv[1:2] == ["--once"]:  # what compute-sanitizer runs
        for each in DTYPES:
            every_output(Compiled("cuda"), each)
        torch.cuda.synchronize()
    else:
        sys.exit(__doc__)
