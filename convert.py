"""convert.py - put a trained draft into the checkpoint that serving engines load, and check such checkpoints.

      python convert.py DRAFT --out OUT                   a complete serving directory: target plus draft
      python convert.py DRAFT --out OUT --layout hy_v3    the same for a dense target (Llama, Mistral, Qwen2, Qwen3)
      python convert.py DRAFT --out OUT --draft-only      the draft's layer alone
      python convert.py DRAFT --out OUT --dry-run         list every key, shape, dtype and file; write nothing
      python convert.py --check OUT                       is every key there, indexed, of the right shape, finite?

OUT holds the target's shards (hard links; a shard is rewritten only if keys in it change), the draft as layer N =
num_hidden_layers in a shard of its own, an index of all keys, the target's config.json with num_nextn_predict_layers = 1,
and its tokenizer files. It appears complete or not at all. The way back needs no command: `mtp.py --target OUT` starts
from the layer in OUT.

Engines load such directories without complaint if keys are missing, fused or not in the index, and then draft garbage. So
OUT is checked before it appears. A draft is only exact for an engine that feeds back what it was trained with; the setting
is kept in the draft's shard (safetensors metadata) and --check says which engine that is.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

from mtp import (DENSE, MTP, Checkpoint, atomic, find_target, load_draft, mtp_prefix, native_views, read_target_config)

SHARD, INDEX = "model-mtp.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
OPTIONAL = ("embed_tokens.weight", "shared_head.head.weight")  # copies in layer N that every engine replaces by the main ones
WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5", ".msgpack")

# (layout, recycle, zero_first_embedding) -> engines whose drafting is exactly what the draft was trained for.
EXACT = {("glm4_moe", "pre", True): "vLLM", ("glm4_moe", "post", False): "SGLang and transformers",
         ("hy_v3", "post", True): "vLLM", ("hy_v3", "post", False): "SGLang",
         ("bailing_moe_v2", "post", False): "SGLang"}


# ---- Files -----------------------------------------------------------------------------------------------------------

class Entry(NamedTuple):
    dtype: str  # safetensors' name
    shape: tuple
    size: int   # bytes
    file: str


def read_header(path):
    """({name: Entry}, metadata) of a safetensors file, without reading a tensor. ValueError if it is cut short."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    metadata = header.pop("__metadata__", {})
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if os.path.getsize(path) != end:
        raise ValueError(f"{path} has {os.path.getsize(path)} bytes, its header announces {end}: it is cut short")
    return {name: Entry(e["dtype"], tuple(e["shape"]), e["data_offsets"][1] - e["data_offsets"][0], Path(path).name)
            for name, e in header.items()}, metadata


def set_key(text, key, value):
    """A JSON object's text with one top-level key set; all else keeps its bytes."""
    wanted = {**json.loads(text), key: value}
    new = json.dumps(value)
    for found in re.finditer(rf'("{re.escape(key)}"\s*:\s*)(null|true|false|[-+.\w]+|"[^"]*")', text):
        edited = text[:found.start(2)] + new + text[found.end(2):]
        if json.loads(edited) == wanted:
            return edited
    if key in json.loads(text):  # a list or an object: that part is written anew
        return json.dumps(wanted, indent=2, ensure_ascii=False) + "\n"
    body, tail = text.rstrip()[:-1].rstrip(), text[len(text.rstrip()):]
    indent = re.search(r"\n([ \t]*)\"", text)
    comma = "" if body.endswith("{") else ","
    return f'{body}{comma}\n{indent[1] if indent else "  "}"{key}": {new}\n}}{tail}'


def layer_number(name):
    """i of model.layers.i.*, or -1."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def link_or_copy(source, target):
    source = Path(source).resolve()  # hub caches hold symbolic links
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def save_shard(path, tensors, metadata):
    from safetensors.torch import save_file
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, path,
              metadata={"format": "pt", **metadata})


# ---- The draft's layer under the names of a layout -------------------------------------------------------------------

def layer_tensors(state, layout, prefix):
    """{checkpoint name: tensor} of a draft's state_dict in a layout, experts unfused."""
    return dict(native_views(state, layout, prefix))


def expected_layer(config, layout, prefix):
    """{checkpoint name: shape} that an MTPConfig implies."""
    with torch.device("meta"):
        state = MTP(config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in layer_tensors(state, layout, prefix).items()}


# ---- The source ------------------------------------------------------------------------------------------------------

class Source:
    """A target directory: its config (dict and text), tensors' headers, and the draft layer's configuration."""

    def __init__(self, path):
        self.path = Path(path)
        self.checkpoint = Checkpoint(path)
        raw = (self.path / "config.json").read_bytes()
        self.text, self.sha256 = raw.decode(), hashlib.sha256(raw).hexdigest()
        self.config = json.loads(self.text)
        self.family, self.N = self.config["model_type"], self.config["num_hidden_layers"]
        self.prefix = f"model.layers.{self.N}."
        self.entries = {}
        for file in sorted(set(self.checkpoint.files.values())):
            found, _ = read_header(self.path / file)
            self.entries |= {name: entry for name, entry in found.items() if self.checkpoint.files.get(name) == file}
        lost = sorted(self.checkpoint.files.keys() - self.entries.keys())
        if lost:
            raise ValueError(f"{path}: the index names tensors that their files lack: {', '.join(lost[:5])}")
        mtp_prefix(self.config, self.entries)  # warns of a second MTP layer

    def dtype(self, name, default):
        """dtype of a tensor of layer N: its own in the source, else that of its like in layer N - 1, else `default`."""
        for at in (name, name.replace(self.prefix, f"model.layers.{self.N - 1}.")):
            if at in self.entries and self.entries[at].dtype in DTYPES:
                return DTYPES[self.entries[at].dtype]
        return default


# ---- Plan and writing ------------------------------------------------------------------------------------------------

class Plan(NamedTuple):
    source: Source
    layout: str
    config: str     # text of OUT/config.json
    keep: dict      # source file -> {name in the source: name in OUT}
    new: dict       # {name: tensor} of the draft's shard
    metadata: dict  # of that shard

    def files(self):
        """{source file: file in OUT}: a lone model.safetensors is renamed, or loaders would not look at the index."""
        return {file: "model-00001-of-00001.safetensors" if file == "model.safetensors" else file for file in self.keep}

    def intact(self, file):
        """Can OUT link this shard: are all its keys kept under their own names?"""
        have = [name for name, entry in self.source.entries.items() if entry.file == file]
        return self.keep[file] == {name: name for name in have}

    def entries(self):
        """{name: Entry} of OUT."""
        found = {}
        for file, out in self.files().items():
            found |= {name: self.source.entries[old]._replace(file=out) for old, name in self.keep[file].items()}
        names = {dtype: name for name, dtype in DTYPES.items()}
        return found | {name: Entry(names.get(t.dtype, str(t.dtype)[6:]), tuple(t.shape), t.nbytes, SHARD)
                        for name, t in self.new.items()}


def make_plan(model, meta, source, layout, draft_only=False):
    """What OUT will hold. Raises ValueError if the draft does not belong to this target."""
    new = {name: tensor.to(source.dtype(name, tensor.dtype)) for name, tensor in
           layer_tensors(model.state_dict(), layout, source.prefix).items()}
    config, keep = serving_config(source), {}
    for name, entry in source.entries.items():
        if layer_number(name) < source.N or name.removeprefix(source.prefix) in OPTIONAL:
            keep.setdefault(entry.file, {})[name] = name
    metadata = {"mtp_layout": layout, "mtp_recycle": meta["recycle"], "mtp_ttt_length": str(meta["ttt_length"]),
                "mtp_zero_first_embedding": str(meta["zero_first_embedding"]), "mtp_draft_only": str(draft_only)}
    return Plan(source, layout, config, {} if draft_only else keep, new, metadata)


def serving_config(source):
    """Text of OUT/config.json for a family with a native MTP layer."""
    text, config = set_key(source.text, "num_nextn_predict_layers", 1), source.config
    if source.family != "hy_v3":
        return text
    kinds = config.get("mlp_layer_types") or []
    dense = next((i for i, kind in enumerate(kinds) if kind != "dense"), len(kinds)) if kinds else 1
    if "dense" in kinds[dense:]:
        raise ValueError(f"mlp_layer_types of {source.path} has dense layers after sparse ones; engines read "
                         "first_k_dense_replace, which cannot say that")
    qk_norm = any(name.endswith("self_attn.q_norm.weight") for name in source.entries)
    for key, value in (("qk_norm", qk_norm), ("route_norm", True), ("first_k_dense_replace", dense),
                       ("expert_hidden_dim", config.get("moe_intermediate_size"))):
        if config.get(key) is None:  # transformers' HYV3Config writes none of them, vLLM reads them all
            text = set_key(text, key, value)
    return text


def write(plan, folder):
    """Fill an empty folder as planned."""
    folder.mkdir()
    source = plan.source
    for file, out in plan.files().items():
        if plan.intact(file):
            link_or_copy(source.path / file, folder / out)
        elif plan.keep[file]:
            tensors = {new: source.checkpoint._raw(old) for old, new in plan.keep[file].items()}
            save_shard(folder / out, tensors, {})
    save_shard(folder / SHARD, plan.new, plan.metadata)
    entries = plan.entries()
    index = {"metadata": {"total_size": sum(entry.size for entry in entries.values())},
             "weight_map": {name: entries[name].file for name in sorted(entries)}}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(plan.config)
    for path in source.path.iterdir():
        if path.is_file() and path.name != "config.json" and not path.name.endswith(WEIGHTS) and path.name[0] != ".":
            shutil.copy2(path.resolve(), folder / path.name)


def show(plan):
    for name, entry in sorted(plan.entries().items(), key=lambda item: (item[1].file, item[0])):
        print(f"{entry.file}  {name}  {list(entry.shape)}  {entry.dtype}")
    files = plan.files()
    for file, out in files.items():
        print(f"{out}: " + ("hard link" if plan.intact(file) else "rewritten, keys change") + f" of {file}")


# ---- Check -----------------------------------------------------------------------------------------------------------

def check(folder):
    """(problems, facts) of a serving directory: what is wrong, one line each; and what it was made for."""
    folder, problems, entries, metadata = Path(folder), [], {}, {}
    config = json.loads((folder / "config.json").read_text())
    if not (folder / INDEX).exists():
        return [f"{INDEX} is missing"], {}
    index = json.loads((folder / INDEX).read_text())
    files = index["weight_map"]
    for path in sorted(folder.glob("*.safetensors")):
        try:
            found, about = read_header(path)
        except ValueError as error:
            problems.append(str(error))
            continue
        metadata |= about if path.name == SHARD else {}
        for name, entry in found.items():
            if files.get(name) != path.name:
                problems.append(f"{name} lies in {path.name}, the index says {files.get(name, 'nothing')}")
            entries[name] = entry
    problems += [f"{name} is indexed in {file}, which " + ("lacks it" if (folder / file).exists() else "does not exist")
                 for name, file in files.items() if name not in entries]
    size, said = sum(entry.size for entry in entries.values()), index.get("metadata", {}).get("total_size")
    if size != said:
        problems.append(f"the index gives total_size {said}, the tensors have {size} bytes")
    problems += check_config(config)
    problems += check_layer(folder, config, entries)
    if metadata.get("mtp_draft_only") != "True":
        problems += check_stack(config, entries)
    return problems, metadata


def check_config(config):
    wanted = ["qk_norm", "route_norm", "first_k_dense_replace", "expert_hidden_dim"] if config["model_type"] == "hy_v3" else []
    found = [f"config.json lacks {key}, which vLLM reads" for key in wanted if config.get(key) is None]
    if config.get("num_nextn_predict_layers") != 1:
        found.append(f"config.json has num_nextn_predict_layers {config.get('num_nextn_predict_layers')}, expected 1")
    return found


def check_layer(folder, config, entries):
    """Problems of the MTP layer: keys, shapes, values; keys that do not belong there."""
    N, layout, problems = config["num_hidden_layers"], config["model_type"], []
    prefix, checkpoint = f"model.layers.{N}.", Checkpoint(folder)
    expected = expected_layer(read_target_config(config, entries), layout, prefix)
    for name, shape in expected.items():
        if name not in entries:
            fused = f"{name[:name.index('.experts.')]}.experts.gate_up_proj" if ".experts." in name else None
            problems.append(f"{name} is missing" + (f"; {fused} is there, engines want one tensor per expert"
                                                    if fused in entries else ""))
        elif entries[name].shape != shape:
            problems.append(f"{name} has shape {entries[name].shape}, the config implies {shape}")
        elif name in checkpoint.files and not checkpoint.read(name).isfinite().all():
            problems.append(f"{name} holds nan or inf")
    head = (config["vocab_size"], config["hidden_size"])
    for name in sorted(name for name in entries if layer_number(name) >= N and name not in expected):
        short = name.removeprefix(prefix)
        if short not in OPTIONAL:
            problems.append(f"{name} belongs to no MTP layer of this family: engines stumble over it or ignore it")
        elif entries[name].shape != head:
            problems.append(f"{name} has shape {entries[name].shape}, expected {head}")
    return problems


def check_stack(config, entries):
    """Problems of the main model: names and shapes of what every family has."""
    C, V, width, N = (config[k] for k in ("hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers"))
    layer = {name: shape for name, shape in expected_layer(read_target_config(config, entries), config["model_type"], "").items()
             if name.startswith(("self_attn.", "attention.", "mlp.", "input_", "post_"))}
    mlp = {"mlp.gate_proj.weight": (width, C), "mlp.up_proj.weight": (width, C), "mlp.down_proj.weight": (C, width)}
    dense = {name: shape for name, shape in layer.items() if not name.startswith("mlp.")} | mlp
    expected = {"model.embed_tokens.weight": (V, C), "model.norm.weight": (C,)}
    if not config.get("tie_word_embeddings"):
        expected["lm_head.weight"] = (V, C)
    for i in range(N):
        part = dense if i < config.get("first_k_dense_replace", 1) else layer
        expected |= {f"model.layers.{i}.{name}": shape for name, shape in part.items()}
    problems = []
    for name, shape in expected.items():
        if name not in entries and "quantization_config" not in config:  # packed formats have names of their own
            problems.append(f"{name} is missing")
        elif name in entries and entries[name].shape != shape:
            problems.append(f"{name} has shape {entries[name].shape}, the config implies {shape}")
    return problems


def describe(layout, metadata):
    """One line: what the draft was trained with and which engine that is exact for."""
    if "mtp_recycle" not in metadata:
        return "no word on how the draft was trained: its shard was not written by convert.py"
    recycle, zero = metadata["mtp_recycle"], metadata["mtp_zero_first_embedding"] == "True"
    engine = EXACT.get((layout, recycle, zero))
    best = ", ".join(f"{name} (--recycle {r}{' --zero-first-embedding' if z else ''})"
                     for (kind, r, z), name in EXACT.items() if kind == layout)
    return (f"trained with recycle {recycle}, zero_first_embedding {zero}, {metadata['mtp_ttt_length']} steps: exact for "
            + (engine if engine else f"no engine; {layout} drafts are exact for {best}"))


def report(folder, name=None):
    """Print the check of a folder; returns True if nothing is wrong."""
    problems, metadata = check(folder)
    for line in problems:
        print(f"wrong: {line}")
    layout = json.loads((Path(folder) / "config.json").read_text())["model_type"]
    print(f"{name or folder}: " + (f"{len(problems)} problems" if problems else "complete") + f"; {layout}; "
          + describe(layout, metadata))
    return not problems


# ---- Command line ----------------------------------------------------------------------------------------------------

def open_source(args, meta):
    """The draft's target as a Source; a config.json other than the one it was trained for is refused."""
    if not args.target and not os.path.isdir(meta["target"]):
        raise FileNotFoundError(f"the draft's target {meta['target']} is not there any more; give --target DIR")
    source = Source(find_target(args.target or meta["target"]))
    if source.sha256 != meta["target_config_sha256"]:
        raise ValueError(f"the draft was trained for another target: config.json of {source.path} has sha256 "
                         f"{source.sha256[:12]}.., the draft expects {meta['target_config_sha256'][:12]}..")
    return source


def convert(args):
    model, meta = load_draft(args.draft)
    source = open_source(args, meta)
    layout = source.family
    if args.layout not in (None, layout):
        raise ValueError(f"--layout {args.layout}: the target is a {layout} checkpoint already; leave --layout out")
    plan = make_plan(model, meta, source, layout, args.draft_only)
    if args.dry_run:
        return show(plan)
    out = Path(args.out).resolve()
    inside = [path for path in (source.path.resolve(), Path(args.draft).resolve()) if path == out or out in path.parents]
    if inside:
        raise ValueError(f"--out {args.out} would overwrite {inside[0]}; give another folder")
    if out.exists() and not args.force:
        raise ValueError(f"--out {args.out} exists; add --force to replace it, or give another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with atomic(out) as aside:
            write(plan, aside)
            if not report(aside, args.out):
                raise ValueError("what was written fails its own check (above); nothing is left behind. Please report it")
    finally:
        shutil.rmtree(out.with_name(f".{out.name}.partial"), ignore_errors=True)
    print(f"written to {args.out}")


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="convert.py", allow_abbrev=False, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", nargs="?", help="draft directory that mtp.py trained")
    parser.add_argument("--target", help="the target's directory, if it is not where it was in training")
    parser.add_argument("--out", help="directory to write")
    parser.add_argument("--layout", choices=["glm4_moe", "hy_v3"], help="layout for a dense target")
    parser.add_argument("--draft-only", action="store_true", help="write the draft's layer and config.json alone")
    parser.add_argument("--dry-run", action="store_true", help="list what would be written")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--check", metavar="OUT", help="check a serving directory and exit; exit status 1 if it is wrong")
    args = parser.parse_args(arguments)
    warnings.showwarning = lambda message, *_: print(f"convert.py: warning: {message}", file=sys.stderr)
    try:
        if args.check:
            return 0 if report(args.check) else 1
        if not args.draft or not (args.out or args.dry_run):
            raise ValueError("give a draft directory and --out OUT, or --check OUT")
        convert(args)
    except (ValueError, OSError) as error:
        if os.environ.get("MTP_TRACEBACK"):
            raise
        print(f"convert.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
