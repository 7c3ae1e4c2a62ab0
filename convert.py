"""convert.py - put a trained draft into the checkpoint that serving engines load, and check such checkpoints.

      python convert.py DRAFT --out OUT                  a serving directory: the target with the draft in it
      python convert.py DRAFT --out OUT --layout hy_v3   the same for a dense target (Llama, Mistral, Qwen)
      python convert.py DRAFT --out OUT --draft-only     the draft's layer alone
      python convert.py DRAFT --out OUT --dry-run        list every key, shape, dtype and file; write nothing
      python convert.py --check OUT                      is every key there, indexed, well shaped and finite?

OUT holds the target's shards (hard links: edit neither; rewritten only if keys in them change), the draft as
layer N = num_hidden_layers in a shard of its own, an index of all keys, the target's config.json with
num_nextn_predict_layers = 1, and its tokenizer files. It appears complete or not at all. The way back needs
no command: `mtp.py --target OUT` starts from the layer in OUT.

Engines load checkpoints with missing, fused or un-indexed draft tensors without a word and draft garbage, so
OUT is checked before it appears. A draft is exact only for an engine that feeds back what it was trained on:
its setting is kept in its shard (safetensors metadata), and --check says which engine that is.
"""
from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError

from mtp import (DENSE, MTP, Checkpoint, atomic, find_target, load_draft, mtp_prefix, native_views,
                 read_target_config, require, sha256)

SHARD, INDEX = "model-mtp.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
CODES = {"F8_E4M3": (torch.float8_e4m3fn, 448.0), "I8": (torch.int8, 127.0)}  # and the largest value
SCALES = (".weight_scale_inv", ".weight_scale")  # of blocks; of rows, or scalar
NAMES = {dtype: name for name, dtype in DTYPES.items()} | {dtype: name for name, (dtype, _) in CODES.items()}
ROUTER = ("mlp.gate.weight", "mlp.router.gate.weight", "expert_bias", "e_score_correction_bias")
OPTIONAL = ("embed_tokens.weight", "shared_head.head.weight")  # of layer N: engines use the main ones
RENAMED = {"model.safetensors": "model-00001-of-00001.safetensors"}  # a loader that sees it ignores the index
WEIGHTS = (".safetensors", ".bin", ".index.json", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
HY_V3 = ("qk_norm", "route_norm", "first_k_dense_replace", "expert_hidden_dim")  # not in transformers

# (layout, recycle, zero_first_embedding) -> engines that draft exactly as the draft was trained.
EXACT = {("glm4_moe", "pre", True): "vLLM", ("glm4_moe", "post", False): "SGLang and transformers",
         ("hy_v3", "post", True): "vLLM", ("hy_v3", "post", False): "SGLang",
         ("bailing_moe_v2", "post", False): "SGLang"}

# ---- Files -------------------------------------------------------------------------------------------------

Entry = NamedTuple("Entry", [("dtype", str), ("shape", tuple), ("size", int), ("file", str)])  # size in bytes

def read_header(path):
    """({name: Entry}, metadata) of a safetensors file, no tensor read. ValueError if it is cut short."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    metadata = header.pop("__metadata__", {})
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if os.path.getsize(path) != end:
        raise ValueError(f"{path} has {os.path.getsize(path)} bytes, its header says {end}: it is cut short")
    return {name: Entry(e["dtype"], tuple(e["shape"]), e["data_offsets"][1] - e["data_offsets"][0],
                        Path(path).name) for name, e in header.items()}, metadata

def set_key(text, key, value):
    """A JSON object's text with one top-level key set; all else keeps its bytes if that is a scalar."""
    wanted, new = {**json.loads(text), key: value}, json.dumps(value)
    for found in re.finditer(rf'"{re.escape(key)}"\s*:\s*(null|true|false|[-+.\w]+|"[^"]*")', text):
        edited = text[:found.start(1)] + new + text[found.end(1):]
        if json.loads(edited) == wanted:  # and not a key of that name further inside
            return edited
    if key in json.loads(text):
        return json.dumps(wanted, indent=2, ensure_ascii=False) + "\n"
    body, indent = text.rstrip()[:-1].rstrip(), re.search(r"\n([ \t]*)\"", text)
    body += "\n" if body.endswith("{") else ",\n"
    return f'{body}{indent[1] if indent else "  "}"{key}": {new}\n}}{text[len(text.rstrip()):]}'

def layer_number(name):
    """i of model.layers.i.*, or -1."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) if found else -1

def save_shard(path, tensors, metadata):
    from safetensors.torch import save_file
    save_file({name: t.detach().contiguous().clone() for name, t in tensors.items()}, path,
              metadata={"format": "pt", **metadata})

# ---- What a configuration implies --------------------------------------------------------------------------

def layer_tensors(state, layout, prefix):
    """{checkpoint name: tensor} of a draft in a layout: experts unfused, bailing's q, k, v fused."""
    found = dict(native_views(state, layout, prefix))
    for kind in ("weight", "bias"):
        parts = [f"{prefix}attention.{part}_proj.{kind}" for part in "qkv"]
        if parts[0] in found:
            fused = torch.cat([found.pop(part) for part in parts])
            found[f"{prefix}attention.query_key_value.{kind}"] = fused
    return found

def expected_layer(config, names, prefix):
    """{checkpoint name: shape} of the MTP layer that a config.json implies; tensor names fill its gaps."""
    with torch.device("meta"):
        state = MTP(read_target_config(config, names)).state_dict()
    return {name: tuple(t.shape) for name, t in layer_tensors(state, config["model_type"], prefix).items()}

def expected_stack(config, names):
    """{name: shape} of the main model that a config.json implies."""
    C, V, width = (config[key] for key in ("hidden_size", "vocab_size", "intermediate_size"))
    layer = {name: shape for name, shape in expected_layer(config, names, "").items()
             if name.startswith(("self_attn.", "attention.", "mlp.", "input_", "post_"))}
    dense = {name: shape for name, shape in layer.items() if not name.startswith("mlp.")}
    dense |= {f"mlp.{part}_proj.weight": (width, C) for part in ("gate", "up")}
    dense["mlp.down_proj.weight"] = C, width
    embed = "word_embeddings" if config["model_type"] == "bailing_moe_v2" else "embed_tokens"
    expected = {f"model.{embed}.weight": (V, C), "model.norm.weight": (C,)}
    expected |= {} if config.get("tie_word_embeddings") else {"lm_head.weight": (V, C)}
    for i in range(config["num_hidden_layers"]):
        part = dense if i < config.get("first_k_dense_replace", 1) else layer
        expected |= {f"model.layers.{i}.{name}": shape for name, shape in part.items()}
    return expected

# ---- The source --------------------------------------------------------------------------------------------

class Source:
    """A target directory: its config (dict and text) and its tensors' headers."""
    def __init__(self, path):
        self.path, self.checkpoint, self.entries = Path(path), Checkpoint(path), {}
        self.text, self.config = (self.path / "config.json").read_text(), self.checkpoint.config
        self.family, self.N = self.config["model_type"], self.config["num_hidden_layers"]
        self.prefix, files = f"model.layers.{self.N}.", self.checkpoint.files
        for file in sorted(set(files.values())):
            found, _ = read_header(self.path / file)
            self.entries |= {name: entry for name, entry in found.items() if files.get(name) == file}
        mtp_prefix(self.config, self.entries)  # warns of a second MTP layer

    def likes(self, name):
        """Tensors that show how one of layer N is stored here: itself, else its like in layer N - 1."""
        return [at for at in (name, name.replace(self.prefix, f"model.layers.{self.N - 1}."))
                if at in self.entries]

    def dtype(self, name, tensor):
        """dtype to write a tensor of layer N in: its likes', else the router's own, else the embedding's."""
        embed = [at for at in self.entries if at.endswith(("embed_tokens.weight", "word_embeddings.weight"))]
        for at in self.likes(name) + ([] if name.endswith(ROUTER) else embed):
            if self.entries[at].dtype in DTYPES:
                return DTYPES[self.entries[at].dtype]
        return tensor.dtype

def native_config(source):
    """Text of OUT/config.json for a family with an MTP layer of its own: the source's, edited."""
    text, config = set_key(source.text, "num_nextn_predict_layers", 1), source.config
    if source.family != "hy_v3":
        return text
    kinds = config.get("mlp_layer_types") or ["dense"]
    dense = kinds.count("dense")
    if "dense" in kinds[dense:]:
        raise ValueError(f"mlp_layer_types of {source.path} has dense layers after sparse ones; engines read "
                         "first_k_dense_replace, which cannot say that")
    qk_norm = any(name.endswith("self_attn.q_norm.weight") for name in source.entries)
    for key, value in zip(HY_V3, (qk_norm, True, dense, config.get("moe_intermediate_size"))):
        text = text if config.get(key) is not None else set_key(text, key, value)
    return text

# ---- Dense targets as MoE models ---------------------------------------------------------------------------
# A Llama-type layer is a glm4_moe or hy_v3 layer whose RoPE turns all of a head. Engines want a MoE layer in
# the main stack: the last MLP becomes a shared expert (weight 1, no gate) beside routed experts of zeros.

def dense_config(source, draft, layout):
    """Text of OUT/config.json for a dense source and its draft's MTPConfig."""
    if "quantization_config" in source.config:
        raise ValueError(f"the dense target {source.path} is quantised; rewriting it needs plain weights")
    if layout == "hy_v3" and draft.attention_bias:
        raise ValueError(f"hy_v3 has no q, k, v biases, this {source.family} target has: --layout glm4_moe")
    E, shared, N = draft.n_routed_experts, draft.n_shared_experts, source.N
    if layout == "glm4_moe":
        own = dict(architectures=["Glm4MoeForCausalLM"], n_routed_experts=E, n_shared_experts=shared,
                   use_qk_norm=draft.use_qk_norm, norm_topk_prob=draft.norm_topk_prob, n_group=1,
                   topk_group=1, routed_scaling_factor=draft.routed_scaling_factor)
    else:
        own = dict(architectures=["HYV3ForCausalLM"], num_experts=E, num_shared_experts=shared,
                   mlp_bias=False, expert_hidden_dim=draft.moe_intermediate_size, qk_norm=draft.use_qk_norm,
                   route_norm=draft.norm_topk_prob, router_scaling_factor=draft.routed_scaling_factor,
                   enable_moe_fp32_combine=False, mlp_layer_types=["dense"] * (N - 1) + ["sparse"])
    same = ("num_key_value_heads", "head_dim", "rms_norm_eps", "initializer_range", "attention_bias",
            "rope_theta", "partial_rotary_factor", "num_experts_per_tok", "moe_intermediate_size")
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "dtype", "torch_dtype", "hidden_act", "max_position_embeddings", "bos_token_id",
            "eos_token_id", "pad_token_id")
    rope = {"rope_type": "default", "rope_theta": draft.rope_theta, "partial_rotary_factor": 1.0}
    config = {"model_type": layout, **own, "rope_parameters": rope, "tie_word_embeddings": False,
              "first_k_dense_replace": N - 1, "num_nextn_predict_layers": 1}
    config |= {key: getattr(draft, key) for key in same}
    return json.dumps(config | {k: source.config[k] for k in kept if k in source.config}, indent=2) + "\n"

def dense_name(source, layout, name):
    """A dense source's tensor name in OUT; None: not carried over."""
    mlp, tied = f"model.layers.{source.N - 1}.mlp.", source.config.get("tie_word_embeddings")
    if name.endswith("rotary_emb.inv_freq") or tied and name == "lm_head.weight":
        return None
    return name.replace(mlp, mlp + ("shared_mlp." if layout == "hy_v3" else "shared_experts."))

def dense_additions(source, config, names):
    """{name: tensor}: the last layer's router and experts, zeros, and the untied head; `names`: the rest."""
    expected, mlp = expected_stack(config, names), f"model.layers.{source.N - 1}.mlp."
    unknown = sorted(names - expected.keys())
    if unknown:
        raise ValueError(f"{source.path} has tensors for which {config['model_type']} has no place: "
                         f"{', '.join(unknown[:5])}")
    dtype = DTYPES[source.entries[mlp + "down_proj.weight"].dtype]
    found = {name: torch.zeros(expected[name], dtype=torch.float32 if name.endswith(ROUTER) else dtype)
             for name in expected.keys() - names if name.startswith(mlp)}
    if source.config.get("tie_word_embeddings"):
        found["lm_head.weight"] = source.checkpoint.read("model.embed_tokens.weight")
    return found

# ---- Quantised targets -------------------------------------------------------------------------------------

def dequantised(name, codes, scales, block):
    """fp32 tensor of a weight's codes and {name of its scale: scale}; what is not known is a ValueError."""
    stem, dtypes = name.removesuffix(".weight"), (torch.float8_e4m3fn, torch.int8)
    (kind, scale), shape = [*scales.items(), ("none", torch.ones(()))][0], tuple(codes.shape)
    if kind not in [stem + suffix for suffix in SCALES] or len(scales) > 1 or codes.dtype not in dtypes:
        raise ValueError(f"{name} is {codes.dtype} with scales {', '.join(scales) or 'none'}: only "
                         f"float8_e4m3fn or int8 with one of {', '.join(SCALES)} can be de-quantised")
    if kind.endswith("_inv"):  # of blocks, the last of each side may be ragged
        fitting = tuple(-(-size // b) for size, b in zip(shape, block))
        if scale.shape != fitting:
            raise ValueError(f"{kind} is {tuple(scale.shape)}, but blocks of {tuple(block)} "
                             f"(weight_block_size) in {shape} make {fitting}")
        scale = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:shape[0], :shape[1]]
    return codes.float() * (scale[:, None] if scale.dim() == 1 and len(scale) > 1 else scale).float()

def requantised(source, name, tensor):
    """{name: codes, name: scale} in the scheme of a tensor's likes; {name: tensor} if they are plain."""
    like = next(iter(source.likes(name)), "")
    suffix = next((s for s in SCALES if like.removesuffix(".weight") + s in source.entries), None)
    if suffix is None or source.entries[like].dtype not in CODES:
        return {name: tensor.to(source.dtype(name, tensor))}
    dtype, most = CODES[source.entries[like].dtype]
    old, w = source.checkpoint._raw(like.removesuffix(".weight") + suffix), tensor.float()
    if suffix == ".weight_scale_inv":
        (b0, b1), (n, m) = source.checkpoint.block, w.shape
        tiles = torch.nn.functional.pad(w, (0, -m % b1, 0, -n % b0)).unflatten(1, (-1, b1))
        tiles = tiles.unflatten(0, (-1, b0))  # (n / b0, b0, m / b1, b1)
        scale = (tiles.abs().amax((1, 3)) / most).clamp(min=1e-12).to(old.dtype)
        full = scale.float().repeat_interleave(b0, 0)[:n].repeat_interleave(b1, 1)[:, :m]
    else:
        largest = w.abs().amax(1, keepdim=True) if old.numel() > 1 else w.abs().amax().reshape(old.shape)
        full = scale = (largest / most).clamp(min=1e-12).to(old.dtype)
        scale = scale[:, 0] if old.dim() == 1 and old.numel() > 1 else scale
    codes = (w / full.float()).clamp(-most, most)
    return {name: (codes.round() if dtype == torch.int8 else codes).to(dtype),
            name.removesuffix(".weight") + suffix: scale}

def name_unquantised(text, names):
    """config.json's text with the modules of layer N's plain tensors named as unquantised.

    Engines ask for modules as they build them (qkv_proj, gate_up_proj, mlp.experts) or stored: give both."""
    quantised = json.loads(text)["quantization_config"]
    method = quantised.get("quant_method")
    keys = {"fp8": ["ignored_layers", "modules_to_not_convert"], "compressed-tensors": ["ignore"]}.get(method)
    if keys is None:
        raise ValueError(f"quant_method {method!r} is not known here (fp8 and compressed-tensors are), so it "
                         "cannot be told that the MTP layer is plain; convert the unquantised checkpoint")
    modules = {n.removesuffix(".weight") for n in names if n.endswith(".weight") and "norm" not in n}
    modules |= {re.sub(r"\.experts\..*", ".experts", re.sub(r"\bq_proj$", "qkv_proj", re.sub(
        r"\bgate_proj$", "gate_up_proj", name))) for name in modules}
    for key in [key for key in keys if quantised.get(key)] or keys[-1:]:
        listed = quantised.get(key) or []
        patterns = [re.compile(name[3:]) for name in listed if name.startswith("re:")]
        quantised[key] = listed + sorted(name for name in modules if name not in listed
                                         and not any(pattern.match(name) for pattern in patterns))
    same = quantised == json.loads(text)["quantization_config"]
    return text if same else set_key(text, "quantization_config", quantised)

# ---- Plan and writing --------------------------------------------------------------------------------------

class Plan(NamedTuple):
    source: Source
    config: str     # text of OUT/config.json
    keep: dict      # source file -> {name in the source: name in OUT}
    new: dict       # {name: tensor} of the draft's shard
    metadata: dict  # of that shard

    def intact(self, file):
        """Can OUT link this shard: are all its keys kept under their own names?"""
        return self.keep[file] == {n: n for n, entry in self.source.entries.items() if entry.file == file}

    def entries(self):
        """{name: Entry} of OUT."""
        kept = {new: self.source.entries[old]._replace(file=RENAMED.get(file, file))
                for file, names in self.keep.items() for old, new in names.items()}
        return kept | {n: Entry(NAMES[t.dtype], tuple(t.shape), t.nbytes, SHARD) for n, t in self.new.items()}

def make_plan(model, meta, source, layout, draft_only=False, requantize=False):
    """What OUT will hold. Raises ValueError for what the layout cannot express."""
    dense, new, keep = source.family in DENSE, {}, {}
    config = dense_config(source, model.config, layout) if dense else native_config(source)
    for name, tensor in layer_tensors(model.state_dict(), layout, source.prefix).items():
        plain = {name: tensor.to(source.dtype(name, tensor))}
        new |= requantised(source, name, tensor) if requantize else plain
    if "quantization_config" in source.config:
        plain = [name for name, tensor in new.items() if NAMES[tensor.dtype] in DTYPES]
        config = name_unquantised(config, plain)
    for name, entry in source.entries.items():
        out = dense_name(source, layout, name) if dense else name
        if out and (layer_number(name) < source.N or name.removeprefix(source.prefix) in OPTIONAL):
            keep.setdefault(entry.file, {})[name] = out
    if dense and not draft_only:
        kept = {out for names in keep.values() for out in names.values()}
        new |= dense_additions(source, json.loads(config), kept)
    metadata = {"mtp_recycle": meta["recycle"], "mtp_zero_first_embedding": str(meta["zero_first_embedding"]),
                "mtp_ttt_length": str(meta["ttt_length"]), "mtp_draft_only": str(draft_only)}
    return Plan(source, config, {} if draft_only else keep, new, metadata)

def write(plan, folder):
    """Fill a new folder as planned."""
    folder.mkdir()
    source, entries = plan.source, plan.entries()
    for file, names in plan.keep.items():
        out = folder / RENAMED.get(file, file)
        if not plan.intact(file):
            save_shard(out, {new: source.checkpoint._raw(old) for old, new in names.items()}, {})
            continue
        try:
            os.link((source.path / file).resolve(), out)  # hub caches hold symbolic links
        except OSError:  # another file system
            shutil.copy2(source.path / file, out)
    save_shard(folder / SHARD, plan.new, plan.metadata)
    index = {"metadata": {"total_size": sum(entry.size for entry in entries.values())},
             "weight_map": {name: entries[name].file for name in sorted(entries)}}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(plan.config)
    for path in source.path.iterdir():
        done = path.name == "config.json" or path.name.endswith(WEIGHTS)
        if path.is_file() and not done and path.name[0] != ".":
            shutil.copy2(path.resolve(), folder / path.name)

# ---- Check -------------------------------------------------------------------------------------------------

def check(folder):
    """(problems, metadata of the draft's shard) of a serving directory: what is wrong, one line each."""
    folder, problems, entries, metadata = Path(folder), [], {}, {}
    require((folder / "config.json").is_file(), f"{folder} has no config.json: no checkpoint's folder")
    checkpoint = Checkpoint(folder)  # without an index: a single file
    config, files = checkpoint.config, checkpoint.files
    if not mtp_prefix(config, files):
        return [f"there is no MTP layer, model.layers.{config['num_hidden_layers']}.*"], {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            found, about = read_header(path)
        except ValueError as error:
            problems.append(str(error))
            continue
        entries |= found
        metadata |= about if path.name == SHARD else {}
        problems += [f"{name} lies in {path.name}, the index says {files.get(name, 'nothing')}"
                     for name in found if files.get(name) != path.name]
    problems += [f"{name} is indexed in {file}, which lacks it or does not exist"
                 for name, file in files.items() if name not in entries]
    index = json.loads((folder / INDEX).read_text()) if (folder / INDEX).exists() else {}
    size, said = sum(entry.size for entry in entries.values()), index.get("metadata", {}).get("total_size")
    if index and size != said:
        problems.append(f"the index gives total_size {said}, the tensors have {size} bytes")
    problems += [f"config.json lacks {key}, which vLLM reads" for key in HY_V3
                 if config["model_type"] == "hy_v3" and config.get(key) is None]
    if config.get("num_nextn_predict_layers") != 1:
        problems.append(f"num_nextn_predict_layers is {config.get('num_nextn_predict_layers')}, expected 1")
    problems += check_layer(checkpoint, entries)
    stack = expected_stack(config, entries) if metadata.get("mtp_draft_only") != "True" else {}
    if "quantization_config" in config:  # packed formats have names of their own
        stack = {name: shape for name, shape in stack.items() if name in entries}
    return problems + wrong_shapes(stack, entries), metadata

def wrong_shapes(expected, entries):
    found = []
    for name, shape in expected.items():
        fused = re.sub(r"experts\.\d+\..*", "experts.gate_up_proj", name)
        if name not in entries:
            why = "; engines want one tensor per expert, not a fused one" if fused in entries else ""
            found.append(f"{name} is missing{why}")
        elif entries[name].shape != shape:
            found.append(f"{name} has shape {entries[name].shape}, the config implies {shape}")
    return found

def check_layer(checkpoint, entries):
    """Problems of the MTP layer: keys, shapes, values, quantisation; keys that do not belong there."""
    config, N, text = checkpoint.config, checkpoint.config["num_hidden_layers"], json.dumps(checkpoint.config)
    prefix, head = f"model.layers.{N}.", (config["vocab_size"], config["hidden_size"])
    expected = expected_layer(config, entries, prefix)
    known = expected | {prefix + name: head for name in OPTIONAL if prefix + name in entries}
    problems = wrong_shapes(known, entries)
    for name in [name for name in expected if name in entries and name in checkpoint.files]:
        if not checkpoint.read(name).isfinite().all():
            problems.append(f"{name} holds nan or inf")
    coded = [name for name in expected if name in entries and entries[name].dtype in CODES]
    known = known.keys() | {name.removesuffix(".weight") + suffix for name in coded for suffix in SCALES}
    problems += [f"{name} belongs to no MTP layer of this family: engines stumble over it or ignore it"
                 for name in entries if layer_number(name) >= N and name not in known]
    plain = [name for name in expected if name not in coded]
    if "quantization_config" in config and name_unquantised(text, plain) != text:
        problems.append("quantization_config does not name the plain modules of the MTP layer as unquantised")
    return problems

def report(folder, name=None):
    """Print the check of a folder and the engine its draft is exact for; returns True if nothing is wrong."""
    problems, metadata = check(folder)
    for line in problems:
        print(f"wrong: {line}")
    layout = json.loads((Path(folder) / "config.json").read_text())["model_type"]
    print(f"{name or folder}: {f'{len(problems)} problems' if problems else 'complete'}, {layout}")
    recycle, zero, K = (metadata.get(f"mtp_{k}") for k in ("recycle", "zero_first_embedding", "ttt_length"))
    zero = zero == "True"
    if recycle:
        kinds = ["post", "pre"] if recycle == "both" else [recycle]  # both: each row drew one
        found = [EXACT[layout, kind, zero] for kind in kinds if (layout, kind, zero) in EXACT]
        other = [f"; NOT for {engine} (train with --recycle {r}{' --zero-first-embedding' if z else ''})"
                 for (kind, r, z), engine in EXACT.items() if kind == layout and engine not in found]
        print(f"trained with K = {K}, recycle {recycle}, zero_first_embedding {zero}: exact for "
              f"{' and '.join(found) or 'no engine'}{''.join(other)}")
    return not problems

# ---- Command line ------------------------------------------------------------------------------------------

def open_source(args, meta):
    """The draft's target as a Source; a config.json other than the one it was trained for is refused."""
    if not args.target and not os.path.isdir(meta["target"]):
        raise FileNotFoundError(f"the draft's target {meta['target']} is not there; give --target DIR")
    source = Source(find_target(args.target or meta["target"]))
    found, expected = sha256(source.path / "config.json"), meta["target_config_sha256"]
    if found != expected:
        raise ValueError(f"the draft was trained for another target: config.json of {source.path} has sha256 "
                         f"{found[:12]}.., the draft expects {expected[:12]}..; give --target DIR")
    return source

def convert(args):
    model, meta = load_draft(args.draft)
    source = open_source(args, meta)
    layout = source.family
    if layout in DENSE:
        layout = args.layout or ("glm4_moe" if model.config.attention_bias else "hy_v3")
    elif args.layout not in (None, layout):
        raise ValueError(f"--layout {args.layout}: the target is {layout} already; leave --layout out")
    plan = make_plan(model, meta, source, layout, args.draft_only, args.requantize)
    if args.dry_run:
        for name, entry in sorted(plan.entries().items(), key=lambda item: (item[1].file, item[0])):
            print(f"{entry.file}  {name}  {list(entry.shape)}  {entry.dtype}")
        return
    out = Path(args.out).resolve()
    for path in (source.path.resolve(), Path(args.draft).resolve()):
        if out in (path, *path.parents):
            raise ValueError(f"--out {args.out} would overwrite {path}; give another folder")
    if out.exists() and any(out.iterdir()) and not (args.force and (out / INDEX).exists()):
        raise ValueError(f"--out {args.out} is not empty; give another folder, or --force over a checkpoint")
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with atomic(out) as aside:
            write(plan, aside)
            if not report(aside, args.out):
                raise ValueError("what was written fails its check (above): a fault of ours. Nothing is kept")
    finally:
        shutil.rmtree(out.with_name(f".{out.name}.partial"), ignore_errors=True)

def parse(arguments):
    parser = argparse.ArgumentParser(prog="convert.py", allow_abbrev=False, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", nargs="?", help="draft directory that mtp.py trained")
    parser.add_argument("--target", help="the target's directory, if it is not where it was in training")
    parser.add_argument("--out", help="directory to write")
    parser.add_argument("--layout", choices=["glm4_moe", "hy_v3"],
                        help="how to write a dense target (default hy_v3; glm4_moe if it has biases)")
    for flag, text in (("--requantize", "write it in the quantised target's scheme (default: plain)"),
                       ("--draft-only", "write the draft's layer and config.json alone"),
                       ("--dry-run", "list what would be written"), ("--force", "replace a checkpoint OUT")):
        parser.add_argument(flag, action="store_true", help=text)
    parser.add_argument("--check", metavar="OUT", help="check a serving directory; exit 1 if it is wrong")
    return parser.parse_args(arguments)

def main(arguments=None):
    args = parse(arguments)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda text, *_: print(f"convert.py: warning: {text}", file=sys.stderr)
            if args.check:
                return 0 if report(args.check) else 1
            if not args.draft or not (args.out or args.dry_run):
                raise ValueError("give a draft directory and --out OUT, or --check OUT")
            convert(args)
    except (ValueError, OSError, SafetensorError) as error:
        print(f"convert.py: error: {error}", file=sys.stderr)
        return 2
    return 0

if __name__ == "__main__":
    sys.exit(main())
