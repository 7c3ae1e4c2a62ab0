"""On a GPU: the kernels' tests, compute-sanitizer, then timings against their floors, as a table and as JSON.

    python -m bench.gpu [gpu.json]
"""
import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from csrc.test_kernels import (
    CUDA, DTYPES, Compiled, every_output, expert_inputs, loss_inputs, loss_rows_ref, merge_backward_ref,
    merge_inputs, merge_ref, missing, mtp_kernels, to)
from test_mtp import HERE


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
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:warnings", "csrc", "-k", "cuda"]
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "checks": subprocess.run(tests, timeout=150, cwd=HERE).returncode,
    }
    if report["checks"]:
        sys.exit("the checks fail, so nothing is timed")
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    for tool in ("memcheck", "racecheck") if os.path.exists(sanitizer) else ():
        command = [sanitizer, f"--tool={tool}", "--error-exitcode=9",
                   sys.executable, "-m", "bench.gpu", "--once"]
        try:
            report[tool] = subprocess.run(command, timeout=70, cwd=HERE).returncode
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
    Path(path).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", nargs="?", default="gpu.json")
    parser.add_argument("--once", action="store_true", help="every kernel once: what compute-sanitizer runs")
    asked = parser.parse_args()
    if asked.once:
        for each in DTYPES:
            every_output(Compiled("cuda"), each)
        torch.cuda.synchronize()
    else:
        run_on_gpu(asked.out)
