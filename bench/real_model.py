"""The README's real model: its prompts; the tokens per round of a draft by decoding, by eval and by vLLM; and
the speed of vLLM with 1, 2, 3 and 5 drafted tokens.

    python -m bench.real_model prompts [FOLDER]
    python -m bench.real_model walks DRAFT PROMPTS [--dtype D] [--most N] [--length N]
    python -m bench.real_model speed DRAFT PROMPTS [--dtype D] [--most N] [--length N]
"""
import argparse
import ast
import builtins
import http
import json
import keyword
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from tqdm import tqdm

import mtp
from test_mtp import convert_cli, vllm


def stdlib_functions():
    """(module, name, first paragraph of its docstring, source) of the standard library's plain functions."""
    for path in sum(mtp.stdlib_files(), []):
        try:
            text = path.read_text()
            tree = ast.parse(text)
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in tree.body:
            public = isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
            if public and ast.get_docstring(node):
                doc = " ".join(ast.get_docstring(node).split("\n\n")[0].split())
                yield path.stem, node.name, doc, ast.get_source_segment(text, node)


def write_prompts(folder="."):
    """Instructions over the standard library's documentation and source, questions, arithmetic, rewriting and
    lists, in random order: general.jsonl, and code.jsonl (write a function that ..). No function, number or
    list of the files *-held.jsonl occurs in the others."""
    draw = random.Random(0)
    things = [f"the Python module {m}" for m in sorted(sys.stdlib_module_names) if m[0] != "_"]
    things += [f"the Python built-in {b}" for b in dir(builtins) if b[0] != "_"]
    things += [f"the Python keyword {k}" for k in keyword.kwlist]
    things += [f"the HTTP status {s.value} {s.phrase}" for s in http.HTTPStatus]
    ask = ["What is {}?", "Explain {} in simple words.", "Give a short example of {}.",
           "When would I use {}, and when not?"]
    questions = [a.format(thing) for a in ask for thing in things]
    draw.shuffle(questions)
    functions = [f for f in dict.fromkeys(stdlib_functions()) if 30 < len(f[2]) < 300]
    draw.shuffle(functions)
    rewrite = ["Rewrite this sentence in plain English: ", "Turn this into a question: ",
               "Say this in more formal words: ", "Make this shorter: "]
    about = {"docs": [f"In Python, {module}.{name} is documented as: \"{doc}\" Explain this to a beginner."
                      for module, name, doc, _ in functions[0::4]],
             "source": [f"What does this Python function do?\n\n```python\n{source}\n```"
                        for _, _, _, source in functions[1::4] if len(source) < 900],
             "rewrite": [draw.choice(rewrite) + doc for _, _, doc, _ in functions[2::4]]}
    asked = ["What is {} + {}?", "What is {} - {}?", "Compute {} * {} step by step.",
             "A shop sells {} boxes of {} apples each. How many apples are that?"]
    pairs = [(a, b) for a in range(11, 60, 3) for b in range(7, 60, 4)]
    draw.shuffle(pairs)
    about["arithmetic"] = [draw.choice(asked).format(*pair) for pair in pairs]
    about["list"] = [f"List {n} {what} {thing}." for thing in things[::5] for n, what in
                     [draw.choice([(3, "facts about"), (5, "uses of"), (4, "mistakes people make with"),
                                   (3, "alternatives to")])]]
    code = [f"Write a Python function that does this: {doc}" for _, _, doc, _ in functions[3::4]]
    sizes = {"docs": 300, "source": 250, "rewrite": 250, "arithmetic": 150, "list": 90}
    more = [x for kind, n in sizes.items() for x in about[kind][:-12][:n]]
    draw.shuffle(more)
    files = {"general": questions[:1024] + more, "code": code[:-48][:400], "code-held": code[-48:],
             "general-held": questions[-24:] + [x for xs in about.values() for x in xs[-12:]]}
    for name, prompts in files.items():
        lines = [json.dumps({"prompt": x}) + "\n" for x in prompts]
        (Path(folder) / f"{name}.jsonl").write_text("".join(lines))
        print(f"{name}.jsonl: {len(lines)} prompts")


def chat_prompts(tokenizer, file, most):
    """Token ids of the first `most` prompts of a file, each the user's turn of a chat."""
    lines = Path(file).read_text().splitlines()[:most]
    chats = [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
            for chat in chats]


def speed(draft, prompts, dtype="bfloat16", most=12, length=64, drafted=(0, 1, 2, 3, 5), runs=3):
    """Tokens per round and per second of stock vLLM, one prompt at a time, without drafting (0) and with K
    drafted tokens: medians of `runs` interleaved runs, each in an engine of its own."""
    cfg = mtp.EvalConfig(draft=str(draft), dtype=dtype)
    asked = chat_prompts(mtp.open_draft(cfg)[1].tokenizer, prompts, most)
    with tempfile.TemporaryDirectory() as folder:
        convert_cli(draft, "--out", Path(folder) / "served")
        longest = max(map(len, asked)) + length + max(drafted) + 1
        jobs = [dict(model=Path(folder) / "served", K=K, prompts=asked, max_tokens=length,
                     max_model_len=longest, dtype=dtype) for K in drafted * runs]
        results = [vllm([job], Path(folder))[0] for job in tqdm(jobs, desc="vLLM")]
    seconds = {K: statistics.median(result["seconds"] for result, job in zip(results, jobs) if job["K"] == K)
               for K in drafted}
    print(f"{len(asked)} prompts, {length} tokens each, greedy, {dtype}, {torch.get_num_threads()} threads, "
          f"medians of {runs} interleaved runs\n| K | tokens per round | tokens/s | without drafting: 1 |\n"
          "|---|---|---|---|")
    for K, result in zip(drafted, results):
        rounds = 1 + sum(result["accepted"]) / result["drafts"] if K else 1
        print(f"| {K} | {rounds:.3f} | {len(asked) * length / seconds[K]:.1f} | "
              f"{seconds[0] / seconds[K]:.2f}x |")


def walks(draft, prompts, dtype="bfloat16", most=40, length=96):
    """Tokens per round of `most` prompts by three ways that have to agree: decoding here, `eval`'s walk over
    the answers, and, where MTP_VLLM_PYTHON names its environment, stock vLLM with what convert.py writes; and
    the time that both take with and without the draft, one prompt at a time."""
    cfg = mtp.EvalConfig(draft=str(draft), dtype=dtype)
    model, target, ranks, options = mtp.open_draft(cfg)
    recycle, zero = options["recycle"], options["zero_first_embedding"]
    asked = chat_prompts(target.tokenizer, prompts, most)
    K, rounds, texts, found, times = options["ttt_length"], [], [], {}, {}

    def text(prompt, answer):
        ids = torch.tensor([*prompt, *answer])
        return [mtp.Sample("answer", ids, torch.arange(len(ids)) >= len(prompt))]

    for ids in tqdm(asked, desc="decoding"):
        drafter = mtp.Drafter(model, recycle, zero)
        result, plain = mtp.decode(target, ids, length, drafter, K), mtp.decode(target, ids, length)
        texts.append(text(ids, result.ids[len(ids):]))
        rounds += result.rounds
        for name, x in (("with", result), ("without", plain)):
            times["mtp.py", name] = times.get(("mtp.py", name), 0) + length / x.speed
    found["mtp.py decoding"] = len(rounds), [sum(n > k for n in rounds) / len(rounds) for k in range(K)]
    evaluation = mtp.evaluate(mtp.Run(model, target, cfg, ranks, "fa", **options), texts)
    found["mtp.py eval on that text"] = len(rounds), evaluation["walk"]
    if os.environ.get("MTP_VLLM_PYTHON"):
        with tempfile.TemporaryDirectory() as folder:
            convert_cli(draft, "--out", Path(folder) / "served")
            longest = max(map(len, asked)) + length + K + 1
            jobs = [dict(model=Path(folder) / "served", K=k, prompts=asked, max_tokens=length,
                         max_model_len=longest, dtype=dtype) for k in (K, 0)]
            result, plain = vllm(jobs, Path(folder))
        times |= {("vLLM", "with"): result["seconds"], ("vLLM", "without"): plain["seconds"]}
        found["vLLM"] = result["drafts"], [n / result["drafts"] for n in result["accepted"]]
        theirs = [text(*pair) for pair in zip(asked, result["answers"])]
        same = sum(a[0].input_ids[:len(b[0].input_ids)].equal(b[0].input_ids) for a, b in zip(texts, theirs))
        walk = mtp.evaluate(mtp.Run(model, target, cfg, ranks, "fa", **options), theirs)["walk"]
        found[f"mtp.py eval on vLLM's text ({same} answers are the same)"] = result["drafts"], walk
    print(f"{len(asked)} prompts, {length} tokens each, greedy, {dtype}\n| walk | rounds | "
          f"{' | '.join(f'position {k}' for k in range(K))} | tokens per round |\n{'|---' * (K + 3)}|")
    for name, (n, accepted) in found.items():
        print(f"| {name} | {n:,} | {' | '.join(f'{x:.3f}' for x in accepted)} | {1 + sum(accepted):.3f} |")
    print(f"eval on that text, all rows: accept_len {evaluation['accept_len']:.3f}")
    for (name, how), seconds in times.items():
        print(f"{name} {how} drafting: {len(asked) * length / seconds:.1f} tokens/s, {os.cpu_count()} cores, "
              f"{torch.get_num_threads()} threads, {times[name, 'without'] / seconds:.2f}x")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("prompts").add_argument("folder", nargs="?", default=".")
    for name, most, length in (("walks", 40, 96), ("speed", 12, 64)):
        command = commands.add_parser(name)
        command.add_argument("draft")
        command.add_argument("prompts")
        command.add_argument("--dtype", default="bfloat16")
        command.add_argument("--most", type=int, default=most, help="prompts")
        command.add_argument("--length", type=int, default=length, help="tokens of an answer")
    asked = vars(parser.parse_args())
    {"prompts": write_prompts, "walks": walks, "speed": speed}[asked.pop("command")](**asked)


if __name__ == "__main__":
    main()
