"""A training step beside those of other programs: time, memory, bytes kept for backward.

    python -m bench.peers PYTHON [T]       PYTHON: of an environment with speculators 0.9
"""
import argparse
import inspect
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import mtp
from bench.kernels import transformers_experts
from test_mtp import attend_apart, kept_bytes


def measure_step(forward, own, turns):
    """Of forward() and its backward: median seconds, how far resident memory rose, bytes kept in between."""
    def resident(key):
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition(key + ":")[2].split()[0])

    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before, times = resident("VmRSS"), []
    for _ in range(1 + turns):
        for x in own:
            x.grad = None
        start = time.perf_counter()
        forward().backward()
        times.append(time.perf_counter() - start)
    peak = resident("VmHWM") - before
    return dict(seconds=statistics.median(times[1:]), peak=peak, saved=kept_bytes(forward, own)[1],
                parameters=sum(x.numel() for x in own if x.requires_grad))


def peer_mtp(kind, turns, T, K, V, C, H, G, D, E, A, width):
    """Measure mtp.py's step; kind: kernels, none, experts (transformers'), ce, apart."""
    torch.manual_seed(0)
    mtp.KERNELS = mtp.KERNELS and kind != "none"
    model = mtp.MTP(mtp.MTPConfig(
        vocab_size=V, hidden_size=C, num_attention_heads=H, num_key_value_heads=G, head_dim=D,
        n_routed_experts=E, num_experts_per_tok=A, moe_intermediate_size=width))
    embed, head = torch.randn(2, V, C).mul_(0.02)
    ids, hidden = torch.randint(V, (1, T)), torch.randn(1, T, C)
    model.set_target(embed, head)
    if kind == "experts":
        fused = model.mlp.experts
        block = transformers_experts(E, C, width, A, torch.float32, fused.gate_up_proj.detach(),
                                     fused.down_proj.detach())["transformers grouped_mm"]
        mtp.experts = lambda x, chosen, weights, gate_up, down: torch.func.functional_call(
            block, dict(gate_up_proj=gate_up, down_proj=down), (x, chosen, weights))
    if kind == "apart":
        mtp.BACKENDS["fa"] = attend_apart
    loss = "ce:1" if kind in ("ce", "apart") else "ce:1+kl:1"
    return measure_step(lambda: mtp.ttt_loss(model, ids, hidden, ttt_length=K, backend="fa", loss=loss).loss,
                        [*model.parameters(), embed, head, ids, hidden], turns)


def peer_speculators(kind, turns, T, K, V, C, H, G, D, E, A, width):
    """Measure the training step of speculators' MTP draft, Qwen3.5's MoE layer, where that package is."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
    from speculators.models.mtp.core import compute_step_weights
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig
    torch.manual_seed(0)
    layer = Qwen3_5MoeTextConfig(
        vocab_size=V, hidden_size=C, num_attention_heads=H, num_key_value_heads=G, head_dim=D,
        num_experts=E, num_experts_per_tok=A, moe_intermediate_size=width, num_hidden_layers=1,
        shared_expert_intermediate_size=width, layer_types=["full_attention"],
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=1.0))
    layer._experts_implementation = "grouped_mm"
    model = MTPDraftModel(MTPSpeculatorConfig(
        transformer_layer_config=layer, speculators_config=SpeculatorsConfig(
            algorithm="mtp", default_proposal_method="greedy",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=K)],
            verifier=VerifierConfig(name_or_path=None, architectures=[]))))
    del model.verifier_lm_head  # as load_verifier_weights does
    with torch.no_grad():
        for x in model.parameters():
            x.normal_(0.0, 0.02) if x.dim() > 1 else x.zero_()  # its norms add one to their weight
    ids, hidden = torch.randint(V, (1, T)), torch.randn(1, T, C)
    weights = compute_step_weights(0.8, K)
    return measure_step(lambda: model(ids, hidden, step_weights=weights)[1],
                        [*model.parameters(), ids, hidden], turns)


PEERS = {  # kind: (implementation, what it computes)
    "kernels": ("mtp.py, kernels on", "keys of all steps as served; CE and KL against the target's "
                "distribution; acceptance figures"),
    "none": ("mtp.py, kernels off", "the same"),
    "experts": ("mtp.py, transformers' experts, grouped_mm", "the same"),
    "ce": ("mtp.py, --loss ce:1", "the same, but the loss is CE against the target's argmax alone"),
    "apart": ("mtp.py, --loss ce:1, no cache (a test's patch)", "the same, but each step attends to its own "
              "keys alone"),
    "speculators": ("speculators 0.9 MTP, grouped_mm", "each step attends to its own keys alone, positions t "
                    "in all steps; CE against the data's tokens; no target distribution, no figures")}


def peers(python, T=1024, rounds=3, turns=2):
    """One training step, forward and backward, of the same widths by each of PEERS, fp32, one thread, every
    measurement a process; they take turns. `python`: of an environment with speculators 0.9."""
    sizes = dict(T=T, K=3, V=32000, C=1024, H=16, G=4, D=64, E=32, A=4, width=512)
    parts = "\n\n".join(map(inspect.getsource, (kept_bytes, measure_step, peer_speculators)))
    code = ("import json, statistics, sys, time, weakref\nfrom pathlib import Path\nimport torch\n"
            f"{parts}\nprint(json.dumps(peer_speculators(**json.loads(sys.argv[1]))))")
    found = {kind: [] for kind in PEERS}
    for turn, kind in itertools.product(range(rounds), PEERS):
        ours = [sys.executable, "-m", "bench.peers", "--peer"]
        start = [python, "-c", code] if kind == "speculators" else ours
        done = subprocess.run([*start, json.dumps(dict(sizes, kind=kind, turns=turns))], check=True,
                              stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
        found[kind].append(json.loads(done.stdout.splitlines()[-1]))
        print(f"round {turn + 1}, {kind}: {found[kind][-1]}", file=sys.stderr, flush=True)
    middle = {kind: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
              for kind, rows in found.items()}
    print(f"one step, forward and backward, fp32, one thread, medians of {rounds} processes: "
          f"{', '.join(f'{key} {value}' for key, value in sizes.items())}\n\n"
          "| implementation | what it computes | s | ratio | memory rises by | saved for backward | "
          "parameters |\n" + "|---" * 7 + "|")
    for kind, row in middle.items():
        ratio = row["seconds"] / middle["kernels"]["seconds"]
        cells = [*PEERS[kind], f"{row['seconds']:.2f}", f"{ratio:.2f}x",
                 *(f"{row[key] / 2 ** 20:,.0f} MiB" for key in ("peak", "saved")),
                 f"{row['parameters'] / 1e6:.1f} M"]
        print("| " + " | ".join(cells) + " |")
    held = sizes["K"] * (T - sizes["K"] - 1) * sizes["V"] * 4 / 2 ** 20
    print("\nspeculators' layer is Qwen3.5's: softmax router, gates on shared expert and attention output "
          "(q_proj twice as wide). All its steps run on T - K - 1 rows. Of what it keeps, "
          f"{held:,.0f} MiB are log-softmax over the vocabulary, [T - K - 1, V] a step. mtp.py computes the "
          "target's logits, too. Memory rises by the gradients of the parameters in all rows.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("python", nargs="?", type=os.path.abspath)
    parser.add_argument("T", nargs="?", type=int, default=1024, help="tokens of the row")
    parser.add_argument("--peer", type=json.loads, help="one measurement of mtp.py, in this process")
    asked = parser.parse_args()
    if asked.peer:
        print(json.dumps(peer_mtp(**asked.peer)))
    elif asked.python is None:
        parser.error("PYTHON is missing")
    else:
        peers(asked.python, asked.T)
