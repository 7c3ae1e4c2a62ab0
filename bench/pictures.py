"""Draws the README's pictures from what the code does, and prints their numbers. Needs matplotlib.

    python -m bench.pictures [FOLDER [RUN]]     RUN: a training run with evaluations
"""
import argparse
import contextlib
import itertools
import json
import sys
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

import mtp
from test_mtp import HERE, kept_bytes


INK, GRID, BLUE, ORANGE, GREEN = "#0f172a", "#cbd5e1", "#0072b2", "#d55e00", "#009e73"  # colour-blind safe
PURPLE, YELLOW = "#7b3294", "#e69f00"


@contextlib.contextmanager
def picture(file, height, columns=1, **more):
    """A figure 8 inches wide and its axes, in one style; written to `file` at the end."""
    import matplotlib
    from matplotlib.figure import Figure
    style = {"font.size": 11, "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK,
             "ytick.color": INK, "axes.edgecolor": "#64748b", "axes.spines.top": False, "svg.hashsalt": "mtp",
             "axes.spines.right": False, "svg.fonttype": "none", "axes.titlesize": 12, "grid.color": GRID,
             "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"], "lines.linewidth": 2}
    with matplotlib.rc_context(style), warnings.catch_warnings():
        figure = Figure(figsize=(8, height), layout="constrained", facecolor="white")
        yield figure, figure.subplots(1, columns, squeeze=False, **more)[0]
        figure.savefig(file, metadata={"Date": None} if str(file).endswith("svg") else None)
    print(f"drew {file}")


def visible_keys(T, K):
    """(K, T, K, T) bool: does the query of row t, step k see the key of row s, step j? By gradient: row t's
    attention, of the backend that trains, has one in the value of exactly the keys it sees."""
    docs, past, seen = mtp.Documents(None, 1, T, "cpu"), ([], []), torch.zeros(K, T, K, T, dtype=torch.bool)
    values = [torch.randn(1, T, 1, 8, requires_grad=True) for _ in range(K)]
    for k in range(K):
        q, key = torch.randn(2, 1, T, 1, 8)
        out, *past = mtp.attend_fa(q, key, values[k], *past, docs)
        for t in range(T):
            grads = torch.autograd.grad(out[0, t].sum(), values[:k + 1], retain_graph=True)
            for j, grad in enumerate(grads):
                seen[k, t, j] = grad[0, :, 0].abs().amax(-1) > 0
    return seen


def draw_mask(file, T=6, K=3):
    from matplotlib.patches import Rectangle
    seen = visible_keys(T, K).view(K * T, K, T)
    with picture(file, 6.8) as (figure, (axis,)):
        gap = 0.7
        for (row, j, s), x in zip(itertools.product(range(K * T), range(K), range(T)), seen.flatten()):
            k, t = divmod(row, T)
            colour = (BLUE, ORANGE)[j > 0] if x else "#f1f5f9"
            axis.add_patch(Rectangle((j * (T + gap) + s, k * (T + gap) + t), 0.92, 0.92, color=colour, lw=0))
        middles = [i * (T + gap) + T / 2 for i in range(K)]
        places = [i * (T + gap) + t + 0.46 for i in range(K) for t in range(T)]
        names = [str(t) for _ in range(K) for t in range(T)]
        axis.set(xlim=(-0.2, K * (T + gap) - gap), ylim=(K * (T + gap) - gap, -0.2),
                 aspect="equal", xticks=places, yticks=places, xticklabels=names, yticklabels=names)
        axis.xaxis.tick_top()
        axis.tick_params(length=0, labelsize=9, pad=1)
        axis.spines[:].set_visible(False)
        for i, at in enumerate(middles):
            axis.text(at, -1.5, f"keys of step {i}, row s", ha="center", va="bottom")
            axis.text(-1.5, at, f"queries of step {i}, row t", ha="right", va="center", rotation=90)
        marks = [Rectangle((0, 0), 1, 1, color=colour) for colour in (BLUE, ORANGE)]
        figure.legend(marks, ["step 0: rows s ≤ t", "steps 1..k: its own row, s = t"], frameon=False,
                      loc="outside lower center", ncols=2)


def draw_acceptance(file, run):
    """From the evaluations of a run's metrics.jsonl (train with --eval-every N)."""
    lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    held = [(line["step"], line["eval"]) for line in lines if "eval" in line]
    if not held:
        sys.exit(f"{run}/metrics.jsonl holds no evaluation: train with --eval-every N")
    steps, K = [step for step, _ in held], len(held[0][1]["acc"])
    with picture(file, 3.6, 2, sharey=True) as (_, axes):
        titles = {"acc": "held-out rows right at step k", "walk": "rounds that accept position k"}
        for axis, (key, title) in zip(axes, titles.items()):
            for k, colour in zip(range(K), itertools.cycle((BLUE, ORANGE, GREEN, PURPLE, YELLOW))):
                values = [found[key][k] for _, found in held]
                axis.plot(steps, values, color=colour, label=f"k = {k}", marker=".")
                print(f"{key}_{k}: " + " ".join(f"{step}:{x:.3f}" for step, x in zip(steps, values)))
            axis.set(title=title, xlabel="optimizer step", ylim=(0, None))
            axis.locator_params(axis="x", nbins=6, integer=True)
            axis.grid(alpha=0.6)
        axes[0].set_ylabel("share")
        axes[0].legend(frameon=False)


def small_case(T, V=4096):
    """A draft of small widths, on any process the same; ids; hidden states of T rows."""
    torch.manual_seed(0)
    model = mtp.MTP(mtp.MTPConfig(
        vocab_size=V, hidden_size=256, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=128))
    model.set_target(torch.randn(V, 256), torch.randn(V, 256))
    return model, torch.randint(V, (1, T)), torch.randn(1, T, 256)


def step_bytes(T, K, backend, **options):
    """Bytes kept for the backward pass by ttt_loss on small_case. recompute keeps the keys and values of
    earlier steps outside of autograd: what a step is given of them is counted, too."""
    model, ids, hidden = small_case(T)
    if backend == "usp":  # a rank's rows and K more
        P = dist.get_world_size()
        L = -(-T // P)
        hidden = F.pad(hidden, (0, 0, 0, P * L + K - T))[:, dist.get_rank() * L:][:, :L + K]
    given, real = {}, mtp.BACKENDS[backend]

    def attend(q, k, v, past_k, past_v, docs, group=None):
        for x in (*past_k, *past_v):
            given[x.untyped_storage().data_ptr()] = x
        return real(q, k, v, past_k, past_v, docs, group)

    own = [*model.parameters(), model.embed_weight, model.lm_head_weight]
    with mock.patch.dict(mtp.BACKENDS, {backend: attend}):
        out, size = kept_bytes(lambda: mtp.ttt_loss(
            model, ids, hidden, ttt_length=K, backend=backend, **options).loss, own)
    assert out.requires_grad
    if options.get("recompute"):
        size += sum({at: x.untyped_storage().nbytes() for at, x in given.items()}.values())
    return size


def draw_memory(file, lengths=(256, 512, 1024, 2048), steps=(1, 2, 3, 4, 5, 6)):
    ways = {"sdpa": ("sdpa", {}, ORANGE), "fa": ("fa", {}, BLUE),
            "fa, recompute": ("fa", dict(recompute=True), GREEN)}
    panels = [("K = 3", "tokens T of a row", lengths, lambda T: (T, 3)),
              (f"T = {lengths[-2]}", "steps K", steps, lambda K: (lengths[-2], K))]
    with picture(file, 4.0, 2, sharey=True) as (_, axes):
        for axis, (title, label, points, case) in zip(axes, panels):
            print(f"\nMiB saved for backward, {title}\n| {label} | " + " | ".join(map(str, points)) + " |\n"
                  + "|---" * (1 + len(points)) + "|")
            for name, (backend, options, colour) in ways.items():
                sizes = [step_bytes(*case(x), backend, **options) / 2 ** 20 for x in points]
                print(f"| {name} | " + " | ".join(f"{x:.1f}" for x in sizes) + " |", flush=True)
                axis.plot(points, sizes, color=colour, marker="o", markersize=5, label=name)
            axis.set(title=title, xlabel=label, yscale="log")
            axis.grid(alpha=0.6)
        print("\nfa, recompute: in the backward pass, one step's activations at a time come on top")
        axes[0].set_xscale("log", base=2)
        axes[0].set_xticks(lengths, [str(T) for T in lengths])
        axes[1].set_xticks(steps)
        axes[0].set_ylabel("MiB saved for backward")
        axes[0].yaxis.set_major_formatter("{x:g}")
        axes[0].legend(frameon=False, loc="upper left")


def rank_bytes(rank, P, folder, T, K):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=P)
    size = step_bytes(T, K, "usp")
    Path(folder, f"{rank}.json").write_text(json.dumps(size))
    dist.destroy_process_group()


def draw_ranks(file, T=1024, K=3, counts=(1, 2, 4)):
    sizes = []
    for P in counts:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(rank_bytes, (P, folder, T, K), nprocs=P)
            files = [Path(folder, f"{rank}.json") for rank in range(P)]
            sizes.append([json.loads(file.read_text()) / 2 ** 20 for file in files])
    print(f"\nMiB saved for backward per rank, usp, sharded hidden states, T = {T}, K = {K}\n"
          "| ranks P | rank by rank | largest x P / one rank |\n" + "|---" * 3 + "|")
    for P, each in zip(counts, sizes):
        print(f"| {P} | {', '.join(f'{x:.1f}' for x in each)} | {max(each) * P / sizes[0][0]:.2f} |")
    with picture(file, 3.4) as (_, (axis,)):
        at = range(len(counts))
        bars = axis.bar(at, [max(each) for each in sizes], width=0.5, color=BLUE)
        axis.bar_label(bars, [f"{max(each):.1f} MiB" for each in sizes], padding=3, color=INK)
        ideal = axis.hlines([sizes[0][0] / P for P in counts], [i - 0.35 for i in at], [i + 0.35 for i in at],
                            color=ORANGE)
        axis.set_xticks(at, [f"P = {P}" for P in counts])
        axis.set(ylabel="MiB saved per rank", title=f"one row of {T} tokens over P ranks (usp, K = {K})")
        axis.legend([bars, ideal], ["measured, largest rank", "a P-th of one rank"], frameon=False)


def pictures(folder=HERE / "assets", run=None):
    """Draw the README's pictures from what the code does; numbers are printed, too."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        sys.exit("pictures need matplotlib: pip install matplotlib")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    draw_mask(folder / "mask.svg")
    if run:
        draw_acceptance(folder / "acceptance.svg", run)
    draw_memory(folder / "memory.svg")
    draw_ranks(folder / "ranks.svg")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", nargs="?", default=HERE / "assets")
    parser.add_argument("run", nargs="?", help="a training run with evaluations")
    asked = parser.parse_args()
    pictures(asked.folder, asked.run)
