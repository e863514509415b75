"""LoRA: what is trained, that it is trained exactly, and what is saved, exported and sent of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from penstock.cli.config_file import load_config
from penstock.errors import CheckpointError, ModelError
from penstock.learn import LoRAConfig, TrainWorkerConfig
from penstock.learn.batch import TrainBatch, prepare_batch
from penstock.learn.learner import Learner
from penstock.learn.lora import adapters_of, attach, own_tensors
from penstock.learn.peers import Alone
from penstock.learn.worker import TorchTrainWorker
from penstock.rollout import Group


@pytest.fixture
def batch(random_groups: Callable[..., list[Group]]) -> TrainBatch:
    return prepare_batch(random_groups(7, num_groups=4), train_step=1)


def build(model_dir: Path, *, lora: LoRAConfig | None = None, **fields: Any) -> TorchTrainWorker:
    lora = lora or LoRAConfig(rank=4, alpha=8)
    return TrainWorkerConfig(**{"lr": 1e-2, "lora": lora, **fields}).build(model_dir, total_steps=10, threads=1)


def train(worker: TorchTrainWorker, batch: TrainBatch, steps: int = 1) -> dict[str, float]:
    for _ in range(steps):
        metrics = asyncio.run(worker.train(batch)).metrics
    return metrics


def scores(worker: TorchTrainWorker, batch: TrainBatch) -> np.ndarray[Any, Any]:
    found = asyncio.run(worker.score(batch))
    return np.concatenate([segment for rollout in found.values() for segment in rollout])


def plain_scores(model: Any, batch: TrainBatch) -> np.ndarray[Any, Any]:
    """By the model's own forward pass, one answer at a time."""
    found = []
    for group in batch.groups:
        for answer in group.answers:
            [segment] = answer.segments
            ids = torch.from_numpy(np.concatenate([group.prompt_ids, segment.ids]).astype(np.int64))
            with torch.no_grad():
                table = model(input_ids=ids[None]).logits[0].float().log_softmax(-1)[:-1]
            found.append(table.gather(1, ids[1:, None])[len(group.prompt_ids) - 1 :, 0].numpy())
    return np.concatenate(found)


def moments(worker: TorchTrainWorker, directory: Path) -> dict[str, torch.Tensor]:
    directory.mkdir()
    asyncio.run(worker.save(directory))
    return load_file(directory / "optimizer.safetensors")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_fused_passes_give_the_gradient_that_peft_and_autograd_give(
    model_dir: Path, batch: TrainBatch, tmp_path: Path, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without AMX bfloat16 would not go through them.
    monkeypatch.setattr("penstock.learn.load.has_fast_products", lambda: True)
    found = []
    for number, fields in enumerate([{"fused": True}, {"fused": False}, {"activation_checkpointing": True}]):
        worker = build(model_dir, dtype=dtype, max_grad_norm=1e9, betas=(0.0, 0.999), **fields)
        assert train(worker, batch)["fused"] == fields.get("fused", True)
        # B is no longer 0, so the second gradient has both halves.
        train(worker, batch)
        state = moments(worker, tmp_path / str(number))
        found.append(torch.cat([state[key].flatten() for key in sorted(state) if key.startswith("exp_avg.")]))
    exact = dtype == "float32"
    for other in found[1:]:
        if exact:
            torch.testing.assert_close(other, found[0], rtol=1e-3, atol=1e-6)
        else:
            assert torch.cosine_similarity(other, found[0], dim=0) > 0.99


def test_only_the_adapter_is_trained_and_saved(model_dir: Path, batch: TrainBatch, tmp_path: Path) -> None:
    worker = build(model_dir)
    base = {name: p.clone() for name, p in worker.model.named_parameters() if not p.requires_grad}
    before = scores(worker, batch)
    train(worker, batch, steps=3)
    assert np.abs(scores(worker, batch) - before).max() > 1e-3
    assert all(torch.equal(base[n], p) for n, p in worker.model.named_parameters() if not p.requires_grad)
    asyncio.run(worker.save(tmp_path))
    saved = load_file(tmp_path / "model.safetensors")
    assert len(saved) == 2 * len(adapters_of(worker.model)) == 28
    assert all("lora_" in name for name in saved)
    full = sum(p.numel() for p in worker.model.parameters())
    assert sum(tensor.numel() for tensor in saved.values()) < full / 3


@pytest.mark.parametrize("fused", [True, False])
def test_a_run_goes_on_from_the_saved_adapter_to_the_bit(
    model_dir: Path, batch: TrainBatch, tmp_path: Path, fused: bool
) -> None:
    first, second = build(model_dir, fused=fused), build(model_dir, fused=fused)
    train(first, batch, steps=2)
    asyncio.run(first.save(tmp_path))
    asyncio.run(second.load(tmp_path))
    assert np.array_equal(scores(first, batch), scores(second, batch))
    train(first, batch)
    train(second, batch)
    assert np.array_equal(scores(first, batch), scores(second, batch))


class OfTwo(Alone):
    """The first of two ranks, of which the other gave `theirs`."""

    size = 2

    def __init__(self, theirs: bytes | None = None) -> None:
        self.theirs = theirs
        self.own = b""

    def all_equal(self, digest: bytes) -> bool:
        self.own = digest
        return self.theirs in (None, digest)


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=4)])
def test_ranks_that_found_different_weights_are_refused_with_an_adapter_too(
    tiny_model: Callable[..., Any], tmp_path: Path, lora: LoRAConfig | None
) -> None:
    config = TrainWorkerConfig(lora=lora)
    first = OfTwo()
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    Learner(config, tmp_path, total_steps=1, threads=1, peers=first)
    Learner(config, tmp_path, total_steps=1, threads=1, peers=OfTwo(first.own))
    with torch.no_grad():
        model.get_input_embeddings().weight[5] += 1.0
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="the ranks found different weights there"):
        Learner(config, tmp_path, total_steps=1, threads=1, peers=OfTwo(first.own))


def test_an_adapter_of_another_rank_is_refused(model_dir: Path, tmp_path: Path) -> None:
    asyncio.run(build(model_dir).save(tmp_path))
    with pytest.raises(CheckpointError, match="are missing or differ"):
        asyncio.run(build(model_dir, lora=LoRAConfig(rank=2)).load(tmp_path))
    with pytest.raises(CheckpointError, match="are missing or differ"):
        asyncio.run(TrainWorkerConfig().build(model_dir, total_steps=1).load(tmp_path))


@pytest.mark.parametrize("fused", [True, False])
def test_the_export_is_a_whole_model_and_an_adapter_that_peft_loads(
    model_dir: Path, batch: TrainBatch, tmp_path: Path, fused: bool
) -> None:
    worker = build(model_dir, fused=fused)
    train(worker, batch, steps=3)
    asyncio.run(worker.save_hf(tmp_path / "hf"))
    trained = scores(worker, batch)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    np.testing.assert_allclose(plain_scores(whole, batch), trained, atol=2e-5)
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    assert np.abs(plain_scores(base, batch) - trained).max() > 1e-2
    import peft  # it takes seconds, and every test process would import it to know its tests

    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "hf" / "adapter")
    np.testing.assert_allclose(plain_scores(adapted, batch), trained, atol=2e-5)


def test_the_export_of_a_snapshot_has_the_adapter_as_it_was(model_dir: Path, batch: TrainBatch, tmp_path: Path) -> None:
    worker = build(model_dir)
    train(worker, batch, steps=3)
    asyncio.run(worker.save_hf(tmp_path / "then"))
    snapshot = asyncio.run(worker.snapshot(optimizer=True, export=True))
    train(worker, batch, steps=1)
    asyncio.run(snapshot.save_hf(tmp_path / "later"))
    files = [path.relative_to(tmp_path / "then") for path in (tmp_path / "then").rglob("*.safetensors")]
    assert len(files) == 2
    for file in files:
        assert (tmp_path / "later" / file).read_bytes() == (tmp_path / "then" / file).read_bytes(), file


@pytest.mark.parametrize("fused", [True, False])
def test_what_goes_to_engines_is_the_model_with_the_adapter_in_it(
    model_dir: Path, batch: TrainBatch, fused: bool
) -> None:
    worker = build(model_dir, fused=fused)
    train(worker, batch, steps=3)
    sent = dict(worker.weights.tensors())
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    assert sent.keys() == load_file(model_dir / "model.safetensors").keys()
    model.load_state_dict(sent, strict=False)
    np.testing.assert_allclose(plain_scores(model, batch), scores(worker, batch), atol=2e-5)


def test_two_workers_begin_alike_whatever_random_numbers_were_drawn(model_dir: Path) -> None:
    first = dict(build(model_dir, lora=LoRAConfig(rank=4, sync="adapter")).weights.tensors())
    torch.rand(17)
    state = torch.get_rng_state()
    second = dict(build(model_dir, lora=LoRAConfig(rank=4, sync="adapter")).weights.tensors())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(tensor.any() for name, tensor in first.items() if name.endswith("lora_A"))
    assert not any(tensor.any() for name, tensor in first.items() if name.endswith("lora_B"))


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        (["nothing"], "not found in the base model"),
        (r".*\.attention\..*", "not found in the base model"),
        (["embed_tokens"], "binds no linear layer"),
        (["q_proj", "lm_head"], "cannot be adapted"),
    ],
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
def test_an_adapter_that_binds_nothing_or_the_wrong_thing_is_refused(
    model_dir: Path, targets: Any, problem: str
) -> None:
    with pytest.raises(ModelError, match=problem) as caught:
        build(model_dir, lora=LoRAConfig(target_modules=targets))
    assert "q_proj" in str(caught.value)


def test_some_layers_can_be_named(model_dir: Path, batch: TrainBatch) -> None:
    worker = build(model_dir, lora=LoRAConfig(rank=4, target_modules=["q_proj", "v_proj"]))
    assert {name.rsplit(".", 1)[-1] for name in adapters_of(worker.model)} == {"q_proj", "v_proj"}
    before = scores(worker, batch)
    assert train(worker, batch, steps=2)["fused"] == 1
    assert np.abs(scores(worker, batch) - before).max() > 1e-3


def test_a_checkpoint_of_the_recipe_has_under_50_megabytes_and_a_tenth_of_the_optimiser() -> None:
    shape = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        smollm2 = LlamaForCausalLM(shape)
        whole = sum(parameter.numel() for parameter in smollm2.parameters())
        attach(smollm2, load_config("lora-smollm2", []).train.lora, "smollm2-135m")
    trained = sum(tensor.numel() for _, tensor in own_tensors(smollm2))
    assert whole == 134_515_008
    # float32: the adapter, and AdamW's two numbers for each of its own.
    assert 3 * 4 * trained < 50e6
    assert trained < whole / 10
