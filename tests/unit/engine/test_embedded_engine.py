"""The embedded engine: the contract of all engines, and what it promises beyond."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_contract import (
    CONTRACT,
    LONG,
    PROMPTS,
    CharacterTokenizer,
    Subject,
    Tensors,
    ask,
    assert_logprobs,
    has_made,
    ids_of,
    logprobs_are_those_of_the_trainers_own_forward,
    logprobs_of,
    running,
)
from engine_models import make_subject
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from penstock.engine import EmbeddedEngineConfig
from penstock.engine.torch_engine.build import load_model
from penstock.engine.torch_engine.cache import Prefix, SlotCache, round_up
from penstock.engine.torch_engine.forward import FusedModel
from penstock.errors import ConfigError, InfrastructureFailure, ModelError, RunError
from penstock.ports import Completion, Engine
from penstock.rollout import FailureReason, FinishReason, pack_ids

Check = Callable[[Subject], Awaitable[None]]
FORWARD_MATTERS = [check for check in CONTRACT if re.search("logprob|score|continue|goes_on|weights", check.__name__)]


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_the_contract_holds_for_the_fused_forward(check: Check, subjects: dict[str, Subject]) -> None:
    asyncio.run(check(subjects["llama"]))


@pytest.mark.parametrize("check", FORWARD_MATTERS, ids=lambda check: check.__name__)
def test_the_contract_holds_for_packed_matrices(
    check: Check, model_dirs: dict[str, Path], references: dict[str, Any]
) -> None:
    """New weights too: what is multiplied with afterwards is packed anew."""
    asyncio.run(check(make_subject(model_dirs["llama-scaled"], references["llama-scaled"], packed=True)))


@pytest.mark.parametrize(
    "check",
    # What a pause does is the scheduler's: with the slowest forward it is tried in the long tier.
    [
        pytest.param(check, marks=pytest.mark.long_tier if "goes_on" in check.__name__ else ())
        for check in FORWARD_MATTERS
    ],
    ids=[check.__name__ for check in FORWARD_MATTERS],
)
def test_the_contract_holds_for_a_models_own_forward(check: Check, subjects: dict[str, Subject]) -> None:
    asyncio.run(check(subjects["gpt2"]))


@pytest.mark.parametrize("kind", ["llama-scaled", "qwen2", "qwen3"])
def test_logprobs_are_the_trainers_for_every_family(kind: str, subjects: dict[str, Subject]) -> None:
    asyncio.run(logprobs_are_those_of_the_trainers_own_forward(subjects[kind]))


def build(model_dir: Path, *, deterministic: bool = False, stop_ids: Any = (), **fields: Any) -> Any:
    config = EmbeddedEngineConfig(**{"max_running": 6, "prefill_chunk_tokens": 32, "device": "cpu", **fields})
    tokenizer = CharacterTokenizer(stop_ids=frozenset(stop_ids))
    return config.build(str(model_dir), tokenizer, deterministic=deterministic, threads=1)


def play(engine: Engine, *requests: Any) -> list[Completion]:
    async def run() -> list[Completion]:
        async with asyncio.timeout(60):
            try:
                return await asyncio.gather(*(engine.generate(request) for request in requests))
            finally:
                await engine.close()

    return asyncio.run(run())


def requests(count: int = 12, **params: Any) -> list[Any]:
    lengths = [3, 40, 1, 70, 9, 130, 33, 65]
    return [
        ask(f"{i}", [(7 * i + j) % 96 for j in range(lengths[i % 8])], seed=i, **{"max_tokens": 10 + 9 * i, **params})
        for i in range(count)
    ]


@pytest.mark.parametrize(("kind", "deterministic"), [("llama", False), ("llama", True), ("gpt2", False)])
def test_auto_is_what_was_faster_for_the_fused_forward_of_a_run_that_need_not_be_deterministic(
    kind: str, deterministic: bool, model_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.models.arithmetic.try_out", lambda work: {"float32": 2.0, "bfloat16": 1.0})
    config = EmbeddedEngineConfig(dtype="auto")
    model, _ = load_model(config, str(model_dirs[kind]), deterministic=deterministic)
    assert model.dtype == (torch.bfloat16 if kind == "llama" and not deterministic else torch.float32)


@pytest.mark.parametrize("packed", [None, True, False])
def test_auto_is_tried_with_matrices_packed_as_they_were_asked_for(
    packed: bool | None, model_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    monkeypatch.setattr("penstock.models.arithmetic.try_out", lambda work: tried.append(work) or {"float32": 1.0})
    load_model(EmbeddedEngineConfig(dtype="auto", packed=packed), str(model_dirs["llama"]), deterministic=False)
    assert [work.packed for work in tried] == [packed]


@pytest.mark.parametrize("packed", [False, True])
def test_beside_bfloat16_matrices_keys_and_values_are_bfloat16(packed: bool, model_dirs: dict[str, Path]) -> None:
    asked = EmbeddedEngineConfig(dtype="bfloat16", packed=packed)
    exact, _ = load_model(EmbeddedEngineConfig(), str(model_dirs["qwen2"]), deterministic=False)
    mixed, _ = load_model(asked, str(model_dirs["qwen2"]), deterministic=False)
    # The dtype of a model is what its cache is made of.
    assert mixed.dtype == torch.bfloat16
    ids = torch.arange(40) * 7 % 96
    assert (logits_at(mixed, ids) - logits_at(exact, ids)).abs().mean() < 0.2


def logits_at(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Of the last token, the others computed before."""
    cache = SlotCache(model.cache_layers, model.dtype, model.device)
    cache.reserve(1, len(ids), max_slots=1, max_length=len(ids))
    prefix = Prefix(ids[:-1], model.cache_layers, model.dtype)
    with torch.inference_mode():
        model.prefill([(prefix, len(ids) - 1)])
        cache.place(prefix, [0])
        logits: torch.Tensor = model.decode(ids[-1:], torch.tensor([len(ids) - 1]), cache, round_up(len(ids)))
        return logits.clone()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("fused", [True, False])
def test_bfloat16_weights_are_the_same_from_the_disk_and_from_the_trainer(
    kind: str, fused: bool, model_dirs: dict[str, Path], references: dict[str, Any]
) -> None:
    config = EmbeddedEngineConfig(dtype="bfloat16", fused=fused)
    model, _ = load_model(config, str(model_dirs[kind]), deterministic=False)
    ids = torch.arange(40) * 7 % 96
    first = logits_at(model, ids)
    state = references[kind].state_dict()
    model.load(Tensors({name: weight + 1 for name, weight in state.items()}))
    assert not torch.equal(logits_at(model, ids), first)
    model.load(Tensors(state))
    assert torch.equal(logits_at(model, ids), first)


def test_a_models_own_forward_in_bfloat16_knows_positions_as_exactly_as_the_fused_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None}
    shape = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**shape, **heads)).save_pretrained(tmp_path)
    ids = torch.randint(96, (1500,))

    def logprobs(dtype: str, *, fused: bool) -> torch.Tensor:
        model, _ = load_model(EmbeddedEngineConfig(dtype=dtype, fused=fused), str(tmp_path), deterministic=False)
        return torch.cat([logits_at(model, ids[:length]).log_softmax(-1) for length in (1500, 1300, 1100)])

    exact = logprobs("float32", fused=True)
    fused, own = ((logprobs("bfloat16", fused=fused) - exact).abs().mean() for fused in (True, False))
    assert own < 2 * fused


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ["llama", "llama-scaled", "qwen2", "qwen3"])
def test_the_fused_forward_equals_the_models_own(kind: str, deterministic: bool, model_dirs: dict[str, Path]) -> None:
    ids = torch.randint(96, (3, 90), generator=torch.Generator().manual_seed(5))

    def logits(**fields: bool) -> torch.Tensor:
        """Three rows that begin after 20, 45 and 70 tokens, prefilled in two parts, then given their own tokens."""
        config = EmbeddedEngineConfig(**fields)
        model, _ = load_model(config, str(model_dirs[kind]), deterministic=deterministic)
        cache = SlotCache(model.cache_layers, model.dtype, model.device)
        cache.reserve(3, 96, max_slots=3, max_length=96)
        starts = [20, 45, 70]
        contexts = [row[:start] for row, start in zip(ids, starts, strict=True)]
        prefixes = [Prefix(context, model.cache_layers, model.dtype) for context in contexts]
        for size in (32, 64):
            parts = [(prefix, min(size, len(prefix.ids) - prefix.done)) for prefix in prefixes if not prefix.ready]
            for part in [[part] for part in parts] if deterministic else [parts]:
                model.prefill(part)
        for slot, prefix in enumerate(prefixes):
            cache.place(prefix, [slot])
        steps = []
        for step in range(20):
            positions = torch.tensor(starts) + step
            given = ids[torch.arange(3), positions]
            steps.append(model.decode(given, positions, cache, round_up(70 + step + 1)).clone())
        return torch.stack(steps)

    with torch.inference_mode():
        own, plain, packed = logits(fused=False), logits(packed=False), logits(packed=True)
    torch.testing.assert_close(plain, own, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(packed, own, atol=2e-4, rtol=1e-4)
    assert not deterministic or torch.equal(packed, plain), "a deterministic run packs nothing"


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3", marks=pytest.mark.long_tier), "gpt2"])
def test_a_deterministic_answer_does_not_depend_on_its_neighbours_bit_for_bit(
    kind: str, model_dirs: dict[str, Path]
) -> None:
    together = play(build(model_dirs[kind], deterministic=True), *requests())
    backwards = play(build(model_dirs[kind], deterministic=True), *requests()[::-1])[::-1]
    alone = [play(build(model_dirs[kind], deterministic=True), request)[0] for request in requests()[::4]]
    assert together == backwards
    assert together[::4] == alone


def test_a_deterministic_answer_is_the_same_in_every_slot(model_dirs: dict[str, Path]) -> None:
    same = [ask(f"{i}", PROMPTS[2], seed=3, max_tokens=40) for i in range(6)]
    completions = play(build(model_dirs["llama"], deterministic=True), *same, *requests(4))
    assert len({completion.logprobs for completion in completions[:6]}) == 1


def test_deterministic_logprobs_are_the_trainers_too(subjects: dict[str, Subject], model_dirs: dict[str, Path]) -> None:
    asked = requests(6)
    for request, completion in zip(asked, play(build(model_dirs["qwen3"], deterministic=True), *asked), strict=True):
        prompt = np.frombuffer(request.prompt_ids, dtype=np.int32).tolist()
        assert_logprobs(subjects["qwen3"], prompt, completion, 1.0)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, ...]]:
    """How many tokens the fused forward computes of each prompt, but its last one, which is decoded."""
    counts: Counter[tuple[int, ...]] = Counter()
    prefill = FusedModel.prefill

    def counted(model: FusedModel, parts: list[tuple[Prefix, int]]) -> None:
        for prefix, count in parts:
            counts[tuple(prefix.ids.tolist())] += count
        prefill(model, parts)

    monkeypatch.setattr(FusedModel, "prefill", counted)
    return counts


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_groups_prompt_is_computed_once(
    deterministic: bool, model_dirs: dict[str, Path], computed: Counter[tuple[int, ...]]
) -> None:
    engine = build(model_dirs["llama"], deterministic=deterministic)
    group = [ask(f"{i}", PROMPTS[3], seed=i, max_tokens=5 + 3 * i) for i in range(16)]
    completions = play(engine, *group)
    beginning = tuple(PROMPTS[3][:-1])
    assert computed == {beginning: len(beginning)}
    assert len({completion.ids for completion in completions}) == 16


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_answers_to_prompts_that_begin_alike_have_the_logprobs_of_each_alone(
    kind: str, subjects: dict[str, Subject]
) -> None:
    prompts = [[*(PROMPTS[3] * 3), 5 + number, 9] for number in range(4)]
    asked = [ask(f"{number}", prompt, seed=number, max_tokens=8) for number, prompt in enumerate(prompts)]
    for prompt, completion in zip(prompts, play(subjects[kind].make(), *asked), strict=True):
        assert_logprobs(subjects[kind], prompt, completion, 1.0)


def test_a_sibling_that_comes_later_copies_a_running_one(
    subjects: dict[str, Subject], computed: Counter[tuple[int, ...]]
) -> None:
    beginning, other = tuple(PROMPTS[3][:-1]), (90, 91, 92)

    async def run() -> None:
        async with running(subjects["llama"]) as engine:
            first = asyncio.create_task(engine.generate(ask("first", PROMPTS[3], max_tokens=LONG)))
            await has_made(engine, 2)
            # The prompt that was computed last is kept; it must not be the sibling's.
            await engine.generate(ask("other", [*other, 93], max_tokens=1))
            second = await engine.generate(ask("second", PROMPTS[3], seed=9, max_tokens=20))
            assert computed == {beginning: len(beginning), other: len(other)}
            assert_logprobs(subjects["llama"], PROMPTS[3], second, 1.0)
            first.cancel()

    asyncio.run(run())


def test_a_prompt_computed_under_old_weights_is_not_reused_after_a_load(
    subjects: dict[str, Subject], references: dict[str, Any]
) -> None:
    subject = subjects["llama"]

    async def run() -> None:
        async with running(subject) as engine:
            old = asyncio.create_task(engine.generate(ask("old", PROMPTS[3], max_tokens=LONG)))
            await has_made(engine, 2)
            await engine.load_weights(subject.other_weights, 1)
            late = await engine.generate(ask("late", PROMPTS[3], seed=2, max_tokens=20))
            old.cancel()
            await engine.load_weights(Tensors(references["llama"].state_dict()), 2)
            again = await engine.generate(ask("again", PROMPTS[3], seed=2, max_tokens=20))
            await engine.load_weights(subject.other_weights, 3)
            clean = await engine.generate(ask("clean", PROMPTS[3], seed=2, max_tokens=20))
            assert late.ids == clean.ids
            assert again.ids != clean.ids
            np.testing.assert_allclose(logprobs_of(late), logprobs_of(clean), atol=1e-5)

    asyncio.run(run())


def test_loaded_weights_give_exactly_the_answers_of_a_model_that_has_them(
    tmp_path: Path, subjects: dict[str, Subject], model_dirs: dict[str, Path], references: dict[str, Any]
) -> None:
    for kind in ("llama-scaled", "qwen2", "qwen3"):
        other = dict(subjects[kind].other_weights.state)
        if references[kind].config.tie_word_embeddings:
            other["lm_head.weight"] = other["model.embed_tokens.weight"]
        changed = type(references[kind])(references[kind].config)
        changed.load_state_dict(other)
        changed.save_pretrained(tmp_path / kind)
        expected = play(build(tmp_path / kind, deterministic=True), *requests(6))

        async def run(engine: Any, weights: Tensors) -> list[Completion]:
            await engine.load_weights(weights, 0)
            return await asyncio.gather(*(engine.generate(request) for request in requests(6)))

        engine = build(model_dirs[kind], deterministic=True)
        assert asyncio.run(run(engine, Tensors(other))) == expected
        asyncio.run(engine.close())


def test_the_tokenizers_end_of_text_ends_an_answer(model_dirs: dict[str, Path]) -> None:
    whole = ids_of(play(build(model_dirs["llama"]), ask("a", seed=1, max_tokens=40))[0])
    cut = play(build(model_dirs["llama"], stop_ids={whole[9], 4000}), ask("a", seed=1, max_tokens=40))[0]
    assert ids_of(cut) == whole[: whole.index(whole[9]) + 1]
    assert cut.finish_reason is FinishReason.STOP


def test_bfloat16_answers_have_finite_logprobs_near_the_trainers(
    subjects: dict[str, Subject], model_dirs: dict[str, Path]
) -> None:
    engine = build(model_dirs["llama"], dtype="bfloat16")
    completion = play(engine, ask("a", PROMPTS[2], max_tokens=20))[0]
    answer = ids_of(completion)
    table = subjects["llama"].reference([*PROMPTS[2], *answer], 1.0)[len(PROMPTS[2]) - 1 : -1]
    assert np.abs(logprobs_of(completion) - table[np.arange(20), answer]).mean() < 0.2


def test_an_engine_whose_thread_dies_tells_everyone_why(model_dirs: dict[str, Path]) -> None:
    class Bomb(CharacterTokenizer):
        def decode(self, ids: Any) -> str:
            raise MemoryError("no room for text")

    async def run() -> None:
        config = EmbeddedEngineConfig(max_running=2)
        engine = config.build(str(model_dirs["llama"]), Bomb(), threads=1)
        asked = [ask("running", max_tokens=LONG), ask("boom", stop=("x",)), ask("waiting"), ask("waiting too")]
        outcomes = await asyncio.gather(*(engine.generate(request) for request in asked), return_exceptions=True)
        assert all(isinstance(outcome, InfrastructureFailure) for outcome in outcomes)
        for call in (engine.check_health(), engine.generate(ask("late")), engine.model_step()):
            with pytest.raises(InfrastructureFailure, match="no room for text") as failure:
                await call
            assert isinstance(failure.value.__cause__, MemoryError)
            assert failure.value.reason is FailureReason.ENGINE_DIED
        await engine.close()

    asyncio.run(run())


def test_weights_that_are_not_numbers_fail_the_requests_and_not_the_engine(
    subjects: dict[str, Subject], references: dict[str, Any]
) -> None:
    good = references["llama"].state_dict()
    bad = {name: torch.full_like(weight, torch.nan) for name, weight in good.items()}

    async def run() -> None:
        async with running(subjects["llama"]) as engine:
            await engine.load_weights(Tensors(bad), 1)
            with pytest.raises(InfrastructureFailure, match="not finite"):
                await engine.generate(ask("a"))
            await engine.load_weights(Tensors(good), 2)
            assert (await engine.generate(ask("b"))).finish_reason is FinishReason.LENGTH

    asyncio.run(run())


def test_a_source_that_breaks_while_it_is_read_leaves_the_old_weights(subjects: dict[str, Subject]) -> None:
    class Broken:
        def tensors(self) -> Any:
            yield from list(subjects["llama"].other_weights.state.items())[:3]
            raise OSError("the pipe broke")

    async def run() -> None:
        async with running(subjects["llama"]) as engine:
            before = await engine.generate(ask("a"))
            with pytest.raises(RunError, match="the pipe broke"):
                await engine.load_weights(Broken(), 1)
            assert await engine.generate(ask("a")) == before

    asyncio.run(run())


def test_a_frozen_answer_is_the_uninterrupted_one_bit_for_bit_when_deterministic(model_dirs: dict[str, Path]) -> None:
    kept = [ask(f"{i}", PROMPTS[i], seed=i, max_tokens=90, on_pause="keep") for i in range(4)]
    served = [ask(f"served {i}", PROMPTS[1], seed=i, max_tokens=20, on_pause="serve") for i in range(8)]
    expected = play(build(model_dirs["llama"], deterministic=True), *kept, *served)

    async def interrupted() -> list[Completion]:
        engine = build(model_dirs["llama"], deterministic=True)
        try:
            tasks = [asyncio.create_task(engine.generate(request)) for request in kept]
            await has_made(engine, 40)
            await engine.pause_generation()
            between = await asyncio.gather(*(engine.generate(request) for request in served))
            assert not any(task.done() for task in tasks)
            await engine.continue_generation()
            return [*await asyncio.gather(*tasks), *between]
        finally:
            await engine.close()

    assert asyncio.run(interrupted()) == expected


def test_scores_are_all_of_one_set_of_weights(subjects: dict[str, Subject]) -> None:
    subject = subjects["llama"]
    ids = pack_ids([7, 40, 3, 9] * 400)

    async def run() -> None:
        async with running(subject) as engine:
            old = await engine.score(ids)
            scoring = asyncio.create_task(engine.score(ids))
            while not (await engine.stats()).waiting and not scoring.done():  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0)
            await engine.load_weights(subject.other_weights, 1)
            torn, new = await scoring, await engine.score(ids)
            assert new != old
            assert torn in (old, new)

    asyncio.run(run())


def test_a_cancelled_score_holds_nobody_up(subjects: dict[str, Subject]) -> None:
    async def run() -> None:
        async with running(subjects["llama"]) as engine:
            scoring = asyncio.create_task(engine.score(pack_ids([5] * 2000)))
            await asyncio.sleep(0)
            scoring.cancel()
            await asyncio.wait([scoring])
            await engine.check_health()
            stats = await engine.stats()
            assert (stats.running, stats.waiting) == (0, 0)

    asyncio.run(run())


def test_an_unusable_configuration_is_refused(tmp_path: Path, model_dirs: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="multiple of 32"):
        build(model_dirs["llama"], prefill_chunk_tokens=33)
    with pytest.raises(ModelError, match="max_context is 5000"):
        build(model_dirs["llama"], max_context=5000)
    with pytest.raises(ModelError, match="cannot be loaded"):
        build(tmp_path)


def test_models_it_cannot_serve_rightly_are_refused(tmp_path: Path) -> None:
    small = {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    gemma = Gemma2Config(**small, head_dim=12, num_key_value_heads=2, intermediate_size=64, pad_token_id=None)
    Gemma2ForCausalLM(gemma).save_pretrained(tmp_path / "gemma2")
    with pytest.raises(ModelError, match="softcap"):
        build(tmp_path / "gemma2", deterministic=True)
    mamba = MambaConfig(vocab_size=96, hidden_size=16, state_size=4, num_hidden_layers=2)
    MambaForCausalLM(mamba).save_pretrained(tmp_path / "mamba")
    with pytest.raises(ModelError, match="keeps more than keys and values"):
        build(tmp_path / "mamba")


def test_importing_the_configuration_imports_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, penstock.engine; assert not {'torch', 'transformers', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
