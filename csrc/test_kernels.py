"""The kernels of csrc against mtp.py's own PyTorch: compiled for the CPU, on a GPU where there is one, and
the CUDA source compiled as C++ and emulated thread by thread (emulation.h).

    pytest -q csrc                         quick
    pytest -q csrc -m slow                 sanitizer builds, planted faults, nvcc

Code in 16 bits may err twice as much as plain PyTorch does, against float64.
"""
import ctypes
import functools
import itertools
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

import mtp
from test_mtp import HERE, needs_built


missing = None  # why there are no kernels
try:
    import mtp_kernels
except ImportError as error:
    mtp_kernels, missing = None, error

CUDA = mtp_kernels is not None and mtp_kernels.cuda and torch.cuda.is_available()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a GPU and kernels built for it")]


# ---- csrc: references --------------------------------------------------------------------------------------
merge_ref, experts_ref = mtp.merge_ref, mtp.experts_ref


def merge_backward_ref(dout, q, ks, vs, out, lse, scale, o_0=None, lse_0=None):
    """mtp.py's; and, given block 0's output and lse, their gradients, which mtp.py leaves to autograd."""
    grads = mtp.merge_backward_ref(dout, q, ks, vs, out, lse, scale)
    if o_0 is None:
        return grads
    w_0 = (lse_0 - lse).exp()
    dout32, out32, o_0_32 = (x.to(lse.dtype) for x in (dout, out, o_0))
    return *grads, (w_0[..., None] * dout32).to(q.dtype), w_0 * (dout32 * (o_0_32 - out32)).sum(-1)


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


# ---- csrc: three ways to call the kernels ------------------------------------------------------------------
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


CUDA_SOURCES = "merge.cu", "experts.cu", "loss.cu"


def build(folder, flags=(), edits=(), name="emulated", driver=""):
    """The .cu files as C++: a library, or with `driver` a program. edits: (old, new) pairs, for faults."""
    folder, edits = Path(folder), dict(edits)
    for source in (HERE / "csrc").glob("*.cu*"):
        text = source.read_text()
        for old in [old for old in edits if old in text]:
            text = text.replace(old, edits.pop(old))
        (folder / source.name).write_text(text)
    assert not edits, f"no .cu file has {[*edits]}"
    path, out = folder / f"{name}.cpp", folder / name
    path.write_text("".join(f'#include "{file}"\n' for file in CUDA_SOURCES) + driver)
    kind = [] if driver else ["-shared", "-fPIC"]
    command = ["g++", "-std=c++20", "-g", "-DMTP_EMULATE", f"-I{folder}", f"-I{HERE / 'csrc'}", *kind, *flags,
               "-Wno-unknown-pragmas", str(path), "-o", str(out), "-pthread"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


class MergeArgs(ctypes.Structure):
    """csrc/merge.h"""

    _fields_ = [("rows", ctypes.c_int64), *((size, ctypes.c_int) for size in ("G", "group", "D", "k")),
                ("scale", ctypes.c_double), *((x, ctypes.c_void_p) for x in ("o_0", "lse_0", "q")),
                ("ks", ctypes.c_void_p * 7), ("vs", ctypes.c_void_p * 7),
                *((x, ctypes.c_void_p) for x in ("out", "lse", "dout", "dq")),
                ("dks", ctypes.c_void_p * 7), ("dvs", ctypes.c_void_p * 7),
                *((x, ctypes.c_void_p) for x in ("do_0", "dlse_0"))]


class LossArgs(ctypes.Structure):
    """csrc/loss.h"""

    _fields_ = [("rows", ctypes.c_int64), ("V", ctypes.c_int64),
                *((x, ctypes.c_void_p) for x in ("teacher", "draft", "coeff")),
                ("ce_weight", ctypes.c_double), ("kl_weight", ctypes.c_double),
                *((x, ctypes.c_void_p) for x in ("ce", "kl", "teacher_index", "draft_index"))]


def fill(struct, **fields):
    """The struct with these fields; a tensor becomes its address, a list of tensors an array of addresses."""
    address = lambda x: x.data_ptr() if isinstance(x, torch.Tensor) else x
    for name, x in fields.items():
        setattr(struct, name, (ctypes.c_void_p * 7)(*map(address, x)) if isinstance(x, list) else address(x))
    return struct


def argument(x):
    """x as ctypes passes it to a launcher."""
    if isinstance(x, torch.Tensor):
        return ctypes.c_void_p(x.data_ptr())
    if isinstance(x, ctypes.Structure):
        return ctypes.byref(x)
    return ctypes.c_int64(x) if isinstance(x, int) else x


def grouped_mm(rows, weights, offsets):
    """What at::_grouped_mm computes; groups without rows are left as NaN, as a GEMM may leave them."""
    ends = offsets.tolist()
    spans = list(zip([0, *ends], ends))
    if weights.dim() == 3:
        return torch.cat([rows[a:b] @ weights[e] for e, (a, b) in enumerate(spans)])
    empty = torch.full((len(rows), weights.shape[1]), float("nan"), dtype=rows.dtype)
    return torch.stack([rows[:, a:b] @ weights[a:b] if b > a else empty for a, b in spans])


class Emulated:
    """The CUDA launchers of the emulated library, composed as bind.cpp and experts_cuda.cpp compose them."""

    device = "cpu"

    def __init__(self, library, order=0):
        self.lib, self.order = ctypes.CDLL(str(library)), order
        self.lib.mtp_emulate_error.restype = ctypes.c_char_p

    def call(self, name, *args):
        self.lib.mtp_emulate_order(self.order)
        status = getattr(self.lib, f"mtp_cuda_{name}")(*map(argument, args), None)
        error = self.lib.mtp_emulate_error().decode()
        assert status == 0 and not error, error

    def call_merge(self, name, q, ks, vs, scale, **rest):
        B, T, H, D = q.shape
        G = ks[0].shape[2]
        args = fill(MergeArgs(), rows=B * T, G=G, group=H // G, D=D, k=len(ks), scale=scale, q=q, ks=ks,
                    vs=vs, **rest)
        self.call(name, DTYPES.index(q.dtype), args)

    def merge(self, o_0, lse_0, q, ks, vs, scale):
        out, lse = torch.empty_like(q), torch.empty_like(lse_0)
        self.call_merge("merge_forward", q, ks, vs, scale, o_0=o_0, lse_0=lse_0, out=out, lse=lse)
        return out, lse

    def merge_backward(self, dout, q, ks, vs, out, lse, scale, o_0=None, lse_0=None):
        dq, dks, dvs = torch.empty_like(q), *([torch.empty_like(x) for x in xs] for xs in (ks, vs))
        first = {}
        if o_0 is not None:
            first = {"do_0": torch.empty_like(q), "dlse_0": torch.empty_like(lse)}
        self.call_merge("merge_backward", q, ks, vs, scale, dout=dout, out=out, lse=lse, o_0=o_0, lse_0=lse_0,
                        dq=dq, dks=dks, dvs=dvs, **first)
        return dq, dks, dvs, *first.values()

    def experts(self, dy, x, index, w, gate_up, down):
        (N, C), A, (E, _, width), code = x.shape, w.shape[1], down.shape, DTYPES.index(x.dtype)
        pairs, new = N * A, lambda *shape: torch.full(shape, float("nan"), dtype=x.dtype)
        order, offsets = torch.empty(2, pairs, dtype=torch.int32), torch.empty(E, dtype=torch.int32)
        self.call("sort", index, pairs, E, order, offsets, torch.empty(E * 257, dtype=torch.int32))
        xs, dys, a, dh = new(pairs, C), new(pairs, C), new(pairs, width), new(pairs, 2 * width)
        y, dx = new(N, C), new(N, C)
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
        R, V = draft.shape
        args = fill(LossArgs(), rows=R, V=V, teacher=teacher, draft=draft, coeff=coeff, ce_weight=ce_weight,
                    kl_weight=kl_weight, ce=ce, kl=kl, teacher_index=t, draft_index=d)
        self.call("loss_rows", DTYPES.index(draft.dtype), args)
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


def shapes_and_ways(shapes, rows):
    """Parameters (shape, way); `rows`: which number of a shape that is. Of no rows nothing is launched: the
    binding returns before, so that there is nothing to emulate."""
    return [pytest.param(shape, how, marks=gpu if how == "cuda" else (), id=f"{shape}-{how}")
            for shape in shapes for how in ("cpu", "emulated", "cuda") if shape[rows] or how != "emulated"]


# ---- csrc: the twice-PyTorch rule --------------------------------------------------------------------------
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
    (1, 5, 4, 2, 256, 7),
    (1, 4, 4, 4, 136, 6),
    (1, 0, 2, 1, 16, 2),
    (3, 2, 16, 1, 72, 6),
]


def merge_inputs(B, T, H, G, D, k, dtype, masked=True, seed=0):
    torch.manual_seed(seed)
    make = lambda heads: torch.randn(B, T, heads, D).to(dtype)
    o_0, q, dout, lse_0 = make(H), make(H), make(H), torch.randn(B, T, H).to(mtp.fp32(dtype))
    if masked and T:
        lse_0[:, 0], o_0[:, 0] = -torch.inf, 0  # a fully masked row of block 0
    return o_0, lse_0, q, [make(G) for _ in range(k)], [make(G) for _ in range(k)], D**-0.5, dout


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape, how", shapes_and_ways(MERGE_SHAPES, 1))
def test_merge(shape, dtype, how):
    kernel = kernels(how)
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
    x, dy, w = torch.randn(N, C).to(dtype), torch.randn(N, C).to(dtype), torch.rand(N, A).to(mtp.fp32(dtype))
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routing", ["random", "one"])
@pytest.mark.parametrize("shape, how", shapes_and_ways(EXPERT_SHAPES, 0))
def test_experts(shape, routing, dtype, how):
    kernel = kernels(how)
    run_twice(
        kernel.experts,
        experts_with_gradients,
        lambda seed: expert_inputs(*shape, dtype, routing, seed),
        dtype,
        kernel.device,
    )


@needs_built
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
    return teacher, draft, torch.arange(R).to(mtp.fp32(dtype)) / R, 0.7, 1.3


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
    for shape in [(1, 3, 4, 2, 64, 3), (1, 2, 6, 2, 24, 7)]:
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


# ---- csrc: gradients, tracing, refusals, determinism -------------------------------------------------------
def merge_op(o_0, lse_0, q, scale, *kv):
    k = len(kv) // 2
    return torch.ops.mtp_kernels.merge(o_0, lse_0, q, kv[:k], kv[k:], scale)[0]


@needs_built
def test_gradcheck():
    o_0, lse_0, q, ks, vs, scale, _ = merge_inputs(1, 3, 4, 2, 8, 5, torch.float64, masked=False)
    leaves = [t.requires_grad_() for t in (o_0, lse_0, q, *ks, *vs)]
    assert torch.autograd.gradcheck(lambda *t: merge_op(*t[:3], scale, *t[3:]), leaves)
    dy, x, index, w, gate_up, down = expert_inputs(5, 4, 2, 3, 3, torch.float64)
    leaves = [t.requires_grad_() for t in (x, w, gate_up, down)]
    op = torch.ops.mtp_kernels.experts_forward
    assert torch.autograd.gradcheck(lambda a, b, c, d: op(a, index, b, c, d)[0], leaves)


@needs_built
def test_float64_matches_the_references():
    *inputs, dout = merge_inputs(2, 5, 6, 2, 24, 7, torch.float64)
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


@needs_built
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


@needs_built
@pytest.mark.parametrize("device", CPU_OR_GPU)
def test_same_bits_every_run(device):
    for dtype in DTYPES:
        first = every_output(Compiled(device), dtype)
        for _ in range(2):
            assert all(
                torch.equal(a, b) for a, b in zip(first, every_output(Compiled(device), dtype), strict=True)
            )


@needs_built
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

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        many = run()
        torch.set_num_threads(1)
        assert all(torch.equal(a, b) for a, b in zip(many, run(), strict=True))
    finally:
        torch.set_num_threads(threads)


@needs_built
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


@needs_built
def test_masked_row_may_hold_anything():
    o_0, lse_0, q, ks, vs, scale, dout = merge_inputs(1, 4, 2, 1, 8, 2, torch.float32)
    o_0[:, 0] = torch.nan
    out, lse = torch.ops.mtp_kernels.merge(o_0, lse_0, q, ks, vs, scale)
    grads = Compiled("cpu").merge_backward(dout, q, ks, vs, out, lse, scale, o_0, lse_0)
    assert all(t.isfinite().all() for t in flatten([out, lse, grads]))
    assert grads[-1][:, 0].eq(0).all() and grads[-2][:, 0].eq(0).all()


@needs_built
def test_bad_input_is_refused_by_name():
    o_0, lse_0, q, ks, vs, scale, _ = merge_inputs(1, 4, 4, 2, 8, 2, torch.float32)
    merge, ops = torch.ops.mtp_kernels.merge, torch.ops.mtp_kernels
    with pytest.raises(RuntimeError, match="0 keys and 0 values, expected 1 to 7 of each"):
        merge(o_0, lse_0, q, [], [], scale)
    with pytest.raises(RuntimeError, match="8 keys and 8 values, expected 1 to 7 of each; mtp.merge "):
        merge(o_0, lse_0, q, ks * 4, vs * 4, scale)
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


@needs_built
def test_chains_of_more_than_seven_take_the_reference():
    o_0, lse_0, q, ks, vs, scale, dout = merge_inputs(1, 4, 4, 2, 8, 8, torch.float32)
    ours, theirs = mtp.merge(o_0, lse_0, q, ks, vs, scale), merge_ref(o_0, lse_0, q, ks, vs, scale)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    args = dout, q, ks, vs, *theirs, scale
    ours, theirs = flatten(mtp.merge_backward(*args)), flatten(merge_backward_ref(*args))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@needs_built
def test_no_wide_tensor_is_saved_for_backward():
    dy, x, index, w, gate_up, down = expert_inputs(64, 32, 4, 8, 16, torch.float32)
    saved, inputs = [], {t.data_ptr() for t in (x, w, gate_up, down)}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        torch.ops.mtp_kernels.experts_forward(
            *(t.requires_grad_(t.is_floating_point()) for t in (x, index, w, gate_up, down))
        )
    extra = sum(t.nbytes for t in saved if t.data_ptr() not in inputs)
    assert extra == 64 * 4 * (2 * 16 * 4 + 2 * 4) + 8 * 4  # pre-activations, order and its inverse, offsets


# ---- csrc: slow: sanitizers, planted faults, compilers -----------------------------------------------------
# Every launcher on small sizes; several chunks in the sort, short and long chains, ragged last warps.
SMALLER = [("  if (dtype == 2) f(Fp16());\n", "")]  # the driver does not call them: less to compile
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
slow = pytest.mark.slow
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def run_driver(folder, engine, edits=()):
    """Exit statuses and output of the driver, once per thread order where the engine has them."""
    program = build(folder, ENGINES[engine], [*SMALLER, *edits], "driver",
                    (HERE / "csrc/driver.cpp").read_text())
    runs = [
        subprocess.run([str(program), str(order)], capture_output=True, text=True, timeout=300)
        for order in range(4 if engine == "fibers" else 1)
    ]
    return [r.returncode for r in runs], "".join(r.stdout + r.stderr for r in runs)


@slow
@needs_gxx
@pytest.mark.parametrize("engine", ENGINES)
def test_engine_finds_nothing(engine, tmp_path):
    statuses, said = run_driver(tmp_path, engine)
    assert not any(statuses), said[-3000:]


@slow
@needs_gxx
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_seen(fault, tmp_path):
    engine, what, edit = FAULTS[fault]
    statuses, said = run_driver(tmp_path, engine, (edit,))
    assert any(statuses) and what in said, said[-3000:]


@slow
def test_nvcc_three_architectures_without_spills(tmp_path):
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not os.path.exists(nvcc):
        pytest.skip("no nvcc")
    archs = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in (80, 90, 100)]
    said = ""
    for source in CUDA_SOURCES:
        command = [nvcc, "-std=c++17", "-O3", "--threads=2", "-Xptxas=-v", *archs, "-c",
                   str(HERE / "csrc" / source), "-o", str(tmp_path / "kernels.o")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        said += done.stderr
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    registers = [int(r) for r in re.findall(r"Used (\d+) registers", said)]
    assert len(spills) >= 3 * 60 and all(s == ("0", "0", "0") for s in spills), set(spills)
    print(f"{len(spills)} kernels, at most {max(registers)} registers, no spills")


@slow
@needs_gxx
def test_cuda_half_of_the_binding_compiles(tmp_path):
    from torch.utils.cpp_extension import include_paths
    import sysconfig

    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    if not (toolkit / "cuda_runtime_api.h").exists():
        pytest.skip("no CUDA toolkit")
    folders = [f"-I{p}" for p in (*include_paths(), sysconfig.get_paths()["include"], toolkit)]
    for source in ("bind", "experts_cuda"):
        command = ["g++", "-std=c++20", "-O0", "-fPIC", "-DMTP_CUDA", "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE",
                   *folders, "-c", str(HERE / "csrc" / f"{source}.cpp"), "-o", str(tmp_path / f"{source}.o")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
