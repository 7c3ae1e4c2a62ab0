"""The README's tables of speed and memory of the experts, the merge, the loss and a whole training step.

    python -m bench.kernels [moe merge loss step]
"""
import argparse
import functools
import itertools
import os
import statistics
import subprocess
import sys
import time
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mtp
from csrc.test_kernels import expert_inputs, flatten, merge_inputs, merge_ref, missing, mtp_kernels
from test_mtp import HERE


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
        if turn >= 2 and time.perf_counter() > stop:
            return {name: statistics.median(t[1:]) for name, t in times.items()}


def table(title, rows, floor, note):
    print(f"\n{title}; {note}")
    for name, ms in rows.items():
        print(f"  {name:42s} {ms:9.1f} ms  {ms / floor:6.2f}x", flush=True)


def backward_of(f, inputs, grad):
    def run():
        out = f(*inputs)
        return torch.autograd.grad(
            out, [t for t in flatten(inputs) if isinstance(t, torch.Tensor) and t.requires_grad], grad
        )

    return run


def saved_for_backward(f, inputs):
    """Bytes that autograd keeps of f(), every storage once, those of `inputs` not counted."""
    kept, given = {}, {x.untyped_storage().data_ptr() for x in inputs}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        f()
    return sum(size for at, size in kept.items() if at not in given)


def transformers_experts(E, C, width, A, dtype, gate_up, down):
    """{name: module}: transformers' own routed experts in its two implementations."""
    from transformers import Glm4MoeConfig
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeExperts

    found = {}
    for kind in ("eager", "grouped_mm"):
        config = Glm4MoeConfig(hidden_size=C, moe_intermediate_size=width, n_routed_experts=E,
                               num_experts_per_tok=A, hidden_act="silu")
        config._experts_implementation = kind
        module = Glm4MoeExperts(config)
        module.gate_up_proj, module.down_proj = torch.nn.Parameter(gate_up), torch.nn.Parameter(down)
        found[f"transformers {kind}"] = module
    return found


def bench_moe(C=1024, width=512, E=64, A=8, T=4096):
    for dtype in (torch.float32, torch.bfloat16):
        dy, x, index, w, gate_up, down = expert_inputs(T, C, A, E, width, dtype)
        for leaf in (x, w, gate_up, down):
            leaf.requires_grad_()
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

        peers = transformers_experts(E, C, width, A, dtype, gate_up.detach(), down.detach())
        calls = {
            "mtp.py, kernels on": lambda: mtp.experts(x, index, w, gate_up, down),
            "mtp.py, kernels off": lambda: mtp.experts_grouped(x, index, w, gate_up, down),
            **{name: lambda module=module: module(x, index, w.to(dtype)) for name, module in peers.items()},
        }
        note = f"C={C} F={width} E={E} A={A} T={T}, {dtype}"
        floor = "dense matmuls of the same FLOPs (floor)"
        with torch.no_grad():
            found = medians({floor: lambda: dense(False), **calls}, 10)
        table("MoE forward", found, found[floor], note)
        steps = {floor: lambda: dense(True)}
        for name, call in calls.items():
            module = peers.get(name)
            grads = [x, w, *(module.parameters() if module else (gate_up, down))]
            steps[name] = lambda call=call, grads=grads: torch.autograd.grad(call(), grads, dy)
        found = medians(steps, 30)
        table("MoE forward + backward", found, found[floor], note)
        for name, call in calls.items():
            size = saved_for_backward(call, (x, w, index, gate_up, down))
            print(f"  {name:42s} saved for backward {size / 2**20:7.0f} MiB")


class Products(TorchDispatchMode):
    """Records matrix products and flash attention calls that run under it, to be run again on their own."""
    ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"

    def __init__(self):
        super().__init__()
        self.calls, self.held = [], {}

    def like(self, x):
        key = x.shape, x.stride(), x.dtype
        if key not in self.held:
            self.held[key] = torch.empty_strided(*key[:2], dtype=x.dtype).normal_()
        return self.held[key]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        packet = function.overloadpacket
        if packet in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.calls.append((packet, [self.like(x) for x in args if torch.is_tensor(x)], {}))
        elif packet.__name__.startswith(self.ATTENTION):
            self.calls.append((packet, args, kwargs or {}))
        return function(*args, **(kwargs or {}))

    def replay(self):
        for function, args, kwargs in self.calls:
            function(*args, **kwargs)


def bench_step():
    """A whole training step, forward and backward, against the products it consists of."""
    for T, C, V, K, E, A, width, seconds in ((256, 256, 8192, 4, 8, 2, 128, 20),
                                             (2048, 1024, 32000, 3, 32, 4, 512, 150)):
        H, G, D = (8, 2, 32) if C == 256 else (16, 4, 64)
        model = mtp.MTP(mtp.MTPConfig(
            vocab_size=V, hidden_size=C, num_attention_heads=H, num_key_value_heads=G, head_dim=D,
            n_routed_experts=E, num_experts_per_tok=A, moe_intermediate_size=width))
        model.set_target(torch.randn(V, C) * 0.02, torch.randn(V, C) * 0.02)
        ids, hidden = torch.randint(V, (1, T)), torch.randn(1, T, C)

        def step(kernels, backend="fa"):
            mtp.KERNELS = kernels
            model.zero_grad(set_to_none=True)
            mtp.ttt_loss(model, ids, hidden, ttt_length=K, backend=backend).loss.backward()

        with Products() as products, mock.patch.object(mtp, "experts", mtp.experts_ref):  # one by one
            step(False)
        kinds = [function.__name__ for function, *_ in products.calls]
        assert kinds.count("mm") >= K * (E * 6 + 18) and kinds.count(Products.ATTENTION) == K
        assert kinds.count(f"{Products.ATTENTION}_backward") == K
        floor = "its products and flash attention alone"
        found = medians({floor: products.replay, "mtp.py fa, kernels on": lambda: step(True),
                         "mtp.py fa, kernels off": lambda: step(False),
                         "mtp.py sdpa, kernels off": lambda: step(False, "sdpa")}, seconds)
        note = f"T={T} C={C} V={V} K={K} E={E} A={A} F={width} H={H} G={G} D={D}, fp32"
        table("training step", found, found[floor], note)


def bench_merge(B=1, H=32, G=4, T=8192, D=128, k=3):
    x, y = torch.ones(32 << 20), torch.ones(32 << 20)  # copied in turn with the candidates: the floor
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

        for title, moved, candidates in (
                ("merge forward", forward, {"ours": lambda: op(o_0, lse_0, q, ks, vs, scale)}),
                ("merge forward + backward", forward + backward,
                 {"ours": both, "eager merge_ref": backward_of(eager, leaves, dout)})):
            found = medians({"copy": lambda: y.copy_(x), **candidates}, 15)
            bandwidth = 2 * x.nbytes / found.pop("copy")  # bytes read and written per millisecond
            note = f"B={B} H={H} G={G} T={T} D={D} k={k}, {dtype}, floor at {bandwidth / 1e6:.0f} GB/s"
            table(title, {"bytes floor": moved / bandwidth, **found}, moved / bandwidth, note)


def bench_loss(T=1024, C=512, chunk=256):
    """Judging draft logits: by the kernel, by mtp.py's own PyTorch, by autograd as other terms are."""
    for V, dtype in itertools.product((32000, 151936), (torch.float32, torch.bfloat16)):
        n, h, W = (torch.randn(*s).to(dtype) for s in ((T, C), (T, C), (V, C)))
        teacher, draft = (torch.empty(chunk, V, dtype=dtype) for _ in range(2))
        dn, weights = torch.empty_like(n), {"ce": 1.0, "kl": 1.0}

        def walk(judge):
            for i in range(0, T, chunk):
                torch.mm(h[i:i + chunk], W.t(), out=teacher)
                torch.mm(n[i:i + chunk], W.t(), out=draft)
                judge(teacher, draft, weights)
                torch.mm(draft, W, out=dn[i:i + chunk])

        floor = "three GEMMs (floor)"
        found = medians({
            floor: lambda: walk(lambda *_: None),
            "kernels on": lambda: walk(mtp.judge_ce_kl),
            "kernels off": lambda: walk(functools.partial(mtp.by_blocks, mtp.judge_ce_kl_ref)),
            "autograd, as for other terms": lambda: walk(functools.partial(mtp.by_blocks, mtp.judge_terms)),
        }, 15)
        table("loss rows", found, found[floor], f"T={T} C={C} V={V} chunk={chunk}, {dtype}")


BENCHES = {"moe": bench_moe, "merge": bench_merge, "loss": bench_loss, "step": bench_step}


def bench(names):
    if mtp_kernels is None:
        sys.exit(f"mtp_kernels is not built ({missing}); run: python setup.py build_ext --inplace")
    for name in names or BENCHES:
        for setting, extra in (("default malloc", {}), ("tuned malloc", TUNED)):
            print(f"\n==== {name}, {setting}, {torch.get_num_threads()} threads", flush=True)
            if name != "step" or not extra:
                command = [sys.executable, "-m", "bench.kernels", "--table", name]
                subprocess.run(command, env={**os.environ, **extra}, check=True, cwd=HERE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tables", nargs="*", help=f"of {', '.join(BENCHES)}; default: all")
    parser.add_argument("--table", choices=BENCHES, help="one, in this process")
    asked = parser.parse_args()
    if asked.table:
        BENCHES[asked.table]()
    else:
        bench(asked.tables)
