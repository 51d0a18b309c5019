"""The command that writes an INT4 checkpoint, on a tiny model; and what the fidelity record is made of."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

from sdsie_sglang.int4.activations import SAMPLES, collect_inputs
from sdsie_sglang.int4.calibration import calibrate
from sdsie_sglang.int4.checkpoint import load_effective
from sdsie_sglang.int4.quantize import fused_groups, main
from sdsie_sglang.int4.settings import CALIBRATIONS

LAYER = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return tmp_path / "model"


@pytest.fixture
def quantise(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("sdsie_sglang.eval.chat.chat_ids", lambda model, text: [1, *range(2, 40)])
    monkeypatch.setattr("sdsie_sglang.int4.quantize.OWN_TOKENS", 4)

    def run(*flags, out="out"):
        return main([str(folder), str(tmp_path / out), "--device", "cpu", *flags]), tmp_path / out

    return run


def keys_of(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("name", CALIBRATIONS)
def test_the_checkpoint_multiplies_as_calibrated(quantise, model, name):
    code, out = quantise("--calibration", name)
    assert code == 0
    effective = load_effective(out)
    assert set(effective) == set(model.state_dict())
    weight = model.get_submodule(LAYER).weight.detach()
    error = (effective[f"{LAYER}.weight"] - weight.float()).norm() / weight.float().norm()
    assert 0 < error < 0.25
    if not CALIBRATIONS[name].needs_text:
        assert torch.equal(effective[f"{LAYER}.weight"], calibrate(weight, name).effective())
    for kept in ("model.embed_tokens", "lm_head", "model.layers.0.input_layernorm"):
        assert torch.equal(effective[f"{kept}.weight"], model.state_dict()[f"{kept}.weight"].float())
    assert (out / "tokenizer.json").exists()


def test_config_says_how(quantise):
    _, out = quantise("--calibration", "g64", "--exclude", "layers.0.,down_proj", "--lm-head")
    assert json.loads((out / "config.json").read_text())["quantization_config"] == {
        "quant_method": "sdsie_int4",
        "format": 1,
        "calibration": "g64",
        "exclude": ["layers.0.", "down_proj"],
        "lm_head": True,
    }
    keys = keys_of(out)
    assert f"{LAYER}.weight" in keys
    assert f"{DOWN}.weight" in keys
    assert "model.layers.1.self_attn.q_proj.int4_codes" in keys
    assert "lm_head.int4_codes" in keys


def test_fused_layers_share_their_factors(quantise):
    _, out = quantise("--calibration", "awq")
    with safe_open(out / "model.safetensors", "pt") as file:
        parts = [file.get_tensor(f"model.layers.0.self_attn.{part}_proj.int4_factors") for part in "qkv"]
        gate, up = (file.get_tensor(f"model.layers.0.mlp.{part}_proj.int4_factors") for part in ("gate", "up"))
    assert torch.equal(parts[0], parts[1])
    assert torch.equal(parts[0], parts[2])
    assert torch.equal(gate, up)
    assert not torch.equal(parts[0], gate)


def test_layers_fused_by_sglang_are_grouped():
    names = ["a.q_proj", "a.k_proj", "a.v_proj", "a.o_proj", "b.q_proj", "m.up_proj", "m.gate_proj"]
    assert fused_groups(names) == [
        ["a.q_proj", "a.k_proj", "a.v_proj"],
        ["a.o_proj"],
        ["b.q_proj"],
        ["m.up_proj", "m.gate_proj"],
    ]


def test_inputs_are_collected_evenly(model):
    texts = [torch.randint(0, 96, (1, 3 * SAMPLES))]
    found = collect_inputs(model, [LAYER], texts)[LAYER]
    assert found.shape == (SAMPLES, 64)


def test_what_is_refused(quantise, folder, tmp_path, capsys):
    def refused(*flags, says, **kwargs):
        code, _ = quantise(*flags, **kwargs)
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert code == 2
        assert says in error

    refused("--calibration", "g7", says="calibration: ")
    refused("--exclude", "proj", says="no linear layer is left")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    refused(out="full", says="is not an empty folder")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    refused(says="quantised already, by fp8")
    (folder / "config.json").unlink()
    refused(says="holds no config.json")


def refused(run, capsys):
    """The line that a run is refused with."""
    code, _ = run
    assert code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_names_that_sglang_fuses_are_excluded_together(quantise, capsys):
    for part in ("q_proj", "qkv_proj"):
        _, out = quantise("--exclude", part, out=part)
        kept = {key.split(".")[-2] for key in keys_of(out) if key.endswith("_proj.weight")}
        assert kept == {"q_proj", "k_proj", "v_proj"}
    assert "--exclude dwon_proj: no linear layer's name" in refused(quantise("--exclude", "dwon_proj"), capsys)


def test_a_killed_run_leaves_nothing_that_looks_whole_and_the_next_goes_on(quantise, folder, tmp_path, monkeypatch):
    def killed(*_args, **_more):
        raise SystemExit(137)

    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", lambda *args, **more: None)  # kill -9 tidies nothing
        patched.setattr("sdsie_sglang.int4.quantize.quantization_config", killed)
        with pytest.raises(SystemExit):
            quantise()
    left = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert left == [".partial"]
    assert (tmp_path / "out" / ".partial" / "model.safetensors").exists()
    code, out = quantise()
    assert code == 0
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in folder.iterdir())


def test_killed_while_files_move_is_gone_on_with_but_strangers_are_not(quantise, folder, tmp_path, capsys):
    out = tmp_path / "out"
    (out / ".partial").mkdir(parents=True)
    (out / "model.safetensors").write_bytes(b"half")
    assert quantise()[0] == 0
    (tmp_path / "other" / ".partial").mkdir(parents=True)
    (tmp_path / "other" / "thesis.txt").write_text("")
    assert "is not an empty folder" in refused(quantise(out="other"), capsys)
    assert (tmp_path / "other" / "thesis.txt").exists()
    assert "is not an empty folder" in refused(quantise(), capsys), "a finished one is never written over"


def test_a_full_disk_is_one_line_and_leaves_nothing(quantise, tmp_path, monkeypatch, capsys):
    def full(tensors, path, metadata):
        path.write_bytes(b"some")
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("sdsie_sglang.int4.quantize.save_file", full)
    assert "No space left on device" in refused(quantise(), capsys)
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    assert "No space left on device" in refused(quantise(), capsys)
    assert list((tmp_path / "out").iterdir()) == [], "a folder that was there stays"
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    assert "GB free, and at least" in refused(quantise(), capsys)


def test_what_cannot_be_written_is_known_before_the_model_is_read(quantise, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sdsie_sglang.int4.quantize.activation_aware", None)
    (tmp_path / "file").write_text("")
    assert "Not a directory" in refused(quantise("--calibration", "awq", out="file/out"), capsys)

    def read_only(path, *_args, **_more):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.mkdir", read_only)
    assert "Permission denied" in refused(quantise("--calibration", "awq"), capsys)


def test_the_models_own_folder_is_never_written_to(folder, capsys):
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert main([str(folder), str(folder), "--device", "cpu"]) == 2
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_files_may_be_read_by_whoever_may_read_the_models(quantise, folder):
    (folder / "model.safetensors").chmod(0o644)
    _, out = quantise()
    assert (out / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_weights_that_cannot_be_int4_are_one_line(quantise, folder, model, capsys):
    from safetensors.torch import save_file

    def with_weight(weight):
        state = {key: value.clone() for key, value in model.state_dict().items()}
        save_file({**state, f"{LAYER}.weight": weight}, folder / "model.safetensors", metadata={"format": "pt"})

    weight = model.get_submodule(LAYER).weight.detach()
    with_weight(weight.to(torch.int8))
    assert f"{LAYER}.weight is torch.int8" in refused(quantise(), capsys)
    broken = weight.clone()
    broken[0, 0] = torch.nan
    with_weight(broken)
    assert f"{LAYER}.weight holds infinities or values that are no numbers" in refused(quantise(), capsys)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    for calibration in ("g128", "awq"):
        assert "model.safetensors is cut short or damaged" in refused(quantise("--calibration", calibration), capsys)


def test_other_bad_input_is_one_line(quantise, folder, capsys):
    assert "--device cuda:99 cannot be used" in refused(quantise("--device", "cuda:99"), capsys)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "nobody-knows-it"}))
    assert "Transformers cannot make this model" in refused(quantise(), capsys)


def saved_config(out):
    return json.loads((out / "config.json").read_text())


def test_a_whole_checkpoint_is_told_from_a_damaged_one(quantise, folder):
    from safetensors.torch import load_file, save_file

    from sdsie_sglang.int4.saved_checks import saved_problem

    for name in CALIBRATIONS:
        _, out = quantise("--calibration", name, out=name)
        assert saved_problem(out, saved_config(out)) is None
        tensors = load_file(out / "model.safetensors")
        for key in [key for key in tensors if key.startswith(f"{LAYER}.int4")]:
            save_file({k: t for k, t in tensors.items() if k != key}, out / "model.safetensors")
            assert f"it lacks {key}" in saved_problem(out, saved_config(out))
    none_of_it = {key: t for key, t in tensors.items() if not key.startswith(f"{DOWN}.")}
    save_file(none_of_it, out / "model.safetensors")
    assert "it lacks layers.1, down_proj" in saved_problem(out, saved_config(out))
    whole = (out / "model.safetensors").read_bytes()
    for damaged in (whole[:-1], whole + b"x", whole[:100], b"", b"\xff" * 64):
        (out / "model.safetensors").write_bytes(damaged)
        assert "model.safetensors is" in saved_problem(out, saved_config(out))
    (out / "model.safetensors").unlink()
    assert "holds no safetensors" in saved_problem(out, saved_config(out))
    assert saved_problem(folder, saved_config(folder)) is None, "unquantised: SGLang's own affair"


def test_accept_length_walks_the_runs():
    from sdsie_sglang.eval.int4_fidelity import accept_length

    # From token 0: two accepted, so tokens 1, 2 and 3; from 3 none: 4; from 4: 5 is the last.
    assert accept_length([[2, 0, 0, 0, 0, 0]], k=5) == 5 / 3
    assert accept_length([[2, 0, 0, 0, 0, 0]], k=1) == 5 / 4
    assert accept_length([[0, 0], [0, 0, 0]], k=3) == 1.0


def test_self_chains_are_what_low_precision_says_on_the_targets_keys():
    """Brute force, one position at a time: the target's cache up to it, then the low-precision model."""
    from sdsie_sglang.demo.llama import VOCABULARY, Llama, linear, rms_norm, rotary_table
    from sdsie_sglang.eval.draft_chains import self_chains

    def small(seed):
        torch.manual_seed(seed)
        model = Llama(2)
        model.embedding = torch.randn(VOCABULARY, 576, generator=torch.Generator().manual_seed(5)) * 0.05
        for parameter in model.parameters():
            parameter.data = torch.randn_like(parameter) * 0.05 + (parameter.dim() == 1)
        return model

    target, low = small(1), small(2)
    text = torch.randint(0, VOCABULARY, (9,), generator=torch.Generator().manual_seed(3))
    first, steps = 3, 3
    found = self_chains(target, low, text, first, steps).tokens
    with torch.inference_mode():
        for row, position in enumerate(range(first, 9)):
            caches, token, chain = None, text[position], []
            x = torch.nn.functional.embedding(text[None, :position], target.embedding)
            cosines, sines = rotary_table(20, x.device, x.dtype)
            caches = []
            for block in target.blocks:
                _, key, value = block.split_heads(rms_norm(x, block.input_norm), cosines[:position], sines[:position])
                caches.append((key, value))
                x = block(x, cosines[:position], sines[:position])
            for step in range(steps):
                at = slice(position + step, position + step + 1)
                y = torch.nn.functional.embedding(token.view(1, 1), low.embedding)
                for layer, block in enumerate(low.blocks):
                    query, key, value = block.split_heads(rms_norm(y, block.input_norm), cosines[at], sines[at])
                    caches[layer] = tuple(torch.cat(pair, 2) for pair in zip(caches[layer], (key, value), strict=True))
                    attended = torch.nn.functional.scaled_dot_product_attention(query, *caches[layer], enable_gqa=True)
                    y = block.feed_forward(y + linear(attended.transpose(1, 2).flatten(2), block.out))
                token = (rms_norm(y[0, 0], low.norm) @ low.embedding.T).argmax()
                chain.append(int(token))
            assert found[row].tolist() == chain


def test_a_record_of_other_text_is_not_gone_on_with(tmp_path):
    from sdsie_sglang.eval.int4_fidelity import Fidelity, Record, kept, write

    found = Fidelity(
        calibration="g32", gigabytes=0.1, perplexity=20.0, kl_nats=0.01, top1=0.9, runs={"a": [1, 0, 0], "b": [0, 0]}
    )
    answers = [{"id": "a", "category": "coding", "is_code": True}, {"id": "b", "category": "math", "is_code": False}]
    record = Record(
        model="m", text="t", text_sha256="0", text_tokens=512, answer_tokens=3, perplexity=19.0, answers=answers,
        calibrations=[found], machine={}, command="c", date="d",
    )  # fmt: skip
    assert kept(record, tmp_path) == []
    write(record, tmp_path)
    assert kept(record, tmp_path) == [found]
    assert kept(record.model_copy(update={"answer_tokens": 4}), tmp_path) == []
    page = (tmp_path / "fidelity.md").read_text()
    assert "| `g32` | 0.100 | 20.00 | 0.0100 | 90.0 % | 1.50 | 1.50 | 1.50 | 1.50 |" in page
    assert "| calibration | math | coding | code |" in page
