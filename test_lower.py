"""Trainer tests (to be merged below the core's)."""
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import mtp

HERE = Path(__file__).parent

# ---- Trainer: a tiny target -----------------------------------------------------------------------------------

WORDS = [f"w{i}" for i in range(58)]
CHAT = ("{% for m in messages %}<|{{ m['role'] }}|> {% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['content'] }} <|end|>{% endgeneration %}{% else %}{{ m['content'] }} <|end|>{% endif %} {% endfor %}"
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


def make_target(path, family="glm4_moe", mtp_layer=True, dtype=torch.float32, tie=False, seed=0):
    """A random two-layer target of `family` with a tokenizer, saved by transformers itself, and (mtp_layer) a random MTP
    layer written beside it under the family's own tensor names, one file per tensor group."""
    import transformers
    from safetensors.torch import load_file, save_file
    torch.manual_seed(seed)
    common = dict(vocab_size=62, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                  intermediate_size=48, num_hidden_layers=2, moe_intermediate_size=16, num_experts_per_tok=2,
                  max_position_embeddings=256, tie_word_embeddings=tie, initializer_range=0.2,
                  bos_token_id=None, eos_token_id=0, pad_token_id=None)
    if family == "glm4_moe":
        config = transformers.Glm4MoeConfig(**common, n_routed_experts=4, n_shared_experts=1, use_qk_norm=True,
                                            first_k_dense_replace=1)
        model = transformers.Glm4MoeForCausalLM(config)
    else:
        config = transformers.HYV3Config(**common, num_experts=4, num_shared_experts=1)
        model = transformers.HYV3ForCausalLM(config)
    for name, tensor in model.named_parameters():
        if name.endswith("norm.weight"):
            tensor.data.uniform_(0.5, 1.5)
        elif "o_proj" in name or "down_proj" in name:
            tensor.data *= 0.15  # mostly a bigram model: a draft can learn it in seconds
    model.to(dtype).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    raw = json.loads((path / "config.json").read_text())
    if family == "hy_v3":
        raw |= dict(qk_norm=True, route_norm=True)
        (path / "config.json").write_text(json.dumps(raw))
    if mtp_layer:
        draft = random_draft(mtp.MTPConfig.from_hf(raw), seed=seed + 1)
        state = load_file(path / "model.safetensors")
        state |= {name: view.clone() if "gate.weight" in name or "bias" in name else view.to(dtype)
                  for name, view in mtp.native_views(draft.state_dict(), family, "model.layers.2.")}
        save_file(state, path / "model.safetensors", metadata={"format": "pt"})
        return draft
    return None


def random_draft(config, seed):
    torch.manual_seed(seed)
    model = mtp.MTP(config)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor.data.uniform_(0.5, 1.5) if name.endswith("norm.weight") else tensor.data.normal_(0, 0.2)
    return model


def load_target(path, **options):
    return mtp.Target(mtp.ModelOptions(target=str(path), **options), path, torch.device("cpu"))


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
        target=str(tiny[0]), data=[tiny[1]], out=str(out), device="cpu", init="scratch", steps=4, batch_size=4,
        seq_len=48, lr=1e-2, warmup_steps=2, eval_rows=4, save_every=2, log_every=1, keep=9), **changes})


def state_of(folder):
    """Every tensor of a training state, read by torch's own reader into plain tensors."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    file = folder.parent / (folder.name + ".pt")
    dcp_to_torch_save(folder, file)
    return torch.load(file, weights_only=True)


def assert_same_state(a, b):
    a, b = state_of(a), state_of(b)
    assert a.keys() == b.keys() and len(a) > 60
    for name in a:
        assert torch.equal(a[name], b[name]), name


# ---- Trainer: checkpoints and initialisation ------------------------------------------------------------------

@pytest.mark.parametrize("family", ["glm4_moe", "hy_v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_warm_start_reads_the_targets_own_layer(family, dtype, tmp_path):
    draft = make_target(tmp_path / "t", family, dtype=dtype)
    target = load_target(tmp_path / "t")
    cfg = mtp.TrainConfig(target=str(tmp_path / "t"))
    model, init = mtp.make_draft(cfg, target, mtp.Ranks())
    assert init == "warm" and model.eh_proj.weight.dtype == dtype
    for name, tensor in draft.state_dict().items():
        keeps = name.startswith("mlp.gate.")
        found = model.state_dict()[name]
        assert found.dtype == (torch.float32 if keeps else dtype)
        assert torch.equal(found, tensor if keeps else tensor.to(dtype)), name


def edit_checkpoint(path, change):
    from safetensors.torch import load_file, save_file
    state = load_file(path / "model.safetensors")
    change(state)
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("change, says", [
    (lambda s: s.pop("model.layers.2.mlp.experts.1.up_proj.weight"), "experts.1.up_proj.weight is missing"),
    (lambda s: s.update({"model.layers.2.enorm.weight": torch.ones(5)}), r"enorm.weight has shape \(5,\), expected \(32,\)"),
    (lambda s: s["model.layers.2.eh_proj.weight"].fill_(math.nan), "eh_proj.weight holds nan"),
    (lambda s: s.update({"model.layers.2.eh_proj.weight": torch.zeros(32, 64, dtype=torch.int8)}), "de-quantised"),
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
    with pytest.raises(ValueError, match="lacks weights of the target: model.layers.1.self_attn.q_proj.weight"):
        load_target(tmp_path / "t")


def test_warm_without_a_layer_is_refused_and_auto_starts_from_scratch(tmp_path):
    make_target(tmp_path / "t", mtp_layer=False)
    target = load_target(tmp_path / "t")
    with pytest.raises(ValueError, match="--init scratch"):
        mtp.make_draft(mtp.TrainConfig(init="warm"), target, mtp.Ranks())
    assert mtp.make_draft(mtp.TrainConfig(), target, mtp.Ranks())[1] == "scratch"


def test_a_second_mtp_layer_is_announced(tmp_path):
    make_target(tmp_path / "t")
    edit_checkpoint(tmp_path / "t", lambda s: s.update({"model.layers.3.enorm.weight": torch.ones(32)}))
    with pytest.warns(UserWarning, match="more than one MTP layer; the first, layer 2"):
        assert mtp.mtp_prefix(mtp.Checkpoint(tmp_path / "t")) == "model.layers.2."


@pytest.mark.parametrize("kind", ["blocks", "rows", "column", "scalar"])
@pytest.mark.parametrize("code", [torch.float8_e4m3fn, torch.int8])
def test_quantised_weights_are_dequantised(kind, code, tmp_path):
    from safetensors.torch import save_file
    torch.manual_seed(0)
    codes = (torch.randn(10, 14) * 5).clamp(-100, 100).to(code)
    scale = {"blocks": torch.rand(3, 3), "rows": torch.rand(10), "column": torch.rand(10, 1), "scalar": torch.rand(())}[kind]
    name = "a.weight_scale_inv" if kind == "blocks" else "a.weight_scale"
    save_file({"a.weight": codes, name: scale}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"quantization_config": {"weight_block_size": [4, 6]}}')
    found = mtp.Checkpoint(tmp_path).read("a.weight")
    for i in range(10):  # element by element; the last block of rows and of columns is ragged
        for j in range(14):
            one = scale[i // 4, j // 6] if kind == "blocks" else scale.flatten()[i if scale.numel() > 1 else 0]
            assert found[i, j] == codes[i, j].float() * one


def test_scales_that_do_not_fit_are_refused(tmp_path):
    from safetensors.torch import save_file
    save_file({"a.weight": torch.ones(10, 14, dtype=torch.int8), "a.weight_scale_inv": torch.ones(2, 3)},
              tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"quantization_config": {"weight_block_size": [4, 6]}}')
    with pytest.raises(ValueError, match=r"is \(2, 3\), but blocks of \(4, 6\).*make \(3, 3\)"):
        mtp.Checkpoint(tmp_path).read("a.weight")


def test_pickled_checkpoints_are_not_read(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="only safetensors"):
        mtp.Checkpoint(tmp_path)


def test_a_draft_survives_saving_and_loading(tmp_path):
    model = random_draft(mtp.DEMO, 3).bfloat16()
    mtp.save_draft(tmp_path, model, dict(ttt_length=3, recycle="pre"))
    loaded, meta = mtp.load_draft(tmp_path)
    assert (meta["ttt_length"], meta["recycle"], meta["format"], loaded.config) == (3, "pre", 1, model.config)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor) and loaded.state_dict()[name].dtype == tensor.dtype
    assert loaded.mlp.gate.weight.dtype == torch.float32
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_draft_that_does_not_fit_its_config_is_refused(tmp_path):
    mtp.save_draft(tmp_path, random_draft(mtp.DEMO, 3), dict(ttt_length=3))
    edit_checkpoint(tmp_path, lambda s: (s.pop("enorm.weight"), s.update(extra=torch.ones(1))))
    with pytest.raises(ValueError, match="enorm.weight, extra"):
        mtp.load_draft(tmp_path)
    with pytest.raises(FileNotFoundError, match="no config.json"):
        mtp.load_draft(tmp_path / "nowhere")


# ---- Trainer: targets and data --------------------------------------------------------------------------------

@pytest.mark.parametrize("family", ["glm4_moe", "hy_v3"])
@pytest.mark.parametrize("tie", [False, True])
def test_hidden_states_are_the_ones_the_target_decodes_from(family, tie, tmp_path):
    """Each sample on its own, unpadded, through the whole model: its logits are lm_head of our states."""
    make_target(tmp_path / "t", family, mtp_layer=False, tie=tie)
    target = load_target(tmp_path / "t")
    samples = [mtp.Sample("s", torch.arange(3, 3 + n), torch.ones(n, dtype=torch.bool)) for n in (5, 17, 9, 1)]
    for sample, state in zip(samples, target.states(samples, budget=20)):
        logits = target.model(sample.input_ids[None]).logits[0]
        ours = F.linear(state, target.lm_head)
        torch.testing.assert_close(ours, logits, rtol=1e-5, atol=1e-5)
        assert torch.equal(ours.argmax(-1), logits.argmax(-1))
    assert not target.lm_head.requires_grad and not target.embed.requires_grad


def test_the_demo_layer_stack_is_the_model_transformers_loads(tmp_path, monkeypatch):
    """The demo target, written in our layout, gives transformers' logits: layers, names and config agree."""
    monkeypatch.setattr(mtp.DemoTarget, "dense_width", 64)
    config = mtp.MTPConfig(**{**vars(mtp.DEMO), "vocab_size": 62, "hidden_size": 32, "head_dim": 8})
    monkeypatch.setattr(mtp, "DEMO", config)
    torch.manual_seed(0)
    model = mtp.DemoTarget(config)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor.data.uniform_(0.5, 1.5) if name.endswith("norm.weight") else tensor.data.normal_(0, 0.2)
    mtp.save_demo_target(tmp_path / "demo", model, make_tokenizer())
    target, ids = load_target(tmp_path / "demo"), torch.randint(62, (2, 21))
    torch.testing.assert_close(model(ids)[0], target.model(ids).logits, rtol=1e-4, atol=1e-5)
    assert mtp.mtp_prefix(target.checkpoint) is None


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


def test_a_template_that_rewrites_earlier_turns_is_refused():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = ("{% for m in messages %}{% if loop.last %}<|user|> {% endif %}{{ m['content'] }} "
                               "{% endfor %}")
    with pytest.raises(ValueError, match="renders message 1 differently"):
        mtp.encode_messages(MESSAGES, tokenizer)


def test_documents_are_read_cut_and_named(tmp_path, capsys):
    path, text = tmp_path / "a.jsonl", tmp_path / "b.txt"
    rows = [{"text": "w1 " * 25}, {"text": "w1"}, {"nothing": 1}, {"messages": MESSAGES}, {"text": 3}]
    path.write_text("\n".join(map(json.dumps, rows)) + "\nnot json\n")
    text.write_text("w2 " * 12)
    samples = mtp.read_samples([path, text], make_tokenizer(), seq_len=10, shortest=5)
    assert [len(s.input_ids) for s in samples] == [10, 10, 5, 10, 5, 10]
    assert [s.name for s in samples[:3]] == [f"{path}:1"] * 3 and samples[-1].name == str(text)
    said = capsys.readouterr().out
    assert "4 documents skipped" in said and f"{path}:2 (under 5 tokens" in said and f"{path}:3 (neither text" in said
    with pytest.raises(FileNotFoundError, match="does not exist"):
        mtp.read_samples([tmp_path / "c.txt"], make_tokenizer(), 10, 5)
    with pytest.raises(ValueError, match="no usable document"):
        mtp.read_samples([path], make_tokenizer(), 10, 500)


def test_packing_cuts_nothing_and_fills_rows():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 60, (300,), generator=generator).tolist()
    samples = [mtp.Sample(str(i), torch.zeros(n, dtype=torch.long), None) for i, n in enumerate(lengths)]
    rows = mtp.pack(samples, 64)
    assert sorted(s.name for row in rows for s in row) == sorted(str(i) for i in range(300))
    assert max(sum(len(s.input_ids) for s in row) for row in rows) <= 64
    assert len(rows) <= 1.1 * math.ceil(sum(lengths) / 64)


def test_a_batch_holds_each_document_with_its_own_states(tiny):
    target = load_target(tiny[0])
    samples = mtp.read_samples([tiny[1]], target.tokenizer, 48, 5)[:7]
    rows = mtp.pack(samples, 64)
    (ids, hidden, mask, docs), bad = mtp.make_batch(rows, 70, target, torch.device("cpu"))
    assert not bad and ids.shape == (len(rows), 70) and (docs[:, -6:] == -1).all()
    for b, row in enumerate(rows):
        assert torch.equal(ids[b][docs[b] >= 0], torch.cat([s.input_ids for s in row]))
        for d, sample in enumerate(row):
            alone = target.model.base_model(sample.input_ids[None]).last_hidden_state[0]
            torch.testing.assert_close(hidden[b][docs[b] == d], alone, rtol=1e-5, atol=1e-5)


# ---- Trainer: acceptance and decoding -------------------------------------------------------------------------

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
    results = mtp.train(options(tiny, out / "draft", steps=150, batch_size=16, save_every=999, log_every=50))
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
        reference = target.model.generate(torch.tensor([prompt]), max_new_tokens=50, do_sample=False, eos_token_id=-1)
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
    run = mtp.Run(model, target, mtp.TrainConfig(ttt_length=K, micro_batch_size=3), mtp.Ranks(), "fa")
    found = run.evaluate(texts)
    assert found["walk"] == [sum(n > k for n in rounds) / len(rounds) for k in range(K)]
    assert found["accept_len_walk"] == pytest.approx(1 + sum(rounds) / len(rounds), abs=1e-12) and sum(rounds) > 5


def test_an_end_token_ends_the_answer_and_its_round_counts_whole(tiny, trained):
    target, (model, _) = load_target(tiny[0]), mtp.load_draft(trained)
    model.set_target(target.embed, target.lm_head)
    free = mtp.decode(target, [7, 9], 40, mtp.Drafter(model), 3)
    end = free.answer[12]
    at = free.answer.index(end)
    cut = mtp.decode(target, [7, 9], 40, mtp.Drafter(model), 3, eos=[end])
    assert cut.answer == free.answer[:at]
    assert cut.rounds == free.rounds[:len(cut.rounds)] and cut.ids == free.ids[:len(cut.ids)]


def test_bf16_divergence_is_reported_only_where_rounding_explains_it(capsys):
    a = mtp.Decoding([], [1, 2, 3], [], [(4.0, 1.0), (4.0, 0.01), (4.0, 1.0)], 1.0)
    b = a._replace(answer=[1, 5, 3])
    mtp.check_lossless(a, a, torch.float32)
    mtp.check_lossless(a, b, torch.bfloat16)  # 2 ulps of 4.0 are 0.0625
    assert "lossless" in (said := capsys.readouterr().out) and "token 1 on" in said
    with pytest.raises(ValueError, match="report it"):
        mtp.check_lossless(a, a._replace(answer=[5, 2, 3]), torch.bfloat16)
    with pytest.raises(ValueError, match="report it"):
        mtp.check_lossless(a, b, torch.float32)


# ---- Trainer: optimizer, resume, robustness -------------------------------------------------------------------

def test_bf16_drafts_learn_through_fp32_masters():
    model = random_draft(mtp.MTPConfig(**{**vars(mtp.DEMO), "hidden_size": 32, "head_dim": 8}), 0).bfloat16()
    optimizer, before = mtp.MasterAdamW(model, 0.0), model.eh_proj.weight.clone()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for _ in range(20):  # each step moves a weight by about 1e-5, far below a bf16 ulp of weights near 1
        optimizer.step(1e-5, 1.0)
    moved = optimizer.masters["enorm.weight"] - model.enorm.weight.float()
    assert moved.abs().max() > 0 and optimizer.masters["enorm.weight"].dtype == torch.float32
    assert torch.equal(optimizer.masters["eh_proj.weight"].bfloat16(), model.eh_proj.weight)
    assert (optimizer.masters["eh_proj.weight"] - before.float()).abs().max() > 1.9e-4


def test_learning_rate_warms_up_then_falls_to_its_floor():
    cfg = mtp.TrainConfig(lr=2.0, lr_floor=0.1, warmup_steps=4, steps=104)
    rates = [mtp.learning_rate(step, cfg) for step in range(105)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0] and rates[4] == 2.0 and rates[104] == pytest.approx(0.2)
    assert rates[54] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5)) and rates[4:] == sorted(rates[4:], reverse=True)


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
    for a, b in zip(lines[0], lines[1][:2] + lines[1][4:]):
        assert {**a, "tokens_per_second": 0} == {**b, "tokens_per_second": 0}


def run_cli(*arguments, ranks=0, env=None, **more):
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks else [sys.executable]
    return subprocess.Popen([*start, str(HERE / "mtp.py"), *map(str, arguments)], stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
                            **more)


def flags(tiny, out, **changes):
    cfg = options(tiny, out, **changes)
    found = ["--target", cfg.target, "--data", *cfg.data]
    for name in ("out", "device", "init", "steps", "batch_size", "seq_len", "lr", "warmup_steps", "eval_rows", "save_every",
                 "log_every", "keep", "backend", *changes):
        if getattr(cfg, name) is not None:
            found += ["--" + name.replace("_", "-"), str(getattr(cfg, name))]
    return found


@pytest.mark.parametrize("when", ["between", "in a save"])
def test_kill_9_loses_nothing_since_the_last_state(tiny, tmp_path, when):
    """A run is killed by SIGKILL, between steps or in the middle of writing step 4's state; the next start resumes
    from step 2 and ends bitwise where an uninterrupted run ends."""
    mtp.train(options(tiny, tmp_path / "whole", steps=6))
    if when == "in a save":
        code = ("import os, signal, mtp, sys, torch.distributed.checkpoint as dcp\nsave = dcp.save\n"
                "def dying(state, checkpoint_id):\n"
                "    if 'step-4' in str(checkpoint_id):\n"
                "        checkpoint_id.mkdir()\n        (checkpoint_id / '__0_0.distcp').write_bytes(b'half')\n"
                "        os.kill(os.getpid(), signal.SIGKILL)\n"
                "    save(state, checkpoint_id=checkpoint_id)\n"
                "dcp.save = dying\nmtp.main(sys.argv[1:])")
        run = subprocess.run([sys.executable, "-c", code, *flags(tiny, tmp_path / "killed", steps=6)], cwd=HERE,
                             capture_output=True)
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
    while not (tmp_path / "run/metrics.jsonl").exists() and time.time() < deadline:
        time.sleep(0.05)
    run.terminate()
    said = run.communicate(timeout=60)[0]
    assert run.returncode == 0 and "stopped by SIGTERM after step" in said, said
    assert len(mtp.saved_states(tmp_path / "run")) == 1 and (tmp_path / "run/model.safetensors").exists()


def test_a_sample_that_is_not_finite_is_skipped_counted_and_named(tiny, tmp_path, monkeypatch, capsys):
    poisoned, real = f"{tiny[1]}:6", mtp.Target.states

    def states(self, samples, **more):
        return [h * math.nan if s.name == poisoned else h for s, h in zip(samples, real(self, samples, **more))]

    monkeypatch.setattr(mtp.Target, "states", states)
    mtp.train(options(tiny, tmp_path / "run", steps=12))
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    named = [line["skipped_samples"] for line in lines if "skipped_samples" in line]
    assert named and all(names == [poisoned] for names in named) and lines[-1]["skipped"] == len(named) < 12
    assert "not finite: " + poisoned in capsys.readouterr().out
    model = mtp.load_draft(tmp_path / "run")[0]
    assert all(p.isfinite().all() for p in model.parameters())


def test_ten_bad_steps_in_a_row_are_an_error(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(mtp.Target, "states", lambda self, samples: [
        torch.full((len(s.input_ids), 32), math.nan) for s in samples])
    with pytest.raises(ValueError, match="ten steps in a row"):
        mtp.train(options(tiny, tmp_path / "run", steps=30))
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert sum("skipped_samples" in line for line in lines) == 10


def test_old_states_rotate_and_best_is_kept(tiny, tmp_path):
    mtp.train(options(tiny, tmp_path / "run", steps=8, keep=2, eval_every=2))
    assert [p.name for p in mtp.saved_states(tmp_path / "run")] == ["step-6", "step-8"]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    best = max(line["eval"]["accept_len"] for line in lines if "eval" in line)
    target = load_target(tiny[0])
    cfg = options(tiny, "unused")
    model, _ = mtp.load_draft(tmp_path / "run/best")
    model.set_target(target.embed, target.lm_head)
    held = mtp.read_rows(cfg, target)[1]
    assert mtp.Run(model, target, cfg, mtp.Ranks(), "sdpa").evaluate(held)["accept_len"] == best


def test_accumulation_changes_rounding_only(tiny, tmp_path):
    """Gradients of one step in micro-batches of 1, 3 and 6 rows, ragged and masked, are the same."""
    target, found = load_target(tiny[0]), []
    target.lm_head, target.embed, real = target.lm_head.double(), target.embed.double(), target.states
    target.states = lambda samples: [real([sample])[0] for sample in samples]  # the same bits in any batch
    for size in (1, 3, 6):
        cfg = options(tiny, "unused", micro_batch_size=size)
        rows = mtp.read_rows(cfg, target)[0][:6]
        model, _ = mtp.make_draft(cfg, target, mtp.Ranks())
        run = mtp.Run(model, target, cfg, mtp.Ranks(), "sdpa")
        tally, load, _ = run.gradients(rows)
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
    last = [json.loads((tmp_path / run / "metrics.jsonl").read_text().splitlines()[0]) for run in ("one", "many")]
    assert last[0]["loss"] == pytest.approx(last[1]["loss"], rel=1e-5)
    assert last[0]["grad_norm"] == pytest.approx(last[1]["grad_norm"], rel=1e-4) and one


def test_router_is_balanced_from_scratch_and_left_alone_when_warm(tiny, tmp_path):
    mtp.train(options(tiny, tmp_path / "scratch", steps=3))
    mtp.train(options(tiny, tmp_path / "warm", steps=3, init="warm"))
    bias = {run: mtp.load_draft(tmp_path / run)[0].mlp.gate.e_score_correction_bias for run in ("scratch", "warm")}
    assert bias["scratch"].abs().max() > 0.005 and bias["scratch"].mean().abs() < 1e-7
    target = load_target(tiny[0])
    assert torch.equal(bias["warm"], mtp.make_draft(mtp.TrainConfig(init="warm"), target, mtp.Ranks())[0]
                       .mlp.gate.e_score_correction_bias)


# ---- Trainer: command line ------------------------------------------------------------------------------------

@pytest.mark.parametrize("arguments, says", [
    (["--seq-len", "4"], "--seq-len 4 has no row that counts"),
    (["--steps", "0"], "--steps 0 must be at least 1"),
    (["--data", "x.txt"], "give --target DIR"),
    (["--target", "somewhere"], "give --data FILE"),
    (["--sp", "2"], "add --backend usp"),
    (["--ce-weight", "0", "--kl-weight", "0"], "one must be positive"),
    (["--resume", "nowhere"], "--resume nowhere is no complete training state"),
    (["--target", "/nowhere", "--data", "x.txt", "--out", "o"], "is no directory and no hub id"),
    (["generate", "--draft", "/nowhere", "--prompt", "x"], "has no config.json"),
    (["generate", "--prompt", "x"], "--draft DIR is missing"),
    (["eval", "--draft", "/nowhere"], "has no config.json"),
])
def test_impossible_commands_name_the_remedy(arguments, says, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert mtp.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("mtp.py: error: ") and says in said and "Traceback" not in said


def test_unknown_flags_and_values_are_refused(capsys):
    for arguments in (["--stepz", "3"], ["--backend", "flash"], ["--step", "3"], ["eval", "--lr", "1"]):
        with pytest.raises(SystemExit) as stop:
            mtp.main(arguments)
        assert stop.value.code == 2
    assert "unrecognized arguments: --stepz" in capsys.readouterr().err


def test_every_option_is_documented_in_help(capsys):
    for command, (kind, _) in mtp.COMMANDS.items():
        with pytest.raises(SystemExit):
            mtp.main([command, "--help"])
        said = capsys.readouterr().out
        for f in mtp.fields(kind):
            assert "--" + f.name.replace("_", "-") in said and f.metadata["help"].split()[0] in said


def test_a_row_longer_than_the_target_knows_is_refused(tiny, tmp_path, capsys):
    assert mtp.main(flags(tiny, tmp_path / "run", seq_len=512)) == 2
    assert "exceeds the target's max_position_embeddings 256" in capsys.readouterr().err


def test_another_target_than_the_drafts_own_is_refused(tiny, trained, tmp_path, capsys):
    make_target(tmp_path / "other", mtp_layer=False)
    config = json.loads((tmp_path / "other/config.json").read_text())
    (tmp_path / "other/config.json").write_text(json.dumps({**config, "rope_theta": 5e5}))
    assert mtp.main(["eval", "--draft", str(trained), "--target", str(tmp_path / "other")]) == 2
    assert "was trained for another target" in capsys.readouterr().err


def test_eval_and_generate_commands(tiny, trained, capsys):
    assert mtp.main(["eval", "--draft", str(trained), "--data", tiny[1], "--seq-len", "48"]) == 0
    said = capsys.readouterr().out
    assert "accept_len_walk" in said and "accepted per position" in said
    assert mtp.main(["generate", "--draft", str(trained), "--prompt", "w3 w4 w5", "--max-new-tokens", "20"]) == 0
    said = capsys.readouterr().out
    assert "lossless: token for token" in said and "tokens/s: " in said
    assert mtp.main(["generate", "--draft", str(trained), "--prompt", "w3", "--chat", "--max-new-tokens", "20"]) == 0
    assert "lossless" in capsys.readouterr().out
