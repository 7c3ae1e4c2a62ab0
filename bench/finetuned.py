"""Drafts after fine-tuning: the demo target with a trained MTP layer is fine-tuned on a narrow domain,
idlelib, which it has not seen; transformers drops its layer on save. Prints acceptance on each model's own
answers: before, after with the old layer, after tuning that layer on the new model's answers. 15 minutes.

    python -m bench.finetuned [--steps N]
"""
import argparse
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import mtp

HERE = Path(__file__).parent.parent
RUNS = HERE / "runs/finetuned"
FIGURES = re.compile(r"accept_len ([\d.]+); accept_len_walk ([\d.]+)")


def domain():
    """(training, held-out) texts of the domain; each fifth file is held out."""
    files = sorted(Path(random.__file__).parent.joinpath("idlelib").rglob("*.py"))
    texts = [file.read_text(errors="replace") for file in files]
    return [text for i, text in enumerate(texts) if i % 5], texts[::5]


def write_prompts(file, texts, tokenizer, n, length=64):
    """n pieces of `length` tokens to continue, of random places."""
    drawn = random.Random(0)
    tokenized = tokenizer([text for text in texts if len(text) > 2000])["input_ids"]
    with open(file, "w") as out:
        for _ in range(n):
            ids = drawn.choice(tokenized)
            start = drawn.randrange(len(ids) - length)
            out.write(json.dumps({"text": tokenizer.decode(ids[start:start + length])}) + "\n")


def fine_tune(base, out, texts, steps=200, batch_size=8, length=128):
    """Plain training of the whole model on the domain; what transformers saves has no MTP layer."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    ids = torch.cat([torch.tensor(tokenizer(text)["input_ids"]) for text in texts])
    rows = ids[:len(ids) // length * length].view(-1, length)
    torch.manual_seed(0)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in tqdm(range(steps), desc="fine-tuning"):
        batch = rows[torch.randint(len(rows), (batch_size,))]
        adam.zero_grad()
        adam.param_groups[0]["lr"] = 1e-3 * min((step + 1) / 20, 1 - step / steps)
        model(batch, labels=batch).loss.backward()
        adam.step()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def run(program, *arguments):
    """What a command of the README prints; its progress goes to stderr."""
    command = [sys.executable, HERE / program, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=HERE)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}")
    return done.stdout


def table(steps):
    """The rows: (target, its MTP layer, accept_len, accept_len_walk)."""
    RUNS.mkdir(parents=True, exist_ok=True)
    draft, base, tuned = RUNS / "draft", RUNS / "base", RUNS / "tuned"
    training, held = domain()
    if not (draft / "model.safetensors").exists():
        run("mtp.py", "--out", draft)
    if not base.exists():
        run("convert.py", draft, "--target", mtp.demo_path(), "--out", base)
    if not tuned.exists():
        fine_tune(base, tuned, training)

    tokenizer = AutoTokenizer.from_pretrained(base)
    write_prompts(RUNS / "held.jsonl", held, tokenizer, 96)
    write_prompts(RUNS / "training.jsonl", training, tokenizer, 800)
    # Answers of more tokens repeat themselves.
    for target, prompts in ((base, "held"), (tuned, "held"), (tuned, "training")):
        run("mtp.py", "generate-data", "--target", target, "--prompts", RUNS / f"{prompts}.jsonl", "--out",
            RUNS / f"{target.name}-{prompts}-answers.jsonl", "--batch-size", 32, "--max-new-tokens", 48)
    said = run("mtp.py", "eval", "--draft", draft, "--target", base, "--other-target", "--data",
               RUNS / "base-held-answers.jsonl")
    yield "before", "its own", *FIGURES.search(said).groups()

    on_answers = ["--target", tuned, "--data", RUNS / "tuned-training-answers.jsonl", "--eval-data",
                  RUNS / "tuned-held-answers.jsonl", "--steps", steps, "--resume", "never"]
    for label, init in (("of before (`--init BASE`)", base), ("from scratch", "scratch")):
        said = run("mtp.py", *on_answers, "--init", init, "--out", RUNS / f"run-{Path(init).name}")
        first, last = FIGURES.findall(said)
        if init == base:
            yield "fine-tuned", label, *first
        yield "fine-tuned", f"{label}, {steps} steps on the new model's answers", *last


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="of tuning the layer (default 40)")
    steps = parser.parse_args().steps
    print("| target | MTP layer | accept_len | accept_len_walk |\n|---|---|---|---|")
    for row in table(steps):
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
