"""The README's tables of what matters in training: objectives on the demo target, and drafts that differ in
one thing, trained on stored hidden states. A finished row is not repeated; a stopped command goes on.

    python -m bench.results objectives [--steps N]
    python -m bench.results texts > demo.jsonl  # for `mtp.py capture`: STATES of the demo target
    python -m bench.results ablations TARGET STATES [--steps N] [--only WORD ..]
    python -m bench.results ablations TARGET STATES [--steps N] --start DRAFT [--ttt-length K] [--seq-len T]
"""
import argparse
import dataclasses
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from unittest import mock

import torch

import convert
import mtp
from test_mtp import HERE, attend_apart


def measure_draft(out, target, engine):
    """Accepted length per round of generated text, drafted as `engine` does: 12 prompts of held-out text, 96
    tokens each."""
    (model, meta), (_, held) = mtp.load_draft(out), mtp.stdlib_files(every=6)
    model.set_target(target.embed, target.lm_head)
    rounds = []
    for file in held[:12]:
        ids = target.tokenizer(file.read_text(errors="replace"))["input_ids"][:24]
        drafter = mtp.Drafter(model, *convert.engine_setting("glm4_moe", engine))
        rounds += mtp.decode(target, ids, 96, drafter, meta["ttt_length"]).rounds
    return {"greedy": 1 + sum(rounds) / len(rounds)}


def objective_row(steps, **changes):
    """Train one draft on the demo target, or continue a run that was cut; write down what it reached."""
    out = HERE / "runs" / f"objectives-{steps}" / "-".join(map(str, changes.values())).replace(":", "")
    cfg = mtp.TrainConfig(steps=steps, out=str(out), backend="fa", resume="auto", save_every=50, **changes)
    results = mtp.train(cfg)
    if "after" in results:
        target = mtp.open_target(cfg, mtp.Ranks())
        drawn = {engine: measure_draft(out, target, engine) for engine in ("vllm", "sglang")}
        (out / "row.json").write_text(json.dumps({**drawn, "eval": results["after"]}))
    return out / "row.json"


def objectives(steps=150, seeds=(0, 1)):
    """Every objective, and what training for one engine or for any costs: means of two seeds on the demo
    target. Each run is a process; a finished one is not repeated."""
    def rows(**changes):
        for seed in seeds:
            changes = {"loss": "ce:1+kl:1", "engine": "vllm", **changes, "seed": seed}
            name = "-".join(map(str, changes.values())).replace(":", "")
            file = HERE / "runs" / f"objectives-{steps}" / name / "row.json"
            if not file.exists():
                row = json.dumps({**changes, "steps": steps})
                command = [sys.executable, "-m", "bench.results", "objective", row]
                subprocess.run(command, check=True, stdout=sys.stderr, cwd=HERE)
            if not file.exists():
                sys.exit("stopped; the same command continues")
            yield json.loads(file.read_text())

    def show(label, found, engine="vllm"):
        found = list(found)
        drawn = [statistics.mean(row[engine][way] for row in found) for way in found[0][engine]]
        text = [statistics.mean(row["eval"][f"accept_len{x}"] for row in found)
                for x in ("_walk", "_sampled", "_greedy")]
        spread = max(abs(row[engine]["greedy"] - drawn[0]) for row in found)
        table.append(f"| {label} | " + " | ".join(f"{x:.3f}" for x in [*drawn, *text, spread]) + " |")

    table = ["| trained with | greedy | text: walk | expected, sampled drafts "
             "| expected, greedy drafts | seeds +- |", "|---" * 6 + "|"]
    for loss in ("ce:1+kl:1", *mtp.LOSS_TERMS):
        show(loss, rows(loss=loss))
    for engine in ("vllm", "sglang", "any"):
        for served in ("vllm", "sglang"):
            show(f"for {engine}, drafted as by {served}", rows(engine=engine), served)
    print("\n".join(table))


def texts():
    """The demo's training texts as rows of {text}."""
    for file in mtp.stdlib_files(every=6)[0]:
        print(json.dumps({"text": file.read_text(errors="replace")}))


# ---- The table of ablations --------------------------------------------------------------------------------

def linear_end(step, cfg):
    """A constant learning rate after the warm-up, and a linear end to 0 over the last third of the steps."""
    return cfg.lr * min((step + 1) / cfg.warmup_steps, 1.0, 3 * (1 - step / cfg.steps))


class Averaging(mtp.MasterOptimizer):
    """Beside the weights their exponential mean over about 20 steps, which `serve` puts into the draft."""

    def __init__(self, *args):
        super().__init__(*args)
        self.mean = {name: p.detach().clone() for name, p in self.masters.items()}

    def step(self, *args):
        super().step(*args)
        for name, p in self.masters.items():
            self.mean[name].lerp_(p.detach(), 1 / 20)
        Averaging.last = self

    @torch.no_grad()
    def serve(self):
        for name, p in self.params.items():
            p.copy_(self.mean[name])


PATCHES = {"cosine to 0": dict(LR_FLOOR=0.0), "linear end": dict(learning_rate=linear_end),
           "averaging": dict(MasterOptimizer=Averaging),
           "averaging, constant": dict(MasterOptimizer=Averaging, LR_FLOOR=1.0),
           "balancing off": dict(BALANCE_RATE=0.0), "balancing 0.001": dict(BALANCE_RATE=0.001)}


def ablation_row(out, target, states, flags, apart, start, ways, judged):
    """Train one draft, or continue a run that was cut, and write OUT/row.json. `flags` are mtp.py's; the
    rest is patched: `apart` trains with attend_apart, `start` is a draft directory to start from. Every
    evaluation has `judged` steps and the attention that is served; `ways`: the engines that it drafts as."""
    out, evaluate, read_sequences = Path(out), mtp.evaluate, mtp.read_sequences
    patches = {"BALANCE_RATE": mtp.BALANCE_RATE} | PATCHES.get(flags.pop("patch", None), {})
    flags = dict(batch_size=4, warmup_steps=6, seq_len=256) | flags
    cfg = mtp.TrainConfig(
        target=target, hidden_states=[states], out=str(out), backend="fa", micro_batch_size=4,
        eval_size=16, resume="never" if "MasterOptimizer" in patches else "auto", save_every=40,
        init=start or "auto", **flags)

    def evaluate_as_served(run, sequences):
        found = {}
        if "MasterOptimizer" in patches and mtp.saved_states(out):
            Averaging.last.serve()
        with mock.patch.dict(mtp.BACKENDS, fa=mtp.attend_fa):
            for engine in ways:
                recycle, zero = convert.engine_setting(run.target.layout, engine)
                served = mtp.Run(run.model, run.target, run.cfg, run.ranks, "fa", ttt_length=judged,
                                 recycle=recycle, zero_first_embedding=zero)
                found[engine] = evaluate(served, sequences)
        file = out / ("after.json" if mtp.saved_states(out) else "before.json")
        file.write_text(json.dumps(found))
        return found[ways[0]]

    def same_split(cfg, target):  # whatever K
        return read_sequences(dataclasses.replace(cfg, ttt_length=max(judged, 5)), target)
    with mock.patch.multiple(mtp, read_sequences=same_split, evaluate=evaluate_as_served), \
            mock.patch.multiple(mtp, **patches), \
            mock.patch.dict(mtp.BACKENDS, fa=attend_apart if apart else mtp.attend_fa):
        if "after" not in mtp.train(cfg):
            sys.exit(1)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    lines = {line["step"]: line for line in lines if "loss" in line}  # a resumed run repeats some
    row = {name: json.loads((out / f"{name}.json").read_text()) for name in ("before", "after")} | {
        "seconds": sum(line["compute_seconds"] + line["data_seconds"] for line in lines.values()),
        "busiest": list(lines.values())[-1]["top_expert_share"]}
    (out / "row.partial").write_text(json.dumps(row))
    os.replace(out / "row.partial", out / "row.json")
    shutil.rmtree(out / "checkpoints")


def from_scratch(measure, apart, steps):
    """The rows of ablations that start from random drafts."""
    lr = mtp.LEARNING_RATE["muon"][0]
    default = f"default: keys of all steps, for vllm, K 3, ce:1+kl:1, decay 0.8, balancing 0.01, lr {lr}"
    measure(default, ways=("vllm", "sglang"), untrained="nothing: the random draft")
    measure(default, seed=1)
    for seed in (0, 1):
        measure(apart, apart=True, seed=seed)
    measure("for sglang", engine="sglang", ways=("sglang", "vllm"))
    measure("for any engine", engine="any", ways=("vllm", "sglang"))
    for K in (1, 5):
        measure(f"K {K}", ttt_length=K)
    for loss in ("ce:1", "kl:1", "tv:1"):
        measure(loss, loss=loss)
    for decay in (0.6, 1.0):
        measure(f"decay {decay}", decay=decay)
    for patch in PATCHES:
        measure(patch, patch=patch)
    for rate in (lr / 2, lr * 2):
        measure(f"lr {rate:g}", lr=rate)
    for seed in (0, 1):
        measure("adamw, lr 3e-3", optimizer="adamw", seed=seed)
    measure("batches of 2 rows, twice the steps", batch_size=2, steps=2 * steps, warmup_steps=12)
    measure("batches of 8 rows, half the steps", batch_size=8, steps=steps // 2, warmup_steps=3)


def going_on(measure, apart, start, ttt_length, seq_len):
    """The rows of ablations that start from a draft: two pairs, with the cache and without, on steps of 1,024
    tokens; K = ttt_length in training and evaluation."""
    meta = json.loads((Path(start) / "config.json").read_text())
    engine = meta["engine"]
    more = dict(start=start, ways=["vllm" if engine == "any" else engine], engine=engine, judged=ttt_length,
                ttt_length=ttt_length, seq_len=seq_len, batch_size=max(1, 1024 // seq_len))
    for seed in (0, 1):
        measure("going on, keys of all steps", seed=seed, **more,
                untrained=None if seed else "nothing more: the draft that is gone on from")
        measure(f"going on, {apart}", apart=True, seed=seed, **more)


def ablations(target, states, steps=36, only=None, start=None, ttt_length=3, seq_len=256):
    """Drafts that differ in one thing, trained alike on stored hidden states of `target`: `steps` steps of 4
    rows of 256 tokens. Judged on every 20th sample, with K = 3. Each is a process; a finished one is not
    repeated. only: the rows whose label has one of these words. start: instead, two pairs that go on from
    this draft, with the cache and without, trained and judged with K = ttt_length on rows of seq_len."""
    folder = HERE / "runs" / f"ablations-{Path(states).name}-{steps}"
    accuracies = " | ".join(f"acc_{k}" for k in range(ttt_length))
    table = [f"| trained with | seed | drafted as | accept_len | accept_len_walk | {accuracies} | "
             "busiest expert | training s |", "|---" * (7 + ttt_length) + "|"]
    held_out_rows = set()

    def show(label, seed, row, when="after"):
        for way, found in row[when].items():
            figures = [found["accept_len"], found["accept_len_walk"], *found["acc"]]
            spent = [f"{row['busiest']:.1%}", f"{row['seconds']:.0f}"] if when == "after" else ["", ""]
            cells = [label, seed, way, *(f"{x:.3f}" for x in figures), *spent]
            table.append("| " + " | ".join(map(str, cells)) + " |")

    def measure(label, apart=False, start=None, ways=("vllm",), seed=0, untrained=None, judged=3, **flags):
        if only and not any(word in label for word in only):
            return
        name = "-".join([*["apart"] * apart, *[f"from-{Path(start or '').name}"] * bool(start),
                         *(f"{key}-{value}" for key, value in flags.items()), f"seed-{seed}"])
        file = folder / re.sub("[:, ]+", "-", name) / "row.json"
        if not file.exists():
            row = dict(out=str(file.parent), target=target, states=states, apart=apart, start=start,
                       ways=ways, judged=judged, flags=dict(steps=steps, seed=seed) | flags)
            command = [sys.executable, "-m", "bench.results", "ablation", json.dumps(row)]
            done = subprocess.run(command, stdout=sys.stderr, cwd=HERE,
                                  env={"OMP_NUM_THREADS": "1", **os.environ})
            if done.returncode or not file.exists():
                sys.exit("stopped; the same command goes on")
        row = json.loads(file.read_text())
        if untrained:
            show(untrained, "", row, "before")
        show(label, seed, row)
        held_out_rows.update(found["rows"] for found in row["after"].values())

    apart = "each step attends to its own keys alone, served with those of all steps"
    if start:
        going_on(measure, apart, start, ttt_length, seq_len)
    else:
        from_scratch(measure, apart, steps)
    if not held_out_rows:
        sys.exit(f"no row's label has any of these words: {' '.join(only)}")
    rows, = held_out_rows
    print(f"{steps} steps of 1,024 tokens in rows of {seq_len}; {rows:,} held-out positions; every expert "
          "busy alike: 12.5%\n" + "\n".join(table))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    command = commands.add_parser("objectives")
    command.add_argument("--steps", type=int, default=150)
    commands.add_parser("texts")
    command = commands.add_parser("ablations")
    command.add_argument("target", type=os.path.abspath)
    command.add_argument("states", type=os.path.abspath)
    command.add_argument("--steps", type=int, default=36)
    command.add_argument("--only", nargs="+", metavar="WORD", help="rows whose label has one of these words")
    command.add_argument("--start", metavar="DRAFT", type=os.path.abspath,
                         help="instead: two pairs that go on from it")
    command.add_argument("--ttt-length", type=int, default=3, help="K; only with --start")
    command.add_argument("--seq-len", type=int, default=256, help="tokens in a row; only with --start")
    for name in ("objective", "ablation"):  # one row, in this process
        commands.add_parser(name).add_argument("row", type=json.loads)

    asked = vars(parser.parse_args())
    name = asked.pop("command")
    if name == "ablations" and not asked["start"] and (asked["ttt_length"], asked["seq_len"]) != (3, 256):
        parser.error("--ttt-length and --seq-len need --start")
    if "row" in asked:
        {"objective": objective_row, "ablation": ablation_row}[name](**asked["row"])
    else:
        {"objectives": objectives, "texts": texts, "ablations": ablations}[name](**asked)


if __name__ == "__main__":
    main()
