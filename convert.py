"""convert.py - other people's names: configurations and checkpoints, read to train, written to serve.

  python convert.py DRAFT --out OUT                  a serving directory: the target with the draft in it
  python convert.py DRAFT --out OUT --layout hy_v3   the same for a dense target (Llama, Mistral, Qwen)
  python convert.py DRAFT --out OUT --draft-only     the draft's layer alone
  python convert.py DRAFT --out OUT --dry-run        list every key, shape, dtype and file; write nothing
  python convert.py --check OUT                      every key there, indexed, well shaped and finite?

OUT holds the target's shards (hard links: edit neither; rewritten only if keys in them change), the
draft as layer N = num_hidden_layers in a shard of its own, an index of all keys, the target's
config.json with num_nextn_predict_layers = 1, and its tokenizer files. It appears complete or not at
all. The way back needs no command: `mtp.py --target OUT` starts from the layer in OUT.

Engines load checkpoints with missing, fused or un-indexed draft tensors without a word and draft
garbage, so OUT is checked before it appears. A draft is exact only for an engine that feeds back what
the draft was trained on. Its shard keeps that setting (safetensors metadata); --check names the engines.

To add a family of checkpoints, write the function that reads its config.json and a row of FAMILIES
(and ROUTER, expected_stack, layer_number, where its names differ there). What an engine does with it
is a row of ENGINES. mtp.py imports this file; it imports nothing of mtp.py.

Glossary: C hidden_size, V vocab_size, H query heads, G key/value heads, D head_dim, E n_routed_experts,
F moe_intermediate_size, N num_hidden_layers. Layout: the family as which a checkpoint is written.
"""
from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD = "model-mtp.safetensors"  # of OUT: the draft's
RENAMED = {  # a loader that sees SINGLE reads no index; a source that is an OUT has a SHARD of its own
    SINGLE: "model-00001-of-00001.safetensors", SHARD: "model-mtp-source.safetensors"}
BLOCK = 4096  # bytes, see identity
WEIGHTS = (".safetensors", ".bin", ".index.json", ".pt", ".pth", ".gguf", ".h5", ".msgpack")

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
CODES = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
CODED = (".weight_scale_inv", ".weight_scale", ".weight_zero_point")  # beside a .weight of codes

ROUTER = ("mlp.gate.weight", "mlp.router.gate.weight", "expert_bias", "e_score_correction_bias")
OPTIONAL = ("embed_tokens.weight", "shared_head.head.weight")  # of layer N; engines use the main ones


def require(holds, message):
    if not holds:
        raise ValueError(message)


# ---- Files ---------------------------------------------------------------------------------------

def sha256(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def read_json(path):
    """The object that a file holds; ValueError if it holds none."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    require(isinstance(found, dict), f"{path} holds a {type(found).__name__}, expected an object")
    return found


def find_target(path, with_code=False):
    """Directory of a target; what is none is a hub id, downloaded if need be, its code only if asked for."""
    if os.path.isdir(path):
        return Path(path)
    try:
        from huggingface_hub import snapshot_download
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"] + ["*.py"] * with_code
        return Path(snapshot_download(str(path), allow_patterns=patterns))
    except Exception as error:  # the hub's client raises many kinds
        reason = str(error).split("\n")[0]
        raise FileNotFoundError(f"target {str(path)!r} is neither a directory nor a hub id that can be "
                                f"had: {reason}") from None


def aside(path):
    """A name beside `path` to write under until put_in_place. What an interrupted write left there is
    removed. The ranks of a run may all call it before a barrier."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.partial")
    if fresh.is_dir():
        shutil.rmtree(fresh, ignore_errors=True)
    else:
        fresh.unlink(missing_ok=True)
    return fresh


def put_in_place(fresh, path):
    """Sync a file or folder that was written aside, then rename it: `path` is the old or the whole new one.
    Of a folder the old one is removed first."""
    path = Path(path)
    umask = os.umask(0)
    os.umask(umask)
    for written in [*fresh.rglob("*"), fresh]:
        if written.is_file() and written.stat().st_nlink == 1:  # a link is somebody else's, too
            written.chmod(0o666 & ~umask)  # save_file leaves 0600
        fsync(written)

    if path.is_dir():
        shutil.rmtree(path)
    os.replace(fresh, path)
    fsync(path.parent)


def fsync(path):
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


@contextlib.contextmanager
def atomic(path):
    """Write a file or folder aside, then put it in place; if that fails, `path` stays as it was."""
    fresh = aside(path)
    yield fresh
    put_in_place(fresh, path)


class Entry(NamedTuple):
    """A tensor as a safetensors file lists it."""
    dtype: str  # F32, BF16, ..
    shape: tuple
    size: int  # bytes
    file: str
    start: int = 0  # first byte in the file


def read_header(path):
    """({name: Entry}, metadata) of a safetensors file; no tensor is read. ValueError if it is none or cut."""
    path = Path(path)
    found = path.stat().st_size
    entries = {}
    try:
        with open(path, "rb") as file:
            data = 8 + int.from_bytes(file.read(8), "little")
            require(data <= found, "its header is longer than the file")
            header = json.loads(file.read(data - 8))
        metadata = header.pop("__metadata__", {})
        for name, about in header.items():
            start, stop = about["data_offsets"]
            shape = tuple(about["shape"])
            entries[name] = Entry(about["dtype"], shape, stop - start, path.name, data + start)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no safetensors file ({error}): a git-lfs pointer, or damaged") from None

    size = max([data, *(entry.start + entry.size for entry in entries.values())])
    require(found == size, f"{path} has {found} bytes, its header says {size}: it is cut short")
    return entries, metadata


def save_shard(path, tensors, metadata):
    apart = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(apart, path, metadata={"format": "pt", **metadata})


def edited(text, wanted):
    """A config.json's text with keys set, in the text model's part if that is nested; if all of them are
    there, the same bytes."""
    config = json.loads(text)
    changes = {key: value for key, value in wanted.items() if flat(config).get(key) != value}
    if not changes:
        return text
    part = config.get("text_config") or config
    for key, value in changes.items():
        (config if key in config else part)[key] = value
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


# ---- Families ------------------------------------------------------------------------------------
# How a family's config.json is read: its keys are renamed to those of mtp.MTPConfig, which are
# glm4_moe's; then a function fills in what the family leaves unsaid and refuses what the draft's layer
# cannot express. names: of the checkpoint's tensors, or None if they are not known.

REQUIRED = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
            "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
USUAL = {  # where neither the config.json nor its family says
    "n_shared_experts": 1, "shared_expert_intermediate_size": 0, "intermediate_size": 0,
    "scoring_func": "sigmoid", "partial_rotary_factor": 1.0, "use_qk_norm": True,
    "attn_output_gate": False, "zero_centered_norm": False, "attention_bias": False,
    "rope_theta": 10000.0, "rope_scaling": None, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.0,
    "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "initializer_range": 0.02,
    "max_position_embeddings": 131072, "model_type": "glm4_moe"}
MAY_BE_ZERO = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts",
               "shared_expert_intermediate_size", "intermediate_size")
UNREAD = {  # what would change a layer or its logits: the values that do not
    "logit_scale": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0, "embedding_multiplier": 1.0,
    "attention_multiplier": None, "attn_logit_softcapping": None, "final_logit_softcapping": None,
    "clip_qkv": None, "use_alibi": False}
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
SIZES = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")  # a dense target's choice


def check_values(config):
    """ValueError for a value of one of mtp.MTPConfig's fields that has another type or cannot be."""
    for key in sorted(config.keys() & {*REQUIRED, *USUAL} - {"rope_scaling"}):
        value, kind = config[key], type(USUAL.get(key, 1))
        fits = isinstance(value, (int, float) if kind is float else kind)
        if isinstance(value, bool) and kind is not bool:
            fits = False
        require(fits, f"{key} is {value!r}, expected {KINDS[kind]}")
        least = "0 or more" if key in MAY_BE_ZERO else "above 0"
        sound = kind in (bool, str) or value > 0 or (value == 0 and key in MAY_BE_ZERO)
        require(sound, f"{key} is {value!r}, expected {least}")


def refuse_others(config, usual):
    """ValueError for a key of `usual` that config has with another value."""
    odd = {key: config[key] for key in usual if config.get(key, usual[key]) != usual[key]}
    require(not odd, f"the {config['model_type']} target has {odd}, which this draft layer cannot express")


def glm4_moe(config, names):
    """GLM-4.5 to 4.7."""
    return {"use_qk_norm": False, "partial_rotary_factor": 0.5, **config}


def hy_v3(config, names):
    """Hunyuan 3. transformers writes neither qk_norm nor route_norm and does both."""
    q_norm = names is None or has_q_norm(names)
    unsaid = {"use_qk_norm": q_norm, "norm_topk_prob": True}
    for key in unsaid.keys() - config.keys():
        warnings.warn(f"the hy_v3 config does not say {key}: taken as {unsaid[key]}")
    return unsaid | config


def bailing_moe_v2(config, names):
    """Ling 2.0."""
    width = config.get("moe_intermediate_size")
    refuse_others(config, {"use_bias": False, "score_function": "sigmoid",
                           "moe_shared_expert_intermediate_size": width})
    rotary = config.get("rotary_dim")
    if rotary is not None:
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        config = {**config, "partial_rotary_factor": rotary / head_dim}
    return {"n_shared_experts": 0, **config}


def dense(config, names):
    """Llama, Mistral, Qwen2, Qwen3. The draft's shared experts are together as wide as the target's
    MLP, whose last one becomes shared experts in OUT. config also holds the SIZES that the user chose."""
    family = config["model_type"]
    names = names or ()
    slides = config.get("use_sliding_window", family == "mistral") and config.get("sliding_window")
    require(not slides and "sliding_attention" not in config.get("layer_types", ()), f"the {family} "
            f"target has sliding-window attention ({config.get('sliding_window')}), which neither the "
            "draft nor a serving layout has")
    biased = any(name.endswith("o_proj.bias") for name in names)
    require(not biased, "o_proj biases fit no serving layout")

    width = config.get("intermediate_size")
    require(width, f"the {family} config has no value for intermediate_size")
    narrow = next((width // n for n in (4, 2) if width % (32 * n) == 0), width)  # vLLM: 32 divides F
    F = config.get("moe_intermediate_size", narrow)
    require(F > 0 and width % F == 0, f"moe_intermediate_size {F} does not divide the target's "
            f"intermediate_size {width}: give a divisor, for instance {narrow}")

    unsaid = dict(num_key_value_heads=config.get("num_attention_heads"), rms_norm_eps=1e-6,
                  n_routed_experts=8, num_experts_per_tok=2)
    if family == "qwen3":
        unsaid["head_dim"] = 128
    fixed = dict(moe_intermediate_size=F, n_shared_experts=width // F, partial_rotary_factor=1.0,
                 use_qk_norm=has_q_norm(names), attention_bias=has_qkv_bias(names))
    return unsaid | config | fixed


def qwen3_5(config, names):
    """Qwen3.5, 3.6, 3.8 and Qwen3-Next, dense and MoE."""
    kind = config["model_type"]
    set_keys = {key: value for key, value in config.items() if value}  # 0 MTP layers: they were lost
    refuse_others(set_keys, {"attention_bias": False, "mtp_use_dedicated_embeddings": False,
                             "mlp_only_layers": [], "decoder_sparse_step": 1, "mtp_num_hidden_layers": 1})

    layer = {"zero_centered_norm": True, "use_qk_norm": True, "n_shared_experts": 0,
             "routed_scaling_factor": 1.0}
    if "moe" in kind or kind == "qwen3_next":
        layer |= {"scoring_func": "softmax", "intermediate_size": 0}
    else:
        layer |= dict.fromkeys(SIZES, 0)
    unsaid = {"head_dim": 256, "partial_rotary_factor": 0.25, "attn_output_gate": True, "rms_norm_eps": 1e-6}
    return unsaid | config | layer


def has_q_norm(names):
    return any(name.endswith("self_attn.q_norm.weight") for name in names)


def has_qkv_bias(names):
    return any(name.endswith("self_attn.q_proj.bias") for name in names)


# What engines need in OUT's config.json: {key: value}.

def one_layer(config, names):
    return {"num_nextn_predict_layers": 1}


def one_layer_untied(config, names):
    """vLLM ties no head of these families to the embedding."""
    tied = {"tie_word_embeddings": False} if config.get("tie_word_embeddings") else {}
    return one_layer(config, names) | tied


def hy_v3_for_vllm(config, names):
    """one_layer, and the keys that vLLM reads and transformers does not write."""
    kinds = config.get("mlp_layer_types") or ["dense"]
    n_dense = kinds.count("dense")
    require("dense" not in kinds[n_dense:], f"mlp_layer_types {kinds} has dense layers after sparse "
            "ones; engines read first_k_dense_replace, which cannot say that")

    unsaid = dict(qk_norm=has_q_norm(names), route_norm=True, first_k_dense_replace=n_dense,
                  expert_hidden_dim=config.get("moe_intermediate_size"))
    wanted = {key: value for key, value in unsaid.items() if config.get(key) is None}
    return wanted | one_layer(config, names)


def qwen3_5_layer(config, names):
    return {"mtp_num_hidden_layers": 1}


class Family(NamedTuple):
    read: Callable  # (config in mtp.MTPConfig's spelling, names) -> the same, complete
    keys: dict = {}  # {key of config.json: field of mtp.MTPConfig} where they differ
    names: dict = {}  # {beginning of a draft tensor's name: what it is here}; see stored_views
    prefix: str = "model.layers.{N}."  # of the MTP layer's tensors
    second: str = "model.layers.{M}."  # of those of a further one, M = N + 1
    layer: str = ""  # after prefix: of the tensors that a main layer has, too
    alike: bool = True  # do main layers have the MTP layer's shapes?
    fused: bool = False  # may all experts be stored as one tensor?
    embed: str = "model.embed_tokens.weight"
    write: Callable = one_layer  # (config, names) -> {key: value} that engines need
    dense: bool = False  # no MTP layer of its own: written in another family's layout


QWEN = Family(
    qwen3_5, prefix="mtp.", second="mtp.layers.1.", layer="layers.0.", alike=False, fused=True,
    write=qwen3_5_layer, keys={"num_experts": "n_routed_experts"},
    names={"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc",
           "shared_head.norm": "norm", "input_layernorm": "layers.0.input_layernorm",
           "post_attention_layernorm": "layers.0.post_attention_layernorm",
           "self_attn": "layers.0.self_attn", "mlp": "layers.0.mlp",
           "mlp.shared_experts": "layers.0.mlp.shared_expert"})

FAMILIES = {
    "glm4_moe": Family(glm4_moe, write=one_layer_untied),
    "hy_v3": Family(
        hy_v3, write=hy_v3_for_vllm,
        keys={"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts",
              "expert_hidden_dim": "moe_intermediate_size",
              "router_scaling_factor": "routed_scaling_factor",
              "route_norm": "norm_topk_prob", "qk_norm": "use_qk_norm"},
        names={"shared_head.norm": "final_layernorm", "mlp.shared_experts": "mlp.shared_mlp",
               "mlp.gate.weight": "mlp.router.gate.weight",
               "mlp.gate.e_score_correction_bias": "mlp.expert_bias"}),
    "bailing_moe_v2": Family(
        bailing_moe_v2, embed="model.word_embeddings.weight",
        keys={"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts",
              "use_qkv_bias": "attention_bias"},
        names={"shared_head.norm": "final_layernorm", "self_attn.o_proj": "attention.dense",
               "self_attn.q_proj": "attention.query_key_value",
               "self_attn.k_proj": "attention.query_key_value",
               "self_attn.v_proj": "attention.query_key_value",
               "self_attn.q_norm": "attention.query_layernorm",
               "self_attn.k_norm": "attention.key_layernorm",
               "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias"}),
    "llama": Family(dense, dense=True),
    "mistral": Family(dense, dense=True),
    "qwen2": Family(dense, dense=True),
    "qwen3": Family(dense, dense=True),
    "qwen3_5": QWEN,
    "qwen3_5_text": QWEN,
    "qwen3_5_moe": QWEN,
    "qwen3_5_moe_text": QWEN,
    "qwen3_next": QWEN._replace(write=one_layer_untied),
}


def family_of(config):
    kind = config.get("model_type")
    require(isinstance(kind, str) and kind in FAMILIES, f"model_type {kind!r} is none of "
            f"{', '.join(FAMILIES)}; layers with MLA do not fit this draft")
    return FAMILIES[kind]


def flat(config):
    """config.json's dict with the text model's keys on top, where they are nested."""
    return {**config, **(config.get("text_config") or {}), "model_type": config.get("model_type")}


def layer_prefix(config):
    """Prefix of the MTP layer's tensors."""
    N = config.get("num_hidden_layers")
    whole = isinstance(N, int) and N > 0
    require(whole, f"config.json has num_hidden_layers {N!r}: expected a whole model's, not a draft's")
    return family_of(config).prefix.format(N=N)


def draft_config(config, names=None, sizes=None):
    """mtp.MTPConfig's keywords for a target, from its config.json (a dict) and its tensors' names, which
    tell what that leaves unsaid. sizes: a dense target's SIZES, where they are not to be the usual ones."""
    family = family_of(config)
    sizes = {key: value for key, value in (sizes or {}).items() if value is not None}
    require(family.dense or not sizes, f"{', '.join(sizes)} are for dense targets, a "
            f"{config['model_type']} target has its own: leave them out")

    if config["model_type"] == "mistral":
        config = {"sliding_window": 4096} | config  # as transformers takes it
    said = {key: value for key, value in flat(config).items() if value is not None}
    config = {family.keys.get(key, key): value for key, value in said.items()}
    act = config.get("hidden_act", "silu")
    bias = config.get("mlp_bias", False)
    require(act == "silu" and not bias,
            f"experts must be silu without bias, not {act!r}, bias {bias!r}")

    refuse_others(config, UNREAD)
    check_values(config)
    said = family.read(config | sizes, names)
    found = USUAL | {key: said[key] for key in (*REQUIRED, *USUAL) if key in said} | read_rope(said)
    found.setdefault("head_dim", said.get("hidden_size", 0) // said.get("num_attention_heads", 1))
    lost = [key for key in REQUIRED if key not in found]
    require(not lost, f"the {config['model_type']} config has no value for {', '.join(lost)}")
    check_values(found)
    return found


ROPE_SCALING = {  # rope_type: what mtp.rope_frequencies reads of it
    "default": set(),
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"}}
OPTIONAL_ROPE = {"beta_fast", "beta_slow"}
OTHER_ROPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def read_rope(config):
    """rope_theta, rope_scaling and, if it is said, partial_rotary_factor: on top or in rope_parameters."""
    said = {}
    for key in ("rope_scaling", "rope_parameters"):
        part = config.get(key) or {}
        require(isinstance(part, dict), f"{key} is {part!r}, expected an object")
        said |= part
    config = config | said
    kind = said.get("rope_type", said.get("type", "default"))
    require(kind in ROPE_SCALING, f"rope_type {kind!r} is not supported; {', '.join(ROPE_SCALING)} are")
    theta = config.get("rope_theta")
    require(theta is not None, "the config has no rope_theta, neither on top nor in rope_parameters")

    check_values({"rope_theta": theta})
    found = {"rope_theta": float(theta), "rope_scaling": None}
    if kind != "default":
        scaling = {key: said[key] for key in ROPE_SCALING[kind] if key in said}
        lost = ROPE_SCALING[kind] - OPTIONAL_ROPE - scaling.keys()
        odd = said.keys() - ROPE_SCALING[kind] - OTHER_ROPE
        require(not lost and not odd, f"rope_type {kind}: missing are {', '.join(sorted(lost)) or 'none'}; "
                f"not supported are {', '.join(sorted(odd)) or 'none'}")
        found["rope_scaling"] = {"rope_type": kind, **scaling}
    if config.get("partial_rotary_factor") is not None:
        found["partial_rotary_factor"] = config["partial_rotary_factor"]
    return found


# ---- Engines -------------------------------------------------------------------------------------
# (layout, engine) -> (recycle, zero_first_embedding): what the engine gives to the next draft step, the
# layer's output after the final norm (post) or before it (pre), and whether it zeroes the embedding at
# position 0. vLLM 0.32, transformers 5.2x: seen in runs. SGLang 0.5.23: read in its source.

ENGINES = {
    ("glm4_moe", "vllm"): ("pre", True),
    ("glm4_moe", "sglang"): ("post", False),
    ("glm4_moe", "transformers"): ("post", False),
    ("hy_v3", "vllm"): ("post", True),
    ("hy_v3", "sglang"): ("post", False),
    ("bailing_moe_v2", "sglang"): ("post", False),
} | {(kind, engine): ("post", False) for kind, family in FAMILIES.items() if family.prefix == "mtp."
     for engine in ("vllm", "sglang")}
ENGINE_NAMES = {"vllm": "vLLM", "sglang": "SGLang", "transformers": "transformers"}


def engines_of(layout):
    """{engine: its setting}."""
    return {engine: setting for (kind, engine), setting in ENGINES.items() if kind == layout}


def engine_setting(layout, engine):
    """(recycle, zero_first_embedding) to train with; "any": a compromise where the engines differ."""
    known = engines_of(layout)
    if engine == "any":
        recycles = {recycle for recycle, _ in known.values()}
        return "both" if len(recycles) > 1 else recycles.pop(), False
    require(engine in known, f"--engine {engine}: it has no drafting for the layout {layout}; give "
            f"{' or '.join([*known, 'any'])}")
    return known[engine]


def serving_layout(config, names):
    """The layout a target is served in: its own; a dense one's is hy_v3, or glm4_moe if it has biases."""
    if not family_of(config).dense:
        return config["model_type"]
    return "glm4_moe" if has_qkv_bias(names) else "hy_v3"


# ---- Tensors: names and shapes -------------------------------------------------------------------

def layer_shapes(config):
    """{name: shape} of the tensors of a draft; config: a dict of mtp.MTPConfig's fields."""
    C, D = config["hidden_size"], config["head_dim"]
    H, G = config["num_attention_heads"], config["num_key_value_heads"]
    E, F = config["n_routed_experts"], config["moe_intermediate_size"]
    shared = config["shared_expert_intermediate_size"] or config["n_shared_experts"] * F
    gate = H * D if config["attn_output_gate"] else 0

    shapes = {
        "enorm.weight": (C,),
        "hnorm.weight": (C,),
        "eh_proj.weight": (C, 2 * C),  # columns: of the embedding, then of the hidden state
        "input_layernorm.weight": (C,),
        "self_attn.q_proj.weight": (H * D + gate, C),
        "self_attn.k_proj.weight": (G * D, C),
        "self_attn.v_proj.weight": (G * D, C),
        "self_attn.o_proj.weight": (C, H * D),
        "post_attention_layernorm.weight": (C,),
        "shared_head.norm.weight": (C,),
    }
    if config["attention_bias"]:
        shapes["self_attn.q_proj.bias"] = (H * D + gate,)
        shapes["self_attn.k_proj.bias"] = (G * D,)
        shapes["self_attn.v_proj.bias"] = (G * D,)
    if config["use_qk_norm"]:
        shapes["self_attn.q_norm.weight"] = (D,)
        shapes["self_attn.k_norm.weight"] = (D,)
    if not E:
        return shapes | mlp_shapes("mlp.", config["intermediate_size"], C)

    shapes["mlp.gate.weight"] = (E, C)
    if config["scoring_func"] == "sigmoid":
        shapes["mlp.gate.e_score_correction_bias"] = (E,)
    shapes["mlp.experts.gate_up_proj"] = (E, 2 * F, C)  # rows: of gate, then of up
    shapes["mlp.experts.down_proj"] = (E, C, F)
    if shared:
        shapes |= mlp_shapes("mlp.shared_experts.", shared, C)
    if config["shared_expert_intermediate_size"]:
        shapes["mlp.shared_expert_gate.weight"] = (1, C)
    return shapes


def mlp_shapes(prefix, width, C):
    return {prefix + "gate_proj.weight": (width, C), prefix + "up_proj.weight": (width, C),
            prefix + "down_proj.weight": (C, width)}


def fused_experts(layout, names, prefix):
    """Are the experts of a checkpoint's MTP layer, or else of its main layers, stored in one tensor?"""
    own = [name for name in names if name.startswith(prefix)]
    return FAMILIES[layout].fused and any(
        name.endswith("mlp.experts.gate_up_proj") for name in own or names)


def unfused(name, tensor):
    """[(name, view)]: one of a draft's tensors as checkpoints store it, each expert's matrices apart."""
    if name == "mlp.experts.down_proj":  # (E, C, F)
        return [(f"mlp.experts.{e}.down_proj.weight", down) for e, down in enumerate(tensor)]
    if name != "mlp.experts.gate_up_proj":
        return [(name, tensor)]

    found = []
    for e, matrix in enumerate(tensor):  # (E, 2F, C)
        gate, up = matrix.chunk(2)  # (F, C)
        found.append((f"mlp.experts.{e}.gate_proj.weight", gate))
        found.append((f"mlp.experts.{e}.up_proj.weight", up))
    return found


def native_name(name, family):
    """What a Family calls a draft's tensor: the longest beginning that its table has is replaced."""
    known = [start for start in family.names if name.startswith(start)]
    if not known:
        return name
    start = max(known, key=len)
    return family.names[start] + name.removeprefix(start)


def stored_views(state, layout, prefix, fused=False):
    """{checkpoint name: [views into a draft's tensors]}. What a family calls by one name, q, k and v, is
    stacked there, in the order of state: {draft name: tensor}, a state_dict()."""
    found = {}
    for own, tensor in state.items():
        for name, view in [(own, tensor)] if fused else unfused(own, tensor):
            stored = prefix + native_name(name, FAMILIES[layout])
            found.setdefault(stored, []).append(view)
    return found


def layer_tensors(state, layout, prefix, fused=False):
    """{checkpoint name: tensor} of a draft in a layout."""
    found = {}
    for name, views in stored_views(state, layout, prefix, fused).items():
        found[name] = views[0] if len(views) == 1 else torch.cat(views)
    return found


def expected_layer(config, names, prefix):
    """{checkpoint name: shape} of the MTP layer that a config.json implies, tensor names filling gaps."""
    shapes = layer_shapes(draft_config(config, names))
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    layout = config["model_type"]
    tensors = layer_tensors(state, layout, prefix, fused_experts(layout, names, prefix))
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def expected_stack(config, names):
    """{name: shape} of the main model that a config.json implies."""
    C, V = config["hidden_size"], config["vocab_size"]
    stem = main_stem(names)
    expected = {embed_name(config, names): (V, C), stem + "norm.weight": (C,)}
    if not config.get("tie_word_embeddings"):
        expected["lm_head.weight"] = (V, C)
    if not family_of(config).alike:
        return expected

    sparse = {name: shape for name, shape in expected_layer(config, names, "").items()
              if name.startswith(("self_attn.", "attention.", "mlp.", "input_", "post_"))}
    dense = {name: shape for name, shape in sparse.items() if not name.startswith("mlp.")}
    dense |= mlp_shapes("mlp.", config["intermediate_size"], C)
    for i in range(config["num_hidden_layers"]):
        layer = dense if i < config.get("first_k_dense_replace", 1) else sparse
        expected |= {f"{stem}layers.{i}.{name}": shape for name, shape in layer.items()}
    return expected


def main_stem(names):
    """What names of the text model begin with: "model.", or in a model that sees, too, what is nested."""
    nested = "model.language_model."
    return nested if any(name.startswith(nested) for name in names) else "model."


def embed_name(config, names):
    return family_of(config).embed.replace("model.", main_stem(names), 1)


def of_mtp_layer(name, config):
    """Is it a tensor of an MTP layer, the first or a further one?"""
    return name.startswith(layer_prefix(config)) or layer_number(name) >= config["num_hidden_layers"]


def layer_number(name):
    """i of model.layers.i.*, or -1."""
    found = re.match(r"model\.(?:language_model\.)?layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


# ---- Reading checkpoints and drafts --------------------------------------------------------------

class Checkpoint:
    """Tensors of a Hugging Face directory, read one at a time, from safetensors only."""

    def __init__(self, path):
        self.path = Path(path)
        index, single = self.path / INDEX, self.path / SINGLE
        require(index.exists() or single.exists(),
                f"{path} has no {SINGLE}: only safetensors are read")
        self.config = flat(read_json(self.path / "config.json"))
        self.text = (self.path / "config.json").read_text(encoding="utf-8")
        if not index.exists():
            self.files = dict.fromkeys(read_header(single)[0], SINGLE)
            return

        self.files = read_json(index).get("weight_map")  # {tensor name: file}
        require(isinstance(self.files, dict), f"{index} has no weight_map")
        require(not single.exists() or SINGLE in self.files.values(), f"{path} has both {SINGLE} and "
                f"{INDEX}, of another checkpoint: transformers reads the one, engines the other. Remove the "
                "old one")

    def stored(self, name):
        """A tensor as it is stored: of a quantised weight its codes."""
        with safe_open(self.path / self.files[name], "pt") as file:
            return file.get_tensor(name)

    def read(self, name):
        """A tensor; a quantised weight comes de-quantised, fp32."""
        tensor = self.stored(name)
        stem = name.removesuffix(".weight")
        parts = {other.removeprefix(stem): self.stored(other) for other in self.files
                 if other.startswith(stem + ".weight_")}
        if tensor.dtype in DTYPES.values() and not parts:
            return tensor
        return dequantised(name, tensor, parts, self.config.get("quantization_config") or {})


def dequantised(name, codes, parts, config):
    """A weight in fp32, of its codes and {suffix: scale or zero point}; config: the quantization_config.
    ValueError for an unknown scheme."""
    scale = parts.get(".weight_scale", parts.get(".weight_scale_inv"))
    known = scale is not None and parts.keys() <= set(CODED)
    require(codes.dtype in CODES.values() and codes.dim() == 2 and known,
            f"{name} is {codes.dtype} with {', '.join(parts) or 'no scale'}: only matrices of "
            "float8_e4m3fn or int8 with a weight_scale or weight_scale_inv can be de-quantised")

    rows, columns = codes.shape
    groups = (config.get("config_groups") or {}).values()
    said = [group["weights"].get("block_structure") for group in groups if group.get("weights")]
    block = config.get("weight_block_size") or (said[0] if said else None)
    if scale.dim() < 2:  # one scale, or one for each row
        scale = scale.reshape(-1, 1)
    high, wide = block or (rows // len(scale), columns // scale.shape[1])
    if scale.shape[1] == 1 and len(scale) in (1, rows):
        high, wide = rows // len(scale), columns
    fitting = (-(-rows // high), -(-columns // wide))  # the last block of each side may be ragged
    require(scale.shape == fitting, f"the scale of {name} is {tuple(scale.shape)}, but blocks of "
            f"{(high, wide)} in {(rows, columns)} make {fitting}")

    def of_weights(x):
        x = x.float().reshape(fitting)
        return x.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:rows, :columns]

    value = codes.float()
    if ".weight_zero_point" in parts:
        value = value - of_weights(parts[".weight_zero_point"])
    return value * of_weights(scale)


def identity(checkpoint):
    """{part: hash} by which a target is known again: config.json; names, dtypes and shapes of its tensors;
    `blocks` of every tensor's bytes, from both ends and the middle; embedding, head and final norm whole.
    An MTP layer does not matter. Cheap for 700 GB."""
    config, files = checkpoint.config, checkpoint.files
    own = layer_prefix(config)
    whole = {embed_name(config, files): "embedding", "lm_head.weight": "head",
             main_stem(files) + "norm.weight": "norm"}
    headers = {file: read_header(checkpoint.path / file)[0] for file in set(files.values())}
    listed, blocks = hashlib.sha256(), hashlib.sha256()
    found = {"config": sha256(checkpoint.path / "config.json")}

    for name, file in sorted(files.items()):
        if name.startswith(own):
            continue
        entry = headers[file].get(name)
        require(entry, f"{checkpoint.path / INDEX} says that {name} is in {file}, which lacks it")
        listed.update(repr((name, entry.dtype, entry.shape)).encode())
        with open(checkpoint.path / file, "rb") as data:
            for at in (0, (entry.size - BLOCK) // 2, entry.size - BLOCK):
                data.seek(entry.start + max(at, 0))
                blocks.update(data.read(min(BLOCK, entry.size)))
            if name in whole:
                data.seek(entry.start)
                found[whole[name]] = hashlib.sha256(data.read(entry.size)).hexdigest()
    return found | {"tensors": listed.hexdigest(), "blocks": blocks.hexdigest()}


def unlisted_layer(checkpoint):
    """Files of a folder with an MTP layer that its index does not name; loaders do not see it."""
    own = layer_prefix(checkpoint.config)
    others = {path for path in checkpoint.path.glob("*.safetensors")
              if path.name not in checkpoint.files.values()}
    return [path.name for path in others if any(name.startswith(own) for name in read_header(path)[0])]


def require_same_target(found, expected, what):
    """ValueError that names the parts of two identities that differ."""
    parts = [part for part in sorted(found | expected) if found.get(part) != expected.get(part)]
    require(not parts, f"{what} was made for another target, whose {', '.join(parts)} differ"
            f"{'' if 'config' in parts else ' (config.json is the same)'}: give that --target DIR, or "
            "--other-target if it is meant")


def mtp_prefix(config, names):
    """'model.layers.N.' if a checkpoint (config.json's dict, tensor names) has an MTP layer, else None."""
    here = layer_prefix(config)
    second = family_of(config).second.format(M=config["num_hidden_layers"] + 1)
    if any(name.startswith(second) for name in names):
        first = here.removesuffix(".")
        warnings.warn(f"the checkpoint has more than one MTP layer; the first, {first}, is used")
    return here if any(name.startswith(here) for name in names) else None


@torch.no_grad()
def read_layer(checkpoint, prefix, state):
    """Copy a checkpoint's own MTP layer into the tensors of state, a draft's state_dict(), in place.
    A ValueError lists what is missing or misshapen."""
    wrong = []
    layout = checkpoint.config["model_type"]
    fused = fused_experts(layout, checkpoint.files, prefix)
    for name, views in stored_views(state, layout, prefix, fused).items():
        if name not in checkpoint.files:
            wrong.append(f"{name} is missing")
            continue

        try:
            tensor = checkpoint.read(name)
        except ValueError as error:  # codes of an unknown kind
            wrong.append(str(error))
            continue
        rows = [len(view) for view in views]
        expected = (sum(rows), *views[0].shape[1:])
        if tensor.shape != expected:
            wrong.append(f"{name} has shape {tuple(tensor.shape)}, expected {expected}")
        elif not tensor.isfinite().all():
            wrong.append(f"{name} holds nan or inf")
        else:
            for view, part in zip(views, tensor.split(rows)):
                view.copy_(part)

    require(not wrong, f"{checkpoint.path}'s MTP layer cannot be used, {len(wrong)} of its tensors "
            f"are wrong: {'; '.join(wrong[:5])}. To train anew: --init scratch; from the layer of an "
            "unquantised checkpoint: --init DIR")


def is_draft(path):
    """Is it a directory that training wrote, and no checkpoint?"""
    config = Path(path) / "config.json"
    return config.exists() and bool(read_json(config).keys() & {"ttt_length", "target_identity"})


def read_draft(path):
    """(config.json's dict, {name: tensor}) of a draft directory; ValueError if it is none or incomplete."""
    path = Path(path)
    require((path / "config.json").exists(),
            f"{path} has no config.json: expected a draft directory")
    meta = read_json(path / "config.json")
    needed = {*REQUIRED, *USUAL, "ttt_length", "engine", "recycle", "zero_first_embedding",
              "target", "target_identity"}
    lost = sorted(needed - meta.keys())
    require(meta.get("format") == 2 and not lost, f"{path}/config.json is not a draft's: format "
            f"{meta.get('format')}, expected 2; missing: {', '.join(lost[:5]) or 'nothing'}. Give a "
            "directory that this version of mtp.py wrote")

    check_values(meta)
    fits = {"ttt_length": isinstance(meta["ttt_length"], int) and meta["ttt_length"] > 0,
            "recycle": meta["recycle"] in ("post", "pre", "both"),
            "zero_first_embedding": isinstance(meta["zero_first_embedding"], bool),
            "target": isinstance(meta["target"], str),
            "target_identity": isinstance(meta["target_identity"], dict)}
    odd = [f"{key} {meta[key]!r}" for key, fine in fits.items() if not fine]
    require(not odd, f"{path}/config.json has {', '.join(odd)}, which no training wrote")

    read_header(path / SINGLE)
    state = load_file(path / SINGLE)
    for name, x in state.items():
        sound = x.is_floating_point() and x.isfinite().all()
        require(sound, f"{path / SINGLE}: {name} is {x.dtype} or holds nan or inf, expected finite floats")
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    expected = layer_shapes(meta)
    wrong = {name for name, _ in shapes.items() ^ expected.items()}
    require(not wrong, f"{path} does not fit its config: {', '.join(sorted(wrong)[:9])}")
    return meta, {name: state[name] for name in expected}


# ---- The source of OUT ---------------------------------------------------------------------------

class Source:
    """A target directory: its checkpoint and its tensors' headers."""

    def __init__(self, path):
        self.checkpoint = Checkpoint(path)
        self.path = self.checkpoint.path
        self.config = self.checkpoint.config
        self.family = family_of(self.config)
        self.N = self.config["num_hidden_layers"]
        self.prefix = layer_prefix(self.config)

        self.entries = {}
        self.unlisted = set()  # files with tensors that the index does not name
        for file in sorted(set(self.checkpoint.files.values())):
            found, _ = read_header(self.path / file)
            for name, entry in found.items():
                if self.checkpoint.files.get(name) == file:
                    self.entries[name] = entry
                else:
                    self.unlisted.add(file)
        self.last = f"{main_stem(self.entries)}layers.{self.N - 1}."  # prefix of the last main layer
        self.embed = embed_name(self.config, self.entries)
        mtp_prefix(self.config, self.entries)  # warns of a second MTP layer

    def dtype(self, name, tensor):
        """dtype to write a tensor of the MTP layer in: its own in the source or that of its like in the
        last main layer, unless they are codes; else a router's stays and others take the embedding's."""
        likes = [name, name.replace(self.prefix + self.family.layer, self.last)]
        if not name.endswith(ROUTER):
            likes.append(self.embed)
        for like in likes:
            if like in self.entries and self.entries[like].dtype in DTYPES:
                return DTYPES[self.entries[like].dtype]
        return tensor.dtype

    def kept(self):
        """Names of the tensors that OUT has too: the main model's and layer N's optional copies."""
        return [name for name in self.entries
                if not of_mtp_layer(name, self.config)
                or (name.removeprefix(self.prefix) in OPTIONAL and self.entries[name].dtype in DTYPES)]


# ---- Dense targets as MoE models -----------------------------------------------------------------
# A Llama-type layer is a glm4_moe or hy_v3 layer whose RoPE turns all of a head. Engines want a MoE
# layer in the main stack: the last MLP becomes a shared expert (weight 1, no gate) beside routed
# experts of zeros.

DENSE_LAYOUTS = {  # and what their config.json has beside the keys below
    "hy_v3": dict(architectures=["HYV3ForCausalLM"], mlp_bias=False, enable_moe_fp32_combine=False),
    "glm4_moe": dict(architectures=["Glm4MoeForCausalLM"], n_group=1, topk_group=1)}
OF_DRAFT = ("num_key_value_heads", "head_dim", "rms_norm_eps", "initializer_range", "attention_bias",
            "rope_theta", "partial_rotary_factor", "n_routed_experts", "num_experts_per_tok",
            "moe_intermediate_size", "n_shared_experts", "use_qk_norm", "norm_topk_prob",
            "routed_scaling_factor")
OF_SOURCE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
             "num_attention_heads", "dtype", "torch_dtype", "hidden_act", "max_position_embeddings",
             "bos_token_id", "eos_token_id", "pad_token_id")


def dense_config(source, draft, layout):
    """OUT/config.json of a dense source; draft: the config.json of its draft."""
    require(not source.config.get("quantization_config"), f"the dense target {source.path} is quantised, "
            "rewriting it needs plain weights: give the unquantised checkpoint")
    require(layout != "hy_v3" or not draft["attention_bias"], "hy_v3 has no q, k, v biases, this "
            f"{source.config['model_type']} target has: --layout glm4_moe")

    n_dense = source.N - 1
    config = {"model_type": layout, **DENSE_LAYOUTS[layout], "tie_word_embeddings": False,
              "first_k_dense_replace": n_dense, "num_nextn_predict_layers": 1}
    config["rope_parameters"] = {"rope_type": "default", **(draft["rope_scaling"] or {}),
                                 "rope_theta": draft["rope_theta"], "partial_rotary_factor": 1.0}
    theirs = {field: key for key, field in FAMILIES[layout].keys.items()}
    config |= {theirs.get(field, field): draft[field] for field in OF_DRAFT}
    config["moe_intermediate_size"] = draft["moe_intermediate_size"]  # hy_v3: vLLM reads the other name
    config |= {key: source.config[key] for key in OF_SOURCE if key in source.config}
    if layout == "hy_v3":
        config["mlp_layer_types"] = ["dense"] * n_dense + ["sparse"]
    return config


def dense_names(source, layout):
    """{tensor name of a dense source: its name in OUT}."""
    mlp = source.last + "mlp."
    shared = source.last + native_name("mlp.shared_experts.", FAMILIES[layout])
    found = {name: name.replace(mlp, shared) for name in source.kept()
             if not name.endswith("rotary_emb.inv_freq")}
    if source.config.get("tie_word_embeddings"):
        found.pop("lm_head.weight", None)  # make_plan has it
    return found


def dense_additions(source, config, names):
    """{name: tensor}: the last layer's router and experts, zeros. names: of the rest."""
    expected = expected_stack(config, names)
    unknown = sorted(names - expected.keys())
    require(not unknown, f"{source.path} has tensors for which {config['model_type']} has no place: "
            f"{', '.join(unknown[:5])}")

    mlp = source.last + "mlp."
    dtype = DTYPES[source.entries[mlp + "down_proj.weight"].dtype]
    found = {}
    for name in expected.keys() - names:
        if name.startswith(mlp):
            of_router = name.endswith(ROUTER)
            found[name] = torch.zeros(expected[name], dtype=torch.float32 if of_router else dtype)
    return found


# ---- Quantised targets ---------------------------------------------------------------------------
# The draft's layer is written plain and named as such. Engines ask for modules by their stored names or
# as they build them (q, k and v in one, gate and up in one, all experts in one): both are listed.

UNQUANTISED = {  # quant_method: keys of its list; the last if none is there
    "fp8": ("ignored_layers", "modules_to_not_convert"),
    "compressed-tensors": ("ignore",),
    "awq": ("modules_to_not_convert",),
    "modelopt": ("ignore",),
    "gptq": ()}  # has patterns in `dynamic` instead
BUILT = {r"\bgate_proj$": "gate_up_proj", r"\bq_proj$": "qkv_proj", r"\.experts\..*": ".experts"}


def name_unquantised(config, names):
    """quantization_config with the modules of the MTP layer's plain tensors named as unquantised."""
    config = config["quantization_config"]
    method = config.get("quant_method")
    require(method in UNQUANTISED, f"quant_method {method!r} is not known here ("
            f"{' and '.join(UNQUANTISED)} are), so it cannot be told that the MTP layer is plain; "
            "convert the unquantised checkpoint")

    modules = {name.removesuffix(".weight") for name in names
               if name.endswith(".weight") and "norm" not in name}
    for module in list(modules):
        for stored, built in BUILT.items():
            module = re.sub(stored, built, module)
        modules.add(module)

    found = dict(config)
    if method == "gptq":
        pattern = "-:" + re.escape(os.path.commonprefix(list(modules))) + ".*"
        found["dynamic"] = (config.get("dynamic") or {}) | {pattern: {}}
    keys = UNQUANTISED[method]
    for key in [key for key in keys if config.get(key)] or keys[-1:]:
        listed = config.get(key) or []
        patterns = [name.removeprefix("re:") for name in listed if name.startswith("re:")]
        found[key] = listed + [name for name in sorted(modules.difference(listed))
                               if not any(re.match(pattern, name) for pattern in patterns)]
    return found


# ---- Plan and writing ----------------------------------------------------------------------------

class Plan(NamedTuple):
    """What OUT will hold."""
    source: Source
    config: str  # its config.json's text
    keep: dict  # {source file: {name in the source: name in OUT}}
    new: dict  # {name: tensor} of the draft's shard
    metadata: dict  # of that shard

    def intact(self, file):
        """Can OUT link this shard: are all its keys kept under their own names?"""
        entries = self.source.entries.items()
        own = {name: name for name, entry in entries if entry.file == file}
        return file not in self.source.unlisted and self.keep[file] == own

    def entries(self):
        """{name: Entry} of OUT."""
        found = {}
        for file, names in self.keep.items():
            for old, new in names.items():
                found[new] = self.source.entries[old]._replace(file=RENAMED.get(file, file))
        for name, tensor in self.new.items():
            dtype = DTYPE_NAMES[tensor.dtype]
            found[name] = Entry(dtype, tuple(tensor.shape), tensor.nbytes, SHARD)
        return found


def make_plan(draft, state, source, layout, draft_only=False):
    """The Plan for a draft: config.json and tensors. ValueError for what the layout cannot express."""
    fused = fused_experts(layout, source.entries, source.prefix)
    new = {name: tensor.to(source.dtype(name, tensor))
           for name, tensor in layer_tensors(state, layout, source.prefix, fused).items()}
    if source.family.dense:
        config = dense_config(source, draft, layout)
        names = dense_names(source, layout)
    else:
        config = source.config | source.family.write(source.config, source.entries)
        names = {name: name for name in source.kept()}

    untied = source.config.get("tie_word_embeddings") and not config["tie_word_embeddings"]
    if untied and not draft_only:
        new["lm_head.weight"] = source.checkpoint.read(source.embed)
    if config.get("quantization_config"):
        config["quantization_config"] = name_unquantised(config, new)
    text = json.dumps(config, indent=2) + "\n"
    if not source.family.dense:
        text = edited(source.checkpoint.text, config)

    keep = {}
    if not draft_only:
        for old, name in names.items():
            keep.setdefault(source.entries[old].file, {})[old] = name
        if source.family.dense:
            new |= dense_additions(source, config, set(names.values()))

    metadata = {f"mtp_{key}": str(draft[key])
                for key in ("engine", "recycle", "zero_first_embedding", "ttt_length")}
    metadata["mtp_draft_only"] = str(draft_only)
    return Plan(source, text, keep, new, metadata)


def write(plan, folder):
    """Fill a new folder as planned."""
    folder.mkdir()
    source = plan.source
    for file, names in plan.keep.items():
        out = folder / RENAMED.get(file, file)
        if plan.intact(file):
            link(source.path / file, out)
        else:
            save_shard(out, {new: source.checkpoint.stored(old) for old, new in names.items()}, {})
    save_shard(folder / SHARD, plan.new, plan.metadata)

    entries = plan.entries()
    index = {"metadata": {"total_size": sum(entry.size for entry in entries.values())},
             "weight_map": {name: entries[name].file for name in sorted(entries)}}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(plan.config)

    for path in source.path.iterdir():  # the tokenizer and what else lies there
        written = path.name == "config.json" or path.name.endswith(WEIGHTS)
        if path.is_file() and not written and not path.name.startswith("."):
            shutil.copy2(path.resolve(), folder / path.name)


def link(path, out):
    """A hard link, or a copy where the file system has none."""
    path = path.resolve()  # hub caches hold symbolic links
    try:
        os.link(path, out)
    except OSError:
        shutil.copy2(path, out)


# ---- Check ---------------------------------------------------------------------------------------

def check(checkpoint):
    """(problems, metadata of the draft's shard) of a serving directory: what is wrong, one line each."""
    config = checkpoint.config
    if not mtp_prefix(config, checkpoint.files):
        return [f"there is no MTP layer, {layer_prefix(config)}*"], {}
    if family_of(config).dense:
        return [f"no engine has an MTP layer for model_type {config['model_type']}, but there is "
                f"{layer_prefix(config)}*"], {}

    problems = []
    entries, metadata = {}, {}
    for path in sorted(checkpoint.path.glob("*.safetensors")):
        try:
            found, about = read_header(path)
        except ValueError as error:
            problems.append(str(error))
            continue
        entries |= found
        if path.name == SHARD:
            metadata = about

    problems += check_index(checkpoint, entries)
    problems += check_config(checkpoint, entries)
    problems += check_layer(checkpoint, entries)
    if metadata.get("mtp_draft_only") != "True":
        stack = expected_stack(config, entries)
        if config.get("quantization_config"):  # packed formats have names or dtypes of their own
            stack = {name: shape for name, shape in stack.items()
                     if name in entries and entries[name].dtype in {**DTYPES, **CODES}}
        problems += wrong_shapes(stack, entries)
    return problems, metadata


def check_index(checkpoint, entries):
    """Is every tensor where the index says, if there is one?"""
    files = checkpoint.files
    problems = [f"{name} lies in {entry.file}, the index says {files.get(name, 'nothing')}"
                for name, entry in entries.items() if files.get(name) != entry.file]
    problems += [f"{name} is indexed in {file}, which lacks it or does not exist"
                 for name, file in files.items() if name not in entries]

    path = checkpoint.path / INDEX
    if path.exists():
        said = (read_json(path).get("metadata") or {}).get("total_size")
        size = sum(entry.size for entry in entries.values())
        if size != said:
            problems.append(f"the index gives total_size {said}, the tensors have {size} bytes")
    return problems


def check_config(checkpoint, entries):
    """Does config.json say what engines need?"""
    config = checkpoint.config
    return [f"config.json has {key} {config.get(key)}, engines need {value}"
            for key, value in family_of(config).write(config, entries).items() if config.get(key) != value]


def check_layer(checkpoint, entries):
    """Is the MTP layer complete, well shaped, finite, rightly named as plain? What does not belong there?"""
    config = checkpoint.config
    prefix = layer_prefix(config)
    expected = expected_layer(config, entries, prefix)
    copies = [prefix + name for name in OPTIONAL if prefix + name in entries]
    head = (config["vocab_size"], config["hidden_size"])
    problems = wrong_shapes(expected | dict.fromkeys(copies, head), entries)

    there = [name for name in expected if name in entries]
    problems += [f"{name} holds nan or inf" for name in there
                 if checkpoint.files.get(name) == entries[name].file
                 and not checkpoint.read(name).isfinite().all()]

    coded = [name for name in there if entries[name].dtype in CODES]
    scales = [name.removesuffix(".weight") + suffix for name in coded for suffix in CODED]
    known = {*expected, *copies, *scales}
    problems += [f"{name} belongs to no MTP layer of this family: engines stumble over it or ignore it"
                 for name in entries if name not in known and of_mtp_layer(name, config)]

    if config.get("quantization_config"):
        if name_unquantised(config, expected.keys() - set(coded)) != config["quantization_config"]:
            problems.append("quantization_config does not name the plain modules of the MTP layer "
                            "as unquantised")
    return problems


def wrong_shapes(expected, entries):
    """Problems: which tensors of {name: shape} are missing or have another shape."""
    problems = []
    for name, shape in expected.items():
        fused = re.sub(r"experts\.\d+\..*", "experts.gate_up_proj", name)
        if name not in entries:
            why = "; engines want one tensor per expert, not a fused one" if fused in entries else ""
            problems.append(f"{name} is missing{why}")
        elif entries[name].shape != shape:
            problems.append(f"{name} has shape {entries[name].shape}, the config implies {shape}")
    return problems


def exactness(layout, engine, recycle, zero):
    """For which engines a draft in a layout is exact, and how to train for the others. engine, recycle,
    zero: what it was trained with."""
    exact = []
    others = ""
    for other, (kind, zeroed) in engines_of(layout).items():
        if zero == zeroed and recycle in (kind, "both"):  # both: each row drew one
            exact.append(ENGINE_NAMES[other])
            continue
        remedy = f"train with --engine {other}"
        if other == engine:  # a dense target's draft, in the layout that it was not trained for
            remedy = "leave --layout out"
        others += f"; NOT for {ENGINE_NAMES[other]} ({remedy})"
    return f"exact for {' and '.join(exact) or 'no engine'}{others}"


def report(folder, name=None):
    """Print the check of a folder and the engines its draft is exact for; True if nothing is wrong."""
    config = Path(folder) / "config.json"
    require(config.is_file(), f"{folder} has no config.json: no checkpoint's folder")
    checkpoint = Checkpoint(folder)  # without an index: a single file
    problems, metadata = check(checkpoint)
    for line in problems:
        print(f"wrong: {line}")
    layout = checkpoint.config["model_type"]
    verdict = f"{len(problems)} problems" if problems else "complete"
    print(f"{name or folder}: {verdict}, {layout}")

    if "mtp_engine" in metadata and not problems:
        engine, recycle = metadata["mtp_engine"], metadata["mtp_recycle"]
        zero = metadata["mtp_zero_first_embedding"] == "True"
        print(f"trained with --engine {engine} (K = {metadata['mtp_ttt_length']}, recycle {recycle}, "
              f"zero_first_embedding {zero}): {exactness(layout, engine, recycle, zero)}")
        if checkpoint.config.get("quantization_config"):
            print("SGLang would take the plain layer as quantised: start it with "
                  "--speculative-draft-model-quantization unquant")
    return not problems


# ---- Command line --------------------------------------------------------------------------------

def open_source(args, draft):
    """The draft's target; a config.json other than the one it was trained for is refused."""
    path = args.target or draft["target"]
    require(args.target or os.path.isdir(path),
            f"the draft's target {path} is not there; give --target DIR")
    source = Source(find_target(path))
    if not args.other_target:
        require_same_target(identity(source.checkpoint), draft["target_identity"], args.draft)
    return source


def choose_layout(asked, source):
    own = serving_layout(source.config, source.entries)
    require(source.family.dense or asked in (None, own),
            f"--layout {asked}: the target is {own} already; leave --layout out")
    return asked or own


def check_out(args, source):
    """The path of OUT; one whose content is not ours to replace is refused."""
    out = Path(args.out).resolve()
    for path in (source.path.resolve(), Path(args.draft).resolve()):
        require(out not in (path, *path.parents),
                f"--out {args.out} would overwrite {path}; give another folder")
    if out.exists():
        require(out.is_dir(), f"--out {args.out} is a file; give a folder")
        shard = out / SHARD
        ours = shard.exists() and "mtp_engine" in read_header(shard)[1]
        require(not any(out.iterdir()) or args.force and ours, f"--out {args.out} is not empty; give another "
                "folder, or --force over one that convert.py wrote")
    return out


def convert(args):
    draft, state = read_draft(args.draft)
    source = open_source(args, draft)
    plan = make_plan(draft, state, source, choose_layout(args.layout, source), args.draft_only)
    if args.dry_run:
        lines = [f"{entry.file}  {name}  {list(entry.shape)}  {entry.dtype}"
                 for name, entry in plan.entries().items()]
        print("\n".join(sorted(lines)))
        return

    out = check_out(args, source)
    fresh = aside(out)
    try:
        write(plan, fresh)
        sound = report(fresh, args.out)
        require(sound, "what was written fails its check (above): a fault of ours. Nothing is kept")
        put_in_place(fresh, out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def parse(arguments):
    parser = argparse.ArgumentParser(prog="convert.py", allow_abbrev=False, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("draft", nargs="?", help="draft directory that mtp.py trained")
    add("--target", help="the target's directory, if it is not where it was in training")
    add("--other-target", action="store_true", help="not the target that the draft was trained for")
    add("--out", help="directory to write")
    add("--layout", choices=list(DENSE_LAYOUTS),
        help="how to write a dense target (default hy_v3; glm4_moe if it has biases)")
    add("--draft-only", action="store_true", help="write the draft's layer and config.json alone")
    add("--dry-run", action="store_true", help="list what would be written")
    add("--force", action="store_true", help="replace a checkpoint OUT")
    add("--check", metavar="OUT", help="check a serving directory; exit 1 if it is wrong")
    return parser.parse_args(arguments)


def main(arguments=None):
    args = parse(arguments)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda text, *_: print(f"convert.py: warning: {text}", file=sys.stderr)
            if args.check:
                return 0 if report(args.check) else 1
            require(args.draft and (args.out or args.dry_run),
                    "give a draft directory and --out OUT, or --check OUT")
            convert(args)
    except (ValueError, OSError, SafetensorError) as error:
        print(f"convert.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
